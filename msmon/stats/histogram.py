"""The bins of histograms: the same for every tensor and every step, so that steps can be laid side by side."""

from __future__ import annotations

_SMALLEST, _LARGEST, _A_DECADE = -12, 12, 4
_MAGNITUDES = tuple(
    10.0 ** (exponent / _A_DECADE) for exponent in range(_SMALLEST * _A_DECADE, _LARGEST * _A_DECADE + 1)
)

EDGES: tuple[float, ...] = (*(-magnitude for magnitude in reversed(_MAGNITUDES)), *_MAGNITUDES)
"""Signed and logarithmic, four a decade from 1e-12 to 1e12. Bin ``i`` holds ``EDGES[i-1] < x <= EDGES[i]``."""

BINS: tuple[str, ...] = (*(f"{edge:.4g}" for edge in EDGES), "inf", "nan")
"""A name a bin: its upper edge. The last but one holds what is above all edges, the last NaN."""
