"""Alerts on values that hypothesis makes up."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from alert_steps import evaluator, row, step
from hypothesis import given
from hypothesis import strategies as st

from msmon.alerts.anomaly import STAGES, order_of
from msmon.alerts.catalogue import CATALOGUE
from msmon.alerts.observations import Layout, Observations
from msmon.alerts.rules import RULES, turbulence

values = st.lists(st.floats(), max_size=30)
kinds = st.sampled_from([*STAGES, "momentum_buffer"])
small = st.integers(0, 2)

entries = st.builds(
    lambda kind, stage, **numbers: {
        **numbers,
        "vpp_stage": stage,
        "tag_name": f"{stage}:w/rank{numbers['rank']}/{kind}",
    },
    kind=kinds,
    stage=small,
    rank=small,
    step=small,
    micro_step=small,
    pp_stage=small,
    call_id=small,
)


@given(values)
def test_running_mean(values: list[float]) -> None:
    """The mean is that of a plain loop over the finite values, and a value fires exactly when it is above it."""
    memory = np.full((1, 1, 1), np.nan)
    layout = Layout([row()], ["norm"])
    mean = None
    for number, value in enumerate(values):
        with np.errstate(all="ignore"):
            verdict = turbulence(Observations(number, layout, np.array([[value]])), memory, {"threshold": 0.5})
        assert bool(verdict.fires[0, 0]) is (mean is not None and abs(value) > 1.5 * mean)
        if math.isfinite(value):
            mean = abs(value) if mean is None else 0.99 * mean + (1 - 0.99) * abs(value)
        memory = verdict.memory
        assert math.isnan(memory[0, 0, 0]) if mean is None else memory[0, 0, 0] == mean


@given(st.sampled_from(sorted(RULES)), values)
def test_memory_stays_finite(name: str, values: list[float]) -> None:
    """Whatever comes, no NaN and no inf gets into what a rule remembers, so that it can judge what comes after."""
    arguments = {key: 1.0 if value is None else value for key, value in CATALOGUE[name].arguments.items()}
    rows = [row(kind="param_origin"), row(kind="param_updated")]
    layout = Layout(rows, ["norm"])
    memory = np.full((2, 1, RULES[name].fields), np.nan)
    for number, value in enumerate([1.0, *values]):
        with np.errstate(all="ignore"):
            seen = Observations(number, layout, np.array([[value], [value]]))
            memory = RULES[name].judge(seen, memory, arguments).memory
    assert np.isfinite(memory).all()


@given(st.lists(entries, max_size=30, unique_by=str))
def test_ranking_is_a_total_order(found: list[dict[str, Any]]) -> None:
    """No two entries are equal, any order of the input gives the same ranking, and steps never go back."""
    keyed = [(f"key{number}", one) for number, one in enumerate(found)]
    ranked = sorted(keyed, key=lambda one: order_of(*one))
    backwards = list(reversed(keyed))
    assert ranked == sorted(backwards, key=lambda one: order_of(*one))
    assert len({order_of(*one) for one in keyed}) == len(keyed)
    for before, after in itertools.pairwise(ranked):
        first, second = order_of(*before), order_of(*after)
        assert (first < second) is True
        assert (second < first) is False
        assert (first.step, first.micro_step, first.stage) <= (second.step, second.micro_step, second.stage)


@given(st.lists(st.tuples(kinds, small | st.none()), min_size=1, max_size=12))
def test_a_step_is_in_the_order_of_the_ranking(rows: list[tuple[str, int | None]]) -> None:
    """What is said first is what ``msmon analyse`` ranks first."""
    numbers = {row(f"w{i}", kind, micro=micro): [math.nan] for i, (kind, micro) in enumerate(rows)}
    found = list(evaluator("AnomalyNan").judge(step(0, numbers), ["norm"]))
    assert len(found) == len(rows)
    assert found == sorted(found, key=lambda one: order_of(one.key, one.entry()))
