"""Tensors of which each rank has a part: what is here, and where in the whole it lies."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``. A process that has not imported those has none."""
    module = sys.modules.get("torch.distributed.tensor") or sys.modules.get("torch.distributed._tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def part_here(tensor: Tensor | None) -> Tensor | None:
    """What this rank has of a tensor: all of a plain one, ``None`` of one whose parts are all elsewhere.

    Reading a ``DTensor``'s own part communicates nothing and makes no node in the graph.
    """
    if tensor is None or not is_distributed(tensor):
        return tensor
    part: Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # noqa: SLF001 - to_local() is differentiable, and waits
    return part if part.numel() or not tensor.numel() else None


def place_of(tensor: Tensor) -> dict[str, Any]:
    """For ``run.json``: shapes of the part and the whole, and where the part begins; empty for a plain tensor."""
    if not is_distributed(tensor):
        return {}
    whole: Any = tensor
    found = {
        "shape": list(whole._local_tensor.shape),  # noqa: SLF001 - as above
        "whole_shape": list(whole.shape),
        "placements": [str(placement) for placement in whole.placements],
    }
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 - by version

        _, offset = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
    except (ImportError, NotImplementedError):  # before torch 2.5, or strided shards: the parts are not located
        return found
    return {**found, "offset": list(offset)}
