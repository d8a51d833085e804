"""`msmon doctor`: what it finds in an environment, and in the processes of a command."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

import pytest
from conftest import MSMON, TORCHRUN, Finished, Runner

from msmon.bootstrap.doctor import ReachedProcess, processes_in

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

TRAIN = """
    import torch
    print("printed by the script")
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
"""


def doctor(runner: Runner, *words: str, **env: str) -> Finished:
    return runner.call([MSMON, "doctor", *words], **env)


def checks(done: Finished) -> dict[str, Any]:
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_environment_that_is_well(runner: Runner) -> None:
    """Nothing failed: exit 0; a line a check, and nothing is left behind."""
    done = doctor(runner)
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split()[1].rstrip(":"): line for line in done.stdout.splitlines()}
    assert lines.keys() == {"python", "injection", "torch", "output"}
    assert all(line.startswith("ok ") for line in lines.values())
    assert sys.executable in lines["python"]
    import torch

    assert f"torch: {torch.__version__} (cpu" in lines["torch"]
    assert files(runner.folder) == set()


def test_a_torch_npu_that_cannot_be_loaded_is_named(runner: Runner) -> None:
    """Without CANN the import of torch itself fails, as torch loads the extensions that are installed: exit 1 and what to do."""
    runner.write("raise ImportError('libhccl.so: cannot open shared object file')", "site/torch_npu/__init__.py")
    runner.write(
        "Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n", "site/torch_npu-2.13.0.dist-info/METADATA"
    )
    runner.write(
        "[torch.backends]\ntorch_npu = torch_npu:_autoload\n", "site/torch_npu-2.13.0.dist-info/entry_points.txt"
    )
    done = doctor(runner, "--json", PYTHONPATH=str(runner.folder / "site"))
    found = checks(done)["torch"]
    assert (done.returncode, found["state"]) == (1, "failed")
    assert "torch_npu" in found["found"]
    assert "CANN" in found["hint"]
    assert doctor(runner, PYTHONPATH=str(runner.folder / "site"), TORCH_DEVICE_BACKEND_AUTOLOAD="0").returncode == 0


def test_what_keeps_a_recording_from_being_made_is_named(runner: Runner) -> None:
    """Switched off by the environment, and an output that cannot be written: exit 1, the reason, a hint."""
    done = doctor(runner, "--json", MSMON="0", MONITOR_OUTPUT_DIR="/proc/output")
    found = checks(done)
    assert done.returncode == 1
    assert {name for name, check in found.items() if check["state"] == "failed"} == {"injection", "output"}
    assert "off: MSMON=0" in found["injection"]["found"]
    assert "/proc" in found["output"]["found"]
    assert all(check["hint"] for check in found.values() if check["state"] != "ok")


def test_processes_of_a_launcher(runner: Runner) -> None:
    """The launcher constructs no optimizer, its workers do and step; the command's output is on stderr, nothing is left."""
    runner.write(TRAIN)
    before = files(runner.folder)
    done = doctor(runner, "--json", "--", TORCHRUN, "--standalone", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    launcher, *workers = document["processes"]
    assert (launcher["watched"], launcher["decision"]) == (False, "torch, no optimizer")
    assert [(worker["watched"], worker["decision"]) for worker in workers] == [(True, "watched")] * 2
    assert {worker["parent"] for worker in workers} == {launcher["pid"]}
    assert all(worker["command"][-1] == "train.py" for worker in workers)
    assert (document["ranks"], document["exit_code"]) == ([0, 1], 0)
    assert done.stderr.count("printed by the script") == 2
    assert files(runner.folder) == before


def test_a_command_in_which_nothing_is_seen(runner: Runner) -> None:
    """No training step: exit 1; each process has its line, and one without its environment has none."""
    runner.write(TRAIN)
    python = shlex.quote(sys.executable)
    done = doctor(
        runner, "--", "sh", "-c", f"{python} -c pass; env -i {python} train.py; {python} -c 'import torch'; exit 3"
    )
    assert done.returncode == 1
    without, with_torch = done.stdout.splitlines()
    assert "  no torch " in without
    assert "  torch, no optimizer " in with_torch
    assert "no training step was seen\nexit code of the command: 3\n" in done.stderr
    assert "lost PYTHONPATH or its environment" in done.stderr


def test_a_command_that_does_not_exist(runner: Runner) -> None:
    """As with `msmon run`: exit 127."""
    done = doctor(runner, "--", "no-such-command")
    assert (done.returncode, done.stdout) == (127, "")
    assert "no such command: `no-such-command`" in done.stderr


def test_decisions_are_put_together_by_process() -> None:
    """An exec begins a new process of the same number; a fork has no start of its own; the last decision counts."""
    found = processes_in(
        [
            (7, 1, "waiting for torch argv=['msmon', 'run'] flags=sys.flags()"),
            (7, 1, "waiting for torch argv=['python', 'train.py', 'a b'] flags=sys.flags()"),
            (8, 7, "off: MSMON=0 argv=['python'] flags=sys.flags()"),
            (7, 1, "torch.optim.optimizer imported"),
            (7, 1, "first optimizer constructed, watching"),
            (7, 1, "torch.optim.optimizer imported"),
            (9, 7, "first optimizer constructed, watching"),
            (8, 7, "hook of torch failed: ValueError()"),
        ]
    )
    assert found == [
        ReachedProcess(7, 1, ["msmon", "run"], "no torch"),
        ReachedProcess(7, 1, ["python", "train.py", "a b"], "watched", watched=True),
        ReachedProcess(8, 7, ["python"], "hook of torch failed: ValueError()"),
        ReachedProcess(9, 7, ["(a fork)"], "watched", watched=True),
    ]


@pytest.mark.slow
def test_no_file_that_is_removed_is_named(runner: Runner) -> None:
    """The trial run says what it has seen, and not where; the end says that nothing is left of it."""
    runner.write("""
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    """)
    temporary = runner.folder / "temporary"
    temporary.mkdir()
    done = doctor(runner, "--", sys.executable, "train.py", TMPDIR=str(temporary))
    assert "msmon: 1 training steps seen, 1 collected" in done.stderr
    assert "what was recorded is removed" in done.stderr
    assert str(temporary) not in done.stdout + done.stderr
    assert list(temporary.glob("msmon-*")) == []  # torch leaves a folder of its own
    assert "next:" not in done.stderr
