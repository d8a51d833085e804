"""Counts what a monitored step does on the training thread."""

from __future__ import annotations

import collections
import gc
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from truth import batch, net

from msmon.backends.pytorch import devices
from msmon.pytorch import TrainerMon


class Counting(TorchDispatchMode):
    """Counts operators on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def watched(model: Any, optimizer: torch.optim.Optimizer, **config: Any) -> TrainerMon:
    folder = Path(os.environ["TRUTH"]).parent
    path = folder / "monitor.json"
    kinds = {"param_distribution": True, "wg_distribution": True, "mv_distribution": True, "monitor_mbs_grad": True}
    path.write_text(json.dumps({**kinds, "ops": ["min", "max", "norm", "mean", "zeros", "nans"], **config}))
    monitor = TrainerMon(path, params_have_main_grad=False)
    monitor.set_monitor(model, 1, optimizer)
    return monitor


scaler = torch.amp.GradScaler("cpu", init_scale=8.0)


def one_step(model: Any, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    optimizer.zero_grad()
    scaler.scale(model(batch(step)).pow(2).mean()).backward()
    scaler.step(optimizer)
    scaler.update()


def operators(model: Any, optimizer: torch.optim.Optimizer) -> collections.Counter[str]:
    with Counting() as mode:
        one_step(model, optimizer)
    return mode.calls


def model_and_optimizer() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = net("Net")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def count_operators() -> dict[str, Any]:
    """Operators of a bare step, of a collected one, and of one that is not."""
    counted = {}
    for name, config in {
        "bare": None,
        "collected": {},
        "not collected": {"start_step": 100},
        "finished": {"collect_times": 1},
    }.items():
        model, optimizer = model_and_optimizer()
        monitor = None if config is None else watched(model, optimizer, **config)
        for step in range(3):
            one_step(model, optimizer, step)
        counted[name] = dict(operators(model, optimizer))
        if monitor is not None:
            monitor.close()
    return counted


def count_waits() -> dict[str, Any]:
    """Copies a step, and where numbers are waited for."""
    copies: list[str] = []
    waits: list[str] = []
    start, finish = devices._start_copy, devices._finish_copy

    def counted_start(*args: Any) -> Any:
        copies.append(threading.current_thread().name)
        return start(*args)

    def counted_finish(*args: Any) -> Any:
        waits.append(threading.current_thread().name)
        return finish(*args)

    devices._start_copy, devices._finish_copy = counted_start, counted_finish
    model, optimizer = model_and_optimizer()
    monitor = watched(model, optimizer)
    for step in range(10):
        one_step(model, optimizer, step)
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("msmon")]
    monitor.close()
    devices._start_copy, devices._finish_copy = start, finish
    return {"copies": copies, "waits": waits, "threads": threads}


def grow() -> dict[str, Any]:
    """Objects, threads and memory after 1000 and after 10,000 collected steps."""
    model, optimizer = model_and_optimizer()
    monitor = watched(model, optimizer, step_count_per_record=1000)
    sizes = []
    for step in range(10_000):
        one_step(model, optimizer, step % 7)
        if step in {999, 9_999}:
            gc.collect()
            with Path("/proc/self/status").open(encoding="ascii") as status:
                resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
            sizes.append([len(gc.get_objects()), threading.active_count(), resident])
    monitor.close()
    return {"first": sizes[0], "last": sizes[1]}


def faults() -> dict[str, Any]:
    """A kernel that raises in the middle of training: weights after it, with and without."""
    found = {}
    for broken in (False, True):
        model, optimizer = model_and_optimizer()
        monitor = watched(model, optimizer)
        kernel: Any = monitor._session._kernel
        for step in range(5):
            if broken and step == 2:

                def reduce(*args: Any, **kwargs: Any) -> Any:
                    raise ZeroDivisionError("a fault of ours")

                kernel.reduce = reduce  # only this monitor's
            one_step(model, optimizer, step)
        monitor.close()
        found[str(broken)] = [parameter.tolist() for parameter in model.parameters()]
    return found


if __name__ == "__main__":
    results = {name: globals()[name]() for name in sys.argv[1:]}
    Path(os.environ["TRUTH"]).write_text(json.dumps(results))
