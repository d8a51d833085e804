"""A torch that lacks one of the private names that msmon uses: the feature is off, which is said once, and training goes on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from integration.conftest import HERE, integration_runner

if TYPE_CHECKING:
    from conftest import Runner

pytestmark = pytest.mark.slow

EVERYTHING = {
    "xy_distribution": True,
    "all_xy": True,
    "cc_distribution": {"enable": True, "cc_pre_hook": True},
    "param_distribution": True,
    "wg_distribution": True,
    "mv_distribution": True,
}
COMMUNICATION = "observation of communication switched off, training goes on"
# Names that torch itself can do without in such a training; kinds of rows that are left, and what is said.
MISSING = {
    "backward": (["_C._current_graph_task_id"], {"actv", "grad_reduced"}, ["told apart no longer"]),
    "transforms": (
        ["_C._functorch.peek_interpreter_stack", "_C._dispatch_keyset_full_after"],
        {"grad_reduced", "param_origin"},
        ["activations are not recorded", COMMUNICATION],
    ),
    "modes": (
        ["_C._len_torch_dispatch_stack", "distributed._broadcast_coalesced", "fx._symbolic_trace._is_fx_tracing_flag"],
        {"grad_reduced", "param_origin"},
        ["activations are not recorded", COMMUNICATION],
    ),
    "graph": (
        [
            "_C._autograd._get_sequence_nr",
            "jit._recursive.get_hook_stubs",
            "distributed.distributed_c10d._get_default_store",
        ],
        {"actv", "grad_reduced"},
        ["gradients of activations are not recorded", "scripting a model that is watched may fail"],
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, str]:
    runner = integration_runner(tmp_path_factory.mktemp("missing_symbols"))
    path = runner.folder / "bare.json"
    done = runner.bare(HERE / "missing_symbols.py", str(path))
    assert done.returncode == 0, done.stderr
    return runner, json.loads(path.read_text())


@pytest.mark.parametrize("group", MISSING)
def test_missing_symbols(group: str, trained: tuple[Runner, str]) -> None:
    """Losses and weights to the bit, all steps, the rows that need none of the names."""
    runner, bare = trained
    names, kinds, said = MISSING[group]
    runner.output = runner.folder / group
    path = runner.folder / f"{group}.json"
    done = runner.monitored(
        HERE / "missing_symbols.py", str(path), *(f"torch.{name}" for name in names), config=EVERYTHING
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text()) == bare
    assert len(done.steps()) == 4
    for kind in kinds:
        assert {row.step for row in done.rows(kind)} == {0, 1, 2, 3}, kind
    for message in said:
        assert message in done.stderr
    lines = done.stderr.splitlines()
    assert len(set(lines)) == len(lines)
