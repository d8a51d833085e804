"""Weights before and after the optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msmon.backends.pytorch.recorder import StepRecorder
    from msmon.backends.pytorch.taps.reduction import Reduction
    from msmon.backends.pytorch.watched import WatchedParameter

BEFORE = "param_origin"
AFTER = "param_updated"


class WeightTap:
    """Reads parameters where the step leaves them."""

    part = "recording of weights"

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction

    def read(self, recorder: StepRecorder, kind: str, parameters: Sequence[WatchedParameter]) -> None:
        """Add a row a parameter, of kind :data:`BEFORE` or :data:`AFTER`."""
        self._reduction.add(recorder, kind, [(watched, watched.parameter) for watched in parameters])
