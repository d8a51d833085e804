"""Counts elements by bin on their own device, without waiting for it. Shape suffix: N elements."""
# ruff: noqa: N806 - the suffix

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from msmon.backends.pytorch.devices import accumulation_dtype, send
from msmon.backends.pytorch.kernels.layouts import flat_pieces
from msmon.stats.histogram import BINS, EDGES

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 1 << 22
"""Elements whose bins exist at once, 8 bytes each."""

_LANES = 64
"""Rows of counters on an accelerator: elements side by side count in different ones, and do not wait for each other."""


class Histogram:
    """The bins of :mod:`msmon.stats.histogram`, with their edges on every device that was seen."""

    def __init__(self) -> None:
        self._edges: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def counts(self, tensor: Tensor) -> Tensor:
        """How many elements each bin holds.

        Args:
            tensor: Real floating-point numbers, dense.

        Returns:
            ``[len(BINS)]``, in float64 where the device has it.
        """
        wide = accumulation_dtype(tensor.device)
        lanes = 1 if tensor.device.type == "cpu" else _LANES
        table = torch.zeros(lanes * len(BINS), dtype=wide, device=tensor.device)
        one = torch.ones(1, dtype=wide, device=tensor.device)
        edges = self._edges_on(tensor)
        for piece_N in flat_pieces(tensor, _AT_ONCE):
            piece_N = piece_N.contiguous().to(edges.dtype)  # noqa: PLW2901 - as bucketize wants it
            places_N = torch.bucketize(piece_N, edges).masked_fill_(piece_N.isnan(), len(BINS) - 1)
            if lanes > 1:
                places_N += torch.arange(len(places_N), device=tensor.device).remainder_(lanes).mul_(len(BINS))
            table.scatter_add_(0, places_N, one.expand(len(places_N)))
        return table.view(lanes, -1).sum(0)

    def _edges_on(self, tensor: Tensor) -> Tensor:
        key = tensor.device, torch.float64 if tensor.dtype == torch.float64 else torch.float32
        if key not in self._edges:
            self._edges[key] = send(torch.tensor(EDGES, dtype=key[1], device="cpu"), tensor.device)
        return self._edges[key]
