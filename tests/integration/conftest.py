"""Scripts of these tests find ``truth.py`` beside them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import Runner
from integration.truth import Observed

from msmon import log
from msmon.offline.reader import RecordedRow, read_kind, run_directories
from msmon.pytorch import TrainerMon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent


def observe(folder: Path, script: str, *args: str, **config: object) -> Observed:
    """Run one of the scripts of this folder under ``msmon run``."""
    runner = integration_runner(folder)
    finished = runner.monitored(HERE / script, *args, config=config)
    assert finished.returncode == 0, finished.stderr
    return Observed(finished, json.loads((folder / "truth.json").read_text()))


def integration_runner(folder: Path) -> Runner:
    runner = Runner(folder)
    inherited = runner.environment.get("PYTHONPATH")
    runner.environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *([inherited] if inherited else [])])
    runner.environment["TRUTH"] = str(folder / "truth.json")
    return runner


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return integration_runner(tmp_path)


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Observed]:
    """``observe`` in a folder of its own; one run serves all tests that ask for the same."""
    runs: dict[str, Observed] = {}

    def run(script: str, *args: str, **config: object) -> Observed:
        key = json.dumps([script, args, config], sort_keys=True)
        if key not in runs:
            runs[key] = observe(tmp_path_factory.mktemp(Path(script).stem), script, *args, **config)
        return runs[key]

    return run


class Room:
    """Makes monitors that write into one folder, and reads back what they wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.monitors: list[TrainerMon] = []

    def monitor(self, *, params_have_main_grad: bool = False, **config: Any) -> TrainerMon:
        path = self.folder / "monitor.json"
        path.write_text(json.dumps({"wg_distribution": True, "ndigits": 16, **config}))
        self.monitors.append(TrainerMon(path, params_have_main_grad=params_have_main_grad))
        return self.monitors[-1]

    def rows(self, kind: str) -> list[RecordedRow]:
        for monitor in self.monitors:
            monitor.close()
        return [row for directory in run_directories(self.folder / "out") for row in read_kind(directory, kind)]


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))
    monkeypatch.setattr(log, "_said", {})
    made = Room(tmp_path)
    yield made
    for monitor in made.monitors:
        monitor.close()
