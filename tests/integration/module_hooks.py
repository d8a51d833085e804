"""Trainings that ask much of the hooks on modules, each bare and watched, in one process.

``python module_hooks.py FOLDER NAME…`` runs scenarios: rows go to ``FOLDER/NAME``, what they have seen to
``FOLDER/seen.json``. A scenario gets ``watch(model, optimizer, **config)``, which does nothing in the bare run, and returns
facts that must be equal in both, bits of the weights included; what only the watched run knows it puts into ``seen``.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import io
import json
import os
import sys
import threading
import traceback
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import grad

SCENARIOS: dict[str, Any] = {}
CONFIG = {
    "xy_distribution": True,
    "all_xy": True,
    "ops": ["norm", "nans"],
    "ndigits": 12,
    "step_count_per_record": 1000,
}


def scenario(function: Any) -> Any:
    SCENARIOS[function.__name__.rstrip("_")] = function
    return function


class Watch:
    """Attaches a monitor, or does not."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.monitors: list[Any] = []
        self.seen: dict[str, Any] = {}

    def __call__(self, model: Any, optimizer: Any, accumulate: int = 1, **config: Any) -> Any:
        if not self.on:
            return None
        from msmon.pytorch import TrainerMon

        path = Path(os.environ["MONITOR_OUTPUT_DIR"]) / f"monitor{len(self.monitors)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**CONFIG, **config}))
        self.monitors.append(TrainerMon(path, params_have_main_grad=False))
        self.monitors[-1].set_monitor(model, accumulate, optimizer)
        return self.monitors[-1]


def batch(step: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (6, 8)), generator=torch.Generator().manual_seed(17 + step))


def digest(*values: Any) -> str:
    found = hashlib.sha256()
    for value in values:
        for tensor in value.state_dict().values() if isinstance(value, nn.Module) else [value]:
            found.update(tensor.detach().double().numpy().tobytes())
    return found.hexdigest()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.ReLU()
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.act(self.fc(x)))


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def watched_net(watch: Any) -> tuple[Any, Any]:
    model = Net()
    optimizer = sgd(model)
    watch(model, optimizer)
    return model, optimizer


def step(model: Any, optimizer: Any, number: int = 0, call: Any = None) -> float:
    optimizer.zero_grad()
    loss = (model if call is None else call)(batch(number)).pow(2).mean()
    loss.backward()
    optimizer.step()
    return float(loss)


def step_twice(model: Any, optimizer: Any, number: int, call: Any) -> float:
    """Two backward passes over one graph."""
    optimizer.zero_grad()
    loss = call(batch(number)).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    return float(loss)


def hooks_on(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


# Compiled models


def compiled(watch: Any, wrap: Any, *, call: Any = None, first: str = "optimizer", backend: str = "eager") -> Any:
    from torch._dynamo.testing import CompileCounterWithBackend
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend(backend)
    model = Net()
    used = wrap(model, counter) if first == "compile" else None
    optimizer = sgd(model)
    watched = used if isinstance(used, nn.Module) else model
    watch(watched, optimizer)
    if used is None:
        used = wrap(model, counter)
    if first == "call":
        step(model, optimizer, 9)
    losses = [step(model, optimizer, number, used) for number in range(3)]
    used.eval() if isinstance(used, nn.Module) else model.eval()
    with torch.no_grad():
        losses.append(float(used(batch(5)).sum()))
    used.train() if isinstance(used, nn.Module) else model.train()
    losses += [step(model, optimizer, number, used) for number in range(3, 5)]
    return {
        "weights": digest(model), "losses": losses, "frames": counter.frame_count, "ops": counter.op_count,
        "breaks": sum(counters["graph_break"].values()),
    }  # fmt: skip


def compile_whole(model: Any, counter: Any) -> Any:
    return torch.compile(model, backend=counter)


def compile_full(model: Any, counter: Any) -> Any:
    return torch.compile(model, backend=counter, fullgraph=True)


def compile_in_place(model: Any, counter: Any) -> Any:
    model.compile(backend=counter)
    return model


def compile_part(model: Any, counter: Any) -> Any:
    model.fc = torch.compile(model.fc, backend=counter)
    return model


def compile_function(model: Any, counter: Any) -> Any:
    return torch.compile(lambda x: model(x) * 2, backend=counter, fullgraph=True)


for _name, _way in {
    "whole": compile_whole, "full": compile_full, "in_place": compile_in_place,
    "part": compile_part, "function": compile_function,
}.items():  # fmt: skip
    for _first in ("optimizer", "compile"):
        SCENARIOS[f"compile_{_name}_after_{_first}"] = lambda watch, way=_way, first=_first: compiled(
            watch, way, first=first, backend="aot_eager" if first == "compile" else "eager"
        )


@scenario
def compile_already_called(watch: Any) -> Any:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    model = Net()
    used = torch.compile(model, backend=counter)
    optimizer = sgd(model)
    losses = [step(model, optimizer, number, used) for number in range(2)]
    before = counter.frame_count
    watch(used, optimizer)
    losses += [step(model, optimizer, number, used) for number in range(2, 5)]
    return {"weights": digest(model), "losses": losses, "frames": [before, counter.frame_count]}


# Graphs of other kinds


@scenario
def scripted_and_traced(watch: Any) -> Any:
    model = Net()
    model.part = torch.jit.script(nn.Linear(3, 3))
    model.forward_before = None
    optimizer = sgd(model)
    watch(model, optimizer)

    def call(x: Any) -> Any:
        return model.part(model(x))

    losses = [step(model, optimizer, 0, call)]
    script = torch.jit.script(Net())
    other = Net()
    other.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("part")})
    script_of_watched = torch.jit.script(model.act), torch.jit.script(model.fc)
    whole = Net()
    whole.fc = model.fc
    script_of_whole = torch.jit.script(whole)
    trace = torch.jit.trace(whole, batch(3))
    losses += [step(model, optimizer, number, call) for number in range(1, 3)]
    sums = [float(f(batch(4)).sum()) for f in (script_of_whole, trace, script, script_of_watched[1])]
    buffer = io.BytesIO()
    torch.jit.save(script_of_whole, buffer)
    return {"weights": digest(model), "losses": losses, "sums": sums}


@scenario
def script_of_the_watched(watch: Any) -> Any:
    model, optimizer = watched_net(watch)
    losses = [step(model, optimizer)]
    script, trace = torch.jit.script(model), torch.jit.trace(model, batch(3))
    copied = torch.jit.script(copy.deepcopy(model))
    losses += [step(model, optimizer, number) for number in range(1, 3)]
    losses += [step(model, optimizer, number, script) for number in range(3, 5)]
    sums = [float(f(batch(4)).sum()) for f in (script, trace, copied)]
    return {"weights": digest(model), "losses": losses, "sums": sums}


@scenario
def exported(watch: Any) -> Any:
    model, optimizer = watched_net(watch)
    losses = [step(model, optimizer)]
    graphs = [str(torch.export.export(model, (batch(),), strict=strict).graph) for strict in (False, True)]
    graphs.append(str(torch.fx.symbolic_trace(model).graph))
    from torch.fx.experimental.proxy_tensor import make_fx

    graphs.append(str(make_fx(lambda x: model(x))(batch()).graph))
    losses += [step(model, optimizer, number) for number in range(1, 3)]
    return {"weights": digest(model), "losses": losses, "graphs": graphs}


@scenario
def fake_tensors(watch: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    model, optimizer = watched_net(watch)
    losses = [step(model, optimizer)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        shape = list(model(torch.empty(6, 8)).shape)
    twin = copy.deepcopy(model).to("meta")
    meta = list(twin(torch.empty(6, 8, device="meta")).shape)
    losses += [step(model, optimizer, number) for number in range(1, 3)]
    counter = FlopCounterMode(display=False)
    with counter:
        losses.append(step(model, optimizer, 3))
    return {"weights": digest(model), "losses": losses, "shapes": [shape, meta], "flops": counter.get_total_flops()}


@scenario
def functional(watch: Any) -> Any:
    from torch.func import functional_call, grad, jvp, vmap

    model, optimizer = watched_net(watch)
    losses = [step(model, optimizer)]
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(params: Any, x: Any) -> Any:
        return functional_call(model, params, (x,)).pow(2).mean()

    one = grad(loss)(params, batch(1))
    each = vmap(grad(loss), in_dims=(None, 0))(params, batch(2, 4, 6, 8))
    _, tangent = jvp(model, (batch(3),), (batch(4),))
    losses += [step(model, optimizer, 1)]
    optimizer.zero_grad()
    functional_call(model, dict(model.named_parameters()), (batch(2),)).pow(2).mean().backward()
    optimizer.step()
    mapped = vmap(model)(batch(5, 4, 6, 8)).sum()
    optimizer.zero_grad()
    mapped.backward()
    optimizer.step()
    return {"weights": digest(model, *one.values(), *each.values(), tangent), "losses": losses}


@scenario
def maps_itself(watch: Any) -> Any:
    class Mapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.inside = False

        def forward(self, x: Any) -> Any:
            if x.dim() == 1:
                return self.fc(x)
            y = torch.func.vmap(self)(x)
            return self.fc(y)

    model = Mapping()
    optimizer = sgd(model)
    watch(model, optimizer)
    return {"losses": [step(model, optimizer, number) for number in range(2)], "weights": digest(model)}


@scenario
def data_parallel(watch: Any) -> Any:
    model = nn.DataParallel(Net())
    optimizer = sgd(model)
    watch(model, optimizer)
    losses = [step(model, optimizer, number) for number in range(2)]
    replica = model.module._replicate_for_data_parallel()
    replica.fc = model.module.fc._replicate_for_data_parallel()
    replica.fc.weight, replica.fc.bias = (p.clone() for p in model.module.fc.parameters())
    replica.fc(batch()).sum().backward()
    optimizer.zero_grad()
    losses += [step(model, optimizer, 2)]
    return {"weights": digest(model), "losses": losses}


# Backward passes


@scenario
def gradient_penalty(watch: Any) -> Any:
    model = Net()
    model.act = nn.Tanh()
    optimizer = sgd(model)
    watch(model, optimizer)
    losses = []
    for number in range(3):
        x = batch(number).requires_grad_()
        out = model(x).pow(2).mean()
        (gradient,) = grad(out, x, create_graph=True)
        loss = out + gradient.pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return {"weights": digest(model), "losses": losses}


@scenario
def backward_twice(watch: Any) -> Any:
    model = Net()
    optimizer = sgd(model)
    watch(model, optimizer, 2)
    for number in range(2):
        optimizer.zero_grad()
        loss = model(batch(number)).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
    return {"weights": digest(model)}


@scenario
def exception_in_forward(watch: Any) -> Any:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.inner = nn.ModuleDict({"check": Checking(), "fallback": nn.Linear(8, 8)})
            self.out = nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            x = self.fc(x)
            try:
                x = self.inner["check"](x)
            except ValueError:
                x = self.inner["fallback"](x)
            return self.out(x)

    class Checking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fail, self.always = None, True
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            x = self.fc(x)
            if self.fail is not None:
                raise self.fail
            return x

    model = Picky()
    optimizer = sgd(model)
    watch(model, optimizer)
    errors = []
    for number in range(4):
        check = model.inner["check"]
        check.fail = [None, ValueError("inside"), KeyError("all"), None][number]
        try:
            step(model, optimizer, number)
        except KeyError as error:
            errors.append(str(error))
            check.fail = None
            with torch.no_grad():
                model(batch(7))  # a rollout: no row
            step(model, optimizer, number)
    return {"weights": digest(model), "errors": errors}


@scenario
def exception_in_backward(watch: Any) -> Any:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            raise ValueError("in backward")

    model, optimizer = watched_net(watch)
    errors = []
    for number in range(3):
        try:
            if number == 1:
                (model.out(Fails.apply(model.act(model.fc(batch(number))))).sum()).backward()
        except ValueError as error:
            errors.append(str(error))
        optimizer.zero_grad()
        step(model, optimizer, number)
    return {"weights": digest(model), "errors": errors}


# Copies and files


@scenario
def copies(watch: Any) -> Any:
    import pickle

    model, optimizer = watched_net(watch)
    step(model, optimizer)
    averaged = copy.deepcopy(model)
    swa = torch.optim.swa_utils.AveragedModel(model)
    for number in range(1, 3):
        step(model, optimizer, number)
        swa.update_parameters(model)
        averaged(batch(number))
    torch.save(model, Path(os.environ["MONITOR_OUTPUT_DIR"]).parent / "whole.pt")
    again = pickle.loads(pickle.dumps(model))
    torch.compile(averaged, backend="eager", fullgraph=True)(batch())
    torch.jit.script(again)
    torch.jit.script(copy.deepcopy(averaged))
    same = torch.equal(again(batch()), model(batch()))
    return {"weights": digest(model, averaged, swa), "same": same}


# The user's own hooks


@scenario
def own_hooks(watch: Any) -> Any:
    model = Net()
    model.fc.register_forward_hook(lambda module, args, output: output * 2)
    model.act.register_full_backward_hook(lambda module, gin, gout: (gin[0] * 0.5,))
    model.act.register_full_backward_pre_hook(lambda module, gout: (gout[0] * 2,))
    optimizer = sgd(model)
    watch(model, optimizer)
    model.out.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.out.register_forward_hook(lambda module, args, output: output.clone())
    sums = []

    def call(x: Any) -> Any:
        y = model.fc(x)
        y.register_hook(lambda g: g * 3)
        y.retain_grad()
        z = model.out(model.act(y))
        sums.append(y)
        return z

    losses = [step(model, optimizer, number, call) for number in range(2)]
    return {"weights": digest(model), "losses": losses, "sums": [float(y.grad.norm()) for y in sums]}


# Modules and threads that come and go


@scenario
def modules_change(watch: Any) -> Any:
    model, optimizer = watched_net(watch)
    step(model, optimizer)
    model.act = nn.Sequential(nn.Tanh(), nn.Linear(8, 8))
    optimizer.add_param_group({"params": list(model.act.parameters())})
    step(model, optimizer, 1)
    step(model, optimizer, 2)
    model.out = nn.Linear(8, 2)
    optimizer.param_groups[0]["params"] = [*model.fc.parameters(), *model.out.parameters()]
    step(model, optimizer, 3)
    step(model, optimizer, 4)
    model.act = nn.GELU()  # has no parameter: nobody tells
    step(model, optimizer, 5)
    step(model, optimizer, 6)
    return {"weights": digest(model)}


@scenario
def threads(watch: Any) -> Any:
    models = [Net(), Net()]
    optimizers = [sgd(model) for model in models]
    barrier = threading.Barrier(2)
    for model, optimizer in zip(models, optimizers, strict=True):
        watch(model, optimizer)

    def train(index: int) -> None:
        for number in range(20):
            barrier.wait()
            step(models[index], optimizers[index], number + 100 * index)

    workers = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return {"weights": digest(*models)}


# What goes in and comes out


@scenario
def recursive(watch: Any) -> Any:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Any, depth: int = 2) -> Any:
            return self.fc(x) if depth == 0 else self(self(x, depth - 1), 0)

    model = Tree()
    optimizer = sgd(model)
    watch(model, optimizer)
    losses = [step(model, optimizer, number) for number in range(2)]
    return {"weights": digest(model), "losses": losses}


@scenario
def odd_values(watch: Any) -> Any:
    class Gives(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function
            self.own = nn.Parameter(torch.ones(8))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.function(self, *args, **kwargs)

    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    functions = {
        "input": lambda self, x: x,
        "parameter": lambda self, x: self.own,
        "nothing": lambda self, x: None,
        "view": lambda self, x: x[:, :4],
        "twice": lambda self, x, y: x * 2 + y * 3,
        "sparse": lambda self, x: torch.eye(4).to_sparse(),
        "whole": lambda self, x: torch.arange(6),
        "bool": lambda self, x: x > 0,
        "complex": lambda self, x: torch.complex(x, x * 2),
        "infinite": lambda self, x: x / 0,
        "empty": lambda self, x: x[:0],
        "scalar": lambda self, x: x.sum(),
        "nested": lambda self, x: nested,
        "meta": lambda self, x: torch.empty(3, device="meta"),
        "half": lambda self, x: x.to(torch.float8_e4m3fn),
        "quantized": lambda self, x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8),
        "itself": lambda self, x: [x, loop],
        "expanded": lambda self, x: x[:1].expand(1000, 8),
        "leaf": lambda self, x: x.detach().requires_grad_(),
        "nothing_at_all": lambda self: None,
        "text": lambda self, x, name="a": {"x": x, "name": name, 3: None},
        "class": lambda self, x: (x, torch.float32, Net, object()),
    }
    loop: list[Any] = []
    loop.append(loop)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.parts = nn.ModuleDict({f"{name}_": Gives(function) for name, function in functions.items()})

        def forward(self, x: Any) -> Any:
            x = self.fc(x)
            y = x
            for key, part in self.parts.items():
                name = key.removesuffix("_")
                args = [y, y] if name == "twice" else [] if name == "nothing_at_all" else [y]
                found = part(*args)
                if name in {"input", "twice"}:
                    y = found
                if name in {"parameter", "view", "scalar"}:
                    y = y + found.sum()
            return y

    model = Odd()
    optimizer = sgd(model)
    watch(model, optimizer)
    return {"losses": [step(model, optimizer, number) for number in range(2)], "weights": digest(model)}


@scenario
def several_outputs(watch: Any) -> Any:
    """A module inside hands several tensors on, each of which leads back to the same inputs."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Any, more: Any) -> Any:
            y = self.fc(x + more)
            return y[:, :4], y[:, 4:]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves, self.out = Halves(), nn.Linear(4, 3)

        def forward(self, x: Any) -> Any:
            left, right = self.halves(x, x.exp())
            return self.out(left) + self.out(right.sin())

    model = Whole()
    optimizer = sgd(model)
    watch(model, optimizer)
    norms = []
    for number in range(2):
        x = batch(number).requires_grad_()
        step(model, optimizer, number, lambda _, x=x: model(x))
        norms.append(float(x.grad.double().norm()))
    return {"weights": digest(model), "norms": norms}


@scenario
def packed(watch: Any) -> Any:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8, batch_first=True)
            self.out = nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
            out, _ = self.lstm(packed)
            out, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
            return self.out(out)

    model = Words()
    optimizer = sgd(model)
    watch(model, optimizer)
    losses = [
        step(model, optimizer, number, lambda x: model(x.view(2, 3, 8).repeat(1, 2, 1)[:, :5])) for number in range(2)
    ]
    return {"losses": losses, "weights": digest(model)}


@scenario
def written_views(watch: Any) -> Any:
    """Linear layers over three dimensions return views; what follows writes to them."""
    model = nn.ModuleDict({
        "fc": nn.Linear(8, 8), "relu": nn.ReLU(inplace=True), "both": nn.Linear(8, 16), "drop": nn.SiLU(inplace=True),
        "out": nn.Linear(8, 3),
    })  # fmt: skip
    optimizer = sgd(model)
    watch(model, optimizer, 2)

    def call(x: Any) -> Any:
        x = x.view(2, 3, 8)
        y = model["relu"](model["fc"](x))
        left = model["both"](y)[..., :8]
        left += x
        z = model["drop"](left)
        return model["out"](z)

    losses = [step(model, optimizer, number, call) for number in range(2)]
    losses.append(step_twice(model, optimizer, 2, call))
    return {"losses": losses, "weights": digest(model)}


@scenario
def written_views_twin(watch: Any) -> Any:
    """The same without writing."""
    model = nn.ModuleDict({
        "fc": nn.Linear(8, 8), "relu": nn.ReLU(), "both": nn.Linear(8, 16), "drop": nn.SiLU(), "out": nn.Linear(8, 3),
    })  # fmt: skip
    optimizer = sgd(model)
    watch(model, optimizer, 2)

    def call(x: Any) -> Any:
        x = x.view(2, 3, 8)
        y = model["relu"](model["fc"](x))
        left = model["both"](y)[..., :8]
        z = model["drop"](left + x)
        return model["out"](z)

    losses = [step(model, optimizer, number, call) for number in range(2)]
    losses.append(step_twice(model, optimizer, 2, call))
    return {"losses": losses, "weights": digest(model)}


# Evaluations


@scenario
def selective_checkpoint(watch: Any) -> Any:
    """A checkpoint that keeps the result of every operation it sees, in their order."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    counted = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        counted.append(str(op))
        return CheckpointPolicy.MUST_SAVE

    model, optimizer = watched_net(watch)

    def call(x: Any) -> Any:
        return checkpoint(
            model, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )

    losses = [step(model, optimizer, number, call) for number in range(2)]
    return {"weights": digest(model), "losses": losses, "counted": counted}


@scenario
def graphed(watch: Any) -> Any:
    """Modules that are captured in a CUDA graph must have no hooks; without a GPU it fails later than that."""
    model, optimizer = watched_net(watch)
    try:
        torch.cuda.make_graphed_callables(model, (batch(),))
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return {"losses": [step(model, optimizer)], "said": said}


@scenario
def evaluations(watch: Any) -> Any:
    """torch's encoder layer has a faster path for evaluations of modules without hooks."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(64, 3))
    optimizer = sgd(model)
    watch(model, optimizer)
    sums, fast, original = [], [], torch._transformer_encoder_layer_fwd
    torch._transformer_encoder_layer_fwd = lambda *args: fast.append(1) or original(*args)
    mask = torch.zeros(4, 10, dtype=torch.bool)
    mask[1:, 6:] = True
    for number in range(3):
        loss = model(batch(number, 4, 10, 64)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            sums.append(digest(model(batch(9, 4, 10, 64)), model[0](batch(9, 4, 10, 64), src_key_padding_mask=mask)))
        with torch.inference_mode():
            sums.append(digest(model(batch(9, 4, 10, 64))))
        model.train()
        with torch.inference_mode():
            model(batch(9, 4, 10, 64))
    torch._transformer_encoder_layer_fwd = original
    return {"weights": digest(model), "sums": sums, "fast": len(fast)}


# Which rows, when


@scenario
def steps_in_between(watch: Any) -> Any:
    model = Net()
    optimizer = sgd(model)
    before = hooks_on(model)
    watch(model, optimizer, start_step=1, step_interval=2, collect_times=2)
    watch.seen["hooks"] = [hooks_on(model) - before]
    for number in range(6):
        step(model, optimizer, number)
        watch.seen["hooks"].append(hooks_on(model) - before)
    return {"weights": digest(model)}


@scenario
def memory(watch: Any) -> Any:
    model, optimizer = watched_net(watch)
    dead, counts = [], []
    for number in range(300):
        optimizer.zero_grad()
        out = model(batch(number))
        kept = [weakref.ref(out), weakref.ref(out.untyped_storage())] if number % 50 == 7 else []
        out.pow(2).mean().backward()
        optimizer.step()
        del out
        dead += [reference() is None for reference in kept]
        if number in {50, 299}:
            gc.collect()
            counts.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    watch.seen["counts"] = counts
    for number in range(20):  # forwards that no backward pass follows
        out = model(batch(number))
        reference = weakref.ref(out.grad_fn._saved_mat1)
        del out
        dead.append(reference() is None)
    return {"weights": digest(model), "dead": dead}


def gan(watch: Any, how: str) -> Any:
    maker, critic = Net(), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizers = sgd(maker), sgd(critic)
    monitor = watch(maker, optimizers[0], wg_distribution=how != "only_xy")
    if monitor is not None:
        monitor.set_monitor(critic, 1, optimizers[1])
    for number in range(3):
        fake = maker(batch(number))
        optimizers[1].zero_grad()
        (critic(batch(number, 6, 3)).mean() - critic(fake.detach()).mean()).backward()
        optimizers[1].step()
        critic.requires_grad_(how != "frozen")
        optimizers[0].zero_grad()
        critic(fake).mean().backward()
        optimizers[0].step()
        critic.requires_grad_(True)
    return {"weights": digest(maker, critic)}


for _how in ("plain", "frozen", "only_xy"):
    SCENARIOS[f"gan_{_how}"] = lambda watch, how=_how: gan(watch, how)


@scenario
def sharpness(watch: Any) -> Any:
    """SAM: two backward passes, the first of which is thrown away."""
    model, optimizer = watched_net(watch)
    for number in range(3):
        loss = model(batch(number)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            moves = [(p, 0.05 * p.grad / p.grad.norm()) for p in model.parameters()]
            for p, move in moves:
                p.add_(move)
        optimizer.zero_grad()
        model(batch(number)).pow(2).mean().backward()
        with torch.no_grad():
            for p, move in moves:
                p.sub_(move)
        optimizer.step()
    return {"weights": digest(model)}


@scenario
def closures(watch: Any) -> Any:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    watch(model, optimizer)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(batch(1)).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return {"weights": digest(model)}


# The calls of the library


@scenario
def library(watch: Any) -> Any:
    model = Net()
    optimizer = sgd(model)
    monitor = watch(model, optimizer, ops=["norm"], step_count_per_record=1)
    step(model, optimizer)
    seen = watch.seen
    if monitor is not None:
        seen["after"] = monitor.generate_xy_metrics()
        monitor.reload_xy(False)
        seen["off"] = hooks_on(model)
    step(model, optimizer, 1)
    if monitor is not None:
        seen["off_after"] = hooks_on(model)
        monitor.reload_xy(True)
    step(model, optimizer, 2)
    optimizer.zero_grad()
    loss = model(batch(3)).pow(2).mean()
    if monitor is not None:
        monitor.ops = ["norm", "max"]  # between forward and backward: this step goes on under the old
        monitor.adhoc_check(batch(3), "any", "thing", None, ["norm", "min"])
        monitor.adhoc_check(batch(3), "other", "rank", [5], ["norm"])
        for wrong in ({"target_tensor": 3}, {"ops_list": ["middle"]}, {"ops_list": []}):
            call = {
                "target_tensor": batch(),
                "module_name": "a",
                "tensor_name": "b",
                "rank_list": [0],
                "ops_list": ["norm"],
            }
            try:
                monitor.adhoc_check(**{**call, **wrong})
            except Exception as error:
                seen.setdefault("errors", []).append(f"{type(error).__name__}: {error}")
    loss.backward()
    if monitor is not None:
        seen["under_way"] = monitor.generate_xy_metrics()
    optimizer.step()
    step(model, optimizer, 4)
    return {"weights": digest(model)}


@scenario
def memory_only(watch: Any) -> Any:
    chunks = [Net(), nn.Linear(3, 3)]
    optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.1)
    monitor = watch(chunks, optimizer, format="api", wg_distribution=True)
    step(chunks[0], optimizer, 0, lambda x: chunks[1](chunks[0](x)))
    if monitor is not None:
        watch.seen["xy"] = monitor.generate_xy_metrics()
    return {"weights": digest(*chunks)}


def targets(watch: Any, names: Any, **config: Any) -> Any:
    class Two(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2, x * 3

    model = nn.Sequential()
    model.fc, model.two, model.blocks = nn.Linear(8, 8), Two(), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    optimizer = sgd(model)
    watch(model, optimizer, targets=names, **config)

    def call(x: Any) -> Any:
        a, b = model.two(model.fc(x))
        return model.blocks[0](a) + model.blocks[1](b)

    return {"losses": [step(model, optimizer, 0, call)], "weights": digest(model)}


TARGETS: dict[str, Any] = {
    "one": ({"fc": {}}, {"all_xy": False}),
    "pattern": ({"blocks.*": {"output": "tensor"}}, {"all_xy": False}),
    "stage": ({"0:fc": {"input": "tensor", "output_grad": "tensor"}}, {"all_xy": False}),
    "place": ({"two": {"output": "tuple[2]:1", "output_grad": "tuple[2]:0"}}, {"all_xy": False}),
    "all": ({"two": {"output": "tuple[2]:1"}}, {"all_xy": True}),
    "nothing": ({"fcc": {}, "blocks.7": {}}, {"all_xy": False}),
    "forward": ({}, {"forward_only": True}),
    "backward": ({}, {"backward_only": True}),
    "neither": ({}, {"forward_only": True, "backward_only": True}),
}
for _name, (_targets, _config) in TARGETS.items():
    SCENARIOS[f"targets_{_name}"] = lambda watch, names=_targets, config=_config: targets(watch, names, **config)


def run(name: str, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for on in (False, True):
        torch.manual_seed(5)
        os.environ["MONITOR_OUTPUT_DIR"] = str(folder / name)
        watch = Watch(on)
        said = io.StringIO()
        key = "watched" if on else "bare"
        real, sys.__stderr__ = sys.__stderr__, said  # type: ignore[misc]  # where msmon writes
        try:
            result[key] = SCENARIOS[name](watch)
        except BaseException:
            result[key] = {"error": traceback.format_exc()}
        for monitor in watch.monitors:
            monitor.close()
        sys.__stderr__ = real  # type: ignore[misc]
        result[f"{key}_said"] = said.getvalue()
    return {**result, "seen": watch.seen}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = {name: run(name, folder) for name in sys.argv[2:] or SCENARIOS}
    (folder / "seen.json").write_text(json.dumps(results))
