"""CSV files: ``{kind}_{first}-{last}.csv``, a bucket of steps each, and ``steps.csv`` with a line a step.

A file appears whole (written beside its place, then renamed) and grows by whole lines, each step in one write; a write
that fails part-way is undone. So a kill costs at most the step in flight, and a full disk never tears an earlier row.
"""

from __future__ import annotations

import csv
import dataclasses
import errno
import functools
import io
import math
import os
import sys
from typing import TYPE_CHECKING, Literal

import numpy as np

from msmon import log
from msmon.regular_file import read_regular, write_all, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from msmon.record.table import Row
    from msmon.sinks.base import RecordedStep

STEPS_FILE = "steps.csv"
_STEPS_HEADER = ("model", "step", "micro_steps", "skipped", "grad_scale", "complete")
_EXACT_POWER = 22
"""Powers of ten up to this one are float64 numbers."""

_POWERS = np.array([float(f"1e{power}") for power in range(_EXACT_POWER + 1)])

_EXACT_WHOLE = 2.0**51
"""Below, halves are float64 numbers too."""

_FULL = 0.1
"""From here on ``ndigits`` decimals are ``ndigits`` significant digits or more."""

_STATISTICS = ("min", "max", "norm", "mean", "zeros", "nans")


class CsvSink:
    """Writes steps into one directory.

    Args:
        directory: An existing directory.
        columns: The columns after the row's names, such as ``("norm", "shape", "dtype")``.
        ndigits: Decimals; see :func:`format_number`.
        steps_per_file: How many steps a file's name covers.
    """

    def __init__(self, directory: Path, columns: Sequence[str], ndigits: int, steps_per_file: int) -> None:
        self._directory = directory
        self._columns = tuple(columns)
        self._statistics = [column for column in self._columns if column in _STATISTICS]
        self._counts = [place for place, name in enumerate(self._statistics) if name == "nans"]
        self._others = [(place, column) for place, column in enumerate(self._columns) if column not in _STATISTICS]
        self._ndigits = ndigits
        self._steps_per_file = steps_per_file
        self._files: dict[tuple[str, ...], _AppendedFile] = {}

    def write(self, step: RecordedStep) -> None:
        """Append a step's rows to the file of each kind.

        Raises:
            OSError: Some kind could not be written; the others are on disk, and no file ends in part of this step.
        """
        failure: OSError | None = None
        first = step.step // self._steps_per_file * self._steps_per_file
        for (kind, header), lines in self._lines_by_file(step).items():
            path = self._directory / f"{kind}_{first}-{first + self._steps_per_file - 1}.csv"
            try:
                self._append((kind, *header), path, header, lines)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        if not step.supplement:
            self._append((STEPS_FILE,), self._directory / STEPS_FILE, _STEPS_HEADER, [self._step_line(step)])

    def close(self) -> None:
        """Nothing is held open between steps."""
        self._files.clear()

    def _append(
        self, key: tuple[str, ...], path: Path, header: Sequence[str], lines: Iterable[Sequence[object]]
    ) -> None:
        file = self._files.get(key)
        if file is None or file.wanted != path:
            file = self._files[key] = _AppendedFile(path, header)
        file.append(csv_text(lines))

    def _lines_by_file(self, step: RecordedStep) -> dict[tuple[str, tuple[str, ...]], list[list[object]]]:
        """The lines of each kind and header. Runs beside the training, and so does as little as it can for a row."""
        found: dict[tuple[str, tuple[str, ...]], list[list[object]]] = {}
        short = dataclasses.replace(step, numbers=round_numbers(step.numbers, self._ndigits))
        for order, (row, values) in enumerate(short.lines(len(self._statistics)), step.first):
            if row.is_histogram:
                continue
            cells: list[object] = [row.stage, row.name, step.step]
            if row.micro_step is not None:
                cells.append(row.micro_step)
            cells += values if row.features else self._cells(row, order, values)
            found.setdefault((row.kind, self._header(row.features, row.micro_step is not None)), []).append(cells)
        return found

    @functools.lru_cache(maxsize=64)  # noqa: B019 - a sink lives as long as the run
    def _header(self, features: tuple[str, ...], micro_step: bool) -> tuple[str, ...]:  # noqa: FBT001 - private, one caller
        return ("vpp_stage", "name", "step", *(["micro_step"] if micro_step else []), *(features or self._columns))

    def _cells(self, row: Row, order: int, values: list[float]) -> list[object]:
        cells: list[object] = list(values)
        for place in self._counts:
            cells[place] = int(values[place])
        if row.empty:
            cells = [
                cell if name in {"norm", "nans"} else "" for name, cell in zip(self._statistics, cells, strict=True)
            ]
        for place, column in self._others:
            cells.insert(place, list(row.shape) if column == "shape" else row.dtype if column == "dtype" else order)
        return cells

    def _step_line(self, step: RecordedStep) -> list[object]:
        scale = "" if math.isnan(step.grad_scale) else format_number(step.grad_scale, self._ndigits)
        return [step.model, step.step, step.micro_steps, int(step.skipped), scale, int(step.complete)]


def format_number(value: float, ndigits: int) -> str:
    """Round to ``ndigits`` decimals; a value below 0.1, or that would print as 0, keeps that many significant digits instead.

    ``nan``, ``inf`` and ``-inf`` are written as such.
    """
    return repr(_round_one(value, ndigits))


def _round_one(value: float, ndigits: int) -> float:
    if value - value != 0:  # nan, inf or -inf: rounding knows none of them
        return value
    rounded = round(value, ndigits)
    if abs(value) < _FULL or rounded == 0:
        rounded = float(f"{value:.{max(ndigits - 1, 0)}e}")
    return rounded


def round_numbers(numbers: NDArray[np.float64], ndigits: int) -> NDArray[np.float64]:
    """Numbers whose ``repr`` is what :func:`format_number` writes.

    Rounding in float64 is exact up to its own error, so those that it could take to the wrong side of a half are rounded
    one by one, as are small and huge ones.
    """
    factor = 10.0 ** min(ndigits, _EXACT_POWER)
    with np.errstate(all="ignore"):
        scaled = numbers * factor
        whole = np.rint(scaled)
        rounded = whole / factor
        magnitude = np.abs(scaled)
        plain = (magnitude < _EXACT_WHOLE) & (np.abs(np.abs(scaled - whole) - 0.5) > magnitude * 2.0**-51)
        plain &= (whole != 0) | (numbers == 0)
        small = np.flatnonzero((np.abs(numbers) < _FULL) & (numbers != 0))
        rounded[small], plain[small] = _round_small(numbers[small], max(ndigits, 1))
    places = np.flatnonzero(~plain) if ndigits <= _EXACT_POWER else np.arange(len(numbers))
    rounded[places] = [_round_one(value, ndigits) for value in numbers[places].tolist()]
    return rounded


def _round_small(numbers: NDArray[np.float64], digits: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Numbers rounded to significant digits, and where that is certain: exact powers of ten, and not near a half."""
    power = digits - 1 - np.floor(np.log10(np.abs(numbers)))
    factor = _POWERS[np.clip(power, 0, _EXACT_POWER).astype(np.intp)]
    scaled = numbers * factor
    whole = np.rint(scaled)
    magnitude = np.abs(scaled)
    certain = (power <= _EXACT_POWER) & (magnitude < _EXACT_WHOLE)
    certain &= (np.abs(whole) >= 10.0 ** (digits - 1)) & (np.abs(whole) < 10.0**digits)
    certain &= np.abs(np.abs(scaled - whole) - 0.5) > magnitude * 2.0**-51
    return whole / factor, certain


def whole_records(content: bytes) -> bytes:
    """The content of a CSV file without a record at its end that a kill left unfinished."""
    end = content.rfind(b"\n") + 1
    while content.count(b'"', 0, end) % 2:  # that newline lies inside a quoted cell
        end = content.rfind(b"\n", 0, end - 1) + 1
    return content[:end]


class _AppendedFile:
    """A CSV file that only ever holds whole steps."""

    def __init__(self, path: Path, header: Sequence[str]) -> None:
        self.wanted = path
        self._path = path
        self._header = csv_text([header])
        self._end: int | None = None

    def append(self, text: bytes) -> None:
        if self._end is None:
            self._end = self._take_over()
        removed = self._end is not None and not self._path.exists()
        if removed:
            log.say(
                f"{self._path} was removed while the run goes on: rows go on in a new file", once=f"gone:{self._path}"
            )
        if self._end is None or removed:
            self._end = self._create(self._header + text)
            return
        with _open_to_write(self._path) as file:
            if os.fstat(file.fileno()).st_size < self._end:
                text = self._after_a_cut(file, text)
            file.seek(self._end)
            try:
                write_all(file, text)
            except OSError:
                file.truncate(self._end)
                raise
            file.truncate()
        self._end += len(text)

    def _after_a_cut(self, file: io.FileIO, text: bytes) -> bytes:
        """Somebody has cut the file short: go on after its last whole line, or with a new header."""
        log.say(
            f"{self._path} was cut short while the run goes on: rows go on where it ends now", once=f"cut:{self._path}"
        )
        file.seek(0)
        content = whole_records(file.read())
        if content.startswith(self._header):
            self._end = len(content)
            return text
        self._end = 0
        return self._header + text

    def _take_over(self) -> int | None:
        """Go on in an existing file: the length of its whole lines; ``None`` when there is none.

        A file of other columns is left alone, and this one goes beside it as ``….1.csv``, ``….2.csv``, ….
        """
        number = 0
        while os.path.lexists(self._path):
            content = _content(self._path)
            if content.startswith(self._header):
                return len(whole_records(content))
            number += 1
            self._path = self.wanted.with_suffix(f".{number}.csv")
        return None

    def _create(self, content: bytes) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._path, content)
        return len(content)


def _content(path: Path) -> bytes:
    """What a file holds; nothing for what is no file of ours: a link, a pipe.

    Raises:
        OSError: It cannot be read, or is a folder.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    try:
        return b"" if path.is_symlink() else read_regular(path, sys.maxsize)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return b""


def _open_to_write(path: Path) -> io.FileIO:
    flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    return io.FileIO(os.open(path, flags), "r+b")


def csv_text(lines: Iterable[Sequence[object]]) -> bytes:
    """Lines as a CSV file has them, whatever their names hold."""
    rows = list(lines)
    text = _joined(rows, csv.QUOTE_MINIMAL)
    if "\r" in text:  # before Python 3.13 a carriage return alone is not quoted
        text = _joined(rows, csv.QUOTE_ALL)
    return text.encode("utf-8", "surrogatepass")


def _joined(rows: list[Sequence[object]], quoting: Literal[0, 1]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n", quoting=quoting).writerows(rows)
    return buffer.getvalue()
