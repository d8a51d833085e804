"""Trainings by transformers' Trainer, peft, trl and accelerate; each notes what its own callbacks see."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from truth import fingerprint

from msmon.pytorch import TrainerMon

WORDS = 64
STEPS = 3
MICRO_BATCHES = 2
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_force_ds_cpu_optimizer": False,
}


class Look(TrainerCallback):
    """The gradients that the trainer has, clipped, right before each optimizer step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.gradients: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        parameters = self.model.named_parameters()
        self.gradients.append({name: float(p.grad.double().norm()) for name, p in parameters if p.grad is not None})


class Calls(TrainerCallback):
    """``TrainerMon`` where its guide puts it."""

    def on_train_begin(self, *args: Any, model: torch.nn.Module, optimizer: Any, **kwargs: Any) -> None:
        self.monitor = TrainerMon("monitor.json", params_have_main_grad=False)
        with_deepspeed = type(optimizer).__name__ == "DeepSpeedOptimizerWrapper"
        self.monitor.set_monitor(model, MICRO_BATCHES, optimizer.optimizer if with_deepspeed else optimizer)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.monitor.close()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=32, **sizes)
    config.bos_token_id = config.eos_token_id = 0
    return LlamaForCausalLM(config)


def arguments(kind: type[TrainingArguments] = TrainingArguments, **more: Any) -> Any:
    return kind(
        **{
            "output_dir": "trained",
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **more,
        }
    )


def rows(count: int = 32) -> list[dict[str, list[int]]]:
    words = torch.randint(0, WORDS, (count, 8), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row} for row in words]


def finished(trainer: Trainer, look: Look) -> dict[str, Any]:
    trainer.train()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "gradients": look.gradients,
        "weights": fingerprint(*map(whole, trainer.model.parameters())),
        "wrapped": type(trainer.model_wrapped).__name__,
    }


def whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The parameter, also where ZeRO 3 has taken it apart."""
    if not hasattr(parameter, "ds_id"):
        return parameter
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(parameter)  # type: ignore[no-any-return]


def trainer() -> dict[str, Any]:
    """With evaluation and a checkpoint after each step."""
    model = llama()
    look = Look(model)
    settings = arguments(eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1)
    data = rows()
    return finished(Trainer(model, settings, train_dataset=data, eval_dataset=data[:4], callbacks=[look]), look)


def calls() -> dict[str, Any]:
    model = llama()
    look = Look(model)
    return finished(Trainer(model, arguments(), train_dataset=rows(), callbacks=[look, Calls()]), look)


def lora() -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    look = Look(model)
    return finished(Trainer(model, arguments(), train_dataset=rows(), callbacks=[look]), look)


def sft() -> dict[str, Any]:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{number}": number for number in range(WORDS - 2)} | {"<end>": WORDS - 2, "<pad>": WORDS - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    processing = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    texts = [" ".join(f"w{(3 * row + column) % 60}" for column in range(8)) for row in range(32)]
    model = llama()
    look = Look(model)
    return finished(
        SFTTrainer(
            model,
            arguments(SFTConfig, max_length=16),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=processing,
            callbacks=[look],
        ),
        look,
    )


def without_shared_memory_operation() -> None:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes


def deepspeed_trainer(stage: int = 2, *callbacks: TrainerCallback) -> dict[str, Any]:
    without_shared_memory_operation()
    settings = arguments(
        deepspeed={**DEEPSPEED, "zero_optimization": {"stage": stage}}
    )  # before the model, for stage 3
    model = llama()
    look = Look(model)
    return finished(Trainer(model, settings, train_dataset=rows(), callbacks=[look, *callbacks]), look)


def deepspeed_trainer_3() -> dict[str, Any]:
    return deepspeed_trainer(3)


def deepspeed_calls() -> dict[str, Any]:
    return deepspeed_trainer(2, Calls())


def accelerated(accelerator: Accelerator) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data: Any = torch.utils.data.DataLoader(torch.randn(STEPS * MICRO_BATCHES * 8, 4), batch_size=4)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    losses, gradients = [], []
    for _, x in zip(range(STEPS * MICRO_BATCHES), data, strict=False):
        with accelerator.accumulate(model):
            losses.append(model(x).pow(2).mean())
            accelerator.backward(losses[-1])
            if accelerator.sync_gradients:
                inner = accelerator.unwrap_model(model).named_parameters()
                gradients.append({name: float(p.grad.double().norm()) for name, p in inner if p.grad is not None})
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return {
        "losses": [float(loss) for loss in losses],
        "gradients": gradients,
        "weights": fingerprint(*model.parameters()),
        "wrapped": type(model).__name__,
    }


def accelerate_loop() -> dict[str, Any]:
    return accelerated(Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES))


def accelerate_deepspeed() -> dict[str, Any]:
    without_shared_memory_operation()
    plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=MICRO_BATCHES, gradient_clipping=0.5)
    size = 4 * MICRO_BATCHES * int(os.environ.get("WORLD_SIZE", "1"))
    plugin.deepspeed_config.update(
        train_micro_batch_size_per_gpu=4, train_batch_size=size, zero_force_ds_cpu_optimizer=False
    )
    return accelerated(Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=MICRO_BATCHES))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = {}
    for name in sys.argv[1:]:
        AcceleratorState._reset_state()  # what one training was configured with is kept for the process otherwise
        found[name] = globals()[name]()
    Path(os.environ["TRUTH"] + os.environ.get("RANK", "0")).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(0.2)
