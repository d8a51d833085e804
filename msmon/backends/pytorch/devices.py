"""Differences between devices, and nothing else: how numbers come to the host without stopping the training thread.

``torch.cuda`` and, of torch_npu, ``torch.npu`` have the same names for the same things. Nothing is imported here: who
trains on a device has imported what it needs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

DeviceT = TypeVar("DeviceT")

_FLOAT64 = frozenset({"cpu", "cuda"})

_PINNED = frozenset({"cuda", "npu"})
"""Devices with pinned host memory and events: one asynchronous copy, and the writer thread waits for its event."""


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it at a bearable speed, else float32."""
    return torch.float64 if device.type in _FLOAT64 else torch.float32


def capturing() -> bool:
    """Whether a graph of a device is being captured: what is launched then runs at every replay, and nothing may be copied."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return True
    npu: Any = sys.modules.get("torch.npu")
    return (
        npu is not None
        and npu.is_initialized()
        and hasattr(npu, "is_current_stream_capturing")  # older ones of torch_npu cannot
        and npu.is_current_stream_capturing()
    )


def graph_makers() -> list[Any]:
    """Modules of torch with a ``make_graphed_callables``."""
    npu = sys.modules.get("torch.npu")
    return [torch.cuda, npu] if hasattr(npu, "make_graphed_callables") else [torch.cuda]


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the one that kernels of Triton are launched on."""
    manager: AbstractContextManager[Any] = (
        _runtime(device).device(device) if device.type in _PINNED else torch.cuda.device(-1)
    )
    return manager


def send(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device; nothing waits for it."""
    if device.type in _PINNED:
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


class Arriving:
    """Numbers on their way to the host, in one packed copy a device.

    Args:
        parts: Tensors whose rows together are the table, ``[n_i, n_statistics]`` each or 1-d, in order.
        width: ``n_statistics``; 0 for a 1-d result.
    """

    def __init__(self, parts: Sequence[Tensor], width: int) -> None:
        self._width = width
        by_device: dict[torch.device, list[Tensor]] = {}
        self._places: list[tuple[torch.device, int]] = []  # of each part: its device, and how many rows it has
        for part in parts:
            by_device.setdefault(part.device, []).append(part)
            self._places.append((part.device, len(part)))
        self._copies = {device: _start_copy(packed) for device, packed in by_device.items()}

    def ready(self) -> bool:
        """Whether the numbers are here, without waiting for them."""
        return all(event is None or bool(event.query()) for _, event in self._copies.values())

    def wait(self) -> NDArray[np.float64]:
        """Block until the numbers are here. Called on the writer thread only."""
        if not self._copies:
            return np.empty((0, self._width) if self._width else 0)
        arrived = {device: _finish_copy(device, *copy) for device, copy in self._copies.items()}
        return in_order(arrived, self._places)


def in_order(
    arrived: Mapping[DeviceT, NDArray[np.float64]], places: Sequence[tuple[DeviceT, int]]
) -> NDArray[np.float64]:
    """Put the rows of several devices back into one order.

    Args:
        arrived: The rows of each device, in order.
        places: Of each run of rows: its device, and how many rows it has.
    """
    if len(arrived) == 1:
        return next(iter(arrived.values()))
    taken = dict.fromkeys(arrived, 0)
    parts = []
    for device, count in places:
        parts.append(arrived[device][taken[device] : taken[device] + count])
        taken[device] += count
    return np.concatenate(parts)


@torch.no_grad()
def _start_copy(parts: list[Tensor]) -> tuple[Tensor, Any]:
    """The packed parts, or their copy on the host and the event that says when it is complete."""
    packed = parts[0] if len(parts) == 1 else torch.cat(parts)
    if packed.device.type not in _PINNED:
        return packed, None
    runtime = _runtime(packed.device)
    stream = runtime.current_stream(packed.device)
    for part in parts:  # gradients of a backward pass may come from another stream
        part.record_stream(stream)
    host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
    host.copy_(packed, non_blocking=True)
    event = runtime.Event(blocking=True)
    event.record(stream)
    return host, event


def _finish_copy(device: torch.device, tensor: Tensor, event: Any) -> NDArray[np.float64]:  # noqa: ANN401 - of CUDA or NPU
    if event is not None:
        if device.type == "npu":  # a thread has no device there until it is given one
            _runtime(device).set_device(device)
        event.synchronize()
    array: NDArray[np.float64] = tensor.cpu().double().numpy()
    return array


def _runtime(device: torch.device) -> Any:  # noqa: ANN401 - torch.cuda or torch.npu
    return getattr(torch, device.type)
