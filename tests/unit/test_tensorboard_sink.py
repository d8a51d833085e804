"""Event files of histograms: what a failing disk and other sinks leave of a step."""

from __future__ import annotations

import math
import shutil
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
    sink = TensorBoardSink(tmp_path, 3, 1)
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
    sink = SeveralSinks(TensorBoardSink(directory, 0, 1), CsvSink(directory, ("norm", "shape", "dtype"), 6, 1))
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
    sink = SeveralSinks(CsvSink(tmp_path, ("norm", "shape", "dtype"), 6, 1), TensorBoardSink(tmp_path, 0, 1))
    with pytest.raises(OSError):
        sink.write(recorded(0, {5: 1}))
    assert [event.step for event in events(tmp_path)] == [0]
