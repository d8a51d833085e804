"""Several optimizers on one model, each from any step on and as often as it likes: rows are in the step that the loop knows."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from msmon.offline.reader import read_kind, read_steps, run_directories
from msmon.pytorch import TrainerMon

KINDS = ("grad_unreduced", "grad_reduced", "param_origin", "param_updated", "exp_avg")


@dataclass(frozen=True)
class Part:
    """An optimizer with parameters of its own.

    Attributes:
        begins: Its first step.
        every: How many iterations lie between its steps.
        late: Whether it is constructed only then.
    """

    begins: int = 0
    every: int = 1
    late: bool = False

    def steps(self, iteration: int) -> bool:
        return iteration >= self.begins and (iteration - self.begins) % self.every == 0

    def exists(self, iteration: int) -> bool:
        return not self.late or iteration >= self.begins


@dataclass(frozen=True)
class Schedule:
    """A training loop.

    Attributes:
        parts: Its optimizers in the order of their steps; one of them steps in every iteration.
        micro_batches: Backward passes an iteration.
        interleaved: Whether each optimizer steps right after a backward pass of its own.
        iterations: How many.
    """

    parts: tuple[Part, ...]
    micro_batches: int = 1
    interleaved: bool = False
    iterations: int = 7


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    if draw(st.booleans()):
        count = draw(st.integers(2, 4))
        return Schedule((Part(),) * count, draw(st.integers(1, 2)), interleaved=True)
    # One that exists from the start and first steps in the second iteration could as well be a generator's after its
    # discriminator's in the first: nobody can tell, so that it is left out.
    part = st.builds(Part, st.sampled_from([0, 2, 3, 4, 5]), st.integers(1, 6), st.booleans())
    parts = [Part(), *draw(st.lists(part, min_size=1, max_size=3))]
    return Schedule(tuple(draw(st.permutations(parts))), draw(st.integers(1, 3)))


class Loop:
    """Trains, and notes what is to be seen in each step."""

    def __init__(self, schedule: Schedule, folder: Path) -> None:
        torch.manual_seed(0)
        self.schedule = schedule
        self.model = nn.ModuleList(nn.Linear(2, 1) for _ in schedule.parts)
        self.expected: dict[tuple[str, int, str], float] = {}
        self.optimizers: dict[int, Any] = {}
        config = {
            "wg_distribution": True, "param_distribution": True, "mv_distribution": True, "ndigits": 12,
            "step_count_per_record": 100,
        }  # fmt: skip
        (folder / "monitor.json").write_text(json.dumps(config))
        self.monitor = TrainerMon(folder / "monitor.json", params_have_main_grad=False)
        for number, part in enumerate(schedule.parts):
            if part.exists(0):
                self.construct(number)

    def construct(self, number: int) -> None:
        self.optimizers[number] = torch.optim.Adam(self.model[number].parameters(), lr=0.05, foreach=False)
        self.monitor.set_monitor(self.model, 1, self.optimizers[number])

    def note(self, kind: str, step: int, number: int, value: Any) -> None:
        for name, parameter in self.model[number].named_parameters():
            tensor = value(parameter)
            if tensor is not None:
                self.expected[kind, step, f"{number}.{name}"] = float(tensor.detach().double().norm())

    def backward(self, step: int, numbers: list[int]) -> None:
        for micro_batch in range(self.schedule.micro_batches):
            inputs = torch.full((1, 2), 1.0 + step + 0.3 * micro_batch)
            sum(self.model[number](inputs).pow(2).sum() for number in numbers).backward()  # type: ignore[union-attr]

    def step(self, step: int, number: int) -> None:
        if number not in self.optimizers:
            self.construct(number)
        optimizer = self.optimizers[number]
        self.seen(step, number)
        self.note("exp_avg", step, number, lambda p: optimizer.state.get(p, {}).get("exp_avg"))
        optimizer.step()
        self.note("param_updated", step, number, lambda p: p)

    def seen(self, step: int, number: int) -> None:
        self.note("grad_unreduced", step, number, lambda p: p.grad)
        self.note("grad_reduced", step, number, lambda p: p.grad)
        self.note("param_origin", step, number, lambda p: p)

    def train(self) -> None:
        everyone = list(range(len(self.schedule.parts)))
        for iteration in range(self.schedule.iterations):
            active = [number for number in everyone if self.schedule.parts[number].steps(iteration)]
            if self.schedule.interleaved:
                for number in active:
                    self.optimizers[number].zero_grad()
                    self.backward(iteration, [number])
                    self.step(iteration, number)
                continue
            self.model.zero_grad()
            self.backward(iteration, everyone)
            for number in everyone:
                if number in active:
                    self.step(iteration, number)
                elif not self.schedule.parts[number].exists(iteration):  # of no optimizer yet
                    self.seen(iteration, number)
                    self.note("param_updated", iteration, number, lambda p: p)
        self.monitor.close()


@settings(max_examples=60, deadline=None)
@given(schedule=schedules())
@example(schedule=Schedule((Part(), Part(begins=3))))
@example(schedule=Schedule((Part(), Part(begins=3, late=True))))
@example(schedule=Schedule((Part(begins=3), Part())))
@example(schedule=Schedule((Part(), Part(every=20)), iterations=42))
@example(schedule=Schedule((Part(late=True), Part(late=True), Part(late=True), Part(late=True))))
def test_every_row_is_in_its_step(schedule: Schedule) -> None:
    """Gradients, weights and state of each optimizer, in each iteration in which it steps, and in no other."""
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONITOR_OUTPUT_DIR", f"{place}/out")
        loop = Loop(schedule, Path(place))
        loop.train()
        (directory,) = run_directories(Path(place) / "out")
        recorded = {}
        for kind in KINDS:
            for row in read_kind(directory, kind):
                assert (kind, row.step, row.name) not in recorded, "no row comes twice"
                recorded[kind, row.step, row.name] = row["norm"]
        assert sorted(recorded) == sorted(loop.expected)
        assert recorded == pytest.approx(loop.expected, rel=1e-9)
        lines = [(int(line["step"]), line["complete"]) for line in read_steps(directory)]
        assert lines == [(step, "1") for step in range(schedule.iterations)]
        passes = {int(line["micro_steps"]) for line in read_steps(directory)}
        assert passes == {schedule.micro_batches * (len(schedule.parts) if schedule.interleaved else 1)}
