"""Directions of gradients and Adam's updates, in real trainings."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from integration.truth import batch, net

from msmon import log
from msmon.backends.pytorch.histogram import Histogram
from msmon.backends.pytorch.taps.updates import adam_update, direction
from msmon.offline.reader import RecordedRow, read_kind, run_directories
from msmon.pytorch import TrainerMon
from msmon.sinks import tensorboard
from msmon.stats.histogram import BINS, EDGES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIX = ["min", "max", "norm", "mean", "zeros", "nans"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Room:
    """Trains a small model under a monitor, and reads back what was written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def train(
        self,
        make: Callable[[Any], torch.optim.Optimizer],
        config: dict[str, Any],
        *,
        steps: int = 3,
        dtype: torch.dtype = torch.float64,
        each: Callable[[Any, int], object] = lambda model, step: None,
    ) -> Any:
        """Train; ``each`` runs between backward and step. Returns the model."""
        torch.manual_seed(0)
        model = net("Net").to(dtype)
        optimizer = make(model.parameters())
        path = self.folder / "monitor.json"
        path.write_text(json.dumps({"ops": SIX, "ndigits": 17, "step_count_per_record": 100, **config}))
        monitor = TrainerMon(path, params_have_main_grad=False)
        monitor.set_monitor(model, 1, optimizer)
        for step in range(steps):
            optimizer.zero_grad()
            model(batch(step).to(dtype)).pow(2).mean().backward()
            each(model, step)
            optimizer.step()
        monitor.close()
        return model

    @property
    def directory(self) -> Path:
        return run_directories(self.folder / "out")[-1]

    def rows(self, kind: str) -> dict[tuple[str, int], RecordedRow]:
        return {(row.name, row.step): row for row in read_kind(self.directory, kind)}


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "out"))
    monkeypatch.setattr(log, "_said", {})
    return Room(tmp_path)


def agreement(gradient: Any, moment: Any) -> float:
    """The share, plainly: an element that is zero or NaN in either counts half."""
    return float(
        np.mean([0.5 if g == 0 or m == 0 else float((g > 0) == (m > 0)) for g, m in zip(gradient, moment, strict=True)])
    )


# Directions


@pytest.mark.parametrize("dtype", DTYPES)
def test_direction(dtype: torch.dtype) -> None:
    """Over dtypes and layouts, with zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(20, 30, generator=generator).to(dtype)
    moment = torch.randn(20, 30, generator=generator).to(dtype)
    gradient[:4] = 0
    moment[:, :3] = 0
    gradient[7, 7] = -math.inf
    for g in (gradient, gradient.t().contiguous().t(), torch.stack([gradient, gradient], 2)[:, :, 0]):
        found = direction(g, moment.float())
        truth = agreement(gradient.double().reshape(-1).tolist(), moment.double().reshape(-1).tolist())
        assert found.shape == ()
        assert float(found) == pytest.approx(truth, abs=1e-6)
    before = float(direction(gradient, moment))
    agreed = float(gradient[9, 9] * moment[9, 9] > 0)
    gradient[9, 9] = math.nan
    assert float(direction(gradient, moment)) == pytest.approx(before + (0.5 - agreed) / 600, abs=1e-6)


@pytest.mark.parametrize("key", ["exp_avg", "momentum_buffer"])
def test_direction_rows(room: Room, key: str) -> None:
    """1 at the first step, then against the first moment as it is before the step."""
    moments: dict[str, Any] = {}
    expected: dict[tuple[str, int], float] = {}

    def note(model: Any, step: int) -> None:
        for name, parameter in model.named_parameters():
            if step == 2 and name == "0.bias":
                parameter.grad = None
                continue
            gradient = parameter.grad.numpy().reshape(-1).copy()
            expected[name, step] = agreement(gradient, moments[name]) if name in moments else 1.0
            before = moments.get(name)
            if key == "exp_avg":
                moments[name] = 0.1 * gradient if before is None else 0.9 * before + 0.1 * gradient
            else:
                moments[name] = gradient if before is None else 0.9 * before + gradient

    def make(parameters: Any) -> torch.optim.Optimizer:
        if key == "exp_avg":
            return torch.optim.Adam(parameters, lr=0.01)
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    room.train(make, {"mg_direction": True}, steps=6, each=note)
    rows = room.rows("other")
    assert set(rows) == set(expected)
    for place, row in rows.items():
        assert row["mean"] == row["min"] == pytest.approx(expected[place], abs=1e-6)
        assert (row.values["shape"], row.values["dtype"], row.micro_step) == ("[]", "torch.float32", None)
    assert {expected[place] for place in expected if place[1] == 0} == {1.0}
    assert len(set(expected.values())) > 3


def test_no_first_moment(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """Plain SGD: said once, and no row after the first step."""
    room.train(lambda parameters: torch.optim.SGD(parameters, lr=0.01), {"mg_direction": True})
    assert {step for _, step in room.rows("other")} == {0}
    assert capfd.readouterr().err.count("SGD keeps no first moment") == 1


# Updates

ADAMS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "decay in the gradient": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, betas=(0.5, 0.6)),
    "foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True, eps=1e-2),
    "fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("name", ADAMS)
def test_updates_are_those_applied(room: Room, name: str) -> None:
    """What the weights moved by in the step, over the learning rate; and that over the weights after it."""
    before: dict[str, Any] = {}
    moved: dict[tuple[str, int], tuple[Any, Any]] = {}

    def take(model: Any, step: int) -> None:
        now = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
        for parameter, weight in now.items():
            if step:
                moved[parameter, step - 1] = (before[parameter] - weight) / 1e-2, weight
        before.update(now)

    model = room.train(ADAMS[name], {"ur_distribution": True}, steps=4, each=take)
    take(model, 4)
    updates, ratios = room.rows("update"), room.rows("update_ratio")
    assert set(updates) == set(ratios) == set(moved)
    for place, (update, weight) in moved.items():
        for row, values in ((updates[place], update), (ratios[place], update / weight)):
            assert row["min"] == pytest.approx(values.min(), rel=1e-6, abs=1e-9)
            assert row["max"] == pytest.approx(values.max(), rel=1e-6, abs=1e-9)
            assert row["norm"] == pytest.approx(np.linalg.norm(values), rel=1e-6)
            assert row["mean"] == pytest.approx(values.mean(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_update_of_state(dtype: torch.dtype) -> None:
    """The formula over dtypes and layouts, with a step that is a tensor or a number, of the state or of the group."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(5, 6, generator=generator).to(dtype)
    second = torch.rand(5, 6, generator=generator).to(dtype)
    group = {"betas": (0.9, 0.999), "eps": 1e-3}
    corrected = first.double().numpy() / (1 - 0.9**3), second.double().numpy() / (1 - 0.999**3)
    truth = corrected[0] / (np.sqrt(corrected[1]) + 1e-3)
    for m, v in ((first, second), (first.t().contiguous().t(), torch.stack([second, second], 2)[:, :, 1])):
        for step in (torch.tensor(3.0), 3):
            found = adam_update({"exp_avg": m, "exp_avg_sq": v, "step": step}, group)
            assert found is not None
            np.testing.assert_allclose(found.double().numpy(), truth, rtol=1e-12 if dtype == torch.float64 else 1e-5)
        found = adam_update({"exp_avg": m, "exp_avg_sq": v}, {**group, "step": 3})
        assert found is not None
        np.testing.assert_allclose(found.double().numpy(), truth, rtol=1e-12 if dtype == torch.float64 else 1e-5)
    raw = adam_update({"exp_avg": first, "exp_avg_sq": second, "step": 3}, {**group, "bias_correction": False})
    assert raw is not None
    np.testing.assert_allclose(
        raw.double().numpy(), first.double().numpy() / (np.sqrt(second.double().numpy()) + 1e-3), rtol=1e-5
    )
    assert adam_update({}, group) is None
    first[0, 0], second[1, 1], first[2, 2] = math.nan, math.inf, math.inf
    odd = adam_update({"exp_avg": first, "exp_avg_sq": second, "step": 3}, group)
    assert odd is not None
    assert math.isnan(odd[0, 0])
    assert odd[1, 1] == 0
    assert odd[2, 2] == math.inf


def test_complex_parameter() -> None:
    """Its parts have an update each, as in torch."""
    parameter = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
    optimizer = torch.optim.Adam([parameter], lr=1e-2)
    parameter.grad = torch.randn_like(parameter)
    before = parameter.detach().clone()
    optimizer.step()
    update = adam_update(optimizer.state[parameter], optimizer.param_groups[0])
    assert update is not None
    moved = torch.view_as_real(before - parameter.detach()) / 1e-2
    torch.testing.assert_close(update, moved)


def test_parameters_without_a_gradient(room: Room) -> None:
    """Their state tells of an earlier step: no row."""

    def drop(model: Any, step: int) -> None:
        if step == 1:
            model[0].bias.grad = None

    room.train(ADAMS["Adam"], {"ur_distribution": True}, each=drop)
    assert [step for name, step in room.rows("update") if name == "0.bias"] == [0, 2]
    assert [step for name, step in room.rows("update") if name == "0.weight"] == [0, 1, 2]


def test_other_optimizers(room: Room, capfd: pytest.CaptureFixture[str]) -> None:
    """RAdam keeps the state of Adam and does something else with it."""
    room.train(lambda parameters: torch.optim.RAdam(parameters, lr=0.01), {"ur_distribution": True})
    assert room.rows("update") == {}
    assert capfd.readouterr().err.count("RAdam is no Adam") == 1


# Histograms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pieces", [1 << 22, 50])
def test_counts(dtype: torch.dtype, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element is in the bin of its value."""
    monkeypatch.setattr("msmon.backends.pytorch.histogram._AT_ONCE", pieces)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, 30, generator=generator, dtype=torch.float64)
    values = (values * 10 ** (4 * torch.randn(40, 30, generator=generator, dtype=torch.float64))).to(dtype)
    values[0, :6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, math.nan])
    edges = torch.tensor(EDGES, dtype=torch.float64 if dtype == torch.float64 else torch.float32).double().numpy()
    truth = np.zeros(len(BINS))
    for value in values.double().reshape(-1).tolist():
        place = len(BINS) - 1 if math.isnan(value) else sum(edge < value for edge in edges)
        truth[place] += 1
    for same in (values, values.t().contiguous().t(), torch.stack([values, values], 2)[:, :, 0]):
        assert Histogram().counts(same).tolist() == truth.tolist()
    assert Histogram().counts(values[:0]).sum() == 0


def histograms(directory: Path) -> dict[tuple[str, int], Any]:
    """Read event files as TensorBoard does: length, checksum, record, checksum."""
    event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    found = {}
    for path in directory.glob("events.out.tfevents.*"):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            event = event_pb2.Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            found.update({(value.tag, event.step): value.histo for value in event.summary.value})
    return found


def test_event_files(room: Room) -> None:
    """A histogram a parameter and step, in the run directory, that counts the elements of the update; none in CSV."""
    model = room.train(ADAMS["Adam"], {"ur_distribution": True})
    found = histograms(room.directory)
    names = [name for name, _ in model.named_parameters()]
    kinds = ("update", "update_ratio")
    assert set(found) == {(f"0:{name}/rank0/{kind}", step) for name in names for step in range(3) for kind in kinds}
    for (tag, step), histogram in found.items():
        name, kind = tag[2:].split("/rank0/")
        row = room.rows(kind)[name, step]
        size = model.get_parameter(name).numel()
        assert histogram.num == sum(histogram.bucket) == size
        assert list(histogram.bucket_limit) == sorted(histogram.bucket_limit)
        assert histogram.min <= row["min"] <= row["max"] <= histogram.max
        assert histogram.max == histogram.bucket_limit[-1]
        assert histogram.bucket[0] > 0
        assert histogram.sum == pytest.approx(row["mean"] * size, abs=0.4 * row["norm"] * math.sqrt(size))
        assert histogram.sum_squares == pytest.approx(row["norm"] ** 2, rel=0.8)
    assert not list(room.directory.glob("*histogram*"))


def test_without_tensorboard(room: Room, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The statistics are there all the same, and what to install is said once."""
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda name: None)
    room.train(ADAMS["Adam"], {"ur_distribution": True})
    assert len(room.rows("update")) == 3 * 4
    assert not list(room.directory.glob("events*"))
    assert capfd.readouterr().err.count("msmon[tensorboard]") == 1
