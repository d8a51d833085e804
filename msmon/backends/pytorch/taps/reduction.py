"""Shared by all taps: reduce named tensors, and leave out those without elements to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

from msmon import log
from msmon.backends.base import UnsupportedTensorError
from msmon.backends.pytorch.recorder import describe, parts_by_device
from msmon.runtime.interruption import from_signal_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from msmon.backends.base import Kernel
    from msmon.backends.pytorch.recorder import StepRecorder
    from msmon.backends.pytorch.watched import WatchedParameter
    from msmon.record.table import Row
    from msmon.stats.definitions import Statistic

T = TypeVar("T")

_Named: TypeAlias = "tuple[WatchedParameter, Tensor]"


class Reduction:
    """A kernel with the statistics and the threshold of a run.

    Args:
        kernel: See :class:`msmon.backends.base.Kernel`.
        statistics: In the order of the columns.
        eps: Threshold of ``zeros``.
    """

    def __init__(self, kernel: Kernel[Tensor], statistics: Sequence[Statistic], eps: float) -> None:
        self._kernel = kernel
        self._statistics = tuple(statistics)
        self._eps = eps
        self._unread: set[tuple[str, str]] = set()  # kinds and names of what could not be read when it was last tried

    def change(self, statistics: Sequence[Statistic], eps: float) -> None:
        """Compute other statistics from now on."""
        self._statistics = tuple(statistics)
        self._eps = eps

    def one(self, row: Row, tensor: Tensor, divisor: Tensor | None = None, *, owner: str = "") -> Tensor | None:
        """``[1, n_statistics]``, or ``None`` for a tensor without elements to read, which is said once.

        Args:
            row: What the numbers are about.
            tensor: The tensor.
            divisor: What statistics are divided by.
            owner: What stands before the row's name.
        """
        try:
            return self._kernel.reduce([tensor], self._statistics, self._eps, divisor=divisor)
        except UnsupportedTensorError as error:
            self.leave_out(f"{owner}.{row.name}" if owner else row.name, row.kind, error)
            return None

    def add(
        self,
        recorder: StepRecorder,
        kind: str,
        named: Sequence[_Named],
        divisor: Tensor | None = None,
    ) -> None:
        """Reduce tensors of one kind into the recorder, device by device, in their order.

        A tensor that cannot be read is left out and named once; the others have their rows.
        """
        for positions in parts_by_device([tensor for _, tensor in named]).values():
            together = [named[position] for position in positions]
            on_device = divisor.to(together[0][1].device) if divisor is not None else None
            readable, unread = self._apart(kind, together)
            try:
                if readable:
                    self._add(recorder, kind, readable, on_device)
            except Exception as error:
                if from_signal_handler(error):
                    raise
                failed = self._add_each(recorder, kind, readable, on_device)
                if len(failed) == len(readable) and not isinstance(error, UnsupportedTensorError):
                    raise  # no tensor's fault
                self._leave_out_all(kind, failed)
            self._leave_out_all(kind, self._add_each(recorder, kind, unread, on_device))

    def _apart(self, kind: str, named: list[_Named]) -> tuple[list[_Named], list[_Named]]:
        """Tensors to be reduced together, and those that could not be read the last time, whose company costs the others."""
        if not self._unread:
            return named, []
        found: tuple[list[_Named], list[_Named]] = [], []
        for watched, tensor in named:
            found[(kind, watched.name) in self._unread].append((watched, tensor))
        return found

    def _add(
        self,
        recorder: StepRecorder,
        kind: str,
        named: Sequence[_Named],
        divisor: Tensor | None,
    ) -> None:
        rows = [describe(kind, watched.name, watched.stage, tensor) for watched, tensor in named]
        tensors = [tensor for _, tensor in named]
        recorder.add(rows, [self._kernel.reduce(tensors, self._statistics, self._eps, divisor=divisor)])

    def _add_each(
        self, recorder: StepRecorder, kind: str, named: Sequence[_Named], divisor: Tensor | None
    ) -> dict[str, Exception]:
        """One by one; the names of those that failed, and why."""
        failed: dict[str, Exception] = {}
        for watched, tensor in named:
            try:
                self._add(recorder, kind, [(watched, tensor)], divisor)
                self._unread.discard((kind, watched.name))
            except Exception as error:  # noqa: PERF203 - each on its own, that is what this is for
                if from_signal_handler(error):
                    raise
                failed[watched.name] = error
        return failed

    def _leave_out_all(self, kind: str, failed: Mapping[str, Exception]) -> None:
        for name, error in failed.items():
            self._unread.add((kind, name))
            self.leave_out(name, kind, error)

    def attempt(self, name: str, kind: str, compute: Callable[[], T]) -> T | None:
        """What is computed of one tensor before it is reduced; ``None`` when that fails, and the tensor is left out."""
        try:
            return compute()
        except Exception as error:
            if from_signal_handler(error):
                raise
            self.leave_out(name, kind, error)
            return None

    @staticmethod
    def leave_out(name: str, kind: str, error: Exception) -> None:
        """Say of a tensor that has no row why, once a reason."""
        reason = str(error) if isinstance(error, UnsupportedTensorError) else f"{type(error).__name__}: {error}"
        reason = " ".join(reason.split())[:300]
        text = f"{name} has no {kind}: {reason}; others like it are left out too"
        log.say(text, once=f"unsupported:{kind}:{reason}")
