"""The statistics in NumPy float64, as plainly as they can be written: what every kernel is held to."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray


def reference(array: NDArray[Any], statistics: Sequence[Statistic], eps: float = 1e-8) -> list[float]:
    """Statistics of an array of any shape and dtype, in float64; NaN where there is no value.

    Args:
        array: Any numeric or boolean array.
        statistics: Which, in this order.
        eps: Threshold of ``zeros``.
    """
    flat = array.reshape(-1)
    with np.errstate(all="ignore"):
        if np.iscomplexobj(flat):
            wide = flat.astype(np.complex128)
            values = np.where(np.isnan(wide), np.nan, np.abs(wide))
        else:
            values = flat.astype(np.float64)
        return [_one(values, statistic, eps) for statistic in statistics]


def _one(values: NDArray[np.float64], statistic: Statistic, eps: float) -> float:
    if values.size == 0:
        return 0.0 if statistic.defined_when_empty else math.nan
    formulas: dict[Statistic, Callable[[], Any]] = {
        Statistic.MIN: values.min,
        Statistic.MAX: values.max,
        Statistic.MEAN: values.mean,
        Statistic.ZEROS: (np.abs(values) < eps).mean,
        Statistic.NANS: np.isnan(values).sum,
        Statistic.NORM: functools.partial(_norm, values),
    }
    return float(formulas[statistic]())


def _norm(values: NDArray[np.float64]) -> float:
    largest = float(np.abs(values).max())
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(np.sqrt(((values / largest) ** 2).sum()))  # scaled: no square overflows
