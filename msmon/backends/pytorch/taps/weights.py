"""Weights before and after the optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msmon.backends.pytorch.adapters.plain import PlainAdapter
    from msmon.backends.pytorch.recorder import StepRecorder
    from msmon.backends.pytorch.taps.reduction import Reduction
    from msmon.backends.pytorch.watched import WatchedParameter

BEFORE = "param_origin"
AFTER = "param_updated"


class WeightTap:
    """Reads parameters where the step leaves them."""

    part = "recording of weights"

    def __init__(self, reduction: Reduction, adapter: PlainAdapter) -> None:
        self._reduction = reduction
        self._adapter = adapter

    def read(self, recorder: StepRecorder, kind: str, parameters: Sequence[WatchedParameter]) -> None:
        """Add a row a parameter, of kind :data:`BEFORE` or :data:`AFTER`."""
        named = [
            (watched, weight)
            for watched in parameters
            if (weight := self._adapter.weight(watched.parameter)) is not None
        ]
        self._reduction.add(recorder, kind, named)
