"""What a script knows to be true, and how a test holds the recorded rows against it.

A script imports this file from its own folder on ``PYTHONPATH``; it notes clones of what it sees at the right moment.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from msmon.offline.reader import kinds as kinds_in
from msmon.stats.definitions import Statistic
from msmon.stats.oracle import reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from conftest import Finished

EVERYTHING = {
    "param_distribution": True,
    "wg_distribution": True,
    "mv_distribution": True,
    "ops": ["min", "max", "norm", "mean", "zeros", "nans"],
    "ndigits": 16,
}


def statistics(tensor: torch.Tensor) -> list[float]:
    """Six statistics in float64, by the oracle."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj() if tensor.is_complex() else tensor.double()
    return reference(tensor.cpu().numpy(), list(Statistic))


class Truth:
    """Rows as they must be."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self.steps: list[dict[str, Any]] = []

    def note(self, kind: str, step: int, name: str, tensor: torch.Tensor, micro_step: int | None = None) -> None:
        self.rows.append([kind, name, step, micro_step, statistics(tensor)])

    def weights(self, kind: str, step: int, model: torch.nn.Module, label: str) -> None:
        for name, parameter in model.named_parameters():
            self.note(kind, step, f"{label}{name}", parameter)

    def gradients(
        self, kind: str, step: int, model: torch.nn.Module, label: str, micro_step: int | None = None
    ) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.note(kind, step, f"{label}{name}", parameter.grad, micro_step)

    def state(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, label: str) -> None:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                owner = "LBFGS" if isinstance(optimizer, torch.optim.LBFGS) else name
                if isinstance(value, torch.Tensor) and key != "step":
                    self.note(key, step, f"{label}{owner}", value)
                elif isinstance(value, list):
                    for number, part in enumerate(value):
                        if isinstance(part, torch.Tensor):
                            self.note(key, step, f"{label}{owner}[{number}]", part)

    def before(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, label: str) -> None:
        """Everything that is to be seen right before ``optimizer.step()``, without accumulation or reduction."""
        self.gradients("grad_unreduced", step, model, label)
        self.gradients("grad_reduced", step, model, label)
        self.weights("param_origin", step, model, label)
        self.state(step, model, optimizer, label)

    def after(self, step: int, model: torch.nn.Module, label: str, **line: Any) -> None:
        """Everything that is to be seen right after it, and the line of ``steps.csv``."""
        self.weights("param_updated", step, model, label)
        self.steps.append(
            {"model": label.rstrip("."), "step": step, "micro_steps": 1, "skipped": 0, "complete": 1, **line}
        )


def batch(step: int, rows: int = 8) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(step))


def net(name: str, base: type[torch.nn.Module] = torch.nn.Sequential) -> Any:
    """A small model whose class, and so whose label, is ``name``."""
    layers = torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)
    return type(name, (base,), {"__module__": "__main__"})(*layers)


def train(
    truth: Truth,
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int] = range(3),
    *,
    loss: Callable[[int], torch.Tensor] | None = None,
    label: str = "",
) -> None:
    """The plainest loop, with everything noted."""
    label = label or f"{type(model).__name__}."
    for step in steps:
        optimizer.zero_grad()
        (loss(step) if loss else model(batch(step)).pow(2).mean()).backward()
        truth.before(step, model, optimizer, label)
        optimizer.step()
        truth.after(step, model, label)


_scenarios: dict[str, Callable[[Truth], Any]] = {}
_together: list[str] = []


def scenario(function: Callable[[Truth], Any] | None = None, *, alone: bool = False) -> Any:
    """Register a scenario; one that is to run ``alone`` runs only when it is asked for."""
    if function is None:
        return functools.partial(scenario, alone=alone)
    _scenarios[function.__name__] = function
    if not alone:
        _together.append(function.__name__)
    return function


def run_scenarios(chosen: Iterable[str] = ()) -> None:
    """Run them one after the other, none harmed by the failure of another, and save what is true of each."""
    results = {}
    for name in list(chosen) or _together:
        torch.manual_seed(0)
        truth, error, told = Truth(), "", None
        try:
            told = _scenarios[name](truth)
        except Exception:
            error = traceback.format_exc()
        results[name] = {"rows": truth.rows, "steps": truth.steps, "told": told, "error": error}
    Path(os.environ["TRUTH"]).write_text(json.dumps(results))


def fingerprint(*tensors: torch.Tensor) -> str:
    """Equal exactly when the tensors are equal to the bit."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(
            torch.view_as_real(tensor).detach().numpy().tobytes()
            if tensor.is_complex()
            else tensor.detach().double().numpy().tobytes()
        )
    return digest.hexdigest()


@dataclass
class Observed:
    """A script's truth beside what was recorded of it."""

    finished: Finished
    results: dict[str, dict[str, Any]]
    rank: int = 0

    def told(self, scenario: str) -> Any:
        assert not self.results[scenario]["error"], self.results[scenario]["error"]
        return self.results[scenario]["told"]

    def labels(self, scenario: str) -> set[str]:
        return {line["model"] for line in self.results[scenario]["steps"]}

    def recorded(self, kind: str, labels: Iterable[str]) -> dict[tuple[str, int, int | None], list[float]]:
        found: dict[tuple[str, int, int | None], list[float]] = {}
        prefixes = tuple(f"{part}." for label in labels for part in label.split("+") if part)
        for row in self.finished.rows(kind, self.rank):
            if not prefixes or row.name.startswith(prefixes):
                key = row.name, row.step, row.micro_step
                assert key not in found, f"two rows {kind} {key}"
                found[key] = [float(row.values.get(statistic.value, math.nan)) for statistic in Statistic]
        return found

    def check(self, scenario: str, *, tolerance: float = 1e-9) -> None:
        """Every true row is recorded with its values, and no other row of these kinds and models."""
        self.told(scenario)
        true = self.results[scenario]["rows"]
        assert true, "the script noted nothing"
        kinds = {row[0] for row in true}
        for kind in sorted(kinds.union(*map(kinds_in, self.finished.directories(self.rank)))):
            expected = {(row[1], row[2], row[3]): row[4] for row in true if row[0] == kind}
            compare(kind, expected, self.recorded(kind, self.labels(scenario)), tolerance)
        self.check_steps(scenario)

    def check_steps(self, scenario: str) -> None:
        labels = self.labels(scenario)
        lines = [line for line in self.finished.steps(self.rank) if line["model"] in labels]
        expected = self.results[scenario]["steps"]
        by_key = {(line["model"], int(line["step"])): line for line in lines}
        assert len(by_key) == len(lines), lines
        assert set(by_key) == {(line["model"], line["step"]) for line in expected}, (lines, expected)
        for line in expected:
            recorded = by_key[line["model"], line["step"]]
            for column, value in line.items():
                cell = recorded[column]
                same = cell == value if isinstance(value, str) else float(cell or "nan") == value
                assert same, f"steps.csv {line['model']} step {line['step']}: {column} is {cell}, not {value}"


def compare(
    kind: str, expected: dict[Any, list[float]], recorded: dict[Any, list[float]], tolerance: float = 1e-9
) -> None:
    """Rows of one kind: the same keys, and equal statistics."""
    assert recorded.keys() == expected.keys(), (
        f"{kind}: missing {sorted(map(str, expected.keys() - recorded.keys()))[:6]}, "
        f"too many {sorted(map(str, recorded.keys() - expected.keys()))[:6]}"
    )
    for key, values in expected.items():
        for statistic, true, found in zip(Statistic, values, recorded[key], strict=True):
            close = found == true or math.isclose(found, true, rel_tol=tolerance, abs_tol=tolerance * 1e-6)
            assert close or (math.isnan(true) and math.isnan(found)), (
                f"{kind} {key} {statistic.value}: recorded {found!r}, true {true!r}"
            )
