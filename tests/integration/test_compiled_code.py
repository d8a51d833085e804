"""Whatever is compiled, exported, scripted or transformed in a training comes out as it does without msmon."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from integration.conftest import HERE, integration_runner

if TYPE_CHECKING:
    from conftest import Runner

pytestmark = pytest.mark.slow

EVERYTHING = {
    "mg_direction": True,
    "ur_distribution": True,
    "xy_distribution": True,
    "all_xy": True,
    "cc_distribution": {"enable": True, "cc_pre_hook": True},
    "param_distribution": True,
    "wg_distribution": True,
    "mv_distribution": True,
    "monitor_mbs_grad": True,
    "stack_info": True,
    "alert": {"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": 0}}], "dump": True},
}
COLUMNS: dict[str, dict[str, Any]] = {
    "gradients": {},
    "everything": {"config": EVERYTHING},
    "activations": {"options": ["--activations"]},
    "dynamic": {"options": ["--dynamic"], "config": {**EVERYTHING, "dynamic_on": True}},
}
SOME = (
    "model",
    "container_in_place",
    "model_in_place",
    "modules_constructed",
    "optimizer_step",
    "whole_step",
    "exported",
)
"""Cases for the columns that differ from the others by little."""

Seen = dict[str, dict[str, Any]]


def cases(runner: Runner, run: Any, *names: str, **options: Any) -> Seen:
    """What the cases have computed, and what the compiler has seen of them."""
    path = runner.folder / "seen.json"
    runner.environment["TORCHINDUCTOR_CACHE_DIR"] = str(runner.folder / "inductor")
    done = run(HERE / "compiled_code.py", str(path), *names, timeout=900, **options)  # many graphs, on a busy machine
    assert done.returncode == 0, done.stderr
    seen: Seen = json.loads(path.read_text())
    return seen


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Seen]:
    runner = integration_runner(tmp_path_factory.mktemp("compiled_code"))
    return runner, cases(runner, runner.bare)


CALL_OURS = {
    "step_with_modules_and_modes",
    "modes_in_full_graph",
    "own_optimizer_step",
    "own_optimizer_step_in_full_graph",
    "backward_compiled",
    "backward_of_eager_compiled",
}
"""Cases in which the compiler meets hooks and wrappers that all options have: it sees that they do nothing, and guards that."""


@pytest.mark.parametrize("column", COLUMNS)
def test_compiled_code(column: str, table: tuple[Runner, Seen]) -> None:
    """Graphs, recompilations and bits are those of the bare run, no break is new, and without hooks on modules no guard.

    Of breaks there may be fewer: torch's wrapper around ``optimizer.step``, which has nothing to compute, is not compiled.
    """
    runner, bare = table
    names = [*bare] if column in {"gradients", "everything"} else SOME
    seen = cases(runner, runner.monitored, *names, **COLUMNS[column])
    for part in ("result", "graphs", "captured"):
        assert {name: seen[name][part] for name in names} == {name: bare[name][part] for name in names}
    for name in names:
        breaks = seen[name]["breaks"]
        assert sum(count for _, count in breaks) <= sum(count for _, count in bare[name]["breaks"]), (name, breaks)
    if column == "gradients":
        guarded = {name for name in names if seen[name]["guards"] != bare[name]["guards"]}
        assert guarded <= CALL_OURS
