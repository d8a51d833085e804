"""The kernel for tensors in host memory: NumPy over pieces that stay in the cache.

The elements are where the processor can read them, so results are plain numbers at once: no tensor a number, and NaN are
counted only where the sum of squares says that there are some. Names carry their shapes: ``_N`` the elements of a piece.
"""
# ruff: noqa: N803, N806, PLR0124 - the suffixes; only NaN differs from itself

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils.dlpack

from msmon.backends.base import UnsupportedTensorError
from msmon.backends.pytorch.kernels.layouts import AS_FLOAT32, dense_values, flat_pieces, magnitude
from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

PIECE = 1 << 15
"""Elements of a piece. It stays in the second-level cache, and torch does not wake its thread pool for so few."""

_UNTHREADED = 1 << 13
"""Elements that a BLAS multiplies without waking its threads, which would fight with those of torch."""

_SAFE_SQUARES = (1e-280, 1e300)
"""Between these a sum of squares in float64 has neither lost nor overflowed anything."""


class HostKernel:
    """See :class:`msmon.backends.base.Kernel`. Tensors must be in host memory."""

    def __init__(self) -> None:
        self._plan = _Plan((), 0.0)

    @torch.no_grad()
    def reduce(
        self, tensors: Sequence[Tensor], statistics: Sequence[Statistic], eps: float, *, divisor: Tensor | None = None
    ) -> Tensor:
        """See :meth:`msmon.backends.base.Kernel.reduce`."""
        scale = 1.0 if divisor is None else float(divisor.numpy(force=True).reshape(()))
        plan = self._plan
        if plan.statistics != tuple(statistics) or plan.eps != eps * scale:
            plan = self._plan = _Plan(tuple(statistics), eps * scale)
        numbers = np.empty((len(tensors), len(statistics)))
        with np.errstate(all="ignore"):
            for line, tensor in enumerate(tensors):
                numbers[line] = _Totals(plan).of(tensor).results(scale)
        return torch.from_numpy(numbers)


class _Plan:
    """What is asked for, looked up once: which passes are needed, and the order of the results.

    Args:
        statistics: In the order of the columns.
        eps: Threshold of ``zeros``.
    """

    def __init__(self, statistics: tuple[Statistic, ...], eps: float) -> None:
        self.statistics = statistics
        self.eps = eps
        self.order = tuple(list(Statistic).index(statistic) for statistic in statistics)
        self.low, self.high = Statistic.MIN in statistics, Statistic.MAX in statistics
        self.mean, self.zeros = Statistic.MEAN in statistics, Statistic.ZEROS in statistics
        self.squares = Statistic.NORM in statistics or Statistic.NANS in statistics
        self._thresholds: dict[np.dtype[Any], Any] = {}

    def threshold(self, dtype: np.dtype[Any]) -> Any:  # noqa: ANN401 - a number of that dtype
        """The smallest number of a dtype that is not below ``eps``: comparing with it is comparing with ``eps`` exactly."""
        found = self._thresholds.get(dtype)
        if found is None:
            found = dtype.type(self.eps)
            if float(found) < self.eps:
                found = np.nextafter(found, dtype.type(np.inf))
            self._thresholds[dtype] = found
        return found


class _Totals:
    """What the pieces of one tensor add up to."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self.count = 0
        self.low, self.high = math.inf, -math.inf
        self.sum = self.zeros = self.nans = 0.0
        self.norms: list[float] = []

    def of(self, tensor: Tensor) -> _Totals:
        """Read a tensor."""
        values, hidden_zeros = dense_values(tensor)
        for part_N in flat_pieces(values, PIECE):
            self._add(_as_array(part_N))
        self.count = values.numel() + hidden_zeros
        if hidden_zeros:
            self.zeros += hidden_zeros
            self.low, self.high = _least(self.low, 0.0), _most(self.high, 0.0)
        return self

    def _add(self, part_N: NDArray[Any]) -> None:
        plan = self._plan
        if plan.low:
            self.low = _least(self.low, float(np.minimum.reduce(part_N)))
        if plan.high:
            self.high = _most(self.high, float(np.maximum.reduce(part_N)))
        if plan.zeros:
            self.zeros += int(np.count_nonzero(np.abs(part_N) < plan.threshold(part_N.dtype)))
        if plan.squares or plan.mean:
            wide_N = part_N.astype(np.float64, copy=False)
            if plan.mean:
                self.sum += float(np.add.reduce(wide_N))
            if plan.squares:
                self._add_squares(wide_N)

    def _add_squares(self, wide_N: NDArray[np.float64]) -> None:
        squares = _sum_of_squares(wide_N)
        if _SAFE_SQUARES[0] < squares < _SAFE_SQUARES[1]:
            self.norms.append(math.sqrt(squares))
            return
        if math.isnan(squares):
            self.nans += int(np.count_nonzero(np.isnan(wide_N)))
        largest = float(np.maximum.reduce(np.abs(wide_N)))
        if largest == 0 or not math.isfinite(largest):
            self.norms.append(largest)
            return
        self.norms.append(largest * math.sqrt(_sum_of_squares(wide_N / largest)))

    def results(self, scale: float) -> list[float]:
        """The statistics in the order asked for, of the tensor divided by ``scale``."""
        empty = self.count == 0
        count = self.count or math.nan
        in_order_of_definition = (
            math.nan if empty else self.low / scale,
            math.nan if empty else self.high / scale,
            _hypotenuse(self.norms) / scale,
            self.sum / count / scale,
            self.zeros / count,
            self.nans,
        )
        return [in_order_of_definition[place] for place in self._plan.order]


def _as_array(part_N: Tensor) -> NDArray[Any]:
    """A piece as floating-point numbers that hold each element exactly; of complex elements the magnitude.

    Raises:
        UnsupportedTensorError: The dtype is no number, or torch cannot convert it.
    """
    try:
        if part_N.is_complex():
            part_N = magnitude(part_N, torch.float64)
        elif part_N.dtype in AS_FLOAT32:
            part_N = part_N.float()
        elif not part_N.is_floating_point():
            part_N = part_N.double()
        array: NDArray[Any] = np.from_dlpack(_Shared(part_N.resolve_neg()))
    except (NotImplementedError, TypeError, BufferError, RuntimeError) as error:
        raise UnsupportedTensorError(f"{part_N.dtype} cannot be read as numbers") from error
    return array


class _Shared:
    """Lends NumPy the memory of a tensor. ``Tensor.numpy`` would forbid its owner to resize it, as FSDP does."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack__(self, *, stream: None = None, **_: object) -> Any:  # noqa: ANN401 - a capsule
        del stream  # there is none on the host
        return torch.utils.dlpack.to_dlpack(self._tensor)  # type: ignore[attr-defined]

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # host memory


def _sum_of_squares(wide_N: NDArray[np.float64]) -> float:
    if wide_N.size <= _UNTHREADED:
        return float(np.dot(wide_N, wide_N))
    parts = (wide_N[start : start + _UNTHREADED] for start in range(0, wide_N.size, _UNTHREADED))
    return sum(float(np.dot(part_N, part_N)) for part_N in parts)


def _least(first: float, second: float) -> float:
    return math.nan if first != first or second != second else min(first, second)


def _most(first: float, second: float) -> float:
    return math.nan if first != first or second != second else max(first, second)


def _hypotenuse(norms: list[float]) -> float:
    """The norm of a tensor from those of its pieces; inf beside NaN is NaN, as it is within a piece."""
    if any(norm != norm for norm in norms):
        return math.nan
    return norms[0] if len(norms) == 1 else math.hypot(*norms)
