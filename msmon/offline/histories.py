"""Which runs of an output root continue each other, by the numbers of their steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msmon.offline.reader import STEPS, CsvFile, kind_files, run_directories
from msmon.runtime.run_directory import parse_directory_name, read_run_file
from msmon.sinks.csv import STEPS_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path


@dataclass
class History:
    """Runs whose steps follow one another, first to last.

    Attributes:
        runs: Their ids.
        directories: Their directories in order, each with the step from which on its rows do not belong here: a later run
            went back to before it. ``None``: all do.
        last: The last step of each rank.
    """

    runs: list[str] = field(default_factory=list)
    directories: dict[Path, int | None] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The id of its last run, which is the last of no other history."""
        return self.runs[-1]

    def is_continued_by(self, first: Mapping[int, int]) -> bool:
        """Whether a run with these first steps by rank repeats no step, nor one before those that are there."""
        return all(self.last.get(rank, -1) < step for rank, step in first.items())

    def until(self, step: int) -> History:
        """The same runs up to a step, for one that went back to it."""
        cut: dict[Path, int | None] = {
            path: step if limit is None else min(step, limit) for path, limit in self.directories.items()
        }
        return History([*self.runs], cut, {rank: min(last, step - 1) for rank, last in self.last.items()})

    def add(self, run: str, directories: Iterable[Path], last: Mapping[int, int]) -> None:
        """A run continues it."""
        self.runs.append(run)
        self.directories.update(dict.fromkeys(directories))
        self.last.update(last)


def histories(directories: Iterable[Path]) -> list[History]:
    """Put runs into histories.

    A run continues the history that ends nearest below its first step, rank by rank. One that says it was resumed in the
    middle of the latest history, from a checkpoint before its end, makes another one together with what came before; the
    history that it left stays whole. One whose numbers begin anew is a history of its own. So nothing is replaced. All
    directories of a run belong together: its ranks, and its restarts.

    Args:
        directories: Run directories in the order in which their runs were started.
    """
    by_run: dict[str, dict[Path, int]] = {}
    for directory in directories:
        parsed = parse_directory_name(directory.name)
        if parsed is not None:
            by_run.setdefault(parsed.run, {})[directory] = parsed.rank
    found: list[History] = []
    for run, ranks in by_run.items():
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for directory, rank in ranks.items():
            for step in _steps(directory):
                first[rank] = min(first.get(rank, step), step)
                last[rank] = max(last.get(rank, step), step)
        before = [history for history in reversed(found) if history.is_continued_by(first)]
        history = max(before, key=lambda one: max((one.last.get(rank, -1) for rank in first), default=-1), default=None)
        if history is None:
            resumed_at = max((_first_step(directory) for directory in ranks), default=0)
            history = found[-1].until(resumed_at) if found and resumed_at else History()
            found.append(history)
        history.add(run, ranks, last)
    return found


def other_runs(root: Path, run: str) -> list[str]:
    """The ids of the runs below an output root beside one, in the order in which they were started."""
    found = (parsed.run for path in run_directories(root) if (parsed := parse_directory_name(path.name)))
    return [other for other in dict.fromkeys(found) if other != run]


def _first_step(directory: Path) -> int:
    """The step at which a run says that it went on with an earlier one; 0 when it does not."""
    models = (read_run_file(directory) or {}).get("models")
    numbers = (
        [model.get("first_step") for model in models if isinstance(model, dict)] if isinstance(models, list) else []
    )
    values = [number.get("value") if isinstance(number, dict) else number for number in numbers]
    return min((value for value in values if isinstance(value, int)), default=0)


def _steps(directory: Path) -> Iterator[int]:
    """The steps on record in a directory, those of the original included, which has no ``steps.csv``."""
    listed = False
    for step, *_ in CsvFile(directory / STEPS_FILE, STEPS).blocks():
        listed = True
        yield step
    if not listed:
        for kind, path in kind_files(directory):
            yield from (step for step, *_ in CsvFile(path, kind).blocks())
