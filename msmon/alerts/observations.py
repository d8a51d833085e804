"""What rules see: the numbers of one step as an array, and what its rows and columns are about."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from msmon.alerts.catalogue import GRADIENTS, WEIGHTS_AFTER, WEIGHTS_BEFORE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from msmon.record.table import Row

    Numbers = NDArray[np.float64]
    Places = NDArray[np.bool_]
    Indices = NDArray[np.intp]

_SCALED = ("grad_unreduced", "actv_grad")
"""Kinds whose values a loss scale multiplies."""


class Layout:
    """Rows and columns. Steps that look alike share one, so that what follows from it is worked out once.

    Args:
        rows: What each line of the values is about.
        columns: Names of the statistics.
    """

    def __init__(self, rows: Sequence[Row], columns: Sequence[str]) -> None:
        self.rows = tuple(rows)
        self.columns = tuple(columns)

    def column(self, name: str) -> int | None:
        """The index of a column, ``None`` without it."""
        return self.columns.index(name) if name in self.columns else None

    @functools.cached_property
    def weight_before(self) -> Indices:
        """For each weight after the step the row of it before the step; -1 for every other row. [rows]."""
        before = {(row.stage, row.name): i for i, row in enumerate(self.rows) if row.kind == WEIGHTS_BEFORE}
        found = [before.get((r.stage, r.name), -1) if r.kind == WEIGHTS_AFTER else -1 for r in self.rows]
        return np.array(found, dtype=np.intp)

    @functools.cached_property
    def scaled(self) -> Places:
        """Rows whose values a loss scale multiplies. [rows]."""
        return np.array([row.kind in _SCALED for row in self.rows], dtype=bool)

    @functools.cached_property
    def gradients(self) -> Places:
        """Rows of gradients. [rows]."""
        return np.array([row.kind in {*GRADIENTS, "actv_grad"} for row in self.rows], dtype=bool)

    @functools.cached_property
    def activations(self) -> Places:
        """Rows of activations. [rows]."""
        return np.array([row.kind == "actv" for row in self.rows], dtype=bool)

    @functools.cached_property
    def inputs(self) -> Places:
        """Rows of what goes into a module. [rows]."""
        return np.array([row.name.rpartition(".")[2].startswith("input") for row in self.rows], dtype=bool)

    @functools.cached_property
    def matrices(self) -> Places:
        """Rows of tensors with two dimensions or more. [rows]."""
        return np.array([len(row.shape) > 1 for row in self.rows], dtype=bool)

    @functools.cached_property
    def single(self) -> Places:
        """Rows of tensors with one element. [rows]."""
        return np.array([math.prod(row.shape) == 1 for row in self.rows], dtype=bool)


@dataclass(frozen=True)
class Observations:
    """The numbers of one step that a rule looks at.

    Attributes:
        step: The training step.
        layout: Its rows and columns.
        values: ``[rows, columns]``.
        grad_scale: Loss scale of the step, NaN without one.
    """

    step: int
    layout: Layout
    values: Numbers
    grad_scale: float = float("nan")

    @property
    def rows(self) -> tuple[Row, ...]:
        """What each line of ``values`` is about."""
        return self.layout.rows

    @property
    def columns(self) -> tuple[str, ...]:
        """The statistics that ``values`` has of each row."""
        return self.layout.columns

    def unscaled(self) -> Numbers:
        """The values, with gradients of a scaled loss divided by its scale."""
        if not self.grad_scale > 0:
            return self.values
        return np.where(self.layout.scaled[:, None], self.values / self.grad_scale, self.values)
