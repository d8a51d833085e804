"""Unreduced means unreduced, and reduced means reduced: DDP over two ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from integration.conftest import HERE, integration_runner
from integration.truth import Observed

if TYPE_CHECKING:
    from conftest import Runner

pytestmark = pytest.mark.slow
GRADIENTS = {"wg_distribution": True, "ops": ["min", "max", "norm", "mean", "zeros", "nans"], "ndigits": 16}
SCENARIOS = [
    "wrapped_before",
    "wrapped_after",
    "bucket_views",
    "small_buckets",
    "no_sync",
    "static_graph",
    "branch_unused_here",
    "compressed",
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Observed]:
    runner = integration_runner(tmp_path_factory.mktemp("ddp"))
    finished = runner.monitored(HERE / "distributed.py", ranks=2, config=GRADIENTS)
    assert finished.returncode == 0, finished.stderr
    truths = [json.loads((runner.folder / f"truth.json{rank}").read_text()) for rank in range(2)]
    return [Observed(finished, truth, rank) for rank, truth in enumerate(truths)]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_rows_of_each_rank(ranks: list[Observed], scenario: str) -> None:
    """grad_unreduced is this rank's own gradient, as one process has it on this rank's data; grad_reduced is the mean, on both."""
    for seen in ranks:
        seen.check(scenario, tolerance=2e-6)
    labels = ranks[0].labels(scenario)
    reduced, unreduced = (
        [seen.recorded(kind, labels) for seen in ranks] for kind in ("grad_reduced", "grad_unreduced")
    )
    assert reduced[0] == reduced[1]
    assert unreduced[0] != unreduced[1]


def test_communication_hook_of_the_user_stays(ranks: list[Observed]) -> None:
    """The hook registered by the script runs at every reduction."""
    assert [seen.told("compressed") for seen in ranks] == [3, 3]


def test_branch_unused_on_one_rank(ranks: list[Observed]) -> None:
    """A rank that did not use a branch has no unreduced row of it in that step, and the reduced row that all have."""
    for rank, seen in enumerate(ranks):
        steps = {
            row.step for row in seen.finished.rows("grad_unreduced", rank) if row.name == "UnusedHere.right.weight"
        }
        assert steps == ({0, 1, 2} if rank == 0 else {0, 2})
        steps = {row.step for row in seen.finished.rows("grad_reduced", rank) if row.name == "UnusedHere.right.weight"}
        assert steps == {0, 1, 2}


def test_values_of_the_original(ranks: list[Observed]) -> None:
    """P23: 4.242641 on rank 0, 8.485281 on rank 1, reduced 6.363961 on both."""
    for seen, own in zip(ranks, (4.242641, 8.485281), strict=True):
        seen.told("values_of_the_original")
        for kind, value in (("grad_unreduced", own), ("grad_reduced", 6.363961)):
            (row,) = seen.recorded(kind, ["Last"]).items()
            assert row[0][0] == "Last.weight"
            assert row[1][2] == pytest.approx(value, abs=1e-6)


def test_report_names_the_wrappers(ranks: list[Observed]) -> None:
    """run.json says that the model is inside DDP; both ranks share the run's id and say their own rank."""
    reports = [seen.finished.run_file(rank) for rank, seen in enumerate(ranks)]
    assert [report["rank"] for report in reports] == [0, 1]
    assert len({report["msmon"]["run_id"] for report in reports}) == 1
    (model,) = (model for model in reports[0]["models"] if model["label"] == "WrappedBefore")
    assert model["wrappers"] == ["DistributedDataParallel"]


PLAIN = """
    import os, torch
    import torch.distributed as dist
    from truth import batch
    torch.manual_seed(0)
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    run = torch.nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager")) if distributed else model
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        run(batch(step)).pow(2).mean().backward()
        optimizer.step()
    if distributed:
        dist.destroy_process_group()
"""


def test_names_and_values_compare_with_one_process(runner: Runner) -> None:
    """Equal data on both ranks, compiled and wrapped: names, order and values of one process without wrappers."""
    script = runner.write(PLAIN)
    single = runner.monitored(script, config=GRADIENTS)
    rows = {kind: single.rows(kind) for kind in ("grad_reduced", "grad_unreduced")}
    (runner.folder / "single").mkdir()
    runner.output.rename(runner.folder / "single" / "out")
    both = runner.monitored(script, ranks=2, config=GRADIENTS)
    assert both.returncode == 0, both.stderr
    for rank in range(2):
        for kind, alone in rows.items():
            assert [(row.name, row.step) for row in both.rows(kind, rank)] == [(row.name, row.step) for row in alone]
            assert [row["norm"] for row in both.rows(kind, rank)] == pytest.approx(
                [row["norm"] for row in alone], rel=1e-6
            )


LIBRARY = """
    import os, sys, torch
    import torch.distributed as dist
    from msmon.pytorch import TrainerMon
    from truth import batch
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    model[1].weight.tensor_model_parallel = True
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    monitor = TrainerMon("monitor.json", params_have_main_grad=False)
    monitor.set_monitor(ddp, 1, optimizer, **{sys.argv[1]: dist.group.WORLD})
    ddp(batch(dist.get_rank())).pow(2).mean().backward()
    optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("group", ["dp_group", "tp_group"])
def test_reduced_rows_are_written_once_a_group(runner: Runner, group: str) -> None:
    """P24: reduced rows only from a group's first rank, unreduced from all; of tp_group except tensor_model_parallel parameters."""
    runner.write_config(**GRADIENTS)
    done = runner.bare(runner.write(LIBRARY), group, ranks=2, MONITOR_OUTPUT_DIR=str(runner.output))
    assert done.returncode == 0, done.stderr
    names = ["module.0.weight", "module.0.bias", "module.1.weight", "module.1.bias"]
    assert [row.name for row in done.rows("grad_reduced", 0)] == names
    assert [row.name for row in done.rows("grad_reduced", 1)] == (["module.1.weight"] if group == "tp_group" else [])
    assert all(len(done.rows("grad_unreduced", rank)) == 4 for rank in range(2))
    assert len({directory.name[-8:] for rank in range(2) for directory in done.directories(rank)}) == 1
