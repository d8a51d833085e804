"""Train a small network whose layers are split over processes: tensor parallelism with ``DTensor``.

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel/train.py

It learns to tell points inside a ring from those outside. Nothing here knows of a monitor.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def points(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.rand(count, 2, generator=generator) * 4 - 2
    distance = places.norm(dim=1, keepdim=True)
    return places, ((distance > 0.7) & (distance < 1.4)).float()


def make_model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-2)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = make_model(arguments.width)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, foreach=False)
    generator = torch.Generator().manual_seed(0)  # all processes draw the same points
    for step in range(arguments.steps):
        places, inside = points(arguments.batch, generator)
        loss = nn.functional.binary_cross_entropy_with_logits(model(places), inside)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and (step % 20 == 19 or step == 0):
            print(f"step {step + 1:4d}  loss {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads end on their own


if __name__ == "__main__":
    main()
