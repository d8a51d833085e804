"""Reads a run directory back. A line that a kill left unfinished is left out."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msmon.runtime.run_directory import by_time, parse_directory_name
from msmon.sinks.csv import whole_records

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FILE = re.compile(r"(?P<kind>.+)_(?P<first>\d+)-(?P<last>\d+)(\.\d+)?\.csv")


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


def run_directories(root: Path, rank: int | None = None) -> list[Path]:
    """The run directories below an output root, in the order in which their runs were started; of one rank, or of all."""
    found = []
    for entry in root.iterdir() if root.is_dir() else ():
        parsed = parse_directory_name(entry.name)
        if parsed is not None and entry.is_dir() and rank in {None, parsed.rank}:
            found.append(entry)
    return by_time(found)


def kinds(directory: Path) -> list[str]:
    """The kinds of data that a run directory holds."""
    return sorted({kind for kind, _ in kind_files(directory)})


def kind_files(directory: Path) -> list[tuple[str, Path]]:
    """The files of a run directory that hold rows, each with its kind of data: by kind, then by step."""
    found = [
        (match["kind"], int(match["first"]), path.name, path)
        for path in directory.iterdir()
        if (match := _FILE.fullmatch(path.name))
    ]
    return [(kind, path) for kind, _, _, path in sorted(found)]


def read_kind(directory: Path, kind: str) -> list[RecordedRow]:
    """All rows of one kind, by step, in the order of the files."""
    return [row for this, path in kind_files(directory) if this == kind for row in read_file(path, kind)]


def read_by_steps(directory: Path) -> Iterator[list[RecordedRow]]:
    """All rows of a run directory, those of the same range of steps together: one such range is in memory at a time."""
    ranges: dict[int, list[tuple[str, Path]]] = {}
    for path in sorted(directory.iterdir()):
        if match := _FILE.fullmatch(path.name):
            ranges.setdefault(int(match["first"]), []).append((match["kind"], path))
    for first in sorted(ranges):
        yield [row for kind, path in ranges[first] for row in read_file(path, kind)]


def read_steps(directory: Path) -> list[dict[str, str]]:
    """The lines of ``steps.csv``: one a collected step."""
    path = directory / "steps.csv"
    return list(csv.DictReader(_whole_lines(path))) if path.exists() else []


def read_file(path: Path, kind: str) -> Iterator[RecordedRow]:
    """The rows of one file, without a torn last line."""
    for line in csv.DictReader(_whole_lines(path)):
        cells = {column: _cell(column, text) for column, text in line.items() if text != ""}
        yield RecordedRow(
            kind,
            str(line["name"]),
            int(line["vpp_stage"]),
            int(line["step"]),
            int(line["micro_step"]) if "micro_step" in line else None,
            {c: v for c, v in cells.items() if c not in {"vpp_stage", "name", "step", "micro_step"}},
        )


def _cell(column: str, text: str) -> float | str:
    return text if column in {"shape", "dtype", "name"} else float(text)


def _whole_lines(path: Path) -> io.StringIO:
    return io.StringIO(whole_records(path.read_bytes()).decode("utf-8", "surrogatepass"), newline="")
