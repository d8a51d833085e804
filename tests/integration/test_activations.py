"""Activations and their gradients, against an oracle that looks at a twin of each model; and training unchanged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from integration.activations import MODELS

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Runner
    from integration.truth import Observed

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("activations.py")
SIX = ["min", "max", "norm", "mean", "zeros", "nans"]
EVERYTHING = {"xy_distribution": True, "all_xy": True, "ops": SIX, "step_count_per_record": 100, "ndigits": 20}


@pytest.fixture(scope="session")
def watched(observed: Callable[..., Observed]) -> Observed:
    return observed("activations.py", "truth", **EVERYTHING)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["actv", "actv_grad"])
def test_rows(watched: Observed, name: str, kind: str) -> None:
    """Each tensor that went into a module or came out of it has its row, and no other has one."""
    expected = {
        (row["name"], row["step"], row["micro_step"]): row
        for row in watched.results
        if row["kind"] == kind and belongs(row["name"], name)
    }
    rows = [row for row in watched.finished.rows(kind) if belongs(row.name, name)]
    found = {(row.name, row.step, row.micro_step): row for row in rows}
    assert len(found) == len(rows), "a row is there twice"
    assert sorted(set(found) ^ set(expected)) == []
    exact = name != "Convolutional"
    for key, row in found.items():
        for op in SIX:
            tolerance = 1e-5 if exact else 2e-2
            close = math.isclose(row[op], expected[key][op], rel_tol=tolerance, abs_tol=1e-7 if exact else 1e-2)
            assert close, (key, op, row[op], expected[key][op])


def belongs(row: str, name: str) -> bool:
    return row.split(".", maxsplit=1)[0].split("@", maxsplit=1)[0] == name


def test_training_is_unchanged(runner: Runner) -> None:
    """Losses and weights of every model are equal to the bit, activations on or off, in each direction."""
    bare = runner.bare(SCRIPT, "plain")
    assert bare.returncode == 0, bare.stderr
    configs: list[dict[str, Any]] = [
        EVERYTHING,
        {**EVERYTHING, "forward_only": True},
        {**EVERYTHING, "backward_only": True},
    ]
    for config in configs:
        done = runner.monitored(SCRIPT, "plain", config=config)
        assert done.returncode == 0, done.stderr
        assert done.stdout == bare.stdout
    assert done.rows("actv_grad")


DEEP = """
    import copy, pickle, sys, torch
    from torch import nn

    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
        def forward(self, x):
            return self.inner(x)

    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    for _ in range(int(sys.argv[1])):
        model = Outer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).sum()
        loss.backward()
        optimizer.step()
        print(loss.item())
    for attempt in (copy.deepcopy, pickle.dumps):
        try:
            attempt(model)
            print("done")
        except RecursionError:
            print("too deep")
"""


def test_modules_nested_as_deep_as_python_bears(runner: Runner) -> None:
    """240 levels need nearly all of Python's limit for recursion: training goes on, rows, stacks and structure are there."""
    script = runner.write(DEEP)
    bare = runner.bare(script, "240")
    done = runner.monitored(script, "240", config={**EVERYTHING, "stack_info": True})
    assert (done.returncode, done.stdout.splitlines()[:3]) == (0, bare.stdout.splitlines()[:3]), done.stderr
    assert "switched off" not in done.stderr
    assert len([row for row in done.rows("actv") if row.step == 2]) == 2 * 241
    shown = runner.monitored(script, "240", config={**EVERYTHING, "print_struct": True})
    assert (shown.returncode, "switched off" in shown.stderr) == (0, False), shown.stderr
    assert len(json.loads(next(runner.output.rglob("module_struct.json")).read_text())) == 241
