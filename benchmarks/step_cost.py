"""What watching costs a training step: a small GPT bare, with msmon and, if there is one, with the original.

Every variant trains in a process of its own. The processes take turns, in a shuffled order, a few consecutive steps
each (so that what a variant does in the background meets its own next step), and only one computes at a time: noise of
the machine meets all alike. A ratio is the median over the rounds of a variant's step time over that of the bare
training of the same round.

The original (mindstudio-probe) lives in an environment of its own, made from ``requirements/compat.txt``; it takes part
when ``MSMON_COMPAT_PYTHON`` names that environment's Python, and is compared with a bare training in that environment.

    python benchmarks/step_cost.py [--kinds gradients weights optimizer all] [--steps 100] [--json FILE]
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
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from side_by_side import ask, cpu_model

SIX = ["min", "max", "norm", "mean", "zeros", "nans"]
SWITCHES = {
    "gradients": "wg_distribution",
    "weights": "param_distribution",
    "optimizer": "mv_distribution",
    "activations": "xy_distribution",
}
KINDS = (*SWITCHES, "all")
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
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", nargs=2, metavar=("MONITOR", "KIND"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker, arguments.layers, arguments.width)
        return
    figures = measure(arguments)
    print(as_markdown(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


@dataclass
class Worker:
    """A variant in a process of its own, and what it measured."""

    name: str
    process: subprocess.Popen[str]
    baseline: str
    versions: dict[str, str] = field(default_factory=dict)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory_mb: float = 0.0
    memory_before_mb: float = 0.0

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
            show_progress(rounds, rounds)
            for worker in workers:
                answer = worker.ask(steps=0)
                worker.memory_mb, worker.memory_before_mb = answer["peak_mb"], answer["before_mb"]
        finally:
            for worker in workers:
                worker.process.communicate(timeout=60)  # end of input ends it
    by_name = {worker.name: worker for worker in workers}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": {"layers": arguments.layers, "width": arguments.width, "batch": [8, 128]},
        "statistics": SIX,
        "rounds": rounds,
        "steps_a_round": arguments.block,
        "variants": {worker.name: summarize(worker, by_name[worker.baseline]) for worker in workers},
        "msmon_to_original": compare(by_name, arguments.kinds) if original else {},
        "machine": {
            "system": platform.platform(),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
        },
    }


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
        command += ["--layers", str(arguments.layers), "--width", str(arguments.width)]
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
    return {
        "step_ms": round(statistics.median(worker.wall) * 1e3, 2),
        "compared_with": baseline.name,
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": quartiles(ratios),
        "cpu_ratio": round(statistics.median(cpu_ratios), 4),
        "peak_mb": round(worker.memory_mb, 1),
        "peak_over_bare_mb": round(worker.memory_mb - baseline.memory_mb, 1),
        "peak_over_bare_without_imports_mb": round(
            (worker.memory_mb - worker.memory_before_mb) - (baseline.memory_mb - baseline.memory_before_mb), 1
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
    model, machine = figures["model"], figures["machine"]
    title = (
        f"GPT, {model['layers']} layers, width {model['width']}, batch 8x128, AdamW, CPU; statistics: "
        f"{', '.join(figures['statistics'])}; {figures['rounds']} rounds of {figures['steps_a_round']} steps"
    )
    lines = [
        title,
        "",
        "| variant | step | ratio to bare | quartiles | CPU time to bare | peak memory over bare | … without imports |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in figures["variants"].items():
        low, high = row["ratio_quartiles"]
        lines.append(
            f"| {name} | {row['step_ms']:.1f} ms | {row['ratio']:.3f} | {low:.3f} to {high:.3f} | {row['cpu_ratio']:.3f} "
            f"| {row['peak_over_bare_mb']:+.1f} MB | {row['peak_over_bare_without_imports_mb']:+.1f} MB |"
        )
    lines.append("")
    for kind, row in figures["msmon_to_original"].items():
        low, high = row["quartiles"]
        lines.append(f"msmon to the original, {kind}: {row['ratio']:.3f} ({low:.3f} to {high:.3f})")
    versions = {f"{k} {v}" for row in figures["variants"].values() for k, v in row["versions"].items()}
    lines.append(
        f"{', '.join(sorted(versions))}; {machine['cpu']}, {machine['cores']} cores, {machine['system']}; {figures['date']}"
    )
    return "\n".join(lines)


# What runs in a worker. It needs torch, and of the monitors only its own.


def work(monitor: str, kind: str, layers: int, width: int) -> None:
    """Answer on stdout, a line a request; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    before = resident_mb()  # what a monitor imports is counted, and shown apart
    trainer_class = importlib.import_module(MONITORS[monitor]).TrainerMon if monitor in MONITORS else None
    imported = resident_mb() - before
    torch.manual_seed(0)
    model = make_gpt(layers, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if trainer_class is not None:
        switches = SWITCHES.values() if kind == "all" else [SWITCHES[kind]]
        config = {"targets": {}, "all_xy": True, "format": "csv", "ops": SIX, **dict.fromkeys(switches, True)}
        Path("monitor.json").write_text(json.dumps(config), encoding="utf-8")
        watcher = trainer_class("monitor.json", params_have_main_grad=False)
        watcher.set_monitor(model=model, grad_acc_steps=1, optimizer=optimizer)
    tokens = torch.randint(256, (8, 129))
    versions = {"torch": torch.__version__, "python": platform.python_version(), **monitor_version(monitor)}
    for line in sys.stdin:
        steps = json.loads(line)["steps"]
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
        wall = time.perf_counter() - wall
        time.sleep(SETTLE / 2)  # a background thread's last rows belong to this turn's CPU time
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)
        answer = {
            "wall": wall,
            "cpu": time.process_time() - cpu,
            "peak_mb": peak,
            "before_mb": imported,
            "versions": versions,
        }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    check_output(monitor)


def check_output(monitor: str) -> None:
    """A monitor that wrote nothing was not measured."""
    written = list(Path("out").glob("*/*.csv"))
    assert bool(written) == (monitor in MONITORS), f"{monitor} wrote {len(written)} files"


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


def make_gpt(layers: int, width: int) -> Any:
    """A byte-level GPT, as plain as can be."""
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

    return Gpt()


if __name__ == "__main__":
    main()
