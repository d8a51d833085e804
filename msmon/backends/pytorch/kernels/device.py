"""The kernel for GPUs in one pass, in Triton: all tensors of one dtype in two launches, and nothing waits for them.

The first launch reads blocks of tensors by their addresses and writes a line for each; the second puts the lines of
each tensor together, in their order. Addresses travel to the device in one copy from pinned memory. What is not read
here (float64, whose squares may overflow; integers, complex numbers, elements apart from each other) goes to another
kernel.
"""
# ruff: noqa: ANN001, ANN201, N803, PLR0917 - Triton's compiler reads annotations, and takes them for constants

from __future__ import annotations

import itertools
from array import array
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from msmon.backends.pytorch.devices import current, send
from msmon.backends.pytorch.kernels.batches import Batch, lies_dense
from msmon.backends.pytorch.kernels.layouts import least_float32_from
from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from msmon.backends.base import Kernel

BLOCK = 1 << 15
"""Elements of a block."""

CHUNK = 1024
"""Elements of a block that are read at a time, and lines of a tensor that are put together at a time."""

_READABLE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_ALL = tuple(Statistic)


class DeviceKernel:
    """See :class:`msmon.backends.base.Kernel`. For devices that Triton compiles for, with float64.

    Args:
        other: For tensors that are not read here.
    """

    def __init__(self, other: Kernel[Tensor]) -> None:
        self._other = other

    @torch.no_grad()
    def reduce(
        self, tensors: Sequence[Tensor], statistics: Sequence[Statistic], eps: float, *, divisor: Tensor | None = None
    ) -> Tensor:
        """See :meth:`msmon.backends.base.Kernel.reduce`."""
        if not tensors or not statistics:
            return self._other.reduce(tensors, statistics, eps, divisor=divisor)
        batches: dict[torch.dtype, Batch] = {}
        rest = []
        for line, tensor in enumerate(tensors):
            if lies_dense(tensor) and tensor.dtype in _READABLE:
                batches.setdefault(tensor.dtype, Batch()).add(line, tensor)
            else:
                rest.append(line)
        parts = []
        if batches:
            device = tensors[next(iter(batches.values())).lines[0]].device
            threshold, scale = _on_device(eps, divisor, device)
            parts = [(batch.lines, _launch(dtype, batch, threshold, scale, device)) for dtype, batch in batches.items()]
        if rest:
            others = self._other.reduce([tensors[line] for line in rest], _ALL, eps, divisor=divisor)
            parts.append((rest, others))
        columns = [_ALL.index(statistic) for statistic in statistics]
        table = parts[0][1] if len(parts) == 1 else _in_order(parts)
        return table if tuple(statistics) == _ALL else torch.stack([table[:, column] for column in columns], dim=1)


def _on_device(eps: float, divisor: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """The smallest float32 that is no zero, and what statistics are divided by; computed where the divisor is."""
    if divisor is None:
        return (
            torch.full((), least_float32_from(eps), dtype=torch.float32, device=device),
            torch.ones((), dtype=torch.float64, device=device),
        )
    scale = divisor.reshape(()).to(torch.float64)
    exact = eps * scale
    nearest = exact.float()
    next_one = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    return torch.where(nearest.double() < exact, next_one, nearest), scale


def _launch(dtype: torch.dtype, batch: Batch, threshold: Tensor, scale: Tensor, device: torch.device) -> Tensor:
    addresses, counts, pieces = batch.blocks(dtype.itemsize, BLOCK)
    blocks, tensors = len(counts), len(batch.lines)
    first_blocks = array("q", itertools.accumulate(pieces, initial=0))
    places = _sent((addresses, counts, batch.counts, first_blocks), device)
    lines = torch.empty((blocks, len(_ALL)), dtype=torch.float64, device=device)
    table = torch.empty((tensors, len(_ALL)), dtype=torch.float64, device=device)
    with current(device):
        reduce_blocks[(blocks,)](places[0], places[1], lines, threshold, DTYPE=_READABLE[dtype], CHUNK=CHUNK)
        combine_blocks[(tensors,)](lines, places[2], places[3], table, scale, CHUNK=CHUNK)
    return table


def _sent(parts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, ...]:
    """Integers on the device after one copy that nothing waits for; each part is aligned as Triton likes it."""
    packed = array("q")
    lengths = []
    for part in parts:
        packed.extend(part)
        packed.extend([0] * (len(part) % 2))
        lengths.append(len(part) + len(part) % 2)
    return torch.split(send(torch.frombuffer(packed, dtype=torch.int64), device), lengths)


def _in_order(parts: list[tuple[list[int], Tensor]]) -> Tensor:
    lines = {number: line for numbers, table in parts for number, line in zip(numbers, table.unbind(), strict=True)}
    return torch.stack([lines[number] for number in range(len(lines))])


@triton.jit
def reduce_blocks(addresses, counts, lines, threshold_at, DTYPE: tl.constexpr, CHUNK: tl.constexpr):
    """A line a block: min, max and sum of squares without NaN, sum, number of zeros, number of NaN."""
    block = tl.program_id(0).to(tl.int64)
    elements = tl.load(addresses + block).to(tl.pointer_type(DTYPE))
    count = tl.load(counts + block).to(tl.int32)
    threshold = tl.load(threshold_at)
    lanes = tl.arange(0, CHUNK)
    low = tl.full((CHUNK,), float("inf"), tl.float32)
    high = tl.full((CHUNK,), float("-inf"), tl.float32)
    squares = tl.zeros((CHUNK,), tl.float64)
    total = tl.zeros((CHUNK,), tl.float64)
    zeros = tl.zeros((CHUNK,), tl.int32)
    nans = tl.zeros((CHUNK,), tl.int32)
    for begin in range(0, count, CHUNK):
        inside = begin + lanes < count
        values = tl.load(elements + begin + lanes, mask=inside, other=0.0).to(tl.float32)
        is_number = values == values  # noqa: PLR0124 - only NaN differs from itself
        low = tl.minimum(low, tl.where(inside & is_number, values, float("inf")))
        high = tl.maximum(high, tl.where(inside & is_number, values, float("-inf")))
        wide = values.to(tl.float64)
        squares += wide * wide
        total += wide
        zeros += (inside & (tl.abs(values) < threshold)).to(tl.int32)
        nans += 1 - is_number.to(tl.int32)
    line = lines + block * 6
    tl.store(line, tl.min(low, axis=0).to(tl.float64))
    tl.store(line + 1, tl.max(high, axis=0).to(tl.float64))
    tl.store(line + 2, tl.sum(squares, axis=0))
    tl.store(line + 3, tl.sum(total, axis=0))
    tl.store(line + 4, tl.sum(zeros, axis=0).to(tl.float64))
    tl.store(line + 5, tl.sum(nans, axis=0).to(tl.float64))


@triton.jit
def combine_blocks(lines, counts, first_blocks, table, scale_at, CHUNK: tl.constexpr):
    """A line a tensor: its statistics, divided."""
    tensor = tl.program_id(0).to(tl.int64)
    first, after = tl.load(first_blocks + tensor), tl.load(first_blocks + tensor + 1)
    lanes = tl.arange(0, CHUNK)
    low = tl.full((CHUNK,), float("inf"), tl.float64)
    high = tl.full((CHUNK,), float("-inf"), tl.float64)
    squares = tl.zeros((CHUNK,), tl.float64)
    total = tl.zeros((CHUNK,), tl.float64)
    zeros = tl.zeros((CHUNK,), tl.float64)
    nans = tl.zeros((CHUNK,), tl.float64)
    for begin in range(first, after, CHUNK):
        inside = begin + lanes < after
        line = lines + (begin + lanes) * 6
        low = tl.minimum(low, tl.load(line, mask=inside, other=float("inf")))
        high = tl.maximum(high, tl.load(line + 1, mask=inside, other=float("-inf")))
        squares += tl.load(line + 2, mask=inside, other=0.0)
        total += tl.load(line + 3, mask=inside, other=0.0)
        zeros += tl.load(line + 4, mask=inside, other=0.0)
        nans += tl.load(line + 5, mask=inside, other=0.0)
    count, scale = tl.load(counts + tensor).to(tl.float64), tl.load(scale_at)
    nan_count = tl.sum(nans, axis=0)
    none = float("nan")
    has_extremes = (nan_count == 0) & (count > 0)
    place = table + tensor * 6
    tl.store(place, tl.where(has_extremes, tl.min(low, axis=0) / scale, none))
    tl.store(place + 1, tl.where(has_extremes, tl.max(high, axis=0) / scale, none))
    tl.store(place + 2, tl.sqrt(tl.sum(squares, axis=0)) / scale)
    tl.store(place + 3, tl.where(count > 0, tl.sum(total, axis=0) / count / scale, none))
    tl.store(place + 4, tl.where(count > 0, tl.sum(zeros, axis=0) / count, none))
    tl.store(place + 5, nan_count)
