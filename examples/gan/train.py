"""Train a generative adversarial network on eight Gaussians in a ring.

    python examples/gan/train.py

Two models, two optimizers. ``distance`` says how far generated points are from real ones; two samples of real points are
some 0.01 apart. Nothing here knows of a monitor.
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

GAUSSIANS = 8
DEVIATION = 0.1


class Generator(nn.Module):
    """Turns noise into points of the plane."""

    def __init__(self, noise: int, width: int) -> None:
        super().__init__()
        self.noise = noise
        self.main = nn.Sequential(
            nn.Linear(noise, width),
            nn.BatchNorm1d(width),
            nn.ReLU(inplace=True),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(inplace=True),
            nn.Linear(width, 2),
        )

    def forward(self, count: int) -> torch.Tensor:
        return self.main(torch.randn(count, self.noise))


class Discriminator(nn.Module):
    """Tells real points from generated ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(2, width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(width, 1),
        )

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.main(points).squeeze(1)


def real_points(count: int) -> torch.Tensor:
    angles = torch.randint(GAUSSIANS, (count,)) * (2 * math.pi / GAUSSIANS)
    return torch.stack([angles.cos(), angles.sin()], dim=1) + DEVIATION * torch.randn(count, 2)


@torch.no_grad()
def energy_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Energy distance of two samples (Szekely and Rizzo 2013): 2 E|X-Y| - E|X-X'| - E|Y-Y'|, 0 for equal samples."""
    between = torch.cdist(first, second).mean()
    return (2 * between - torch.cdist(first, first).mean() - torch.cdist(second, second).mean()).item()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    generator = Generator(arguments.noise, arguments.width)
    discriminator = Discriminator(arguments.width)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=arguments.lr, betas=(0.5, 0.999))
    discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=arguments.lr, betas=(0.5, 0.999))
    ones, zeros = torch.ones(arguments.batch), torch.zeros(arguments.batch)

    for step in range(arguments.steps):
        real, generated = real_points(arguments.batch), generator(arguments.batch)
        discriminator_optimizer.zero_grad()
        discriminator_loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        discriminator_loss += F.binary_cross_entropy_with_logits(discriminator(generated.detach()), zeros)
        discriminator_loss.backward()
        discriminator_optimizer.step()

        generator_optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(discriminator(generated), ones)
        loss.backward()
        generator_optimizer.step()
        if step % 20 == 19 or step in (0, arguments.steps - 1):
            distance = energy_distance(real, generated)
            print(
                f"step {step + 1:4d}  loss {loss.item():.4f}  discriminator {discriminator_loss.item():.4f}"
                f"  distance {distance:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
