"""Rows of a plain training: kinds, statistics, dtypes, names, selection of tensors and of steps, files."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any

import pytest
from integration.conftest import observe
from integration.truth import EVERYTHING

from msmon.offline.reader import read_steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Finished, Runner
    from integration.truth import Observed

pytestmark = pytest.mark.slow
GRADIENTS = {"wg_distribution": True, "ops": ["min", "max", "norm", "mean", "zeros", "nans"], "ndigits": 16}


@pytest.fixture
def tensors(observed: Callable[..., Observed]) -> Observed:
    return observed("tensors.py", **EVERYTHING)


@pytest.mark.parametrize(
    "scenario",
    ["every_dtype", "strange_names", "name_of_two_lines", "tied", "sparse", "on_meta"]
    + [
        f"state_of_{name}"
        for name in [
            "Plain",
            "Momentum",
            "AdamWAmsgrad",
            "AdamFused",
            "AdamForeach",
            "AdamLoop",
            "AdamCapturable",
            "AdagradSum",
            "RmsPropCentered",
            "AdafactorFactored",
            "NAdamProduct",
            "RpropSigned",
            "AdadeltaTwo",
            "AveragedSgd",
        ]
    ],
)
def test_rows_are_the_truth(tensors: Observed, scenario: str) -> None:
    """All six statistics of weights, gradients and every state tensor agree with the float64 oracle; no row too many."""
    tensors.check(scenario)


def test_optimizer_state_is_only_looked_at(tensors: Observed) -> None:
    """Reading state creates no entry: none before the first step, one a parameter after it (none for plain SGD)."""
    assert tensors.told("state_of_AdamLoop") == [0, 4]
    assert tensors.told("state_of_Plain")[0] == 0


def test_state_files_are_named_after_their_keys(tensors: Observed) -> None:
    """Each key of the state has files of its own; step counters have none."""
    names = {path.name.rsplit("_", 1)[0] for path in tensors.finished.directories()[0].glob("*_*-*.csv")}
    wanted = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "grad_avg", "row_var"}
    assert wanted | {"col_var", "variance", "mu_product", "exp_inf", "prev", "acc_delta"} <= names
    assert "step" not in names


def test_stateless_optimizer_is_said_once(tensors: Observed) -> None:
    """mv_distribution with plain SGD: one line says that there is nothing to record."""
    assert tensors.finished.stderr.count("SGD keeps no state tensors") == 1


def test_meta_parameters_are_left_out_and_said(tensors: Observed) -> None:
    """A parameter on the meta device has no row, and each kind of row that it lacks is said once."""
    assert tensors.finished.stderr.count("PartlyMeta.meta.weight has no param_origin") == 1
    assert not [row for row in tensors.finished.rows("param_origin") if row.name.startswith("PartlyMeta.meta")]


def test_gradients_of_unused_and_frozen_parameters_are_absent(tensors: Observed) -> None:
    """B14: frozen, unused and integer parameters have rows of weights and none of gradients."""
    weights = {row.name for row in tensors.finished.rows("param_origin")}
    gradients = {row.name for kind in ("grad_reduced", "grad_unreduced") for row in tensors.finished.rows(kind)}
    silent = {f"Odd.{name}" for name in ("frozen", "unused", "whole_number", "flags")}
    assert silent <= weights
    assert not silent & gradients
    assert "Odd.empty" in gradients


def test_sparse_gradient_has_the_values_of_the_dense_one(tensors: Observed) -> None:
    """B9: norm 3.872983, min 0 and zeros 0.8 for two rows of ten, one of them counted twice."""
    row = next(row for row in tensors.finished.rows("grad_reduced") if row.name == "Sparse.weight")
    assert (row["norm"], row["min"], row["zeros"], row["nans"]) == (pytest.approx(15**0.5), 0, pytest.approx(0.8), 0)


def test_tied_weight_is_one_row_with_its_alias_in_the_report(tensors: Observed) -> None:
    """B26: a shared weight counts once, under its first name; run.json names the other."""
    names = {row.name for row in tensors.finished.rows("grad_reduced") if row.name.startswith("Tied.")}
    assert names == {"Tied.embedding.weight"}
    (model,) = (model for model in tensors.finished.run_file()["models"] if model["label"] == "Tied")
    assert model["parameters"][0]["aliases"] == ["Tied.head.weight"]
    assert model["classes"] == ["Tied"]


def test_report_describes_parameters(tensors: Observed) -> None:
    """run.json holds names with shapes and dtypes, versions, host, rank and configuration."""
    report = tensors.finished.run_file()
    (model,) = (model for model in report["models"] if model["label"] == "Odd")
    described = {parameter["name"]: parameter for parameter in model["parameters"]}
    assert described["Odd.of_bfloat16"]["shape"] == [3, 5]
    assert described["Odd.of_bfloat16"]["dtype"] == "torch.bfloat16"
    assert described["Odd.frozen"]["trainable"] is False
    assert (report["rank"], report["world_size"], report["config"]["ndigits"]) == (0, 1, 16)
    assert {"msmon", "torch", "python"} <= report["versions"].keys()


def test_every_micro_batch_has_its_running_sum(tmp_path: Path) -> None:
    """monitor_mbs_grad: a row a micro-batch with the sum so far; a shorter last window has fewer."""
    seen = observe(tmp_path, "tensors.py", "every_micro_batch", **GRADIENTS, monitor_mbs_grad=True)
    seen.check("every_micro_batch")
    header = next(seen.finished.directories()[0].glob("grad_unreduced_*.csv")).read_text().splitlines()[0]
    assert header.startswith("vpp_stage,name,step,micro_step,min,")
    reduced = next(seen.finished.directories()[0].glob("grad_reduced_*.csv")).read_text().splitlines()[0]
    assert "micro_step" not in reduced


LITTLE = """
    import sys, torch
    from torch import nn
    from collections import OrderedDict
    model = nn.Sequential(OrderedDict(fc=nn.Linear(3, 2), act=nn.ReLU(), out=nn.Linear(2, 1)))
    for name, value in {"fc.weight": [[.5, -1, 2], [1, 1, 1]], "fc.bias": [.1, -.2], "out.weight": [[1, -3]], "out.bias": [.25]}.items():
        model.get_parameter(name).data = torch.tensor(value, dtype=torch.float32)
    x = torch.tensor([[1., 2, 3], [-1, .5, 2], [0, 0, 1], [2, -1, 1]])
    optimizer = torch.optim.Adam(model.parameters(), lr=.1)
    accumulate, steps = int(sys.argv[1]), int(sys.argv[2])
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulate):
            (model(x * (micro + 1)).pow(2).mean() / accumulate).backward()
        optimizer.step()
"""


def norms(finished: Finished, kind: str, step: int, micro_step: int | None = None) -> dict[str, float]:
    return {row.name: row["norm"] for row in finished.rows(kind) if row.step == step and row.micro_step == micro_step}


def test_values_of_the_original(runner: Runner) -> None:
    """P12, P18-P21, P25, P26: rows, order, shapes and values that the original gives for the same little model."""
    config = {**EVERYTHING, "ndigits": 6, "ops": ["min", "max", "mean", "norm", "zeros", "nans"]}
    done = runner.monitored(runner.write(LITTLE), "1", "2", config=config)
    assert done.returncode == 0, done.stderr
    lines = list(csv.reader((done.directories()[0] / "grad_reduced_0-0.csv").read_text().splitlines()))
    assert lines[0] == ["vpp_stage", "name", "step", "min", "max", "mean", "norm", "zeros", "nans", "shape", "dtype"]
    assert lines[1][1] == "fc.weight"
    assert [float(cell) for cell in lines[1][3:9]] == pytest.approx(
        [-19.924999, 59.775005, 13.045834, 77.112553, 0, 0], abs=2e-6
    )
    assert lines[1][9:] == ["[2, 3]", "torch.float32"]
    assert [line[1] for line in lines[1:]] == ["fc.weight", "fc.bias", "out.weight", "out.bias"]
    assert norms(done, "grad_reduced", 1) == pytest.approx(
        {"fc.weight": 45.201478, "fc.bias": 8.746546, "out.weight": 27.253213, "out.bias": 2.819999}, rel=1e-6
    )
    arrived = [row.name for row in done.rows("grad_unreduced") if row.step == 0]
    assert arrived == ["out.bias", "out.weight", "fc.bias", "fc.weight"]
    assert norms(done, "param_origin", 0)["fc.weight"] == pytest.approx(2.87228, abs=1e-5)
    assert norms(done, "param_updated", 0)["fc.weight"] == pytest.approx(2.83019, abs=1e-5)
    assert norms(done, "param_origin", 1) == norms(done, "param_updated", 0)
    assert norms(done, "exp_avg", 1)["fc.weight"] == pytest.approx(7.711255, abs=2e-6)
    assert norms(done, "exp_avg_sq", 1)["fc.weight"] == pytest.approx(3.8628, abs=1e-4)
    assert not norms(done, "exp_avg", 0)


def test_micro_batch_values_of_the_original(runner: Runner) -> None:
    """P22: accumulation of X and 2X: 38.5563 after the first micro-batch, 203.3962 after the second and reduced."""
    done = runner.monitored(runner.write(LITTLE), "2", "1", options=["--micro-batch-gradients"])
    assert done.returncode == 0, done.stderr
    assert norms(done, "grad_unreduced", 0, 0)["fc.weight"] == pytest.approx(38.5563, abs=1e-4)
    assert norms(done, "grad_unreduced", 0, 1)["fc.weight"] == pytest.approx(203.3962, abs=1e-4)
    assert norms(done, "grad_reduced", 0)["fc.weight"] == pytest.approx(203.3962, abs=1e-4)
    assert [line["micro_steps"] for line in done.steps()] == ["2"]


MANY_STEPS = """
    import json, sys, torch
    from truth import net, batch
    torch.manual_seed(0)
    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
            self.final_head = torch.nn.Linear(4, 1)
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.final_head(x)
    model = torch.nn.Sequential(Wide())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    hooks = []
    for step in range(8):
        optimizer.zero_grad()
        model(batch(step)).pow(2).mean().backward()
        hooks.append(sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()))
        optimizer.step()
    print(hooks)
"""


def run_many(runner: Runner, **config: Any) -> Finished:
    done = runner.monitored(runner.write(MANY_STEPS), config={**EVERYTHING, **config})
    assert done.returncode == 0, done.stderr
    return done


def test_start_interval_and_times(runner: Runner) -> None:
    """P6: start 1, interval 2, twice of 8 steps: exactly steps 1 and 3, with unreduced rows; then no hook is left."""
    done = run_many(runner, start_step=1, step_interval=2, collect_times=2)
    for kind in ("param_origin", "param_updated", "grad_reduced", "grad_unreduced", "exp_avg"):
        assert {row.step for row in done.rows(kind)} == {1, 3}, kind
    assert [line["step"] for line in done.steps()] == ["1", "3"]
    hooks = json.loads(done.stdout)
    assert hooks[3] == 6
    assert hooks[4:] == [0] * 4


def test_nothing_is_collected_zero_times(runner: Runner) -> None:
    """collect_times 0: no hook on any parameter, no row."""
    done = run_many(runner, collect_times=0)
    assert json.loads(done.stdout) == [0] * 8
    assert not done.rows("grad_reduced")


def test_targets_select_by_prefix_and_by_glob(runner: Runner) -> None:
    """A target selects names that start with it, or with what a glob matches; what matches nothing is said with close names."""
    targets: dict[str, Any] = {"0.layers.1": {}, "0.*.bias": {}, "0.final_haed": {}}
    done = run_many(runner, targets=targets)
    biases = ["0.layers.0.bias", "0.layers.1.bias", "0.final_head.bias"]
    for kind in ("grad_reduced", "param_origin", "exp_avg_sq"):
        assert {row.name for row in done.rows(kind)} == {"0.layers.1.weight", *biases}, kind
    assert done.stderr.count("matches no module or parameter") == 1
    assert "nothing was recorded of `0.final_haed`: no such module or parameter" in done.stderr
    assert "no anomaly" not in done.stderr
    assert "`0.final_haed` matches no module or parameter; close: 0.final_head" in done.stderr


def test_short_names_on_request(runner: Runner) -> None:
    """squash_name: names begin at the last landmark, and stay as they are without one."""
    done = run_many(runner, squash_name=True)
    names = {row.name for row in done.rows("grad_reduced")}
    assert names == {f"{part}.{leaf}" for part in ("layers.0", "layers.1", "final_head") for leaf in ("weight", "bias")}


def test_several_steps_share_a_file(runner: Runner) -> None:
    """P4: a file's name is its bucket of steps; the last may be half full."""
    done = run_many(runner, step_count_per_record=3)
    files = sorted(path.name for path in done.directories()[0].glob("grad_reduced_*"))
    assert files == ["grad_reduced_0-2.csv", "grad_reduced_3-5.csv", "grad_reduced_6-8.csv"]
    assert {row.step for row in done.rows("grad_reduced")} == set(range(8))


def test_digits_eps_and_id(runner: Runner) -> None:
    """ndigits rounds decimals but keeps small values visible; eps moves the border of zeros; id is the order in the step."""
    done = run_many(runner, ndigits=4, eps=1e9, ops=["norm", "zeros", "id"], collect_times=2)
    rows = [row for row in done.rows("grad_reduced") if row.step == 0]
    assert all(row["zeros"] == 1 for row in rows)
    assert [row["id"] for row in rows] == sorted({row["id"] for row in rows})
    small = [row["norm"] for row in done.rows("exp_avg_sq")]
    assert small
    assert min(small) > 0
    text = (done.directories()[0] / "grad_reduced_0-0.csv").read_text().splitlines()
    assert text[0] == "vpp_stage,name,step,norm,zeros,id,shape,dtype"
    assert all(len(line.split(",")[3].partition(".")[2]) <= 4 for line in text[1:])


def test_other_ranks_only(runner: Runner) -> None:
    """P8: module_ranks [1] in a single process: no directory, no hook after the first backward pass, exit code 0."""
    done = run_many(runner, module_ranks=[1])
    assert not done.directories()
    assert "this run has no rank 1; its ranks are below 1" in done.stderr
    assert json.loads(done.stdout)[1:] == [0] * 7


def test_resumed_run_appends(runner: Runner) -> None:
    """append_output: a second run goes on in the first one's directory and tears none of its rows."""
    first = run_many(runner, collect_times=2)
    (directory,) = first.directories()
    stamp = directory.name.split("-rank")[0]
    second = run_many(runner, start_step=4, append_output=[stamp, stamp])
    assert second.directories() == [directory]
    assert [row.step for row in second.rows("grad_reduced")][::6] == [0, 1, 4, 5, 6, 7]


POOL = """
    import os, sys
    import torch

    def train(steps):
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    if "parent" in sys.argv:
        train(2)
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            train(10)
            sys.exit()
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
    if "parent" in sys.argv:
        train(2)
"""


@pytest.mark.slow
def test_processes_of_one_rank_do_not_share_a_directory(runner: Runner) -> None:
    """append_output: of a pool of workers one goes on in the directory, or none when their parent does; each row is whole."""
    script = runner.write(POOL)
    config = {
        "wg_distribution": True,
        "step_count_per_record": 100,
        "append_output": ["Jan01_00-00-00", "Dec31_23-59-59"],
    }
    first = runner.monitored(script, "parent", config=config)
    second = runner.monitored(script, config=config)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stderr.count("rank 0 has no directory from") == 1
    assert first.stderr.count("another process writes to") == 3
    assert second.stderr.count("another process writes to") == 2
    directories = second.directories()
    assert sorted(len(read_steps(directory)) for directory in directories) == [4, 10, 10, 10, 10, 20]
    for directory in directories:
        content = (directory / "grad_reduced_0-99.csv").read_bytes()
        assert content.count(b"\n") == 2 * len(read_steps(directory)) + 1
        assert b"\0" not in content
