"""A CSV file by steps: where the rows of each lie, and the rows between two places. No more than one of them is held."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

_NO_NUMBERS = {"vpp_stage", "name", "step", "micro_step", "shape", "dtype"}
_NAMING = ("vpp_stage", "name", "step")


class StepFile:
    """A CSV file, of which only whole lines of as many cells as the header has are taken.

    Args:
        path: The file.

    Attributes:
        size: Bytes.
        written: When it was last written to.
        faults: What could not be read, in words.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size, self.written = path.stat().st_size, path.stat().st_mtime
        self.faults: list[str] = []
        self._header: list[str] = []

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """Each stretch of lines of one step: the step, and where it begins and ends."""
        try:
            file = self.path.open("rb")
        except OSError as error:
            self._fault(f"cannot be read ({error.strerror})")
            return
        with file:
            lines = _WholeLines(file)
            yield from self._blocks(self._records(lines))
            if lines.torn:
                self._fault("its last line is unfinished: left out")

    def _blocks(self, records: Iterator[tuple[list[str], int, int]]) -> Iterator[tuple[int, int, int]]:
        self._header, begin, end = next(records, ([], 0, 0))
        if not set(_NAMING).issubset(self._header):
            missing = ", ".join(column for column in _NAMING if column not in self._header)
            self._fault(f"is no file of a monitor (without {missing}): left out")
            return
        place, width, bad, step = self._header.index("step"), len(self._header), 0, -1
        for cells, before, after in records:
            this = int(cells[place]) if len(cells) == width and cells[place].isdecimal() else -1
            bad += this < 0
            if this != step:
                if step >= 0:
                    yield step, begin, before
                step, begin = this, before
            end = after
        if bad:
            self._fault(f"{bad} lines have other cells than the header says: left out")
        if step >= 0:
            yield step, begin, end

    def _records(self, lines: _WholeLines) -> Iterator[tuple[list[str], int, int]]:
        """The cells of each line, and where it begins and ends."""
        end = 0
        try:
            for cells in csv.reader(lines):
                begin, end = end, lines.position
                if lines.complete:
                    yield cells, begin, end
        except (csv.Error, UnicodeDecodeError) as error:
            self._fault(f"cannot be read from byte {end} on ({error})")

    def rows(self, begin: int, end: int) -> Iterator[tuple[str, list[tuple[str, float]]]]:
        """The rows between two places: ``vp{stage}:{name}[:micro{n}]`` and its numbers."""
        with self.path.open("rb") as file:
            file.seek(begin)
            text = file.read(end - begin).decode("utf-8", "surrogatepass")
        places = [(column, place) for place, column in enumerate(self._header) if column not in _NO_NUMBERS]
        stage, name = (self._header.index(column) for column in ("vpp_stage", "name"))
        micro = self._header.index("micro_step") if "micro_step" in self._header else None
        for cells in csv.reader(io.StringIO(text, newline="")):
            suffix = f":micro{cells[micro]}" if micro is not None else ""
            values = [(column, number) for column, place in places if (number := _number(cells[place])) is not None]
            yield f"vp{cells[stage]}:{cells[name]}{suffix}", values

    def _fault(self, what: str) -> None:
        self.faults.append(f"{self.path}: {what}")


class _WholeLines:
    """The lines of a file, decoded, without one at its end that is not whole.

    Attributes:
        position: Where the next line begins.
        torn: Whether the file ends in a line that is not whole.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.position = 0
        self.torn = False
        self._file = file
        self._quotes = 0

    @property
    def complete(self) -> bool:
        """Whether no quoted cell is open where the next line begins."""
        return self._quotes % 2 == 0

    def __iter__(self) -> _WholeLines:
        return self

    def __next__(self) -> str:
        line = self._file.readline()
        if not line.endswith(b"\n"):
            self.torn = bool(line) or not self.complete
            raise StopIteration
        self.position += len(line)
        self._quotes += line.count(b'"')
        return line.decode("utf-8", "surrogatepass")


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:  # an empty cell, mostly
        return None
