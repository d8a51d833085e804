"""Changes of a configuration on their way through a store that outlives the workers, as torchrun's does."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore

from msmon.backends.pytorch import dynamic
from msmon.backends.pytorch.dynamic import DynamicRun
from msmon.config.load import load_config
from msmon.runtime.process import Place

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from msmon.plan.dynamic import DynamicGate

CONFIG = {"dynamic_on": True, "wg_distribution": True, "ops": ["norm"]}


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(path: Path) -> tuple[list[DynamicRun], list[DynamicGate]]:
    """Two ranks of a job: the one that watches the file, and one that hears of it."""
    runs = [DynamicRun(str(path), load_config(path), 0) for _ in range(2)]
    gates = [run.gate(0) for run in runs]
    for rank, run in enumerate(runs):
        run.start(Place(rank, 2))
    return runs, gates


def test_a_restart_hears_nothing_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the workers before a restart were told is not told again; what is new is."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(dynamic, "_connection", store.clone)
    path = tmp_path / "monitor.json"
    path.write_text(json.dumps({**CONFIG, "dynamic_on": False}))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    runs, gates = start(path)
    try:
        path.write_text(json.dumps(CONFIG))
        wait_for(lambda: all(gate._scheduled for gate in gates))
    finally:
        for run in runs:
            run.stop()

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    runs, gates = start(path)
    try:
        time.sleep(5 * dynamic.POLL_SECONDS)
        assert [gate._scheduled for gate in gates] == [[], []]
        path.write_text(json.dumps({**CONFIG, "ops": ["max"]}))
        wait_for(lambda: all(gate._scheduled for gate in gates))
        scheduled = [gate._scheduled for gate in gates]
        assert [[(step, config.ops) for step, config in one] for one in scheduled] == [[(2, ("max",))]] * 2
    finally:
        for run in runs:
            run.stop()
