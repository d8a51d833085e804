"""Several optimizers, forwards, collectives and threads around the training steps of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Finished, Runner

pytestmark = pytest.mark.slow

ACTOR_CRITIC = """
import threading, torch
import torch.distributed as dist
from torch import nn
torch.manual_seed(0)
class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.critic, self.unused = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 4)
    def forward(self, x):
        return self.critic(self.encoder(x))
m = ActorCritic()
critic, encoder = torch.optim.SGD(m.critic.parameters(), lr=0.01), torch.optim.SGD(m.encoder.parameters(), lr=0.01)
def backward():
    m.zero_grad()
    m(torch.ones(2, 4)).pow(2).sum().backward()
"""

LATER = """
optimizers = [critic, encoder]
other = nn.Linear(2, 1)
for step in range(5):
    if step == 2:
        optimizers.append(torch.optim.Adam([m.unused.weight]))
    if step == 3:
        optimizers.append(torch.optim.AdamW([m.unused.bias]))
    backward()
    for optimizer in optimizers:
        optimizer.step()
    if step == 1:  # before the others: a new model describes everything anew
        last = torch.optim.RMSprop(other.parameters())
        other(torch.ones(1, 2)).sum().backward()
        last.step()
"""

TWICE = """
dist.init_process_group("gloo", init_method="file://" + __file__ + ".store", rank=0, world_size=1)
for _ in range(4):
    for optimizer in (critic, critic, encoder):
        backward()
        dist.all_reduce(torch.ones(2))
        optimizer.step()
m(torch.ones(2, 4))
dist.all_reduce(torch.ones(2))
"""

BOTH = """
dist.init_process_group("gloo", init_method="file://" + __file__ + ".store", rank=0, world_size=1)
for step in range(5):
    backward()
    dist.all_reduce(torch.ones(2))
    critic.step()
    if step >= 2:
        dist.all_reduce(torch.ones(3))
        encoder.step()
"""

FORGOTTEN = """
del critic, encoder
m = ActorCritic()
optimizer = torch.optim.SGD([*m.critic.parameters(), m.encoder.bias], lr=0.01)
for _ in range(3):
    backward()
    optimizer.step()
"""

COPIED = """
import copy
m = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(m.parameters())
m = copy.deepcopy(m)
for _ in range(3):
    backward()
    optimizer.step()
"""

THREADS = """
parts = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
ready = threading.Barrier(3)
def work(part):
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        part(torch.ones(2, 3)).sum().backward()
        ready.wait()
        optimizer.step()
threads = [threading.Thread(target=work, args=(part,)) for part in parts]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def trained(runner: Runner, script: str, **config: Any) -> Finished:
    done = runner.monitored(runner.write(ACTOR_CRITIC + script), config={"wg_distribution": True, **config})
    assert done.returncode == 0, done.stderr
    assert "switched off" not in done.stderr
    return done


def keys(done: Finished, kind: str) -> list[tuple[int, str]]:
    return [(row.step, row.name) for row in done.rows(kind)]


def test_optimizers_made_later_are_described(runner: Runner) -> None:
    """`run.json` names the optimizers and the models that came after the first step, too."""
    done = trained(runner, LATER)
    found = [model["optimizers"] for model in done.run_file()["models"]]
    assert found == [["SGD", "SGD", "Adam", "AdamW"], ["RMSprop"]]


def test_steps_of_unequal_frequency(runner: Runner) -> None:
    """A critic twice an iteration, an encoder once: each forward and each collective is in the step of its optimizer, once."""
    done = trained(runner, TWICE, xy_distribution=True, all_xy=True, cc_distribution={"enable": True})
    for kind in ("actv", "actv_grad", "cc", "grad_reduced"):
        assert len(keys(done, kind)) == len(set(keys(done, kind)))
    weights = {key: sum(other == key for other in keys(done, "grad_reduced")) for key in keys(done, "grad_reduced")}
    steps = {step for step, _ in weights}
    optimizers = {step: sum((step, f"{name}.weight") in weights for name in ("critic", "encoder")) for step in steps}
    assert sum(optimizers.values()) == 12
    outputs = keys(done, "actv")
    for step, count in optimizers.items():
        calls = [(step, f"critic{again}.output") in outputs for again in ("", "@1")]
        assert calls == [True, count == 2]
        assert [(step, f"all_reduce_{number}.output") in keys(done, "cc") for number in range(2)] == [True, count == 2]
    assert "cut short" not in done.stderr, "an evaluation and a collective after the last step cut nothing short"
    assert [line["complete"] for line in done.steps()] == ["1"] * len(steps)


def test_collectives_before_a_step_that_joins(runner: Runner) -> None:
    """An optimizer that begins late steps in the training step whose gradients it uses, with the collectives before it."""
    done = trained(runner, BOTH, cc_distribution={"enable": True})
    by_step = {step: {name for other, name in keys(done, "grad_reduced") if other == step} for step in range(5)}
    assert ["encoder.weight" in by_step[step] for step in range(5)] == [False] * 2 + [True] * 3
    assert ["critic.weight" in by_step[step] for step in range(5)] == [True] * 5
    assert [line["step"] for line in done.steps()] == [str(step) for step in range(5)]
    assert len(keys(done, "cc")) == len(set(keys(done, "cc"))) == 8
    shapes = [(row.step, row.values["shape"]) for row in done.rows("cc")]
    assert [sorted(shape for other, shape in shapes if other == step) for step in range(2, 5)] == [["[2]", "[3]"]] * 3


def test_parameters_left_out_of_the_optimizer(runner: Runner) -> None:
    """Autograd leaves a gradient on them too, and so they have rows, each step."""
    done = trained(runner, FORGOTTEN, param_distribution=True)
    for kind in ("grad_unreduced", "grad_reduced", "param_origin", "param_updated"):
        assert [(step, "encoder.weight") in keys(done, kind) for step in range(3)] == [True] * 3
        assert len(keys(done, kind)) == len(set(keys(done, kind)))
    assert {name for _, name in keys(done, "grad_reduced")} == {
        "critic.weight",
        "critic.bias",
        "encoder.weight",
        "encoder.bias",
    }


def test_an_optimizer_of_another_model(runner: Runner) -> None:
    """A model that was copied after its optimizer was made: that no gradient reaches what is trained is said, twice."""
    done = trained(runner, COPIED, xy_distribution=True, all_xy=True)
    assert done.stderr.count("no gradient has reached any of the 2 parameters that AdamW trains") == 2
    assert "no anomaly" not in done.stderr


def test_threads_that_train_one_model(runner: Runner) -> None:
    """Each number of a step once, in order; that steps at the same time cannot be told apart is said."""
    done = trained(runner, THREADS)
    steps = [int(line["step"]) for line in done.steps()]
    assert steps == list(range(len(steps)))
    names = keys(done, "grad_reduced")
    assert len(names) == len(set(names)) >= 20 * 3 * 2
