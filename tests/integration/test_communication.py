"""What torch.distributed sends and receives, in every form, over two gloo ranks."""

from __future__ import annotations

import ast
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from integration.conftest import HERE, integration_runner

from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from conftest import Finished, Runner

pytestmark = pytest.mark.slow
SIX = ["min", "max", "norm", "mean", "zeros", "nans"]
SCENARIOS = [
    node.name
    for node in ast.parse((HERE / "communicating.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and node.decorator_list
]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    runner = integration_runner(tmp_path_factory.mktemp("bare"))
    finished = runner.bare(HERE / "communicating.py", ranks=2)
    assert finished.returncode == 0, finished.stderr
    return [json.loads((runner.folder / f"truth.json{rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, list[dict[str, Any]]]:
    runner = integration_runner(tmp_path_factory.mktemp("communication"))
    config = {"cc_distribution": {"enable": True, "cc_pre_hook": True}, "ops": SIX, "ndigits": 16}
    finished = runner.monitored(HERE / "communicating.py", ranks=2, config=config)
    assert finished.returncode == 0, finished.stderr
    assert "switched off" not in finished.stderr
    assert "not recorded" not in finished.stderr
    return finished, [json.loads((runner.folder / f"truth.json{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_rows_of_each_rank(ranks: tuple[Finished, list[dict[str, Any]]], scenario: str) -> None:
    """Inputs as they were sent, outputs as they were received, in the order of the calls, and nothing else."""
    finished, truths = ranks
    for rank, truth in enumerate(truths):
        step, expected = truth[scenario]["step"], truth[scenario]["rows"]
        recorded = [row for row in finished.rows("cc", rank) if row.step == step]
        assert expected
        assert [row.name for row in recorded] == [name for name, _ in expected]
        assert all(row.micro_step is None and row.stage == 0 for row in recorded)
        for row, (name, values) in zip(recorded, expected, strict=True):
            for statistic, value in zip(Statistic, values, strict=True):
                assert math.isclose(row[statistic.value], value, rel_tol=1e-6, abs_tol=1e-6), (name, statistic, rank)


def test_what_the_script_gets_is_unchanged(
    ranks: tuple[Finished, list[dict[str, Any]]], bare: list[dict[str, Any]]
) -> None:
    """Types of handles and what waiting returns are those without msmon."""
    _, truths = ranks
    told = [{name: entry["told"] for name, entry in truth.items() if entry["told"]} for truth in truths]
    assert told == [{name: entry["told"] for name, entry in truth.items() if entry["told"]} for truth in bare]
    assert {"asynchronous", "point_to_point"} <= told[0].keys()


def test_every_step_has_a_file_of_its_own(ranks: tuple[Finished, list[dict[str, Any]]]) -> None:
    """Header and rows have the same columns, which the original's file has not."""
    finished, truths = ranks
    (directory,) = finished.directories(0)
    files = sorted(directory.glob("cc_*.csv"))
    assert {file.name for file in files} == {f"cc_{step}-{step}.csv" for step in range(len(truths[0]))}
    lines = files[0].read_text().splitlines()
    assert lines[0] == "vpp_stage,name,step,min,max,norm,mean,zeros,nans,shape,dtype"
    assert lines[1].startswith("0,all_reduce_0.input,0,")
    assert lines[1].endswith(",[4],torch.float32")


LOOP = """
    import sys, torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def sum_of(tensor):
        dist.all_reduce(tensor)
        return tensor
    for step in range(4):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        sum_of(torch.ones(2))
        sum_of(torch.ones(3))
    print("trained", step)
    dist.barrier()
    dist.destroy_process_group()
"""


def shapes(finished: Finished, rank: int = 0) -> list[tuple[str, int, str]]:
    return [(row.name, row.step, str(row.values["shape"])) for row in finished.rows("cc", rank)]


def test_only_named_lines(runner: Runner) -> None:
    """cc_codeline: a frame anywhere in the stack is enough; numbers in names count every call."""
    script = runner.write(LOOP)
    pick = {"enable": True, "cc_codeline": [r"train\.py\[16\]", r"nowhere\.py"]}
    done = runner.monitored(script, ranks=2, config={"cc_distribution": pick, "collect_times": 2})
    assert done.returncode == 0, done.stderr
    assert shapes(done) == [("all_reduce_1.output", 1, "[3]")]
    in_backward = {"enable": True, "cc_codeline": [r"train\.py\[12\]"]}
    done = runner.monitored(script, ranks=2, config={"cc_distribution": in_backward, "collect_times": 1})
    assert done.returncode == 0, done.stderr
    assert shapes(done, 1)[1:] == [("all_reduce_0.output", 0, "[3]")]


def test_only_collected_steps(runner: Runner) -> None:
    """Steps that are not collected have no rows, and calls are numbered anew in each step."""
    config = {"cc_distribution": {"enable": True}, "start_step": 1, "step_interval": 2, "collect_times": 1}
    done = runner.monitored(runner.write(LOOP), ranks=2, config=config)
    assert done.returncode == 0, done.stderr
    names = [(name, step) for name, step, _ in shapes(done) if name.startswith("all_reduce")]
    assert names == [(f"all_reduce_{number}.output", 1) for number in range(3)]


def test_log_only(runner: Runner) -> None:
    """cc_log_only says where calls come from, and the run ends well before its second optimizer step."""
    done = runner.monitored(
        runner.write(LOOP), ranks=2, config={"cc_distribution": {"enable": True, "cc_log_only": True}}
    )
    assert done.returncode == 0, done.stderr
    assert "trained" not in done.stdout
    lines = [line for line in done.stderr.splitlines() if "all_reduce of" in line and "[rank 0]" in line]
    own = [line for line in lines if "train.py[9]" in line]
    assert len(own) == 2
    for line, caller in zip(own, (15, 16), strict=True):
        assert "all_reduce of torch.float32 in group default_pg (2 ranks), 1 call: " in line
        assert line.index("train.py[9] < ") < line.index(f"train.py[{caller}]")
    assert any("train.py[12]" in line and "train.py[9]" not in line for line in lines), "that of DDP, in backward()"
    assert not any("msmon/backends" in line for line in lines)
    assert not done.rows("cc")


LATE = """
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def train():
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    train()
    received = torch.zeros(2)
    work = dist.irecv(received, 1 - rank)
    train()
    dist.send(torch.ones(2), 1) if rank == 0 else None
    if rank == 1:
        work.wait()
        dist.send(torch.ones(2), 0)
    else:
        work.wait()
    train()
    assert received.sum() == 2
    dist.barrier()
    dist.destroy_process_group()
"""


def test_what_comes_after_its_step(runner: Runner) -> None:
    """Nobody waits on its behalf: an output that comes after its step has been written is left out, and that is said."""
    done = runner.monitored(
        runner.write(LATE), ranks=2, config={"cc_distribution": {"enable": True, "cc_pre_hook": True}}
    )
    assert done.returncode == 0, done.stderr
    assert shapes(done) == [("send_0.input", 2, "[2]")]
    assert done.stderr.count("recv_0 is not complete when its step ends: its outputs are not recorded") == 2


ENDS = """
    import os, subprocess, sys, torch
    import torch.distributed as dist
    from datetime import timedelta
    rank = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    if rank == 0:
        subprocess.Popen([sys.executable, __file__, sys.argv[1], "1"])
    store = "file://" + os.path.abspath(sys.argv[1] + ("monitored" if "MSMON_CONFIG" in os.environ else "bare"))
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=900))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)  # the other rank never takes part
        if sys.argv[1] == "raised":
            raise ValueError("mine")
        if sys.argv[1] == "exit":
            sys.exit(7)
"""


@pytest.mark.parametrize("end", ["raised", "exit", "quiet"])
def test_process_ends_as_it_would(runner: Runner, end: str) -> None:
    """A call that never completes keeps the process from nothing, and changes nothing about its end."""
    script = runner.write(ENDS)
    bare = runner.bare(script, end)
    done = runner.monitored(script, end, config={"cc_distribution": {"enable": True}})
    assert done.returncode == bare.returncode == {"raised": 1, "exit": 7, "quiet": 0}[end]


INSIDE = """
    import sys, torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from msmon.pytorch import TrainerMon
    from msmon.backends.pytorch import communication
    from torch._C._distributed_c10d import FakeWork
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

    def traces():
        names = [f"c10d::{name}" for name in communication._OPERATORS] + ["_c10d_functional::wait_tensor"]
        owners = dist.distributed_c10d.Work, FakeWork, dist.ProcessGroup, torch._C.Future, dist
        return [[torch._C._dispatch_dump(name) for name in names], [dict(vars(owner)) for owner in owners]]

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.all_reduce(torch.ones(1))
    torch.ops._c10d_functional.wait_tensor
    before = traces()
    for _ in range(2):
        monitors = [TrainerMon("monitor.json", params_have_main_grad=False) for _ in range(2)]
        for monitor in monitors:
            monitor.set_monitor(model, 1, optimizer)
        assert traces() != before
        sent, received = torch.ones(3), torch.zeros(3)
        operations = [dist.P2POp(dist.isend, sent, 1), dist.P2POp(dist.irecv, received, 1)]
        with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as together:
            for operation in operations:
                operation.op(operation.tensor, 1)
        assert communication._observer.pending
        received.fill_(5)
        together.wait()
        received.zero_()
        assert not communication._observer.pending
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        monitors[0].close()
        assert traces() != before
        monitors[1].close()
        assert traces() == before
        assert communication._observer is None
    print("done")
"""


def test_calls_made_together_and_no_trace(runner: Runner) -> None:
    """Point-to-point calls that a backend makes together are read when their common handle has been waited for; closed, nothing is left in torch."""
    runner.write_config(cc_distribution={"enable": True, "cc_pre_hook": True}, ops=["max"])
    done = runner.bare(runner.write(INSIDE), MONITOR_OUTPUT_DIR=str(runner.output))
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
    assert "switched off" not in done.stderr
    assert len(done.directories()) == 4
    rows = [(row.name, row.step, row["max"]) for row in done.rows("cc")]
    assert rows == [("send_0.input", 0, 1.0), ("recv_0.output", 0, 5.0)] * 4


def test_another_model_takes_communication_over(runner: Runner) -> None:
    """Rows of communication go with the first model; when a fault switches that off, with the next, and none is lost."""
    script = runner.write(
        """
        import os
        import torch, torch.distributed as dist
        from msmon.backends.pytorch.watch import Watch
        dist.init_process_group("gloo", init_method="file://" + os.path.abspath("group"), rank=0, world_size=1)
        settle = Watch._settle
        def planted(self):
            if self.label == "First" and self.rounds.step == 2:
                raise RuntimeError("planted")
            settle(self)
        Watch._settle = planted
        class First(torch.nn.Linear): pass
        class Second(torch.nn.Linear): pass
        models = [First(2, 2), Second(2, 2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for step in range(5):
            for model, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                dist.all_reduce(model.weight.grad)
                optimizer.step()
        dist.destroy_process_group()
        """
    )
    done = runner.monitored(script, config={"wg_distribution": True, "cc_distribution": {"enable": True}})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("monitoring of First switched off, training goes on: RuntimeError: planted") == 1
    reduced = [(row.name.partition(".")[0], row.step) for row in done.rows("grad_reduced")]
    assert {step for name, step in reduced if name == "Second"} == set(range(5))
    assert {step for name, step in reduced if name == "First"} <= {0, 1, 2}
    assert {row.step for row in done.rows("cc")} == set(range(5))
