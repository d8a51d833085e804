"""Parameters in parts: FSDP, tensor parallel, pipelines, ZeroRedundancyOptimizer, over two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import MSMON, Runner
from integration.conftest import HERE, integration_runner
from integration.truth import EVERYTHING, Observed

from msmon.backends.pytorch.adapters import fsdp1, fsdp2
from msmon.offline.merge import merge
from msmon.offline.reader import read_kind
from msmon.runtime.ledger import Ledger

if TYPE_CHECKING:
    from conftest import Finished

pytestmark = pytest.mark.slow
NOTED = [
    "fsdp1_full",
    "fsdp1_accumulated",
    "fsdp1_gradients_only",
    "fsdp1_whole",
    "fsdp2_full",
    "fsdp2_accumulated",
    "zero_redundancy",
    "tensor_parallel",
    "pipeline",
]
ALL = [*NOTED, "fsdp1_mixed", "fsdp1_flat", "fsdp2_mixed"]
TAPS = {
    "ops": [*EVERYTHING["ops"], "dtype"],
    "xy_distribution": True,
    "all_xy": True,
    "mg_direction": True,
    "ur_distribution": True,
    "monitor_mbs_grad": True,
    "cc_distribution": {"enable": True, "cc_pre_hook": True},
}


OTHER_VERSION = """
    import inspect, os
    import torch
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups
    from torch.distributed.fsdp import fully_shard

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meeting", rank=0, world_size=1)
    groups.reduce_of_another_version = groups.foreach_reduce
    post_backward = inspect.unwrap(groups.FSDPParamGroup.post_backward)
    names = post_backward.__code__.co_names
    names = tuple("reduce_of_another_version" if name == "foreach_reduce" else name for name in names)
    post_backward.__code__ = post_backward.__code__.replace(co_names=names)
    del groups.foreach_reduce
    model = fully_shard(torch.nn.Linear(3, 1), mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    torch.distributed.destroy_process_group()
"""


def load(finished: Finished, folder: Any) -> list[Observed]:
    assert finished.returncode == 0, finished.stderr
    truths = [json.loads((folder / f"truth.json{rank}").read_text()) for rank in range(2)]
    return [Observed(finished, truth, rank) for rank, truth in enumerate(truths)]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[Observed]:
    runner = integration_runner(tmp_path_factory.mktemp("bare"))
    return load(runner.bare(HERE / "sharded.py", ranks=2), runner.folder)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Observed]:
    runner = integration_runner(tmp_path_factory.mktemp("sharded"))
    return load(runner.monitored(HERE / "sharded.py", ranks=2, config=EVERYTHING), runner.folder)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[Observed]:
    runner = integration_runner(tmp_path_factory.mktemp("everything"))
    finished = runner.monitored(HERE / "sharded.py", ranks=2, config={**EVERYTHING, **TAPS})
    return load(finished, runner.folder)


@pytest.fixture(scope="module")
def merged(ranks: list[Observed], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge(ranks[0].finished.output, tmp_path_factory.mktemp("merged")).directory


@pytest.mark.parametrize("scenario", NOTED)
def test_rows_of_each_rank(ranks: list[Observed], scenario: str) -> None:
    """This rank's part of weights, reduced gradients and state; before reduction, its own gradient of the whole."""
    for seen in ranks:
        seen.check(scenario, tolerance=5e-6)


@pytest.mark.parametrize("scenario", ALL)
def test_same_bits(bare: list[Observed], everything: list[Observed], scenario: str) -> None:
    """With every tap on, weights are equal to the bit."""
    for alone, watched in zip(bare, everything, strict=True):
        assert alone.told(scenario) == watched.told(scenario)


def test_nothing_is_switched_off(everything: list[Observed]) -> None:
    """Every tap goes through every framework, and only the flat parameters are said to be no rows of parameters."""
    assert "switched off" not in everything[0].finished.stderr
    said = [line for line in everything[0].finished.stderr.splitlines() if "recorded as plain PyTorch" in line]
    assert len(said) == 2, said  # one a rank
    assert all("use_orig_params=True" in line for line in said)


@pytest.mark.parametrize(
    ("kind", "dtypes"), [("grad_unreduced", {"torch.bfloat16"}), ("grad_reduced", {"torch.float32"})]
)
def test_mixed_precision(everything: list[Observed], kind: str, dtypes: set[str]) -> None:
    """Gradients before reduction have the dtype of the computation, those of the optimizer that of the weights."""
    for seen in everything:
        rows = [row for row in seen.finished.rows(kind, seen.rank) if row.name.startswith(("Mixed.", "Mixed2."))]
        assert {row.name.split(".")[0] for row in rows} == {"Mixed", "Mixed2"}
        assert {row.values["dtype"] for row in rows} == dtypes


def test_micro_batches_of_a_pipeline(everything: list[Observed]) -> None:
    """Four forwards before the first backward are four micro-batches; the forward that learns shapes is none."""
    for seen in everything:
        for kind in ("actv", "actv_grad"):
            rows = [row for row in seen.finished.rows(kind, seen.rank) if row.name == f"Stage{seen.rank}.output"]
            assert [(row.step, row.micro_step) for row in rows] == [
                (step, part) for step in range(3) for part in range(4)
            ]
        assert not [
            row for row in seen.finished.rows("actv", seen.rank) if row.name.startswith("Stage") and "@" in row.name
        ]


@pytest.mark.parametrize(
    ("label", "adapter", "name", "expected"),
    [
        (
            "Full",
            "fsdp1",
            "Full.first.weight",
            [{"shape": [11], "whole_shape": [3, 4], "flat_offset": 0}, {"shape": [1], "flat_offset": 11}],
        ),
        (
            "Full2",
            "fsdp2",
            "Full2.first.weight",
            [{"shape": [2, 4], "whole_shape": [3, 4], "offset": [0, 0]}, {"shape": [1, 4], "offset": [2, 0]}],
        ),
        (
            "Parallel",
            "plain",
            "Parallel.outer.weight",
            [{"shape": [4, 3], "whole_shape": [4, 6], "offset": [0, 0]}, {"shape": [4, 3], "offset": [0, 3]}],
        ),
    ],
)
def test_report_places_each_part(
    ranks: list[Observed], label: str, adapter: str, name: str, expected: list[dict[str, Any]]
) -> None:
    """run.json says which part of which parameter this rank's rows are about."""
    for seen, place in zip(ranks, expected, strict=True):
        (model,) = [model for model in seen.finished.run_file(seen.rank)["models"] if model["label"] == label]
        assert model["adapter"] == adapter
        (parameter,) = [parameter for parameter in model["parameters"] if parameter["name"] == name]
        assert place.items() <= parameter.items()


@pytest.mark.parametrize(("sharded", "whole"), [("Full", "Model"), ("Full2", "Model_3")])
def test_merged_ranks_are_the_whole(merged: Path, sharded: str, whole: str) -> None:
    """Rows of all ranks together are those of the model that nobody has sharded, which trains beside it."""
    for kind in ("param_origin", "param_updated", "grad_reduced", "exp_avg", "exp_avg_sq"):
        rows = {(row.name, row.step): row for row in read_kind(merged, kind)}
        expected = {key: row for key, row in rows.items() if key[0].startswith(f"{whole}.")}
        assert len(expected) == (2 if kind.startswith("exp") else 3) * 16
        for (name, step), true in expected.items():
            found = rows[f"{sharded}.{name.removeprefix(f'{whole}.')}", step]
            for column in EVERYTHING["ops"]:
                assert found[column] == pytest.approx(true[column], rel=1e-4, abs=1e-6), (kind, name, step, column)


def test_merge_on_the_terminal(ranks: list[Observed], tmp_path: Path) -> None:
    """The command says where the result is, and what it left out; a run without parts is no matter for it."""
    runner = Runner(tmp_path)
    done = runner.call([MSMON, "merge", str(ranks[0].finished.output), "--output", str(tmp_path / "whole"), "--json"])
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ranks"] == [0, 1]
    assert document["left_out"] == {"grad_unreduced": "is about one rank"}
    assert read_kind(Path(document["output"]), "grad_reduced")
    nothing = runner.call([MSMON, "merge", document["output"]])
    assert nothing.returncode == 1
    assert "no run below" in nothing.stderr
    again = runner.call([MSMON, "merge", str(tmp_path / "whole")])
    assert again.returncode == 1
    assert "is in parts" in again.stderr


@pytest.mark.parametrize("adapter", [fsdp1.Fsdp1Adapter(), fsdp2.Fsdp2Adapter()])
def test_patches_leave_no_trace(adapter: fsdp1.Fsdp1Adapter | fsdp2.Fsdp2Adapter) -> None:
    """What an adapter puts into the framework goes with the ledger."""
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups
    import torch.distributed.fsdp._runtime_utils as runtime

    before = runtime._post_backward_reshard, groups.foreach_reduce, groups.FSDPParamGroup.post_backward
    ledger = Ledger()
    adapter.tell_unreduced(ledger, lambda find: None)
    assert len(ledger) > 0
    during = runtime._post_backward_reshard, groups.foreach_reduce, groups.FSDPParamGroup.post_backward
    assert during != before
    ledger.undo()
    after = runtime._post_backward_reshard, groups.foreach_reduce, groups.FSDPParamGroup.post_backward
    assert after == before


LIBRARY = """
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from msmon.pytorch import TrainerMon

    torch.distributed.init_process_group("gloo")
    model = FullyShardedDataParallel(torch.nn.Linear(3, 1), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = TrainerMon("monitor.json", params_have_main_grad=False)
    monitor.set_monitor(model, 1, optimizer)
    for step in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    monitor.close()
    torch.distributed.destroy_process_group()
"""


def test_library(tmp_path: Path) -> None:
    """With the calls in the script, where nobody has seen its modules being made, FSDP1 is known all the same."""
    runner = integration_runner(tmp_path)
    runner.write_config(wg_distribution=True, ops=["norm", "shape"])
    finished = runner.bare(runner.write(LIBRARY), ranks=2, MONITOR_OUTPUT_DIR=str(runner.output))
    assert finished.returncode == 0, finished.stderr
    for rank in (0, 1):
        rows = {(row.name.rpartition(".")[2], row.step): row for row in finished.rows("grad_unreduced", rank)}
        assert {key: row.values["shape"] for key, row in rows.items()} == {
            (name, step): shape for name, shape in (("weight", "[1, 3]"), ("bias", "[1]")) for step in (0, 1)
        }
        assert finished.run_file(rank)["models"][0]["adapter"] == "fsdp1"


@pytest.mark.parametrize("adapter", [fsdp1.Fsdp1Adapter, fsdp2.Fsdp2Adapter])
def test_not_in_use(adapter: type[fsdp1.Fsdp1Adapter | fsdp2.Fsdp2Adapter]) -> None:
    """A plain model is no matter of theirs, and nothing is said."""
    model = torch.nn.Linear(1, 1)
    assert adapter().applies([model], [torch.optim.SGD(model.parameters(), lr=0.1)]) == "not in use"


def test_another_version_is_said(tmp_path: Path) -> None:
    """Where torch has no place to read gradients before reduction, training goes on and the reason names the place."""
    runner = integration_runner(tmp_path)
    script = runner.write(OTHER_VERSION)
    finished = runner.monitored(script, options=["--gradients"])
    assert finished.returncode == 0, finished.stderr
    assert "foreach_reduce" in finished.stderr
    assert "recorded as plain PyTorch" in finished.stderr
    assert len(finished.rows("grad_reduced")) == 6
