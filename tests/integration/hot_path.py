"""Counts what a monitored step does on the training thread."""

from __future__ import annotations

import collections
import gc
import json
import math
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
from msmon.runtime.frames import MSMON
from msmon.runtime.writer import Writer


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


def count_reads() -> dict[str, Any]:
    """Of one collected step with everything: elements that kernels read, elements of all rows, and tensors read twice."""
    model, optimizer = model_and_optimizer()
    monitor = watched(model, optimizer, xy_distribution=True, all_xy=True)
    session: Any = monitor._session
    elements: list[int] = []
    read: list[tuple[int, int]] = []
    reduce, write = session._kernel.reduce, Writer._write
    rows: list[Any] = []
    alive: list[Any] = []  # so that no address comes up again

    def counted(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        elements.extend(tensor.numel() for tensor in tensors)
        read.extend((id(tensor), tensor._version) for tensor in tensors)
        alive.extend(tensors)
        return reduce(tensors, *args, **kwargs)

    def noted(writer: Any, table: Any) -> None:
        rows.extend(table.rows)
        write(writer, table)

    one_step(model, optimizer)
    one_step(model, optimizer, 1)
    session.output.drain()  # rows of these steps are not what is counted
    session._kernel.reduce, Writer._write = counted, noted  # type: ignore[method-assign]
    one_step(model, optimizer, 2)
    session._kernel.reduce = reduce
    monitor.close()
    Writer._write = write  # type: ignore[method-assign]
    of_step = [row for row in rows if row.kind != "actv"]
    forward = [row for row in rows if row.kind == "actv"]
    return {
        "read": sum(elements),
        "rows": sum(math.prod(row.shape) for row in of_step),
        "forward": sum(math.prod(row.shape) for row in forward),
        "repeated": [count for count in collections.Counter(read).values() if count > 2],
    }


def count_calls() -> dict[str, dict[str, int]]:
    """Functions of msmon that a step calls, and how often: not collected, and when collection is over."""
    found = {}
    for name, config in {"not collected": {"start_step": 100}, "finished": {"collect_times": 1}}.items():
        model, optimizer = model_and_optimizer()
        monitor = watched(model, optimizer, xy_distribution=True, all_xy=True, **config)
        for step in range(3):
            one_step(model, optimizer, step)
        calls: collections.Counter[str] = collections.Counter()

        def note(frame: Any, event: str, _arg: Any, calls: collections.Counter[str] = calls) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(MSMON):
                calls[frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name] += 1

        inputs = batch(3)
        sys.setprofile(note)
        model(inputs).pow(2).mean().backward()
        sys.setprofile(None)
        found[name] = dict(calls)
        optimizer.zero_grad()
        monitor.close()
    found["tensors"] = {"parameters": len(list(model.parameters())), "modules": len(list(model.modules()))}
    return found


def grow() -> dict[str, Any]:
    """Objects, threads and memory after 1000 and after 10,000 collected steps."""
    model, optimizer = model_and_optimizer()
    monitor = watched(model, optimizer, xy_distribution=True, all_xy=True, step_count_per_record=1000)
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
