"""DeepSpeed at every stage of ZeRO, over two ranks, against the same training in one process with plain PyTorch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from integration.conftest import HERE, integration_runner
from integration.truth import EVERYTHING, statistics

from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Finished, Runner

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deepspeed")]
STAGES = [0, 1, 2, 3]
WHOLE_IN_FLOAT32 = {
    **{f"Zero{stage}": stage for stage in STAGES},
    "Zero2Offload": 2,
    "Zero3Offload": 3,
    "Zero3Groups": 3,
}
LOW = ["Zero0Bf16", "Zero0Fused", "Zero1Bf16", "Zero2Fp16"]
ALL = [*WHOLE_IN_FLOAT32, "Zero1Frozen", "Zero3Frozen", *LOW, "Zero3Fp16", "Interrupted"]
TAPS = {
    "ops": [*EVERYTHING["ops"], "dtype", "shape"],
    "xy_distribution": True,
    "all_xy": True,
    "mg_direction": True,
    "ur_distribution": True,
    "monitor_mbs_grad": True,
    "cc_distribution": {"enable": True, "cc_pre_hook": True},
}
PARTS = ["grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq"]

OTHER_VERSION = """
    import inspect, sys
    import torch
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    DeepSpeedEngine._step_of_another_version = DeepSpeedEngine._take_model_step
    step = inspect.unwrap(DeepSpeedEngine.step)
    names = ("_step_of_another_version" if name == "_take_model_step" else name for name in step.__code__.co_names)
    step.__code__ = step.__code__.replace(co_names=tuple(names))
    del DeepSpeedEngine._take_model_step
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(3):
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
    print("ended with", float(engine.module.weight.sum()), file=sys.stderr)
    torch.distributed.destroy_process_group()
"""


class Engines(NamedTuple):
    """What both ranks recorded, and what they know to be true."""

    finished: Finished
    ranks: list[dict[str, Any]]

    def places(self, rank: int, label: str) -> dict[str, dict[str, Any]]:
        (model,) = [model for model in self.finished.run_file(rank)["models"] if model["label"] == label]
        return {parameter["name"]: parameter for parameter in model["parameters"]}

    def rows(self, rank: int, kind: str, label: str) -> dict[tuple[str, int], Any]:
        rows = [row for row in self.finished.rows(kind, rank) if row.name.startswith(f"{label}.")]
        found = {(row.name.removeprefix(f"{label}."), row.step): row.values for row in rows}
        assert len(found) == len(rows)
        return found


def run(runner: Runner, *args: str, config: dict[str, Any] | None = None) -> Engines:
    script = HERE / "engines.py"
    if config is None:
        finished = runner.bare(script, *args, ranks=2)
    else:
        finished = runner.monitored(script, *args, ranks=2, config=config)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return Engines(finished, [torch.load(runner.folder / f"truth.json{rank}") for rank in range(2)])


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return run(integration_runner(tmp_path_factory.mktemp("bare")))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return run(integration_runner(tmp_path_factory.mktemp("watched")), config={**EVERYTHING, "ur_distribution": True})


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return run(integration_runner(tmp_path_factory.mktemp("everything")), config={**EVERYTHING, **TAPS})


def assert_close(found: dict[str, Any], true: torch.Tensor, what: object) -> None:
    for statistic, value in zip(Statistic, statistics(true), strict=True):
        recorded = float(found[statistic.value])
        same = math.isclose(recorded, value, rel_tol=2e-4, abs_tol=2e-6)
        assert same, f"{what} {statistic.value}: recorded {recorded!r}, true {value!r}"


@pytest.mark.parametrize(("label", "stage"), WHOLE_IN_FLOAT32.items())
def test_rows_of_each_rank(watched: Engines, label: str, stage: int) -> None:
    """This rank's part of the masters, of the clipped gradients and of the state; unreduced, its own whole gradient."""
    for rank, known in enumerate(watched.ranks):
        places = watched.places(rank, label)
        for kind, tensors in known["true"][stage].items():
            rows = watched.rows(rank, kind, label)
            expected = {}
            for (name, step), tensor in tensors.items():
                place = places[f"{label}.{name}"]
                if kind != "grad_unreduced" and "whole_shape" in place:
                    start = place.get("flat_offset", 0)
                    tensor = tensor.flatten()[start : start + math.prod(place["shape"])]
                if tensor.numel():
                    expected[name, step] = tensor
            assert rows.keys() == expected.keys(), kind
            for key, tensor in expected.items():
                assert_close(rows[key], tensor, (rank, kind, *key))
    lines = [line for line in watched.finished.steps() if line["model"] == label]
    assert [(line["step"], line["micro_steps"], line["complete"]) for line in lines] == [
        (str(step), "2", "1") for step in range(3)
    ]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parts_make_the_whole(watched: Engines, stage: int) -> None:
    """The parts that run.json names cover each parameter without overlapping, and some are smaller than it."""
    label = f"Zero{stage}"
    ranks = [watched.places(rank, label) for rank in range(2)]
    whole = {name: place["whole_shape"] for name, place in ranks[0].items()}
    assert whole[f"{label}.first.weight"] == [3, 4]
    for name, shape in whole.items():
        here = [rank[name] for rank in ranks if rank[name]["shape"] != [0]]
        covered = [number for p in here for number in range(p["flat_offset"], p["flat_offset"] + math.prod(p["shape"]))]
        assert sorted(covered) == list(range(math.prod(shape))), name
    assert any(rank[f"{label}.first.weight"]["shape"] not in ([12], [0]) for rank in ranks)
    (model,) = [model for model in watched.finished.run_file()["models"] if model["label"] == label]
    assert (model["adapter"], model["zero_stage"], model["wrappers"]) == ("deepspeed", [stage], ["DeepSpeedEngine"])


@pytest.mark.parametrize("label", ["Zero2", "Zero3"])
def test_each_micro_batch(everything: Engines, label: str) -> None:
    """Where only the reduced sum is kept, a micro-batch has its own gradient, not the sum so far."""
    for rank, known in enumerate(everything.ranks):
        true = known["true"][2]["grad_unreduced"]
        rows = [row for row in everything.finished.rows("grad_unreduced", rank) if row.name.startswith(f"{label}.")]
        assert {row.micro_step for row in rows} == {0, 1}
        last = {(row.name.removeprefix(f"{label}."), row.step): row.values for row in rows if row.micro_step == 1}
        assert last.keys() == true.keys()
        for key, tensor in true.items():
            assert_close(last[key], tensor, (rank, *key))


@pytest.mark.parametrize("label", ["Zero1Frozen", "Zero3Frozen"])
def test_frozen_weights(watched: Engines, label: str) -> None:
    """They have rows of weights, of what this rank stores of them, and no others."""
    before = watched.ranks[0]["true"][1]["param_origin"]["blocks.0.inner.weight", 0]
    for rank in range(2):
        place = watched.places(rank, label)[f"{label}.blocks.0.inner.weight"]
        assert not place["trainable"]
        start = place.get("flat_offset", 0)
        part = before.flatten()[start : start + math.prod(place["shape"])]
        assert part.numel() == (15 if label == "Zero1Frozen" else (8, 7)[rank])
        for step in range(3):
            assert_close(watched.rows(rank, "param_origin", label)["blocks.0.inner.weight", step], part, (rank, step))
        for kind in ("grad_unreduced", "grad_reduced", "exp_avg", "update"):
            names = {name for name, _ in watched.rows(rank, kind, label)}
            assert names
            assert "blocks.0.inner.weight" not in names


@pytest.mark.parametrize("label", ALL)
def test_same_bits(bare: Engines, everything: Engines, label: str) -> None:
    """With every tap on, losses and weights are equal to the bit."""
    for alone, seen in zip(bare.ranks, everything.ranks, strict=True):
        assert alone["told"][label] == seen["told"][label]


def test_nothing_is_switched_off(everything: Engines) -> None:
    """Every tap goes through every stage."""
    assert "switched off" not in everything.finished.stderr
    assert "as plain PyTorch" not in everything.finished.stderr
    for kind in ("update", "update_ratio", "other", "actv", "actv_grad"):
        seen = {row.name.split(".")[0] for rank in range(2) for row in everything.finished.rows(kind, rank)}
        assert set(ALL) <= seen, kind


@pytest.mark.parametrize("label", LOW)
def test_masters_of_low_precision(everything: Engines, label: str) -> None:
    """Before reduction gradients have the dtype of the model; what the optimizer has is float32."""
    low = {"torch.float16" if label.endswith("Fp16") else "torch.bfloat16"}
    for kind, dtypes in ({"grad_unreduced": low} | {key: {"torch.float32"} for key in PARTS}).items():
        rows = [row for row in everything.finished.rows(kind) if row.name.startswith(f"{label}.")]
        assert {row.values["dtype"] for row in rows} == dtypes, kind
    parts = [everything.rows(rank, "grad_reduced", label) for rank in range(1 if label.startswith("Zero0") else 2)]
    assert norm(*parts) == pytest.approx(norm(everything.ranks[0]["true"][0]["grad_reduced"]), rel=0.02)
    if label.startswith("Zero0"):
        assert everything.places(0, label)[f"{label}.first.weight"]["shape"] == [3, 4]
        assert {row.values["shape"] for row in rows if row.name == f"{label}.first.weight"} == {"[3, 4]"}


@pytest.mark.parametrize("label", ["Zero2Fp16", "Zero3Fp16"])
def test_scaled_loss(watched: Engines, label: str) -> None:
    """The optimizer's gradients are unscaled; a step that DeepSpeed leaves out is one, and changes nothing."""
    lines = [line for line in watched.finished.steps() if line["model"] == label]
    assert [(line["skipped"], float(line["grad_scale"])) for line in lines] == [("0", 256), ("1", 256), ("0", 128)]
    before, after = (watched.rows(0, kind, label) for kind in ("param_origin", "param_updated"))
    names = {name for name, _ in before}
    assert names
    assert all(before[name, 1] == after[name, 1] for name in names)
    assert any(before[name, 2] != after[name, 2] for name in names)
    reduced, true = watched.rows(0, "grad_reduced", label), watched.ranks[0]["true"][2]["grad_reduced"]
    assert {step for _, step in reduced} == {0, 2}
    scaled, known = watched.rows(0, "grad_unreduced", label), watched.ranks[0]["true"][2]["grad_unreduced"]
    assert norm(scaled) == pytest.approx(256 * norm(known), rel=0.02)
    assert norm(reduced, watched.rows(1, "grad_reduced", label)) == pytest.approx(norm(true), rel=0.02)


def test_interrupted_step(watched: Engines) -> None:
    """A step that an exception leaves stays as far as it came, and the next ones are as usual."""
    lines = [line for line in watched.finished.steps() if line["model"] == "Interrupted"]
    assert [(line["step"], line["complete"], line["micro_steps"]) for line in lines] == [
        ("0", "1", "1"),
        ("1", "0", "1"),
        ("2", "1", "1"),
        ("3", "1", "1"),
    ]
    assert {step for _, step in watched.rows(0, "grad_reduced", "Interrupted")} == {0, 1, 2, 3}
    assert {step for _, step in watched.rows(0, "param_updated", "Interrupted")} == {0, 2, 3}


def norm(*rows: dict[tuple[str, int], Any]) -> float:
    """Of all tensors of the first step together."""
    first = [value for tensors in rows for (_, step), value in tensors.items() if step == 0]
    return math.hypot(*(float(value.norm()) if isinstance(value, torch.Tensor) else value["norm"] for value in first))


def test_calls(tmp_path: Path) -> None:
    """``TrainerMon`` with ``optimizer.optimizer`` records the same, without ``msmon run``, and leaves no trace."""
    runner = integration_runner(tmp_path)
    runner.write_config(**EVERYTHING)
    script = HERE / "engines.py"
    finished = runner.bare(script, "calls", ranks=2, MONITOR_OUTPUT_DIR=str(runner.output))
    assert finished.returncode == 0, finished.stderr[-3000:]
    for rank in range(2):
        known = torch.load(runner.folder / f"truth.json{rank}")
        assert known["told"] == {"calls": "no trace"}
        rows = {(row.name, row.step): row.values for row in finished.rows("grad_unreduced", rank)}
        assert rows.keys() == known["true"][2]["grad_unreduced"].keys()
        for key, tensor in known["true"][2]["grad_unreduced"].items():
            assert_close(rows[key], tensor, key)
        assert {row.step for row in finished.rows("exp_avg", rank)} == {1, 2}
        assert [line["micro_steps"] for line in finished.steps(rank)] == ["2"] * 3


def test_another_version_is_said(tmp_path: Path) -> None:
    """Where an engine does not step as is known, the reason is said, and the training is the same."""
    runner = integration_runner(tmp_path)
    script = runner.write(OTHER_VERSION)
    alone, seen = (
        call(script, ranks=1, **options)
        for call, options in ((runner.bare, {}), (runner.monitored, {"options": ["--gradients"]}))
    )
    assert seen.returncode == alone.returncode == 0, seen.stderr[-3000:]
    ended = [next(line for line in each.stderr.splitlines() if "ended with" in line) for each in (alone, seen)]
    assert ended[0] == ended[1]
    assert "deepspeed is recorded as plain PyTorch" in seen.stderr
    assert "_take_model_step" in seen.stderr
    assert {row.step for row in seen.rows("grad_reduced")} == {0, 1, 2}
