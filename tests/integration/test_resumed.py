"""Trainings that go on with an earlier one: their steps have the numbers of the training, whoever knows them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from integration.conftest import HERE, integration_runner

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Finished, Runner

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("resumed")]
STATE = "the optimizer's state"
NOT_KNOWN = (0, "unknown", ["loaded"])
BEGINNING = (0, "beginning", ["fresh"])
PLAIN: dict[str, tuple[int, str, list[str]]] = {
    "Fresh_adamw": BEGINNING,
    "Fresh_adagrad": BEGINNING,  # has its state from the beginning
    "Resumed_adamw": (7, STATE, ["loaded"]),
    "Resumed_fused": (7, STATE, ["loaded"]),
    "Resumed_adagrad": (7, STATE, ["loaded"]),
    "Resumed_grouped": (7, STATE, ["loaded"]),
    "Resumed_momentum": NOT_KNOWN,
    "Count_whole": (5, STATE, ["loaded"]),
    "Count_nan": NOT_KNOWN,
    "Count_half": NOT_KNOWN,
    "Count_several": NOT_KNOWN,
    "Count_text": NOT_KNOWN,
    "By_batch": (7, "OneCycleLR.last_epoch", ["loaded"]),
    "By_epoch": NOT_KNOWN,
    "Sequential": (7, STATE, ["fresh", "loaded"]),
    "Copied": BEGINNING,
    "Copied_1": BEGINNING,
    "Checkpointed": (20, STATE, ["loaded"]),
    "Looked_at": BEGINNING,
    "Megatron": (300, "Megatron's iteration", ["loaded"]),
}
FRAMEWORKS: dict[str, tuple[int, str, list[str]]] = {
    "TransformersEarlier": (0, "Trainer.state.global_step", ["fresh"]),
    "Transformers": (3, "Trainer.state.global_step", ["fresh"]),
    "LightningEarlier": (0, "Lightning's global_step", ["fresh"]),
    "Lightning": (3, "Lightning's global_step", ["fresh"]),
    "ManualEarlier": (0, "beginning", ["fresh", "fresh"]),
    "Manual": (3, STATE, ["loaded", "loaded"]),
    "AccelerateEarlier": BEGINNING,
    "Accelerate": (3, STATE, ["loaded"]),
    "DeepSpeedEarlier": (0, "DeepSpeed's global_steps", ["fresh"]),
    "DeepSpeed": (3, "DeepSpeed's global_steps", ["loaded"]),
    "DeepSpeedWeights": (0, "DeepSpeed's global_steps", ["fresh"]),
}


def saved(runner: Runner) -> str:
    """A folder with what an earlier run has left."""
    script = [sys.executable, str(HERE / "resumed.py"), str(runner.folder), "save"]
    subprocess.run(script, check=True, env=runner.environment)
    return str(runner.folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    runner = integration_runner(tmp_path_factory.mktemp("plain"))
    done = runner.monitored(HERE / "resumed.py", saved(runner), options=["--gradients", "--no-alerts"])
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def frameworks(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    runner = integration_runner(tmp_path_factory.mktemp("frameworks"))
    done = runner.monitored(HERE / "resumed_frameworks.py", options=["--gradients", "--no-alerts"])
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def assert_numbered(done: Finished, expected: dict[str, tuple[int, str, list[str]]]) -> None:
    models = {model["label"] or model["classes"][0]: model for model in done.run_file()["models"]}
    found = {
        name: (model["first_step"]["value"], model["first_step"]["source"], model["optimizer_state"])
        for name, model in models.items()
    }
    assert found == expected
    for name, (first, _, _) in expected.items():
        steps = [int(line["step"]) for line in done.steps() if line["model"] == models[name]["label"]]
        assert steps == list(range(first, first + len(steps))), name
        assert len(steps) == (3 if name.endswith("Earlier") else 2), name


def test_plain_pytorch(plain: Finished) -> None:
    """Steps are counted on from what an optimizer has loaded, when that is certain, and from 0 else, without a false step."""
    assert_numbered(plain, PLAIN)
    said = [line.removeprefix("msmon: ") for line in plain.stderr.splitlines()]
    assert "training continues at step 7 (the optimizer's state)" in said
    assert sum("--first-step N sets another number" in line for line in said) == 1
    assert "switched off" not in plain.stderr


def test_frameworks(frameworks: Finished) -> None:
    """Whoever drives a training knows the number of its step; where nobody does, the optimizer's state may."""
    assert_numbered(frameworks, FRAMEWORKS)
    assert "switched off" not in frameworks.stderr


LOOP = """
    import sys
    import torch

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    if len(sys.argv) > 1:
        optimizer.load_state_dict(torch.load(f"{sys.argv[1]}/adamw.pt", weights_only=False)["optimizer"])
    for _ in range(6):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("options", "environment", "resume", "steps", "source"),
    [
        (
            "--first-step 10 --start 3 --every 4",
            {},
            True,
            [11, 15],
            "--first-step",
        ),  # numbers are those of the training
        ("--first-step 0 --times 2", {}, True, [0, 1], "--first-step"),
        (
            "--first-step 3",
            {"TORCHELASTIC_RESTART_COUNT": "1"},
            True,
            [7, 8, 9, 10, 11, 12],
            STATE,
        ),  # later than it was
        ("--first-step 3", {"TORCHELASTIC_RESTART_COUNT": "1"}, False, [3, 4, 5, 6, 7, 8], "--first-step"),
        ("--dynamic", {}, True, [8, 10, 12], STATE),
    ],
)
def test_numbers(  # noqa: PLR0917 - pytest calls it by name
    runner: Runner, options: str, environment: dict[str, str], resume: bool, steps: list[int], source: str
) -> None:
    """--first-step goes over what is learned, except in workers that were started anew; start and interval count from 0."""
    arguments = [saved(runner)] if resume else []
    config: dict[str, Any] = {"wg_distribution": True, "dynamic_on": True}
    if options == "--dynamic":
        config["step_interval"] = 2
    done = runner.monitored(runner.write(LOOP), *arguments, options=options.split(), config=config, **environment)
    assert done.returncode == 0, done.stderr
    assert [int(line["step"]) for line in done.steps()] == steps
    assert done.run_file()["models"][0]["first_step"]["source"] == source


COMMUNICATING = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()
"""


def test_communication_before_the_number_is_known(runner: Runner) -> None:
    """What was sent before the first backward pass belongs to a step that is not collected, so it has no row in a later one."""
    script = runner.write(COMMUNICATING.replace("{store}", str(runner.folder / "store")))
    done = runner.monitored(script, options=["--communication", "--first-step", "9", "--every", "2"])
    assert done.returncode == 0, done.stderr
    assert [(row.step, row.name) for row in done.rows("cc")] == [
        (10, "all_reduce_0.input"),
        (10, "all_reduce_0.output"),
    ]


SHARDED = """
    import copy
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)

    def start():
        model = fully_shard(torch.nn.Linear(4, 1))  # the second rank has no part of it
        return model, torch.optim.AdamW(model.parameters())

    def train(model, optimizer, steps):
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = start()
    train(model, optimizer, 3)
    states = copy.deepcopy(get_state_dict(model, optimizer))
    model, optimizer = start()
    set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    train(model, optimizer, 2)
    dist.destroy_process_group()
"""


def test_every_rank_has_the_same_numbers(runner: Runner) -> None:
    """Also one that has nothing of the only parameter; a step with zeros that makes room for a loaded state is no step."""
    done = runner.monitored(runner.write(SHARDED), ranks=2, options=["--gradients"])
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        steps = [(line["model"], int(line["step"])) for line in done.steps(rank)]
        second = done.run_file(rank)["models"][1]["label"]
        assert steps == [("", 0), ("", 1), ("", 2), (second, 3), (second, 4)]


def test_wrong_numbers(tmp_path: Path) -> None:
    """--first-step takes a whole number from 0 on."""
    runner = integration_runner(tmp_path)
    for value in ("-1", "1.5", "x", str(2**70)):
        done = runner.monitored(runner.write("print()"), options=["--first-step", value])
        assert done.returncode == 2, value
        assert "--first-step" in done.stderr
