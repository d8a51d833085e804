"""The same trainings watched by the original and by msmon: equal files, rows and values, or a difference on purpose."""

from __future__ import annotations

import os
import re
from datetime import datetime
from pathlib import Path

import pytest
from compat.conftest import PYTHON_VARIABLE
from compat.recording import DIRECTORY, RELATIVE, Recording, differences, same_cell
from compat.scenarios import SCENARIOS

if not os.environ.get(PYTHON_VARIABLE):
    reason = f"{PYTHON_VARIABLE} names no Python with mindstudio-probe: run `make test-compat`"
    pytest.skip(reason, allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("compat")]

GUIDE = Path(__file__).parents[2] / "docs" / "compatibility.md"

DIFFERENT = {
    "exception-before-step": "D6",
    "small-values": "D10",
    "few-digits": "D10",
    "huge-double": "D11",
    "sparse": "D12",
    "complex-numbers": "D13",
    "no-elements": "D14",
    "execution-order": "D15",
    "frozen": "D20",
    "unused": "D21",
    "subset": "D22",
    "several-optimizer-states": "D23",
    "momentum": "D23",
    "loss-scaling": "D24",
    "closure": "D25",
    "unused-in-first-micro-batch": "D26",
    "more-micro-batches-than-said": "D26",
    "tied-target": "D27",
    "squash-clashing": "D28",
    "squash-landmarks": "D28",
    "odd-names": "D29",
    "formula-name": "D29",
    "two-models": "D30",
    "activations": "D60",
    "activations-forward": "D60",
    "activations-backward": "D60",
    "activations-several-steps": "D60",
    "activations-no-gradient": "D61",
    "activations-targets": "D62",
    "activations-structures": "D63",
    "config-unknown-key": "D40",
    "config-unknown-op": "D41",
    "config-text-for-a-switch": "D42",
    "config-negative-start": "D42",
    "config-zero-interval": "D42",
    "config-unknown-format": "D42",
    "config-whole-number-for-eps": "D43",
    "no-times": "D44",
    "no-main-grad": "D50",
    "argument-no-number": "D51",
    "guide-order": "D52",
    "scheduler-after": "D53",
    "spectral-norms": "D16",
    "spectral-norms-of-all": "D16",
    "attention-of-two-samples": "D17",
}
"""Scenario → the row of docs/compatibility.md that says why msmon differs. Every other scenario must agree."""

NEARLY = {"high-order-features": 1e-5}
"""Scenario → how far values may be apart: they are float32, and the original adds a little before it takes a logarithm."""

REFUSED = {
    "config-unknown-key": "wg_distributions",
    "config-unknown-op": "ops[1]",
    "config-text-for-a-switch": "mv_distribution",
    "config-negative-start": "start_step",
    "config-zero-interval": "step_interval",
    "config-unknown-format": "format",
    "argument-no-number": "start_iteration",
}
"""Scenario that msmon refuses and the original trains through → the key or argument that the message names."""


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name not in DIFFERENT])
def test_same(original: Recording, ours: Recording, scenario: str) -> None:
    """Files, columns, rows, their order and every value are those of the original."""
    assert not ours.error(scenario) or original.error(scenario)
    relative = NEARLY.get(scenario, RELATIVE)
    assert differences(original.tables(scenario), ours.tables(scenario), relative) == []


@pytest.mark.parametrize("scenario", DIFFERENT)
def test_different_on_purpose(original: Recording, ours: Recording, scenario: str) -> None:
    """What is listed as a difference is one still, and the guide has its row."""
    assert differences(original.tables(scenario), ours.tables(scenario)) != []
    assert re.search(rf"^\| {DIFFERENT[scenario]} \|", GUIDE.read_text(), re.MULTILINE)


def test_local_time(original: Recording, ours: Recording) -> None:
    """D1: directories are named after local time, not after the time in Beijing."""
    stamps = []
    for recording in (original, ours):
        match = DIRECTORY.fullmatch(recording.directories("little")[0].name)
        assert match
        stamps.append(datetime.strptime(f"2000 {match['stamp']}", "%Y %b%d_%H-%M-%S"))  # noqa: DTZ007 - has no zone
    hours = (stamps[0] - stamps[1]).total_seconds() % (24 * 3600) / 3600
    assert 10 < hours < 14  # New York is 12 or 13 hours behind; the two recordings are minutes apart


def test_one_id_for_all_ranks(original: Recording, ours: Recording) -> None:
    """D2: the directories of a run's ranks end in the same id."""
    ids = [{directory.name[-8:] for directory in recording.directories("two-ranks")} for recording in (original, ours)]
    assert [len(found) for found in ids] == [2, 1]


def test_few_lines(original: Recording, ours: Recording) -> None:
    """D4: nothing is said on stdout, and a few lines on stderr, each of them marked as msmon's own."""
    assert original.text("little", "stdout-0") + original.text("little", "stderr-0")
    assert ours.text("little", "stdout-0") == ""
    lines = ours.text("little", "stderr-0").splitlines()
    assert 0 < len(lines) <= 3
    assert all(line.startswith("msmon: ") for line in lines)


def test_further_files(original: Recording, ours: Recording) -> None:
    """D3: steps.csv, run.json and a lock that keeps two runs apart lie beside the files of the original, and nothing else does."""
    names = [{path.name for path in recording.directories("little")[0].iterdir()} for recording in (original, ours)]
    assert names[1] - names[0] == {"steps.csv", "run.json", ".lock"}
    assert names[0] - names[1] == set()


def test_step_cut_short(original: Recording, ours: Recording) -> None:
    """D6: gradients of a step that an exception cut short are on disk."""
    assert "grad_unreduced_1-1.csv" not in original.files("exception-before-step")
    assert "grad_unreduced_1-1.csv" in ours.files("exception-before-step")


def test_no_directory_without_training(original: Recording, ours: Recording) -> None:
    """D9: a process that does not train leaves no directory."""
    assert len(original.directories("no-training")) == 1
    assert ours.directories("no-training") == []


def test_small_values(original: Recording, ours: Recording) -> None:
    """D10: a value below 0.1 keeps its significant digits; all others are as before."""
    file = "exp_avg_sq_1-1.csv"
    assert original.column("small-values", file, "max")["fc.weight"] == "0.0"
    assert ours.column("small-values", file, "max")["fc.weight"] == "3.57305e-12"
    for key, table in ours.tables("small-values").items():
        for theirs, mine in zip(original.tables("small-values")[key], table, strict=True):
            changed = [(a, b) for a, b in zip(theirs, mine, strict=True) if not same_cell(a, b)]
            assert all(abs(float(b)) < 0.1 and round(float(b), 6) == float(a) for a, b in changed)


def test_norm_does_not_overflow(original: Recording, ours: Recording) -> None:
    """D11: the norm of large float64 values is finite."""
    assert original.column("huge-double", "param_origin_0-0.csv", "norm") == {"0": "inf"}
    assert ours.column("huge-double", "param_origin_0-0.csv", "norm") == {"0": "2e+200"}


def test_sparse_gradients(original: Recording, ours: Recording) -> None:
    """D12: a sparse gradient has the statistics of its dense form; the norm, which the original has too, agrees."""
    file = "grad_reduced_0-0.csv"
    assert original.column("sparse", file, "min") == {"weight": "nan"}
    assert float(ours.column("sparse", file, "min")["weight"]) < 0
    assert ours.column("sparse", file, "zeros") == {"weight": "0.8"}
    assert float(ours.column("sparse", file, "norm")["weight"]) == pytest.approx(
        float(original.column("sparse", file, "norm")["weight"])
    )


def test_complex_numbers(original: Recording, ours: Recording) -> None:
    """D13: complex tensors are seen through the magnitude, their imaginary part included."""
    assert original.column("complex-numbers", "param_origin_0-0.csv", "norm") == {"0": "3.0"}
    assert float(ours.column("complex-numbers", "param_origin_0-0.csv", "norm")["0"]) == pytest.approx(26**0.5)


def test_tensors_without_elements(original: Recording, ours: Recording) -> None:
    """D14: a tensor without elements has empty cells instead of nan, in every kind of file."""
    assert original.column("no-elements", "grad_reduced_0-0.csv", "min")["0"] == "nan"
    assert ours.column("no-elements", "grad_reduced_0-0.csv", "min") == {"0": "", "1": "1.0"}
    assert original.names("no-elements", "param_origin_0-0.csv") == ["1"]
    assert ours.names("no-elements", "param_origin_0-0.csv") == ["0", "1"]


def test_order_of_execution(original: Recording, ours: Recording) -> None:
    """D15: the op `id` is the place in the order of execution; the original writes nan for these kinds."""
    file = "grad_unreduced_0-0.csv"
    assert set(original.column("execution-order", file, "id").values()) == {"nan"}
    assert list(ours.column("execution-order", file, "id").values()) == ["0", "1", "2", "3"]


def test_frozen_parameters(original: Recording, ours: Recording) -> None:
    """D20: frozen parameters have rows of their weights; all other rows are those of the original."""
    mine, theirs = ours.tables("frozen"), original.tables("frozen")
    for key in [key for key in mine if key[1].startswith("param_")]:
        assert {row[1] for row in mine[key]} - {row[1] for row in theirs[key]} == {"0.weight", "0.bias"}
        mine[key] = [row for row in mine[key] if row[1] not in {"0.weight", "0.bias"}]
    assert differences(theirs, mine) == []


def test_no_stale_gradients(original: Recording, ours: Recording) -> None:
    """D21: a parameter without a gradient in a step has no row; the original repeats its last gradient."""
    for file in ("grad_unreduced_1-1.csv", "grad_reduced_1-1.csv"):
        stale = original.column("unused", file, "norm")["a.weight"]
        assert stale == original.column("unused", file.replace("1", "0"), "norm")["a.weight"]
        assert set(ours.names("unused", file)) == {"b.weight", "b.bias"}
        norms = [recording.column("unused", file, "norm")["b.weight"] for recording in (original, ours)]
        assert same_cell(*norms)


def test_parameters_that_no_optimizer_holds(original: Recording, ours: Recording) -> None:
    """D22: they come last; rows and values are the same."""
    mine, theirs = ours.tables("subset"), original.tables("subset")
    for key, (_, *rows) in mine.items():
        assert {row[1] for row in rows[:2]} == {"out.weight", "out.bias"}, key
    in_order = [{key: [table[0], *sorted(table[1:])] for key, table in each.items()} for each in (theirs, mine)]
    assert differences(*in_order) == []


@pytest.mark.parametrize(
    ("scenario", "key"), [("momentum", "momentum_buffer"), ("several-optimizer-states", "max_exp_avg_sq")]
)
def test_every_state_tensor(original: Recording, ours: Recording, scenario: str, key: str) -> None:
    """D23: every tensor of the optimizer's state has files under its own name, beside those of the original."""
    more = {file for file in ours.files(scenario) if file not in original.files(scenario)}
    assert more == {f"{key}_1-1.csv", f"{key}_2-2.csv"}
    shared = {place: table for place, table in ours.tables(scenario).items() if place[1] not in more}
    assert differences(original.tables(scenario), shared) == []


def test_skipped_steps(original: Recording, ours: Recording) -> None:
    """D24: a step that the loss scaler skips keeps its number, so that the third iteration is step 2 and not step 1."""
    third = ours.tables("loss-scaling")[0, "grad_reduced_2-2.csv"]
    as_second = [[*row[:2], "1", *row[3:]] if row[2] == "2" else row for row in third]
    assert (
        differences({(0, ""): original.tables("loss-scaling")[0, "grad_reduced_1-1.csv"]}, {(0, ""): as_second}) == []
    )
    assert set(ours.column("loss-scaling", "grad_reduced_1-1.csv", "norm").values()) <= {"nan", "inf"}


def test_closures(original: Recording, ours: Recording) -> None:
    """D25: with a closure the reduced gradient is this step's own, not that of the step before."""
    assert "grad_reduced_0-0.csv" not in original.files("closure")
    late = original.column("closure", "grad_reduced_2-2.csv", "norm")
    assert late == pytest.approx(ours.column("closure", "grad_reduced_1-1.csv", "norm"))


def test_micro_batch_of_a_row(original: Recording, ours: Recording) -> None:
    """D26: micro_step is the backward pass that a gradient came from, and no row is left over from the step before."""
    for step in ("0", "1"):
        _, *rows = ours.tables("unused-in-first-micro-batch")[0, f"grad_unreduced_{step}-{step}.csv"]
        assert [row[3] for row in rows if row[1] == "b.weight"] == ["1"]
    _, *rows = original.tables("unused-in-first-micro-batch")[0, "grad_unreduced_1-1.csv"]
    assert [row[3] for row in rows if row[1] == "b.weight"] == ["0", "1"]


def test_more_micro_batches_than_said(ours: Recording) -> None:
    """D26: backward passes beyond grad_acc_steps are counted to the last micro-batch, whose sum is the whole one."""
    header, *rows = ours.tables("more-micro-batches-than-said")[0, "grad_unreduced_0-0.csv"]
    norms = {row[3]: float(row[header.index("norm")]) for row in rows if row[1] == "out.bias"}
    assert norms == pytest.approx({"0": 7.1, "1": 21.3}, rel=1e-6)


def test_target_on_a_tied_parameter(original: Recording, ours: Recording) -> None:
    """D27: a target may be any of a tied parameter's names; the row has the first."""
    assert original.files("tied-target") == set()
    assert ours.names("tied-target", "grad_reduced_0-0.csv") == ["embedding.weight"]


def test_short_names_are_unique(original: Recording, ours: Recording) -> None:
    """D28: names that would become equal stay whole, all of them, and none of their rows is lost."""
    file = "param_origin_0-0.csv"
    assert original.names("squash-clashing", file)[:2] == ["layers.0.weight", "decoder.layers.0.weight"]
    assert ours.names("squash-clashing", file)[:2] == ["encoder.layers.0.weight", "decoder.layers.0.weight"]
    assert len(original.names("squash-landmarks", file)) == 14
    short = ours.names("squash-landmarks", file)
    assert len(short) == 15
    assert set(original.names("squash-landmarks", file)) == {name for name in short if name != "e.norm.weight"}


def test_names_with_any_character(original: Recording, ours: Recording) -> None:
    """D29: names with `:` and `/` stay whole and shift no column; one that begins with `=` stops nothing."""
    names = ["a:b", "c/d", "e,f", "g h"]
    assert ours.names("odd-names", "grad_reduced_0-0.csv") == names
    assert original.names("odd-names", "grad_reduced_0-0.csv") == ["a", "c", "e,f", "g h"]
    assert "=x" in original.error("formula-name")
    assert ours.names("formula-name", "grad_reduced_0-0.csv") == ["=x"]


def test_two_models(original: Recording, ours: Recording) -> None:
    """D30: two models under one monitor keep their own values; in the original the last one's replace the first one's."""
    shapes = [
        [row[-2] for row in recording.tables("two-models")[0, "grad_reduced_0-0.csv"][1:] if row[1].endswith("weight")]
        for recording in (original, ours)
    ]
    assert shapes[1] == ["[2, 3]", "[3, 3]"]
    names = [row[1] for row in ours.tables("two-models")[0, "grad_reduced_0-0.csv"][1:]]
    assert names == ["weight", "bias", "Linear_1.weight", "Linear_1.bias"]
    assert differences(original.tables("two-models"), ours.tables("two-models"))


@pytest.mark.parametrize("scenario", REFUSED)
def test_refused(original: Recording, ours: Recording, scenario: str) -> None:
    """D40 to D42, D46, D51: what the original ignores, replaces or takes for true ends in an error that names the place."""
    assert not original.error(scenario)
    assert f"`{REFUSED[scenario]}`" in ours.error(scenario)
    assert ours.files(scenario) == set()


def test_whole_number_for_a_decimal(original: Recording, ours: Recording) -> None:
    """D43: `"eps": 1` is a number."""
    assert "TypeError" in original.error("config-whole-number-for-eps")
    assert not ours.error("config-whole-number-for-eps")


def test_collect_no_step(original: Recording, ours: Recording) -> None:
    """D44: collect_times 0 collects nothing; the original collects one step."""
    assert "grad_reduced_0-0.csv" in original.files("no-times")
    assert ours.files("no-times") == set()


@pytest.mark.parametrize("scenario", ["no-main-grad", "guide-order", "scheduler-after"])
def test_training_that_the_original_stops(original: Recording, ours: Recording, scenario: str) -> None:
    """D50, D52, D53: main_grad that is not there, the guide's order of arguments, a scheduler made later: all train on."""
    assert "AttributeError" in original.error(scenario)
    assert not ours.error(scenario)
    assert "grad_reduced_0-0.csv" in ours.files(scenario)


@pytest.mark.parametrize("scenario", ["spectral-norms", "spectral-norms-of-all"])
def test_spectral_norms(original: Recording, ours: Recording, scenario: str) -> None:
    """D16: both are the spectral norm; the original's comes of a few steps from a random vector, and is never above it."""
    for step in range(3):
        file = f"linear_hook_{step}-{step}.csv"
        norms, mine = (recording.column(scenario, file, "kernel_norm") for recording in (original, ours))
        ranks, own_ranks = (recording.column(scenario, file, "sr") for recording in (original, ours))
        assert list(norms) == list(mine)
        for name, norm in norms.items():
            assert 0.5 * float(mine[name]) < float(norm) < 1.001 * float(mine[name])
            frobenius = float(norm) * float(ranks[name])
            assert float(mine[name]) * float(own_ranks[name]) == pytest.approx(frobenius, rel=1e-5)


Rows = dict[tuple[str, ...], list[str]]


def by_name(recording: Recording, scenario: str, kind: str) -> Rows:
    """Chunk, name, step and micro-step of each activation → its cells."""
    found = {}
    for (_, file), (_, *rows) in recording.tables(scenario).items():
        if file.rpartition("_")[0] == kind:
            found.update({tuple(row[:4]): row[4:] for row in rows})
    return found


def same_rows(one: Rows, other: Rows) -> bool:
    return one.keys() == other.keys() and all(
        same_cell(a, b) for key in one for a, b in zip(one[key], other[key], strict=True)
    )


@pytest.mark.parametrize(
    "scenario", ["activations", "activations-forward", "activations-backward", "activations-several-steps"]
)
def test_activations(original: Recording, ours: Recording, scenario: str) -> None:
    """D60: every row of an activation and of its gradient is there with every value; their order differs."""
    assert original.files(scenario) == ours.files(scenario)
    for kind in ("actv", "actv_grad"):
        rows = by_name(original, scenario, kind)
        assert rows or scenario in {"activations-forward", "activations-backward"}
        assert same_rows(rows, by_name(ours, scenario, kind))


def test_activations_without_gradient(original: Recording, ours: Recording) -> None:
    """D61: of a tensor without a gradient there is no row, instead of one that is `nan` all through."""
    theirs, mine = (by_name(recording, "activations-no-gradient", "actv_grad") for recording in (original, ours))
    empty = {key for key, cells in theirs.items() if set(cells) == {"nan"}}
    assert {name for _, name, _, _ in empty} == {"fc.input", ".input"}
    assert same_rows({key: cells for key, cells in theirs.items() if key not in empty}, mine)


def test_activations_of_targets(original: Recording, ours: Recording) -> None:
    """D62: of a target only the sides that its entry names are recorded."""
    for kind, names in (("actv", {"start.input", "start.output"}), ("actv_grad", {"blocks.1.output"})):
        theirs, mine = (by_name(recording, "activations-targets", kind) for recording in (original, ours))
        assert {key[1] for key in theirs} > names
        assert same_rows({key: cells for key, cells in theirs.items() if key[1] in names}, mine)


def test_structures(original: Recording, ours: Recording) -> None:
    """D63, D64, D65: keyword arguments and what containers hold; calls told apart; inputs before they are written to."""
    theirs, mine = (by_name(recording, "activations-structures", "actv") for recording in (original, ours))
    assert ("0", "split.input.more", "0", "0") in mine
    assert all(not name.startswith("split.input_") for _, name, _, _ in theirs)
    before, after = (("0", f"relu.{side}", "0", "0") for side in ("input", "output"))
    assert theirs[before] == theirs[after]
    assert mine[before][0] != mine[after][0]
    first, second = (("0", f"end{call}.output", "0", "0") for call in ("", "@1"))
    assert first in mine
    assert all(map(same_cell, theirs[first], mine[second]))
    key = "0", ".input", "0", "0"
    gradients = [by_name(recording, "activations-structures", "actv_grad")[key] for recording in (original, ours)]
    assert all(map(same_cell, *gradients))
