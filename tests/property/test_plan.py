"""Pure decisions, on inputs that hypothesis makes up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from msmon.plan.gate import StepGate
from msmon.plan.names import squash, squash_all, unique_label
from msmon.plan.rounds import Rounds
from msmon.plan.selection import Selection

part = st.sampled_from(
    ["layers", "layer", "embedding", "final", "output_layer", "norm2", "0", "1", "attn", "weight", "a"]
)
name = st.lists(part, min_size=1, max_size=6).map(".".join)


@given(st.integers(0, 50), st.integers(1, 9), st.integers(0, 9), st.integers(0, 60), st.integers(0, 100))
def test_gate(start: int, interval: int, times: int, first: int, steps: int) -> None:
    """The collected steps are the first so many of start, start + interval, … that come up."""
    gate = StepGate(start, interval, times)
    found = []
    for step in range(first, first + steps):
        if gate.wants(step):
            gate.count()
            found.append(step)
    wanted = [step for step in range(start, 200, interval) if first <= step < first + steps]
    assert found == wanted[:times]
    assert gate.finished == (len(found) == times)


@given(name)
def test_squash(name: str) -> None:
    """A short name is the end of the name, at a dot; shortening it again changes nothing."""
    short = squash(name)
    assert name == short or name.endswith("." + short)
    assert short
    assert squash(short) == short


@given(st.lists(name, unique=True))
def test_squashed_names_are_unique(names: list[str]) -> None:
    """However names collide, short names stay one to one, and each is the whole name or its short form."""
    short = squash_all(names)
    assert list(short) == names
    assert len(set(short.values())) == len(names)
    assert all(value in {name, squash(name)} for name, value in short.items())


@given(st.sampled_from("ab"), st.sets(st.sampled_from(["a", "a_1", "a_2", "b", "b_1"])))
def test_labels(label: str, taken: set[str]) -> None:
    """A label is never one that is taken."""
    assert unique_label(label, taken) not in taken


@given(st.lists(name, unique=True), st.lists(name, max_size=3))
def test_selection(names: list[str], targets: list[str]) -> None:
    """Without globs, exactly the names with one of the targets in front are selected; the rest of targets is named."""
    selection = Selection(targets)
    found = [one for one in names if selection.selects(one)]
    assert found == [one for one in names if not targets or one.startswith(tuple(targets))]
    unmatched = selection.unmatched(names)
    assert set(unmatched) == {target for target in targets if not any(one.startswith(target) for one in names)}
    assert all(
        close in {".".join(one.split(".")[:end]) for one in names for end in range(1, 7)}
        for found in unmatched.values()
        for close in found
    )


class RoundsMachine(RuleBasedStateMachine):
    """Optimizers step in any order, over parameters that they may share; new ones come to life and old ones die."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = Rounds()
        self.held: dict[int, frozenset[int]] = {}
        self.members: set[int] = set()
        self.touched: set[int] = set()
        self.before: set[int] = set()
        self.touched_before: set[int] = set()
        self.under_way = False
        self.closed = 0
        self.counts: dict[int, int] = {}

    @rule(optimizer=st.integers(0, 4), parameters=st.frozensets(st.integers(0, 5), max_size=3))
    def know(self, optimizer: int, parameters: frozenset[int]) -> None:
        """Another optimizer of the model, or one with other parameters."""
        self.held[optimizer] = parameters
        self.rounds.know(optimizer, parameters)

    @rule(optimizer=st.integers(0, 4))
    def die(self, optimizer: int) -> None:
        """One is gone."""
        self.held.pop(optimizer, None)
        self.members.discard(optimizer)
        self.before.discard(optimizer)
        self.counts.pop(optimizer, None)
        self.rounds.forget(optimizer)

    @rule(optimizer=st.integers(0, 4))
    def step(self, optimizer: int) -> None:
        """One steps, as a session tells it."""
        mine = self.held.setdefault(optimizer, frozenset())
        self.rounds.know(optimizer, mine)
        if self.rounds.joins_ended(optimizer):
            assert not self.under_way
            assert optimizer not in self.before, "a round never holds an optimizer twice"
            assert not mine & self.touched_before, "nor a parameter"
            self.rounds.joined(optimizer)
            self.before.add(optimizer)
            self.touched_before |= mine
            return
        if self.rounds.would_repeat(optimizer):
            assert self.under_way, "also when those that stepped in it are gone"
            self.close()
        assert optimizer not in self.members, "a round never holds an optimizer twice"
        assert not mine & self.touched, "nor a parameter"
        self.members.add(optimizer)
        self.touched |= mine
        self.under_way = True
        self.counts[optimizer] = self.counts.get(optimizer, 0) + 1
        if self.rounds.stepped(optimizer):
            self.close()

    @rule()
    def backward(self) -> None:
        """A backward pass."""
        if self.rounds.backward_begins():
            assert self.under_way
            self.close()

    def close(self) -> None:
        self.before, self.touched_before = self.members, self.touched
        before = self.rounds.step
        self.rounds.close()
        assert self.rounds.step == before + 1
        self.members, self.touched, self.under_way = set(), set(), False
        self.closed += 1

    @invariant()
    def consistent(self) -> None:
        """Steps are counted one by one; there are at least as many as the busiest optimizer makes."""
        assert self.rounds.step == self.closed
        assert self.rounds.open == self.under_way
        assert self.closed + self.under_way >= max(self.counts.values(), default=0)


TestRoundsMachine = RoundsMachine.TestCase


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=3), st.integers(1, 60))
def test_rounds_of_regular_trainings(others: list[tuple[int, bool]], iterations: int) -> None:
    """The number of rounds is the number of steps of the optimizer that steps most often, whatever the others' rates.

    The busiest steps in every iteration, each other one every so many iterations, before or after it.
    """
    rounds = Rounds()
    for optimizer in range(len(others) + 1):
        rounds.know(optimizer, {optimizer})
    made = 0

    def step(optimizer: int) -> None:
        nonlocal made
        if rounds.joins_ended(optimizer):
            rounds.joined(optimizer)
            return
        if rounds.would_repeat(optimizer):
            rounds.close()
            made += 1
        if rounds.stepped(optimizer):
            rounds.close()
            made += 1

    for iteration in range(iterations):
        if rounds.backward_begins():
            rounds.close()
            made += 1
        for number, (every, ahead) in enumerate(others, start=1):
            if ahead and iteration % every == 0:
                step(number)
        step(0)
        for number, (every, ahead) in enumerate(others, start=1):
            if not ahead and iteration % every == 0:
                step(number)
    assert made + rounds.open == iterations
