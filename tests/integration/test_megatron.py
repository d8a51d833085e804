"""Megatron-core over two ranks, against the same training in one process without it."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from integration.conftest import HERE, integration_runner
from integration.truth import EVERYTHING, statistics

from msmon.backends.pytorch.adapters.megatron import MegatronAdapter, follow_optimizers
from msmon.offline.merge import merge
from msmon.offline.reader import read_kind
from msmon.runtime.ledger import Ledger
from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from conftest import Finished, Runner

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("megatron")]
SPREAD = ["Spread32", "Spread16", "Overlap"]
KNOWN = ["Float32", "Bfloat16", "OverlapWhole", "Tensor", *SPREAD]
ALL = [*KNOWN, "Gpt", "Stages", "Scaled"]
ELSEWHERE = os.environ.get("MSMON_TEST_MEGATRON", "")
"""A folder with another release of megatron-core, to run the tests of rows with that one."""
TAPS = {
    "ops": [*EVERYTHING["ops"], "dtype", "shape"],
    "xy_distribution": True,
    "all_xy": True,
    "mg_direction": True,
    "ur_distribution": True,
    "monitor_mbs_grad": True,
    "cc_distribution": {"enable": True, "cc_pre_hook": True},
}


class Ranks(NamedTuple):
    """What both ranks recorded, and what they know to be true."""

    finished: Finished
    known: list[dict[str, Any]]

    def places(self, rank: int, label: str) -> dict[str, dict[str, Any]]:
        (model,) = [model for model in self.finished.run_file(rank)["models"] if model["label"] == label]
        return {parameter["name"].removeprefix(f"{label}."): parameter for parameter in model["parameters"]}

    def rows(self, rank: int, kind: str, label: str) -> dict[tuple[str, int, int | None], Mapping[str, Any]]:
        rows = [row for row in self.finished.rows(kind, rank) if row.name.startswith(f"{label}.")]
        found = {(row.name.removeprefix(f"{label}."), row.step, row.micro_step): row.values for row in rows}
        assert len(found) == len(rows)
        return found


def run(runner: Runner, *args: str, config: dict[str, Any] | None = None) -> Ranks:
    script = HERE / "megatron_ranks.py"
    if ELSEWHERE:
        runner.environment["PYTHONPATH"] = os.pathsep.join([ELSEWHERE, runner.environment["PYTHONPATH"]])
    if config is None:
        finished = runner.bare(script, *args, ranks=2, MONITOR_OUTPUT_DIR=str(runner.output))
    else:
        finished = runner.monitored(script, *args, ranks=2, config=config)
    assert finished.returncode == 0, finished.stderr[-3000:]
    known = [torch.load(runner.folder / f"truth.json{rank}") for rank in range(2)]
    return Ranks(finished, known)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run(integration_runner(tmp_path_factory.mktemp("bare")))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run(integration_runner(tmp_path_factory.mktemp("watched")), config=EVERYTHING)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run(integration_runner(tmp_path_factory.mktemp("everything")), config={**EVERYTHING, **TAPS})


@pytest.fixture(scope="module")
def merged(watched: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge(watched.finished.output, tmp_path_factory.mktemp("merged")).directory


def skip_what_was_not_trained(ranks: Ranks, label: str) -> None:
    if ELSEWHERE and label not in ranks.known[0]:
        pytest.skip(f"that release cannot train {label} here")


def part(tensor: torch.Tensor, place: Mapping[str, Any]) -> torch.Tensor:
    """What ``run.json`` says that a rank has of a whole."""
    if "flat_offset" in place:
        return tensor.flatten().narrow(0, place["flat_offset"], math.prod(place["shape"]))
    for dimension, start in enumerate(place.get("offset", ())):
        tensor = tensor.narrow(dimension, start, place["shape"][dimension])
    return tensor if place["shape"] != [0] else tensor.flatten()[:0]


def assert_close(found: Mapping[str, Any], true: torch.Tensor, what: object, tolerance: float) -> None:
    for statistic, value in zip(Statistic, statistics(true), strict=True):
        recorded = float(found[statistic.value])
        same = math.isclose(recorded, value, rel_tol=tolerance, abs_tol=tolerance / 100)
        assert same, f"{what} {statistic.value}: recorded {recorded!r}, true {value!r}"


@pytest.mark.parametrize("label", KNOWN)
def test_rows_of_each_rank(watched: Ranks, label: str) -> None:
    """Before reduction this rank's own sum; the clipped mean, weights and state of what its optimizer updates."""
    skip_what_was_not_trained(watched, label)
    for rank, known in enumerate(watched.known):
        places = watched.places(rank, label)
        for kind, tensors in known[label]["true"].items():
            rows = watched.rows(rank, kind, label)
            expected = {}
            for (name, step), tensor in tensors.items():
                spread = "flat_offset" in places[name] or places[name]["shape"] == [0]
                here = tensor if kind == "grad_unreduced" and spread else part(tensor, places[name])
                if here.numel():
                    expected[name, step, None] = here
            assert rows.keys() == expected.keys(), kind
            for key, tensor in expected.items():
                assert_close(rows[key], tensor, (rank, kind, *key), 1e-4)
        steps = [line for line in watched.finished.steps(rank) if line["model"] == label]
        assert [(line["step"], line["micro_steps"], line["complete"]) for line in steps] == [
            (str(step), "2", "1") for step in range(3)
        ]


def test_bfloat16(everything: Ranks) -> None:
    """Weights are the model's own, gradients and state are the float32 that the optimizer works with."""
    kinds = {"param_origin": "bfloat16", "param_updated": "bfloat16"}
    kinds |= dict.fromkeys(("grad_unreduced", "grad_reduced", "exp_avg"), "float32")
    for label in ("Bfloat16", "Spread16"):
        for kind, dtype in kinds.items():
            rows = everything.rows(0, kind, label)
            assert rows
            assert {values["dtype"] for values in rows.values()} == {f"torch.{dtype}"}, kind


def test_sums_of_micro_batches(everything: Ranks) -> None:
    """Each micro-batch has the sum up to it, and the last one that of the buffer when communication starts."""
    for label in ("Bfloat16", "Overlap"):
        for rank, known in enumerate(everything.known):
            rows = everything.rows(rank, "grad_unreduced", label)
            assert {key[2] for key in rows} == {0, 1}
            for (name, step), tensor in known[label]["true"]["grad_unreduced"].items():
                assert_close(rows[name, step, 1], tensor, (label, rank, name, step), 1e-4)
                assert float(rows[name, step, 0]["norm"]) != float(rows[name, step, 1]["norm"])
            for (name, step), tensor in known[label]["first"].items():
                assert_close(rows[name, step, 0], tensor, (label, rank, name, step), 1e-4)


def test_micro_batches_of_chunks(everything: Ranks) -> None:
    """Two chunks take turns on each of two stages; forwards and backwards of each have the numbers of its micro-batches."""
    chunks = {"Stages", "Stages_1"}
    for rank in range(2):
        for kind in ("grad_unreduced", "actv", "actv_grad"):
            rows = [row for row in everything.finished.rows(kind, rank) if row.name.split(".")[0] in chunks]
            assert {row.name.split(".")[0] for row in rows} == chunks
            found: dict[tuple[str, int], list[int | None]] = {}
            for row in rows:
                found.setdefault((row.name, row.step), []).append(row.micro_step)
            assert {tuple(sorted(map(str, numbers))) for numbers in found.values()} == {("0", "1", "2", "3")}


@pytest.mark.parametrize("label", SPREAD)
def test_stretches_make_the_whole(watched: Ranks, label: str) -> None:
    """The stretches that run.json names cover each parameter without overlapping; some begin in the middle of one."""
    skip_what_was_not_trained(watched, label)
    ranks = [watched.places(rank, label) for rank in range(2)]
    sizes = []
    for name, place in ranks[0].items():
        here = [rank[name] for rank in ranks if rank[name]["shape"] != [0]]
        covered = [number for p in here for number in range(p["flat_offset"], p["flat_offset"] + math.prod(p["shape"]))]
        assert sorted(covered) == list(range(math.prod(place["whole_shape"]))), name
        sizes += [len(covered) / math.prod(p["shape"]) for p in here]
    assert any(size > 1 for size in sizes)


@pytest.mark.parametrize("label", ["Spread32", "Tensor"])
def test_merged_ranks_are_the_whole(watched: Ranks, merged: Path, label: str) -> None:
    """Rows of both ranks together are those of the twin that nobody has spread."""
    skip_what_was_not_trained(watched, label)
    for kind in ("param_origin", "param_updated", "grad_reduced", "exp_avg_sq"):
        rows = {(row.name.removeprefix(f"{label}."), row.step): row for row in read_kind(merged, kind)}
        for key, tensor in watched.known[0][label]["true"][kind].items():
            assert_close(rows[key].values, tensor, (kind, *key), 1e-4)


def test_updates(everything: Ranks) -> None:
    """Adam's update is that of the tensors inside: at the first step the sign of each gradient, wherever that is kept."""
    for label in KNOWN:
        rows = {key: values for key, values in everything.rows(0, "update", label).items() if key[1] == 0}
        gradients = everything.rows(0, "grad_reduced", label)
        assert {key[0] for key in rows} == {key[0] for key in gradients}
        for key, values in rows.items():
            elements = math.prod(json.loads(values["shape"]))
            assert float(values["norm"]) == pytest.approx(math.sqrt(elements), rel=1e-2), key


@pytest.mark.parametrize("label", ALL)
def test_same_bits(bare: Ranks, everything: Ranks, label: str) -> None:
    """With every tap on, losses and weights are equal to the bit."""
    skip_what_was_not_trained(bare, label)
    for alone, seen in zip(bare.known, everything.known, strict=True):
        assert alone[label]["bits"] == seen[label]["bits"]


def test_nothing_is_switched_off(everything: Ranks) -> None:
    """Every tap goes through Megatron, and every model has its adapter."""
    assert "switched off" not in everything.finished.stderr
    assert "plain PyTorch" not in everything.finished.stderr
    models = everything.finished.run_file()["models"]
    adapters = {label: model["adapter"] for model in models for label in model["label"].split("+")}
    assert {adapters[label] for label in ALL} == {"megatron"}


def test_skipped_steps(watched: Ranks) -> None:
    """A step that Megatron leaves out because of infinities is a skipped one, with the loss scale of its gradients."""
    lines = [line for line in watched.finished.steps() if line["model"] == "Scaled"]
    found = [[line["skipped"] == "0", float(line["grad_scale"])] for line in lines]
    assert found == watched.known[0]["Scaled"]["steps"]
    assert {taken for taken, _ in found} == {True, False}
    reduced = watched.rows(0, "grad_reduced", "Scaled")
    assert {key[1] for key in reduced} == {step for step, (taken, _) in enumerate(found) if taken}
    assert all(math.isfinite(float(values["norm"])) for values in reduced.values())


def test_chunks_in_a_script(tmp_path: Path) -> None:
    """Chunks have their stage; of gradients that are equal on all ranks only the first writes rows; no trace is left."""
    runner = integration_runner(tmp_path)
    runner.write_config(**EVERYTHING)
    ranks = run(runner, "Chunks")
    for rank, known in enumerate(ranks.known):
        told = known["Chunks"]
        assert told["before"] == told["after"] != told["during"]
        for found, true in told["told"]:
            assert found == pytest.approx(true, rel=1e-5)
        unreduced = ranks.finished.rows("grad_unreduced", rank)
        assert {row.stage for row in unreduced} == {0, 1}
        assert {row.name for row in unreduced if row.stage == 0} == {row.name for row in unreduced if row.stage == 1}
        assert (len(ranks.finished.rows("grad_reduced", rank)) > 0) == (rank == 0)


def test_split_layers_in_a_script(tmp_path: Path) -> None:
    """Of parameters that tensor parallelism leaves whole, only the first rank of ``tp_group`` writes reduced gradients."""
    runner = integration_runner(tmp_path)
    runner.write_config(**EVERYTHING)
    ranks = run(runner, "Split")
    first, second = ({row.name for row in ranks.finished.rows("grad_reduced", rank)} for rank in range(2))
    assert first - second == {
        f"module.{name}" for name in ("outer.bias", "norm.weight", "norm.bias", "head.weight", "head.bias")
    }
    assert second == {f"module.{name}" for name in ("inner.weight", "inner.bias", "outer.weight")}


def test_not_in_use() -> None:
    """A plain model is no matter of the adapter, and nothing is said."""
    model = torch.nn.Linear(1, 1)
    assert MegatronAdapter().applies([model], [torch.optim.SGD(model.parameters(), lr=0.1)]) == "not in use"


@pytest.mark.filterwarnings("ignore")  # Megatron's, about what is not installed
def test_an_unknown_optimizer_is_said() -> None:
    """Of an optimizer that Megatron does not have, nobody knows which tensor stands for which parameter."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    ledger = Ledger()
    follow_optimizers(ledger, lambda find: lambda complete: None, lambda original: original)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    methods = dict.fromkeys(MegatronOptimizer.__abstractmethods__)
    wrapper = type("Unknown", (MegatronOptimizer,), methods)(optimizer, OptimizerConfig())
    reason = MegatronAdapter().applies([model], [optimizer])
    ledger.undo()
    assert wrapper.optimizer is optimizer
    assert "Unknown" in reason
    assert "is not known" in reason


def test_another_version_is_said(tmp_path: Path) -> None:
    """Where Megatron has no place to read gradients before reduction, training goes on and the reason names the place."""
    ranks = run(integration_runner(tmp_path), "--another-version", "Float32", config=EVERYTHING)
    assert "start_grad_sync" in ranks.finished.stderr
    assert "recorded as plain PyTorch" in ranks.finished.stderr
    assert len(ranks.rows(0, "grad_reduced", "Float32")) == 3 * 8
