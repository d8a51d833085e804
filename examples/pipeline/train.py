"""Train a network of two halves, one a process: a pipeline of micro-batches (``torch.distributed.pipelining``).

    torchrun --standalone --nproc-per-node 2 examples/pipeline/train.py

It learns to tell points inside a ring from those outside. Nothing here knows of a monitor.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def points(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.rand(count, 2, generator=generator) * 4 - 2
    distance = places.norm(dim=1, keepdim=True)
    return places, ((distance > 0.7) & (distance < 1.4)).float()


def make_stage(rank: int, width: int) -> nn.Module:
    if rank == 0:
        return nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-2)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = make_stage(rank, arguments.width)
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, arguments.micro_batches, loss_fn=nn.functional.binary_cross_entropy_with_logits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)

    generator = torch.Generator().manual_seed(0)  # all processes draw the same points
    for step in range(arguments.steps):
        places, inside = points(arguments.batch, generator)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(places)
        else:
            schedule.step(target=inside, losses=losses)
        optimizer.step()
        if losses and (step % 20 == 19 or step == 0):
            print(f"step {step + 1:4d}  loss {torch.stack(losses).mean().item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
