"""The kernel for tensors in host memory in one pass: a compiled loop that reads many tensors in one call.

What Python does for a tensor is to look up where its elements lie. Large tensors are cut into blocks; several threads
take blocks as they come free, and blocks are put together in their order, so that results do not depend on the number
of threads. What the loop cannot read (integers, complex numbers, elements apart from each other), and the rare tensor
with a NaN or with squares out of range, goes to another kernel.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from msmon.backends.pytorch.kernels.batches import Batch, lies_dense
from msmon.backends.pytorch.kernels.compiled import compile_loop, readable_here
from msmon.backends.pytorch.kernels.layouts import least_float32_from
from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from msmon.backends.base import Kernel
    from msmon.backends.pytorch.kernels.compiled import Loop

BLOCK = 1 << 16
"""Elements of a block: so many that its line costs nothing, and few enough to share out."""

SHARE = 1 << 18
"""Elements that a thread takes at a time; for fewer, giving up the GIL does not pay."""

_SHARES_A_THREAD = 4
"""Waking a thread for fewer takes longer than what it would do."""

_MOST_THREADS = 8
"""So many threads read as fast as memory delivers."""

_WORD = 8
"""Bytes of a number in the arrays that the loop reads and writes."""

_ALL = tuple(Statistic)
_MARK = _ALL.index(Statistic.NANS)
"""Where the loop says that it cannot tell the statistics of a block; else there is no NaN, and the number is 0."""


class FusedKernel:
    """See :class:`msmon.backends.base.Kernel`. Tensors must be in host memory.

    Args:
        other: For tensors that the loop cannot read.

    Raises:
        RuntimeError: Nothing can be compiled for this processor.
    """

    def __init__(self, other: Kernel[Tensor]) -> None:
        self._other = other
        self._readable = {getattr(torch, name): name for name in readable_here()}
        self._loops: dict[torch.dtype, Loop] = {torch.float32: compile_loop("float32")}
        self._team = _Team()

    def reduce(
        self, tensors: Sequence[Tensor], statistics: Sequence[Statistic], eps: float, *, divisor: Tensor | None = None
    ) -> Tensor:
        """See :meth:`msmon.backends.base.Kernel.reduce`."""
        scale = 1.0 if divisor is None else float(divisor.item())
        batches: dict[torch.dtype, Batch] = {}
        rest = []
        for line, tensor in enumerate(tensors):
            dtype = tensor.dtype
            if dtype in self._readable and tensor.is_cpu and lies_dense(tensor):
                batch = batches.get(dtype)
                if batch is None:
                    batch = batches[dtype] = Batch()
                batch.add(line, tensor)
            else:
                rest.append(line)
        table = np.empty((len(tensors), len(_ALL)))
        for dtype, batch in batches.items():
            numbers, marks = self._reduce(dtype, batch, eps * scale, scale)
            if len(batch.lines) == len(tensors):
                table = numbers
            else:
                table[batch.lines] = numbers
            if marks:
                rest += [batch.lines[place] for place in np.flatnonzero(numbers[:, _MARK])]
        if rest:
            table[rest] = self._other.reduce([tensors[line] for line in rest], _ALL, eps, divisor=divisor).numpy()
        if tuple(statistics) != _ALL:
            table = table[:, [_ALL.index(statistic) for statistic in statistics]]
        return torch.from_numpy(table)

    def _reduce(self, dtype: torch.dtype, batch: Batch, eps: float, scale: float) -> tuple[NDArray[np.float64], int]:
        """The lines of a batch, and how many marks they have."""
        loop = self._loops.get(dtype)
        if loop is None:
            loop = self._loops[dtype] = compile_loop(self._readable[dtype])
        threshold = eps if dtype is torch.float64 else least_float32_from(eps)
        addresses, counts, first_blocks = batch.addresses, batch.counts, None
        if max(counts) > BLOCK:
            addresses, counts, first_blocks = batch.blocks(dtype.itemsize, BLOCK)
        lines = np.empty((len(counts), len(_ALL)))
        places = (addresses.buffer_info()[0], counts.buffer_info()[0], lines.ctypes.data)

        def reduce_range(begin: int, end: int) -> int:
            at_addresses, at_counts = (place + begin * _WORD for place in places[:2])
            at_lines = places[2] + begin * lines.strides[0]
            marks: int = loop.without_gil(at_addresses, at_counts, end - begin, threshold, scale, at_lines)
            return marks

        if sum(counts) < SHARE:
            marks = loop.with_gil(*places[:2], len(counts), threshold, scale, places[2])
        else:
            marks = self._team.share(reduce_range, _shares(counts), keep=batch)
        return (lines if first_blocks is None else _combine(lines, counts, first_blocks)), marks


def _combine(lines: NDArray[np.float64], counts: array[int], first_blocks: list[int]) -> NDArray[np.float64]:
    """The lines of tensors from those of their blocks, in their order."""
    low, high, norm, mean, zeros, marks = lines.T
    lengths = np.frombuffer(counts, dtype=np.int64)
    totals = np.add.reduceat(lengths, first_blocks)
    with np.errstate(all="ignore"):
        columns = (
            np.minimum.reduceat(low, first_blocks),
            np.maximum.reduceat(high, first_blocks),
            np.sqrt(np.add.reduceat(norm * norm, first_blocks)),
            np.add.reduceat(mean * lengths, first_blocks) / totals,
            np.add.reduceat(np.rint(zeros * lengths), first_blocks) / totals,
            np.add.reduceat(marks, first_blocks),
        )
    return np.stack(columns, axis=1)


def _shares(counts: array[int]) -> list[tuple[int, int]]:
    """Ranges of blocks of about :data:`SHARE` elements each."""
    ends = np.cumsum(np.frombuffer(counts, dtype=np.int64))
    cuts = np.searchsorted(ends, np.arange(SHARE, ends[-1], SHARE)) + 1
    limits = [0, *np.unique(cuts[cuts < len(counts)]).tolist(), len(counts)]
    return list(itertools.pairwise(limits))


class _Team:
    """Threads of our own: those of torch spin while they wait, and those of OpenMP do not survive a fork."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0
        self._count = 0

    def share(self, work: Callable[[int, int], int], ranges: list[tuple[int, int]], *, keep: object) -> int:
        """Work on all ranges, as many threads at a time as torch would use; the sum of what it returns.

        Args:
            work: Called with the limits of a range.
            ranges: All of them.
            keep: Lives as long as any thread works, also when this call is interrupted.
        """
        threads = min(torch.get_num_threads(), len(ranges) // _SHARES_A_THREAD, _MOST_THREADS)
        if threads <= 1:
            return work(ranges[0][0], ranges[-1][1])
        waiting = list(reversed(ranges))

        def take_turns(_keep: object) -> int:
            done = 0
            with contextlib.suppress(IndexError):  # none is left
                while True:
                    done += work(*waiting.pop())
            return done

        futures: list[Future[int]] = []
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down, or no thread can be started
            pool = self._threads(threads - 1)
            for _ in range(threads - 1):
                futures.append(pool.submit(take_turns, keep))  # noqa: PERF401 - what was submitted before a fault is kept
        done = take_turns(keep)
        return done + sum(future.result() for future in futures if not future.cancel())

    def _threads(self, count: int) -> ThreadPoolExecutor:
        """At least as many threads, of this process: a fork leaves them behind."""
        if self._process != os.getpid():
            self._pool, self._process = None, os.getpid()
        if self._pool is None or self._count < count:
            if self._pool is not None:
                self._pool.shutdown(wait=False)
            self._pool, self._count = ThreadPoolExecutor(count, thread_name_prefix="msmon-kernel"), count
        return self._pool
