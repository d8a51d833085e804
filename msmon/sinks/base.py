"""What a sink is, and the step as a sink sees it: numbers on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from msmon.record.table import Row


@dataclass(frozen=True)
class RecordedStep:
    """A step table whose numbers have arrived.

    Attributes:
        model: Label of the model.
        step: Number of the training step.
        rows: What the numbers are about, in their order.
        numbers: Flat float64; see :meth:`lines`.
        micro_steps: Backward passes in the step, ``None`` when nothing counted them.
        skipped: Whether the optimizer step was skipped.
        grad_scale: Loss scale of the step, NaN without one.
        complete: Whether the step came to its end.
        supplement: Whether these are further rows of a step that was written already.
        first: How many rows of the step were written before.
    """

    model: str
    step: int
    rows: list[Row]
    numbers: NDArray[np.float64]
    micro_steps: int | None
    skipped: bool
    grad_scale: float
    complete: bool
    supplement: bool = False
    first: int = 0

    def lines(self, width: int) -> Iterator[tuple[Row, list[float]]]:
        """Each row with its numbers: those of its ``features``, or of the run's statistics.

        Args:
            width: How many statistics the run has.

        Raises:
            ValueError: There are more or fewer numbers than the rows have.
        """
        numbers = self.numbers.tolist()
        widths = [len(row.features) or width for row in self.rows]
        if sum(widths) != len(numbers):
            raise ValueError(f"{len(numbers)} numbers for rows that have {sum(widths)}")
        start = 0
        for row, own in zip(self.rows, widths, strict=True):
            yield row, numbers[start : start + own]
            start += own


class Sink(Protocol):
    """Takes recorded steps, one after the other, on the writer thread."""

    def write(self, step: RecordedStep) -> None:
        """Keep a step. When this returns, a kill loses none of its rows.

        Raises:
            OSError: The step could not be kept; what was kept before is unharmed.
        """

    def close(self) -> None:
        """No further step will come."""


class SeveralSinks:
    """Each step goes to several sinks.

    Args:
        sinks: In this order.
    """

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def write(self, step: RecordedStep) -> None:
        """Hand a step to every sink, also when one before it fails.

        Raises:
            Exception: The first failure.
        """
        failure: Exception | None = None
        for sink in self._sinks:
            try:
                sink.write(step)
            except Exception as error:  # noqa: BLE001, PERF203 - raised below, when the others have the step
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Close all."""
        for sink in self._sinks:
            sink.close()


class RestoringSink:
    """Before each step, sees to it that the place of the files is still there.

    Args:
        sink: Keeps the rows.
        restore: Makes the place again where it is gone, and returns whether it was.
    """

    def __init__(self, sink: Sink, restore: Callable[[], bool]) -> None:
        self._sink = sink
        self._restore = restore

    def write(self, step: RecordedStep) -> None:
        """Keep a step; where files are gone, in new ones.

        Raises:
            OSError: The place cannot be made again, or the step not be kept.
        """
        self._begin_anew_if_gone()
        try:
            self._sink.write(step)
        except FileNotFoundError:
            if not self._begin_anew_if_gone():  # it went away this very moment
                raise
            self._sink.write(step)

    def _begin_anew_if_gone(self) -> bool:
        gone = self._restore()
        if gone:
            self._sink.close()  # a file that is open is no longer where anybody would look
        return gone

    def close(self) -> None:
        """No further step will come."""
        self._sink.close()
