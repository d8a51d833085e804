"""Train a variational autoencoder on scikit-learn's handwritten digits (8 x 8 pixels), then draw a few of its own.

    python examples/vae/train.py

Nothing here knows of a monitor.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

PIXELS = 64
TRAINING_IMAGES = 1400
SHADES = " .:-=+*#%@"


class VariationalAutoencoder(nn.Module):
    """Codes an image in a few numbers and draws it from them again."""

    def __init__(self, width: int, code: int) -> None:
        super().__init__()
        self.code = code
        self.encoder = nn.Sequential(nn.Linear(PIXELS, width), nn.ReLU(inplace=True))
        self.mean = nn.Linear(width, code)
        self.log_variance = nn.Linear(width, code)
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(inplace=True), nn.Linear(width, PIXELS))

    def encode(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.encoder(images)
        return self.mean(hidden), self.log_variance(hidden)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return self.decoder(codes)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encode(images)
        codes = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return self.decode(codes), mean, log_variance


def loss_of(drawn: torch.Tensor, mean: torch.Tensor, log_variance: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Negative evidence lower bound of an image (Kingma and Welling, arXiv:1312.6114, appendix B)."""
    reconstruction = F.binary_cross_entropy_with_logits(drawn, images, reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    return (reconstruction + divergence) / len(images)


def load_images() -> torch.Tensor:
    """Images of shape [count, 64] with values from 0 to 1."""
    return torch.tensor(load_digits().data / 16, dtype=torch.float32)


@torch.no_grad()
def reconstruction_error(model: VariationalAutoencoder, images: torch.Tensor) -> float:
    """Mean squared error of a pixel, without noise on the codes."""
    mean, _ = model.encode(images)
    return F.mse_loss(model.decode(mean).sigmoid(), images).item()


@torch.no_grad()
def draw(model: VariationalAutoencoder, count: int) -> str:
    """So many new digits side by side, in characters."""
    images = model.decode(torch.randn(count, model.code)).sigmoid().view(count, 8, 8)
    shades = (images * (len(SHADES) - 1)).round().long().transpose(0, 1).tolist()
    return "\n".join("  ".join("".join(SHADES[shade] for shade in line) for line in lines) for lines in shades)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--code", type=int, default=8, help="numbers in a code")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    images = load_images()
    model = VariationalAutoencoder(arguments.width, arguments.code)
    optimizer = torch.optim.Adam(model.parameters(), lr=arguments.lr)

    for step in range(arguments.steps):
        batch = images[torch.randint(TRAINING_IMAGES, (arguments.batch,))]
        loss = loss_of(*model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19 or step in (0, arguments.steps - 1):
            error = reconstruction_error(model, images[TRAINING_IMAGES:])
            print(f"step {step + 1:4d}  loss {loss.item():.4f}  held-out error {error:.4f}", flush=True)

    print(draw(model, 6))


if __name__ == "__main__":
    main()
