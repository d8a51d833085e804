"""What grows with a training: ten times the tensors, ten times the steps, four times the ranks. On the CPU.

Each case trains linear layers of width 16 in processes of their own, bare and with everything watched; ranks train under
DDP with gloo. The cost is processor time, since more ranks than cores wait for each other. What must not grow with tensors,
steps or ranks is the cost of a row; what a training keeps must not grow with its steps.

    python benchmarks/growth.py [--steps 30] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from side_by_side import about, publish, signature
from step_cost import SIX, SWITCHES, Written, resident_mb

CASES = {
    "base": {"layers": 50, "times": 1, "ranks": 1},
    "tensors x 10": {"layers": 500, "times": 1, "ranks": 1},
    "steps x 10": {"layers": 50, "times": 10, "ranks": 1},
    "ranks x 4": {"layers": 50, "times": 1, "ranks": 4},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps of the base case (default: 30)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", nargs=3, metavar=("WATCHED", "LAYERS", "STEPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        watched, layers, steps = arguments.worker
        print(json.dumps(work(int(layers), int(steps), watched=watched == "msmon")))
        return
    results = {}
    for name, case in CASES.items():
        steps = arguments.steps * case["times"]
        bare, watched = (train(which, case["layers"], steps, case["ranks"]) for which in ("bare", "msmon"))
        results[name] = {**case, "steps": steps, **compare(bare, watched)}
    figures = {**about(), "results": results, "versions": versions()}
    publish(figures, as_markdown(figures), arguments.json)


def train(which: str, layers: int, steps: int, ranks: int) -> list[dict[str, float]]:
    """What each rank measured."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MSMON", "DYNAMIC_MONITOR"))}
        environment |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MONITOR_OUTPUT_DIR": "out"}
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", which, str(layers), str(steps)],
                cwd=folder,
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(ranks)
        ]
        answers = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), "a rank failed"
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def compare(bare: list[dict[str, float]], watched: list[dict[str, float]]) -> dict[str, Any]:
    def mean(measured: list[dict[str, float]], name: str) -> float:
        return sum(rank[name] for rank in measured) / len(measured)

    rows = int(mean(watched, "rows"))
    return {
        "rows_a_step": rows,
        "cpu_us_a_row": round((mean(watched, "cpu") - mean(bare, "cpu")) * 1e6 / rows, 1),
        "bytes_a_row": round(mean(watched, "bytes") / rows, 1),
        "peak_over_bare_mb": round(mean(watched, "peak_mb") - mean(bare, "peak_mb"), 1),
        "kept_mb": round(mean(watched, "kept_mb") - mean(bare, "kept_mb"), 1),
    }


def as_markdown(figures: dict[str, Any]) -> str:
    lines = [
        f"Everything, {', '.join(SIX)}; of ranks the mean",
        "",
        "| | rows a step | steps | processor time a row | bytes a row | peak memory over bare | kept after warm-up |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in figures["results"].items():
        lines.append(
            f"| {name} | {row['rows_a_step']:,} | {row['steps']} | {row['cpu_us_a_row']:.1f} µs | {row['bytes_a_row']:.0f} "
            f"| {row['peak_over_bare_mb']:+.1f} MB | {row['kept_mb']:+.1f} MB |"
        )
    return "\n".join([*lines, "", signature(figures, figures["versions"])])


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"python": platform.python_version(), **{name: version(name) for name in ("msmon", "torch")}}


def work(layers: int, steps: int, *, watched: bool) -> dict[str, float]:
    """Train, and measure after a few steps that warm up."""
    import torch

    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        store = torch.distributed.FileStore("store", ranks)
        torch.distributed.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=ranks)
    model: torch.nn.Module = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if ranks > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    written = Written()
    if watched:
        from msmon.pytorch import TrainerMon

        file = Path(f"monitor{os.environ['RANK']}.json")
        file.write_text(json.dumps({"ops": SIX, "all_xy": True, **dict.fromkeys(SWITCHES.values(), True)}))
        TrainerMon(file, params_have_main_grad=False).set_monitor(model, 1, optimizer)
        written.follow()
    inputs = torch.randn(16, 16)

    def train(count: int) -> float:
        begin = time.process_time()
        for _ in range(count):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        return (time.process_time() - begin) / count

    train(10)
    resident = resident_mb()
    cpu = train(steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024**2)
    told = written.a_step(f"out/*-rank{os.environ['RANK']}-*/*.csv")
    if ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        time.sleep(0.2)  # a thread of gloo that frees tensors when Python ends aborts the process, also without msmon
    return {"cpu": cpu, "peak_mb": peak, "kept_mb": resident_mb() - resident, **told}


if __name__ == "__main__":
    main()
