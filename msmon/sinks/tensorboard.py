"""TensorBoard event files in the run directory: the histograms, which no table shows.

TensorBoard is an extra, ``msmon[tensorboard]``, and imported when the first histogram is written.
"""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

from msmon import log
from msmon.record.table import HISTOGRAM
from msmon.stats.histogram import EDGES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from msmon.sinks.base import RecordedStep


def installed() -> bool:
    """Whether histograms can be written; when not, what is missing is said once."""
    if importlib.util.find_spec("tensorboard") is not None:
        return True
    log.say(
        "histograms need TensorBoard: pip install 'msmon[tensorboard]'; the statistics are in CSV files all the same",
        once="tensorboard",
    )
    return False


class TensorBoardSink:
    """Writes rows of counts by bin as histograms, under tags such as ``0:fc.weight/rank0/update``.

    Args:
        directory: An existing directory.
        rank: Of this process.
        width: Number of statistics of the rows that are no histograms.
    """

    def __init__(self, directory: Path, rank: int, width: int) -> None:
        self._directory = directory
        self._rank = rank
        self._width = width
        self._writer: Any = None  # tensorboard has no types

    def write(self, step: RecordedStep) -> None:
        """Write a step's histograms to disk.

        Raises:
            OSError: They could not be written; the next step begins another file.
        """
        from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415 - an extra, and slow to import

        values = []
        for row, numbers in step.lines(self._width):
            described = _describe(numbers) if row.is_histogram else {}
            if described:
                tag = f"{row.stage}:{row.name}/rank{self._rank}/{row.kind.removesuffix(HISTOGRAM)}"
                histogram = summary_pb2.HistogramProto(**described)
                values.append(summary_pb2.Summary.Value(tag=tag, histo=histogram))
        if not values:
            return
        event = event_pb2.Event(wall_time=time.time(), step=step.step, summary=summary_pb2.Summary(value=values))
        try:
            writer = self._open()
            writer.add_event(event)
            writer.flush()
        except BaseException:
            self._writer = None  # it is of no more use
            raise

    def close(self) -> None:
        """End the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _open(self) -> Any:  # noqa: ANN401 - tensorboard has no types
        if self._writer is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415 - an extra

            self._writer = EventFileWriter(str(self._directory))
        return self._writer


def _describe(counts: Sequence[float]) -> dict[str, Any]:
    """The fields of a histogram, from the first to the last bin that holds anything; without NaN. Sums are those of the bins' middles."""
    limits = [*EDGES, EDGES[-1] * 10]
    starts = [EDGES[0] * 10, *EDGES]
    held = [place for place, count in enumerate(counts[: len(limits)]) if count]
    if not held:
        return {}
    kept = range(held[0], held[-1] + 1)
    middles = [(starts[place] + limits[place]) / 2 for place in kept]
    return {
        "min": starts[held[0]],
        "max": limits[held[-1]],
        "num": sum(counts[place] for place in kept),
        "sum": sum(counts[place] * middle for place, middle in zip(kept, middles, strict=True)),
        "sum_squares": sum(counts[place] * middle**2 for place, middle in zip(kept, middles, strict=True)),
        "bucket_limit": [limits[place] for place in kept],
        "bucket": [counts[place] for place in kept],
    }
