"""Pure decisions: which steps, which names, which parameters."""

from __future__ import annotations

import pytest

from msmon.plan.gate import StepGate
from msmon.plan.names import squash, squash_all, unique_label
from msmon.plan.rounds import Rounds
from msmon.plan.selection import Selection


def collected(gate: StepGate, steps: int, first: int = 0) -> list[int]:
    found = []
    for step in range(first, first + steps):
        if gate.wants(step):
            gate.count()
            found.append(step)
    return found


def test_gate() -> None:
    """P6: start 1, interval 2, 2 times: of 8 steps exactly 1 and 3, and then it is finished."""
    gate = StepGate(1, 2, 2)
    assert not gate.finished
    assert collected(gate, 8) == [1, 3]
    assert gate.finished


def test_gate_that_collects_nothing() -> None:
    """Zero times collects nothing and is finished at once."""
    gate = StepGate(0, 1, 0)
    assert gate.finished
    assert collected(gate, 5) == []


def test_gate_of_a_resumed_run() -> None:
    """The interval is counted from the start step, wherever the run begins."""
    assert collected(StepGate(3, 5, 100), 20, first=10) == [13, 18, 23, 28]


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("Module.embeddings.weight", "embeddings.weight"),  # P41
        ("model.layers.0.mlp.weight", "layers.0.mlp.weight"),
        ("model.decoder.layer.3.norm.weight", "layer.3.norm.weight"),
        ("model.embedding.word.weight", "embedding.word.weight"),
        ("model.final_layernorm.weight", "final_layernorm.weight"),
        ("model.output_layer.bias", "output_layer.bias"),
        ("model.norm1.weight", "norm1.weight"),
        ("outer.layers.0.inner.layers.1.weight", "layers.1.weight"),
        ("layers.0.norm.weight", "layers.0.norm.weight"),  # a landmark at the beginning is one as well
        ("norm", "norm"),
        ("model.norm", "norm"),
        ("fc.weight", "fc.weight"),
        ("model.playersx.weight", "model.playersx.weight"),
        ("", ""),
    ],
)
def test_squash(name: str, short: str) -> None:
    """A name is shortened to its part from the last landmark on; without one, or where nothing is left, it stays."""
    assert squash(name) == short


def test_squashed_names_stay_unique() -> None:
    """Names that would become equal, also to another's whole name, are kept whole."""
    assert squash_all(["a.layers.0.w", "b.layers.0.w", "c.layers.1.w"]) == {
        "a.layers.0.w": "a.layers.0.w",
        "b.layers.0.w": "b.layers.0.w",
        "c.layers.1.w": "layers.1.w",
    }
    assert squash_all(["layers.0.w", "a.layers.0.w"]) == {"layers.0.w": "layers.0.w", "a.layers.0.w": "a.layers.0.w"}


def test_labels() -> None:
    """A label that is taken gets a number."""
    assert unique_label("Net", []) == "Net"
    assert unique_label("Net", ["Net"]) == "Net_1"
    assert unique_label("Net", ["Net", "Net_1", "Other"]) == "Net_2"


NAMES = [
    "embed.weight",
    "blocks.0.attn.q.weight",
    "blocks.0.mlp.weight",
    "blocks.1.attn.q.weight",
    "blocks.10.mlp.weight",
]


def selected(*targets: str) -> list[str]:
    selection = Selection(targets)
    return [name for name in NAMES if selection.selects(name)]


def test_selection() -> None:
    """A parameter is watched when its name starts with a target, or with what a glob target matches; none is all."""
    assert selected() == NAMES
    assert selected("embed") == ["embed.weight"]
    assert selected("blocks.1") == ["blocks.1.attn.q.weight", "blocks.10.mlp.weight"]
    assert selected("blocks.1.") == ["blocks.1.attn.q.weight"]
    assert selected("blocks.*.attn") == ["blocks.0.attn.q.weight", "blocks.1.attn.q.weight"]
    assert selected("blocks.[01].*.q") == ["blocks.0.attn.q.weight", "blocks.1.attn.q.weight"]
    assert selected("blocks.?.mlp") == ["blocks.0.mlp.weight"]
    assert selected("0:embed") == ["embed.weight"]  # as the original prints names
    assert selected("Embed") == []
    assert selected("") == NAMES


def test_selection_by_any_name() -> None:
    """A target matches the name with or without the prefixes of wrappers."""
    selection = Selection(["module.fc"])
    assert selection.selects("fc.weight", "module.fc.weight")
    assert not selection.selects("fc.weight")


def test_targets_that_match_nothing() -> None:
    """A target that selected nothing is named with the close names that exist."""
    selection = Selection(["blocks.0.atn", "embed", "zzzzzzz"])
    for name in NAMES:
        selection.selects(name)
    unmatched = selection.unmatched(NAMES)
    assert unmatched.keys() == {"blocks.0.atn", "zzzzzzz"}
    assert unmatched["blocks.0.atn"][0] == "blocks.0.attn"
    assert unmatched["zzzzzzz"] == []


def run_rounds(events: str, held: dict[str, set[int]]) -> list[str]:
    """Who steps in each round of a sequence of optimizer steps; ``-`` stands for a backward pass."""
    rounds, made = Rounds(), [""]
    for optimizer, parameters in held.items():
        rounds.know(ord(optimizer), parameters)
    for event in events:
        optimizer = ord(event)
        if event == "-":
            ended = rounds.backward_begins()
        elif rounds.joins_ended(optimizer):
            rounds.joined(optimizer)
            made[-2] += event
            continue
        else:
            ended = rounds.would_repeat(optimizer)
        if ended:
            rounds.close()
            made.append("")
        if event != "-":
            made[-1] += event
            if rounds.stepped(optimizer):
                rounds.close()
                made.append("")
    assert rounds.step + rounds.open == len([members for members in made if members])
    return [members for members in made if members]


@pytest.mark.parametrize(
    ("events", "known", "members"),
    [
        ("-A-A-A", "A", "A A A"),
        ("AAA", "A", "A A A"),  # without a backward pass
        ("-AB-AB-AB", "AB", "AB AB AB"),  # two optimizers of one model
        ("-A-B-A-B-A-B", "AB", "AB AB AB"),  # each with a backward pass of its own
        ("-AB-A-AB-A-AB", "AB", "AB A AB A AB"),  # every second step
        ("-BA-A-BA-A-BA", "AB", "BA A BA A BA"),  # the same, ahead of the other
        ("-A-A-AB-AB", "AB", "A A AB AB"),  # one that begins late
        ("-A-A-BA-BA", "AB", "A A BA BA"),  # the same, ahead of the other
        ("-A-AB-AB", "A", "A AB AB"),  # one that comes to life unseen
        ("-AB" + "-A" * 19 + "-AB" + "-A" * 19, "AB", "AB" + " A" * 19 + " AB" + " A" * 19),  # every twentieth step
        ("-A-BA-BA-BA", "AB", "AB A BA BA"),  # late by one, ahead of the other: one step is wrong, and no more
        ("-A-BA-A-BA-A-BA", "AB", "AB A A BA A BA"),
        ("-A-CBA-A-CBA", "ABC", "ACB A A CBA"),
        ("-B-A-A-A-A-B-A-A-A-A", "AB", "BA A A A BA A A A"),  # a critic ahead of four others
        ("-A-A-A-A", "AB", "A A A A"),  # one that never steps is not waited for
        ("-ABC-ABC", "ABC", "ABC ABC"),
        ("-ABCD-ABCD", "", "ABCD ABCD"),  # all made within the first step
        ("ABAB", "AB", "AB AB"),
        ("", "AB", ""),
    ],
)
def test_rounds(events: str, known: str, members: str) -> None:
    """A training step holds at most one step of each optimizer, and those that use the gradients of the same passes."""
    assert run_rounds(events, {optimizer: {ord(optimizer)} for optimizer in known}) == members.split()


@pytest.mark.parametrize(
    ("events", "held", "members"),
    [
        ("AABBAA", {"A": {1, 2}, "B": {1, 2}}, "A A B B A A"),  # phases over the same parameters
        ("ABAB", {"A": {1, 2}, "B": {2, 3}}, "A B A B"),  # two tasks around one encoder
        ("ABCABC", {"A": {1}, "B": {2}, "C": {1, 2}}, "AB C AB C"),
        ("AACCBB", {"A": {1}, "B": {2}, "C": {1}}, "A A C CB B"),
        ("-A-A-C-C-B-B", {"A": {1}, "B": {2}, "C": {1}}, "A A C C B B"),
    ],
)
def test_rounds_of_shared_parameters(events: str, held: dict[str, set[int]], members: str) -> None:
    """A training step holds at most one step of each parameter, and waits for no optimizer that cannot be part of it."""
    assert run_rounds(events, held) == members.split()


def test_rounds_forget_the_dead() -> None:
    """An optimizer that is gone is not waited for; another one in its place is another one."""
    rounds = Rounds()
    for _ in range(3):
        rounds.know(1, {1})
        for _ in range(2):
            assert not rounds.would_repeat(1)
            assert rounds.stepped(1)
            rounds.close()
        rounds.forget(1)
        rounds.know(2, {2})
        assert rounds.stepped(2)
        rounds.close()
        rounds.forget(2)
    assert rounds.step == 9


def test_rounds_stop_waiting() -> None:
    """One that has a backward pass of its own and has not stepped for long is not waited for any more."""
    rounds = Rounds()
    for optimizer in (1, 2):
        rounds.know(optimizer, {optimizer})
    for optimizer in (1, 2):
        rounds.backward_begins()
        complete = rounds.stepped(optimizer)
    assert complete
    rounds.close()
    rounds.backward_begins()
    waited = 0
    while not rounds.stepped(1):
        assert not rounds.backward_begins()
        rounds.close()
        waited += 1
    assert waited == 16


def test_rounds_begin_anywhere() -> None:
    """The first step has the number it is given."""
    rounds = Rounds(10)
    assert rounds.step == 10
    assert not rounds.open
    rounds.stepped(1)
    assert rounds.open
    rounds.close()
    assert rounds.step == 11
