"""Parameters in parts over two gloo ranks; the truth comes from a twin that each rank trains by itself, whole.

The twin has the same weights at every step. Rank by rank it computes the gradients of that rank's data; their mean is what
the ranks together must have, part by part.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from truth import Truth, batch, fingerprint, run_scenarios, scenario

if TYPE_CHECKING:
    from collections.abc import Callable

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


adam = partial(torch.optim.AdamW, lr=1e-2, foreach=False)


class Block(nn.Module):
    """A part that is sharded for itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 5)
        self.outer = nn.Linear(5, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Odd sizes: parts of different length, some of them empty."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.blocks = nn.ModuleList(Block(3) for _ in range(2))
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def data(step: int, micro: int, rank: int) -> torch.Tensor:
    return batch(1000 * rank + 10 * step + micro)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.pow(2).mean()


def own_gradients(twin: nn.Module, step: int, micro_batches: int) -> list[list[dict[str, torch.Tensor]]]:
    """Of each rank, after each micro-batch: the gradients of its own data, summed so far."""
    found = []
    for rank in range(SIZE):
        twin.zero_grad()
        found.append([])
        for micro in range(micro_batches):
            loss_of(twin(data(step, micro, rank))).backward()
            found[-1].append({name: p.grad.clone() for name, p in twin.named_parameters() if p.grad is not None})
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: torch.Tensor | None) -> torch.Tensor:
    """All parts of a tensor, flat, in the order of the ranks."""
    parts: list[Any] = [None] * SIZE
    dist.all_gather_object(parts, None if tensor is None else local(tensor).detach().flatten())
    return torch.cat([part for part in parts if part is not None])


def go(
    truth: Truth,
    name: str,
    shard: Callable[[nn.Module], nn.Module],
    *,
    micro_batches: int = 1,
    quiet: Callable[[nn.Module, bool], Any] = lambda model, last: nullcontext(),
    gather: Callable[[torch.Tensor | None], torch.Tensor] = whole,
) -> str:
    """Train a sharded model and note, at the moments at which they are true, this rank's parts.

    Returns:
        The bits of this rank's weights.
    """
    torch.manual_seed(3)
    twin, model = Model(), type(name, (Model,), {})()
    model.load_state_dict(twin.state_dict())
    sharded = shard(model)
    clean = {n: n.replace("_fsdp_wrapped_module.", "") for n, _ in sharded.named_parameters()}
    optimizer, of_twin = adam(sharded.parameters()), adam(twin.parameters())
    for step in range(3):
        own = own_gradients(twin, step, micro_batches)
        mean = {key: sum(rank[-1][key] for rank in own) / SIZE for key in own[0][-1]}
        optimizer.zero_grad()
        for micro in range(micro_batches):
            with quiet(sharded, micro == micro_batches - 1):
                loss_of(sharded(data(step, micro, RANK))).backward()
        for key, gradient in own[RANK][-1].items():
            truth.note("grad_unreduced", step, f"{name}.{key}", gradient)
        for raw, parameter in sharded.named_parameters():
            key = clean[raw]
            for part, true in ((parameter.grad, mean[key]), (parameter, twin.get_parameter(key))):
                torch.testing.assert_close(gather(part).flatten(), true.flatten(), rtol=1e-5, atol=1e-5)
            part = local(parameter)
            if part.numel():
                truth.note("param_origin", step, f"{name}.{key}", part)
                truth.note("grad_reduced", step, f"{name}.{key}", local(parameter.grad))
                for entry, value in optimizer.state.get(parameter, {}).items():
                    if entry != "step":
                        truth.note(entry, step, f"{name}.{key}", local(value))
        optimizer.step()
        for raw, parameter in sharded.named_parameters():
            if local(parameter).numel():
                truth.note("param_updated", step, f"{name}.{clean[raw]}", local(parameter))
        for key, parameter in twin.named_parameters():
            parameter.grad = mean[key]
        of_twin.step()
        truth.steps.append({"model": name, "step": step, "micro_steps": micro_batches})
    return fingerprint(*map(local, sharded.parameters()))


def train(name: str, shard: Callable[[nn.Module], nn.Module]) -> str:
    """Nothing but a training.

    Returns:
        The bits of this rank's weights and losses.
    """
    torch.manual_seed(3)
    model = shard(type(name, (Model,), {})())
    optimizer = adam(model.parameters())
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(loss_of(model(data(step, 0, RANK)).float()))
        losses[-1].backward()
        optimizer.step()
    return fingerprint(*losses, *map(local, model.parameters()))


def fsdp1(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        **{"use_orig_params": True, **options},
    )


@scenario
def fsdp1_full(truth: Truth) -> str:
    return go(truth, "Full", fsdp1())


@scenario
def fsdp1_accumulated(truth: Truth) -> str:
    quiet = lambda model, last: nullcontext() if last else model.no_sync()  # noqa: E731
    return go(truth, "Accumulated", fsdp1(), micro_batches=3, quiet=quiet)


@scenario
def fsdp1_gradients_only(truth: Truth) -> str:
    return go(truth, "GradientsOnly", fsdp1(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP))


@scenario
def fsdp2_full(truth: Truth) -> str:
    return go(truth, "Full2", fsdp2())


def fsdp2(**options: Any) -> Callable[[nn.Module], nn.Module]:
    def shard(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return shard


@scenario
def fsdp2_accumulated(truth: Truth) -> str:
    def quiet(model: Any, last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        return nullcontext()

    return go(truth, "Accumulated2", fsdp2(), micro_batches=3, quiet=quiet)


@scenario
def fsdp1_mixed(truth: Truth) -> str:
    """bfloat16 in forward, backward and reduction."""
    return train("Mixed", fsdp1(mixed_precision=MixedPrecision(*[torch.bfloat16] * 2)))


@scenario
def fsdp1_flat(truth: Truth) -> str:
    """One flat parameter a unit, which msmon says and takes as it is."""
    return train("Flat", fsdp1(use_orig_params=False))


@scenario
def fsdp2_mixed(truth: Truth) -> str:
    return train("Mixed2", fsdp2(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))


@scenario
def zero_redundancy(truth: Truth) -> str:
    """Whole gradients and weights everywhere, optimizer state on the rank that owns the parameter."""
    name = "Zero"
    model, twin = type(name, (Model,), {})(), Model()
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        twin.load_state_dict(model.state_dict())
        for key, gradient in own_gradients(twin, step, 1)[RANK][-1].items():
            truth.note("grad_unreduced", step, f"{name}.{key}", gradient)
        optimizer.zero_grad()
        loss_of(wrapped(data(step, 0, RANK))).backward()
        truth.gradients("grad_reduced", step, model, f"{name}.")
        truth.weights("param_origin", step, model, f"{name}.")
        truth.state(step, model, optimizer.optim, f"{name}.")
        optimizer.step()
        truth.weights("param_updated", step, model, f"{name}.")
        truth.steps.append({"model": name, "step": step, "micro_steps": 1})
    return fingerprint(*map(local, model.parameters()))


@scenario
def fsdp1_whole(truth: Truth) -> str:
    """NO_SHARD: every rank has everything."""
    quiet = lambda model, last: nullcontext() if last else model.no_sync()  # noqa: E731
    return go(
        truth,
        "Whole",
        fsdp1(sharding_strategy=ShardingStrategy.NO_SHARD),
        micro_batches=2,
        quiet=quiet,
        gather=lambda tensor: tensor,
    )


@scenario
def tensor_parallel(truth: Truth) -> str:
    """Columns and rows of the linear layers of a block over the ranks, the rest on each."""
    torch.manual_seed(3)
    name = "Parallel"
    twin, model = Wide(), type(name, (Wide,), {})()
    model.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (SIZE,))
    parallelize_module(model, mesh, {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(3):
        twin.load_state_dict({key: full(value) for key, value in model.state_dict().items()})
        twin.zero_grad()
        loss_of(twin(data(step, 0, 0))).backward()
        optimizer.zero_grad()
        loss_of(model(data(step, 0, 0))).backward()
        true = dict(twin.named_parameters())
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(full(parameter.grad), true[key].grad, rtol=1e-5, atol=1e-6)
            for kind, tensor in (
                ("grad_unreduced", parameter.grad),
                ("grad_reduced", parameter.grad),
                ("param_origin", parameter),
            ):
                truth.note(kind, step, f"{name}.{key}", local(tensor))
            for entry, value in optimizer.state.get(parameter, {}).items():
                if entry != "step":
                    truth.note(entry, step, f"{name}.{key}", local(value))
        optimizer.step()
        for key, parameter in model.named_parameters():
            truth.note("param_updated", step, f"{name}.{key}", local(parameter))
        truth.steps.append({"model": name, "step": step, "micro_steps": 1})
    return fingerprint(*map(local, model.parameters()))


class Wide(nn.Module):
    """Two linear layers whose sizes the ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.outer = nn.Linear(6, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.outer(torch.tanh(self.inner(x))))  # type: ignore[no-any-return]


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@scenario
def pipeline(truth: Truth) -> str:
    """A stage a rank, four micro-batches a step; gradients are averaged over them by the schedule."""
    torch.manual_seed(3)
    name, whole_model = f"Stage{RANK}", nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
    twin = copy.deepcopy(whole_model)
    first = slice(0, 2) if RANK == 0 else slice(2, 4)
    part = type(name, (nn.Sequential,), {})(*whole_model[first])
    del whole_model
    keys = {f"{number}.{key}": f"{number + first.start}.{key}" for number in range(2) for key in ("weight", "bias")}
    stage = PipelineStage(part, RANK, SIZE, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda output, target: (output - target).pow(2).mean())
    optimizer, of_twin = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (part, twin))
    for step in range(3):
        x, target = batch(step), torch.ones(8, 1)
        of_twin.zero_grad()
        sums = None
        for rows, wanted in zip(x.chunk(4), target.chunk(4), strict=True):
            ((twin(rows) - wanted).pow(2).mean()).backward()
        sums = {key: parameter.grad.clone() for key, parameter in twin.named_parameters()}
        for parameter in twin.parameters():
            parameter.grad /= 4
        optimizer.zero_grad()
        schedule.step(x) if RANK == 0 else schedule.step(target=target)
        for key, parameter in part.named_parameters():
            torch.testing.assert_close(parameter.grad, sums[keys[key]] / 4, rtol=1e-5, atol=1e-6)
            truth.note("grad_unreduced", step, f"{name}.{key}", sums[keys[key]])
        truth.gradients("grad_reduced", step, part, f"{name}.")
        truth.weights("param_origin", step, part, f"{name}.")
        truth.state(step, part, optimizer, f"{name}.")
        optimizer.step()
        of_twin.step()
        truth.after(step, part, f"{name}.", micro_steps=4)
    return fingerprint(*part.parameters())


if __name__ == "__main__":
    os.environ["TRUTH"] += str(RANK)
    dist.init_process_group("gloo")
    run_scenarios(sys.argv[1:])
    dist.destroy_process_group()
    time.sleep(0.2)
