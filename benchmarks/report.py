"""Runs every benchmark, prints its table, and at the end one table of targets; all figures go to one JSON file.

    python benchmarks/report.py [--quick] [--json FILE]

With the original beside when ``MSMON_COMPAT_PYTHON`` names its environment's Python. On a quiet machine of two cores it
takes about 15 minutes; ``--quick`` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from side_by_side import about, publish, signature

KINDS = ["gradients", "weights", "optimizer", "activations", "all", "idle"]
PARTS = {
    "startup": ["startup.py"],
    "kernels": ["kernels.py"],
    "gpt": ["step_cost.py", "--kinds", *KINDS],
    "many": ["step_cost.py", "--model", "many", "--kinds", *KINDS],
    "growth": ["growth.py"],
}
QUICK = {
    "startup": ["--pairs", "3"],
    "kernels": ["--quick", "--rounds", "1"],
    "gpt": ["--steps", "4", "--layers", "1", "--width", "32"],
    "many": ["--steps", "4"],
    "growth": ["--steps", "3"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small measurements each")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parser.parse_args()
    figures: dict[str, Any] = about()
    with tempfile.TemporaryDirectory() as folder:
        for name, (script, *options) in PARTS.items():
            file = Path(folder) / f"{name}.json"
            command = [sys.executable, str(Path(__file__).with_name(script)), *options, "--json", str(file)]
            print(f"\n## {' '.join([script, *options])}\n", flush=True)
            subprocess.run([*command, *(QUICK[name] if arguments.quick else [])], check=True)
            figures[name] = json.loads(file.read_text(encoding="utf-8"))
    print("\n## Targets\n")
    publish(figures, as_markdown(figures), arguments.json)


def as_markdown(figures: dict[str, Any]) -> str:
    lines = ["| | measured | target | |", "|---|---|---|---|"]
    for what, measured, target, unit in targets(figures):
        reached = "reached" if measured <= target else "missed"
        lines.append(f"| {what} | {measured:.3g} {unit} | ≤ {target:.3g} {unit} | {reached} |")
    return "\n".join([*lines, "", signature(figures, figures["kernels"]["versions"])])


def targets(figures: dict[str, Any]) -> list[tuple[str, float, float, str]]:
    """What is promised, each a figure of one run: name, measured, at most, unit."""
    gpt, many = figures["gpt"]["variants"], figures["many"]["variants"]
    found = [("start of a process without torch", figures["startup"]["difference_ms"], 2.0, "ms")]
    for row in figures["kernels"]["results"]:
        size = f"{row['dtype']}, {row['tensors']:,} x {row['elements']:,}"
        if row["tensors"] * row["elements"] >= 10**6:
            found.append((f"compiled kernel to one pass, {size}", row["to_pass"]["compiled"], 1.5, ""))
        found.append((f"eager kernel to one pass, {size}", row["to_pass"]["eager"], 6.0, ""))
        if row["original_to"]:
            found.append((f"compiled kernel to the original, {size}", 1 / row["original_to"]["compiled"], 1 / 20, ""))
            found.append((f"eager kernel to the original, {size}", 1 / row["original_to"]["eager"], 1 / 6, ""))
    for kind, most in (("gradients", 1.01), ("activations", 1.05), ("all", 1.10), ("idle", 1.01)):
        found.append((f"step to bare, {kind}", gpt[f"msmon: {kind}"]["ratio"], most, ""))
    for kind in KINDS:
        row = gpt[f"msmon: {kind}"]
        budget = 16 + row["rows"] * 6 * 64 / 1024**2
        found.append((f"peak memory over bare, {kind}", row["peak_over_bare_mb"], budget, "MB"))
        if kind != "idle":
            found.append((f"training thread, {kind}, a row", many[f"msmon: {kind}"]["thread_us_a_row"], 5.0, "µs"))
    found.append(("kept in ten times the steps", figures["growth"]["results"]["steps x 10"]["kept_mb"], 1.0, "MB"))
    return found


if __name__ == "__main__":
    main()
