"""The six statistics once more, in Python's own floats: independent of NumPy, of torch and of msmon."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS = ("min", "max", "norm", "mean", "zeros", "nans")


def plain_statistics(numbers: Sequence[complex], eps: float = 1e-8) -> dict[str, float]:
    """Statistics of a list of numbers; NaN where there is no value."""
    values = [_real(number) for number in numbers]
    count = len(values)
    nans = sum(math.isnan(value) for value in values)
    if not count:
        return dict(zip(COLUMNS, (math.nan, math.nan, 0.0, math.nan, math.nan, 0.0), strict=True))
    return {
        "min": math.nan if nans else min(values),
        "max": math.nan if nans else max(values),
        "norm": math.nan if nans else _norm(values),
        "mean": math.nan if nans else _sum(values) / count,
        "zeros": sum(abs(value) < eps for value in values) / count,
        "nans": float(nans),
    }


def assert_same(
    measured: Sequence[float], numbers: Sequence[complex], eps: float = 1e-8, *, tolerance: float = 1e-12
) -> None:
    """The measured statistics are those of the numbers: norm and mean to a tolerance, of the mean magnitude, others to 1e-12."""
    expected = plain_statistics(numbers, eps)
    finite = [abs(value) for value in map(_real, numbers) if math.isfinite(value)]
    magnitude = math.fsum(value / len(finite) for value in finite) if finite else 0.0
    for name, value in zip(COLUMNS, measured, strict=True):
        wanted = expected[name]
        if not math.isfinite(wanted):
            assert value == wanted or (math.isnan(wanted) and math.isnan(value)), (name, value, wanted)
        else:
            slack = (tolerance if name in {"norm", "mean"} else 1e-12) * (magnitude if name == "mean" else abs(wanted))
            assert abs(value - wanted) <= slack + 5e-323, (name, value, wanted)


def _real(number: complex) -> float:
    if not isinstance(number, complex):
        return float(number)
    return math.nan if math.isnan(number.real) or math.isnan(number.imag) else math.hypot(number.real, number.imag)


def _norm(values: list[float]) -> float:
    largest = max(abs(value) for value in values)
    if largest == 0 or math.isinf(largest):
        return largest
    return largest * math.sqrt(math.fsum((value / largest) ** 2 for value in values))


def _sum(values: list[float]) -> float:
    if any(math.isinf(value) for value in values):
        return sum(values)
    return math.fsum(values)
