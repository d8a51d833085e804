"""The benchmarks run and print what they promise; their figures are not asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_step_cost(tmp_path: Path) -> None:
    """A small run of the step benchmark compares msmon with the bare training, as a table and as JSON."""
    small = ["--steps", "4", "--layers", "1", "--width", "32", "--json", str(tmp_path / "figures.json")]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "step_cost.py"), *small],
        capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| msmon: gradients |" in done.stdout
    assert json.loads((tmp_path / "figures.json").read_text())


@pytest.mark.slow
def test_startup(tmp_path: Path) -> None:
    """A few pairs of the start-up benchmark give a difference and a ratio."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "startup.py"), "--pairs", "3"],
        capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "ms" in done.stdout


@pytest.mark.slow
def test_kernels(tmp_path: Path) -> None:
    """A small run of the kernel benchmark gives a table and JSON: every kernel against one pass."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "kernels.py"), "--quick", "--rounds", "1", "--json", "figures.json"],
        capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, cwd=tmp_path, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| float32 | 1,000 x 1,000 |" in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures["results"][0]["to_pass"]) == {"compiled", "numpy", "eager"}
    assert figures["versions"]["llvmlite"]


@pytest.mark.slow
def test_alerts(tmp_path: Path) -> None:
    """A small run of the benchmark of alerts compares rules with CSV, and ranks."""
    sizes = ["--steps", "5", "--ranks", "3", "--anomalies", "10"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "alerts.py"), *sizes, "--json", "figures.json"],
        capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "30 anomalies of 3 ranks: ranked in" in done.stdout
    assert [one["rows"] for one in json.loads((tmp_path / "figures.json").read_text())["rules"]] == [10, 100, 1000]
