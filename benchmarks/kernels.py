"""What the statistics of tensors cost: each kernel against one ``torch.sum`` pass over the same tensors, on the CPU.

All six statistics of float32 and bfloat16. In a round every contender reads the same tensors once, one after another in
a shuffled order; a ratio is the median over the rounds of one contender's time over another's in the same round. The
original (mindstudio-probe) lives in an environment of its own, made from ``requirements/compat.txt``, and takes part when
``MSMON_COMPAT_PYTHON`` names that environment's Python.

    python benchmarks/kernels.py [--rounds 15] [--threads N] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from side_by_side import about, ask, publish, signature

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIX = ["min", "max", "norm", "mean", "zeros", "nans"]
CASES = [
    (dtype, tensors, elements)
    for dtype in ("float32", "bfloat16")
    for tensors, elements in ((1000, 1_000), (100, 100_000), (10, 1_000_000), (10, 10_000_000))
]
KERNELS = ["compiled", "numpy", "eager"]
PASS = "torch.sum"
LARGE = 10**7
"""Elements of all tensors together from which a third of the rounds is enough."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds of each size and dtype (default: 15)")
    parser.add_argument("--threads", type=int, default=0, help="threads of torch (default: as torch chooses)")
    parser.add_argument("--quick", action="store_true", help="a million elements at most")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", choices=["msmon", "original"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.threads)
        return
    figures = measure(arguments)
    publish(figures, as_markdown(figures), arguments.json)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    workers = [Worker("msmon", sys.executable, arguments.threads)]
    if os.environ.get("MSMON_COMPAT_PYTHON"):
        python = str(Path(os.environ["MSMON_COMPAT_PYTHON"]).absolute())
        workers.append(Worker("original", python, arguments.threads))
    results = []
    for dtype, tensors, elements in CASES:
        total = tensors * elements
        if arguments.quick and total > 10**6:
            continue
        rounds = []
        for number in range(1 + max(1, arguments.rounds // (3 if total >= LARGE else 1))):
            times: dict[str, float] = {}
            for worker in random.sample(workers, len(workers)):
                times |= worker.ask(dtype=dtype, tensors=tensors, elements=elements)
            if number:  # the first round warms up
                rounds.append(times)
        results.append({"dtype": dtype, "tensors": tensors, "elements": elements, **summarize(rounds)})
    told = [worker.ask() for worker in workers]
    return {
        **about(),
        "statistics": SIX,
        "results": results,
        "first_call_ms": told[0]["first_call_ms"],
        "versions": told[0]["versions"] | (told[1]["versions"] if len(told) > 1 else {}),
        "threads": told[0]["threads"],
    }


class Worker:
    """A process that computes when asked, in its own environment."""

    def __init__(self, name: str, python: str, threads: int) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [python, __file__, "--worker", name, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if name == "original" else None,
            text=True,
        )

    def ask(self, **case: Any) -> dict[str, Any]:
        return ask(self.process, self.name, **case)


def summarize(rounds: list[dict[str, float]]) -> dict[str, Any]:
    contenders = [name for name in (*KERNELS, "original") if name in rounds[0]]

    def ratio(one: str, other: str) -> float:
        return round(statistics.median(times[one] / times[other] for times in rounds), 3)

    return {
        "rounds": len(rounds),
        "pass_us": round(statistics.median(times[PASS] for times in rounds) * 1e6, 1),
        "us": {name: round(statistics.median(times[name] for times in rounds) * 1e6, 1) for name in contenders},
        "to_pass": {name: ratio(name, PASS) for name in contenders},
        "original_to": {name: ratio("original", name) for name in KERNELS if "original" in contenders},
    }


def as_markdown(figures: dict[str, Any]) -> str:
    contenders = list(figures["results"][0]["us"])
    lines = [
        f"All of {', '.join(figures['statistics'])}; time of a kernel to that of one {PASS} pass over the same tensors.",
        "",
        f"| dtype | tensors | {PASS} | "
        + " | ".join(contenders)
        + " | compiled, a tensor | original to compiled, eager |",
        "|---" * (5 + len(contenders)) + "|",
    ]
    for row in figures["results"]:
        size = f"{row['tensors']:,} x {row['elements']:,}"
        ratios = " | ".join(f"{row['to_pass'][name]:.2f}" for name in contenders)
        faster = row["original_to"]
        against = f"{faster['compiled']:.1f}, {faster['eager']:.1f}" if faster else ""
        each = row["us"]["compiled"] / row["tensors"]
        lines.append(f"| {row['dtype']} | {size} | {row['pass_us']:.0f} µs | {ratios} | {each:.1f} µs | {against} |")
    first_call = ", ".join(f"{name} {figure:.0f} ms" for name, figure in figures["first_call_ms"].items())
    lines += [
        "",
        f"First call, with what it imports, and compiles unless the code is on disk: {first_call}",
        f"{figures['threads']} threads; {signature(figures, figures['versions'])}",
    ]
    return "\n".join(lines)


# What runs in a worker. It needs torch, and what it measures.


def work(name: str, threads: int) -> None:
    """Answer on stdout, a line a request; whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    if threads:
        torch.set_num_threads(threads)
    first_call: dict[str, float] = {}
    contenders = {PASS: one_pass, **(our_kernels(first_call) if name == "msmon" else {"original": original_function()})}
    case: dict[str, Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if not asked:
            answer: dict[str, Any] = {
                "first_call_ms": first_call,
                "threads": torch.get_num_threads(),
                "versions": versions("msmon", "llvmlite", "numpy", "torch")
                if name == "msmon"
                else versions("mindstudio-probe"),
            }
        else:
            if asked != case:
                case, generator = asked, torch.Generator().manual_seed(0)
                tensors = [
                    torch.randn(case["elements"], generator=generator).to(getattr(torch, case["dtype"]))
                    for _ in range(case["tensors"])
                ]
            answer = {}
            for contender in random.sample(list(contenders), len(contenders)):
                begin = time.perf_counter()
                contenders[contender](tensors)
                answer[contender] = time.perf_counter() - begin
            if name == "original":
                del answer[PASS]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def one_pass(tensors: Sequence[Any]) -> None:
    import torch

    for tensor in tensors:
        torch.sum(tensor)


def our_kernels(first_call: dict[str, float]) -> dict[str, Callable[[Sequence[Any]], object]]:
    import torch

    from msmon.backends.pytorch.kernels.eager import EagerKernel
    from msmon.backends.pytorch.kernels.host import HostKernel
    from msmon.stats.definitions import Statistic

    begin = time.perf_counter()
    from msmon.backends.pytorch.kernels.fused import FusedKernel

    compiled = FusedKernel(HostKernel())
    for dtype in (torch.float32, torch.bfloat16):
        compiled.reduce([torch.ones(10, dtype=dtype)], list(Statistic), 1e-8)
        first_call[str(dtype).removeprefix("torch.")] = (time.perf_counter() - begin) * 1e3
        begin = time.perf_counter()
    kernels = dict(zip(KERNELS, (compiled, HostKernel(), EagerKernel()), strict=True))
    return {
        name: lambda tensors, kernel=kernel: kernel.reduce(tensors, list(Statistic), 1e-8)  # type: ignore[misc]
        for name, kernel in kernels.items()
    }


def original_function() -> Callable[[Sequence[Any]], object]:
    module = importlib.import_module("msprobe.pytorch.monitor.module_metric")
    return lambda tensors: module.get_metrics(SIX, {str(n): tensor for n, tensor in enumerate(tensors)}, 1e-8)


def versions(*packages: str) -> dict[str, str]:
    """Of those that are installed."""
    installed = {found.metadata["Name"]: found.version for found in distributions()}
    return {"python": platform.python_version(), **{name: installed[name] for name in packages if name in installed}}


if __name__ == "__main__":
    main()
