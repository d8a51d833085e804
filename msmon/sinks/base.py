"""What a sink is, and the step as a sink sees it: numbers on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from msmon.record.table import Row


@dataclass(frozen=True)
class RecordedStep:
    """A step table whose numbers have arrived.

    Attributes:
        model: Label of the model.
        step: Number of the training step.
        rows: What each line of ``numbers`` is about.
        numbers: ``[len(rows), n_statistics]`` float64.
        micro_steps: Backward passes in the step, ``None`` when nothing counted them.
        skipped: Whether the optimizer step was skipped.
        grad_scale: Loss scale of the step, NaN without one.
        complete: Whether the step came to its end.
    """

    model: str
    step: int
    rows: list[Row]
    numbers: NDArray[np.float64]
    micro_steps: int | None
    skipped: bool
    grad_scale: float
    complete: bool


class Sink(Protocol):
    """Takes recorded steps, one after the other, on the writer thread."""

    def write(self, step: RecordedStep) -> None:
        """Keep a step. When this returns, a kill loses none of its rows.

        Raises:
            OSError: The step could not be kept; what was kept before is unharmed.
        """

    def close(self) -> None:
        """No further step will come."""
