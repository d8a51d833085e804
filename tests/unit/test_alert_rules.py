"""The rules of alerts: each formula, worked out by hand or again in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from alert_steps import evaluator, fired, row, step

from msmon.alerts.evaluate import CATALOGUE, SKIPS_TOLERATED
from msmon.alerts.observations import Layout, Observations
from msmon.alerts.rules import RULES

NAN, INF = math.nan, math.inf
SIX = ["min", "max", "norm", "mean", "zeros", "nans"]


def turbulence(threshold: float) -> dict[str, Any]:
    return {"rule_name": "AnomalyTurbulence", "args": {"threshold": threshold}}


def nan_above(threshold: float) -> dict[str, Any]:
    return {"rule_name": "AnomalyNan", "args": {"threshold": threshold}}


# AnomalyNan


def test_nan() -> None:
    """P47: without a threshold NaN only, with one also what is larger than it in absolute value."""
    values = [1.0, NAN, INF, -1e30, 10.0, 10.5, -10.5]
    assert fired(evaluator("AnomalyNan"), *values) == [False, True, False, False, False, False, False]
    assert fired(evaluator(nan_above(10)), *values) == [False, True, True, True, False, True, True]


def test_a_count_of_nans_is_an_anomaly() -> None:
    """One NaN among finite statistics is enough, and 0 of them is none, whatever the threshold."""
    assert fired(evaluator("AnomalyNan"), 0, 1, op="nans") == [False, True]
    assert fired(evaluator(nan_above(100)), 0, 1, op="nans") == [False, True]


def test_a_nan_that_is_no_elements() -> None:
    """A tensor with inf and -inf has a mean of NaN and no NaN in it; a masked one with -inf neither."""
    numbers = {row("mask"): [-INF, 1, INF, -INF, 0, 0], row("both"): [-INF, INF, INF, NAN, 0, 0]}
    assert len(evaluator("AnomalyNan").judge(step(0, numbers), SIX)) == 0
    assert len(evaluator("AnomalyNan").judge(step(0, {row(): [NAN, NAN, NAN, NAN, 0, 1]}), SIX)) == 1


@pytest.mark.parametrize("name", ["AnomalyNan", "AnomalyInf", "AnomalyDead"])
def test_tensors_without_elements_are_not_judged(name: str) -> None:
    """What a tensor without elements has in place of statistics is no anomaly."""
    judge = evaluator(name)
    assert not any(fired(judge, *[NAN] * 30, shape=(0, 3)))
    assert not any(fired(judge, *[0.0] * 30, shape=(0, 3)))


# AnomalyTurbulence


def test_turbulence_is_silent_on_a_fall() -> None:
    """P48: what falls does not fire."""
    assert not any(fired(evaluator(turbulence(0.1)), 49.4, 27.3, 7.9))


def test_turbulence_mean() -> None:
    """P49: 1 then 2 makes a mean of 1.01, against which the third value is held."""
    assert fired(evaluator(turbulence(0.5)), 1.0, 1.51, 1.5075, 1.55) == [False, True, False, True]
    (anomaly,) = list(_after(turbulence(0.5), 1.0, 2.0, 9.0))
    assert anomaly.signals[0].because == "mean so far 1.01"


def _after(rule: dict[str, Any], *values: float) -> Any:
    judge = evaluator(rule)
    for number, value in enumerate(values[:-1]):
        judge.judge(step(number, {row(): [value]}), ["norm"])
    return judge.judge(step(len(values), {row(): [values[-1]]}), ["norm"])


def test_nan_and_inf_never_enter_the_mean() -> None:
    """P50, beaten: after NaN and inf the mean is what it was, and a usual value is silent."""
    assert fired(evaluator(turbulence(0.5)), 1.0, NAN, INF, 1.0, -1.0, 1.6) == [False, False, True, False, False, True]
    (anomaly,) = list(_after(turbulence(0.5), 1.0, NAN, INF, 2.0))
    assert anomaly.signals[0].because == "mean so far 1"


def test_turbulence_after_zero() -> None:
    """Begun with 0, any value fires, as in the original; 0 itself does not."""
    assert fired(evaluator(turbulence(0.5)), 0.0, 0.0, 1.0) == [False, False, True]


def test_turbulence_looks_at_norm_and_mean_only() -> None:
    """The other statistics are no business of this rule, unless the configuration says so."""
    for op in SIX:
        assert fired(evaluator(turbulence(0.5)), 1, 100, op=op)[1] is (op in {"norm", "mean"})
    assert fired(evaluator({**turbulence(0.5), "ops": ["max"]}), 1, 100, op="max")[1]


# AnomalyInf


def test_inf() -> None:
    """Inf on either side; of activations only +inf as the maximum."""
    assert fired(evaluator("AnomalyInf"), 1, INF, -INF, NAN, op="min") == [False, True, True, False]
    mask = {row("mask.output", "actv", micro=0): [-INF, 0.0, INF, -INF, 0.0, 0.0]}
    assert len(evaluator("AnomalyInf").judge(step(0, mask), SIX)) == 0
    overflow = {row("fc.output", "actv", micro=0): [0.0, INF, INF, INF, 0.0, 0.0]}
    assert len(evaluator("AnomalyInf").judge(step(0, overflow), SIX)) == 1


# AnomalySpike


def noisy(count: int, seed: int = 0, deviation: float = 0.1) -> list[float]:
    return (10 ** np.random.default_rng(seed).normal(0, deviation, count)).tolist()


def test_spike_fires_on_both_sides() -> None:
    """A thousand times more or less is far from the usual; ten per cent are not."""
    usual = noisy(100)
    for value, fires in ((1e3, True), (1e-3, True), (1.1, False), (-1e3, True), (5.0, False)):
        assert fired(evaluator("AnomalySpike"), *usual, value) == [False] * 100 + [fires], value


def test_spike_skips_what_has_no_logarithm() -> None:
    """Zero, NaN and inf neither fire nor are remembered."""
    found = fired(evaluator("AnomalySpike"), *noisy(50), 0.0, NAN, INF, -INF, *noisy(50, 1), 1e4)
    assert found == [False] * 104 + [True]


def test_spike_waits_for_its_warm_up() -> None:
    """The first values say what is usual, whatever they are."""
    assert not any(fired(evaluator("AnomalySpike"), *[10.0**i for i in range(20)]))
    rule = {"rule_name": "AnomalySpike", "args": {"warm_up": 3}}
    assert fired(evaluator(rule), 1, 1, 1, 1e3) == [False, False, False, True]


def test_a_spike_does_not_become_the_usual() -> None:
    """The second of two spikes fires as the first did; a new level is followed and falls silent."""
    assert fired(evaluator("AnomalySpike"), *noisy(60), 1e6, 1.0, 1e6)[-3:] == [True, False, True]
    shifted = fired(evaluator("AnomalySpike"), *noisy(60), *[1e2] * 60)
    assert shifted[60]
    assert not any(shifted[90:])


def test_a_single_number_may_come_near_zero() -> None:
    """Of a tensor with one element only the upper side counts."""
    usual = noisy(60)
    assert fired(evaluator("AnomalySpike"), *usual, 1e-6, shape=(1,))[-1] is False
    assert fired(evaluator("AnomalySpike"), *usual, 1e6, shape=(1,))[-1] is True


def test_spike_formula() -> None:
    """Centre and spread are those of a plain loop over the values."""
    values = noisy(80, deviation=0.5)
    memory = np.full((1, 1, 3), NAN)
    layout = Layout([row()], ["norm"])
    arguments = CATALOGUE["AnomalySpike"].arguments
    count, centre, spread = 0, 0.0, 0.0
    for number, value in enumerate(values):
        memory = (
            RULES["AnomalySpike"].judge(Observations(number, layout, np.array([[value]])), memory, arguments).memory
        )
        x = math.log10(value)
        if count == 0:
            centre = x
        away, limit = x - centre, max(3 * spread, math.log10(30)) if count >= 20 else INF
        pull = min(max(away, -limit), limit)
        weight = max(0.05, 1 / (count + 1))
        count, centre, spread = count + 1, centre + weight * pull, spread + weight * (abs(pull) - spread)
        assert memory[0, 0] == pytest.approx([count, centre, spread], rel=1e-12)


# AnomalyGradient, AnomalyDead


def test_exploding_gradient() -> None:
    """Above the upper limit, at once; inf is for another rule."""
    assert fired(evaluator("AnomalyGradient"), 1e6, 1.1e6, INF, NAN) == [False, True, False, False]


def test_vanishing_gradient() -> None:
    """Below the lower limit for so many steps in a row; one larger value begins the count anew, zero is no such value."""
    rule = {"rule_name": "AnomalyGradient", "args": {"low": 1e-3, "steps": 3}}
    assert fired(evaluator(rule), *[1e-4] * 2, 1, *[1e-4] * 4) == [False] * 5 + [True, False]
    assert not any(fired(evaluator(rule), *[0.0] * 10))
    assert not any(fired(evaluator({**rule, "args": {"low": None}}), *[1e-30] * 40))


def test_gradient_limits_are_of_unscaled_gradients() -> None:
    """What a loss scale multiplies is divided by it; a reduced gradient is unscaled already."""
    judge = evaluator("AnomalyGradient")
    for kind, fires in (("grad_unreduced", False), ("grad_reduced", True)):
        found = judge.judge(step(0, {row(kind=kind): [1e9]}, grad_scale=65536.0), ["norm"])
        assert bool(len(found)) is fires


def test_dead() -> None:
    """Exactly 0 for so many steps: said once, and again after a life in between."""
    rule = {"rule_name": "AnomalyDead", "args": {"steps": 3}}
    assert fired(evaluator(rule), 0, 0, 0, 0, 0, 1, 0, 0, 0) == [i in {2, 8} for i in range(9)]
    assert not any(fired(evaluator(rule), *[0.0] * 9, kind="actv", name="attention.input_1", micro=0))
    assert any(fired(evaluator(rule), *[0.0] * 9, kind="actv", name="attention.output", micro=0))
    assert not any(fired(evaluator(rule), *[0.0] * 9, kind="param_updated", name="fc.bias"))


@pytest.mark.parametrize(
    ("rule", "number"),
    [
        ({"rule_name": "AnomalyDead", "args": {"steps": 3}}, 0.0),
        ({"rule_name": "AnomalyGradient", "args": {"steps": 3, "low": 1e-3}}, 1e-6),
    ],
)
def test_since_when(rule: dict[str, Any], number: float) -> None:
    """What is said after so many steps says when they began."""
    judge = evaluator(rule)
    found = [
        anomaly.message
        for i, norm in [(2, 1.0), (5, number), (7, number), (9, number)]
        for anomaly in judge.judge(step(i, {row(): [norm]}), ["norm"])
    ]
    assert len(found) == 1
    assert "since step 5" in found[0]
    assert found[0].endswith("at step 9")


# AnomalyUpdateRatio, AnomalyAttentionLogits


def updates(*ratios: float, shape: tuple[int, ...] = (2, 3), **arguments: Any) -> list[list[str]]:
    """Tags that fire when a weight of norm 2 grows by these ratios, one after the other."""
    judge = evaluator({"rule_name": "AnomalyUpdateRatio", "args": {"warm_up": 1, **arguments}})
    before, after = (row(kind=kind, shape=shape) for kind in ("param_origin", "param_updated"))
    return [
        [anomaly.tag for anomaly in judge.judge(step(i, {before: [2.0], after: [2 + 2 * ratio]}), ["norm"])]
        for i, ratio in enumerate(ratios)
    ]


def test_update_ratio() -> None:
    """A weight that changes by more than the limit, up or down, after its warm-up."""
    tag = ["0:fc.weight/rank0/param_updated"]
    assert updates(0.9, 0.29, 0.31, -0.31, 0.001) == [[], [], tag, tag, []]
    assert updates(0.9, 0.9, shape=(6,)) == [[], []]
    assert updates(*[1e-9] * 4, low=1e-6, steps=2) == [[], [], tag, []]


def test_update_ratio_of_a_weight_that_starts_at_zero() -> None:
    """It has no ratio at first, and is as large as its update for a while: the warm-up covers that."""
    judge = evaluator("AnomalyUpdateRatio")
    before, after = (row(kind=kind) for kind in ("param_origin", "param_updated"))
    for number in range(40):
        assert len(judge.judge(step(number, {before: [0.1 * number], after: [0.1 * number + 0.1]}), ["norm"])) == 0


def test_attention_logits() -> None:
    """The largest attention weight, where high-order features are recorded."""
    features = ("entropy", "softmax_max")
    judge = evaluator("AnomalyAttentionLogits")
    for value, fires in ((0.5, 0), (0.995, 1)):
        found = judge.judge(step(0, {row("attn", "attention_hook", features=features): [0.1, value]}), ["norm"])
        assert [anomaly.signals[0].op for anomaly in found] == ["softmax_max"] * fires


# Which rule, which rows


def test_the_first_rule_names_the_anomaly() -> None:
    """In the order of the configuration, statistic by statistic."""
    for rules, name in (
        ((nan_above(5), turbulence(0.5)), "AnomalyNan"),
        ((turbulence(0.5), nan_above(5)), "AnomalyTurbulence"),
    ):
        judge = evaluator(*rules)
        judge.judge(step(0, {row(): [1.0, 1.0]}), ["norm", "max"])
        (anomaly,) = judge.judge(step(1, {row(): [9.0, 9.0]}), ["norm", "max"])
        assert [(signal.op, signal.rule) for signal in anomaly.signals] == [("norm", name), ("max", "AnomalyNan")]


def test_every_statistic_of_a_tensor_is_named() -> None:
    """P46, beaten: one entry, and nothing is lost."""
    (anomaly,) = evaluator("AnomalyNan").judge(step(7, {row(): [NAN, 1, NAN, 2, 0, 1]}), SIX)
    assert anomaly.message == "AnomalyNan: min/norm nan, nans 1 in 0:fc.weight/rank0/grad_reduced at step 7"


@pytest.mark.parametrize(
    ("narrowed", "found"),
    [
        ({}, ["a.grad_reduced.norm", "a.grad_reduced.max", "b.actv.norm", "b.actv.max"]),
        ({"kinds": ["actv"]}, ["b.actv.norm", "b.actv.max"]),
        ({"names": ["a"]}, ["a.grad_reduced.norm", "a.grad_reduced.max"]),
        ({"names": ["0:b*"]}, ["b.actv.norm", "b.actv.max"]),
        ({"ops": ["max"]}, ["a.grad_reduced.max", "b.actv.max"]),
        ({"ranks": [0]}, []),
        ({"ranks": [1, 2], "ops": ["max"], "kinds": ["actv"]}, ["b.actv.max"]),
    ],
    ids=str,
)
def test_filters(narrowed: dict[str, Any], found: list[str]) -> None:
    """Kinds, names, ops and ranks narrow a rule down. This is rank 1."""
    numbers = {row("a"): [NAN, NAN], row("b", "actv", micro=0): [NAN, NAN]}
    anomalies = evaluator({"rule_name": "AnomalyNan", **narrowed}, rank=1).judge(step(0, numbers), ["norm", "max"])
    assert sorted(f"{a.name}.{a.kind}.{s.op}" for a in anomalies for s in a.signals) == sorted(found)


def test_series_are_told_apart() -> None:
    """Micro-batches, kinds, stages and models have memories of their own, also when rows come and go."""
    judge = evaluator(turbulence(0.5))
    series = [
        (row(), ""),
        (row(kind="grad_unreduced"), ""),
        (row(stage=1), ""),
        (row(micro=0), ""),
        (row(micro=1), ""),
        (row(), "other"),
    ]
    for size, (which, model) in enumerate(series, start=1):
        assert len(judge.judge(step(0, {which: [10.0**size]}, model=model), ["norm"])) == 0
    for size, (which, model) in enumerate(series, start=1):
        both = {row("new"): [1e9], which: [1.6 * 10.0**size]} if size == 3 else {which: [1.6 * 10.0**size]}
        assert len(judge.judge(step(1, both, model=model), ["norm"])) == 1


def test_what_a_scaler_skips() -> None:
    """Overflow while a scaler looks for its scale is no anomaly; when it never finds one, it is. Activations count always."""
    judge = evaluator("AnomalyNan")
    for number in range(SKIPS_TOLERATED + 1):
        found = judge.judge(step(number, {row(): [NAN]}, skipped=True), ["norm"])
        assert len(found) == (number == SKIPS_TOLERATED)
    judge = evaluator("AnomalyNan")
    assert len(judge.judge(step(0, {row("x.output", "actv", micro=0): [NAN]}, skipped=True), ["norm"])) == 1


def test_a_step_that_was_cut_short() -> None:
    """It is looked at for NaN, and not compared with whole steps."""
    judge = evaluator(turbulence(0.5), "AnomalyNan")
    judge.judge(step(0, {row("a"): [1.0], row("b"): [1.0]}), ["norm"])
    found = judge.judge(step(1, {row("a"): [9.0], row("b"): [NAN]}, complete=False), ["norm"])
    assert [anomaly.name for anomaly in found] == ["b"]


def test_rules_are_pure() -> None:
    """No rule changes the numbers or the memory that it is given."""
    rows = [row(), row(kind="param_origin"), row(kind="param_updated"), row("x.output", "actv", micro=0)]
    layout = Layout(rows, SIX)
    values = np.random.default_rng(0).normal(size=(len(rows), 6))
    values[0, 0], values[1, 1] = NAN, INF
    for name, kind in RULES.items():
        arguments = {key: 1.0 if value is None else value for key, value in CATALOGUE[name].arguments.items()}
        memory = np.full((len(rows), 6, kind.fields), NAN)
        given, remembered = values.copy(), memory.copy()
        with np.errstate(all="ignore"):
            verdict = kind.judge(Observations(0, layout, given), remembered, arguments)
        np.testing.assert_array_equal(given, values)
        np.testing.assert_array_equal(remembered, memory)
        assert verdict.fires.shape == values.shape
        assert verdict.memory.shape == memory.shape
