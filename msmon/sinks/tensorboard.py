"""TensorBoard event files: numbers as scalars, and histograms, which no table shows.

TensorBoard is an extra, ``msmon[tensorboard]``, and imported when the first event is written. It draws NaN as a triangle at the
height of the value before and infinities not at all, so values that are not finite are also counted, and their names written
as text: see :class:`NonFinite`.
"""

from __future__ import annotations

import importlib.util
import math
import time
from typing import TYPE_CHECKING, Any

from msmon import log
from msmon.errors import MissingExtraError
from msmon.record.table import HISTOGRAM
from msmon.stats.histogram import EDGES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from msmon.record.table import Row
    from msmon.sinks.base import RecordedStep

Scalars = list[tuple[str, float]]

NON_FINITE = "nonfinite"
_NAMES_SHOWN = 20
_TEXTS = 100
_STATISTICS = ("min", "max", "norm", "mean", "zeros", "nans")


def available() -> bool:
    """Whether the extra is installed here."""
    return importlib.util.find_spec("tensorboard") is not None


def installed() -> bool:
    """Whether histograms can be written; when not, what is missing is said once."""
    if available():
        return True
    log.say(
        "histograms need TensorBoard: pip install 'msmon[tensorboard]'; the statistics are in CSV files all the same",
        once="tensorboard",
    )
    return False


def require() -> None:
    """See that TensorBoard is there.

    Raises:
        MissingExtraError: It is not.
    """
    if not available():
        raise MissingExtraError("TensorBoard is not installed", hint="pip install 'msmon[tensorboard]'")


class EventFile:
    """An event file in a directory, begun with its first event. What is written is on disk when a call returns.

    Args:
        directory: Made when it is absent.
        resumed: TensorBoard is to forget what earlier files there say of the first step and of those after it.
        suffix: How the name of the file ends.
    """

    def __init__(self, directory: Path, *, resumed: bool = False, suffix: str = "") -> None:
        self._directory = directory
        self._suffix = suffix
        self._writer: Any = None  # tensorboard has no types
        self._resumed = resumed

    def add(self, step: int, values: Sequence[Any], *, wall_time: float | None = None, flush: bool = True) -> None:
        """Write what belongs to one step.

        Args:
            step: The step.
            values: From :func:`scalars` and :func:`text`, and histograms.
            wall_time: When it happened; by default now.
            flush: Have it on disk when this returns.

        Raises:
            OSError: It could not be written; the next step begins another file.
        """
        from tensorboard.compat.proto import event_pb2, summary_pb2  # noqa: PLC0415 - an extra, and slow to import

        moment = time.time() if wall_time is None else wall_time
        event = event_pb2.Event(wall_time=moment, step=step, summary=summary_pb2.Summary(value=values))
        try:
            writer = self._open(step)
            writer.add_event(event)
            if flush:
                writer.flush()
        except BaseException:
            self._writer = None  # it is of no more use
            raise

    def close(self) -> None:
        """End the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _open(self, step: int) -> Any:  # noqa: ANN401 - tensorboard has no types
        if self._writer is None:
            from tensorboard.compat.proto import event_pb2  # noqa: PLC0415 - an extra
            from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415 - an extra

            self._writer = EventFileWriter(str(self._directory), filename_suffix=self._suffix)
            if self._resumed:
                self._resumed = False
                started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._writer.add_event(event_pb2.Event(wall_time=time.time(), step=step, session_log=started))
        return self._writer


def scalars(pairs: Iterable[tuple[str, float]]) -> list[Any]:
    """Numbers, each with its tag; TensorBoard keeps float32."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415 - an extra

    make = Summary.Value
    return [make(tag=tag, simple_value=value) for tag, value in pairs]


def text(tag: str, content: str) -> Any:  # noqa: ANN401 - as above
    """A paragraph in Markdown."""
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2  # noqa: PLC0415 - an extra

    plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
    shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
    encoded = content.encode("utf-8", "backslashreplace")
    return summary_pb2.Summary.Value(
        tag=tag,
        metadata=summary_pb2.SummaryMetadata(plugin_data=plugin),
        tensor=tensor_pb2.TensorProto(dtype="DT_STRING", string_val=[encoded], tensor_shape=shape),
    )


class NonFinite:
    """Makes NaN and infinities of one kind of data visible.

    ``nonfinite/{in_step}`` counts those of a step; ``nonfinite/{so_far}`` all until then, which stays to be seen where
    TensorBoard shows a sample of the steps; ``nonfinite/{where}`` names the tensors.

    Args:
        prefix: Put before the three names.
    """

    def __init__(self, prefix: str = "") -> None:
        self.total = 0
        self._tag = f"{NON_FINITE}/{prefix}"
        self._texts = 0

    def values(self, pairs: Iterable[tuple[str, float]]) -> Iterator[Any]:
        """What a step with these scalars adds."""
        found = [(tag, value) for tag, value in pairs if not math.isfinite(value)]
        self.total += len(found)
        yield from scalars([(f"{self._tag}in_step", len(found)), (f"{self._tag}so_far", self.total)])
        if found and self._texts < _TEXTS:
            self._texts += 1
            lines = [f"- `{tag}`: {value}" for tag, value in found[:_NAMES_SHOWN]]
            lines += [f"- and {len(found) - _NAMES_SHOWN} more"] * (len(found) > _NAMES_SHOWN)
            yield text(f"{self._tag}where", "\n".join(lines))


class TensorBoardSink:
    """Writes steps into an event file, under tags such as ``0:fc.weight/rank0/grad_reduced_norm``.

    Rows of counts by bin become histograms, under tags such as ``0:fc.weight/rank0/update``.

    Args:
        directory: An existing directory.
        rank: Of this process.
        columns: The columns of a table of the run, such as ``("norm", "shape", "dtype")``.
        histograms_only: Leave the other rows to another sink.
        resumed: See :class:`EventFile`.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        columns: Sequence[str],
        *,
        histograms_only: bool = False,
        resumed: bool = False,
    ) -> None:
        self._rank = rank
        self._statistics = tuple(column for column in columns if column in _STATISTICS)
        self._order_wanted = "id" in columns
        self._histograms_only = histograms_only
        self._file = EventFile(directory, resumed=resumed)
        self._non_finite: dict[str, NonFinite] = {}

    def write(self, step: RecordedStep) -> None:
        """Write a step to disk.

        Raises:
            OSError: It could not be written; the next step begins another file.
        """
        values: list[Any] = []
        by_kind: dict[str, Scalars] = {}
        for order, (row, numbers) in enumerate(step.lines(len(self._statistics)), step.first):
            if row.is_histogram:
                values += self._histogram(row, numbers)
            elif not self._histograms_only:
                by_kind.setdefault(row.kind, []).extend(self._scalars(row, order, numbers))
        for kind, found in by_kind.items():
            values += scalars(found)
            values += self._non_finite.setdefault(kind, NonFinite(f"{kind}_")).values(found)
        if not self._histograms_only:
            values += scalars(_about(step))
        if values:
            self._file.add(step.step, values)

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _scalars(self, row: Row, order: int, numbers: Sequence[float]) -> Scalars:
        micro = "" if row.micro_step is None else f":micro{row.micro_step}"
        tag = f"{row.stage}:{row.name}{micro}/rank{self._rank}/{row.kind}_"
        names = row.features or self._statistics
        found = [
            (f"{tag}{name}", value)
            for name, value in zip(names, numbers, strict=True)
            if row.features or not row.empty or name in {"norm", "nans"}
        ]
        return [*found, (f"{tag}id", order)] if self._order_wanted and not row.features else found

    def _histogram(self, row: Row, numbers: Sequence[float]) -> Iterator[Any]:
        from tensorboard.compat.proto import summary_pb2  # noqa: PLC0415 - an extra

        described = _describe(numbers)
        if described:
            tag = f"{row.stage}:{row.name}/rank{self._rank}/{row.kind.removesuffix(HISTOGRAM)}"
            yield summary_pb2.Summary.Value(tag=tag, histo=summary_pb2.HistogramProto(**described))


def _about(step: RecordedStep) -> list[tuple[str, float]]:
    """What ``steps.csv`` says of a step."""
    numbers = {
        "micro_steps": step.micro_steps,
        "grad_scale": None if math.isnan(step.grad_scale) else step.grad_scale,
        "skipped": step.skipped,
        "complete": step.complete,
    }
    return [(step_tag(step.model, name), value) for name, value in numbers.items() if value is not None]


def step_tag(model: str, column: str) -> str:
    """The tag of a number of ``steps.csv``."""
    return f"steps/{model}/{column}" if model else f"steps/{column}"


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
