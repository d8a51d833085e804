"""Alerts in real trainings: silent on healthy ones, naming the first tensor of broken ones, ending runs when asked to."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import SIX, Runner
from integration.faults import FAULTS, FAULTY_STEP, STEPS

from msmon.config.load import load_config
from msmon.errors import ConfigError
from msmon.offline.analyse import analyse
from msmon.offline.reader import read_steps

if TYPE_CHECKING:
    from conftest import Finished

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
EVERYTHING = {
    "param_distribution": True,
    "wg_distribution": True,
    "mv_distribution": True,
    "xy_distribution": True,
    "ops": SIX,
    "step_count_per_record": 1000,
}
HEALTHY = {
    "digits": "--width 8 --depth 1",
    "gan": "--width 32 --batch 64",
    "gpt": "--width 32 --depth 1 --heads 2 --context 16",
    "lstm": "--width 32 --depth 1 --length 24",
    "moe": "--width 16",
    "vae": "--width 64",
}
WITH_FRAMEWORKS = {
    "accelerate": (0, ""),
    "deepspeed": (2, ""),
    "fsdp": (2, "--width 32 --depth 1 --length 16"),
    "lightning": (0, ""),
    "lora": (0, ""),
    "megatron": (2, "--length 16"),
    "pipeline": (2, ""),
    "sft": (0, ""),
    "tensor_parallel": (2, ""),
    "trainer": (0, ""),
}
"""Example → processes, and what makes it short."""

FIRST = {
    "nan_in_a_layer": ("0:second.1.output/rank{rank}/actv", FAULTY_STEP, "AnomalyNan"),
    "gradient_times_1000": ("0:second.0.weight/rank{rank}/grad_unreduced", FAULTY_STEP, "AnomalySpike"),
    "flipped_bit": ("0:second.0.weight/rank{rank}/param_origin", FAULTY_STEP, "AnomalySpike"),
    "learning_rate_times_100": ("0:first.0.weight/rank{rank}/param_updated", FAULTY_STEP, "AnomalyUpdateRatio"),
    "dead_relu": ("0:second.1.output/rank{rank}/actv", FAULTY_STEP + 19, "AnomalyDead"),
}
"""Fault → the tensor that must be named first, the step, and the rule."""

ALONE = [fault for fault in FIRST if fault != "flipped_bit"]


def anomalies(finished: Finished, rank: int = 0) -> dict[str, dict[str, Any]]:
    path = finished.output / "anomaly_detected" / f"rank{rank}" / "anomaly.json"
    content: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return content


def in_forks(runner: Runner, commands: list[list[str]]) -> Finished:
    """Trainings one after the other, each a rank of its own, everything watched, judged by the default rules."""
    words = [word for command in commands for word in ["--", *command]][1:]
    return runner.monitored(HERE / "forked.py", *words, config=EVERYTHING, options=["--alerts"])


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """200 steps of each example."""
    scripts = [[str(EXAMPLES / name / "train.py"), "--steps", "200", *sizes.split()] for name, sizes in HEALTHY.items()]
    return in_forks(Runner(tmp_path_factory.mktemp("healthy")), scripts)


@pytest.mark.slow
@pytest.mark.xdist_group("healthy")
@pytest.mark.parametrize("example", HEALTHY)
def test_healthy_training(healthy: Finished, example: str) -> None:
    """200 steps of each example, everything watched, raise no alarm."""
    assert healthy.returncode == 0, healthy.stderr
    rank = list(HEALTHY).index(example)
    assert {int(line["step"]) for line in healthy.steps(rank)} >= set(range(200))
    assert {row.kind for kind in ("actv", "actv_grad") for row in healthy.rows(kind, rank)} == {"actv", "actv_grad"}
    assert anomalies(healthy, rank) == {}
    assert f"[rank {rank}] anomaly:" not in healthy.stderr


@pytest.mark.slow
@pytest.mark.parametrize("example", WITH_FRAMEWORKS)
def test_healthy_training_of_a_framework(runner: Runner, example: str) -> None:
    """The same of examples that need processes of their own: two hundred steps, everything that their monitor.json names."""
    ranks, sizes = WITH_FRAMEWORKS[example]
    source = (EXAMPLES / example / "train.py").read_text()
    environment = {}
    if example == "megatron":  # it asks for CUDA throughout
        source = f"import megatron_on_cpu\nmegatron_on_cpu.install()\n{source}"
        environment["PYTHONPATH"] = str(HERE)
    options = ["--config", str(EXAMPLES / example / "monitor.json"), "--alerts"]
    done = runner.monitored(
        runner.write(source), "--steps", "200", *sizes.split(), ranks=ranks, options=options, **environment
    )
    assert done.returncode == 0, done.stderr
    assert {int(line["step"]) for line in done.steps()} >= set(range(200))
    assert "no anomaly on this rank" in done.stderr
    assert "anomaly:" not in done.stderr


def test_every_example_is_tested() -> None:
    """A new example joins the test above."""
    assert HEALTHY.keys() | WITH_FRAMEWORKS.keys() == {path.parent.name for path in EXAMPLES.glob("*/train.py")}


def test_every_fault_has_its_tensor() -> None:
    """Each fault of the script is tested below."""
    assert FIRST.keys() == FAULTS.keys()


def check_first(done: Finished, fault: str, rank: int) -> None:
    """What the ranking of a rank's anomalies, and the terminal, say of a fault first."""
    assert done.returncode == 0, done.stderr
    ranked = [entry for _, entry in analyse(done.output, top=100_000).first if entry["rank"] == rank]
    tag, step, rule = FIRST[fault]
    assert (ranked[0]["tag_name"], ranked[0]["step"]) == (tag.format(rank=rank), step)
    assert ranked[0]["message"].startswith(f"{rule}: ")
    assert f"[rank {rank}] anomaly: {ranked[0]['message']}" in done.stderr


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A training with each of the faults that need no second rank."""
    scripts = [[str(HERE / "faults.py"), fault] for fault in ALONE]
    return in_forks(Runner(tmp_path_factory.mktemp("faulty")), scripts)


@pytest.mark.slow
@pytest.mark.xdist_group("faulty")
@pytest.mark.parametrize("fault", ALONE)
def test_fault(faulty: Finished, fault: str) -> None:
    """The default rules name the tensor in which the fault began; the training itself goes on to its end.

    What the files say afterwards is what the run said.
    """
    rank = ALONE.index(fault)
    check_first(faulty, fault, rank)
    assert faulty.stdout.count(f"ended after step {STEPS - 1}") == len(ALONE)
    assert f"next:   msmon analyse {faulty.output}" in faulty.stderr
    afterwards = analyse(faulty.directories(rank)[0], top=100_000)
    assert afterwards.source == "csv"
    if fault in {"gradient_times_1000", "dead_relu"}:
        assert {e["tag_name"] for _, e in afterwards.first} == {e["tag_name"] for e in anomalies(faulty, rank).values()}
    else:
        tag, step, _ = FIRST[fault]
        assert (afterwards.first[0][1]["tag_name"], afterwards.first[0][1]["step"]) == (tag.format(rank=rank), step)


@pytest.mark.slow
def test_fault_of_one_rank(runner: Runner) -> None:
    """A bit that flips in one rank's weight is found on that rank, before anything that follows from it."""
    done = runner.monitored(HERE / "faults.py", "flipped_bit", ranks=2, config=EVERYTHING, options=["--alerts"])
    check_first(done, "flipped_bit", 1)
    assert analyse(done.output).first[0][1]["rank"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_stop(runner: Runner, ranks: int) -> None:
    """The run ends soon after the anomaly with exit code 0, every rank after the same step, though one alone saw it."""
    fault = "flipped_bit" if ranks else "nan_in_a_layer"
    script = runner.write((HERE / "faults.py").read_text().replace(f"= {STEPS}, {FAULTY_STEP},", "= 100_000, 50,"))
    done = runner.monitored(script, fault, ranks=ranks, options=["--weights", "--on-alert", "stop"])
    assert done.returncode == 0, done.stderr
    assert "ended after step" not in done.stdout
    assert "stopping, as --on-alert stop asks: Anomaly" in done.stderr
    last = {int(done.steps(rank)[-1]["step"]) for rank in range(max(ranks, 1))}
    assert len(last) == 1
    assert FAULTY_STEP <= last.pop() < 99_999


LITTLE = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(8, 4)).pow(2).mean().backward()
        if step == 3:
            model[1].bias.grad.fill_(float("nan"))
        optimizer.step()
"""


@pytest.mark.slow
def test_rule_and_command_of_the_user(runner: Runner, tmp_path: Path) -> None:
    """A rule from a module beside the script and a command, both from the command line; the rule's fault is its own."""
    script = runner.write(LITTLE)
    runner.write(
        """
        import threading

        def second_bias(seen):
            assert threading.current_thread().name == "msmon-writer"
            return [row.name == "1.bias" and row.kind == "grad_reduced" and seen.step == 2 for row in seen.rows]

        def broken(seen):
            raise ValueError("mine")
        """,
        "checks.py",
    )
    told = tmp_path / "told"
    runner.write("import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])", "tell.py")
    rules = ["--rule", "checks:second_bias", "--rule", "checks:broken", "--no-alerts", "--on-alert", "dump"]
    command = ["--on-alert-command", shlex.join([sys.executable, str(tmp_path / "tell.py"), str(told)])]
    done = runner.monitored(script, options=["--gradients", *rules, *command])
    assert done.returncode == 0, done.stderr
    ((_, entry),) = anomalies(done).items()
    assert (entry["tag_name"], entry["step"], entry["micro_step"]) == ("0:1.bias/rank0/grad_reduced", 2, 1)
    assert entry["message"].startswith("checks:second_bias: norm ")
    assert done.stderr.count("rule checks:broken switched off") == 1
    assert len(done.rows("grad_reduced")) == 6 * 4
    deadline = time.monotonic() + 30
    while not (told.exists() and told.read_text() == entry["message"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_rule_at_work_when_the_process_forks(runner: Runner) -> None:
    """What a rule holds at that moment, a lock or an import, does not keep the child from recording and judging."""
    runner.write("import time; time.sleep(0.6)", "slow_to_import.py")
    runner.write(
        """
        import threading
        held = threading.Lock()
        def slow(seen):
            with held:
                if seen.step == 1:
                    import slow_to_import
                return seen.values > 1e30
        """,
        "checks.py",
    )
    script = runner.write(
        """
        import os, time, torch
        def train(steps):
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(steps):
                model(torch.ones(4, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        train(2)
        time.sleep(0.2)  # the writer is inside of the rule now
        child = os.fork()
        train(3)
        if child:
            assert os.waitpid(child, 0)[1] == 0
        """
    )
    done = runner.monitored(script, options=["--rule", "checks:slow"])
    assert done.returncode == 0, done.stderr
    assert "could not be written" not in done.stderr
    assert "writing takes over" not in done.stderr
    assert sorted(len(read_steps(directory)) for directory in done.directories()) == [3, 5]


@pytest.mark.slow
def test_library(runner: Runner) -> None:
    """The rules of a file through the library, with the pipeline that TrainerMon was told of."""
    alert = {"rules": [{"rule_name": "AnomalyNan", "kinds": ["grad_reduced"]}], "dump": True}
    runner.write_config(wg_distribution=True, ops=["norm", "nans"], alert=alert)
    script = runner.write(
        """
        import json, os, sys, torch, torch.distributed as dist
        from torch import nn
        from msmon.pytorch import TrainerMon
        dist.init_process_group("gloo")
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = TrainerMon("monitor.json", process_group=dist.group.WORLD, params_have_main_grad=False)
        monitor.set_monitor(model=model, grad_acc_steps=1, optimizer=optimizer)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 2), float("nan") if step == 1 and dist.get_rank() == 1 else 1.0)).sum().backward()
            optimizer.step()
        dist.destroy_process_group()
        """,
        "library.py",
    )
    library = runner.bare(script, ranks=2, MONITOR_OUTPUT_DIR=str(runner.folder / "library"))
    assert library.returncode == 0, library.stderr
    folder = runner.folder / "library" / "anomaly_detected"
    assert json.loads((folder / "rank0" / "anomaly.json").read_text()) == {}
    first = next(iter(json.loads((folder / "rank1" / "anomaly.json").read_text()).values()))
    assert (first["rank"], first["step"], first["pp_stage"], first["group_mates"]) == (1, 1, 1, [0, 1])


@pytest.mark.slow
def test_a_configuration_cannot_name_code(runner: Runner) -> None:
    """Whatever a file writes into its rules, nothing is imported or started: it is refused before the command runs."""
    runner.write("import pathlib; pathlib.Path('imported').touch()", "evil.py")
    rule = {"rule_name": "AnomalyNan"}
    for alert in (
        {"rules": [{"rule_name": "evil"}]},
        {"rules": [{**rule, "function": "evil:rule"}]},
        {"rules": [{**rule, "args": {"threshold": "evil:rule"}}]},
        {"rules": ["evil:rule"]},
        {"rules": [rule], "rule": ["evil:rule"]},
        {"rules": [rule], "on_alert_command": "touch imported"},
        {"rules": [rule], "command": "touch imported"},
    ):
        with pytest.raises(ConfigError):
            load_config(runner.write_config(wg_distribution=True, alert=alert))
    named = {"rules": [{"rule_name": "evil:rule"}]}
    done = runner.monitored(runner.folder / "evil.py", config={"wg_distribution": True, "alert": named})
    assert done.returncode == 2
    assert "error:" in done.stderr
    assert not (runner.folder / "imported").exists()


@pytest.mark.slow
def test_configuration_file(runner: Runner) -> None:
    """The rules of a file, each with its filters; a filter that fits nothing, whatever it says, is only that."""
    runner.write("import pathlib; pathlib.Path('imported').touch()", "evil.py")
    rule = {"rule_name": "AnomalyNan"}
    rules = [{**rule, "kinds": ["evil:rule"]}, {**rule, "names": ["evil:rule"]}, {**rule, "kinds": ["grad_reduced"]}]
    config = {"wg_distribution": True, "ops": ["norm", "nans"], "alert": {"rules": rules, "dump": True}}
    done = runner.monitored(runner.write(LITTLE), config=config)
    assert done.returncode == 0, done.stderr
    found = list(anomalies(done).values())
    assert [(entry["tag_name"], entry["step"]) for entry in found][:2] == [
        ("0:1.bias/rank0/grad_reduced", 3),
        ("0:0.weight/rank0/grad_reduced", 4),
    ]
    assert not (runner.folder / "imported").exists()
