"""Weights before and after the optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from msmon.backends.base import UnsupportedTensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from msmon.backends.pytorch.adapters.plain import PlainAdapter
    from msmon.backends.pytorch.recorder import StepRecorder
    from msmon.backends.pytorch.taps.reduction import Reduction
    from msmon.backends.pytorch.watched import WatchedParameter

BEFORE = "param_origin"
AFTER = "param_updated"

_CODES = frozenset(
    dtype
    for name in ("uint8", "int8", "int16", "int32", "uint16", "uint32")
    if (dtype := getattr(torch, name, None)) is not None
)


class WeightTap:
    """Reads parameters where the step leaves them."""

    part = "recording of weights"

    def __init__(self, reduction: Reduction, adapter: PlainAdapter) -> None:
        self._reduction = reduction
        self._adapter = adapter

    def read(self, recorder: StepRecorder, kind: str, parameters: Sequence[WatchedParameter]) -> None:
        """Add a row a parameter, of kind :data:`BEFORE` or :data:`AFTER`."""
        named = []
        for watched in parameters:
            weight = self._adapter.weight(watched.parameter)
            if weight is None:
                continue
            packed = _packed(watched.parameter, weight)
            if packed:
                self._reduction.leave_out(watched.name, kind, UnsupportedTensorError(packed))
            else:
                named.append((watched, weight))
        self._reduction.add(recorder, kind, named)


def _packed(parameter: Tensor, weight: Tensor) -> str:
    """Why the elements are codes, whose numbers only a library for quantisation knows; empty when they are numbers.

    Weights of less than 64 bits that are integers are packed (HQQ, compressed-tensors, AQLM). bitsandbytes can keep its
    codes in the bits of a floating-point dtype, with what they mean beside them.
    """
    if weight.dtype in _CODES or getattr(parameter, "quant_state", None) is not None:
        return f"a {type(parameter).__name__} packs its numbers into {weight.dtype}"
    return ""
