"""A training under a torch that lacks some of its private names, in which much of what msmon hooks happens.

``python missing_symbols.py FILE NAME…`` deletes the names, trains, and writes the losses and the weights to the bit.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint


def delete(name: str) -> None:
    *path, last = name.split(".")[1:]
    owner: Any = torch
    for part in path:
        owner = getattr(owner, part)
    delattr(owner, last)


def main() -> dict[str, Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    losses = []
    for step in range(4):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        hidden = model[1](model[0](x))
        if hasattr(torch._C, "_current_graph_task_id"):  # torch's own checkpoints need it
            hidden = checkpoint(model[2], hidden, use_reentrant=bool(step % 2))
        else:
            hidden = model[2](hidden)
        loss = model[3](hidden).pow(2).mean() + model(x).sin().mean()
        scaler.scale(loss).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item().hex())
    dist.destroy_process_group()
    time.sleep(0.2)  # see conftest.SETTLE
    return {"losses": losses, "weights": [parameter.tolist() for parameter in model.parameters()]}


if __name__ == "__main__":
    for _name in sys.argv[2:]:
        delete(_name)
    Path(sys.argv[1]).write_text(json.dumps(main()))
