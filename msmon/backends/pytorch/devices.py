"""Differences between devices, and nothing else: how numbers come to the host without stopping the training thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

DeviceT = TypeVar("DeviceT")

_FLOAT64 = frozenset({"cpu", "cuda"})

_PINNED = frozenset({"cuda"})
"""Devices with pinned host memory and events: one asynchronous copy, and the writer thread waits for its event."""


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it at a bearable speed, else float32."""
    return torch.float64 if device.type in _FLOAT64 else torch.float32


def capturing() -> bool:
    """Whether a CUDA graph is being captured: what is launched then runs at every replay, and nothing may be copied."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


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
        return all(
            event is None or bool(event.query())  # type: ignore[no-untyped-call]
            for _, event in self._copies.values()
        )

    def wait(self) -> NDArray[np.float64]:
        """Block until the numbers are here. Called on the writer thread only."""
        if not self._copies:
            return np.empty((0, self._width) if self._width else 0)
        arrived = {device: _finish_copy(*copy) for device, copy in self._copies.items()}
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
def _start_copy(parts: list[Tensor]) -> tuple[Tensor, torch.cuda.Event | None]:
    packed = parts[0] if len(parts) == 1 else torch.cat(parts)
    if packed.device.type not in _PINNED:
        return packed, None
    stream = torch.cuda.current_stream(packed.device)
    for part in parts:  # gradients of a backward pass may come from another stream
        part.record_stream(stream)
    host = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
    host.copy_(packed, non_blocking=True)
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return host, event


def _finish_copy(tensor: Tensor, event: torch.cuda.Event | None) -> NDArray[np.float64]:
    if event is not None:
        event.synchronize()
    array: NDArray[np.float64] = tensor.cpu().double().numpy()
    return array
