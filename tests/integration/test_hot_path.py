"""The training thread never waits, and pays only for what is collected: counted, not timed."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from integration.conftest import HERE, integration_runner

if TYPE_CHECKING:
    from conftest import Finished, Runner

pytestmark = pytest.mark.slow

HOST = {"aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::is_nonzero"}


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Finished]:
    runner = integration_runner(tmp_path_factory.mktemp("hot_path"))
    done = run(runner, "count_operators", "count_waits", "count_reads", "count_calls", "faults")
    return json.loads((runner.folder / "truth.json").read_text()), done


def run(runner: Runner, *parts: str) -> Finished:
    done = runner.bare(HERE / "hot_path.py", *parts, MONITOR_OUTPUT_DIR=str(runner.output))
    assert done.returncode == 0, done.stderr
    return done


def test_no_number_is_read_on_the_training_thread(counted: tuple[dict[str, Any], Finished]) -> None:
    """A collected step reads no tensor's value on the training thread more than a bare step does."""
    operators, _ = counted
    bare, collected = (Counter(operators["count_operators"][name]) for name in ("bare", "collected"))
    assert collected.total() > bare.total()
    assert {name: collected[name] - bare[name] for name in HOST} == dict.fromkeys(HOST, 0)


def test_steps_that_are_not_collected_run_no_operator(counted: tuple[dict[str, Any], Finished]) -> None:
    """Outside the collected steps, before the first and after the last, the operators are those of a bare step."""
    operators = counted[0]["count_operators"]
    assert operators["not collected"] == operators["bare"]
    assert operators["finished"] == operators["bare"]


def test_one_packed_copy_a_step_and_one_writer_thread(counted: tuple[dict[str, Any], Finished]) -> None:
    """A step's numbers leave in one copy, started on the training thread and waited for on the one writer thread."""
    waits = counted[0]["count_waits"]
    assert waits["copies"] == ["MainThread"] * 10
    assert waits["waits"] == ["msmon-writer"] * 10
    assert sorted(waits["threads"]) == ["msmon-signals", "msmon-writer"]


def test_each_tensor_is_read_once_a_row(counted: tuple[dict[str, Any], Finished]) -> None:
    """Kernels read no more than the rows are about, and a tensor that modules hand on only once."""
    reads = counted[0]["count_reads"]
    assert reads["rows"] < reads["read"] < reads["rows"] + reads["forward"]
    assert reads["repeated"] == []


def test_steps_that_are_not_collected_test_a_flag(counted: tuple[dict[str, Any], Finished]) -> None:
    """In a step that is not collected hooks ask whether it is, and nothing else; when collection is over there are none."""
    calls = counted[0]["count_calls"]
    parameters, modules = calls["tensors"]["parameters"], calls["tensors"]["modules"]
    for each in (calls["not collected"], calls["finished"]):  # a pass tells a few parts that it begins or ends
        assert max(each.pop("Guard.run"), each.pop("Watch._tap")) <= 4
    often = {name for name, count in calls["not collected"].items() if count > 2}  # more than what a pass costs
    flags = {name for name in often if name.endswith("<lambda>")}
    hooks = {name.rpartition(".")[2] for name in often - flags}
    assert hooks == {"__call__", "_begins", "_ends"}
    assert sum(calls["not collected"][name] for name in flags) == parameters + modules
    assert max(calls["finished"].values()) <= 2
    assert hooks.isdisjoint(name.rpartition(".")[2] for name in calls["finished"])


def test_fault_is_said_once_and_training_goes_on(counted: tuple[dict[str, Any], Finished]) -> None:
    """A kernel that raises switches each tap off with one line; the weights are those of the healthy run."""
    faults, done = counted
    assert faults["faults"]["True"] == faults["faults"]["False"]
    lines = [line for line in done.stderr.splitlines() if "a fault of ours" in line]
    assert len(lines) == 3
    assert len({line.partition("switched off")[0] for line in lines}) == 3
    assert all("switched off, training goes on: ZeroDivisionError" in line for line in lines)


def test_nothing_grows(runner: Runner) -> None:
    """From step 1,000 to step 10,000: no object, no thread, and no more than a few megabytes."""
    run(runner, "grow")
    sizes = json.loads((runner.folder / "truth.json").read_text())["grow"]
    (objects, threads, resident), (objects_after, threads_after, resident_after) = sizes["first"], sizes["last"]
    assert threads_after == threads
    assert objects_after - objects < 500
    assert resident_after - resident < 8
