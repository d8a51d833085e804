"""Train a small network with Hugging Face's accelerate, two micro-batches a step.

    python examples/accelerate/train.py

It learns to tell points inside a ring from those outside. Nothing here knows of a monitor.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn


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
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model = make_model(arguments.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    data = torch.utils.data.TensorDataset(
        *points(2 * arguments.batch * arguments.steps, torch.Generator().manual_seed(0))
    )
    loader = torch.utils.data.DataLoader(data, batch_size=arguments.batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, (places, inside) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = nn.functional.binary_cross_entropy_with_logits(model(places), inside)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if number % 40 == 39 or number == 1:
            accelerator.print(f"step {number // 2 + 1:4d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
