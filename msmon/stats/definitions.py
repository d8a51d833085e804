r"""The six statistics of a tensor :math:`x` with :math:`n` elements.

========  =====================================================  ============  =================  ==================
name      formula                                                empty tensor  NaN in the tensor  inf in the tensor
========  =====================================================  ============  =================  ==================
min       :math:`\min_i x_i`                                     no value      nan                counted as a value
max       :math:`\max_i x_i`                                     no value      nan                counted as a value
norm      :math:`\sqrt{\sum_i x_i^2}` (L2)                       0             nan                inf
mean      :math:`\frac1n \sum_i x_i`                             no value      nan                ±inf; nan for both
zeros     :math:`\frac1n |\{i : |x_i| < \mathrm{eps}\}|`         no value      NaN is no zero     inf is no zero
nans      :math:`|\{i : x_i \ne x_i\}|`                          0             counted            not counted
========  =====================================================  ============  =================  ==================

Source: own, after the names and meanings of the original's ``ops``. Sums are accumulated in float64 where the device
has it, in float32 elsewhere. Complex tensors are seen through the magnitude :math:`|x_i|`; an element is NaN when
either part is. Integers and booleans are taken as numbers. A sparse tensor has the statistics of its dense form.
"""

from __future__ import annotations

from enum import Enum


class Statistic(Enum):
    """A number computed from a tensor's elements; the value is the name of its column."""

    MIN = "min"
    MAX = "max"
    NORM = "norm"
    MEAN = "mean"
    ZEROS = "zeros"
    NANS = "nans"

    @property
    def scales(self) -> bool:
        """Whether the statistic of ``c * x`` is ``c`` times that of ``x`` (for ``c > 0``)."""
        return self in {Statistic.MIN, Statistic.MAX, Statistic.NORM, Statistic.MEAN}

    @property
    def defined_when_empty(self) -> bool:
        """Whether a tensor without elements has a value."""
        return self in {Statistic.NORM, Statistic.NANS}
