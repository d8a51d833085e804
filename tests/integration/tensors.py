"""Parameters, gradients and optimizer states of every kind, in one process."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from truth import Truth, batch, net, run_scenarios, scenario, train


class Odd(nn.Module):
    """Parameters of every dtype and shape; the loss is a function of all of them."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128):
            value = torch.randn(3, 5, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
            self.register_parameter(str(dtype).replace("torch.", "of_"), nn.Parameter(value))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(4, 3).t())
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.whole_number = nn.Parameter(torch.arange(4), requires_grad=False)
        self.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)

    def loss(self) -> torch.Tensor:
        used = [p for n, p in self.named_parameters() if p.requires_grad and n != "unused"]
        return sum((p.abs().float() ** 2).sum() for p in used)  # type: ignore[return-value]


@scenario
def every_dtype(truth: Truth) -> None:
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
    train(truth, model, optimizer, loss=lambda _: model.loss())


@scenario
def strange_names(truth: Truth) -> None:
    class Strange(nn.Module):
        pass

    model = Strange()
    for name in ("a:b", "0:c", "d/e", "f,g", "=h", "-x,+y,@z", 'i"j', "k l", "ключ", "m'n"):
        model.register_parameter(name, nn.Parameter(torch.randn(2)))
    train(
        truth,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda _: sum((p**2).sum() for p in model.parameters()),
    )  # type: ignore[arg-type, return-value]


@scenario
def name_of_two_lines(truth: Truth) -> None:
    class TwoLines(nn.Module):
        pass

    model = TwoLines()
    model.register_parameter("o\np", nn.Parameter(torch.randn(2)))
    train(
        truth,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda _: sum((p**2).sum() for p in model.parameters()),
    )  # type: ignore[arg-type, return-value]


@scenario
def tied(truth: Truth) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(7, 3)
            self.head = nn.Linear(3, 7, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    train(
        truth,
        model,
        torch.optim.Adam(model.parameters(), lr=0.1),
        loss=lambda _: model.head(model.embedding(torch.tensor([1, 2, 2]))).pow(2).mean(),
    )


@scenario
def sparse(truth: Truth) -> list[float]:
    """B9: rows 1 and 2 of ten, 2 coming twice."""

    class Sparse(nn.Embedding):
        pass

    model = Sparse(10, 3, sparse=True)
    train(
        truth,
        model,
        torch.optim.SparseAdam(model.parameters(), lr=0.1),
        loss=lambda _: model(torch.tensor([1, 1, 2])).sum(),
    )
    return []


@scenario
def on_meta(truth: Truth) -> None:
    class PartlyMeta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real = nn.Linear(4, 1)
            self.meta = nn.Linear(4, 1, device="meta")

    model = PartlyMeta()
    train(
        truth,
        model.real,
        torch.optim.SGD(model.parameters(), lr=0.1),
        label="PartlyMeta.real.",
        loss=lambda s: model.real(batch(s)).mean(),
    )
    for line in truth.steps:
        line["model"] = "PartlyMeta"


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Plain": (torch.optim.SGD, {"lr": 0.1}),
    "Momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamWAmsgrad": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "AdamFused": (torch.optim.Adam, {"lr": 0.1, "fused": True}),
    "AdamForeach": (torch.optim.Adam, {"lr": 0.1, "foreach": True}),
    "AdamLoop": (torch.optim.Adam, {"lr": 0.1, "foreach": False}),
    "AdamCapturable": (torch.optim.Adamax, {"lr": 0.1}),
    "AdagradSum": (torch.optim.Adagrad, {"lr": 0.1}),
    "RmsPropCentered": (torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.9}),
    "AdafactorFactored": (torch.optim.Adafactor, {"lr": 0.1}),
    "NAdamProduct": (torch.optim.NAdam, {"lr": 0.1}),
    "RpropSigned": (torch.optim.Rprop, {"lr": 0.1}),
    "AdadeltaTwo": (torch.optim.Adadelta, {"lr": 0.1}),
    "AveragedSgd": (torch.optim.ASGD, {"lr": 0.1}),
}


def _with(name: str, optimizer_class: Any, arguments: dict[str, Any]) -> None:
    def optimizer(truth: Truth) -> list[int]:
        model = net(name)
        used = optimizer_class(model.parameters(), **arguments)
        before = len(used.state)
        train(truth, model, used)
        return [before, len(used.state)]

    optimizer.__name__ = f"state_of_{name}"
    scenario(optimizer)


for _name, (_class, _arguments) in OPTIMIZERS.items():
    _with(_name, _class, _arguments)


@scenario
def every_micro_batch(truth: Truth) -> None:
    """With ``monitor_mbs_grad``: running sums; the last window is shorter."""
    model = net("MicroBatches")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, window in enumerate([3, 3, 1]):
        optimizer.zero_grad()
        for micro in range(window):
            (model(batch(10 * step + micro)).pow(2).mean() / 3).backward()
            truth.gradients("grad_unreduced", step, model, "MicroBatches.", micro)
        truth.gradients("grad_reduced", step, model, "MicroBatches.")
        optimizer.step()
        truth.steps.append({"model": "MicroBatches", "step": step, "micro_steps": window})


_warm = [net("WarmA"), net("WarmB")]
_warm_optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in _warm]
for _model, _optimizer in zip(_warm, _warm_optimizers, strict=True):
    _model(batch(0)).mean().backward()
    _optimizer.step()

if __name__ == "__main__":
    run_scenarios(sys.argv[1:])
    assert os.environ["TRUTH"]
