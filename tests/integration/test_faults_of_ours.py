"""A fault in any part of msmon costs the rows of that part of that model: none of the others, and nothing of the training."""

from __future__ import annotations

import functools
import inspect
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from integration.truth import EVERYTHING, batch, net

from msmon import log
from msmon.backends.pytorch import watch
from msmon.backends.pytorch.module_calls import ModuleCalls
from msmon.backends.pytorch.recorder import StepRecorder
from msmon.backends.pytorch.taps.activations import ActivationTap
from msmon.backends.pytorch.taps.gradients import GradientTap
from msmon.backends.pytorch.taps.modules import ModuleTaps
from msmon.backends.pytorch.taps.optimizer_state import OptimizerStateTap
from msmon.backends.pytorch.taps.stacks import StackTap
from msmon.backends.pytorch.taps.updates import DirectionTap, UpdateTap
from msmon.backends.pytorch.taps.weights import WeightTap
from msmon.backends.pytorch.watch import Watch
from msmon.backends.pytorch.watched import Inventory
from msmon.offline.reader import read_kind, run_directories
from msmon.plan.gate import StepGate
from msmon.plan.rounds import Rounds
from msmon.pytorch import TrainerMon

if TYPE_CHECKING:
    from pathlib import Path

ACTIVATIONS = {"actv", "actv_grad"}
KINDS = {
    WeightTap: {"param_origin", "param_updated"},
    GradientTap: {"grad_unreduced", "grad_reduced"},
    OptimizerStateTap: {"exp_avg", "exp_avg_sq"},
    DirectionTap: {"other"},
    UpdateTap: {"update", "update_ratio"},
    ModuleTaps: ACTIVATIONS,
    ModuleCalls: ACTIVATIONS,
    ActivationTap: ACTIVATIONS,
    StackTap: set(),
}
"""What a fault in a tap may cost of the same model."""

CORE = (Watch, Inventory, Rounds, StepGate, StepRecorder)
"""What a model's taps have in common: a fault there may cost all of its rows."""

ALL = set().union(*KINDS.values())
CONFIG = {
    **EVERYTHING, "xy_distribution": True, "all_xy": True, "mg_direction": True, "ur_distribution": True,
    "stack_info": True, "monitor_mbs_grad": True,
}  # fmt: skip
EXCEPT = {
    "Watch.owns", "Watch.alive", "Watch.wrapped_by",  # a look into a dict, at weak references, and a call of an entry
    "ModuleCalls._begins", "ModuleCalls._ends", "ModuleCalls._guarded",  # doors: they ask, and guard the rest
    "Watch._switch_off", "Watch._name",  # what is done about a fault
}  # fmt: skip


def methods() -> list[tuple[type, str]]:
    found = []
    for kind in (*CORE, *KINDS):
        for name, value in vars(kind).items():
            special = name.startswith("__") or f"{kind.__name__}.{name}" in EXCEPT
            if inspect.isfunction(value) and not special:
                found.append((kind, name))
    return found


class Fault:
    """Raises in place of a method, for whatever belongs to the first model."""

    def __init__(self) -> None:
        self.first: set[int] = set()
        self.beginning = False
        self.raised = 0

    def put_in(self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
        entry = getattr(kind, name)
        original = getattr(entry, "__wrapped__", entry)

        def faulty(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self.beginning or id(this) in self.first:
                self.raised += 1
                raise RuntimeError("planted")
            return original(this, *args, **kwargs)

        monkeypatch.setattr(
            kind, name, faulty if original is entry else watch._entry(functools.wraps(original)(faulty))
        )

    def belongs_to_first(self, thing: object) -> None:
        if id(thing) in self.first or not type(thing).__module__.startswith("msmon."):
            return
        self.first.add(id(thing))
        parts = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
        parts += [part for value in parts if isinstance(value, (list, tuple)) for part in value]
        parts += [part for value in parts if isinstance(value, tuple) for part in value]
        for part in parts:
            self.belongs_to_first(part)


def train(monitor: TrainerMon | None, fault: Fault | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    models = [net("First"), net("Second")]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        if monitor is not None:
            if fault is not None:
                fault.beginning = number == 0
            monitor.set_monitor(model, 2, optimizer)
            if fault is not None and number == 0:
                for watched in monitor._session.watches:
                    fault.belongs_to_first(watched)
    if fault is not None:
        fault.beginning = False
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for _ in range(2):
                model(batch(step)).pow(2).mean().backward()
            optimizer.step()
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def run(folder: Path, fault: Fault | None = None) -> tuple[list[torch.Tensor], set[tuple[str, str, int]]]:
    """The weights at the end, and which rows were written: kind, name, step."""
    path = folder / "monitor.json"
    path.write_text(json.dumps(CONFIG))
    monitor = TrainerMon(path, params_have_main_grad=False)
    weights = train(monitor, fault)
    monitor.close()
    (directory,) = run_directories(folder / "out")
    return weights, {(kind, row.name, row.step) for kind in ALL for row in read_kind(directory, kind)}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[torch.Tensor], set[tuple[str, str, int]]]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("healthy")
        patch.setenv("MONITOR_OUTPUT_DIR", str(folder / "out"))
        weights, rows = run(folder)
    assert {kind for kind, _, _ in rows} == ALL
    assert all(torch.equal(mine, bare) for mine, bare in zip(weights, train(None), strict=True))
    return weights, rows


@pytest.mark.parametrize("method", methods(), ids=lambda method: f"{method[0].__name__}.{method[1]}")
def test_a_fault_in_one_model_costs_no_other(
    method: tuple[type, str],
    healthy: tuple[list[torch.Tensor], set[tuple[str, str, int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The other model loses no row, this one at most those of the part with the fault; it is said; weights are the same."""
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))
    kind, name = method
    monkeypatch.setattr(log, "_said", {})
    fault = Fault()
    fault.put_in(monkeypatch, kind, name)
    weights, rows = run(tmp_path, fault)
    assert all(torch.equal(mine, expected) for mine, expected in zip(weights, healthy[0], strict=True))
    lost = healthy[1] - rows
    assert {row for row in lost if row[1].startswith("Second.")} == set()
    assert {row[0] for row in lost} <= (ALL if kind in CORE else KINDS[kind])
    assert rows <= healthy[1]
    lines = [line for line in capfd.readouterr().err.splitlines() if "planted" in line]
    assert bool(lines) == bool(fault.raised)
    assert len(lines) == len(set(lines))
