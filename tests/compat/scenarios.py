"""Seeded trainings, each watched by whichever monitor is named: ``python scenarios.py {original|msmon} FOLDER``.

Runs in the environment of either monitor, so it needs torch and nothing else. Every scenario runs in forked processes
of its own (two of them for the distributed ones), and its output goes to ``FOLDER/<scenario>``; what a scenario raised
goes to ``FOLDER/<scenario>/error``.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

SIX = ["min", "max", "norm", "mean", "zeros", "nans"]
EVERYTHING = {"wg_distribution": True, "param_distribution": True, "mv_distribution": True}
GRADIENTS = {"wg_distribution": True}
INPUTS = torch.tensor([[1.0, 2, 3], [-1, 0.5, 2], [0, 0, 1], [2, -1, 1]])

SCENARIOS: dict[str, Any] = {}
RANKS: dict[str, int] = {}
TrainerMon: Any = None


def scenario(ranks: int = 1) -> Any:
    """Register a training under its function's name."""

    def register(function: Any) -> Any:
        name = function.__name__.replace("_", "-")
        SCENARIOS[name], RANKS[name] = function, ranks
        return function

    return register


def watch(model: Any, optimizer: Any, config: dict[str, Any], *, main_grad: bool = False, **more: Any) -> Any:
    """Watch a model: six statistics, sixteen digits, every parameter, unless the configuration says otherwise."""
    path = Path(os.environ["MONITOR_OUTPUT_DIR"]).parent / f"config-{os.getpid()}.json"
    path.write_text(json.dumps({"targets": {}, "format": "csv", "ops": SIX, "ndigits": 16, **config}))
    monitor = TrainerMon(str(path), params_have_main_grad=main_grad)
    monitor.set_monitor(model=model, optimizer=optimizer, **{"grad_acc_steps": 1, **more})
    return monitor


def little_model() -> nn.Sequential:
    """The model of the measured values: linear, ReLU, linear, with fixed weights."""
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(3, 2))
    model.add_module("act", nn.ReLU())
    model.add_module("out", nn.Linear(2, 1))
    with torch.no_grad():
        model.fc.weight.copy_(torch.tensor([[0.5, -1, 2], [1, 1, 1]]))
        model.fc.bias.copy_(torch.tensor([0.1, -0.2]))
        model.out.weight.copy_(torch.tensor([[1.0, -3]]))
        model.out.bias.copy_(torch.tensor([0.25]))
    return model


def train_little(config: dict[str, Any], steps: int = 3, micro_batches: int = 1, **more: Any) -> None:
    """Train the little model with Adam; the second of two micro-batches is twice the first."""
    model = little_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    watch(model, optimizer, config, grad_acc_steps=micro_batches, **more)
    for _ in range(steps):
        optimizer.zero_grad()
        for number in range(micro_batches):
            (model((number + 1) * INPUTS).pow(2).mean() / micro_batches).backward()
        optimizer.step()


class Transformer(nn.Module):
    """A few parameters under the names that real models give them."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            *path, last = name.split(".")
            owner: Any = self
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, nn.Parameter(torch.randn(2, 3)))

    def forward(self) -> torch.Tensor:
        return sum((number + 1) * p.pow(2).mean() for number, p in enumerate(self.parameters()))  # type: ignore[return-value]


def train(
    model: nn.Module, inputs: Any, config: dict[str, Any], steps: int = 3, make: Any = torch.optim.AdamW, **more: Any
) -> None:
    """Train any model on the mean square of its output."""
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=0.01)
    watch(model, optimizer, config, **more)
    for _ in range(steps):
        optimizer.zero_grad()
        model(*inputs).float().pow(2).mean().backward()
        optimizer.step()


def seeded(width: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 2, bias=False))


def batch(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(5, 6, generator=torch.Generator().manual_seed(2)).to(dtype)]


# The kinds of data


@scenario()
def little() -> None:
    train_little(EVERYTHING)


@scenario()
def network() -> None:
    train(seeded(300), batch(), EVERYTHING)


@scenario()
def directions() -> None:
    train_little({"mg_direction": True}, steps=4)


@scenario()
def directions_of_a_network() -> None:
    train(seeded(), batch(), {"mg_direction": True, "ops": ["mean", "norm", "zeros"]}, steps=4)


class Mixture(nn.Module):
    """Causal attention of one head, and a router."""

    class Core(nn.Module):
        def forward(self, query: Any, key: Any, value: Any, is_causal: bool = True) -> Any:
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
            return attended.permute(2, 0, 1, 3).flatten(2)

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 24)
        self.core = self.Core()
        self.router = nn.Linear(8, 4, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (t[:, :, None] for t in self.qkv(inputs).chunk(3, -1))
        return self.router(self.core(query, key, value))  # type: ignore[no-any-return]  # a tensor


def train_mixture(targets: dict[str, list[str]], samples: int = 1) -> None:
    torch.manual_seed(3)
    model = Mixture()
    config = {"recording_l2_features": True, "l2_targets": targets, "sa_order": "s,b,h,d"}
    train(model, [torch.randn(9, samples, 6)], config)


@scenario()
def high_order_features() -> None:
    train_mixture({
        "attention_hook": ["0:core"],
        "moe_router_weight_hook": ["0:router"],
        "moe_router_logit_hook": ["0:router"],
    })  # fmt: skip


@scenario()
def high_order_features_of_no_module() -> None:
    train_mixture({"attention_hook": [], "moe_router_weight_hook": [], "moe_router_logit_hook": []})


@scenario()
def attention_of_two_samples() -> None:
    train_mixture({"attention_hook": ["0:core"]}, samples=2)


@scenario()
def spectral_norms() -> None:
    train_mixture({"linear_hook": ["0:qkv"]})


@scenario()
def spectral_norms_of_all() -> None:
    train_mixture({"linear_hook": []})


@scenario()
def accumulation() -> None:
    train_little(GRADIENTS, micro_batches=2)


@scenario()
def accumulation_every_micro_batch() -> None:
    train_little({**GRADIENTS, "monitor_mbs_grad": True}, micro_batches=2)


@scenario()
def clipped() -> None:
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters())
    watch(model, optimizer, GRADIENTS)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        model(*batch()).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@scenario()
def bfloat16() -> None:
    train(seeded(40).bfloat16(), batch(torch.bfloat16), EVERYTHING)


@scenario()
def float64() -> None:
    train(seeded(40).double(), batch(torch.float64), EVERYTHING)


@scenario()
def shapes() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.PReLU(1), nn.Flatten(), nn.Linear(12, 1))
    model.register_parameter("temperature", nn.Parameter(torch.tensor(0.5)))
    model.register_forward_hook(lambda module, _, output: output * module.temperature)
    train(model, [torch.randn(2, 2, 3, 3)], EVERYTHING)


@scenario()
def several_optimizer_states() -> None:
    train(seeded(), batch(), {"mv_distribution": True}, make=lambda p, lr: torch.optim.Adam(p, lr=lr, amsgrad=True))


@scenario()
def momentum() -> None:
    train(seeded(), batch(), {"mv_distribution": True}, make=lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))


@scenario()
def stateless() -> None:
    train(seeded(), batch(), EVERYTHING, make=torch.optim.SGD)


@scenario()
def not_a_number() -> None:
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer, GRADIENTS)
    for factor in (1.0, float("inf"), float("nan")):
        optimizer.zero_grad()
        (model(*batch()).mean() * factor).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)


@scenario()
def zeros() -> None:
    model = nn.Embedding(10, 3)
    optimizer = torch.optim.Adam(model.parameters())
    watch(model, optimizer, {**EVERYTHING, "eps": 0.01})
    for step in range(3):
        optimizer.zero_grad()
        (model(torch.tensor([1, 1, step + 2])) * torch.tensor([1, 0.009, 3])).sum().backward()
        optimizer.step()


# Which steps, which parameters, which files


@scenario()
def some_steps() -> None:
    train_little({**EVERYTHING, "start_step": 1, "step_interval": 2, "collect_times": 2}, steps=8)


@scenario()
def steps_per_file() -> None:
    train_little({**EVERYTHING, "step_count_per_record": 3}, steps=7)


@scenario()
def start_iteration() -> None:
    train_little(EVERYTHING, start_iteration=10)


@scenario()
def start_iteration_some_steps() -> None:
    train_little(
        {**GRADIENTS, "start_step": 11, "step_interval": 2, "step_count_per_record": 4}, steps=8, start_iteration=10
    )


@scenario()
def targets() -> None:
    torch.manual_seed(1)
    train(
        Transformer(
            [
                "embed.weight",
                "layers.1.mlp.weight",
                "layers.1.mlp.bias",
                "layers.10.mlp.weight",
                "layers.2.weight",
                "head",
            ]
        ),
        [],
        {**EVERYTHING, "targets": {"layers.1": {}, "head": {"output": "tensor"}}},
    )


@scenario()
def another_rank() -> None:
    train_little({**EVERYTHING, "module_ranks": [1]})


@scenario()
def few_digits() -> None:
    train_little({**EVERYTHING, "ndigits": 4}, micro_batches=2)


@scenario()
def small_values() -> None:
    model = little_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    watch(model, optimizer, {"wg_distribution": True, "mv_distribution": True, "ndigits": 6})
    for _ in range(2):
        optimizer.zero_grad()
        (model(INPUTS).pow(2).mean() * 1e-6).backward()
        optimizer.step()


@scenario()
def columns() -> None:
    train_little({**GRADIENTS, "ops": ["nans", "dtype", "norm", "max"]})


@scenario()
def execution_order() -> None:
    train_little({**EVERYTHING, "ops": ["id", "norm"]})


@scenario()
def no_ops() -> None:
    train_little({**GRADIENTS, "ops": []}, steps=1)


SQUASHED = {
    "usual": [
        "language_model.embedding.word_embeddings.weight",
        "language_model.encoder.layers.0.mlp.weight",
        "language_model.encoder.layers.1.mlp.weight",
        "language_model.encoder.final_layernorm.weight",
        "language_model.output_layer.weight",
    ],
    "hugging-face": [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.11.mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
    "bert": [
        "bert.embeddings.word_embeddings.weight",
        "bert.embeddings.LayerNorm.weight",
        "bert.encoder.layer.0.attention.output.dense.weight",
        "bert.encoder.layer.0.output.dense.weight",
        "bert.pooler.dense.weight",
        "cls.predictions.bias",
    ],
    "gpt": [
        "transformer.wte.weight",
        "transformer.h.0.ln_1.weight",
        "transformer.h.0.attn.c_attn.weight",
        "transformer.ln_f.weight",
    ],
    "landmarks": [
        "module.model.layers.3.layers.4.weight",
        "a.layer.weight",
        "b.embedding.weight",
        "c.final.weight",
        "d.output.weight",
        "e.norm.weight",
        "f.final_norm.weight",
        "g.output_layer.norm.weight",
        "h.layernorm.weight",
        "i.player.weight",
        "norm.weight",
        "layers.0.weight",
        "j.normalization.weight",
        "k.finale",
        "l.embed.weight",
    ],
    "clashing": ["encoder.layers.0.weight", "decoder.layers.0.weight", "decoder.layers.1.weight"],
}


def train_squashed(names: list[str]) -> None:
    torch.manual_seed(1)
    train(Transformer(names), [], {"param_distribution": True, "squash_name": True, "ops": ["norm"]}, steps=1)


for _kind, _names in SQUASHED.items():
    SCENARIOS[f"squash-{_kind}"] = lambda names=_names: train_squashed(names)
    RANKS[f"squash-{_kind}"] = 1


# Models and loops of other kinds


@scenario()
def frozen() -> None:
    model = seeded()
    model[0].requires_grad_(False)
    train(model, batch(), EVERYTHING)


@scenario()
def tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.embedding = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(tokens))

    train(Tied(), [torch.tensor([[0, 3, 3]])], EVERYTHING)


@scenario()
def tied_target() -> None:
    model = nn.Sequential()
    model.add_module("embedding", nn.Linear(3, 3, bias=False))
    model.add_module("head", nn.Linear(3, 3, bias=False))
    model.head.weight = model.embedding.weight
    train(model, [INPUTS], {**GRADIENTS, "targets": {"head": {}}})


@scenario()
def chunks() -> None:
    torch.manual_seed(1)
    first, second = nn.Linear(6, 3), nn.Linear(3, 2)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
    watch([first, second], optimizer, EVERYTHING)
    for _ in range(2):
        optimizer.zero_grad()
        second(first(*batch())).pow(2).mean().backward()
        optimizer.step()


@scenario()
def unused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer, GRADIENTS)
    for step in range(4):
        optimizer.zero_grad()
        model["b" if step == 1 else "a"](INPUTS).pow(2).mean().backward()
        optimizer.step()


@scenario()
def subset() -> None:
    model = little_model()
    optimizer = torch.optim.Adam(model.out.parameters(), lr=0.1)
    watch(model, optimizer, EVERYTHING)
    for _ in range(2):
        model.zero_grad()
        model(INPUTS).pow(2).mean().backward()
        optimizer.step()


@scenario()
def closure() -> None:
    model = little_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    watch(model, optimizer, GRADIENTS)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(INPUTS).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(evaluate)


@scenario()
def loss_scaling() -> None:
    model = little_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    watch(model, optimizer, GRADIENTS)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(INPUTS).pow(2).mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()


@scenario()
def evaluation_between() -> None:
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters())
    watch(model, optimizer, {**GRADIENTS, "monitor_mbs_grad": True})
    for _ in range(3):
        optimizer.zero_grad()
        model(*batch()).pow(2).mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(*batch())


@scenario()
def main_grad() -> None:
    model = little_model()
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)

        def accumulate(p: torch.Tensor) -> None:
            p.main_grad.add_(p.grad)

        parameter.register_post_accumulate_grad_hook(accumulate)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    watch(model, optimizer, GRADIENTS, main_grad=True)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.main_grad.zero_()
            parameter.grad = None
        model(INPUTS).pow(2).mean().backward()
        optimizer.step()


@scenario()
def no_main_grad() -> None:
    train_little(GRADIENTS, main_grad=True)


@scenario()
def scheduler_after() -> None:
    model = little_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer, GRADIENTS)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        optimizer.zero_grad()
        model(INPUTS).pow(2).mean().backward()
        optimizer.step()
        schedule.step()


@scenario()
def no_training() -> None:
    train_little(EVERYTHING, steps=0)


@scenario()
def exception_before_step() -> None:
    model = little_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    watch(model, optimizer, GRADIENTS)
    for step in range(3):
        optimizer.zero_grad()
        model(INPUTS).pow(2).mean().backward()
        if step == 1:
            raise SystemExit(3)
        optimizer.step()


@scenario()
def saved_and_copied() -> None:
    model = little_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    watch(model, optimizer, EVERYTHING)
    for _ in range(2):
        optimizer.zero_grad()
        model(INPUTS).pow(2).mean().backward()
        optimizer.step()
        torch.save(model, Path(os.environ["MONITOR_OUTPUT_DIR"]).parent / "model.pt")
        copied = copy.deepcopy(model)
        (100 * copied(INPUTS)).sum().backward()


@scenario()
def two_models() -> None:
    pairs = []
    torch.manual_seed(1)
    monitor = None
    for width in (2, 3):
        model = nn.Linear(3, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        pairs.append((model, optimizer))
        if monitor is None:
            monitor = watch(model, optimizer, GRADIENTS)
        else:
            monitor.set_monitor(model=model, grad_acc_steps=1, optimizer=optimizer)
    for _ in range(2):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(INPUTS).pow(2).mean().backward()
            optimizer.step()


@scenario()
def odd_names() -> None:
    torch.manual_seed(1)
    train(Transformer(["a:b", "c/d", "e,f", "g h"]), [], {**GRADIENTS, "ops": ["norm"]}, steps=1)


@scenario()
def formula_name() -> None:
    torch.manual_seed(1)
    train(Transformer(["=x"]), [], {**GRADIENTS, "ops": ["norm"]}, steps=1)


@scenario()
def sparse() -> None:
    model = nn.Embedding(10, 3, sparse=True)
    train(model, [torch.tensor([1, 1, 2])], GRADIENTS, make=torch.optim.SGD, steps=1)


@scenario()
def complex_numbers() -> None:
    model = nn.ParameterList([nn.Parameter(torch.tensor([3 + 4j, 1j]))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer, {"param_distribution": True})
    model[0].abs().sum().backward()
    optimizer.step()


@scenario()
def large_half() -> None:
    model = nn.ParameterList([nn.Parameter(torch.full((64,), 5000.0, dtype=torch.float16))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer, {"param_distribution": True})
    model[0].sum().backward()
    optimizer.step()


@scenario()
def huge_double() -> None:
    model = nn.ParameterList([nn.Parameter(torch.full((4,), 1e200, dtype=torch.float64))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer, {"param_distribution": True})
    model[0].sum().backward()
    optimizer.step()


@scenario()
def no_elements() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(0, 2)), nn.Parameter(torch.ones(1))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer, {**GRADIENTS, "param_distribution": True})
    (model[0].sum() + model[1].sum()).backward()
    optimizer.step()


@scenario()
def unused_in_first_micro_batch() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 1, bias=False), "b": nn.Linear(3, 1, bias=False)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch(model, optimizer, {**GRADIENTS, "monitor_mbs_grad": True, "ops": ["norm"]}, grad_acc_steps=2)
    for _ in range(2):
        optimizer.zero_grad()
        model["a"](INPUTS).pow(2).mean().backward()
        (model["a"](INPUTS) + model["b"](INPUTS)).pow(2).mean().backward()
        optimizer.step()


@scenario()
def more_micro_batches_than_said() -> None:
    model = little_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    watch(model, optimizer, {**GRADIENTS, "monitor_mbs_grad": True, "ops": ["norm"]}, grad_acc_steps=2)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(3):
            model(INPUTS).pow(2).mean().backward()
        optimizer.step()


@scenario()
def no_times() -> None:
    train_little({**EVERYTHING, "collect_times": 0})


# Configurations and arguments


for _name, _config in {
    "unknown-key": {"wg_distributions": True},
    "unknown-op": {"ops": ["norm", "bogus"]},
    "text-for-a-switch": {"mv_distribution": "false"},
    "negative-start": {"start_step": -1},
    "unknown-format": {"format": "json"},
    "zero-interval": {"step_interval": 0},
    "whole-number-for-eps": {"eps": 1},
    "whole-number-text": {"ndigits": "6"},
    "output-that-goes-on": {"append_output": ["Jan01_00-00-00", "Dec31_23-59-59"]},
    "alerts": {"alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True}},
    "directions": {"mg_direction": True},
}.items():
    SCENARIOS[f"config-{_name}"] = lambda config=_config: train_little({**GRADIENTS, **config}, steps=1)
    RANKS[f"config-{_name}"] = 1


# Activations


class Residual(nn.Module):
    """No module writes to its input or runs twice, and the input needs a gradient, so that every row has values."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.end = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        x = self.blocks[1](self.blocks[0](x))
        return self.end(self.norm(x))


def train_activations(model: nn.Module, config: dict[str, Any], steps: int = 3, micro_batches: int = 2) -> None:
    """Inputs that need a gradient; in evaluation between the steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer, {"xy_distribution": True, **config}, grad_acc_steps=micro_batches)
    for _ in range(steps):
        optimizer.zero_grad()
        for number in range(micro_batches):
            inputs = ((number + 1) * INPUTS).requires_grad_()
            found = model(inputs)
            found = found[0] if isinstance(found, tuple) else found
            (found.pow(2).mean() / micro_batches).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(INPUTS)
        model.train()


class Several(nn.Module):
    """Takes keyword arguments, returns tuples; a module runs twice, one writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.split = Halves()
        self.relu = nn.ReLU(inplace=True)
        self.end = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = self.split(x, more={"scale": x.exp()})
        return self.end(self.relu(left * 1)), self.end(right)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.fc(x + more["scale"])
        return y[:, :2], y[:, 2:]


for _name, _config in {
    "activations": {"all_xy": True},
    "activations-forward": {"all_xy": True, "forward_only": True},
    "activations-backward": {"all_xy": True, "backward_only": True},
    "activations-targets": {
        "targets": {"start": {"input": "tensor", "output": "tensor"}, "blocks.1": {"output_grad": "tensor"}}
    },
    "activations-several-steps": {"all_xy": True, "step_count_per_record": 2, "start_step": 1},
}.items():
    SCENARIOS[_name] = lambda config=_config: train_activations(Residual(), config)
    RANKS[_name] = 1
SCENARIOS["activations-structures"] = lambda: train_activations(Several(), {"all_xy": True}, micro_batches=1)
SCENARIOS["activations-no-gradient"] = lambda: train_little({"xy_distribution": True, "all_xy": True})
RANKS["activations-structures"] = RANKS["activations-no-gradient"] = 1


@scenario()
def argument_no_number() -> None:
    train_little(GRADIENTS, steps=1, start_iteration="abc")


@scenario()
def guide_order() -> None:
    model = little_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    path = Path(os.environ["MONITOR_OUTPUT_DIR"]).parent / "config.json"
    path.write_text(json.dumps({**GRADIENTS, "ndigits": 16}))
    TrainerMon(str(path), None, False).set_monitor(model, 1, optimizer)
    model(INPUTS).pow(2).mean().backward()
    optimizer.step()


@scenario()
def other_order() -> None:
    model = little_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    path = Path(os.environ["MONITOR_OUTPUT_DIR"]).parent / "config.json"
    path.write_text(json.dumps({**GRADIENTS, "ndigits": 16}))
    TrainerMon(str(path), None, False).set_monitor(model, optimizer, 1)
    model(INPUTS).pow(2).mean().backward()
    optimizer.step()


# Two ranks


def distributed(
    config: dict[str, Any], *, no_sync: bool = False, micro_batches: int = 1, mark: bool = False, **groups: str
) -> None:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.5)
    if mark:
        model.weight.tensor_model_parallel = True
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.1)
    watch(wrapped, optimizer, config, grad_acc_steps=micro_batches, **dict.fromkeys(groups, dist.group.WORLD))
    rows = torch.ones(3, 2) * (dist.get_rank() + 1)
    for _ in range(3):
        optimizer.zero_grad()
        for number in range(micro_batches):
            last = number == micro_batches - 1
            with contextlib.nullcontext() if last or not no_sync else wrapped.no_sync():
                wrapped(rows * (number + 1)).sum().backward()
        optimizer.step()


@scenario(ranks=2)
def two_ranks() -> None:
    distributed(EVERYTHING)


@scenario(ranks=2)
def two_ranks_data_parallel_group() -> None:
    distributed(EVERYTHING, dp_group="world")


@scenario(ranks=2)
def two_ranks_tensor_parallel_group() -> None:
    distributed(EVERYTHING, mark=True, tp_group="world")


@scenario(ranks=2)
def two_ranks_accumulation() -> None:
    distributed(GRADIENTS, no_sync=True, micro_batches=2)


@scenario(ranks=2)
def two_ranks_every_micro_batch() -> None:
    distributed({**GRADIENTS, "monitor_mbs_grad": True}, no_sync=True, micro_batches=2)


@scenario(ranks=2)
def two_ranks_one_watched() -> None:
    distributed({**EVERYTHING, "module_ranks": [1]})


def main(monitor: str, folder: Path, wanted: list[str]) -> None:
    global TrainerMon
    TrainerMon = importlib.import_module({"original": "msprobe.pytorch", "msmon": "msmon.pytorch"}[monitor]).TrainerMon
    torch.set_num_threads(1)
    warm_up()
    for name in wanted or SCENARIOS:
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        children = []
        for rank in range(RANKS[name]):
            child = os.fork()
            if child == 0:
                run_one(name, place, rank)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


def warm_up() -> None:
    """Load once what torch loads when it first trains, so that forked processes have it."""
    parameter = nn.Parameter(torch.ones(1))
    parameter.sum().backward()
    torch.optim.Adam([parameter]).step()


def run_one(name: str, place: Path, rank: int) -> NoReturn:
    """One rank of a scenario, in a process of its own, which ends here without taking Python down part by part."""
    os.environ["MONITOR_OUTPUT_DIR"] = str(place / "out")
    for descriptor, name_of_file in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(place / f"{name_of_file}-{rank}", os.O_CREAT | os.O_WRONLY), descriptor)
    torch.manual_seed(0)
    try:
        if RANKS[name] > 1:
            dist.init_process_group("gloo", f"file://{place}/rendezvous", rank=rank, world_size=RANKS[name])
        SCENARIOS[name]()
    except (Exception, SystemExit):
        (place / "error").write_text(traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        atexit._run_exitfuncs()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
