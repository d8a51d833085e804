"""Event files of histograms: what a failing disk and other sinks leave of a step."""

from __future__ import annotations

import math
import shutil
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from msmon.record.table import Row
from msmon.sinks.base import RecordedStep, SeveralSinks
from msmon.sinks.csv import CsvSink
from msmon.sinks.tensorboard import TensorBoardSink
from msmon.stats.histogram import BINS, EDGES

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("tensorboard")

COLUMNS = ("norm", "shape", "dtype")


def recorded(step: int, counts: dict[int, float]) -> RecordedStep:
    """A row of statistics, and one of counts by bin."""
    plain = Row("update", "fc", 0, None, (2,), "torch.float32")
    numbers = [1.0, *(counts.get(place, 0.0) for place in range(len(BINS)))]
    rows = [plain, plain._replace(kind="update_histogram", features=BINS)]
    return RecordedStep("", step, rows, np.array(numbers), 1, False, math.nan, True)


def events(directory: Path) -> list[Any]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    files = sorted(directory.glob("events*"), key=lambda path: path.stat().st_mtime_ns)
    return [event for path in files for event in LegacyEventFileLoader(str(path)).Load() if event.HasField("summary")]


def test_edges() -> None:
    """Ascending, and as far below zero as above."""
    assert list(EDGES) == sorted(set(EDGES))
    assert [-edge for edge in reversed(EDGES)] == list(EDGES)
    assert len(set(BINS)) == len(BINS) == len(EDGES) + 2


def test_fields(tmp_path: Path) -> None:
    """From the first to the last bin that holds anything; NaN is left out, a tensor of NaN altogether."""
    sink = TensorBoardSink(tmp_path, 3, COLUMNS, histograms_only=True)
    zero = len(EDGES) // 2
    sink.write(recorded(5, {zero: 2, zero + 2: 1, len(BINS) - 1: 4}))
    sink.write(recorded(6, {len(BINS) - 1: 4}))
    sink.write(recorded(7, {0: 1, len(BINS) - 2: 2}))
    sink.close()
    first, last = events(tmp_path)
    (value,) = first.summary.value
    assert (value.tag, first.step, last.step) == ("0:fc/rank3/update", 5, 7)
    assert (value.histo.min, value.histo.max, value.histo.num) == (EDGES[zero - 1], EDGES[zero + 2], 3)
    assert list(value.histo.bucket) == [2, 0, 1]
    assert list(value.histo.bucket_limit) == list(EDGES[zero : zero + 3])
    ends = last.summary.value[0].histo
    assert (ends.min, ends.max, ends.num) == (EDGES[0] * 10, EDGES[-1] * 10, 3)


def test_directory_taken_away(tmp_path: Path) -> None:
    """Each step is on disk when it is handed over; a failure is an error, and the next step begins another file."""
    directory = tmp_path / "run"
    directory.mkdir()
    sink = SeveralSinks(TensorBoardSink(directory, 0, COLUMNS, histograms_only=True), CsvSink(directory, COLUMNS, 6, 1))
    sink.write(recorded(0, {5: 1}))
    assert [event.step for event in events(directory)] == [0]
    sink.close()
    shutil.rmtree(directory)
    directory.write_text("in the way")
    with pytest.raises(OSError):
        sink.write(recorded(1, {5: 1}))
    directory.unlink()
    directory.mkdir()
    sink.write(recorded(2, {5: 1}))
    assert [event.step for event in events(directory)] == [2]
    assert (directory / "update_2-2.csv").exists()


def test_one_sink_fails(tmp_path: Path) -> None:
    """The others have the step all the same."""
    (tmp_path / "update_0-0.csv").mkdir()
    sink = SeveralSinks(CsvSink(tmp_path, COLUMNS, 6, 1), TensorBoardSink(tmp_path, 0, COLUMNS, histograms_only=True))
    with pytest.raises(OSError):
        sink.write(recorded(0, {5: 1}))
    assert [event.step for event in events(tmp_path)] == [0]


def test_numbers(tmp_path: Path) -> None:
    """Numbers of every kind become scalars with what `steps.csv` says of the step, and what is not finite is counted."""
    sink = TensorBoardSink(tmp_path, 3, ("norm", "id", "max", "shape"))
    plain = Row("actv", "fc.input", 1, 2, (2,), "torch.float32")
    features = Row("linear_hook", "fc.linear", 0, None, (2,), "torch.float32", ("sr",))
    rows = [plain, plain._replace(micro_step=None, kind="grad_reduced", shape=(0,)), features]
    numbers = np.array([1.5, math.inf, 0.0, math.nan, 2.0])
    sink.write(RecordedStep("", 4, rows, numbers, 1, True, 1024.0, True))
    sink.write(RecordedStep("Critic", 5, [features], np.array([3.0]), None, False, math.nan, False))
    sink.close()
    found = [
        {value.tag: value.simple_value for value in event.summary.value if not value.HasField("tensor")}
        for event in events(tmp_path)
    ]
    assert found[0] == {
        "1:fc.input:micro2/rank3/actv_norm": 1.5,
        "1:fc.input:micro2/rank3/actv_max": math.inf,
        "1:fc.input:micro2/rank3/actv_id": 0,
        "1:fc.input/rank3/grad_reduced_norm": 0,
        "1:fc.input/rank3/grad_reduced_id": 1,
        "0:fc.linear/rank3/linear_hook_sr": 2,
        "nonfinite/actv_in_step": 1, "nonfinite/actv_so_far": 1,
        "nonfinite/grad_reduced_in_step": 0, "nonfinite/grad_reduced_so_far": 0,
        "nonfinite/linear_hook_in_step": 0, "nonfinite/linear_hook_so_far": 0,
        "steps/micro_steps": 1, "steps/grad_scale": 1024, "steps/skipped": 1, "steps/complete": 1,
    }  # fmt: skip
    assert {key: value for key, value in found[1].items() if key.startswith("steps")} == {
        "steps/Critic/skipped": 0, "steps/Critic/complete": 0,
    }  # fmt: skip
    (text,) = [value for event in events(tmp_path) for value in event.summary.value if value.HasField("tensor")]
    assert text.tensor.string_val[0] == b"- `1:fc.input:micro2/rank3/actv_max`: inf"


def test_resumed(tmp_path: Path) -> None:
    """In a directory that is gone on with, TensorBoard's reader shows the later of steps that were taken twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    row = Row("grad_reduced", "fc", 0, None, (2,), "torch.float32")
    for first, resumed in ((0, False), (2, True)):
        sink = TensorBoardSink(tmp_path, 0, COLUMNS, resumed=resumed)
        for step in range(first, first + 4):
            sink.write(RecordedStep("", step, [row], np.array([first + 0.5]), 1, False, math.nan, True))
        sink.close()
        time.sleep(1.1)  # files are read by the second of their names
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("0:fc/rank0/grad_reduced_norm")
    assert [(event.step, event.value) for event in found] == [
        (0, 0.5),
        (1, 0.5),
        (2, 2.5),
        (3, 2.5),
        (4, 2.5),
        (5, 2.5),
    ]
