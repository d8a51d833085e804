"""A little language model with experts; ``python features.py [library]`` trains it and prints what came of it.

Run alone, under ``msmon run``, or with the library. Beside the training it notes what each feature should have been, in
float64 NumPy, from copies of the tensors: ``truth.json``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

MICRO_BATCHES, STEPS = 2, 3


class Core(nn.Module):
    """Causal attention of ``[b, s, h, d]``, with fewer heads of the key."""

    is_causal = True

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        key, value = (tensor.repeat_interleave(2, 1) for tensor in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Attention, then experts of which each token takes a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 32)
        self.core = Core()
        self.other = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, inputs: Any) -> Any:
        query, key, value = self.qkv(inputs).split([16, 8, 8], -1)
        hidden = inputs + self.core(
            query.unflatten(-1, (4, 4)), key.unflatten(-1, (2, 4)), value=value.unflatten(-1, (2, 4))
        )
        hidden = hidden + self.other(hidden, hidden, hidden, need_weights=False)[0]
        shares = self.gate(hidden).softmax(-1)
        return hidden + sum(
            share[..., None] * expert(hidden) for share, expert in zip(shares.unbind(-1), self.experts, strict=True)
        )


class Model(nn.Module):
    """Blocks, the second one computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: Any) -> Any:
        hidden = self.blocks[0](self.embedding(tokens))
        return self.head(checkpoint(self.blocks[1], hidden, use_reentrant=False))


def attention_features(scores: Any) -> list[float]:
    scores = scores - scores.max(-1, keepdims=True)
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True)
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
    return [float(entropy.mean()), float(weights.max(-1).mean())]


class Truth:
    """Features by kind, name, step and micro-batch, from what hooks of the script's own see."""

    def __init__(self, model: Model) -> None:
        self.rows: dict[str, list[float]] = {}
        self.step = self.micro = 0
        self.again = False
        for number, block in enumerate(model.blocks):
            name = f"blocks.{number}"
            block.core.register_forward_hook(lambda m, a, o, n=name: self.core(f"{n}.core", *a), with_kwargs=False)
            block.other.register_forward_hook(lambda m, a, o, n=name: self.other(f"{n}.other", m, *a))
            block.gate.register_forward_hook(lambda m, a, o, n=name: self.gate(f"{n}.gate", m, o))
        for name, module in model.named_modules():
            if hasattr(module, "weight"):
                module.register_forward_hook(lambda m, a, o, n=name: self.linear(n, m))

    def note(self, kind: str, name: str, numbers: list[float], *, by_micro_step: bool = True) -> None:
        if torch._C._current_graph_task_id() == -1 and torch.is_grad_enabled() and not self.again:
            key = json.dumps([kind, name, self.step, self.micro if by_micro_step else None])
            self.rows.setdefault(key, numbers)

    def core(self, name: str, query: Any, key: Any) -> None:
        q, k = (tensor.detach().double().numpy().transpose(0, 2, 1, 3) for tensor in (query, key))
        scores = q @ np.repeat(k, 2, axis=1).transpose(0, 1, 3, 2) / math.sqrt(4)
        scores = np.where(np.tril(np.ones(scores.shape[-2:], dtype=bool)), scores, -np.inf)
        self.note("attention_hook", f"{name}.attention", attention_features(scores))

    def other(self, name: str, module: Any, query: Any, key: Any, value: Any) -> None:
        inputs = query.detach().double().numpy()
        weight, bias = (p.detach().double().numpy() for p in (module.in_proj_weight, module.in_proj_bias))
        q, k = (inputs @ weight[part].T + bias[part] for part in (slice(0, 16), slice(16, 32)))
        q, k = (t.reshape(*t.shape[:2], 2, 8).transpose(0, 2, 1, 3) for t in (q, k))
        scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(8)
        self.note("attention_hook", f"{name}.attention", attention_features(scores))

    def gate(self, name: str, module: Any, logits: Any) -> None:
        entropy = attention_features(logits.detach().double().numpy())[0]
        self.note("moe_router_logit_hook", f"{name}.moe_router", [entropy])
        weight = module.weight.detach().double().numpy()
        units = weight / np.linalg.norm(weight, axis=1, keepdims=True)
        cosines = (units @ units.T)[~np.eye(4, dtype=bool)]
        self.note("moe_router_weight_hook", f"{name}.moe_router", [float(cosines.mean())], by_micro_step=False)

    def linear(self, name: str, module: Any) -> None:
        values = np.linalg.svd(module.weight.detach().double().numpy(), compute_uv=False)
        numbers = [float(np.sqrt((values**2).sum()) / values[0]), float(values[0])]
        self.note("linear_hook", f"{name}.linear", numbers, by_micro_step=False)


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    truth = Truth(model) if "TRUTH" in os.environ else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if "library" in sys.argv:
        from msmon.pytorch import TrainerMon

        monitor = TrainerMon(os.environ["CONFIG"], params_have_main_grad=False)
        monitor.set_monitor(model, MICRO_BATCHES, optimizer)
    losses = []
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            if truth is not None:
                truth.step, truth.micro = step, micro
            tokens = torch.randint(0, 20, (3, 9))
            loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            (loss / MICRO_BATCHES).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(torch.randint(0, 20, (1, 4)))
        model.train()
    digest = hashlib.sha256()
    for tensor in [*model.state_dict().values(), torch.get_rng_state()]:
        digest.update(tensor.numpy().tobytes())
    if truth is not None:
        Path(os.environ["TRUTH"]).write_text(json.dumps(truth.rows))
    print([loss.hex() for loss in losses], digest.hexdigest())


if __name__ == "__main__":
    main()
