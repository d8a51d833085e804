"""How fast ``msmon analyse``, ``merge`` and ``csv2tb`` read CSV files, and how much memory that takes beyond importing them.

``python benchmarks/offline.py [--rows 1000000] [--json FILE]``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from side_by_side import cpu_model

LIMIT_MB = 200
COMMANDS = {
    "analyse": ("msmon.offline.analyse", "analyse"),
    "merge": ("msmon.offline.merge", "merge"),
    "csv2tb": ("msmon.offline.csv2tb", "convert"),
}
MEASURED = """
import json, resource, sys, time
from importlib import import_module
from pathlib import Path
command = getattr(import_module(sys.argv[1]), sys.argv[2])
if sys.argv[2] == "convert":
    import_module("tensorboard.summary.writer.event_file_writer")
    import_module("tensorboard.compat.proto.event_pb2")
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, begin = peak(), time.perf_counter()
command(Path(sys.argv[3]))
print(json.dumps({"seconds": time.perf_counter() - begin, "peak_mb": peak() - before}))
"""
SHAPES = {"1,000 tensors a step": 1000, "1 tensor a step": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of a run, of two ranks (default: 1000000)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = {
        "commands": [one for shape in SHAPES for one in measured(shape, arguments.rows)],
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }
    print(as_markdown(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def measured(shape: str, rows: int) -> list[dict[str, Any]]:
    """Each command in a process of its own, over the same files."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), SHAPES[shape], rows)
        for name, (module, function) in COMMANDS.items():
            done = subprocess.run(
                [sys.executable, "-c", MEASURED, module, function, folder], check=True, stdout=subprocess.PIPE
            )
            figures = json.loads(done.stdout)
            found.append({"command": name, "shape": shape, "rows": rows, **figures})
    return found


def write_run(root: Path, tensors: int, rows: int) -> None:
    """Two ranks, each with half of every parameter, all rows of a rank in one file."""
    names = [f"blocks.{number}.weight" for number in range(tensors)]
    steps = rows // 2 // tensors
    for rank in range(2):
        directory = root / f"Nov29_10-00-00-rank{rank}-0123abcd"
        directory.mkdir()
        parameters = [
            {"name": name, "shape": [32, 64], "whole_shape": [64, 64], "offset": [32 * rank, 0]} for name in names
        ]
        (directory / "run.json").write_text(json.dumps({"models": [{"parameters": parameters}]}))
        with (directory / f"grad_reduced_0-{steps - 1}.csv").open("w") as file:
            file.write("vpp_stage,name,step,min,max,norm,mean,zeros,nans,shape,dtype\n")
            for step in range(steps):
                file.writelines(
                    f'0,{name},{step},-0.02,0.02,{1 + step % 7 / 10},0.0,0.0,0,"[32, 64]",torch.float32\n'
                    for name in names
                )
        with (directory / "steps.csv").open("w") as file:
            file.write("model,step,micro_steps,skipped,grad_scale,complete\n")
            file.writelines(f",{step},1,0,,1\n" for step in range(steps))


def as_markdown(figures: dict[str, Any]) -> str:
    lines = ["| command | run | rows | rows/s | memory over imports, MB |", "|---|---|---|---|---|"]
    lines += [
        f"| {one['command']} | {one['shape']} | {one['rows']:,} | {one['rows'] / one['seconds']:,.0f} | {one['peak_mb']:.0f} |"
        for one in figures["commands"]
    ]
    worst = max(one["peak_mb"] for one in figures["commands"])
    verdict = "kept" if worst < LIMIT_MB else "missed"
    return "\n".join([*lines, "", f"target: under {LIMIT_MB} MB: {verdict}", figures["machine"]])


if __name__ == "__main__":
    main()
