"""DDP over two gloo ranks in many ways; the truth comes from a twin that each rank trains by itself on its own data."""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from truth import Truth, batch, run_scenarios, scenario

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Branched(nn.Module):
    """Two branches of which a step may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.left, self.right = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, use: tuple[str, ...] = ("left", "right")) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        return sum(getattr(self, name)(hidden) for name in use).pow(2).mean()  # type: ignore[union-attr]


def data(step: int, micro: int, rank: int) -> torch.Tensor:
    return batch(1000 * rank + 10 * step + micro)


def go(
    truth: Truth,
    name: str,
    *,
    late: bool = False,
    micro_batches: int = 1,
    synchronise_once: bool = False,
    use: Any = None,
    hook: Any = None,
    rounding: bool = False,
    **options: Any,
) -> None:
    """Train a DDP model; at every step a twin with the same weights computes each rank's own gradients."""
    model, twin = (type(name, (Branched,), {})() for _ in range(2))
    for parameter in twin.parameters():
        parameter.requires_grad_(True)
    chosen = use or (lambda rank, step: ("left", "right"))
    wrapped = None if late else DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD((model if late else wrapped).parameters(), lr=0.1)  # type: ignore[union-attr]
    wrapped = wrapped or DistributedDataParallel(module=model, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    for step in range(3):
        twin.load_state_dict(model.state_dict())
        own: list[dict[str, torch.Tensor]] = []
        for rank in range(SIZE):
            twin.zero_grad()
            for micro in range(micro_batches):
                twin(data(step, micro, rank), chosen(rank, step)).backward()
            own.append({n: p.grad.clone() for n, p in twin.named_parameters() if p.grad is not None})
        optimizer.zero_grad()
        for micro in range(micro_batches):
            quiet = synchronise_once and micro < micro_batches - 1
            with wrapped.no_sync() if quiet else nullcontext():
                wrapped(data(step, micro, RANK), chosen(RANK, step)).backward()
        for key, gradient in own[RANK].items():
            truth.note("grad_unreduced", step, f"{name}.{key}", gradient)
        for key, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            mean = sum(gradients.get(key, torch.zeros_like(parameter)) for gradients in own) / SIZE
            torch.testing.assert_close(
                parameter.grad, mean, rtol=1e-2 if rounding else 1e-5, atol=1e-3 if rounding else 1e-6
            )
            truth.note("grad_reduced", step, f"{name}.{key}", parameter.grad)
        optimizer.step()
        truth.steps.append({"model": name, "step": step, "micro_steps": micro_batches})


@scenario
def wrapped_before(truth: Truth) -> None:
    go(truth, "WrappedBefore")


@scenario
def wrapped_after(truth: Truth) -> None:
    go(truth, "WrappedAfter", late=True)


@scenario
def bucket_views(truth: Truth) -> None:
    go(truth, "BucketViews", gradient_as_bucket_view=True)


@scenario
def small_buckets(truth: Truth) -> None:
    go(truth, "SmallBuckets", gradient_as_bucket_view=True, bucket_cap_mb=1e-6)


@scenario
def no_sync(truth: Truth) -> None:
    go(truth, "NoSync", micro_batches=3, synchronise_once=True, gradient_as_bucket_view=True)


@scenario
def static_graph(truth: Truth) -> None:
    go(truth, "StaticGraph", static_graph=True)


@scenario
def branch_unused_here(truth: Truth) -> None:
    """Rank 1 does not use the right branch in step 1: its gradient there is all the other rank's."""
    use = lambda rank, step: ("left",) if (rank, step) == (1, 1) else ("left", "right")  # noqa: E731
    go(truth, "UnusedHere", find_unused_parameters=True, use=use)


@scenario
def compressed(truth: Truth) -> int:
    """A user's communication hook stays in place."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    calls = 0

    def hook(state: Any, bucket: Any) -> Any:
        nonlocal calls
        calls += 1
        return fp16_compress_hook(dist.group.WORLD, bucket)

    hook.__annotations__.clear()  # DDP compares them with its classes, and these are strings
    go(truth, "Compressed", hook=hook, rounding=True)
    return calls


class Last(nn.Linear):
    """P23: Linear(2, 1), x = ones * (rank + 1), three rows, summed."""


@scenario
def values_of_the_original(truth: Truth) -> None:
    wrapped = DistributedDataParallel(Last(2, 1, bias=False))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped(torch.ones(3, 2) * (RANK + 1)).sum().backward()
    optimizer.step()


if __name__ == "__main__":
    os.environ["TRUTH"] += str(RANK)
    dist.init_process_group("gloo")
    _warm = [nn.Linear(1, 1), nn.Linear(1, 1)]
    _optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in _warm]
    for _model, _optimizer in zip(_warm, _optimizers, strict=True):
        _model(torch.ones(1, 1)).backward()
        _optimizer.step()
    run_scenarios(sys.argv[1:])
    dist.destroy_process_group()
    time.sleep(0.2)  # for gloo's threads, as in conftest.SETTLE
