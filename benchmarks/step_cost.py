"""What watching costs a training step: a GPT, or a model of 1,000 small tensors, bare, with msmon and with the original.

Every variant trains in a process of its own. The processes take turns, in a shuffled order, a few consecutive steps
each (so that what a variant does in the background meets its own next step), and only one computes at a time: noise of
the machine meets all alike. A ratio is the median over the rounds of a variant's step time over that of the bare
training of the same round.

The original (mindstudio-probe) lives in an environment of its own, made from ``requirements/compat.txt``; it takes part
when ``MSMON_COMPAT_PYTHON`` names that environment's Python, and is compared with a bare training in that environment.

    python benchmarks/step_cost.py [--model many] [--kinds gradients weights optimizer all idle] [--steps 100] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from side_by_side import about, ask, publish, signature

if TYPE_CHECKING:
    from collections.abc import Callable

SIX = ["min", "max", "norm", "mean", "zeros", "nans"]
SWITCHES = {
    "gradients": "wg_distribution",
    "weights": "param_distribution",
    "optimizer": "mv_distribution",
    "activations": "xy_distribution",
}
KINDS = (*SWITCHES, "all", "idle")
"""``idle``: everything is configured, and the step is not collected."""

MONITORS = {"msmon": "msmon.pytorch", "original": "msprobe.pytorch"}
SETTLE = 0.05
"""Seconds between two turns, in which threads of the last one come to rest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=["gradients"], help="what is watched, one after another"
    )
    parser.add_argument("--steps", type=int, default=100, help="measured steps of each variant (default: 100)")
    parser.add_argument("--block", type=int, default=4, help="consecutive steps of a turn (default: 4)")
    parser.add_argument("--model", choices=["gpt", "many"], default="gpt", help="many: 500 linear layers of width 16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", nargs=2, metavar=("MONITOR", "KIND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker, arguments)
        return
    figures = measure(arguments)
    publish(figures, as_markdown(figures), arguments.json)


@dataclass
class Worker:
    """A variant in a process of its own, and what it measured."""

    name: str
    process: subprocess.Popen[str]
    baseline: str
    versions: dict[str, str] = field(default_factory=dict)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)

    def ask(self, **request: Any) -> dict[str, Any]:
        return ask(self.process, self.name, **request)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    original = os.environ.get("MSMON_COMPAT_PYTHON", "") and str(Path(os.environ["MSMON_COMPAT_PYTHON"]).absolute())
    rounds = max(1, arguments.steps // arguments.block)
    with tempfile.TemporaryDirectory() as folder:
        workers = start_workers(arguments, original, Path(folder))
        try:
            for worker in workers:
                worker.versions = worker.ask(steps=arguments.block)["versions"]  # the first steps warm up
            for number in range(rounds):
                show_progress(number, rounds)
                for worker in random.sample(workers, len(workers)):
                    time.sleep(SETTLE)
                    answer = worker.ask(steps=arguments.block)
                    worker.wall.append(answer["wall"] / arguments.block)
                    worker.cpu.append(answer["cpu"] / arguments.block)
                    worker.thread.append(answer["thread"] / arguments.block)
            show_progress(rounds, rounds)
            for worker in workers:
                worker.told = worker.ask(steps=0)
        finally:
            for worker in workers:
                worker.process.communicate(timeout=60)  # end of input ends it
    by_name = {worker.name: worker for worker in workers}
    return {
        **about(),
        "model": title(arguments),
        "statistics": SIX,
        "rounds": rounds,
        "steps_a_round": arguments.block,
        "variants": {worker.name: summarize(worker, by_name[worker.baseline]) for worker in workers},
        "msmon_to_original": compare(by_name, arguments.kinds) if original else {},
    }


def title(arguments: argparse.Namespace) -> str:
    if arguments.model == "many":
        return "500 linear layers of width 16, batch 16"
    return f"GPT, {arguments.layers} layers, width {arguments.width}, batch 8x128"


def start_workers(arguments: argparse.Namespace, original: str | None, folder: Path) -> list[Worker]:
    wanted = [("bare", "bare", sys.executable)]
    wanted += [(f"msmon: {kind}", "bare", sys.executable) for kind in arguments.kinds]
    if original:
        wanted.append(("bare beside the original", "bare beside the original", original))
        wanted += [(f"original: {kind}", "bare beside the original", original) for kind in arguments.kinds]
    workers = []
    for name, baseline, python in wanted:
        monitor, _, kind = name.partition(": ")
        own = folder / name.replace(": ", "-").replace(" ", "-")
        own.mkdir()
        command = [python, __file__, "--worker", monitor if kind else "bare", kind or "-"]
        command += ["--model", arguments.model, "--layers", str(arguments.layers), "--width", str(arguments.width)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MSMON", "DYNAMIC_MONITOR"))}
        process = subprocess.Popen(
            command,
            cwd=own,
            env={**environment, "MONITOR_OUTPUT_DIR": str(own / "out")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(own / "log").open("w"),
            text=True,
        )
        workers.append(Worker(name, process, baseline))
    return workers


def summarize(worker: Worker, baseline: Worker) -> dict[str, Any]:
    ratios = [own / bare for own, bare in zip(worker.wall, baseline.wall, strict=True)]
    cpu_ratios = [own / bare for own, bare in zip(worker.cpu, baseline.cpu, strict=True)]
    added = statistics.median(own - bare for own, bare in zip(worker.thread, baseline.thread, strict=True))
    told, bare = worker.told, baseline.told
    return {
        "step_ms": round(statistics.median(worker.wall) * 1e3, 2),
        "compared_with": baseline.name,
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": quartiles(ratios),
        "cpu_ratio": round(statistics.median(cpu_ratios), 4),
        "rows": told["rows"],
        "thread_us_a_row": round(added * 1e6 / told["rows"], 2) if told["rows"] else None,
        "bytes": told["bytes"],
        "write_ms": round(told["write_ms"], 2),
        "peak_mb": round(told["peak_mb"], 1),
        "peak_over_bare_mb": round(told["peak_mb"] - bare["peak_mb"], 1),
        "peak_over_bare_without_imports_mb": round(
            (told["peak_mb"] - told["before_mb"]) - (bare["peak_mb"] - bare["before_mb"]), 1
        ),
        "versions": worker.versions,
    }


def compare(workers: dict[str, Worker], kinds: list[str]) -> dict[str, Any]:
    """Of each kind: the step time with msmon over that with the original, round by round."""
    result = {}
    for kind in kinds:
        ours, theirs = workers[f"msmon: {kind}"].wall, workers[f"original: {kind}"].wall
        ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
        result[kind] = {"ratio": round(statistics.median(ratios), 4), "quartiles": quartiles(ratios)}
    return result


def quartiles(values: list[float]) -> list[float]:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return [round(low, 4), round(high, 4)]


def show_progress(done: int, rounds: int) -> None:
    if sys.stderr.isatty():
        print(f"\rround {done} of {rounds}", end="" if done < rounds else "\n", file=sys.stderr, flush=True)


def as_markdown(figures: dict[str, Any]) -> str:
    title = f"{figures['model']}, AdamW, CPU; statistics: {', '.join(figures['statistics'])}; "
    columns = ["variant", "step", "ratio to bare", "quartiles", "CPU time to bare", "training thread, a row"]
    columns += ["written a step", "in", "peak memory over bare", "… without imports"]
    lines = [
        title + f"{figures['rounds']} rounds of {figures['steps_a_round']} steps",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for name, row in figures["variants"].items():
        low, high = row["ratio_quartiles"]
        lines.append(
            f"| {name} | {row['step_ms']:.1f} ms | {row['ratio']:.3f} | {low:.3f} to {high:.3f} | {row['cpu_ratio']:.3f} "
            f"| {written(row)} | {row['peak_over_bare_mb']:+.1f} MB | {row['peak_over_bare_without_imports_mb']:+.1f} MB |"
        )
    lines.append("")
    for kind, row in figures["msmon_to_original"].items():
        low, high = row["quartiles"]
        lines.append(f"msmon to the original, {kind}: {row['ratio']:.3f} ({low:.3f} to {high:.3f})")
    versions = {k: v for row in figures["variants"].values() for k, v in row["versions"].items()}
    lines.append(signature(figures, versions))
    return "\n".join(lines)


def written(row: dict[str, Any]) -> str:
    each = "" if row["thread_us_a_row"] is None else f"{row['thread_us_a_row']:.1f} µs"
    return f"{each} | {row['rows']} rows, {row['bytes'] / 1024:.1f} kB | {row['write_ms']:.1f} ms"


# What runs in a worker. It needs torch, and of the monitors only its own.


def work(monitor: str, kind: str, arguments: argparse.Namespace) -> None:
    """Answer on stdout, a line a request; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    before = resident_mb()  # what a monitor imports is counted, and shown apart
    trainer_class = importlib.import_module(MONITORS[monitor]).TrainerMon if monitor in MONITORS else None
    imported = resident_mb() - before
    torch.manual_seed(0)
    model, loss = make_many() if arguments.model == "many" else make_gpt(arguments.layers, arguments.width)
    written = Written()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if trainer_class is not None:
        switches = SWITCHES.values() if kind in {"all", "idle"} else [SWITCHES[kind]]
        config = {"targets": {}, "all_xy": True, "format": "csv", "ops": SIX, **dict.fromkeys(switches, True)}
        config["start_step"] = 10**9 if kind == "idle" else 0
        Path("monitor.json").write_text(json.dumps(config), encoding="utf-8")
        watcher = trainer_class("monitor.json", params_have_main_grad=False)
        watcher.set_monitor(model=model, grad_acc_steps=1, optimizer=optimizer)
        if monitor == "msmon":
            written.follow()
    versions = {"torch": torch.__version__, "python": platform.python_version(), **monitor_version(monitor)}
    for line in sys.stdin:
        steps = json.loads(line)["steps"]
        wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
        for _ in range(steps):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        wall, thread = time.perf_counter() - wall, time.thread_time() - thread
        time.sleep(SETTLE / 2)  # a background thread's last rows belong to this turn's CPU time
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)
        answer = {
            "wall": wall,
            "cpu": time.process_time() - cpu,
            "thread": thread,
            "peak_mb": peak,
            "before_mb": imported,
            "versions": versions,
            **written.a_step(),
        }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    check_output(monitor, kind)


class Written:
    """What msmon's writer thread does: rows, bytes on disk, and its own processor time."""

    def __init__(self) -> None:
        self.steps = self.rows = 0
        self.seconds = 0.0

    def follow(self) -> None:
        from msmon.runtime.writer import Writer

        write = Writer._write

        def counted(writer: Any, table: Any) -> None:
            begin = time.thread_time()
            write(writer, table)
            self.seconds += time.thread_time() - begin
            self.steps, self.rows = self.steps + 1, len(table.rows)

        Writer._write = counted  # type: ignore[method-assign]

    def a_step(self, files: str = "out/*/*.csv") -> dict[str, Any]:
        size = sum(file.stat().st_size for file in Path().glob(files))
        steps = max(self.steps, 1)
        return {"rows": self.rows, "bytes": size // steps, "write_ms": self.seconds * 1e3 / steps}


def check_output(monitor: str, kind: str) -> None:
    """A monitor that wrote nothing was not measured."""
    written = list(Path("out").glob("*/*.csv"))
    assert bool(written) == (monitor in MONITORS and kind != "idle"), f"{monitor} wrote {len(written)} files"


def monitor_version(monitor: str) -> dict[str, str]:
    from importlib.metadata import version

    package = {"msmon": "msmon", "original": "mindstudio-probe"}.get(monitor)
    return {package: version(package)} if package else {}


def resident_mb() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0.0
    return pages * resource.getpagesize() / 1024**2


def make_many() -> tuple[Any, Callable[[], Any]]:
    """A thousand tensors so small that what is done for each of them is all that counts, and a loss."""
    import torch
    from torch import nn

    class Residual(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 0.01 * super().forward(x)

    model = nn.Sequential(*(Residual(16, 16) for _ in range(500)))
    inputs = torch.randn(16, 16)
    return model, lambda: model(inputs).square().mean()


def make_gpt(layers: int, width: int) -> tuple[Any, Callable[[], Any]]:
    """A byte-level GPT, as plain as can be, and a loss."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, time_, _ = x.shape
            q, k, v = self.qkv(self.norm_1(x)).view(batch, time_, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.projection(attended.transpose(1, 2).reshape(batch, time_, width))
            return x + self.mlp(self.norm_2(x))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token_embedding, self.position_embedding = nn.Embedding(256, width), nn.Embedding(128, width)
            self.layers = nn.ModuleList(Block() for _ in range(layers))
            self.final_norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))
            for layer in self.layers:
                x = layer(x)
            return self.head(self.final_norm(x))

    model, tokens = Gpt(), torch.randint(256, (8, 129))

    def loss() -> torch.Tensor:
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return model, loss


if __name__ == "__main__":
    main()
