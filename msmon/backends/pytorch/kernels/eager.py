"""The kernel in plain torch operations: always there, on any device.

A tensor is read in pieces that stay in the cache, so that the several passes over it cost one trip to memory and no copy
of the tensor is ever held. Sums are taken of a piece cast to the accumulation dtype once, the rest in its own dtype. Names carry their shapes: ``_N`` the
elements of a piece, ``_P`` one number a piece, ``_S`` one a statistic.
"""
# ruff: noqa: N803, N806 - the suffixes

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from msmon.backends.base import UnsupportedTensorError
from msmon.backends.pytorch.devices import accumulation_dtype
from msmon.backends.pytorch.kernels.layouts import AS_FLOAT32, dense_values, flat_pieces, least_float32_from, magnitude
from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

CPU_PIECE = 1 << 17
"""Elements of a piece on a CPU: one megabyte of float64, which stays in the second-level cache."""

DEVICE_PIECE = 1 << 22
"""Elements of a piece on an accelerator, where launches cost more than cache misses."""

_WIDE = frozenset({torch.float64, torch.complex128})
"""Dtypes whose squares may overflow or vanish in float64; those of all others do not."""


class EagerKernel:
    """See :class:`msmon.backends.base.Kernel`."""

    @torch.no_grad()
    def reduce(
        self, tensors: Sequence[Tensor], statistics: Sequence[Statistic], eps: float, *, divisor: Tensor | None = None
    ) -> Tensor:
        """See :meth:`msmon.backends.base.Kernel.reduce`."""
        if not tensors or not statistics:
            device = tensors[0].device if tensors else "cpu"
            return torch.empty((len(tensors), len(statistics)), dtype=torch.float64, device=device)
        divisor = None if divisor is None else divisor.reshape(())
        piece = _Piece(statistics, eps, divisor, accumulation_dtype(tensors[0].device))
        return torch.stack([_reduce_one(tensor, statistics, piece, divisor) for tensor in tensors])


def _reduce_one(tensor: Tensor, statistics: Sequence[Statistic], piece: _Piece, divisor: Tensor | None) -> Tensor:
    values, hidden_zeros = dense_values(tensor)
    limit = CPU_PIECE if values.device.type == "cpu" else DEVICE_PIECE
    partial_PS = [piece.reduce(part_N) for part_N in flat_pieces(values, limit)]
    if hidden_zeros:
        partial_PS.append(piece.reduce(torch.zeros(1, dtype=piece.wide, device=values.device)))
    count = values.numel() + hidden_zeros
    if len(partial_PS) == 1 and not hidden_zeros:
        total_S = partial_PS[0]
    elif partial_PS:
        total_S = _combine(torch.stack(partial_PS), statistics, hidden_zeros)
    else:
        total_S = torch.zeros(len(statistics), dtype=piece.wide, device=values.device)
    return _finish(total_S, statistics, count, divisor)


class _Piece:
    """Reduces one flat piece to sums and extremes: what can be combined with those of other pieces.

    Args:
        statistics: In the order of the columns.
        eps: Threshold of ``zeros``, after division.
        divisor: See :meth:`msmon.backends.base.Kernel.reduce`.
        wide: Dtype that sums are accumulated in.
    """

    def __init__(self, statistics: Sequence[Statistic], eps: float, divisor: Tensor | None, wide: torch.dtype) -> None:
        self.wide = wide
        self._statistics = statistics
        self._extremes = Statistic.MIN in statistics or Statistic.MAX in statistics
        self._sums = Statistic.MEAN in statistics or Statistic.NORM in statistics
        self._eps: float | Tensor = eps
        self._eps_32: float | Tensor = least_float32_from(eps)
        if divisor is not None:
            self._eps = eps * divisor.to(wide)
            nearest = self._eps.float()
            next_one = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
            self._eps_32 = torch.where(nearest.to(wide) < self._eps, next_one, nearest)

    def reduce(self, part_N: Tensor) -> Tensor:
        """``[n_statistics]``: min, max, norm, sum, count of zeros, count of NaN, in the order asked for."""
        try:
            narrow_N = self._narrow(part_N)
        except NotImplementedError as error:
            raise UnsupportedTensorError(f"{part_N.dtype} cannot be read as numbers") from error
        wide_N = narrow_N.to(self.wide) if self._sums else narrow_N
        found = {}
        if self._extremes:
            found[Statistic.MIN], found[Statistic.MAX] = narrow_N.aminmax()
        for statistic in self._statistics:
            if statistic is Statistic.NORM:
                found[statistic] = _norm(wide_N, safe=self.wide is torch.float64 and part_N.dtype not in _WIDE)
            elif statistic is Statistic.MEAN:
                found[statistic] = wide_N.sum()
            elif statistic is Statistic.ZEROS:
                found[statistic] = self._count_zeros(narrow_N)
            elif statistic is Statistic.NANS:
                found[statistic] = _count_nans(narrow_N, found.get(Statistic.MEAN))
        return torch.stack([found[statistic].to(self.wide) for statistic in self._statistics])

    def _narrow(self, part_N: Tensor) -> Tensor:
        """The elements as the narrowest floating-point numbers that torch computes with fast and exactly."""
        if part_N.is_complex():
            return magnitude(part_N, self.wide)
        if part_N.dtype in {torch.float32, self.wide}:
            return part_N
        return part_N.to(torch.float32 if part_N.dtype in AS_FLOAT32 else self.wide)

    def _count_zeros(self, narrow_N: Tensor) -> Tensor:
        """Numbers are counted as 0.0 and 1.0: sums of bool are several times slower on CPUs."""
        eps = self._eps_32 if narrow_N.dtype is torch.float32 else self._eps
        return narrow_N.abs().lt_(eps).sum()


def _count_nans(narrow_N: Tensor, total: Tensor | None) -> Tensor:
    """Counted only where a sum says that there may be one, if asking does not mean to wait for a device."""
    if narrow_N.device.type == "cpu" and not (narrow_N.sum() if total is None else total).isnan():
        return torch.zeros((), device="cpu")
    return torch.ne(narrow_N, narrow_N, out=torch.empty_like(narrow_N)).sum()


def _norm(wide_N: Tensor, *, safe: bool) -> Tensor:
    """The 2-norm; where squares could overflow or vanish, of the elements divided by the largest."""
    if safe:
        plain: Tensor = torch.linalg.vector_norm(wide_N)
        return plain
    largest = torch.linalg.vector_norm(wide_N, ord=float("inf"))
    usable = torch.isfinite(largest) & (largest > 0)
    scale = torch.where(usable, largest, torch.ones_like(largest))
    scaled: Tensor = torch.linalg.vector_norm(wide_N / scale) * scale
    return scaled


def _combine(partial_PS: Tensor, statistics: Sequence[Statistic], hidden_zeros: int) -> Tensor:
    """Put the pieces of a tensor together; the last one stands for ``hidden_zeros`` equal elements, when there are any."""
    total = []
    for column, statistic in enumerate(statistics):
        partial_P = partial_PS[:, column]
        if statistic is Statistic.MIN:
            total.append(partial_P.amin())
        elif statistic is Statistic.MAX:
            total.append(partial_P.amax())
        elif statistic is Statistic.NORM:
            total.append(_norm(partial_P, safe=False))
        elif statistic is Statistic.ZEROS and hidden_zeros:
            total.append(partial_P[:-1].sum() + partial_P[-1] * hidden_zeros)
        else:
            total.append(partial_P.sum())
    return torch.stack(total)


def _finish(total_S: Tensor, statistics: Sequence[Statistic], count: int, divisor: Tensor | None) -> Tensor:
    for column, statistic in enumerate(statistics):
        if count == 0 and not statistic.defined_when_empty:
            total_S[column] = float("nan")
        elif statistic in {Statistic.MEAN, Statistic.ZEROS}:
            total_S[column] /= count
        if divisor is not None and statistic.scales:
            total_S[column] /= divisor
    return total_S
