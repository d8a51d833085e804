"""Statistics of parts give the statistics of the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from msmon.offline.merge import merge_statistics
from msmon.stats.definitions import Statistic
from msmon.stats.oracle import reference

NUMBERS = st.floats(-1e100, 1e100) | st.sampled_from([0.0, -0.0, 1e-9, math.inf, -math.inf, math.nan])
EVERY = list(Statistic)


def statistics(values: np.ndarray) -> dict[str, float]:
    return {each.value: number for each, number in zip(EVERY, reference(values, EVERY), strict=True)}


@given(
    whole=arrays(np.float64, st.integers(1, 40), elements=NUMBERS),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_parts_give_the_whole(whole: np.ndarray, cuts: list[int]) -> None:
    """Whatever the cuts: empty parts, NaN and infinities included."""
    parts = np.split(whole, sorted(min(cut, whole.size) for cut in cuts))
    merged = merge_statistics([(part.size, statistics(part)) for part in parts])
    expected = statistics(whole)
    assert merged.keys() == expected.keys()
    scale = max(np.abs(whole[np.isfinite(whole)]), default=0.0)
    for name, value in expected.items():
        assert merged[name] == pytest.approx(value, rel=1e-9, abs=1e-12 * scale, nan_ok=True), name


def test_only_what_all_parts_have() -> None:
    """A statistic that one part lacks is one that the whole lacks."""
    assert merge_statistics([(2, {"min": 1.0, "max": 2.0}), (1, {"max": 5.0})]) == {"max": 5.0}
    assert merge_statistics([(0, {"nans": 0.0})]) == {}
