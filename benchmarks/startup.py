"""What injection costs a Python process that never imports torch.

``python -c pass`` is started bare and injected, in turns, so that a busy machine slows both. The figure is the
difference of the medians. The target is 2 ms.

    python benchmarks/startup.py [--pairs 150] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from side_by_side import about, publish, signature

import msmon
from msmon import env
from msmon.bootstrap.launch import prepare_environment
from msmon.config.schema import MonitorConfig

TARGET_MS = 2.0
COMMAND = [sys.executable, "-c", "pass"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=150, help="bare and injected processes (default: 150 each)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = measure(arguments.pairs)
    publish(figures, as_markdown(figures), arguments.json)


def measure(pairs: int) -> dict[str, Any]:
    ours = ("MSMON", "PYTHON_MSMON")
    bare = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    # Byte code is kept where it belongs, whatever the caller's shell says: an installed package has its own.
    bare.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        prepared, _ = prepare_environment(MonitorConfig(wg_distribution=True), COMMAND, output=folder)
        names = (env.SETTINGS, env.SETTINGS_FORWARDED, env.RUN_ID, env.RUN_ID_FORWARDED, "MSMON_MAIN_PID", "PYTHONPATH")
        injected = {**bare, **{name: prepared[name] for name in names}}
        check(bare, injected, Path(folder))
        times: dict[str, list[float]] = {"bare": [], "injected": []}
        for _ in range(pairs):
            times["bare"].append(milliseconds(bare))
            times["injected"].append(milliseconds(injected))
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        **about(),
        "pairs": pairs,
        "bare_ms": round(medians["bare"], 3),
        "injected_ms": round(medians["injected"], 3),
        "difference_ms": round(medians["injected"] - medians["bare"], 3),
        "ratio": round(medians["injected"] / medians["bare"], 4),
        "target_ms": TARGET_MS,
        "spread_ms": {name: [round(v, 3) for v in statistics.quantiles(values, n=4)] for name, values in times.items()},
        "versions": {"msmon": msmon.__version__, "python": platform.python_version()},
    }


def check(bare: dict[str, str], injected: dict[str, str], folder: Path) -> None:
    """Both run once, which also writes their byte code, and only one of them is injected."""
    for environment, expected in ((bare, 0), (injected, 1)):
        log = folder / "boots"
        subprocess.run(COMMAND, env={**environment, env.DEBUG: str(log)}, check=True)
        boots = len(log.read_text(encoding="utf-8").splitlines()) if log.exists() else 0
        assert boots == expected, f"{boots} injected processes, expected {expected}"


def milliseconds(environment: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run(COMMAND, env=environment, check=True)
    return (time.perf_counter() - begin) * 1e3


def as_markdown(figures: dict[str, Any]) -> str:
    return f"""\
`python -c pass`, median of {figures["pairs"]} processes each, started in turns

| bare | injected | difference | ratio | target |
|---|---|---|---|---|
| {figures["bare_ms"]:.2f} ms | {figures["injected_ms"]:.2f} ms | {figures["difference_ms"]:+.2f} ms \
| {figures["ratio"]:.3f} | {figures["target_ms"]:.0f} ms |

{signature(figures, figures["versions"])}"""


if __name__ == "__main__":
    main()
