"""The benchmarks run and print what they promise; their figures are not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_report(tmp_path: Path) -> None:
    """Every benchmark runs; each prints its table, the last one is that of the targets, and all figures are in one file."""
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "report.py"), "--quick", "--json", str(tmp_path / "figures.json")],
        capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["machine"]["cores"]
    assert figures["startup"]["difference_ms"]
    assert set(figures["kernels"]["results"][0]["to_pass"]) == {"compiled", "numpy", "eager"}
    assert figures["kernels"]["versions"]["llvmlite"]
    rows = figures["many"]["variants"]["msmon: all"]["rows"]
    assert rows > 8000
    assert figures["many"]["variants"]["msmon: idle"]["rows"] == 0
    growth = figures["growth"]["results"]
    assert growth["tensors x 10"]["rows_a_step"] > 9 * growth["base"]["rows_a_step"]
    tables = [line for line in done.stdout.splitlines() if line.startswith("|---")]
    assert len(tables) == 6
    for line in ("| float32 | 1,000 x 1,000 |", "| msmon: gradients |", "| ranks x 4 |", "| step to bare, gradients |"):
        assert line in done.stdout


@pytest.mark.slow
def test_alerts(tmp_path: Path) -> None:
    """A small run of the benchmark of alerts compares rules with CSV, and ranks."""
    sizes = ["--steps", "5", "--ranks", "3", "--anomalies", "10"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "alerts.py"), *sizes, "--json", "figures.json"],
        capture_output=True, text=True, cwd=tmp_path, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "30 anomalies of 3 ranks: ranked in" in done.stdout
    assert [one["rows"] for one in json.loads((tmp_path / "figures.json").read_text())["rules"]] == [10, 100, 1000]
