"""Hooks on modules under everything that a hostile training does: nothing breaks, bits stay, rows are the right ones."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from integration.conftest import integration_runner
from integration.module_hooks import SCENARIOS, TARGETS

from msmon.offline.reader import RecordedRow, read_kind, run_directories

if TYPE_CHECKING:
    from conftest import Runner

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("module_hooks")]
SCRIPT = Path(__file__).with_name("module_hooks.py")

NET = {f"{name}.{side}" for name in ("fc", "act", "out") for side in ("input", "output")} | {".input", ".output"}
"""What one forward of the little network of these scenarios leaves."""
NET_GRADIENTS = NET - {"fc.input", ".input"}
"""Its input needs no gradient."""
OUTSIDE = {".input", ".output"}
"""What can be seen of a compiled model."""


class Results(NamedTuple):
    """What the scenarios saw, and where they wrote."""

    seen: dict[str, Any]
    folder: Path

    def rows(self, scenario: str, kind: str) -> list[RecordedRow]:
        found = run_directories(self.folder / scenario, 0)
        return [row for directory in found for row in read_kind(directory, kind)]

    def names(self, scenario: str, kind: str, step: int | None = None) -> set[str]:
        return {row.name for row in self.rows(scenario, kind) if step is None or row.step == step}

    def steps(self, scenario: str, kind: str = "actv") -> list[int]:
        return sorted({row.step for row in self.rows(scenario, kind) if row.step is not None})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("module_hooks")
    done = integration_runner(folder).call([sys.executable, str(SCRIPT), str(folder)])
    assert done.returncode == 0, done.stderr
    return Results(json.loads((folder / "seen.json").read_text()), folder)


@pytest.mark.parametrize("name", SCENARIOS)
def test_unchanged(results: Results, name: str) -> None:
    """Losses, weights, graphs, errors and evaluations are those of the bare run, and nothing of msmon broke."""
    seen = results.seen[name]
    assert "error" not in seen["bare"], seen["bare"]["error"]
    assert seen["watched"] == seen["bare"]
    assert "switched off" not in seen["watched_said"]


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "threads"])
def test_each_row_once(results: Results, name: str) -> None:
    """No tensor has two rows in a step, and gradients belong to tensors that have a row in that step."""
    for kind in ("actv", "actv_grad"):
        counts = Counter((row.stage, row.name, row.step, row.micro_step) for row in results.rows(name, kind))
        assert [key for key, count in counts.items() if count > 1] == []
    if "backward" not in name and not name.startswith("targets"):
        for step in results.steps(name, "actv_grad"):
            assert results.names(name, "actv_grad", step) <= results.names(name, "actv", step)


SAME_EVERY_STEP = {
    "scripted_and_traced": (NET, NET_GRADIENTS, 3),
    "script_of_the_watched": (NET, NET_GRADIENTS, 3),
    "exported": (NET, NET_GRADIENTS, 3),
    "fake_tensors": (NET, NET_GRADIENTS, 4),
    "functional": (NET, NET_GRADIENTS, 4),
    "gradient_penalty": (NET, NET, 3),
    "backward_twice": (NET, NET_GRADIENTS, 2),
    "exception_in_backward": (NET, NET_GRADIENTS, 3),
    "copies": (NET, NET_GRADIENTS, 3),
    "sharpness": (NET, NET_GRADIENTS, 3),
    "closures": (NET, NET_GRADIENTS, 3),
    "selective_checkpoint": (NET, NET_GRADIENTS, 2),
    "graphed": (NET, NET_GRADIENTS, 1),
    "own_hooks": (NET - OUTSIDE, NET_GRADIENTS - OUTSIDE, 2),
    "maps_itself": ({"fc.input", "fc.output", *OUTSIDE}, {"fc.input", "fc.output", ".output"}, 2),
    **{
        f"compile_{way}_after_{first}": (OUTSIDE, {".output"}, 5)
        for way in ("whole", "full")
        for first in ("optimizer", "compile")
    },
    **{f"compile_part_after_{first}": (NET, NET_GRADIENTS, 5) for first in ("optimizer", "compile")},
    "compile_already_called": (OUTSIDE, {".output"}, 3),
}


@pytest.mark.parametrize("name", SAME_EVERY_STEP)
def test_rows(results: Results, name: str) -> None:
    """Each step has the rows of one forward and backward pass, whatever went on beside it."""
    forward, backward, count = SAME_EVERY_STEP[name]
    offset = 3 if name == "functional" else 0
    for step in range(count):
        if step != offset or not offset:
            assert results.names(name, "actv", step) == forward, step
            assert results.names(name, "actv_grad", step) == backward, step


def test_compiled_models_are_spoken_of(results: Results) -> None:
    """Once a model; also when nothing at all can be seen of it."""
    said = "".join(seen["watched_said"] for seen in results.seen.values())
    assert (
        said.count("Net is compiled: of what it computes inside, activations cannot be seen; its input and output") == 1
    )
    assert said.count("fc is compiled:") == 1
    assert said.count("no forward of Net in training was seen") == 1
    assert "fx_tracing" not in said


def test_written_views(results: Results) -> None:
    """Modules that write to a view, or whose view is written to, have the same rows as without writing."""
    for kind in ("actv", "actv_grad"):
        tables = [
            {(row.name, row.step, row.micro_step): row["norm"] for row in results.rows(name, kind)}
            for name in ("written_views", "written_views_twin")
        ]
        assert tables[0].keys() == tables[1].keys()
        for key, value in tables[0].items():
            assert math.isclose(value, tables[1][key], rel_tol=1e-5), (kind, key)
    assert {"fc.output", "relu.input", "both.output", "drop.input"} <= results.names("written_views", "actv_grad")


def test_exceptions_in_forward(results: Results) -> None:
    """What ran before the exception has its rows, the attempt after it is a second call, the rollout between has none."""
    whole = results.names("exception_in_forward", "actv", 0)
    assert {"inner.check.output", "out.output", ".output"} <= whole
    inside = results.names("exception_in_forward", "actv", 1)
    assert inside == whole - {"inner.check.output"} | {"inner.fallback.input", "inner.fallback.output"}
    retried = results.names("exception_in_forward", "actv", 2)
    assert {".input", "@1.input", "@1.output", "fc.output", "fc@1.output", "inner.check.input"} <= retried
    assert retried.isdisjoint({".output", "@2.input", "fc@2.input", "inner.check.output"})
    assert results.names("exception_in_forward", "actv", 3) == whole


def test_gradient_penalty(results: Results) -> None:
    """Gradients are those of the pass that trains, not of the one that only computes the penalty."""
    assert {row.micro_step for row in results.rows("gradient_penalty", "actv_grad")} == {0}
    assert {row.micro_step for row in results.rows("backward_twice", "actv_grad")} == {0, 1}
    first, second = (
        {
            row.name: row["norm"]
            for row in results.rows("backward_twice", "actv_grad")
            if (row.step, row.micro_step) == key
        }
        for key in ((0, 0), (0, 1))
    )
    assert first == second


def test_rows_of_odd_values(results: Results) -> None:
    """Tensors of every kind have rows; values that are no tensors, and tensors without elements to read, have none."""
    rows = {row.name.removeprefix("parts."): row for row in results.rows("odd_values", "actv") if row.step == 0}
    for name in ("whole", "bool", "complex", "sparse", "nested", "half", "quantized", "view", "scalar", "expanded"):
        assert math.isfinite(rows[f"{name}_.output"]["norm"]), name
    assert math.isclose(rows["sparse_.output"]["norm"], 2, rel_tol=1e-6)
    assert math.isclose(rows["nested_.output"]["norm"], 3, rel_tol=1e-6)
    assert rows["infinite_.output"]["norm"] == math.inf
    assert {"nothing_.output", "nothing_at_all_.input", "meta_.output", "text_.output_1"}.isdisjoint(rows)
    assert {"twice_.input_0", "twice_.input_1", "empty_.output", "itself_.output", "class_.output"} <= set(rows)
    gradients = {
        r.name.removeprefix("parts."): r["norm"] for r in results.rows("odd_values", "actv_grad") if r.step == 0
    }
    assert gradients["input_.input"] == gradients["input_.output"], "handed through"
    assert {"expanded_.output", "empty_.output", "leaf_.input", "parameter_.input"}.isdisjoint(gradients)


def test_several_outputs(results: Results) -> None:
    """What comes back through each of them is counted once: the model's input gets what autograd gives it."""
    norms = results.seen["several_outputs"]["bare"]["norms"]
    found = [row["norm"] for row in results.rows("several_outputs", "actv_grad") if row.name == ".input"]
    assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(found, norms, strict=True))


def test_recursion(results: Results) -> None:
    """A module that calls itself has a row a call, in the order in which the calls began."""
    names = [row.name for row in results.rows("recursive", "actv") if row.step == 0]
    assert [name for name in names if name.endswith("output") and not name.startswith("fc")] == [
        "@2.output", "@3.output", "@1.output", "@4.output", ".output",
    ]  # fmt: skip


def test_modules_that_change(results: Results) -> None:
    """New modules are seen from their first forward on, with and without parameters."""
    inner = {f"act.{index}.{side}" for index in (0, 1) for side in ("input", "output")}
    assert [results.names("modules_change", "actv", step) - NET for step in range(7)] == [
        set(),
        *[inner] * 4,
        set(),
        set(),
    ]
    assert all(results.names("modules_change", "actv", step) >= NET for step in range(7))


def test_threads(results: Results) -> None:
    """Two models that train at once, each in its own thread and under its own monitor, do not see each other."""
    directories = run_directories(results.folder / "threads", 0)
    assert len(directories) == 2
    for directory in directories:
        rows = read_kind(directory, "actv")
        assert {step: {row.name for row in rows if row.step == step} for step in range(20)} == dict.fromkeys(
            range(20), NET
        )
        gradients = read_kind(directory, "actv_grad")
        assert (len(rows), len(gradients)) == (20 * len(NET), 20 * len(NET_GRADIENTS))
        assert {row.name for row in gradients} == NET_GRADIENTS


def test_evaluations_are_as_fast(results: Results) -> None:
    """torch takes its fast path in evaluations, as it does for modules without hooks."""
    assert results.seen["evaluations"]["watched"]["fast"] > 0
    assert "0.layers.1.linear2.output" in results.names("evaluations", "actv", 0)
    assert not any("@" in name for name in results.names("evaluations", "actv"))


def test_graphs_are_possible(results: Results) -> None:
    """A model handed to ``make_graphed_callables`` has no hooks for as long as that lasts."""
    assert "hooks" not in results.seen["graphed"]["watched"]["said"]


def test_steps_in_between(results: Results) -> None:
    """Only the chosen steps have rows, and after the last of them every hook is gone."""
    assert results.steps("steps_in_between") == results.steps("steps_in_between", "actv_grad") == [1, 3]
    assert results.seen["steps_in_between"]["seen"]["hooks"] == [8, 8, 8, 8, 0, 0, 0]


def test_memory_is_flat(results: Results) -> None:
    """Graphs and outputs die with the step, and the number of tensors does not grow."""
    assert all(results.seen["memory"]["watched"]["dead"])
    early, late = results.seen["memory"]["seen"]["counts"]
    assert late <= early + 8  # the writer may still hold the last table; a leak would be one a step at least


@pytest.mark.parametrize("how", ["plain", "frozen", "only_xy"])
def test_adversaries(results: Results, how: str) -> None:
    """Generator and discriminator each have their own rows; what the generator's phase does belongs to no step of the other."""
    critic = {
        f"Sequential{part}{call}.{side}"
        for part in (".0", ".1", ".2", "")
        for call in ("", "@1")
        for side in ("input", "output")
    }
    for step in range(3):
        assert results.names(f"gan_{how}", "actv", step) == NET | critic
        inputs = {"Sequential.input", "Sequential@1.input", "Sequential.0.input", "Sequential.0@1.input"}
        assert results.names(f"gan_{how}", "actv_grad", step) == NET_GRADIENTS | critic - inputs
    directory = run_directories(results.folder / f"gan_{how}", 0)[0]
    lines = (directory / "steps.csv").read_text().splitlines()
    header, *cells = [line.split(",") for line in lines]
    complete = [dict(zip(header, line, strict=True)) for line in cells]
    assert {line["complete"] for line in complete if int(line["step"]) < 3} == {"1"}
    assert {line["complete"] for line in complete if int(line["step"]) >= 3} <= {"0"}


def test_library_calls(results: Results) -> None:
    """``reload_xy``, ``ops``, ``generate_xy_metrics`` and ``adhoc_check`` do what they say while training goes on."""
    seen = results.seen["library"]["seen"]
    assert results.steps("library") == [0, 2, 3, 4]
    assert seen["off_after"] == 0
    for forward, backward in (seen["after"], seen["under_way"]):
        assert set(forward) == {f"{name}:0" for name in NET}
        assert set(backward) == {f"{name}:0" for name in NET_GRADIENTS}
        assert all(set(values) == {"norm"} for values in forward.values())
    assert results.names("library", "actv", 3) == NET, "ops set between forward and backward lose no row"
    assert [set(row.values) - {"shape", "dtype"} for row in results.rows("library", "actv") if row.name == "fc.input"] == [
        {"norm"}, {"norm"}, {"norm"}, {"norm", "max"},
    ]  # fmt: skip
    assert [(row.name, row.step, set(row.values)) for row in results.rows("library", "adhoc")] == [
        ("any.thing", 3, {"norm", "min"})
    ]
    assert len(seen["errors"]) == 3
    assert all(
        part in error for part, error in zip(["target_tensor", "middle", "ops_list"], seen["errors"], strict=True)
    )


def test_memory_only(results: Results) -> None:
    """With the format ``api`` no file is made, and chunks are told apart."""
    assert run_directories(results.folder / "memory_only", 0) == []
    forward, backward = results.seen["memory_only"]["seen"]["xy"]
    assert set(forward) == {f"0:{name}:0" for name in NET} | {"1:.input:0", "1:.output:0"}
    assert "1:.input:0" in backward


TARGETED = {
    "one": ({"fc.input", "fc.output"}, {"fc.output"}),
    "pattern": ({"blocks.0.output", "blocks.1.output"}, set()),
    "stage": ({"fc.input"}, {"fc.output"}),
    "place": ({"two.output_1"}, {"two.output_0"}),
    "nothing": (set(), set()),
    "neither": (set(), set()),
}


@pytest.mark.parametrize("name", TARGETED)
def test_targets(results: Results, name: str) -> None:
    """Targets choose modules, sides and places."""
    found = tuple(results.names(f"targets_{name}", kind) for kind in ("actv", "actv_grad"))
    assert found == TARGETED[name]


def test_both_directions_excluded_is_said(results: Results) -> None:
    """forward_only with backward_only leaves nothing: TrainerMon says so, as ``msmon run`` does before it starts."""
    assert "forward_only and backward_only are both on" in results.seen["targets_neither"]["watched_said"]


def test_targets_with_everything(results: Results) -> None:
    """With ``all_xy`` a named module follows its entry, and the others are watched whole; one direction is one file."""
    assert TARGETS["all"][1] == {"all_xy": True}
    names = results.names("targets_all", "actv")
    assert {name for name in names if name.startswith("two")} == {"two.output_1"}
    assert {"fc.input", "fc.output", "blocks.0.input", "blocks.1.output"} <= names
    assert results.names("targets_forward", "actv") == results.names("targets_backward", "actv_grad") | {"fc.input"}
    assert results.names("targets_forward", "actv_grad") == results.names("targets_backward", "actv") == set()


def test_targets_that_match_nothing(results: Results) -> None:
    """Close names are said."""
    said = results.seen["targets_nothing"]["watched_said"]
    assert "`fcc` matches no module or parameter; close: fc" in said
    assert "`blocks.7`" in said


def test_saved_modules_load_without_msmon(results: Results) -> None:
    """A file with a whole watched module loads where msmon cannot be imported, and computes the same."""
    code = f"""
import sys
sys.modules["msmon"] = None
sys.path.insert(0, {str(SCRIPT.parent)!r})
import torch, module_hooks
sys.modules["__main__"].Net = module_hooks.Net
model = torch.load({str(results.folder / "whole.pt")!r}, weights_only=False)
model(module_hooks.batch()).sum().backward()
torch.jit.trace(model, module_hooks.batch())
print(float(model.fc.weight.grad.norm()) > 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


INJECTED = """
    import torch
    from torch import nn
    from torch._dynamo.testing import CompileCounter

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 3)
        def forward(self, x):
            return self.out(self.fc(x).relu())

    class Third(Net):
        pass

    torch.manual_seed(1)
    first, second, third = Net(), nn.Sequential(nn.Linear(8, 3)), Third()
    counter = CompileCounter()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second, third)]
    compiled = torch.compile(first, backend=counter)
    second[0] = torch.compile(second[0], backend=counter)
    third.compile(backend=counter)
    for step in range(3):
        x = torch.randn(6, 8)
        for model, optimizer in zip((compiled, second, third), optimizers):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
    print(counter.frame_count, counter.op_count, first.fc.weight.sum().item(), third.fc.weight.sum().item())
"""


def test_compiled_under_run(runner: Runner) -> None:
    """Compiled after the optimizer was made: the same graphs as bare, and rows from the first step on."""
    script = runner.write(INJECTED)
    bare = runner.bare(script)
    done = runner.monitored(script, config={"xy_distribution": True, "all_xy": True})
    assert (done.returncode, done.stdout) == (0, bare.stdout), done.stderr
    second = {"Sequential.0.input", "Sequential.0.output", "Sequential.input", "Sequential.output"}
    for step in range(3):
        assert {row.name for row in done.rows("actv") if row.step == step} == {
            *("Net.input", "Net.output", "Third.input", "Third.output"),
            *second,
        }
        names = {row.name for row in done.rows("actv_grad") if row.step == step}
        assert names == {"Net.output", "Third.output", "Sequential.0.output", "Sequential.output"}
    assert done.stderr.count("Net is compiled: of what it computes inside") == 1
    assert done.stderr.count("Sequential.0 is compiled: ") == 1
    assert done.stderr.count("Third was compiled in place: of what it computes inside") == 1


RANKS = """
    import os, sys, torch, torch.distributed as dist
    from torch import nn
    distributed = "RANK" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else int(sys.argv[1])
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    wrapped = nn.parallel.DistributedDataParallel(model) if distributed else model
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for micro in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * rank + micro))
        with (wrapped.no_sync() if distributed and micro == 0 else torch.enable_grad()):
            wrapped(x).pow(2).mean().backward()
    optimizer.step()
"""


def test_ranks(runner: Runner) -> None:
    """Under DDP the rows of each rank are those of one process that sees the same batches, under the same names."""
    script = runner.write(RANKS)
    config = {"xy_distribution": True, "all_xy": True, "ops": ["norm", "mean"]}
    together = runner.monitored(script, ranks=2, config=config)
    assert together.returncode == 0, together.stderr
    for rank in range(2):
        alone = integration_runner(runner.folder / f"alone{rank}")
        alone.folder.mkdir()
        done = alone.monitored(script, str(rank), config=config)
        for kind in ("actv", "actv_grad"):
            rows = together.rows(kind, rank)
            assert rows
            assert rows == done.rows(kind)
