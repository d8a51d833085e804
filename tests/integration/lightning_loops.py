"""Trainings by Lightning, under both names of its package; each notes what its own hooks see."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytorch_lightning
import torch
from truth import fingerprint

STEPS = 3
MICRO_BATCHES = 2
CLIP = 0.2


def module(base: Any, *, automatic: bool = True, optimizer: Any = None) -> Any:
    """A small model as a ``LightningModule`` of either package."""

    class Net(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
            self.automatic_optimization = automatic
            self.losses: list[torch.Tensor] = []
            self.gradients: list[dict[str, float]] = []

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).pow(2).mean()
            self.losses.append(loss.detach())
            if not automatic:
                optimizer = self.optimizers()
                self.manual_backward(loss / MICRO_BATCHES)
                if number % MICRO_BATCHES == MICRO_BATCHES - 1:
                    self.note()
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if automatic:
                self.note()

        def note(self) -> None:
            """What is there when the loss has been evaluated for the first time in a step."""
            if len(self.gradients) > self.trainer.global_step:
                return
            parameters = self.named_parameters()
            self.gradients.append({name: float(p.grad.double().norm()) for name, p in parameters if p.grad is not None})

        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters()) if optimizer else torch.optim.AdamW(self.parameters(), lr=0.01)

    return Net()


def fit(package: Any, net: Any, *, accumulate: int = 1, devices: int = 1, **options: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.DataLoader(torch.randn(64, 4, generator=generator), batch_size=4)
    trainer = package.Trainer(
        accelerator="cpu",
        devices=devices,
        max_steps=STEPS,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(net, data)
    return {
        "losses": [float(loss) for loss in net.losses],
        "gradients": net.gradients,
        "weights": fingerprint(*net.parameters()),
        "strategy": type(trainer.strategy).__name__,
    }


def automatic() -> dict[str, Any]:
    return fit(lightning, module(lightning.LightningModule))


def accumulated() -> dict[str, Any]:
    return fit(
        pytorch_lightning, module(pytorch_lightning.LightningModule), accumulate=MICRO_BATCHES, gradient_clip_val=CLIP
    )


def manual() -> dict[str, Any]:
    return fit(lightning, module(lightning.LightningModule, automatic=False))


def lbfgs() -> dict[str, Any]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    return fit(lightning, module(lightning.LightningModule, optimizer=make))


def ddp() -> dict[str, Any]:
    net = module(lightning.LightningModule)
    return fit(lightning, net, accumulate=MICRO_BATCHES, devices=2, strategy="ddp")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    found = {}
    for name in sys.argv[1:]:
        torch.manual_seed(0)
        found[name] = globals()[name]()
    Path(os.environ["TRUTH"] + os.environ.get("LOCAL_RANK", "0")).write_text(json.dumps(found))
