"""Alerts in real trainings: silent on healthy ones, naming the first tensor of broken ones, ending runs when asked to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import SIX
from integration.faults import FAULTS, FAULTY_STEP, STEPS

from msmon.offline.analyse import analyse

if TYPE_CHECKING:
    from conftest import Finished, Runner

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

FIRST = {
    "nan_in_a_layer": ("0:second.1.output/rank0/actv", FAULTY_STEP, "AnomalyNan"),
    "gradient_times_1000": ("0:second.0.weight/rank0/grad_unreduced", FAULTY_STEP, "AnomalySpike"),
    "flipped_bit": ("0:second.0.weight/rank1/param_origin", FAULTY_STEP, "AnomalySpike"),
    "learning_rate_times_100": ("0:first.0.weight/rank0/param_updated", FAULTY_STEP, "AnomalyUpdateRatio"),
    "dead_relu": ("0:second.1.output/rank0/actv", FAULTY_STEP + 19, "AnomalyDead"),
}
"""Fault → the tensor that must be named first, the step, and the rule."""


def anomalies(finished: Finished, rank: int = 0) -> dict[str, dict[str, Any]]:
    path = finished.output / "anomaly_detected" / f"rank{rank}" / "anomaly.json"
    content: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return content


@pytest.mark.slow
@pytest.mark.parametrize("example", HEALTHY)
def test_healthy_training(runner: Runner, example: str) -> None:
    """200 steps of each example, everything watched, raise no alarm, neither in the run nor on its files."""
    script = EXAMPLES / example / "train.py"
    done = runner.monitored(
        script, "--steps", "200", *HEALTHY[example].split(), config=EVERYTHING, options=["--alerts"]
    )
    assert done.returncode == 0, done.stderr
    assert anomalies(done) == {}
    assert "anomaly:" not in done.stderr
    assert "no anomaly on this rank" in done.stderr


def test_every_fault_has_its_tensor() -> None:
    """Each fault of the script is tested below."""
    assert FIRST.keys() == FAULTS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FIRST)
def test_fault(runner: Runner, fault: str) -> None:
    """The default rules name the tensor in which the fault began; the training itself goes on to its end."""
    done = runner.monitored(
        HERE / "faults.py", fault, ranks=2 if fault == "flipped_bit" else 0, config=EVERYTHING, options=["--alerts"]
    )
    assert done.returncode == 0, done.stderr
    assert f"ended after step {STEPS - 1}" in done.stdout
    analysis = analyse(done.output)
    ((_, first),) = analysis.first[:1]
    tag, step, rule = FIRST[fault]
    assert (first["tag_name"], first["step"]) == (tag, step)
    assert first["message"].startswith(f"{rule}: ")
    assert f"anomaly: {first['message']}" in done.stderr
    assert f"next:   msmon analyse {done.output}" in done.stderr or first["rank"] != 0

    if fault in {"gradient_times_1000", "dead_relu"}:  # what the files say afterwards is what the run said
        afterwards = analyse(done.directories()[0])
        assert afterwards.source == "csv"
        assert {entry["tag_name"] for _, entry in analyse(done.output, top=10_000).first} == {
            entry["tag_name"] for _, entry in analyse(done.directories()[0], top=10_000).first
        }


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
        if step < 3:
            optimizer.step()
"""


@pytest.mark.slow
def test_rule_and_command_of_the_user(runner: Runner, tmp_path: Path) -> None:
    """A rule from a module beside the script and a command, both from the command line; the rule's fault is its own."""
    script = runner.write(LITTLE.replace("if step < 3", "if True"))
    runner.write(
        """
        def second_bias(seen):
            return [row.name == "1.bias" and row.kind == "grad_reduced" and seen.step == 2 for row in seen.rows]

        def broken(seen):
            raise ValueError("mine")
        """,
        "checks.py",
    )
    runner.write("import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])", "tell.py")
    told = tmp_path / "told"
    rules = ["--rule", "checks:second_bias", "--rule", "checks:broken", "--no-alerts", "--on-alert", "dump"]
    command = ["--on-alert-command", f"{sys.executable} {tmp_path / 'tell.py'} {told}"]
    done = runner.monitored(script, options=["--gradients", *rules, *command])
    assert done.returncode == 0, done.stderr
    ((_, entry),) = anomalies(done).items()
    assert (entry["tag_name"], entry["step"], entry["micro_step"]) == ("0:1.bias/rank0/grad_reduced", 2, 1)
    assert entry["message"].startswith("checks:second_bias: norm ")
    assert done.stderr.count("rule checks:broken switched off") == 1
    assert len(done.rows("grad_reduced")) == 6 * 4


@pytest.mark.slow
def test_configuration_file(runner: Runner) -> None:
    """The rules of a file, in the training and through the library, with the pipeline that TrainerMon was told of."""
    alert = {"rules": [{"rule_name": "AnomalyNan", "kinds": ["grad_reduced"]}], "dump": True}
    config = {"wg_distribution": True, "ops": ["norm", "nans"], "alert": alert}
    done = runner.monitored(runner.write(LITTLE.replace("if step < 3", "if True")), config=config)
    assert done.returncode == 0, done.stderr
    found = list(anomalies(done).values())
    assert [(entry["tag_name"], entry["step"]) for entry in found][:2] == [
        ("0:1.bias/rank0/grad_reduced", 3),
        ("0:0.weight/rank0/grad_reduced", 4),
    ]

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
        {"rules": [{"rule_name": "evil:rule"}]},
        {"rules": [{"rule_name": "evil"}]},
        {"rules": [{**rule, "function": "evil:rule"}]},
        {"rules": [{**rule, "args": {"threshold": "evil:rule"}}]},
        {"rules": ["evil:rule"]},
        {"rules": [rule], "rule": ["evil:rule"]},
        {"rules": [rule], "on_alert_command": "touch imported"},
        {"rules": [rule], "command": "touch imported"},
    ):
        done = runner.monitored(runner.folder / "evil.py", config={"wg_distribution": True, "alert": alert})
        assert done.returncode == 2, alert
        assert "error:" in done.stderr
        assert not (runner.folder / "imported").exists()
    names = {"rules": [{**rule, "kinds": ["evil:rule"], "names": ["evil:rule"]}]}
    assert runner.monitored(runner.write(LITTLE), config={"wg_distribution": True, "alert": names}).returncode == 0
    assert not (runner.folder / "imported").exists()
