"""Models that change while they train: parameters swapped out, layers inserted and deleted, parameters without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Finished, Runner

pytestmark = pytest.mark.slow

TRAIN = """
import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
torch.manual_seed(0)
x = torch.ones(2, 4)
def train(forward, *optimizers, steps=1):
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        forward().pow(2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
"""

FAST_WEIGHTS = """
m = nn.Linear(4, 2)
def fast():
    return {name: value - 0.1 * value for name, value in m.named_parameters()}
def call():
    return torch.func.functional_call(m, fast(), x)
def within():
    with _reparametrize_module(m, fast()):
        return m(x)
train(HOW, torch.optim.SGD(m.parameters(), lr=0.1), steps=3)
"""

BARE = """
free, net = nn.Parameter(torch.ones(4)), nn.Linear(4, 2)
train(lambda: net(free), torch.optim.SGD([free], lr=0.1), steps=5)
"""

LAYERS = """
m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
train(lambda: m(x), torch.optim.SGD(m.parameters(), lr=0.01), steps=2)
m.insert(0, nn.Linear(4, 4))
train(lambda: m(x), torch.optim.SGD(m.parameters(), lr=0.01), steps=2)
del m[1]
train(lambda: m(x), torch.optim.Adam(m.parameters()), steps=2)
"""

UNFREEZING = """
m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
first = torch.optim.SGD(m[1].parameters(), lr=0.01)
train(lambda: m(x), first, steps=2)
train(lambda: m(x), first, torch.optim.Adam(m[0].parameters()), steps=2)
"""


def trained(runner: Runner, script: str, *options: str) -> Finished:
    done = runner.monitored(runner.write(TRAIN + script), options=list(options))
    assert done.returncode == 0, done.stderr
    assert "switched off" not in done.stderr
    return done


def keys(done: Finished, kind: str) -> list[tuple[int, str]]:
    return [(row.step, row.name) for row in done.rows(kind)]


@pytest.mark.parametrize("how", ["call", "within"])
def test_parameters_swapped_out_for_a_call(runner: Runner, how: str) -> None:
    """Fast weights (MAML) stand in for the parameters in the very first forward: rows have the model's names, every step."""
    done = trained(runner, FAST_WEIGHTS.replace("HOW", how), "--gradients", "--activations")
    for kind in ("grad_unreduced", "grad_reduced"):
        assert sorted(keys(done, kind)) == [(step, name) for step in range(3) for name in ("bias", "weight")]
    assert keys(done, "actv") == [(step, name) for step in range(3) for name in (".input", ".output")]


def test_parameters_without_a_model(runner: Runner) -> None:
    """What an optimizer holds may be no model's at all (an input that is optimised): every step, with every tap on."""
    done = trained(runner, BARE, "--gradients", "--activations", "--stacks", "--weights")
    for kind in ("grad_unreduced", "grad_reduced", "param_origin", "param_updated"):
        assert keys(done, kind) == [(step, "bare_parameter_0") for step in range(5)]


def test_layers_inserted_and_deleted(runner: Runner) -> None:
    """Names are those of the model as it is now, each once a step; run.json tells what was renamed when."""
    done = trained(runner, LAYERS, "--gradients", "--weights", "--activations")
    for kind in ("grad_reduced", "param_origin", "actv"):
        assert len(keys(done, kind)) == len(set(keys(done, kind)))
    shapes = {(row.step, row.name): row.values["shape"] for row in done.rows("grad_reduced")}
    assert [shapes.get((step, "1.weight")) for step in range(6)] == ["[1, 4]"] * 2 + ["[4, 4]"] * 2 + ["[1, 4]"] * 2
    assert [(step, "2.weight") in shapes for step in range(6)] == [False] * 2 + [True] * 2 + [False] * 2
    assert [(step, "2.output") in keys(done, "actv") for step in range(6)] == [False] * 2 + [True] * 2 + [False] * 2
    (model,) = done.run_file()["models"]
    assert [change["step"] for change in model["renamed"]] == [2, 4]
    one_on = {"0.weight": "1.weight", "0.bias": "1.bias", "1.weight": "2.weight", "1.bias": "2.bias"}
    assert model["renamed"][0]["names"] == one_on
    assert "4 parameters have other names from step 2 on" in done.stderr


def test_optimizers_added_later_are_in_the_report(runner: Runner) -> None:
    """run.json names every optimizer that trains a model, also one that comes after the first step."""
    assert trained(runner, UNFREEZING).run_file()["models"][0]["optimizers"] == ["SGD", "Adam"]
