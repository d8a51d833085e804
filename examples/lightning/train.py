"""Train a small network with Lightning, automatic optimization, two micro-batches a step.

    python examples/lightning/train.py

It learns to tell points inside a ring from those outside. Nothing here knows of a monitor.
"""

import argparse
import logging
import warnings

import lightning
import torch
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


class Ring(lightning.LightningModule):
    """What Lightning trains."""

    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.net = make_model(width)
        self.lr = lr

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        places, inside = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.net(places), inside)
        if number % 40 == 39 or number == 1:
            print(f"step {number // 2 + 1:4d}  loss {loss.item():.4f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def main() -> None:
    arguments = parse_arguments()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(
        *points(2 * arguments.batch * arguments.steps, torch.Generator().manual_seed(0))
    )
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Ring(arguments.width, arguments.lr), torch.utils.data.DataLoader(data, batch_size=arguments.batch))


if __name__ == "__main__":
    main()
