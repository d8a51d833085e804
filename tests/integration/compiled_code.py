"""What can be compiled in a training, each case with what it computes and what the compiler made of it.

``python compiled_code.py FILE NAME…`` runs cases, all by default, and writes for each the losses, the weights and the
optimizer state to the bit, the graphs, the graph breaks and recompilations with their reasons, and how many guards each
graph has.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
from torch.utils.checkpoint import checkpoint

CASES: dict[str, Any] = {}
STEPS = 3


def case(function: Any) -> Any:
    CASES[function.__name__] = function
    return function


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.drop = nn.Dropout(0.25)
        self.second = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.tanh(self.first(x))))


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 16), nn.GELU()), nn.Linear(16, 4))


def data(step: int, size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def digest(value: Any) -> str:
    found = hashlib.sha256()

    def feed(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            found.update(item.detach().numpy().tobytes())
        elif isinstance(item, dict):
            for key, part in item.items():
                found.update(str(key).encode())
                feed(part)
        elif isinstance(item, (list, tuple)):
            for part in item:
                feed(part)
        else:
            found.update(repr(item).encode())

    feed(value)
    return found.hexdigest()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, loss: Any, optimizer: Any = None, steps: int = STEPS, first: int = 0) -> list[Any]:
    """Steps with ``loss(x, target)``, and what came of them to the bit."""
    optimizer = optimizer or adam(model)
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        value = loss(*data(step))
        value.backward()
        optimizer.step()
        losses.append(value.item().hex())
    return [losses, digest(model.state_dict()), digest(optimizer.state_dict())]


def train_whole(model: nn.Module, step_once: Any, optimizer: Any, steps: int = STEPS) -> list[Any]:
    """Steps that one function takes whole."""
    losses = [step_once(*data(step)).item().hex() for step in range(steps)]
    return [losses, digest(model.state_dict()), digest(optimizer.state_dict())]


# Modules and optimizers constructed inside compiled functions


def _constructing(**options: Any) -> list[Any]:
    model = Net()
    optimizer = adam(model)

    @torch.compile(**options)
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.CrossEntropyLoss()(nn.GELU()(model(x)), target)

    return train(model, loss, optimizer)


@case
def modules_constructed() -> Any:
    return _constructing(backend="aot_eager")


@case
def modules_constructed_in_full_graph() -> Any:
    return _constructing(backend="aot_eager", fullgraph=True)


@case
def modules_constructed_under_inductor() -> Any:
    return _constructing(fullgraph=True)


@case
def modules_constructed_with_dynamic_shapes() -> Any:
    return _constructing(backend="aot_eager", fullgraph=True, dynamic=True)


@case
def own_modules_constructed() -> Any:
    model = Net()
    optimizer = adam(model)

    class Scaled(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Tanh(), nn.Softplus())
            self.factor = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.factor

    @torch.compile(backend="aot_eager")
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_of(Scaled(0.5)(model(x)), target)

    return train(model, loss, optimizer)


@case
def layers_constructed() -> Any:
    model = Net()
    optimizer = adam(model)

    @torch.compile(backend="aot_eager")
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_of(model(x) + nn.Linear(8, 4)(x), target)

    return train(model, loss, optimizer)


@case
def modules_constructed_after_a_break() -> Any:
    model = Net()
    optimizer = adam(model)

    @torch.compile(backend="aot_eager")
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = model(x)
        torch._dynamo.graph_break()
        return nn.CrossEntropyLoss()(nn.GELU()(output), target)

    return train(model, loss, optimizer)


@case
def modules_constructed_without_a_graph() -> Any:
    """In frames that the compiler leaves to Python."""
    model = Net()
    optimizer = adam(model)

    @torch.compile(backend="aot_eager")
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        layers = [nn.Linear(4, 4, bias=bool(number % 2)) for number in range(int(x.sum().item() * 0) + 12)]
        return loss_of(nn.Sequential(*layers)(model(x)), target)

    return train(model, loss, optimizer)


@case
def modules_copied() -> Any:
    model = Net()
    optimizer = adam(model)

    @torch.compile(backend="aot_eager")
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_of(model(x) + copy.deepcopy(model)(x), target)

    return train(model, loss, optimizer)


@case
def optimizer_constructed() -> Any:
    model = Net()
    optimizers = []

    @torch.compile(backend="aot_eager")
    def prepare(x: torch.Tensor) -> torch.Tensor:
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
        return x * 2

    prepare(torch.ones(2))
    prepare(torch.ones(3))
    return train(model, lambda x, target: loss_of(model(x), target), optimizers[0])


class Plain(torch.optim.Optimizer):
    """An optimizer whose step makes one graph."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])


# Whole models


def _whole(model: nn.Module, *, first: str = "optimizer", **options: Any) -> list[Any]:
    """Training, evaluation and training again."""
    run = torch.compile(model, **options) if first == "compile" else None
    optimizer = adam(model)
    if run is None:
        run = torch.compile(model, **options)
    before = train(model, lambda x, target: loss_of(run(x), target), optimizer)
    run.eval()
    with torch.no_grad():
        evaluated = digest(run(data(9)[0]))
    run.train()
    return [before, evaluated, train(model, lambda x, target: loss_of(run(x), target), optimizer)]


@case
def model() -> Any:
    return _whole(Net(), backend="aot_eager")


@case
def model_before_its_optimizer() -> Any:
    return _whole(Net(), first="compile", backend="aot_eager", fullgraph=True)


@case
def model_under_inductor() -> Any:
    return _whole(Net(), fullgraph=True)


@case
def container() -> Any:
    return _whole(sequential(), backend="aot_eager", fullgraph=True)


def _in_place(model: nn.Module, **options: Any) -> list[Any]:
    optimizer = adam(model)
    model.compile(**options)
    before = train(model, lambda x, target: loss_of(model(x), target), optimizer)
    model.eval()
    with torch.no_grad():
        evaluated = digest(model(data(9)[0]))
    model.train()
    return [before, evaluated, train(model, lambda x, target: loss_of(model(x), target), optimizer)]


@case
def model_in_place() -> Any:
    return _in_place(Net(), backend="aot_eager", fullgraph=True)


@case
def container_in_place() -> Any:
    return _in_place(sequential(), backend="aot_eager", fullgraph=True)


@case
def container_in_place_in_pieces() -> Any:
    return _in_place(sequential(), backend="aot_eager")


@case
def container_in_place_under_inductor() -> Any:
    return _in_place(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))


@case
def layer_in_place() -> Any:
    return _in_place(nn.Linear(8, 4), backend="aot_eager")


@case
def parts_in_place() -> Any:
    model = sequential()
    for part in model:
        part.compile(backend="aot_eager")
    return train(model, lambda x, target: loss_of(model(x), target))


@case
def parts() -> Any:
    model = Net()
    model.first = torch.compile(model.first, backend="aot_eager")
    model.drop = torch.compile(model.drop, backend="aot_eager")
    return train(model, lambda x, target: loss_of(model(x), target))


@case
def list_of_modules() -> Any:
    model = nn.ModuleList([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for part in model:
            x = part(x)
        return loss_of(x, target)

    return train(model, loss)


@case
def method() -> Any:
    model = Net()
    model.forward = torch.compile(model.forward, backend="aot_eager")  # type: ignore[method-assign]
    return train(model, lambda x, target: loss_of(model(x), target))


@case
def model_with_hooks_of_the_script() -> Any:
    model = Net()
    model.first.register_forward_hook(lambda _module, _args, output: output * 2)
    model.second.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    return _whole(model, backend="aot_eager")


@case
def model_with_a_break() -> Any:
    class Broken(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x))
            torch._dynamo.graph_break()
            return self.second(self.drop(x))

    return _whole(Broken(), backend="aot_eager")


@case
def modules_that_run_uncompiled() -> Any:
    model = Net()
    model.first.forward = torch._dynamo.disable(model.first.forward)  # type: ignore[method-assign]
    return _whole(model, backend="aot_eager")


@case
def changing_shapes() -> Any:
    model = Net()
    optimizer = adam(model)
    run = torch.compile(model, backend="aot_eager")
    losses = []
    for step, size in enumerate((6, 6, 5, 7, 1, 9)):
        optimizer.zero_grad()
        x, target = data(step, size)
        value = loss_of(run(x), target)
        value.backward()
        optimizer.step()
        losses.append(value.item().hex())
    return [losses, digest(model.state_dict())]


@case
def changing_modes() -> Any:
    """Layers frozen and thawed, parts of the model switched to evaluation."""
    model = Net()
    optimizer = adam(model)
    run = torch.compile(model, backend="aot_eager")
    found = []
    for step in range(6):
        model.drop.train(step % 2 == 0)
        model.first.requires_grad_(step < 3)
        found.append(train(model, lambda x, target: loss_of(run(x), target), optimizer, 1, step))
    return found


@case
def batch_norm() -> Any:
    return _whole(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), backend="aot_eager")


@case
def encoder() -> Any:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.out = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.layer(x.unsqueeze(1)).squeeze(1))

    return _whole(Encoder(), backend="aot_eager")


@case
def recurrent() -> Any:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(8, 8)
            self.out = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = torch.zeros_like(x)
            for _ in range(3):
                state = self.cell(x, state)
            return self.out(state)

    return _whole(Recurrent(), backend="aot_eager")


# Backward passes and steps inside compiled functions


@case
def whole_step() -> Any:
    model = Net()
    optimizer = adam(model)

    @torch.compile(backend="aot_eager")
    def step_once(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_whole(model, step_once, optimizer)


@case
def whole_step_under_inductor() -> Any:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile
    def step_once(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_whole(model, step_once, optimizer)


@case
def step_with_modules_and_modes() -> Any:
    model = Net()
    optimizer = adam(model)

    @torch.compile(backend="aot_eager")
    def step_once(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        model.train()
        model.zero_grad()
        loss = nn.CrossEntropyLoss()(model(x), target)
        torch.autograd.backward(loss)
        optimizer.step()
        model.eval()
        return loss.detach() + model(x).sum().detach()

    return train_whole(model, step_once, optimizer)


@case
def modes_in_full_graph() -> Any:
    model = Net()
    optimizer = adam(model)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        model.train()
        found = loss_of(model(x), target)
        model.eval()
        return found + model(x).sum() * 0

    return train(model, loss, optimizer)


def _zeroing(owner: str) -> list[Any]:
    model = Net()
    optimizer = adam(model)

    @torch.compile(backend="aot_eager")
    def zero() -> None:
        (model if owner == "model" else optimizer).zero_grad()

    losses = []
    for step in range(STEPS):
        value = loss_of(model(data(step)[0]), data(step)[1])
        value.backward()
        optimizer.step()
        zero()
        losses.append(value.item().hex())
    return [losses, digest(model.state_dict())]


@case
def zeroing_of_an_optimizer() -> Any:
    return _zeroing("optimizer")


@case
def zeroing_of_a_model() -> Any:
    return _zeroing("model")


@case
def backward_in_full_graph() -> Any:
    model = Net()
    optimizer = adam(model)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def backward(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x), target)
        loss.backward()
        return loss.detach()

    losses = []
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for step in range(STEPS):
            optimizer.zero_grad()
            losses.append(backward(*data(step)).item().hex())
            optimizer.step()
    return [losses, digest(model.state_dict())]


def _step(make: Any, **options: Any) -> list[Any]:
    model = Net()
    optimizer = make(model.parameters())
    step_once = torch.compile(lambda: optimizer.step(), **options)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss_of(model(data(step)[0]), data(step)[1])
        value.backward()
        step_once()
        losses.append(value.item().hex())
    return [losses, digest(model.state_dict()), digest(optimizer.state_dict())]


@case
def optimizer_step() -> Any:
    return _step(
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), capturable=True, foreach=True), backend="aot_eager"
    )


@case
def optimizer_step_in_full_graph() -> Any:
    return _step(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), backend="aot_eager", fullgraph=True)


@case
def own_optimizer_step_in_full_graph() -> Any:
    return _step(Plain, backend="aot_eager", fullgraph=True)


@case
def own_optimizer_step() -> Any:
    return _step(Plain, backend="aot_eager")


@case
def optimizer_step_under_inductor() -> Any:
    return _step(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), fullgraph=True)


@case
def optimizer_step_of_one_at_a_time() -> Any:
    return _step(lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=False), backend="aot_eager")


@case
def optimizer_whose_method_is_compiled() -> Any:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step = torch.compile(optimizer.step, backend="aot_eager")  # type: ignore[method-assign]
    return train(model, lambda x, target: loss_of(model(x), target), optimizer)


@case
def scaled_step() -> Any:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    @torch.compile(backend="aot_eager")
    def step_once(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return train_whole(model, step_once, optimizer)


@case
def closure() -> Any:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    @torch.compile(backend="aot_eager")
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_of(model(x), target)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(*data(0))
        value.backward()
        return value

    losses = [optimizer.step(evaluate).item().hex() for _ in range(2)]
    return [losses, digest(model.state_dict())]


@case
def derivatives_inside() -> Any:
    model = Net()

    @torch.compile(backend="aot_eager")
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
        return loss_of(model(x), target) + gradient.pow(2).mean()

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        return train(model, loss)


@case
def own_function() -> Any:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    model = Net()
    loss = torch.compile(lambda x, target: loss_of(Double.apply(model(x)), target), backend="aot_eager", fullgraph=True)
    return train(model, loss)


def _checkpointed(**options: Any) -> list[Any]:
    model = sequential()

    @torch.compile(backend="aot_eager")
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_of(model[3](checkpoint(model[2], torch.relu(model[0](x)), **options)), target)

    return train(model, loss)


@case
def checkpoint_inside() -> Any:
    return _checkpointed(use_reentrant=False)


@case
def reentrant_checkpoint_inside() -> Any:
    return _checkpointed(use_reentrant=True)


@case
def checkpoint_around() -> Any:
    model = sequential()
    model[2] = torch.compile(model[2], backend="aot_eager")
    return train(
        model,
        lambda x, target: loss_of(model[3](checkpoint(model[2], model[0](x), use_reentrant=False)), target),
    )


@case
def compiled_inside_compiled() -> Any:
    model = Net()
    inner = torch.compile(model, backend="aot_eager")
    return train(model, torch.compile(lambda x, target: loss_of(inner(x), target), backend="aot_eager"))


@case
def compiling_inside_compiled() -> Any:
    model = Net()

    @torch.compile(backend="aot_eager")
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_of(torch.compile(model, backend="aot_eager")(x), target)

    return train(model, loss)


@case
def branches() -> Any:
    model = Net()
    other = nn.Linear(8, 4)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_of(model(x) + torch.cond(x.sum() > 0, lambda y: other(y), lambda y: other(-y), (x,)), target)

    return train(nn.ModuleList([model, other]), loss)


def _backward_compiled(**options: Any) -> list[Any]:
    model = sequential()
    optimizer = adam(model)
    with torch._dynamo.config.patch(compiled_autograd=True):
        run = torch.compile(model, backend="aot_eager")

        @torch.compile(backend="aot_eager", **options)
        def backward(loss: torch.Tensor) -> None:
            loss.backward()

        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            value = loss_of(run(data(step)[0]), data(step)[1])
            backward(value)
            optimizer.step()
            losses.append(value.item().hex())
    return [losses, digest(model.state_dict())]


@case
def backward_compiled() -> Any:
    return _backward_compiled()


@case
def backward_of_eager_compiled() -> Any:
    model = sequential()
    optimizer = adam(model)
    losses = []
    compiler = torch.compile(backend="aot_eager")
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss_of(model(data(step)[0]), data(step)[1])
        with torch._dynamo.compiled_autograd._enable(compiler):
            value.backward()
        optimizer.step()
        losses.append(value.item().hex())
    return [losses, digest(model.state_dict())]


# Exporting, scripting, tracing and transforming, between and inside training steps


def _during_training(look: Any, make: Any = sequential) -> list[Any]:
    model = make()
    optimizer = adam(model)
    found = []
    for step in range(2):
        found.append(train(model, lambda x, target: loss_of(model(x), target), optimizer, 1, step))
        found.append(look(model))
    found.append(train(model, lambda x, target: loss_of(model(x), target), optimizer, 1, 2))
    return found


def _graph(program: Any) -> list[Any]:
    return [str(node.target) for node in program.graph.nodes]


@case
def exported() -> Any:
    x = data(9)[0]
    return _during_training(lambda model: _graph(torch.export.export(model, (x,))))


@case
def exported_strictly() -> Any:
    x = data(9)[0]
    return _during_training(lambda model: _graph(torch.export.export(model, (x,), strict=True)), Net)


@case
def exported_with_dynamic_shapes() -> Any:
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    return _during_training(lambda model: _graph(torch.export.export(model, (data(9)[0],), dynamic_shapes=shapes)))


@case
def exported_constructing() -> Any:
    class Constructing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.GELU()(super().forward(x))

    x = data(9)[0]

    def look(model: nn.Module) -> Any:
        return [_graph(torch.export.export(model, (x,), strict=strict)) for strict in (False, True)]

    return _during_training(look, Constructing)


@case
def scripted() -> Any:
    x = data(9)[0]

    def look(model: nn.Module) -> Any:
        script = torch.jit.script(model)
        return [digest(script(x)), str(script.inlined_graph).count("=")]

    return _during_training(look)


@case
def scripted_and_trained() -> Any:
    model = torch.jit.script(sequential())
    return train(model, lambda x, target: loss_of(model(x), target))


@case
def traced() -> Any:
    x = data(9)[0]

    def look(model: nn.Module) -> Any:
        trace = torch.jit.trace(model, x)
        return [digest(trace(x)), str(trace.inlined_graph).count("=")]

    return _during_training(look)


@case
def symbolically_traced() -> Any:
    return _during_training(lambda model: _graph(torch.fx.symbolic_trace(model)))


@case
def made_into_a_graph() -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = data(9)[0]
    return _during_training(lambda model: _graph(make_fx(model)(x)))


def _functional(model: nn.Module, parameters: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return loss_of(torch.func.functional_call(model, parameters, (x,)), target)


@case
def transformed() -> Any:
    def look(model: nn.Module) -> Any:
        x, target = data(9)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        gradients = torch.func.grad(lambda p: _functional(model, p, x, target))(parameters)
        per_sample = torch.func.vmap(
            torch.func.grad(lambda p, x, target: _functional(model, p, x[None], target[None])), (None, 0, 0)
        )(parameters, x, target)
        return [digest(gradients), digest(per_sample)]

    return _during_training(look)


def _transformed_inside(**options: Any) -> list[Any]:
    model = sequential()

    @torch.compile(backend="aot_eager", **options)
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        gradients = torch.func.grad(lambda p: _functional(model, p, x, target))(parameters)
        penalty = sum(gradient.pow(2).sum() for gradient in gradients.values())
        per_sample = torch.func.vmap(lambda row: model(row[None]).sum())(x)
        return loss_of(model(x), target) + penalty + per_sample.mean() * 0

    return train(model, loss)


@case
def transformed_inside() -> Any:
    return _transformed_inside()


@case
def functional_calls_inside() -> Any:
    model = sequential()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        moved = {name: p - 0.1 * p for name, p in model.named_parameters()}
        return _functional(model, moved, x, target)

    return train(model, loss)


# Collectives


@contextlib.contextmanager
def _group() -> Any:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield


def _reduced(reduce: Any, **options: Any) -> list[Any]:
    with _group():
        model = Net()
        optimizer = adam(model)

        @torch.compile(backend="aot_eager", **options)
        def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            output = model(x)
            return loss_of(output + reduce(output.detach() * 2), target)

        return train(model, loss, optimizer)


@case
def functional_collectives() -> Any:
    return _reduced(lambda x: functional.all_reduce(x, "sum", dist.group.WORLD), fullgraph=True)


@case
def collectives() -> Any:
    def reduce(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    return _reduced(reduce)


@case
def collectives_with_handles() -> Any:
    def reduce(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, async_op=True).wait()
        return x

    return _reduced(reduce)


@case
def collectives_under_inductor() -> Any:
    with _group():
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @torch.compile(fullgraph=True)
        def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            output = model(x)
            return loss_of(output + functional.all_reduce(output.detach(), "sum", dist.group.WORLD), target)

        return train(model, loss, optimizer)


@case
def gradients_reduced_by_hand() -> Any:
    with _group():
        model = Net()
        optimizer = adam(model)

        @torch.compile(backend="aot_eager")
        def step_once(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x), target)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            return loss.detach()

        return train_whole(model, step_once, optimizer)


@case
def wrapped_and_compiled() -> Any:
    with _group():
        return _whole(nn.parallel.DistributedDataParallel(sequential()), backend="aot_eager")


@case
def compiled_and_wrapped() -> Any:
    with _group():
        model = sequential()
        run = nn.parallel.DistributedDataParallel(torch.compile(model, backend="aot_eager"))
        return train(model, lambda x, target: loss_of(run(x), target))


def compiler_saw() -> dict[str, Any]:
    """Of the case that has just run: graphs with the reasons why they were compiled again, breaks with theirs, guards."""
    graphs = [metrics for metrics in get_compilation_metrics() if metrics.co_name and metrics.graph_op_count]
    return {
        "graphs": [
            [m.co_name, m.graph_op_count, _plain(m.recompile_reason).split("  #")[0].split("\nUser stack")[0]]
            for m in graphs
        ],
        "breaks": [[_plain(reason), count] for reason, count in counters["graph_break"].items()],
        "captured": dict(counters["stats"]),
        "guards": [m.guard_count for m in graphs],
    }


def _plain(text: Any) -> str:
    return re.sub(r"0x[0-9a-f]+|\b\d{6,}\b", "ADDRESS", str(text))


def run(name: str) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    torch.manual_seed(0)
    try:
        result = CASES[name]()
    except Exception as error:
        result = f"{type(error).__name__}: {_plain(error).splitlines()[0]}"  # others are of frames, ours among them
        if "DEBUG" in os.environ:
            import traceback

            traceback.print_exc()
    gc.collect()
    return {"result": result, **compiler_saw()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    chosen = sys.argv[2:] or list(CASES)
    found = {name: run(name) for name in chosen}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
