"""Steps for the tests of alerts: rows with the numbers given."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from msmon.alerts.evaluate import Evaluator, builtin_rules
from msmon.config.schema import AlertConfig
from msmon.record.table import Row
from msmon.sinks.base import RecordedStep


def row(
    name: str = "fc.weight", kind: str = "grad_reduced", *, stage: int = 0, micro: int | None = None, **changes: Any
) -> Row:
    described: dict[str, Any] = {"shape": (2, 3), "dtype": "torch.float32"}
    return Row(kind, name, stage, micro, **{**described, **changes})


def step(number: int, found: dict[Row, list[float]], **changes: Any) -> RecordedStep:
    """A step in which each row has these numbers."""
    described: dict[str, Any] = {
        "model": "",
        "micro_steps": 1,
        "skipped": False,
        "grad_scale": math.nan,
        "complete": True,
    }
    flat = np.array([number for numbers in found.values() for number in numbers], dtype=np.float64)
    return RecordedStep(step=number, rows=list(found), numbers=flat, **{**described, **changes})


def evaluator(*rules: dict[str, Any] | str, rank: int = 0, **changes: Any) -> Evaluator:
    """The rules as a configuration writes them; a name stands for a rule without arguments."""
    written = [{"rule_name": rule} if isinstance(rule, str) else rule for rule in rules]
    return Evaluator(builtin_rules(AlertConfig.model_validate({"rules": written}).rules, rank), rank=rank, **changes)


def fired(judge: Evaluator, *values: float, op: str = "norm", **described: Any) -> list[bool]:
    """Whether one series fires at each of its values."""
    return [bool(len(judge.judge(step(i, {row(**described): [v]}), [op]))) for i, v in enumerate(values)]
