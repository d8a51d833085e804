"""Train a small residual convolutional net on scikit-learn's handwritten digits (8 x 8 pixels, ten classes).

    python examples/digits/train.py

Activations work in place and so do the residual additions, as in many nets for images. Nothing here knows of a monitor.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

CLASSES = 10
TRAINING_IMAGES = 1400


class Block(nn.Module):
    """Two convolutions and a residual path around them, added in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = self.activation(self.first_norm(self.first(x)))
        change = self.second_norm(self.second(change))
        change += x
        return self.activation(change)


class Net(nn.Module):
    """Names the digit in an image."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def load_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Images of shape [count, 1, 8, 8] with values from 0 to 1, and their classes."""
    digits = load_digits()
    return torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)


@torch.no_grad()
def accuracy(model: Net, images: torch.Tensor, classes: torch.Tensor) -> float:
    model.eval()
    right = (model(images).argmax(dim=1) == classes).float().mean().item()
    model.train()
    return right


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    images, classes = load_images()
    held_out = images[TRAINING_IMAGES:], classes[TRAINING_IMAGES:]
    model = Net(arguments.width, arguments.depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)

    for step in range(arguments.steps):
        chosen = torch.randint(TRAINING_IMAGES, (arguments.batch,))
        loss = F.cross_entropy(model(images[chosen]), classes[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19 or step in (0, arguments.steps - 1):
            print(f"step {step + 1:4d}  loss {loss.item():.4f}", flush=True)

    print(f"held-out accuracy {accuracy(model, *held_out):.4f}")


if __name__ == "__main__":
    main()
