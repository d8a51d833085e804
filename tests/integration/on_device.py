"""Trains a little model on the device that is named; losses, weights, and what made the host wait, go to ``$TRUTH``."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

MICRO_BATCHES, STEPS = 2, 4


class Core(nn.Module):
    """Causal attention of ``[b, s, h, d]``."""

    is_causal = True

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """An embedding, a block of attention, a gate, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.core = Core()
        self.gate = nn.Linear(16, 4, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: Any) -> Any:
        hidden = self.embedding(tokens)
        hidden = hidden + self.core(*(part.unflatten(-1, (2, 8)) for part in self.qkv(self.norm(hidden)).split(16, -1)))
        return self.head(self.dropout(hidden) * self.gate(hidden).softmax(-1).amax(-1, keepdim=True))


class Observer:
    """Notes what makes the host wait in a step."""

    def __init__(self, device: str) -> None:
        self.waited: list[list[str]] = []
        self.copies: list[list[int]] = []
        self.device = device
        if device == "npu":
            import fake_npu

            self.npu = fake_npu
            self.mode = fake_npu.install()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        if self.device == "npu":
            self.npu.SYNCHRONISED.clear()
            self.npu.COPIES.clear()
        if self.device == "cuda" and number > 0:  # in the first one the kernel is tried out, which waits
            torch.cuda.set_sync_debug_mode("error")
        yield
        if self.device == "npu":
            main = threading.main_thread().name
            self.waited.append([what for thread, what in list(self.npu.SYNCHRONISED) if thread != "msmon-writer"])
            self.copies.append([count for thread, count in self.npu.COPIES if thread == main])
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def main(device: str) -> None:
    observer = Observer(device)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randint(0, 20, (STEPS, MICRO_BATCHES, 3, 5), generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for step in range(STEPS):
        with observer.step(step):
            optimizer.zero_grad()
            for tokens in data[step]:
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / MICRO_BATCHES
                loss.backward()
                losses.append(loss.detach().clone())
                dist.all_reduce(losses[-1])
            optimizer.step()
    result = {
        "losses": [loss.item().hex() for loss in losses],
        "weights": {name: value.cpu().tolist() for name, value in model.state_dict().items()},
        "waited": observer.waited,
        "copies": observer.copies,
        "imported": [name for name in sys.modules if name.startswith("torch_npu")],
    }
    Path(os.environ["TRUTH"]).write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
