"""Environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from msmon import env
from msmon.runtime import process


def test_output_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """P1: the variable, else ./monitor_output; absolute, with ~ expanded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(env.OUTPUT_DIR, raising=False)
    assert env.output_root() == str(tmp_path / "monitor_output")
    monkeypatch.setenv(env.OUTPUT_DIR, "")
    assert env.output_root() == str(tmp_path / "monitor_output")
    monkeypatch.setenv(env.OUTPUT_DIR, "a b/c")
    assert env.output_root() == str(tmp_path / "a b" / "c")
    monkeypatch.setenv(env.OUTPUT_DIR, "~/runs")
    assert env.output_root() == str(Path.home() / "runs")


@pytest.mark.parametrize(
    ("value", "asked"),
    [
        ("True", True),
        ("true", True),
        (" TRUE ", True),
        ("1", True),
        ("False", False),
        ("0", False),
        ("", False),
        ("yes", False),
    ],
)
def test_dynamic(monkeypatch: pytest.MonkeyPatch, value: str, asked: bool) -> None:
    """``DYNAMIC_MONITOR=True`` asks for dynamic start and stop."""
    monkeypatch.setenv(env.DYNAMIC, value)
    assert env.dynamic_requested() is asked


def test_dynamic_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable nothing dynamic is asked for."""
    monkeypatch.delenv(env.DYNAMIC, raising=False)
    assert not env.dynamic_requested()


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, (2, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6"}, (5, 6)),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (1, 2)),  # torchrun inside of srun
        ({"RANK": "x", "SLURM_PROCID": "4"}, (4, 1)),
        ({"RANK": "-1"}, (0, 1)),
        ({"RANK": ""}, (0, 1)),
    ],
    ids=str,
)
def test_place(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: tuple[int, int]) -> None:
    """Rank and number of ranks are those that the nearest launcher says."""
    for name in (*env.RANK_VARIABLES, *env.WORLD_SIZE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert process.place_from_environment() == place


def test_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The id of ``msmon run`` goes first, then the scheduler's job, the same in all its processes; else it is random."""
    for name in (env.RUN_ID, *env.JOB_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    assert len({process.run_id() for _ in range(5)}) == 5
    monkeypatch.setenv("SLURM_JOB_ID", "1234")
    job = process.run_id()
    assert process.run_id() == job
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    assert process.run_id() != job
    monkeypatch.setenv(env.RUN_ID, "0123abcd")
    assert process.run_id() == "0123abcd"
    monkeypatch.setenv(env.RUN_ID, "not hexadecimal")
    assert process.run_id() != "not hexadecimal"
    assert len(process.run_id()) == 8
