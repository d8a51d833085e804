"""Reads run directories back, by the line or by the step: the one reader of every command.

What can be read is used; the rest is left out and named, once a file (:class:`Unreadable`). Only regular files are opened.
No more than a line, or the rows of one step, is in memory.
"""

from __future__ import annotations

import array
import csv
import errno
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from msmon.regular_file import open_regular
from msmon.runtime.run_directory import by_time, parse_directory_name
from msmon.sinks.csv import STEPS_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

STEPS = "steps"
"""The kind of the rows of ``steps.csv``: a row a model and step, its name that of the model."""

_FILE = re.compile(r"(?P<kind>.+)_(?P<first>[0-9]{1,18})-(?P<last>[0-9]{1,18})(\.[0-9]+)?\.csv", re.DOTALL)
_NAME_COLUMNS = ("name", "param_name", "module_name")
"""The column of the name; older monitors had the second and the third."""

_PLACE = frozenset({"vpp_stage", "name", "step", "micro_step"})
_TEXT = frozenset({"shape", "dtype"})
_ABSENT = frozenset({"", "None"})
_SHAPE = re.compile(r"(?:torch\.Size\()?[\[(]((?:[0-9]{1,18}(?:, ?|,?(?=[\])])))*)[\])]\)?")
_LONGEST_RECORD = 2**20
"""Bytes of a line, with those that quoted line ends join to it."""

_MOST_RESTARTS = 100
"""How often a file is read again from the line after a quote without an end: each time costs up to a MiB of it."""

_MOST_OPEN = 32
_MOST_REASONS = 5
_INT64_DIGITS = 19


@dataclass(frozen=True)
class RecordedRow:
    """One line of a file.

    Attributes:
        kind: Prefix of the file, such as ``grad_reduced``.
        name: Name of the tensor.
        stage: ``vpp_stage``.
        step: Training step.
        micro_step: Micro-batch, where the file has that column.
        values: Column → cell: a float, or text for ``shape`` and ``dtype``; an empty cell is absent.
    """

    kind: str
    name: str
    stage: int
    step: int
    micro_step: int | None
    values: dict[str, float | str]

    def __getitem__(self, column: str) -> float:
        """A numeric cell.

        Raises:
            KeyError: There is no value in that column.
        """
        return float(self.values[column])

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape, where it is on record."""
        text = self.values.get("shape")
        return None if text is None else tuple(int(size) for size in re.findall(r"[0-9]+", str(text)))

    def numbers(self) -> dict[str, float]:
        """Column → number."""
        return {column: value for column, value in self.values.items() if isinstance(value, float)}


class Unreadable:
    """What could not be read, and is left out.

    Attributes:
        damaged: Whether it is more than lines that the end of a process left unfinished.
    """

    def __init__(self) -> None:
        self.damaged = False
        self._found: dict[Path, dict[str, tuple[str, int]]] = {}

    def add(self, path: Path, what: str, place: int = 0, *, unit: str = "line", unfinished: bool = False) -> None:
        """Note something.

        Args:
            path: The file.
            what: What is left out.
            place: Where, from 1; 0 for the whole file.
            unit: What is counted to say where.
            unfinished: It is what a process that ended in the middle of a write leaves.
        """
        self.damaged |= not unfinished
        reasons = self._found.setdefault(path, {})
        if what not in reasons and len(reasons) >= _MOST_REASONS:
            what, place = "more", 0
        first, count = reasons.get(what, (f"{unit} {place}" if place else "", 0))
        reasons[what] = first, count + 1

    def cannot_open(self, path: Path, error: OSError) -> None:
        """Note a file that cannot be opened or read."""
        self.add(path, f"the whole file ({error.strerror or error})")

    def paths(self) -> list[Path]:
        """The files."""
        return list(self._found)

    def lines(self) -> list[str]:
        """A line for each file: the file, what is left out, and where that begins."""
        return [
            f"{path}: left out: {'; '.join(_reason(what, *found) for what, found in reasons.items())}"
            for path, reasons in self._found.items()
        ]


def _reason(what: str, first: str, count: int) -> str:
    return f"{what} ({first}{f' and {count - 1:,} more' if count > 1 else ''})" if first else what


# Directories


def run_directories(root: Path, rank: int | None = None) -> list[Path]:
    """The run directories below an output root, in the order in which their runs were started; of one rank, or of all."""
    found = []
    for entry in root.iterdir() if os.path.isdir(root) else ():  # noqa: PTH112 - Path.is_dir raises where os.path says no
        parsed = parse_directory_name(entry.name)
        if parsed is not None and os.path.isdir(entry) and rank in {None, parsed.rank}:  # noqa: PTH112 - as above
            found.append(entry)
    return by_time(found)


def kinds(directory: Path) -> list[str]:
    """The kinds of data that a run directory holds."""
    return sorted({kind for kind, _ in kind_files(directory)})


def kind_files(directory: Path, unreadable: Unreadable | None = None) -> list[tuple[str, Path]]:
    """The files of a run directory that hold rows, each with its kind of data: by kind, then by step."""
    try:
        names = os.listdir(directory)  # noqa: PTH208 - a name is matched before a path is made of it
    except OSError as error:
        if unreadable is not None:
            unreadable.cannot_open(directory, error)
        return []
    found = [(match["kind"], int(match["first"]), name) for name in names if (match := _FILE.fullmatch(name))]
    return [(kind, directory / name) for kind, _, name in sorted(found)]


def read_kind(directory: Path, kind: str, unreadable: Unreadable | None = None) -> list[RecordedRow]:
    """All rows of one kind, by step, in the order of the files."""
    files = [path for this, path in kind_files(directory, unreadable) if this == kind]
    return [row for path in files for row in CsvFile(path, kind, unreadable).rows()]


def read_steps(directory: Path, unreadable: Unreadable | None = None) -> list[dict[str, str]]:
    """The lines of ``steps.csv``: one a collected step."""
    path = directory / STEPS_FILE
    return list(CsvFile(path, STEPS, unreadable).lines()) if os.path.lexists(path) else []


# Files


@dataclass(frozen=True)
class _Layout:
    """What stands in which cell."""

    header: list[str]
    step: int
    name: int | None
    stage: int | None
    micro_step: int | None
    values: list[tuple[int, str]]

    def line(self, cells: list[str], number: int, begin: int, end: int) -> _Line | None:
        """A line with its place; ``None`` for one that has other cells than the header says."""
        if len(cells) != len(self.header):
            return None
        step = _whole(cells[self.step])
        stage = 0 if self.stage is None else _whole(cells[self.stage])
        micro_step = None if self.micro_step is None else _whole(cells[self.micro_step])
        if step is None or stage is None or (micro_step is None and self.micro_step is not None):
            return None
        return _Line(self, cells, number, begin, end, step, stage, micro_step)


_Record = tuple[list[str], int, int, int]
"""Cells, number of the line, and where it begins and ends."""


class _Line(NamedTuple):
    layout: _Layout
    cells: list[str]
    number: int
    begin: int
    end: int
    step: int
    stage: int
    micro_step: int | None


def _layout(header: list[str], kind: str) -> _Layout | str:
    """The layout of a file; in words what is missing in one that is not an msmon CSV."""
    places = {column: place for place, column in reversed(list(enumerate(header)))}
    names = ("model",) if kind == STEPS else _NAME_COLUMNS
    name = next((column for column in names if column in places), None)
    missing = [column for column in ("step",) if column not in places]
    missing += ["name"] if name is None and kind != STEPS else []
    if missing:
        return " and ".join(f"`{column}`" for column in missing)
    ours = {*_PLACE, name}
    values = [
        (place, column) for column, place in sorted(places.items(), key=lambda item: item[1]) if column not in ours
    ]
    return _Layout(
        header,
        places["step"],
        places[name] if name is not None else None,
        places.get("vpp_stage"),
        places.get("micro_step"),
        values,
    )


class CsvFile:
    """A CSV file of a run, also one of an older monitor: a line a row, of as many cells as its header has.

    What is added to the file after it was opened first is not read.

    Args:
        path: The file.
        kind: The kind of its rows; :data:`STEPS` for ``steps.csv``.
        unreadable: Hears what is left out.

    Attributes:
        size: Bytes.
        written: When it was last written to.
    """

    def __init__(self, path: Path, kind: str, unreadable: Unreadable | None = None) -> None:
        self.path = path
        self.kind = kind
        self.size, self.written = 0, 0.0
        self._unreadable = unreadable if unreadable is not None else Unreadable()
        self._layout: _Layout | None = None

    @property
    def columns(self) -> list[str]:
        """The columns of values, once the header has been read."""
        return [column for _, column in self._layout.values] if self._layout else []

    @property
    def has_micro_steps(self) -> bool:
        """Whether there is a column of micro-batches, once the header has been read."""
        return self._layout is not None and self._layout.micro_step is not None

    def lines(self) -> Iterator[dict[str, str]]:
        """The cells of each line by column, as text."""
        for line in self._lines():
            yield dict(zip(line.layout.header, line.cells, strict=True))

    def rows(self) -> Iterator[RecordedRow]:
        """The rows, in the order of the file."""
        for line in self._lines():
            yield self._row(line)

    def blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """Each stretch of lines of one step: the step, its first line, and the bytes where it begins and ends."""
        step, first, begin, end = -1, 0, 0, 0
        for line in self._lines():
            if line.step != step:
                if step >= 0:
                    yield step, first, begin, end
                step, first, begin = line.step, line.number, line.begin
            end = line.end
        if step >= 0:
            yield step, first, begin, end

    def rows_between(self, file: BinaryIO, step: int, number: int, begin: int, end: int) -> Iterator[RecordedRow]:
        """The rows of a block, which :meth:`blocks` has checked already.

        Args:
            file: This file, opened.
            step: The block's step.
            number: Its first line.
            begin: Where it begins.
            end: Where it ends.
        """
        file.seek(begin)
        for record in self._records(_Lines(file, begin, end, number), Unreadable()):
            line = self._layout.line(*record) if self._layout else None
            if line is not None and line.step == step:
                yield self._row(line)

    def open(self) -> BinaryIO | None:
        """The file, opened; ``None`` where that is not possible any more, which is noted."""
        try:
            return open_regular(self.path)
        except OSError as error:
            self._unreadable.cannot_open(self.path, error)
            return None

    def cannot_read(self, error: OSError) -> None:
        """Note that an opened file failed: a bad disk, a network that went away."""
        self._unreadable.add(self.path, f"what comes after a failed read ({error.strerror or error})")

    def _lines(self) -> Iterator[_Line]:
        file = self.open()
        if file is None:
            return
        try:
            with file:
                status = os.fstat(file.fileno())
                self.size, self.written = status.st_size, status.st_mtime
                lines = _Lines(file, 0, self.size, 1)
                lines.skip_mark()
                yield from self._checked(self._records(lines, self._unreadable))
        except OSError as error:
            self.cannot_read(error)

    def _checked(self, records: Iterator[_Record]) -> Iterator[_Line]:
        header, *_ = next(records, ([], 0, 0, 0))
        layout = _layout(header, self.kind)
        if isinstance(layout, str):
            self._unreadable.add(self.path, f"the whole file, which has no column {layout}")
            return
        self._layout = layout
        for record in records:
            line = layout.line(*record)
            if line is None:
                self._unreadable.add(self.path, "a line that does not fit the header", record[1])
            else:
                yield line

    def _records(self, lines: _Lines, unreadable: Unreadable) -> Iterator[_Record]:
        """The cells of each line, its number, and where it begins and ends."""
        reader = csv.reader(lines)
        restarts = 0
        while True:
            line, begin = lines.begin_record()
            what = "an unfinished line"
            try:
                cells = next(reader)
            except StopIteration:
                if lines.torn:
                    unreadable.add(self.path, what, line, unfinished=True)
                return
            except UnicodeDecodeError:
                what = "a line that is not UTF-8"
            except (csv.Error, _LongLineError) as error:
                what = f"a line that is not CSV ({error})"
            else:
                if lines.complete:
                    if cells:
                        yield cells, line, begin, lines.position
                    continue
            again = lines.restart()  # whatever became of this record, the next line is one again
            unreadable.add(self.path, what, line, unfinished=lines.at_end and not again)
            restarts += again
            if restarts > _MOST_RESTARTS:
                unreadable.add(self.path, f"everything from line {line + 1} on")
                return
            reader = csv.reader(lines)

    def _row(self, line: _Line) -> RecordedRow:
        layout, cells = line.layout, line.cells
        values: dict[str, float | str] = {}
        for number, column in layout.values:
            cell = cells[number]
            if cell in _ABSENT:
                continue
            if column in _TEXT:
                if column == "shape" and not _SHAPE.fullmatch(cell):
                    self._unreadable.add(self.path, "a shape that is none", line.number)
                else:
                    values[column] = cell
            else:
                try:
                    values[column] = float(cell)
                except ValueError:
                    self._unreadable.add(self.path, f"a cell of `{column[:80]}` that is no number", line.number)
        name = cells[layout.name] if layout.name is not None else ""
        return RecordedRow(self.kind, name, line.stage, line.step, line.micro_step, values)


class _LongLineError(Exception):
    """A line, with those that quoted line ends join to it, is longer than any that is written."""


class _Lines:
    """The lines of a part of a file, decoded, without one at its end that is not whole.

    Attributes:
        position: Where the next line begins.
        torn: Whether the part ends in a line that is not whole.
    """

    def __init__(self, file: BinaryIO, begin: int, end: int, number: int) -> None:
        self.position = begin
        self.torn = False
        self._file = file
        self._end = end
        self._number = number
        self._begin = self._second = begin
        self._quotes = self._joined = 0

    @property
    def complete(self) -> bool:
        """Whether no quoted cell is open where the next line begins."""
        return self._quotes % 2 == 0

    @property
    def at_end(self) -> bool:
        """Whether there is no further line."""
        return self.position >= self._end or self.torn

    def skip_mark(self) -> None:
        """Leave out the mark of UTF-8 that some editors put at the beginning."""
        if self._file.read(3) == b"\xef\xbb\xbf":
            self.position = 3
        else:
            self._file.seek(0)

    def begin_record(self) -> tuple[int, int]:
        """The next line is the first of a record: returns its number and where it begins."""
        self._begin, self._quotes, self._joined = self.position, 0, 0
        return self._number, self._begin

    def restart(self) -> bool:
        """Go back to the second line of this record; returns whether that has been read already."""
        again = self._joined > 1
        if again:
            self.torn = False
            self._file.seek(self._second)
            self.position = self._second
            self._number -= self._joined - 1
        return again

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        room = min(_LONGEST_RECORD, self._end - self.position)
        line = self._file.readline(room) if room > 0 else b""
        whole = line.endswith(b"\n")
        if not whole and len(line) < _LONGEST_RECORD:
            self.torn = bool(line) or not self.complete
            raise StopIteration
        if whole:
            self.position += len(line)
        else:
            self._skip_line(line)
        self._number += 1
        self._joined += 1
        if self._joined == 1:
            self._second = self.position
        if not whole or self.position - self._begin > _LONGEST_RECORD:
            raise _LongLineError(f"longer than {_LONGEST_RECORD:,} bytes")
        self._quotes += line.count(b'"')
        return line.decode("utf-8", "surrogatepass")

    def _skip_line(self, piece: bytes) -> None:
        """Go to the end of a line of any length; holes of a sparse file are jumped over."""
        while piece and not piece.endswith(b"\n"):
            self.position += len(piece)
            if not piece.strip(b"\0"):
                self.position = _end_of_hole(self._file, self.position)
                self._file.seek(self.position)
            piece = self._file.readline(max(0, min(_LONGEST_RECORD, self._end - self.position)))
        self.position += len(piece)


def _end_of_hole(file: BinaryIO, position: int) -> int:
    """Where a sparse file has data again; the same position where it has some, or where nobody can tell."""
    if not hasattr(os, "SEEK_DATA"):
        return position
    try:
        return os.lseek(file.fileno(), position, os.SEEK_DATA)
    except OSError as error:
        return os.fstat(file.fileno()).st_size if error.errno == errno.ENXIO else position  # there is no more


def _whole(cell: str) -> int | None:
    """A whole number from 0 to that of int64."""
    if not (cell.isascii() and cell.isdigit() and len(cell) <= _INT64_DIGITS):
        return None
    number = int(cell)
    return number if number < 2**63 else None


# By the step


@dataclass
class StepIndex:
    """Where the rows of each step lie in several files. Takes 40 bytes for each stretch of lines of one step.

    Attributes:
        files: The files, in the order of :meth:`add`.
    """

    files: list[CsvFile] = field(default_factory=list)
    _blocks: array.array[int] = field(default_factory=lambda: array.array("q"))
    _opened: dict[int, BinaryIO] = field(default_factory=dict)

    def add(self, file: CsvFile, until: int | None = None) -> None:
        """Look through a file; of steps from ``until`` on nothing counts."""
        number = len(self.files)
        self.files.append(file)
        for block in file.blocks():
            if until is None or block[0] < until:
                self._blocks.extend((number, *block))

    def steps(self) -> Iterator[tuple[int, list[tuple[int, int, int, int]]]]:
        """Each step, ascending, with its blocks in the order of the files: file, first line, begin and end."""
        blocks = np.array(self._blocks, dtype=np.int64).reshape(-1, 5)
        order = np.argsort(blocks[:, 1], kind="stable")
        step = -1
        found: list[tuple[int, int, int, int]] = []
        for number in order:
            file, this, line, begin, end = blocks[number].tolist()
            if this != step and found:
                yield step, found
                found = []
            step = this
            found.append((file, line, begin, end))
        if found:
            yield step, found

    def rows(self, step: int, block: tuple[int, int, int, int]) -> Iterator[RecordedRow]:
        """The rows of a block."""
        number, line, begin, end = block
        opened = self._opened.pop(number, None) or self.files[number].open()
        if opened is None:
            return
        self._opened[number] = opened  # the last used is the last in the dict
        if len(self._opened) > _MOST_OPEN:
            self._opened.pop(next(iter(self._opened))).close()
        try:
            yield from self.files[number].rows_between(opened, step, line, begin, end)
        except OSError as error:
            self.files[number].cannot_read(error)

    def close(self) -> None:
        """Close the files."""
        while self._opened:
            self._opened.popitem()[1].close()
