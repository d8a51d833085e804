"""Applies rules to steps: filters, memory, and which rule names an anomaly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from msmon.alerts.anomaly import BEFORE, FORWARD, Anomaly, Signal, stage_of
from msmon.alerts.catalogue import CATALOGUE
from msmon.alerts.observations import Layout, Observations
from msmon.alerts.rules import RULES, Verdict
from msmon.plan.selection import Selection
from msmon.runtime.guard import Guard

if TYPE_CHECKING:
    from msmon.alerts.observations import Indices, Numbers
    from msmon.config.schema import Rule
    from msmon.record.table import Row
    from msmon.sinks.base import RecordedStep

CustomRule = Callable[[Observations], object]
"""A user's own rule: which rows (or rows and columns) are anomalous, as anything that NumPy reads as booleans."""

SKIPS_TOLERATED = 10
"""Optimizer steps that a ``GradScaler`` may skip in a row before their gradients are judged: so it finds its scale."""


class AppliedRule:
    """One rule of a run, with what it remembers.

    Args:
        name: Names the anomalies.
        judge: Observations and memory in, a verdict out.
        fields: How many numbers it remembers of each series.
        comparison: What the expected value is, in words.
        kinds: Kinds of rows that it looks at; empty means all.
        names: Targets, as in the configuration; empty means all.
        ops: Columns; empty means all.
        custom: Whether it is a user's own.
    """

    def __init__(
        self,
        name: str,
        judge: Callable[[Observations, Numbers], Verdict],
        *,
        fields: int = 0,
        comparison: str = "",
        kinds: Iterable[str] = (),
        names: Iterable[str] = (),
        ops: Iterable[str] = (),
        custom: bool = False,
    ) -> None:
        self.name = name
        self.comparison = comparison
        self.custom = custom
        self.remembers = fields > 0
        self.guard = Guard(f"rule {name}")
        self._judge = judge
        self._kinds, self._ops = frozenset(kinds), frozenset(ops)
        self._selection = Selection(names)
        self._memory = _Memory(fields)

    def view(self, layout: Layout, model: str) -> _View | None:
        """What this rule looks at in rows and columns; ``None`` for nothing."""
        columns = [i for i, column in enumerate(layout.columns) if not self._ops or column in self._ops]
        rows = [i for i, row in enumerate(layout.rows) if self._looks_at(row)]
        if not rows or not columns:
            return None
        part = Layout([layout.rows[i] for i in rows], [layout.columns[i] for i in columns])
        return _View(part, np.array(rows), np.array(columns), self._memory.places(model, part))

    def _looks_at(self, row: Row) -> bool:
        if row.empty or row.is_histogram or (self._kinds and row.kind not in self._kinds):
            return False
        return self._selection.selects(row.name, f"{row.stage}:{row.name}")

    def apply(self, view: _View, values: Numbers, step: RecordedStep) -> Verdict:
        """Judge a step, and remember it."""
        part = values[view.rows[:, None], view.columns]
        memory = self._memory.read(view)
        verdict = self._judge(Observations(step.step, view.layout, part, step.grad_scale), memory)
        self._memory.write(view, verdict.memory)
        return verdict


def builtin_rules(rules: Iterable[Rule], rank: int) -> list[AppliedRule]:
    """The rules of a configuration that apply on a rank."""
    return [_builtin(rule) for rule in rules if not rule.ranks or rank in rule.ranks]


def _builtin(rule: Rule) -> AppliedRule:
    entry, registered, arguments = CATALOGUE[rule.rule_name], RULES[rule.rule_name], rule.arguments
    return AppliedRule(
        rule.rule_name,
        lambda seen, memory: registered.judge(seen, memory, arguments),
        fields=registered.fields,
        comparison=registered.comparison,
        kinds=rule.kinds or entry.kinds,
        names=rule.names,
        ops=rule.ops or entry.ops,
    )


def custom_rule(name: str, function: CustomRule) -> AppliedRule:
    """A user's own rule, applied to every row and column."""

    def judge(seen: Observations, memory: Numbers) -> Verdict:
        answer = function(seen)
        fires = np.zeros(seen.values.shape, dtype=bool)
        if answer is not None:
            given = np.asarray(answer, dtype=bool)
            fires |= given[:, None] if given.ndim == 1 else given
        return Verdict(fires, memory)

    return AppliedRule(name, judge, custom=True)


@dataclass(frozen=True)
class _View:
    """A rule's part of a layout: which rows and columns, and where their memory is."""

    layout: Layout
    rows: Indices
    columns: Indices
    memory: Indices


class _Memory:
    """Numbers of every series that a rule has seen, by model, kind, stage, name and micro-batch."""

    def __init__(self, fields: int) -> None:
        self._fields = fields
        self._places: dict[tuple[Any, ...], int] = {}
        self._numbers: dict[tuple[str, ...], Numbers] = {}

    def places(self, model: str, layout: Layout) -> Indices:
        return np.array(
            [
                self._places.setdefault((model, r.kind, r.stage, r.name, r.micro_step), len(self._places))
                for r in layout.rows
            ]
        )

    def read(self, view: _View) -> Numbers:
        numbers = self._numbers.get(view.layout.columns)
        if numbers is None or len(numbers) < len(self._places):
            grown = np.full((len(self._places), len(view.columns), self._fields), np.nan)
            if numbers is not None:
                grown[: len(numbers)] = numbers
            numbers = self._numbers[view.layout.columns] = grown
        return numbers[view.memory]

    def write(self, view: _View, numbers: Numbers) -> None:
        if self._fields:
            self._numbers[view.layout.columns][view.memory] = numbers


@dataclass
class _Block:
    """Rows of a step that have the same columns.

    Attributes:
        layout: Rows and columns.
        gather: ``[rows, columns]``, where each number lies in the flat numbers of the step.
        positions: ``[rows]``, the place of each row in the step.
        views: What each rule looks at, by its place among the rules.
    """

    layout: Layout
    gather: Indices
    positions: Indices
    views: dict[int, _View | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Found:
    """What the rules found in a block: places where ``rule`` is not -1."""

    block: _Block
    values: Numbers
    rule: Indices
    expected: Numbers
    since: Numbers


class Findings:
    """The anomalies of one step, in the order of :func:`msmon.alerts.anomaly.order_of`; made when asked for."""

    def __init__(self, make: Callable[[_Found, int, int], Anomaly], found: Sequence[_Found], last: int) -> None:
        self._make = make
        self._places: list[tuple[tuple[int, ...], _Found, int]] = []
        for one in found:
            for row in np.nonzero((one.rule >= 0).any(axis=1))[0].tolist():
                described = one.block.layout.rows[row]
                stage = stage_of(described.kind)
                chunk = described.stage if stage == FORWARD else -described.stage
                order = (_micro_step(described, last), stage, chunk, int(one.block.positions[row]))
                self._places.append((order, one, row))
        self._places.sort(key=lambda place: place[0])

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Anomaly]:
        return (self._make(found, row, order[0]) for order, found, row in self._places)

    def first(self, count: int) -> list[Anomaly]:
        """The first of them."""
        return list(itertools.islice(self, count))


class Evaluator:
    """Applies the rules to one step after the other.

    Args:
        rules: In the order in which they may name an anomaly.
        rank: This rank.
        pp_stage: Its place in its pipeline.
        group_mates: Ranks of its pipeline, or its own.
    """

    def __init__(
        self, rules: Sequence[AppliedRule], *, rank: int = 0, pp_stage: int = 0, group_mates: Sequence[int] = ()
    ) -> None:
        self.rules = list(rules)
        self._rank, self._pp_stage = rank, pp_stage
        self._group_mates = tuple(group_mates) or (rank,)
        self._known: dict[tuple[str, bool], tuple[list[Row], tuple[str, ...], list[_Block]]] = {}
        self._skipped: dict[str, int] = {}

    def judge(self, step: RecordedStep, statistics: Sequence[str]) -> Findings:
        """The anomalies of a step.

        Args:
            step: What was recorded.
            statistics: What the numbers of rows without ``features`` are.
        """
        if not step.supplement:
            self._skipped[step.model] = (self._skipped.get(step.model, 0) + 1) if step.skipped else 0
        skipped = self._skipped.get(step.model, 0)
        lenient = 0 < skipped <= SKIPS_TOLERATED
        found = []
        for block in self._blocks(step, tuple(statistics)):
            values = step.numbers[block.gather]
            one = _Found(block, values, np.full(values.shape, -1), *(np.full(values.shape, np.nan) for _ in range(2)))
            with np.errstate(all="ignore"):
                for number, rule in enumerate(self.rules):
                    rule.guard.run(self._apply, number, rule, one, step, lenient=lenient)
            if (one.rule >= 0).any():
                found.append(one)
        last = _last_micro_step(step) if found else 0
        return Findings(lambda one, row, micro_step: self._anomaly(step, one, row, micro_step), found, last)

    def _apply(self, number: int, rule: AppliedRule, one: _Found, step: RecordedStep, *, lenient: bool) -> None:
        if number not in one.block.views:
            one.block.views[number] = rule.view(one.block.layout, step.model)
        view = one.block.views[number]
        if view is None or (rule.remembers and not step.complete):
            return  # a step that was cut short cannot be compared with whole ones
        verdict = rule.apply(view, one.values, step)
        if not verdict.fires.any():
            return
        places = view.rows[:, None], view.columns
        new = verdict.fires & (one.rule[places] < 0)
        if lenient and not rule.custom:
            new &= ~view.layout.gradients[:, None]  # an overflow, which the loss scale is there to find
        one.rule[places] = np.where(new, number, one.rule[places])
        if verdict.expected is not None:
            one.expected[places] = np.where(new, verdict.expected, one.expected[places])
        if verdict.since is not None:
            one.since[places] = np.where(new, verdict.since, one.since[places])

    def _blocks(self, step: RecordedStep, statistics: tuple[str, ...]) -> list[_Block]:
        known = self._known.get((step.model, step.supplement))
        if known is None or known[0] != step.rows or known[1] != statistics:
            known = self._known[step.model, step.supplement] = (step.rows, statistics, _split(step.rows, statistics))
        return known[2]

    def _anomaly(self, step: RecordedStep, one: _Found, row: int, micro_step: int) -> Anomaly:
        described = one.block.layout.rows[row]
        return Anomaly(
            rank=self._rank,
            step=step.step,
            micro_step=micro_step,
            pp_stage=self._pp_stage,
            vpp_stage=described.stage,
            call_id=step.first + int(one.block.positions[row]),
            name=described.name,
            kind=described.kind,
            signals=tuple(self._signal(one, row, c) for c in np.nonzero(one.rule[row] >= 0)[0].tolist()),
            group_mates=self._group_mates,
        )

    def _signal(self, one: _Found, row: int, column: int) -> Signal:
        rule = self.rules[int(one.rule[row, column])]
        expected = float(one.expected[row, column])
        because = [] if np.isnan(expected) else [f"{rule.comparison} {expected:.6g}"]
        since = float(one.since[row, column])
        because += [] if np.isnan(since) else [f"since step {since:.0f}"]
        return Signal(one.block.layout.columns[column], float(one.values[row, column]), rule.name, ", ".join(because))


def _split(rows: Sequence[Row], statistics: tuple[str, ...]) -> list[_Block]:
    places: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    start = 0
    for position, row in enumerate(rows):
        columns = row.features or statistics
        places.setdefault(columns, []).append((position, start))
        start += len(columns)
    return [
        _Block(
            Layout([rows[position] for position, _ in found], columns),
            np.array([begin for _, begin in found])[:, None] + np.arange(len(columns)),
            np.array([position for position, _ in found]),
        )
        for columns, found in places.items()
    ]


def _micro_step(row: Row, last: int) -> int:
    """The row's own; the first of what is there before all micro-batches, the last of what comes after them."""
    if row.micro_step is not None:
        return row.micro_step
    return 0 if stage_of(row.kind) == BEFORE else last


def _last_micro_step(step: RecordedStep) -> int:
    """That of what comes after all micro-batches."""
    seen = [row.micro_step for row in step.rows if row.micro_step is not None]
    return max(seen) if seen else max((step.micro_steps or 1) - 1, 0)
