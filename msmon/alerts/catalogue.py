"""The rules that a configuration can name: their arguments, and which rows and columns they look at by default.

Plain data, so that the configuration can be checked without NumPy. What each rule computes is in :mod:`rules`; what it
is good for, its source and its cost are in ``docs/alerts.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

GRADIENTS = ("grad_unreduced", "grad_reduced")
WEIGHTS_BEFORE, WEIGHTS_AFTER = "param_origin", "param_updated"


@dataclass(frozen=True)
class Entry:
    """A rule as the configuration sees it.

    Attributes:
        arguments: Each argument with its default; ``None`` leaves that part of the rule out.
        required: Arguments without a default.
        ops: Columns it looks at; empty means all.
        kinds: Kinds of rows it looks at; empty means all.
        default: Whether it belongs to the rules of ``msmon run --alerts``.
    """

    arguments: Mapping[str, float | None] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    default: bool = True


CATALOGUE: Mapping[str, Entry] = {
    "AnomalyNan": Entry({"threshold": None}),
    "AnomalyTurbulence": Entry({"threshold": None}, required=("threshold",), ops=("norm", "mean"), default=False),
    "AnomalyInf": Entry(ops=("min", "max", "norm", "mean")),
    "AnomalySpike": Entry({"threshold": 8.0, "factor": 30.0, "warm_up": 20}, ops=("norm",)),
    "AnomalyGradient": Entry({"low": 1e-12, "high": 1e6, "steps": 20}, ops=("norm",), kinds=GRADIENTS),
    "AnomalyDead": Entry({"steps": 20}, ops=("norm",), kinds=(*GRADIENTS, "actv")),
    "AnomalyUpdateRatio": Entry(
        {"low": None, "high": 0.3, "steps": 20, "warm_up": 10}, ops=("norm",), kinds=(WEIGHTS_BEFORE, WEIGHTS_AFTER)
    ),
    "AnomalyAttentionLogits": Entry({"threshold": 0.99}, ops=("softmax_max",), kinds=("attention_hook",)),
}


def default_rules() -> list[dict[str, str]]:
    """The rules of ``msmon run --alerts``, as the configuration writes them."""
    return [{"rule_name": name} for name, entry in CATALOGUE.items() if entry.default]
