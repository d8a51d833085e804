"""Tensors of which each rank has a part: what is here, and where in the whole it lies."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from msmon import log

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_DEPTH = 8
_MOST = 1024
"""Containers inside each other, and tensors of one parameter, that are looked at."""


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


def tensors_inside(state: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors at any depth of an optimizer's state, each with its path, such as ``block_0.factors[1]``.

    Inside are mappings, lists, tuples and dataclasses. Containers that contain themselves are entered once, and not more than a bounded number of tensors is given.
    """
    seen: set[int] = set()
    left = _MOST
    stack: list[tuple[str, Any, int]] = [("", state, 0)]
    while stack and left:
        path, value, depth = stack.pop()
        if isinstance(value, torch.Tensor):
            left -= 1
            yield path, value
        elif depth < _DEPTH and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Mapping):
                inside = [(f"{path}.{key}" if path else str(key), part, depth + 1) for key, part in value.items()]
            elif dataclasses.is_dataclass(value) and not isinstance(value, type):
                inside = [(f"{path}.{name}", part, depth + 1) for name, part in vars(value).items()]
            elif isinstance(value, (list, tuple)):
                inside = [(f"{path}[{number}]", part, depth + 1) for number, part in enumerate(value)]
            else:
                continue
            stack += reversed(inside)
    if any(isinstance(value, torch.Tensor) for _, value, _ in stack):
        log.say(f"more than {_MOST} tensors in the state of one parameter: the first are recorded", once="state:many")
