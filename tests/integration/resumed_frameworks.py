"""Each framework trains a model, saves, and goes on with another object in the same process, which is watched as a model of its own."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import lightning
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import OneCycleLR
from transformers import Trainer, TrainingArguments

EARLIER, LATER = 3, 5
INPUTS = [{"x": torch.ones(4) * number} for number in range(64)]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).pow(2).mean()}


class Lightning(lightning.LightningModule):
    optimizers_wanted = 1

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(self.optimizers_wanted))
        self.automatic_optimization = self.optimizers_wanted == 1

    def training_step(self, batch: torch.Tensor, number: int) -> Any:
        losses = [layer(batch).pow(2).mean() for layer in self.layers]
        if not self.automatic_optimization:
            for optimizer, loss in zip(self.optimizers(), losses, strict=True):  # type: ignore[call-overload]  # a list
                self.manual_backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        return losses[0] if self.automatic_optimization else None

    def configure_optimizers(self) -> Any:
        kind = torch.optim.SGD if self.automatic_optimization else torch.optim.AdamW
        made = [kind(layer.parameters(), lr=0.01) for layer in self.layers]
        return made[0] if len(made) == 1 else made


def named(name: str, base: Any, **attributes: Any) -> Any:
    return type(name, (base,), attributes)()


def with_transformers(name: str, steps: int, resume: bool) -> None:
    arguments = TrainingArguments(
        output_dir="trained",
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_steps=EARLIER,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        optim="sgd",
    )
    Trainer(model=named(name, Model), args=arguments, train_dataset=INPUTS).train(resume_from_checkpoint=resume)


def with_lightning(name: str, steps: int, resume: bool, optimizers: int = 1) -> None:
    module = named(name, Lightning, optimizers_wanted=optimizers)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps * optimizers,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
    trainer.fit(module, data, ckpt_path=f"{optimizers}.ckpt" if resume else None)
    if not resume:
        trainer.save_checkpoint(f"{optimizers}.ckpt")


def with_accelerate(name: str, steps: int, resume: bool) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = named(name, Model)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = OneCycleLR(optimizer, 0.1, total_steps=100)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if resume:
        accelerator.load_state("accelerated")
    for number in range(2 * (steps - EARLIER if resume else steps)):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4) * number)["loss"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    accelerator.save_state("accelerated")


def with_deepspeed(name: str, steps: int, resume: bool, weights_only: bool = False) -> None:
    model = named(name, Model)
    optimizer = torch.optim.AdamW(model.parameters())
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 1}, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if resume:
        engine.load_checkpoint("engine", load_module_only=weights_only)
    for number in range(steps - EARLIER if resume else steps):
        engine.backward(engine(torch.ones(2, 4) * number)["loss"])
        engine.step()
    if not resume:
        engine.save_checkpoint("engine")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    for name, train in {
        "Transformers": with_transformers,
        "Lightning": with_lightning,
        "Manual": lambda *given: with_lightning(*given, optimizers=2),
        "Accelerate": with_accelerate,
    }.items():
        train(f"{name}Earlier", EARLIER, False)
        train(name, LATER, True)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes
    torch.distributed.init_process_group("gloo", init_method=Path("store").resolve().as_uri(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo")
    with_deepspeed("DeepSpeedEarlier", EARLIER, False)
    with_deepspeed("DeepSpeed", LATER, True)
    with_deepspeed("DeepSpeedWeights", LATER, True, weights_only=True)
    torch.distributed.destroy_process_group()
