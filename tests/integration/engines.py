"""DeepSpeed over two gloo ranks; the truth comes from a twin that each rank trains by itself, whole, with plain PyTorch."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from sharded import RANK, SIZE, Model, adam, data, loss_of, own_gradients
from truth import fingerprint

CLIP = 0.2
SETTINGS: dict[str, dict[str, Any]] = {
    "Zero0": {"stage": 0},
    "Zero1": {"stage": 1},
    "Zero2": {"stage": 2},
    "Zero3": {"stage": 3},
    "Zero2Offload": {"stage": 2, "zero": {"offload_optimizer": {"device": "cpu"}}},
    "Zero3Offload": {"stage": 3, "zero": {"offload_optimizer": {"device": "cpu"}}},
    "Zero3Groups": {"stage": 3, "zero": {"sub_group_size": 20}},
    "Zero1Frozen": {"stage": 1},
    "Zero3Frozen": {"stage": 3},
    "Zero0Bf16": {"stage": 0, "bf16": {"enabled": True}},
    "Zero0Fused": {"stage": 0, "bf16": {"enabled": True}},
    "Zero1Bf16": {"stage": 1, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "Zero2Fp16": {"stage": 2, "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
    "Zero3Fp16": {"stage": 3, "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
}
OVERFLOWS = 1
"""The step whose loss is not finite, where DeepSpeed scales it."""


def start(
    model: torch.nn.Module, *, stage: int, zero: dict[str, Any] | None = None, micro_batches: int = 2, **settings: Any
) -> Any:
    """An engine around the model and an optimizer with two param groups."""
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **settings,
    }
    first = list(model.first.parameters())
    rest = [p for name, p in model.named_parameters() if not name.startswith("first.") and p.requires_grad]
    optimizer = adam([{"params": first}, {"params": rest, "weight_decay": 0.1}])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(name: str, settings: dict[str, Any]) -> str:
    """Nothing but a training.

    Returns:
        The bits of this rank's losses and of the whole weights.
    """
    torch.manual_seed(3)
    model = type(name, (Model,), {})()
    model.blocks[0].inner.requires_grad_(not name.endswith("Frozen"))
    fused = deepspeed.runtime.engine.FusedAdam
    deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW if name == "Zero0Fused" else fused  # its own is compiled
    engine = start(model, **settings)
    deepspeed.runtime.engine.FusedAdam = fused
    assert name != "Zero0Fused" or type(engine.optimizer).__name__ == "FP16_Optimizer"
    dtype = next(engine.parameters()).dtype
    losses = []
    for step in range(3):
        for micro in range(2):
            losses.append(loss_of(engine(data(step, micro, RANK).to(dtype)).float()))
            broken = "fp16" in settings and step == OVERFLOWS
            engine.backward(losses[-1] * float("inf") if broken else losses[-1])
            engine.step()
    weights = [deepspeed.utils.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    return fingerprint(*losses, *[weight for weight in weights if weight is not None])


def interrupted() -> str:
    """Ctrl-C inside the second step, which the script survives."""
    engine = start(type("Interrupted", (Model,), {})(), stage=0, bf16={"enabled": True}, micro_batches=1)
    steps = []

    def interrupt(*unused: Any) -> None:
        steps.append(len(steps))
        if steps[-1] == 1:
            raise KeyboardInterrupt

    engine.optimizer.optimizer.register_step_pre_hook(interrupt)
    for step in range(4):
        with contextlib.suppress(KeyboardInterrupt):
            engine.backward(loss_of(engine(data(step, 0, RANK).bfloat16())))
            engine.step()
        engine.optimizer.zero_grad()
    return fingerprint(*engine.module.parameters())


def truth(stage: int) -> dict[str, dict[tuple[str, int], torch.Tensor]]:
    """What all ranks together must have at each step of a training in float32, and this rank before the reduction."""
    torch.manual_seed(3)
    twin, found = Model(), {}
    optimizer = adam(
        [{"params": list(twin.first.parameters())}, {"params": list(twin.parameters())[2:], "weight_decay": 0.1}]
    )

    def note(kind: str, step: int, tensors: dict[str, torch.Tensor]) -> None:
        found.setdefault(kind, {}).update({(key, step): value.detach().clone() for key, value in tensors.items()})

    for step in range(3):
        own = own_gradients(twin, step, 2)
        before = own[RANK][-2] if stage >= 2 else {key: torch.zeros(()) for key in own[RANK][-1]}
        note("grad_unreduced", step, {key: (value - before[key]) / 2 for key, value in own[RANK][-1].items()})
        for key, parameter in twin.named_parameters():
            parameter.grad = sum(rank[-1][key] for rank in own) / SIZE / 2
        torch.nn.utils.clip_grad_norm_(twin.parameters(), CLIP)
        note("grad_reduced", step, {key: p.grad for key, p in twin.named_parameters()})
        note("param_origin", step, dict(twin.named_parameters()))
        for entry in ("exp_avg", "exp_avg_sq") if step else ():
            note(entry, step, {key: optimizer.state[p][entry] for key, p in twin.named_parameters()})
        optimizer.step()
        note("update", step, {key: update(optimizer.state[p]) for key, p in twin.named_parameters()})
        note("param_updated", step, dict(twin.named_parameters()))
    return found


def update(state: dict[str, Any]) -> torch.Tensor:
    """Adam's update of the step just taken, before the learning rate."""
    first, second = (
        state[key] / (1 - beta ** state["step"]) for key, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.999))
    )
    return first / (second.sqrt() + 1e-8)


def through_calls() -> str:
    """``TrainerMon`` as its guide shows it, and no trace of it afterwards."""
    from msmon.pytorch import TrainerMon

    step = deepspeed.runtime.engine.DeepSpeedEngine._take_model_step
    torch.manual_seed(3)
    engine = start(Model(), stage=2)
    hooks = [len(p._post_accumulate_grad_hooks or ()) for p in engine.module.parameters()]
    monitor = TrainerMon("monitor.json", params_have_main_grad=False)
    monitor.set_monitor(engine.module, 2, engine.optimizer.optimizer)
    assert deepspeed.runtime.engine.DeepSpeedEngine._take_model_step is not step
    for number in range(3):
        for micro in range(2):
            engine.backward(loss_of(engine(data(number, micro, RANK))))
            engine.step()
    monitor.close()
    assert deepspeed.runtime.engine.DeepSpeedEngine._take_model_step is step
    assert [len(p._post_accumulate_grad_hooks or ()) for p in engine.module.parameters()] == hooks
    return "no trace"


if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # torch has the operations on any CPU, only slow
    deepspeed.init_distributed(dist_backend="gloo")
    true = {stage: truth(stage) for stage in range(4)}
    if sys.argv[1:] == ["calls"]:
        told = {"calls": through_calls()}
    else:
        told = {name: train(name, settings) for name, settings in SETTINGS.items()} | {"Interrupted": interrupted()}
    torch.save({"told": told, "true": true}, os.environ["TRUTH"] + str(RANK))
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.2)
