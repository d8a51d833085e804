"""Real trainings of two processes, through every launcher that is here: a directory a rank, one run, the same numbers."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import MSMON, TORCHRUN, Finished, Runner

from msmon.offline.reader import kinds, read_kind, read_steps, run_directories

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
NOTHING_SEEN = "no training step was seen"

TRAIN = """
    import os, pathlib, sys
    import torch
    import torch.distributed as dist

    def rank_and_size():
        for rank, size in (("RANK", "WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
            if rank in os.environ:
                return int(os.environ[rank]), int(os.environ[size])
        return 0, 1

    def train(steps=3, first=0):
        rank, size = rank_and_size()
        if "MASTER_ADDR" in os.environ:
            dist.init_process_group("gloo", rank=rank, world_size=size)
        else:
            dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=size)
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(first, first + steps):
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            model(inputs).pow(2).mean().backward()
            optimizer.step()
            yield model
        dist.barrier()
        dist.destroy_process_group()
"""
ALONE = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).pow(2).mean().backward()
        optimizer.step()
"""


def script(runner: Runner) -> str:
    return runner.write(f"{TRAIN}\n    for _ in train(): pass").name


def monitored(runner: Runner, *command: str, **env: str) -> Finished:
    done = runner.call([MSMON, "run", "--output", str(runner.output), "--", *command], timeout=900, **env)
    assert done.returncode == 0, done.stderr
    return done


def run_ids(done: Finished) -> list[str]:
    return [directory.name.rsplit("-", 1)[1] for directory in run_directories(done.output)]


def numbers(directory: Path, kind: str = "grad_reduced") -> list[tuple[Any, ...]]:
    return [(row.name, row.step, row["norm"]) for row in read_kind(directory, kind)]


def assert_both_ranks_are_recorded(done: Finished, steps: int = 3) -> None:
    """One directory a rank under one run id; gradients differ before reduction and are the same after it."""
    assert len(run_ids(done)) == 2
    assert len(set(run_ids(done))) == 1
    ((one,), (other,)) = (done.directories(rank) for rank in (0, 1))
    assert [done.run_file(rank)["world_size"] for rank in (0, 1)] == [2, 2]
    assert numbers(one) == numbers(other)
    assert sorted({step for _, step, _ in numbers(one)}) == list(range(steps))
    assert numbers(one, "grad_unreduced") != numbers(other, "grad_unreduced")
    assert NOTHING_SEEN not in done.stderr


def installed(name: str) -> str:
    """A program beside this Python or on the PATH; a test without it is skipped."""
    found = shutil.which(name, path=os.pathsep.join([str(BIN), os.environ["PATH"]]))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.parametrize("launcher", ["torchrun", "torch.distributed.run", "accelerate", "deepspeed", "mpirun"])
def test_two_processes_of_a_launcher(launcher: str, runner: Runner) -> None:
    """Both workers are recorded, the launcher itself is not."""
    command = {
        "torchrun": lambda: [TORCHRUN, "--standalone", "--nproc-per-node", "2"],
        "torch.distributed.run": lambda: [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", "2"),
        ],
        "accelerate": lambda: [
            *(installed("accelerate"), "launch", "--multi_gpu", "--num_processes", "2"),
            *("--main_process_port", free_port()),
        ],
        "deepspeed": lambda: [
            *(sys.executable, installed("deepspeed"), "--num_gpus", "2", "--no_local_rank"),
            *("--master_port", free_port()),
        ],
        "mpirun": lambda: [installed("mpirun"), "-n", "2", sys.executable],
    }[launcher]()
    done = monitored(
        runner, *command, script(runner), ACCELERATE_USE_CPU="1", DS_ACCELERATOR="cpu", HYDRA_LAUNCHER="fork"
    )
    assert_both_ranks_are_recorded(done)


def free_port() -> str:
    """One that nothing listens on now; tests run side by side."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


PDSH = """\
#!/bin/sh
# As on other hosts: of the environment there is what the command itself exports.
hosts=$5
shift 5
number=0
for host in $(echo "$hosts" | tr , " "); do
  env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$(echo "$*" | sed "s/%n/$number/")" &
  pids="$pids $!"
  number=$((number + 1))
done
status=0
for pid in $pids; do wait "$pid" || status=$?; done
exit $status
"""


@pytest.mark.skipif(
    " " in sys.executable, reason="deepspeed itself starts no Python whose path has a space on other hosts"
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_deepspeed_on_several_hosts(dynamic: bool, runner: Runner) -> None:
    """Of our variables DeepSpeed passes on those that begin with PYTHON: enough to record both hosts under one run."""
    deepspeed = installed("deepspeed")
    runner.write(PDSH, "bin/pdsh").chmod(0o755)
    (runner.folder / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    runner.write_config(wg_distribution=True, ops=["norm"])  # dynamic_on is false: nothing until it is switched on
    options = ["--config", "monitor.json", *(["--dynamic"] if dynamic else [])]
    command = [
        *(deepspeed, "--hostfile", "hosts", "--launcher", "pdsh", "--no_ssh_check", "--no_local_rank"),
        *("--master_addr", "127.0.0.1", "--master_port", free_port()),
    ]
    done = runner.call(
        [MSMON, "run", "--output", str(runner.output), *options, "--", *command, script(runner)],
        PATH=f"{runner.folder}/bin:{os.environ['PATH']}",
        DS_ACCELERATOR="cpu",
    )
    assert done.returncode == 0, done.stderr
    if dynamic:
        assert len(set(run_ids(done))) <= 1
        assert [kinds(directory) for directory in run_directories(done.output)] == [[]] * len(run_ids(done))
    else:
        assert_both_ranks_are_recorded(done)


def test_restarted_workers_go_on_under_the_same_run(runner: Runner) -> None:
    """A worker of a process group dies once: the new pair has directories of its own, the run id of the first, whole rows."""
    runner.write(
        f"""{TRAIN}
    checkpoint = pathlib.Path("checkpoint.pt")
    restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
    first = torch.load(checkpoint)["step"] if restarted else 0
    assert first == (2 if restarted else 0)
    for step, model in enumerate(train(steps=3, first=first), first + 1):
        if not restarted and step == 2:
            dist.barrier()
            if dist.get_rank() == 1:
                os._exit(5)
            torch.save({{"step": step}}, checkpoint)
    """
    )
    command = [TORCHRUN, "--standalone", "--max-restarts", "1", "--nproc-per-node", "2", "train.py"]
    done = monitored(runner, *command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert len(run_ids(done)) == 4
    assert len(set(run_ids(done))) == 1
    for rank in (0, 1):
        before, after = done.directories(rank)
        assert [int(line["step"]) for line in read_steps(after)] == [0, 1, 2]
        assert {0} <= {step for _, step, _ in numbers(before)} <= {0, 1}  # the last one may still be in flight
        assert {step for _, step, _ in numbers(after)} == {0, 1, 2}
    (dead, _), (stopped, _) = done.directories(1), done.directories(0)
    assert numbers(dead) == numbers(stopped)


def test_whatever_a_shell_script_starts(runner: Runner) -> None:
    """Through exec, nohup, a subshell, the background, env, xargs and another msmon run: each training is recorded once.

    One with an emptied environment is not.
    """
    runner.write(ALONE)
    runner.write(
        f"""
        set -e
        python="{sys.executable}"
        sh -c "'$python' train.py"
        nohup "$python" train.py >/dev/null
        (cd . && TASK=1 "$python" train.py)
        echo train.py | xargs "$python"
        "$python" train.py & wait $!
        env -i "$python" train.py
        "{MSMON}" run --output "{runner.output}" -- "$python" train.py
        exec env -u TASK "$python" train.py
        """,
        "run.sh",
    )
    done = monitored(runner, "bash", "run.sh")
    assert len(run_ids(done)) == 7
    assert len(set(run_ids(done))) == 1
    assert [len(read_steps(directory)) for directory in run_directories(done.output)] == [2] * 7
    assert NOTHING_SEEN not in done.stderr
