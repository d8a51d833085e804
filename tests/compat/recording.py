"""What a monitor wrote while it watched the trainings of ``scenarios.py``."""

from __future__ import annotations

import csv
import math
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

Table = list[list[str]]
"""The cells of a file, header first."""

DIRECTORY = re.compile(r"(?P<stamp>[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d)-rank(?P<rank>\d+)-(?P<run>[0-9a-f]{8})")
RELATIVE = 1e-6
LAST_DIGIT = 1e-16
"""Cells are rounded to sixteen decimals, which is all that is left of a value as small as that."""


@dataclass(frozen=True)
class Recording:
    """The output of one monitor: a folder a scenario."""

    root: Path

    def directories(self, scenario: str) -> list[Path]:
        return sorted((self.root / scenario / "out").glob("*-rank*"))

    def tables(self, scenario: str) -> dict[tuple[int, str], Table]:
        """Rank and file name → cells, without ``steps.csv``, which the original does not have."""
        found = {}
        for directory in self.directories(scenario):
            match = DIRECTORY.fullmatch(directory.name)
            assert match, directory.name
            for path in directory.glob("*.csv"):
                if path.name != "steps.csv":
                    with path.open(newline="") as file:
                        found[int(match["rank"]), path.name] = list(csv.reader(file))
        return found

    def column(self, scenario: str, file: str, column: str, rank: int = 0) -> dict[str, str]:
        """Name of a row → its cell in a column."""
        header, *rows = self.tables(scenario).get((rank, file), [[]])
        return {row[header.index("name")]: row[header.index(column)] for row in rows}

    def names(self, scenario: str, file: str, rank: int = 0) -> list[str]:
        return list(self.column(scenario, file, "name", rank))

    def files(self, scenario: str) -> set[str]:
        return {name for _, name in self.tables(scenario)}

    def error(self, scenario: str) -> str:
        return self.text(scenario, "error")

    def text(self, scenario: str, file: str) -> str:
        path = self.root / scenario / file
        return path.read_text() if path.exists() else ""


def record(python: str, monitor: str, folder: Path) -> Recording:
    """Run all scenarios under one monitor, in its environment, with a clock in New York."""
    ours = ("MSMON", "MONITOR_", "DYNAMIC_", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    script = Path(__file__).with_name("scenarios.py")
    done = subprocess.run(
        [python, str(script), monitor, str(folder)],
        env={**environment, "TZ": "America/New_York"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Recording(folder)


def same_cell(one: str, other: str, relative: float = RELATIVE) -> bool:
    """Equal text, or numbers that agree."""
    if one == other:
        return True
    try:
        a, b = float(one), float(other)
    except ValueError:
        return False
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=relative, abs_tol=LAST_DIGIT)


def same_line(header: list[str], one: list[str], other: list[str], relative: float) -> bool:
    """Cells that agree; a mean may also be apart by as much of the largest magnitude, since what cancels out leaves that."""
    if len(one) != len(other):
        return False
    apart = {name: (a, b) for name, a, b in zip(header, one, other, strict=False) if not same_cell(a, b, relative)}
    if set(apart) != {"mean"} or not {"min", "max"} <= set(header):
        return not apart
    largest = max(abs(float(one[header.index(name)])) for name in ("min", "max"))
    return abs(float(apart["mean"][0]) - float(apart["mean"][1])) <= relative * largest


def differences(
    one: dict[tuple[int, str], Table], other: dict[tuple[int, str], Table], relative: float = RELATIVE
) -> list[str]:
    """Every file, row or cell in which two outputs differ, in words."""
    found = [f"rank {rank}: {name} is in one only" for rank, name in sorted(set(one) ^ set(other))]
    for key in sorted(set(one) & set(other)):
        place = f"rank {key[0]}: {key[1]}"
        if len(one[key]) != len(other[key]):
            found.append(f"{place}: {len(one[key])} and {len(other[key])} lines")
        for mine, theirs in zip(one[key], other[key], strict=False):
            if not same_line(one[key][0], mine, theirs, relative):
                found.append(f"{place}: {mine} and {theirs}")
    return found
