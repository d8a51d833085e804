"""Models of every shape, each trained for three steps; what an oracle saw of their modules goes to ``truth.json``.

The oracle is a twin with the same weights, without in-place operations, without checkpoints, in which torch's own full
backward hooks see the gradients. ``python activations.py MODE NAME…``: ``plain`` trains and prints a digest of all bits,
``truth`` trains and lets the oracle watch the twin.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

MODELS: dict[str, type[nn.Module]] = {}
BATCH, WIDTH = 6, 8


def model(cls: type[nn.Module]) -> type[nn.Module]:
    MODELS[cls.__name__] = cls
    return cls


class Base(nn.Module):
    """``twin``: the same function without in-place operations and checkpoints."""

    def __init__(self, twin: bool) -> None:
        super().__init__()
        self.twin = twin

    def inputs(self, seed: int) -> tuple[Any, ...]:
        return (torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed)),)

    def checkpointed(self, function: Any, *args: Any, reentrant: bool) -> Any:
        return function(*args) if self.twin else checkpoint(function, *args, use_reentrant=reentrant)


@model
class InPlace(Base):
    """In-place activations, in-place residual adds, an in-place write to the output of a module."""

    def __init__(self, twin: bool) -> None:
        super().__init__(twin)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.relu = nn.ReLU(inplace=not twin)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.0, inplace=not twin)
        self.branch = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(inplace=not twin))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.stem(x)))
        x = self.drop(x)
        y = self.branch(x * 2)
        if self.twin:
            y = y + x
            scale = torch.ones_like(y)
            scale[:, 0] = 0.5
            return self.head(y * scale)
        y += x
        y[:, 0] *= 0.5
        return self.head(y)


@model
class Parallel(Base):
    """Tensors with several consumers, one of which uses them more than once; a module without parameters."""

    def __init__(self, twin: bool) -> None:
        super().__init__(twin)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Mixing()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.same = nn.Identity()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return self.head(self.same(x + self.attention(h) + self.mlp(h) + 0.1 * h))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.q(x) @ self.k(x).T, -1) @ self.v(x)


@model
class Shared(Base):
    """A module that is called three times, and one inside it."""

    def __init__(self, twin: bool) -> None:
        super().__init__(twin)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Bundle:
    hidden: torch.Tensor
    extra: Any = None


class Returns(nn.Module):
    """Returns whatever it is told to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *rest: Any, scale: Any = None) -> Any:
        y = self.linear(x) if scale is None else self.linear(x) * scale["by"]
        ways = {
            "tuple": (y, 2 * y, None),
            "list": [y, [3 * y, "text"]],
            "dict": {"y": y, "z": {"deep": -y}},
            "output": OrderedDict(last_hidden_state=y, loss=y.mean()),
            "named": Pair(y, y * y),
            "dataclass": Bundle(y, (y.exp(), 7)),
        }
        return ways[self.how]


@model
class Structures(Base):
    """Tensors anywhere in arguments, keyword arguments, tuples, lists, dicts, dataclasses and named tuples."""

    def __init__(self, twin: bool) -> None:
        super().__init__(twin)
        self.parts = nn.ModuleDict(
            {how: Returns(how) for how in ("tuple", "list", "dict", "output", "named", "dataclass")}
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = {"by": x.sigmoid()}
        a, b, _ = self.parts["tuple"](x, [x * 2, (None,)], scale=scale)
        c = self.parts["list"](a)[1][0]
        d = self.parts["dict"](b + c)["z"]["deep"]
        e = self.parts["output"](d)
        f = self.parts["named"](e["last_hidden_state"] + e["loss"])
        g = self.parts["dataclass"](f.first * 0.1 + f.second * 0.01)
        return self.head(g.hidden + g.extra[0] * 0.01)


@model
class Recurrent(Base):
    """Modules whose one node makes several outputs, some of which nobody uses."""

    def __init__(self, twin: bool) -> None:
        super().__init__(twin)
        self.embedding = nn.Embedding(11, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def inputs(self, seed: int) -> tuple[Any, ...]:
        return (torch.randint(0, 11, (BATCH, 5), generator=torch.Generator().manual_seed(seed)),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(self.embedding(x))
        _, last = self.gru(out)
        return self.head(last[0])


@model
class Transformer(Base):
    """torch's own attention and encoder layer."""

    def __init__(self, twin: bool) -> None:
        super().__init__(twin)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def inputs(self, seed: int) -> tuple[Any, ...]:
        return (torch.randn(BATCH, 4, WIDTH, generator=torch.Generator().manual_seed(seed)),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        mixed, _ = self.attention(x, x * 2, x * 3)
        return self.head(mixed).mean(1)


@model
class Recomputed(Base):
    """Checkpoints that keep the graph's own forward."""

    def __init__(self, twin: bool) -> None:
        super().__init__(twin)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=not twin)) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + self.checkpointed(block, x, reentrant=False)
        return self.head(x)


@model
class Reentrant(Recomputed):
    """Checkpoints whose graph is made in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = x + self.checkpointed(block, x, reentrant=True)
        return self.head(x)


@model
class Frozen(Base):
    """A part that needs no gradient, one that runs under ``no_grad``, one module in evaluation mode."""

    def __init__(self, twin: bool) -> None:
        super().__init__(twin)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.detached = nn.Linear(WIDTH, WIDTH)
        self.fixed = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.fixed.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x)
        with torch.no_grad():
            side = self.detached(x)
        return self.head(self.fixed(x) + side)


@model
class Convolutional(Base):
    """bfloat16 under autocast, images, a channels-last layout."""

    def __init__(self, twin: bool) -> None:
        super().__init__(twin)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU6(inplace=not twin)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 3)

    def inputs(self, seed: int) -> tuple[Any, ...]:
        images = torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        return (images.to(memory_format=torch.channels_last),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.head(self.pool(self.relu(self.norm(self.conv(x)))).flatten(1)).float()


def make(name: str, *, twin: bool) -> Any:
    torch.manual_seed(3)
    return MODELS[name](twin).train(True) if name != "Frozen" else MODELS[name](twin)


def losses(network: Any, step: int, micro: int) -> torch.Tensor:
    return network(*network.inputs(100 * step + micro)).pow(2).mean() / 2


def train(name: str, oracle: Oracle | None = None) -> str:
    network, digest = make(name, twin=False), hashlib.sha256()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    twin = make(name, twin=True) if oracle else None
    for step in range(3):
        for micro in range(2):
            if oracle and twin is not None:
                twin.load_state_dict(network.state_dict())
                with oracle.watching(twin, name, step, micro):
                    losses(twin, step, micro).backward()
            loss = losses(network, step, micro)
            loss.backward()
            digest.update(loss.detach().numpy().tobytes())
            with torch.no_grad():
                network(*network.inputs(1))  # a rollout
            training = network.training
            network.eval()
            network(*network.inputs(2))
            network.train(training)
            if name == "Frozen":
                network.fixed.eval()
        optimizer.step()
        optimizer.zero_grad()
    for parameter in network.state_dict().values():
        digest.update(parameter.numpy().tobytes())
    return digest.hexdigest()


def statistics(tensor: torch.Tensor) -> dict[str, float]:
    x = tensor.detach().to(torch.float64).numpy()
    return {
        "min": float(x.min()), "max": float(x.max()), "norm": float(np.sqrt((x**2).sum())), "mean": float(x.mean()),
        "zeros": float((np.abs(x) < 1e-8).mean()), "nans": float(np.isnan(x).sum()),
    }  # fmt: skip


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in flat(item)] if isinstance(value, (list, tuple)) else []


class Oracle:
    """Looks with torch's own hooks."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def watching(self, twin: Any, name: str, step: int, micro: int) -> Any:
        import contextlib

        oracle, calls = self, {}
        handles: list[Any] = []

        def label(module_name: str, call: int, side: str, ending: str) -> str:
            module_name = f"{name}.{module_name}".rstrip(".")
            return f"{module_name}{f'@{call}' if call else ''}.{side}{ending}"

        def endings(*given: tuple[str, int]) -> list[str]:
            """Of each tensor, where so many are in each argument: all positional ones together, keywords by name."""
            return [owner + (f"_{index}" if count > 1 else "") for owner, count in given for index in range(count)]

        def add(kind: str, row: str, tensor: torch.Tensor) -> None:
            oracle.rows.append({"kind": kind, "name": row, "step": step, "micro_step": micro, **statistics(tensor)})

        def watch(module_name: str, module: nn.Module) -> None:
            def before(module: Any, args: Any, kwargs: Any) -> Any:
                if not module.training:
                    return None
                number = calls.get(module_name, 0)
                calls[module_name] = number + 1
                tensors = flat([args, kwargs])
                keywords = [(f".{key}", len(flat(value))) for key, value in kwargs.items()]
                ends = endings(("", len(flat(args))), *keywords)
                for end, tensor in zip(ends, tensors, strict=True):
                    add("actv", label(module_name, number, "input", end), tensor)
                if not torch.is_grad_enabled():
                    return None
                # a view of every input that needs a gradient: what comes back through it is this module's share
                seen: dict[int, int] = {}

                def replace(value: Any) -> Any:
                    if isinstance(value, torch.Tensor):
                        index = seen.setdefault(-1, -1) + 1
                        seen[-1] = index
                        if not value.requires_grad:
                            return value
                        view = value.view_as(value)
                        row = label(module_name, number, "input", ends[index])
                        view.register_hook(lambda g: add("actv_grad", row, g))
                        return view
                    if isinstance(value, dict):
                        return {key: replace(item) for key, item in value.items()}
                    if isinstance(value, (list, tuple)):
                        return type(value)(replace(item) for item in value)
                    return value

                return replace(args), replace(kwargs)

            def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
                if not module.training:
                    return
                number = calls[module_name] - 1
                tensors = flat(output)
                for end, tensor in zip(endings(("", len(tensors))), tensors, strict=True):
                    row = label(module_name, number, "output", end)
                    add("actv", row, tensor)
                    if tensor.requires_grad and torch.is_grad_enabled():
                        tensor.register_hook(lambda g, row=row: add("actv_grad", row, g))

            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after, with_kwargs=True))

        @contextlib.contextmanager
        def watching() -> Any:
            for module_name, module in twin.named_modules():
                watch(module_name, module)
            yield
            for handle in handles:
                handle.remove()
            twin.zero_grad()

        return watching()


if __name__ == "__main__":
    mode, *names = sys.argv[1:]
    spare = nn.Linear(1, 1)
    holder = torch.optim.SGD(spare.parameters())  # a second model, so that every name begins with its model's class
    spare(torch.ones(1)).sum().backward()
    oracle = Oracle() if mode == "truth" else None
    for chosen in names or MODELS:
        print(chosen, train(chosen, oracle), flush=True)
    if oracle is not None:
        with open(os.environ["TRUTH"], "w") as file:  # noqa: PTH123 - a script like a user's
            json.dump(oracle.rows, file)
