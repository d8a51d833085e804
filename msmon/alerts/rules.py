"""The rules, each a pure function: the numbers of a step and what is remembered of earlier ones in, a verdict out.

``memory`` holds, for each row and column, the numbers that a rule remembers of that series; all NaN at first. A rule
returns the memory for the next step and never changes the one it was given. What each rule is good for, and where it
comes from, is in ``docs/alerts.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from msmon.alerts.observations import Numbers, Observations, Places

PAST = 0.99
"""Weight of the past in the running mean of AnomalyTurbulence; the original's."""

FOLLOW = 0.05
"""Weight of the newest value in the centre and the spread of AnomalySpike: a memory of about twenty steps."""

CLIP = 3.0
"""By how many spreads one value can pull the centre of AnomalySpike at most, so that a spike does not become the norm."""


@dataclass(frozen=True)
class Verdict:
    """What a rule says of one step.

    Attributes:
        fires: ``[rows, columns]``, where something is wrong.
        memory: ``[rows, columns, fields]``, for the next step.
        expected: ``[rows, columns]``: what the value was compared with, NaN where there is nothing to name.
        since: ``[rows, columns]``: the step from which on it has been so, of rules that look at several steps.
    """

    fires: Places
    memory: Numbers
    expected: Numbers | None = None
    since: Numbers | None = None


class Judge(Protocol):
    """A rule."""

    def __call__(self, seen: Observations, memory: Numbers, arguments: Mapping[str, float | None]) -> Verdict:
        """Judge one step."""


@dataclass(frozen=True)
class RuleKind:
    """A rule of the registry.

    Attributes:
        judge: The function.
        fields: How many numbers it remembers of each series.
        comparison: What :attr:`Verdict.expected` is, in words.
    """

    judge: Judge
    fields: int
    comparison: str = ""


def nan(seen: Observations, memory: Numbers, arguments: Mapping[str, float | None]) -> Verdict:
    """NaN, a count of NaN above 0, or ``abs(value) > threshold``.

    Where the count of NaN is known to be 0, a NaN is no element's (the mean of a tensor with inf and -inf, say).
    """
    values = seen.values
    fires = np.isnan(values)
    counts = seen.layout.column("nans")
    if counts is not None:
        fires &= ~(values[:, [counts]] == 0)
        fires[:, counts] |= values[:, counts] > 0
    threshold = arguments["threshold"]
    if threshold is None:
        return Verdict(fires, memory)
    return Verdict(fires | (np.abs(values) > threshold), memory, np.where(np.isnan(values), np.nan, threshold))


def turbulence(seen: Observations, memory: Numbers, arguments: Mapping[str, float | None]) -> Verdict:
    """``abs(value) > (1 + threshold) * mean``, the mean being m = 0.99 m + 0.01 abs(value), begun with the first value.

    NaN and inf never enter the mean.
    """
    sizes, mean = np.abs(seen.values), memory[..., 0]
    fires = sizes > (1 + _given(arguments, "threshold")) * mean
    following = np.where(np.isnan(mean), sizes, PAST * mean + (1 - PAST) * sizes)
    return Verdict(fires, np.where(np.isfinite(sizes), following, mean)[..., None], mean)


def inf(seen: Observations, memory: Numbers, arguments: Mapping[str, float | None]) -> Verdict:
    """An element that is inf or -inf. Of activations only +inf as a maximum: masks are made of -inf."""
    del arguments
    fires = np.isinf(seen.values)
    activations = seen.layout.activations
    if activations.any():
        largest = np.array([column == "max" for column in seen.columns], dtype=bool)
        fires &= ~activations[:, None] | (largest & (seen.values > 0))
    return Verdict(fires, memory)


def spike(seen: Observations, memory: Numbers, arguments: Mapping[str, float | None]) -> Verdict:
    """Far from the usual on a logarithmic scale, upwards or downwards.

    With x = log10(abs(value)), centre c and spread s: fires when x - c > max(threshold * s, log10(factor)), or when
    (c - x) / 2 is, once ``warm_up`` values have been seen: the gradient of a batch that is foretold already is small. c and s are exponential means of x and of abs(x - c); one value moves them by
    CLIP spreads at most (or by log10(factor)). Zeros, NaN and inf are skipped. A single number may cross 0 and become
    as small as it likes, so that for tensors of one element only the upper side counts.
    """
    floor = np.log10(_given(arguments, "factor"))
    sizes = np.abs(seen.values)
    usable = np.isfinite(sizes) & (sizes > 0)
    logarithm = np.log10(np.where(usable, sizes, 1.0))
    count = _or_zero(memory[..., 0])
    centre = np.where(count > 0, memory[..., 1], logarithm)
    spread = _or_zero(memory[..., 2])
    away = logarithm - centre
    settled = count >= _given(arguments, "warm_up")
    distance = np.where(seen.layout.single[:, None], away, np.maximum(away, -away / 2))
    fires = usable & settled & (distance > np.maximum(_given(arguments, "threshold") * spread, floor))
    limit = np.where(settled, np.maximum(CLIP * spread, floor), np.inf)
    pull = np.clip(away, -limit, limit)
    weight = np.maximum(FOLLOW, 1 / (count + 1))
    following = np.stack([count + 1, centre + weight * pull, spread + weight * (np.abs(pull) - spread)], axis=-1)
    return Verdict(fires, np.where(usable[..., None], following, memory), 10**centre)


def gradient(seen: Observations, memory: Numbers, arguments: Mapping[str, float | None]) -> Verdict:
    """A norm above ``high``; or one below ``low``, but not 0, in the last ``steps`` steps: said at the last of them."""
    low, high = arguments["low"], arguments["high"]
    values = seen.unscaled()
    fires, expected = np.zeros(values.shape, dtype=bool), np.full(values.shape, np.nan)
    if high is not None:
        fires |= np.isfinite(values) & (values > high)
        expected[fires] = high
    if low is None:
        return Verdict(fires, memory, expected)
    count = _in_a_row((values > 0) & (values < low), memory[..., 0])
    since = _since(seen, count, memory[..., 1])
    vanished = count == _given(arguments, "steps")
    expected[vanished] = low
    memory = np.stack([count, since], axis=-1)
    return Verdict(fires | vanished, memory, expected, np.where(vanished, since, np.nan))


def dead(seen: Observations, memory: Numbers, arguments: Mapping[str, float | None]) -> Verdict:
    """A norm of exactly 0 in the last ``steps`` steps: said at the last of them. Of activations, outputs only."""
    zero = (seen.values == 0) & ~(seen.layout.activations & seen.layout.inputs)[:, None]
    count = _in_a_row(zero, memory[..., 0])
    since = _since(seen, count, memory[..., 1])
    return Verdict(count == _given(arguments, "steps"), np.stack([count, since], axis=-1), since=since)


def update_ratio(seen: Observations, memory: Numbers, arguments: Mapping[str, float | None]) -> Verdict:
    """The change of a weight's norm over that norm: a lower bound of the update-to-weight ratio, too large or too small.

    With r = abs(norm after - norm before) / norm before: fires above ``high``; below ``low`` when that holds for ``steps`` steps. Weights of two dimensions or more, from
    their ``warm_up``-th update on: one that starts at 0 doubles in its second step.
    """
    low, high = arguments["low"], arguments["high"]
    partner = seen.layout.weight_before
    judged = ((partner >= 0) & seen.layout.matrices)[:, None]
    before = seen.values[partner]
    ratio = np.where(judged & (before > 0), np.abs(seen.values - before) / before, np.nan)
    count = _or_zero(memory[..., 0]) + np.isfinite(ratio)
    settled = count > _given(arguments, "warm_up")
    fires = np.zeros(ratio.shape, dtype=bool) if high is None else settled & np.isfinite(ratio) & (ratio > high)
    still, since = _or_zero(memory[..., 1]), memory[..., 2]
    named = np.full(ratio.shape, np.nan)
    if low is not None:
        still = _in_a_row(settled & (ratio < low), still)
        since = _since(seen, still, since)
        small = still == _given(arguments, "steps")
        fires |= small
        named[small] = since[small]
    return Verdict(fires, np.stack([count, still, since], axis=-1), before, named)


def attention_logits(seen: Observations, memory: Numbers, arguments: Mapping[str, float | None]) -> Verdict:
    """The largest attention weight, averaged over queries, above ``threshold``: the logits have grown out of hand."""
    threshold = _given(arguments, "threshold")
    return Verdict(seen.values > threshold, memory, np.full(seen.values.shape, threshold))


RULES: dict[str, RuleKind] = {
    "AnomalyNan": RuleKind(nan, 0, "threshold"),
    "AnomalyTurbulence": RuleKind(turbulence, 1, "mean so far"),
    "AnomalyInf": RuleKind(inf, 0),
    "AnomalySpike": RuleKind(spike, 3, "usual"),
    "AnomalyGradient": RuleKind(gradient, 2, "limit"),
    "AnomalyDead": RuleKind(dead, 2),
    "AnomalyUpdateRatio": RuleKind(update_ratio, 3, "before the step"),
    "AnomalyAttentionLogits": RuleKind(attention_logits, 0, "threshold"),
}
"""Every rule that a configuration can name."""


def _given(arguments: Mapping[str, float | None], name: str) -> float:
    value = arguments[name]
    if value is None:
        raise ValueError(f"the rule needs a value for `{name}`")
    return value


def _in_a_row(holds: Places, count: Numbers) -> Numbers:
    return np.where(holds, _or_zero(count) + 1, 0.0)


def _since(seen: Observations, count: Numbers, since: Numbers) -> Numbers:
    """The step in which the steps in a row began."""
    return np.where(count == 1, float(seen.step), _or_zero(since))


def _or_zero(remembered: Numbers) -> Numbers:
    return np.where(np.isnan(remembered), 0.0, remembered)  # a tenth of the time of nan_to_num
