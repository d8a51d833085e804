"""Which anomaly was first: ranks what the alert rules found, over all ranks of a run.

Anomalies come from the ``anomaly.json`` of each rank; where a run wrote none, the rules are applied to its CSV files.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import math
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from msmon.alerts.anomaly import STAGES, Order, order_of, stage_of
from msmon.alerts.catalogue import default_rules
from msmon.alerts.entries import iterate_entries
from msmon.alerts.evaluate import Evaluator, builtin_rules
from msmon.alerts.files import FILE, FOLDER, read_runs
from msmon.config.schema import AlertConfig
from msmon.errors import MsmonError
from msmon.offline.reader import STEPS, CsvFile, RecordedRow, StepIndex, Unreadable, kind_files, run_directories
from msmon.record.table import Row
from msmon.regular_file import write_whole
from msmon.runtime.run_directory import DirectoryName, by_time, parse_directory_name, read_run_file
from msmon.sinks.base import RecordedStep
from msmon.sinks.csv import STEPS_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence

    from msmon.config.schema import Rule

RESULT_FILE = "anomaly_analyse.json"
TOP = 8

Entry = dict[str, Any]


class NoAnomalyDataError(MsmonError):
    """A directory without anything that could be analysed."""

    slug = "nothing-to-analyse"


@dataclass(frozen=True)
class Analysis:
    """The anomalies of a run, ranked.

    Attributes:
        first: Key and entry of the first ones, in order.
        total: How many there are.
        by_rank: Rank → how many of them.
        source: ``anomaly.json``, or ``csv`` when the rules were applied afterwards.
        run: Id of the run; empty when it is not known, or for all runs.
        left_out: Anomalies of other runs in the same files.
        unreadable: Files of which something could not be read.
        faults: What it was, a line a file.
        damaged: Whether an anomaly may be missing because of that.
    """

    first: list[tuple[str, Entry]]
    total: int
    by_rank: dict[int, int]
    source: str
    run: str = ""
    left_out: int = 0
    unreadable: list[Path] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    damaged: bool = False


def analyse(
    directory: Path,
    *,
    top: int = TOP,
    steps: Container[int] | None = None,
    rules: Sequence[Rule] = (),
    all_runs: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Analysis:
    """Rank the anomalies below a directory.

    Args:
        directory: An output root, its ``anomaly_detected``, or one run directory.
        top: How many to keep.
        steps: Only these training steps; by default all.
        rules: Apply these to the CSV files, whatever the run itself found.
        all_runs: Rank the anomalies of every run in the files, not only of the latest.
        progress: Called with how many files (or run directories) are done, and how many there are.

    Raises:
        NoAnomalyDataError: There is neither an ``anomaly.json`` nor a run directory.
    """
    progress = progress or _silent
    unreadable = Unreadable()
    dumps = [] if rules else _dumps(directory)
    ranked = (
        _from_dumps(dumps, top, steps, all_runs=all_runs, progress=progress, unreadable=unreadable) if dumps else None
    )
    if ranked is None or (not ranked.total and len(ranked.unreadable) == len(dumps)):
        runs = _run_directories(directory, all_runs=all_runs)
        if runs:
            return _from_csv(runs, top, steps, rules, all_runs=all_runs, progress=progress, unreadable=unreadable)
    if ranked is None:
        hint = "name the directory given with --output, its anomaly_detected, or one of its run directories"
        raise NoAnomalyDataError(f"no {FILE} and no run below `{directory}`", hint=hint)
    return ranked


def write_result(analysis: Analysis, path: Path) -> None:
    """Write the ranked entries, as ``anomaly.json`` has them, whole.

    Raises:
        OSError: It cannot be written.
    """
    write_whole(path, json.dumps(dict(analysis.first), indent=2, ensure_ascii=False) + "\n")


def result_path(directory: Path) -> Path:
    """Where the result goes unless said otherwise: beside the files of the ranks, else into the directory."""
    folder = directory / FOLDER
    return (folder if os.path.isdir(folder) else directory) / RESULT_FILE  # noqa: PTH112 - as below


# From anomaly.json


def _dumps(directory: Path) -> list[Path]:
    """The files of each rank, by rank: ``anomaly.json``, and those of processes that found it taken."""
    for root in (directory, directory / FOLDER):
        found = [
            (int(match[1]), path.name != FILE, path.name, path)
            for path in _glob(root, "rank*/anomaly*.json")
            if (match := re.fullmatch(r"rank([0-9]{1,18})", path.parent.name)) and (path.name == FILE or _owner(path))
        ]
        if found:
            return [path for *_, path in sorted(found)]
    return []


def _glob(root: Path, pattern: str) -> list[Path]:
    try:
        return list(root.glob(pattern))
    except OSError:  # a name that is too long, say: nothing can be there
        return []


def _owner(path: Path) -> DirectoryName | None:
    """Whose file it is, when it is one process's alone."""
    return parse_directory_name(path.name.removeprefix("anomaly.").removesuffix(".json"))


def _from_dumps(
    paths: Sequence[Path],
    top: int,
    steps: Container[int] | None,
    *,
    all_runs: bool,
    progress: Callable[[int, int], None],
    unreadable: Unreadable,
) -> Analysis:
    run = "" if all_runs else _latest_run(paths)
    ranking = _Ranking(top)
    left_out = 0
    for number, path in enumerate(paths):
        progress(number, len(paths))
        mine = _places_of_run(path, run) if run else range(sys.maxsize)
        left_out += ranking.add(_entries(path, unreadable), mine, steps, path, unreadable)
    progress(len(paths), len(paths))
    return ranking.analysis(FILE, run, unreadable, left_out)


def _entries(path: Path, unreadable: Unreadable) -> Iterator[tuple[str, Any]]:
    """The entries of a file and its journal, as far as they can be read."""
    try:
        yield from iterate_entries(path)
    except OSError as error:
        unreadable.cannot_open(Path(error.filename or path), error)
    except ValueError as error:
        unreadable.add(path, str(error))


def _latest_run(paths: Sequence[Path]) -> str:
    """Id of the run that began last on any rank; empty when no rank says.

    By the start of the runs, but a run that another one follows in the same file is not the last, whatever the clocks said.
    """
    named: dict[Path, str] = {}
    followed: set[str] = set()
    for path in paths:
        runs = _runs(path)
        followed.update(list(runs)[:-1])
        for name, described in runs.items():
            directory = str(described.get("directory", ""))
            if parse_directory_name(directory) is not None:
                named[path.parents[2] / directory] = name
    in_order = [named[directory] for directory in by_time(named)]
    return next((name for name in reversed(in_order) if name not in followed), in_order[-1] if in_order else "")


def _places_of_run(path: Path, run: str) -> range:
    """The part of a file that one run added. Runs follow each other, so a run ends where the next begins."""
    runs = _runs(path)
    if run not in runs:
        return range(0) if runs else range(sys.maxsize)
    begins = sorted(described["first"] for described in runs.values())
    mine = runs[run]["first"]
    return range(mine, next((begin for begin in begins if begin > mine), sys.maxsize))


def _runs(path: Path) -> dict[str, dict[str, Any]]:
    """Id → directory and first entry of each run in a file, in their order; empty when that is not known."""
    owner = _owner(path)
    if owner is not None:
        return {owner.run: {"directory": path.name.removeprefix("anomaly.").removesuffix(".json"), "first": 0}}
    return read_runs(path)


class _Ranking:
    """Keeps the first anomalies of any number."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._first: list[tuple[Order, str, Entry]] = []
        self.total = 0
        self.by_rank: dict[int, int] = {}

    def add(
        self,
        entries: Iterable[tuple[str, Any]],
        mine: range = range(sys.maxsize),
        steps: Container[int] | None = None,
        path: Path | None = None,
        unreadable: Unreadable | None = None,
    ) -> int:
        """Rank more of them.

        Args:
            entries: Key and entry of each.
            mine: The places of those to rank.
            steps: The steps of those to rank; ``None`` means all.
            path: Their file, for what is no anomaly.
            unreadable: Hears of what is no anomaly.

        Returns:
            How many stand at other places.
        """
        others = 0

        def ordered() -> Iterator[tuple[Order, str, Entry]]:
            nonlocal others
            for place, (key, entry) in enumerate(entries):
                order = _order(key, entry)
                if place not in mine:
                    others += 1
                elif order is None:
                    if path is not None and unreadable is not None:
                        unreadable.add(path, "an entry that is no anomaly", place + 1, unit="entry")
                elif steps is None or order.step in steps:
                    self.total += 1
                    self.by_rank[order.rank] = self.by_rank.get(order.rank, 0) + 1
                    yield order, key, entry

        self._first = heapq.nsmallest(self._top, itertools.chain(self._first, ordered()), key=lambda one: one[0])
        return others

    def analysis(self, source: str, run: str, unreadable: Unreadable, left_out: int = 0) -> Analysis:
        """What came out."""
        first = [(key, entry) for _, key, entry in self._first]
        return Analysis(
            first,
            self.total,
            self.by_rank,
            source,
            run,
            left_out,
            unreadable.paths(),
            unreadable.lines(),
            unreadable.damaged,
        )


_WHOLE_FIELDS = ("step", "micro_step", "pp_stage", "vpp_stage", "call_id", "rank")


def _order(key: str, entry: object) -> Order | None:
    """Its place in the ranking; ``None`` for what ``anomaly.json`` does not hold."""
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("tag_name", "message")):
        return None
    return order_of(key, entry) if all(_is_whole(entry.get(name)) for name in _WHOLE_FIELDS) else None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# From CSV files


def _run_directories(directory: Path, *, all_runs: bool) -> list[Path]:
    """The directories to look at: the one named, else those of the latest run below a root, or of every run."""
    if parse_directory_name(directory.name) is not None:
        return [directory] if os.path.isdir(directory) else []  # noqa: PTH112 - Path.is_dir raises for what cannot be
    root = directory.parent if directory.name == FOLDER else directory
    found = run_directories(root)
    if all_runs or not found:
        return found
    return [path for path in found if _run_id(path) == _run_id(found[-1])]


def _run_id(path: Path) -> str:
    parsed = parse_directory_name(path.name)
    return parsed.run if parsed else ""


def _from_csv(
    runs: Sequence[Path],
    top: int,
    steps: Container[int] | None,
    rules: Sequence[Rule],
    *,
    all_runs: bool,
    progress: Callable[[int, int], None],
    unreadable: Unreadable,
) -> Analysis:
    unreadable.damaged = False  # whatever the ranks said of the rows, these are read now
    ranking = _Ranking(top)
    evaluators: dict[int, Evaluator] = {}
    for number, path in enumerate(runs):
        progress(number, len(runs))
        parsed = parse_directory_name(path.name)
        rank = parsed.rank if parsed else 0
        chosen = rules or _rules_of(path)
        if all_runs or rank not in evaluators:  # a restart of the same run goes on with what was remembered
            evaluators[rank] = Evaluator(builtin_rules(chosen, rank), rank=rank)
        ranking.add(_judged(path, evaluators[rank], unreadable), steps=steps)
    progress(len(runs), len(runs))
    run = "" if all_runs else _run_id(runs[-1])
    return ranking.analysis("csv", run, unreadable)


def _rules_of(path: Path) -> Sequence[Rule]:
    """The rules that the run itself had, else the default ones."""
    configured: Any = read_run_file(path)
    for key in ("config", "alert"):
        configured = configured.get(key) if isinstance(configured, dict) else None
    try:
        rules = AlertConfig.model_validate(configured or {}).rules
    except ValueError:  # of another version
        rules = ()
    return rules or AlertConfig.model_validate({"rules": default_rules()}).rules


def _judged(path: Path, evaluator: Evaluator, unreadable: Unreadable) -> Iterator[tuple[str, Entry]]:
    for step in recorded_steps(path, unreadable):
        for anomaly in evaluator.judge(step, ()):
            yield anomaly.key, anomaly.entry()


def recorded_steps(directory: Path, unreadable: Unreadable | None = None) -> Iterator[RecordedStep]:
    """The steps of a run directory as the rules saw them while it ran, with the numbers that the files have.

    The order of execution is that of the kinds, and of the lines within each: files do not say how forward and backward
    passes took turns. One step at a time is in memory.

    Args:
        directory: The run directory.
        unreadable: Hears what is left out.
    """
    with contextlib.closing(StepIndex()) as index:
        for kind, path in kind_files(directory, unreadable):
            index.add(CsvFile(path, kind, unreadable))
        if os.path.lexists(directory / STEPS_FILE):
            index.add(CsvFile(directory / STEPS_FILE, STEPS, unreadable))
        for number, blocks in index.steps():
            rows = [row for block in blocks for row in index.rows(number, block)]
            found = [row for row in rows if row.kind != STEPS]
            if found:
                yield _recorded_step(number, found, [row for row in rows if row.kind == STEPS])


_KINDS = list(STAGES)


def _recorded_step(number: int, found: list[RecordedRow], lines: list[RecordedRow]) -> RecordedStep:
    found.sort(key=lambda row: (stage_of(row.kind), _KINDS.index(row.kind) if row.kind in STAGES else len(_KINDS)))
    rows: list[Row] = []
    numbers: list[float] = []
    for one in found:
        cells = {column: value for column, value in one.numbers().items() if column != "id"}
        if cells:
            dtype = str(one.values.get("dtype", ""))
            rows.append(Row(one.kind, one.name, one.stage, one.micro_step, one.shape or (), dtype, tuple(cells)))
            numbers += cells.values()
    line = lines[-1].numbers() if lines else {}
    micro_steps = line.get("micro_steps", math.nan)
    return RecordedStep(
        model="",
        step=number,
        rows=rows,
        numbers=np.array(numbers, dtype=np.float64),
        micro_steps=int(micro_steps) if micro_steps.is_integer() else None,
        skipped=line.get("skipped") == 1,
        grad_scale=line.get("grad_scale", math.nan),
        complete=line.get("complete") != 0,
    )


def _silent(done: int, total: int) -> None:
    del done, total
