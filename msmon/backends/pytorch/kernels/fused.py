"""The kernel for tensors in host memory in one pass: a compiled loop that reads many tensors in one call.

What Python does for a tensor is to look up where its elements lie. Large tensors are cut into blocks; several threads
take blocks as they come free, and blocks are put together in their order, so that results do not depend on the number
of threads. A tensor of which the fast loop cannot tell is read again by the precise one. What that cannot read either
(integers, complex numbers, elements apart from each other), and the rare tensor with a NaN or with squares out of range,
goes to another kernel.
"""

from __future__ import annotations

import ctypes
import functools
import os
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from msmon.backends.pytorch.kernels.batches import Batch, lies_dense
from msmon.backends.pytorch.kernels.compiled import NEXT, TOTALS, Loops, constants, readable_here
from msmon.backends.pytorch.kernels.layouts import least_float32_from
from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from msmon.backends.base import Kernel
    from msmon.backends.pytorch.kernels.compiled import Loop

BLOCK = 1 << 16
"""Elements of a block: so many that its line costs nothing, and few enough to share out."""

SHARED = 1 << 17
"""Elements from which threads share the work; for fewer, giving up the GIL does not pay either."""

_TAKE = 1 << 14
"""Elements that a thread takes at a time, at least."""

_ALL = tuple(Statistic)
_MARK = _ALL.index(Statistic.NANS)
"""Where a NaN says that the loop cannot tell the statistics of a tensor; else there is no NaN, and the number is 0."""


class FusedKernel:
    """See :class:`msmon.backends.base.Kernel`. Tensors must be in host memory.

    Args:
        other: For tensors that the loop cannot read.

    Raises:
        ModuleNotFoundError: llvmlite is not installed.
        RuntimeError: Nothing can be compiled for this processor.
    """

    def __init__(self, other: Kernel[Tensor]) -> None:
        self._other = other
        self._readable = {getattr(torch, name): name for name in readable_here()}
        self._loops: dict[torch.dtype, Loops] = {torch.float32: Loops("float32")}
        self._rooms: dict[tuple[torch.dtype, float], list[_Room]] = {}

    def reduce(
        self, tensors: Sequence[Tensor], statistics: Sequence[Statistic], eps: float, *, divisor: Tensor | None = None
    ) -> Tensor:
        """See :meth:`msmon.backends.base.Kernel.reduce`."""
        if len(tensors) == 1 and divisor is None and tuple(statistics) == _ALL:
            small = self._small(tensors[0], eps)
            if small is not None:
                return small
        scale = 1.0 if divisor is None else float(divisor.item())
        batches: dict[torch.dtype, Batch] = {}
        rest = []
        for line, tensor in enumerate(tensors):
            if (
                lies_dense(tensor) and tensor.is_cpu and tensor.dtype in self._readable
            ):  # asked first: of a class of torch
                dtype = tensor.dtype
                batch = batches.get(dtype)
                if batch is None:
                    batch = batches[dtype] = Batch()
                batch.add(line, tensor)
            else:
                rest.append(line)
        table = np.empty((len(tensors), len(_ALL)))
        for dtype, batch in batches.items():
            numbers, marked = self._reduce(dtype, batch, eps * scale, scale)
            if len(batch.lines) == len(tensors):
                table = numbers
            else:
                table[batch.lines] = numbers
            rest += [batch.lines[place] for place in marked]
        if rest:
            table[rest] = self._other.reduce([tensors[line] for line in rest], _ALL, eps, divisor=divisor).numpy()
        if tuple(statistics) != _ALL:
            table = table[:, [_ALL.index(statistic) for statistic in statistics]]
        return torch.from_numpy(table)

    def _small(self, tensor: Tensor, eps: float) -> Tensor | None:
        """The line of one small tensor, as hooks read them, if the loops can tell it."""
        if not (lies_dense(tensor) and tensor.is_cpu and tensor.dtype in self._loops):
            return None
        count = tensor.numel()
        if count > BLOCK:
            return None
        key = tensor.dtype, eps
        rooms = self._rooms.setdefault(key, [])
        try:
            room = rooms.pop()  # no other thread has it then
        except IndexError:
            room = _Room(self._loops[tensor.dtype], _threshold(*key), fast=tensor.dtype is not torch.float64)
        line = room.reduce(tensor.data_ptr(), count)
        rooms.append(room)
        return line

    def _reduce(
        self, dtype: torch.dtype, batch: Batch, eps: float, scale: float
    ) -> tuple[NDArray[np.float64], Sequence[int]]:
        """The lines of a batch, and the places of those that the loops cannot tell."""
        loops = self._loops.get(dtype)
        if loops is None:
            loops = self._loops[dtype] = Loops(self._readable[dtype])
        threshold = _threshold(dtype, eps)
        lines, marked = _run(loops, batch, dtype.itemsize, threshold, scale, fast=dtype is not torch.float64)
        if len(marked) and dtype is not torch.float64:
            again, still = _run(loops, batch.part(marked), dtype.itemsize, threshold, scale, fast=False)
            lines[marked] = again
            marked = [marked[place] for place in still]
        return lines, marked


def _threshold(dtype: torch.dtype, eps: float) -> float:
    return eps if dtype is torch.float64 else least_float32_from(eps)


class _Room:
    """Where the loops find and leave the numbers of one tensor, used again and again.

    Args:
        loops: Of its dtype.
        threshold: Magnitudes below are zeros.
        fast: Whether the fast loop is another one than the precise one.
    """

    def __init__(self, loops: Loops, threshold: float, *, fast: bool) -> None:
        self._address, self._count = array("q", (0,)), array("q", (0,))
        self._totals, self._line = array("d", bytes(TOTALS * 8)), np.empty((1, len(_ALL)))
        self._job = loops.job((self._address, self._count), self._totals, 1, threshold)
        self._at = self._job.buffer_info()[0]
        self._kept: list[array[Any]] = [array("q", (1,))]
        totals, count, pieces = (numbers.buffer_info()[0] for numbers in (self._totals, self._count, self._kept[0]))
        self._ways = []
        for loop, is_fast in ((loops.fast, fast), (loops.precise, False)):
            given = constants(1.0, fast=is_fast)
            self._kept.append(given)
            places = totals, pieces, count, 1, given.buffer_info()[0], self._line.ctypes.data
            self._ways.append((loop.with_gil, functools.partial(loops.finish, *places)))

    def reduce(self, address: int, count: int) -> Tensor | None:
        """The line of a tensor, if the loops can tell it."""
        self._address[0], self._count[0] = address, count
        for loop, finish in self._ways:
            self._job[NEXT] = 0
            loop(self._at)
            if not finish():
                return torch.from_numpy(self._line.copy())
        return None


def _run(
    loops: Loops, batch: Batch, itemsize: int, threshold: float, scale: float, *, fast: bool
) -> tuple[NDArray[np.float64], Sequence[int]]:
    addresses, counts, pieces = batch.blocks(itemsize, BLOCK)
    totals = array("d", bytes(len(counts) * TOTALS * 8))
    results = array("d", bytes(len(pieces) * len(_ALL) * 8))
    elements = sum(batch.counts)
    take = 1 + len(counts) * _TAKE // (elements + 1)
    job = loops.job((addresses, counts), totals, take, threshold)
    _on_threads(loops.fast if fast else loops.precise, job, elements)
    given = constants(scale, fast=fast)
    places = [numbers.buffer_info()[0] for numbers in (totals, pieces, batch.counts, given, results)]
    marks = loops.finish(*places[:3], len(pieces), *places[3:])
    lines = np.frombuffer(results).reshape(-1, len(_ALL))
    return lines, np.flatnonzero(np.isnan(lines[:, _MARK])).tolist() if marks else ()


# Threads. Those of torch are awake already, mostly waiting for work; others would have to share the cores with them.

_parallel: Any = None
_forked = False


def _on_threads(loop: Loop, job: array[int], elements: int) -> None:
    """Run a loop on as many threads as torch uses here, which take blocks until none is left."""
    address = job.buffer_info()[0]
    if elements < SHARED:
        loop.with_gil(address)
    elif _parallel is None or _forked or torch.get_num_threads() == 1:
        loop.without_gil(address)
    else:
        _parallel(loop.address, address, 0, 0)  # 0: the number of threads that torch has set; no flags


def _find_parallel() -> None:
    """The entry into the OpenMP that torch itself uses; there is none on some systems."""
    global _parallel  # noqa: PLW0603 - the process has one OpenMP
    try:
        found = ctypes.CDLL(torch._C.__file__).GOMP_parallel  # noqa: SLF001 - searched with all it depends on
    except (AttributeError, OSError):
        return
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    _parallel = found


def _after_fork() -> None:
    """A fork leaves the threads of OpenMP behind, and waiting for them would never end."""
    global _forked  # noqa: PLW0603 - as above
    _forked = True


_find_parallel()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
