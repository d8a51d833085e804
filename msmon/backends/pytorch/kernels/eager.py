"""The kernel in plain torch operations: always there, on any device.

A large tensor is read in pieces that stay in the cache, so that the several passes over it cost one trip to memory and
no copy of it is ever held; small tensors of one size and dtype are put together to a piece, so that an operation does
for many of them. Sums are taken of a piece cast to the accumulation dtype once, the rest in its own dtype. Names carry
their shapes: ``_TN`` tensors by elements, ``_P`` one number a piece, ``_S`` one a statistic.
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
        limit = CPU_PIECE if tensors[0].device.type == "cpu" else DEVICE_PIECE
        lines: list[Tensor | None] = [None] * len(tensors)
        small: dict[tuple[torch.dtype, int], list[tuple[int, Tensor]]] = {}
        for number, tensor in enumerate(tensors):
            values, hidden_zeros = dense_values(tensor)
            count = values.numel()
            if hidden_zeros or not 0 < count <= limit:
                total_S = _reduce_alone(values, hidden_zeros, statistics, piece, limit)
                _finish(total_S, statistics, count + hidden_zeros, divisor)
                lines[number] = total_S
            else:
                small.setdefault((values.dtype, count), []).append((number, values.reshape(-1)))
        for (_, count), same in small.items():
            at_a_time = limit // count
            for begin in range(0, len(same), at_a_time):
                together = same[begin : begin + at_a_time]
                total_TS = piece.reduce(torch.stack([flat for _, flat in together]))
                _finish(total_TS, statistics, count, divisor)
                for (number, _), total_S in zip(together, total_TS.unbind(), strict=True):
                    lines[number] = total_S
        return torch.stack([line for line in lines if line is not None])


def _reduce_alone(
    values: Tensor, hidden_zeros: int, statistics: Sequence[Statistic], piece: _Piece, limit: int
) -> Tensor:
    partial = [piece.reduce(part_N.unsqueeze(0)) for part_N in flat_pieces(values, limit)]
    if hidden_zeros:
        partial.append(piece.reduce(torch.zeros((1, 1), dtype=piece.wide, device=values.device)))
    if not partial:
        return torch.zeros(len(statistics), dtype=piece.wide, device=values.device)
    return _combine(torch.cat(partial), statistics, hidden_zeros)


class _Piece:
    """Reduces pieces to sums and extremes: what can be combined with those of other pieces.

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

    def reduce(self, part_TN: Tensor) -> Tensor:
        """``[T, n_statistics]``: min, max, norm, sum, count of zeros, count of NaN, in the order asked for."""
        try:
            narrow_TN = self._narrow(part_TN)
        except NotImplementedError as error:
            raise UnsupportedTensorError(f"{part_TN.dtype} cannot be read as numbers") from error
        wide_TN = narrow_TN.to(self.wide) if self._sums else narrow_TN
        found: dict[Statistic, Tensor] = {}
        for statistic in self._statistics:
            if statistic is Statistic.MIN:
                found[statistic] = narrow_TN.amin(-1)
            elif statistic is Statistic.MAX:
                found[statistic] = narrow_TN.amax(-1)
            elif statistic is Statistic.NORM:
                found[statistic] = _norm(wide_TN, safe=self.wide is torch.float64 and part_TN.dtype not in _WIDE)
            elif statistic is Statistic.MEAN:
                found[statistic] = wide_TN.sum(-1)
            elif statistic is Statistic.ZEROS:
                found[statistic] = self._count_zeros(narrow_TN)
            else:
                found[statistic] = _count_nans(narrow_TN, found.get(Statistic.MEAN))
        return torch.stack([found[statistic].to(self.wide) for statistic in self._statistics], dim=1)

    def _narrow(self, part: Tensor) -> Tensor:
        """The elements as the narrowest floating-point numbers that torch computes with fast, without rounding."""
        if part.is_complex():
            return magnitude(part, self.wide)
        if part.dtype in {torch.float32, self.wide}:
            return part
        return part.to(torch.float32 if part.dtype in AS_FLOAT32 else self.wide)

    def _count_zeros(self, narrow_TN: Tensor) -> Tensor:
        """Numbers are counted as 0.0 and 1.0: sums of bool are several times slower on CPUs."""
        return narrow_TN.abs().lt_(self._eps_32 if narrow_TN.dtype is torch.float32 else self._eps).sum(-1)


def _count_nans(narrow_TN: Tensor, sum_T: Tensor | None) -> Tensor:
    """Counted only where a sum says that there may be one, if asking does not mean to wait for a device."""
    if narrow_TN.device.type == "cpu":
        sum_T = narrow_TN.sum(-1) if sum_T is None else sum_T
        if not sum_T.isnan().any():
            return torch.zeros_like(sum_T)
    return torch.ne(narrow_TN, narrow_TN, out=torch.empty_like(narrow_TN)).sum(-1)


def _norm(wide_TN: Tensor, *, safe: bool) -> Tensor:
    """The 2-norms; where squares could overflow or vanish, of the elements divided by the largest."""
    if safe:
        plain_T: Tensor = torch.linalg.vector_norm(wide_TN, dim=-1)
        return plain_T
    largest_T = torch.linalg.vector_norm(wide_TN, ord=float("inf"), dim=-1, keepdim=True)
    usable_T = torch.isfinite(largest_T) & (largest_T > 0)
    scale_T = torch.where(usable_T, largest_T, torch.ones_like(largest_T))
    scaled_T: Tensor = torch.linalg.vector_norm(wide_TN / scale_T, dim=-1) * scale_T.squeeze(-1)
    return scaled_T


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


def _finish(totals: Tensor, statistics: Sequence[Statistic], count: int, divisor: Tensor | None) -> None:
    """Turn totals of ``count`` elements, the last dimension of which is the statistics, into statistics, in place."""
    for column, statistic in enumerate(statistics):
        if count == 0 and not statistic.defined_when_empty:
            totals[..., column] = float("nan")
        elif statistic in {Statistic.MEAN, Statistic.ZEROS}:
            totals[..., column] /= count
        if divisor is not None and statistic.scales:
            totals[..., column] /= divisor
