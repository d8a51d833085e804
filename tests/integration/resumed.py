"""Trainings that go on with an earlier one, or only look so: ``resumed.py FOLDER``. Each has a model class of its own."""

from __future__ import annotations

import copy
import sys
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import OneCycleLR, StepLR

if TYPE_CHECKING:
    from collections.abc import Callable

EARLIER = 7
STEPS = 2


class CountsInGroups(torch.optim.SGD):
    """Counts its steps in its param groups, as Apex does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # whoever calls it
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step(closure)


def model_of(name: str) -> torch.nn.Module:
    made: torch.nn.Module = type(name, (torch.nn.Linear,), {})(3, 2)
    return made


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, scheduler: Any = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


Make = "Callable[[Any], torch.optim.Optimizer]"


def earlier(make: Make, schedule: Callable[[Any], Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a run of other processes saved; made without an optimizer step of this process."""
    states = torch.load(f"{sys.argv[1]}/{make.__name__}.pt", weights_only=False)
    return states["optimizer"], states["scheduler"]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, fused=True)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def grouped(parameters: Any) -> torch.optim.Optimizer:
    return CountsInGroups(parameters, lr=0.1)


def save() -> None:
    """An earlier run."""
    for make in (adamw, fused, adagrad, momentum, grouped):
        model = model_of("Earlier")
        optimizer = make(model.parameters())
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=100) if make is momentum else None
        train(model, optimizer, EARLIER, scheduler)
        states = {"optimizer": optimizer.state_dict(), "scheduler": scheduler and scheduler.state_dict()}
        torch.save(states, f"{sys.argv[1]}/{make.__name__}.pt")


def resumed(name: str, make: Make, *, edit: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
    model = model_of(name)
    optimizer = make(model.parameters())
    states, _ = earlier(make)
    edit(states)
    optimizer.load_state_dict(states)
    train(model, optimizer)


def with_counts(value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(states: dict[str, Any]) -> None:
        for entry in states["state"].values():
            entry["step"] = value

    return edit


def go_on() -> None:
    """What may follow."""
    for make in (adamw, fused, adagrad, grouped, momentum):
        resumed(f"Resumed_{make.__name__}", make)
    for name, value in {"whole": 5, "nan": float("nan"), "half": 2.5, "several": torch.ones(2), "text": "7"}.items():
        model = model_of(f"Count_{name}")
        optimizer = momentum(model.parameters())
        states, _ = earlier(momentum)
        with_counts(value)(states)
        optimizer.load_state_dict(states)
        train(model, optimizer)
    for make in (adamw, adagrad):
        model = model_of(f"Fresh_{make.__name__}")
        optimizer = make(model.parameters())
        optimizer.load_state_dict(optimizer.state_dict())  # as accelerate does to move it
        train(model, optimizer)

    model = model_of("By_batch")
    optimizer = momentum(model.parameters())
    scheduler: Any = OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
    states, counts = earlier(momentum)
    optimizer.load_state_dict(states)
    scheduler.load_state_dict(counts)
    train(model, optimizer, scheduler=scheduler)

    model = model_of("By_epoch")
    optimizer = momentum(model.parameters())
    scheduler = StepLR(optimizer, 3)
    optimizer.load_state_dict(earlier(momentum)[0])
    scheduler.last_epoch = 4
    train(model, optimizer)

    model = torch.nn.Sequential(model_of("Part"), torch.nn.Linear(2, 2))
    optimizers = [momentum(model[0].parameters()), adamw(model[1].parameters())]
    optimizers[1].load_state_dict(with_new_shapes(earlier(adamw)[0], model[1]))
    for _ in range(STEPS):
        model(torch.ones(4, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    source = model_of("Copied")
    optimizer = adamw(source.parameters())
    train(source, optimizer)
    model, optimizer = copy.deepcopy((source, optimizer))
    train(model, optimizer)

    model = model_of("Checkpointed")
    optimizer = adamw(model.parameters())
    states = {**get_optimizer_state_dict(model, optimizer)}  # which makes a step with zeros
    for entry in states["state"].values():
        entry["step"] = torch.tensor(20.0)
    set_optimizer_state_dict(model, optimizer, states)
    train(model, optimizer)

    model = model_of("Looked_at")
    optimizer = adamw(model.parameters())
    get_optimizer_state_dict(model, optimizer)
    train(model, optimizer)

    megatron: Any = types.ModuleType("megatron.training.global_vars")
    megatron._GLOBAL_ARGS = types.SimpleNamespace(iteration=300)
    sys.modules[megatron.__name__] = megatron
    resumed("Megatron", adamw)
    del sys.modules[megatron.__name__]


def with_new_shapes(states: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    for entry, parameter in zip(states["state"].values(), model.parameters(), strict=True):
        entry["exp_avg"] = entry["exp_avg_sq"] = torch.zeros_like(parameter)
    return states


if __name__ == "__main__":
    torch.manual_seed(0)
    if len(sys.argv) > 2:
        save()
    else:
        go_on()
