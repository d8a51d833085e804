"""What drives the training in the user's place: transformers, peft, trl, accelerate, Lightning; with no change to the code."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from integration.conftest import HERE, integration_runner
from integration.truth import EVERYTHING

if TYPE_CHECKING:
    from conftest import Finished

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("trainers")]
STEPS = range(3)
CLIP = 0.2
ONE_PROCESS = ["trainer", "lora", "sft", "accelerate_loop"]
TWO_PROCESSES = ["trainer", "accelerate_loop", "deepspeed_trainer", "deepspeed_trainer_3", "accelerate_deepspeed"]
LIGHTNING = ["automatic", "accumulated", "manual", "lbfgs"]
Told = dict[str, Any]


class Trained(NamedTuple):
    """A script bare and watched, with what each scenario told on each rank."""

    finished: Finished
    bare: list[Told]
    seen: list[Told]

    def label(self, scenario: str) -> str:
        labels = list(dict.fromkeys(line["model"] for line in self.finished.steps()))
        return labels[list(self.seen[0]).index(scenario)]

    def lines(self, scenario: str, rank: int = 0) -> list[dict[str, str]]:
        return [line for line in self.finished.steps(rank) if line["model"] == self.label(scenario)]

    def norms(self, scenario: str, kind: str, rank: int = 0) -> list[dict[str, float]]:
        """By step: the norm of each parameter's row."""
        label = self.label(scenario)
        models = {model["label"]: model for model in self.finished.run_file(rank)["models"]}
        names = {parameter["name"] for parameter in models[label]["parameters"]}
        found: list[dict[str, float]] = [{} for _ in STEPS]
        for row in self.finished.rows(kind, rank):
            if row.name in names:
                found[row.step][row.name.removeprefix(f"{label}." if label else "")] = row["norm"]
        return found

    def check(self, scenario: str, *, micro_steps: int) -> None:
        """Steps and learned micro-batches are the trainer's, and the training is the same to the bit."""
        for rank, (alone, watched) in enumerate(zip(self.bare, self.seen, strict=True)):
            assert watched[scenario] == alone[scenario]
            assert len(watched[scenario]["losses"]) >= len(STEPS)
            lines = self.lines(scenario, rank)
            assert [(line["step"], line["micro_steps"], line["complete"]) for line in lines] == [
                (str(step), str(micro_steps), "1") for step in STEPS
            ]
            weights = [self.norms(scenario, kind, rank) for kind in ("param_updated", "param_origin")]
            assert weights[0][:-1] == weights[1][1:]
            assert weights[0] != weights[1]
            assert all(weights[0])


def run(
    factory: pytest.TempPathFactory, script: str, *scenarios: str, ranks: int = 0, told_by: int | None = None
) -> Trained:
    runner = integration_runner(factory.mktemp(scenarios[0]))
    told = []
    for watched in (False, True):
        call = runner.monitored if watched else runner.bare
        options: Any = {"config": EVERYTHING} if watched else {}
        finished = call(HERE / script, *scenarios, ranks=ranks, **options)
        assert finished.returncode == 0, finished.stderr[-3000:]
        files = [runner.folder / f"truth.json{rank}" for rank in range(told_by or ranks or 1)]
        told.append([json.loads(file.read_text()) for file in files])
    assert "switched off" not in finished.stderr
    return Trained(finished, *told)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(tmp_path_factory, "hugging_face.py", *ONE_PROCESS)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(tmp_path_factory, "hugging_face.py", *TWO_PROCESSES, ranks=2)


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(tmp_path_factory, "lightning_loops.py", *LIGHTNING)


@pytest.mark.parametrize("scenario", ONE_PROCESS)
def test_hugging_face(alone: Trained, scenario: str) -> None:
    """Names and norms of gradients are those that the trainer's own callback sees."""
    alone.check(scenario, micro_steps=2)
    noted = alone.seen[0][scenario]["gradients"]
    assert alone.norms(scenario, "grad_reduced") == [pytest.approx(norms, rel=1e-6) for norms in noted]
    assert [set(norms) for norms in alone.norms(scenario, "grad_unreduced")] == [set(norms) for norms in noted]
    if scenario == "lora":
        assert all(".lora_" in name for name in noted[0])
        assert len(noted[0]) == 8
        models = {model["label"]: model for model in alone.finished.run_file()["models"]}
        trained = [p["name"] for p in models[alone.label("lora")]["parameters"] if p["trainable"]]
        assert len(trained) == len(noted[0])


@pytest.mark.parametrize("scenario", TWO_PROCESSES)
def test_hugging_face_in_two_processes(together: Trained, scenario: str) -> None:
    """DDP is what its callback sees; ZeRO's parts of the ranks have together the norms that DDP has."""
    together.check(scenario, micro_steps=2)
    told = together.seen[0][scenario]
    twin = "trainer" if "trainer" in scenario else "accelerate_loop"
    noted = together.seen[0][twin]["gradients"]
    if scenario == twin:
        assert told["wrapped"] == "DistributedDataParallel"
        parts = [together.norms(scenario, "grad_reduced", rank) for rank in range(2)]
        assert parts == [[pytest.approx(norms, rel=1e-6) for norms in noted]] * 2
        return
    assert told["wrapped"] == "DeepSpeedEngine"
    parts = [together.norms(scenario, "grad_reduced", rank) for rank in range(2)]
    for step in STEPS if twin == "trainer" else STEPS[:1]:
        whole = {name: math.hypot(*(part[step].get(name, 0) for part in parts)) for name in noted[step]}
        if twin == "accelerate_loop":  # DeepSpeed clips, the loop does not
            share = 0.5 / max(0.5, math.hypot(*noted[step].values()))
            noted[step] = {name: norm * share for name, norm in noted[step].items()}
        assert whole == pytest.approx(noted[step], rel=2e-3, abs=1e-5)
    models = {model["label"]: model for model in together.finished.run_file()["models"]}
    assert models[together.label(scenario)]["adapter"] == "deepspeed"


@pytest.mark.parametrize("scenario", LIGHTNING)
def test_lightning(lightning: Trained, scenario: str) -> None:
    """Gradients exist only inside the closure that Lightning hands to the optimizer; clipped, they are reduced ones."""
    lightning.check(scenario, micro_steps=2 if scenario in {"accumulated", "manual"} else 1)
    noted = lightning.seen[0][scenario]["gradients"]
    assert lightning.norms(scenario, "grad_unreduced") == [pytest.approx(norms, rel=1e-6) for norms in noted]
    if scenario == "accumulated":
        noted = [
            {name: norm * CLIP / math.hypot(*norms.values()) for name, norm in norms.items()}
            for norms in noted
            if math.hypot(*norms.values()) > CLIP
        ]
        assert len(noted) == len(STEPS)
    assert lightning.norms(scenario, "grad_reduced") == [pytest.approx(norms, rel=1e-5) for norms in noted]


def test_lightning_ddp(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The second process, which Lightning starts by itself, is watched as the first is."""
    ddp = run(tmp_path_factory, "lightning_loops.py", "ddp", told_by=2)
    ddp.check("ddp", micro_steps=2)
    assert ddp.seen[0]["ddp"]["strategy"] == "DDPStrategy"
    noted = ddp.seen[0]["ddp"]["gradients"]
    for rank in range(2):
        assert ddp.norms("ddp", "grad_reduced", rank) == [pytest.approx(norms, rel=1e-6) for norms in noted]
    assert ddp.norms("ddp", "grad_unreduced", 0) != ddp.norms("ddp", "grad_unreduced", 1)


def test_calls_in_a_callback(tmp_path_factory: pytest.TempPathFactory) -> None:
    """``TrainerMon`` from ``on_train_begin``: the optimizer that is handed over, or with DeepSpeed what is inside it."""
    runner = integration_runner(tmp_path_factory.mktemp("calls"))
    runner.write_config(**EVERYTHING)
    finished = runner.bare(
        HERE / "hugging_face.py", "calls", "deepspeed_calls", ranks=2, MONITOR_OUTPUT_DIR=str(runner.output)
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    noted = json.loads((runner.folder / "truth.json0").read_text())["calls"]["gradients"]
    for plain, in_parts in [finished.directories(0)]:
        assert json.loads((plain / "run.json").read_text())["models"][0]["adapter"] == "plain"
        assert json.loads((in_parts / "run.json").read_text())["models"][0]["adapter"] == "deepspeed"
    for rank in range(2):
        assert [line["micro_steps"] for line in finished.steps(rank)] == ["2"] * 6
    for step, norms in enumerate(noted):
        rows = [[row for row in finished.rows("grad_reduced", rank) if row.step == step] for rank in range(2)]
        first = {row.name: row["norm"] for row in rows[0][: len(norms)]}
        assert first == {name: pytest.approx(norm, rel=1e-6) for name, norm in norms.items()}
        parts = [{row.name: row["norm"] for row in of_rank[len(norms) :]} for of_rank in rows]
        whole = {name: math.hypot(*(part.get(name, 0) for part in parts)) for name in norms}
        assert whole == pytest.approx(norms, rel=2e-3, abs=1e-5)
