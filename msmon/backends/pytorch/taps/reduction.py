"""Shared by all taps: reduce named tensors, and leave out those without elements to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msmon import log
from msmon.backends.base import UnsupportedTensorError
from msmon.backends.pytorch.recorder import describe, parts_by_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from msmon.backends.base import Kernel
    from msmon.backends.pytorch.recorder import StepRecorder
    from msmon.backends.pytorch.watched import WatchedParameter
    from msmon.record.table import Row
    from msmon.stats.definitions import Statistic


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

    def change(self, statistics: Sequence[Statistic], eps: float) -> None:
        """Compute other statistics from now on."""
        self._statistics = tuple(statistics)
        self._eps = eps

    def one(self, row: Row, tensor: Tensor, divisor: Tensor | None = None) -> Tensor | None:
        """``[1, n_statistics]``, or ``None`` for a tensor without elements to read, which is said once."""
        try:
            return self._kernel.reduce([tensor], self._statistics, self._eps, divisor=divisor)
        except UnsupportedTensorError as error:
            self._leave_out(row, error)
            return None

    def add(
        self,
        recorder: StepRecorder,
        kind: str,
        named: Sequence[tuple[WatchedParameter, Tensor]],
        divisor: Tensor | None = None,
    ) -> None:
        """Reduce tensors of one kind into the recorder, device by device, in their order."""
        for positions in parts_by_device([tensor for _, tensor in named]).values():
            tensors = [named[position][1] for position in positions]
            rows = [
                describe(kind, watched.name, watched.stage, tensor)
                for watched, tensor in map(named.__getitem__, positions)
            ]
            on_device = divisor.to(tensors[0].device) if divisor is not None else None
            try:
                recorder.add(rows, [self._kernel.reduce(tensors, self._statistics, self._eps, divisor=on_device)])
            except UnsupportedTensorError:
                for row, tensor in zip(rows, tensors, strict=True):
                    numbers = self.one(row, tensor, on_device)
                    if numbers is not None:
                        recorder.add([row], [numbers])

    @staticmethod
    def _leave_out(row: Row, reason: object) -> None:
        which = reason if row.micro_step is not None else row.name  # a model has many activations, one line says it
        log.say(f"{row.name} has no {row.kind}: {reason}", once=f"unsupported:{row.kind}:{which}")
