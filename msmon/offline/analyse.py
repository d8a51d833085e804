"""Which anomaly was first: ranks what the alert rules found, over all ranks of a run.

Anomalies come from the ``anomaly.json`` of each rank; where a run wrote none, the rules are applied to its CSV files.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from msmon.alerts.anomaly import STAGES, Order, order_of, stage_of
from msmon.alerts.catalogue import default_rules
from msmon.alerts.evaluate import Evaluator, builtin_rules
from msmon.alerts.files import FILE, FOLDER, RUNS_FILE, read_entries
from msmon.config.schema import AlertConfig
from msmon.errors import MsmonError
from msmon.offline.reader import RecordedRow, read_by_steps, read_steps, run_directories
from msmon.record.table import Row
from msmon.runtime.run_directory import DirectoryName, parse_directory_name, read_run_file
from msmon.sinks.base import RecordedStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

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
        unreadable: Files that could not be read.
    """

    first: list[tuple[str, Entry]]
    total: int
    by_rank: dict[int, int]
    source: str
    run: str = ""
    left_out: int = 0
    unreadable: list[Path] = field(default_factory=list)


def analyse(
    directory: Path,
    *,
    top: int = TOP,
    steps: Sequence[int] = (),
    rules: Sequence[Rule] = (),
    all_runs: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Analysis:
    """Rank the anomalies below a directory.

    Args:
        directory: An output root, its ``anomaly_detected``, or one run directory.
        top: How many to keep.
        steps: Only these training steps; none means all.
        rules: Apply these to the CSV files, whatever the run itself found.
        all_runs: Rank the anomalies of every run in the files, not only of the latest.
        progress: Called with how many files (or run directories) are done, and how many there are.

    Raises:
        NoAnomalyDataError: There is neither an ``anomaly.json`` nor a run directory.
    """
    progress = progress or _silent
    dumps = [] if rules else _dumps(directory)
    ranked = _from_dumps(dumps, top, frozenset(steps), all_runs=all_runs, progress=progress) if dumps else None
    if ranked is not None and (ranked.total or len(ranked.unreadable) < len(dumps)):
        return ranked
    runs = _run_directories(directory, all_runs=all_runs)
    if not runs and ranked is not None:
        return ranked
    if not runs:
        hint = "name the directory given with --output, its anomaly_detected, or one of its run directories"
        raise NoAnomalyDataError(f"no {FILE} and no run below `{directory}`", hint=hint)
    analysis = _from_csv(runs, top, frozenset(steps), rules, all_runs=all_runs, progress=progress)
    return replace(analysis, unreadable=ranked.unreadable if ranked else [])


def write_result(analysis: Analysis, path: Path) -> None:
    """Write the ranked entries, as ``anomaly.json`` has them, whole.

    Raises:
        OSError: It cannot be written.
    """
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(json.dumps(dict(analysis.first), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.replace(path)


def result_path(directory: Path) -> Path:
    """Where the result goes unless said otherwise: beside the files of the ranks, else into the directory."""
    folder = directory / FOLDER
    return (folder if folder.is_dir() else directory) / RESULT_FILE


# From anomaly.json


def _dumps(directory: Path) -> list[Path]:
    """The files of each rank, by rank: ``anomaly.json``, and those of processes that found it taken."""
    for root in (directory, directory / FOLDER):
        found = [
            (int(match[1]), path.name != FILE, path.name, path)
            for path in root.glob("rank*/anomaly*.json")
            if (match := re.fullmatch(r"rank(\d+)", path.parent.name)) and (path.name == FILE or _owner(path))
        ]
        if found:
            return [path for *_, path in sorted(found)]
    return []


def _owner(path: Path) -> DirectoryName | None:
    """Whose file it is, when it is one process's alone."""
    return parse_directory_name(path.name.removeprefix("anomaly.").removesuffix(".json"))


def _from_dumps(
    paths: Sequence[Path],
    top: int,
    steps: frozenset[int],
    *,
    all_runs: bool,
    progress: Callable[[int, int], None],
) -> Analysis:
    run = "" if all_runs else _latest_run(paths)
    ranking = _Ranking(top)
    left_out, unreadable = 0, []
    for number, path in enumerate(paths):
        progress(number, len(paths))
        try:
            entries = list(read_entries(path).items())
        except (OSError, ValueError):
            unreadable.append(path)
            continue
        mine = entries if not run else _of_run(entries, path, run)
        left_out += len(entries) - len(mine)
        if not ranking.add((key, entry) for key, entry in mine if not steps or entry.get("step") in steps):
            unreadable.append(path)
    progress(len(paths), len(paths))
    return Analysis(ranking.first(), ranking.total, ranking.by_rank, FILE, run, left_out, unreadable)


def _latest_run(paths: Sequence[Path]) -> str:
    """Id of the run that began last on any rank; empty when no rank says.

    By the names of directories, but a run that another one follows in the same file is not the last, whatever the clocks
    said.
    """
    began: dict[str, tuple[int, str]] = {}
    followed: set[str] = set()
    for path in paths:
        runs = _runs(path)
        followed.update(list(runs)[:-1])
        for name, described in runs.items():
            parsed = parse_directory_name(str(described.get("directory", "")))
            if parsed is not None:
                began[name] = max(parsed.order, began.get(name, parsed.order))
    return max(began.keys() - followed or began, key=lambda name: (began[name], name), default="")


def _of_run(entries: list[tuple[str, Entry]], path: Path, run: str) -> list[tuple[str, Entry]]:
    """The part of a file that one run added. Runs follow each other, so a run ends where the next begins."""
    runs = _runs(path)
    if run not in runs:
        return [] if runs else entries
    begins = sorted(described["first"] for described in runs.values())
    mine = runs[run]["first"]
    end = next((begin for begin in begins if begin > mine), len(entries))
    return entries[mine:end]


def _runs(path: Path) -> dict[str, dict[str, Any]]:
    """Id → directory and first entry of each run in a file, in their order; empty when that is not known."""
    owner = _owner(path)
    if owner is not None:
        return {owner.run: {"directory": path.name.removeprefix("anomaly.").removesuffix(".json"), "first": 0}}
    try:
        content = json.loads(path.with_name(RUNS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    described = content.items() if isinstance(content, dict) else ()
    return {run: about for run, about in described if isinstance(about, dict) and isinstance(about.get("first"), int)}


class _Ranking:
    """Keeps the first anomalies of any number."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._first: list[tuple[Order, str, Entry]] = []
        self.total = 0
        self.by_rank: dict[int, int] = {}

    def add(self, entries: Iterable[tuple[str, Entry]]) -> bool:
        """Rank more of them; returns whether all were what ``anomaly.json`` holds."""
        whole = True
        ordered = []
        for key, entry in entries:
            order = _order(key, entry)
            if order is None:
                whole = False
                continue
            self.by_rank[order.rank] = self.by_rank.get(order.rank, 0) + 1
            ordered.append((order, key, entry))
        self.total += len(ordered)
        self._first = heapq.nsmallest(self._top, [*self._first, *ordered], key=lambda one: one[0])
        return whole

    def first(self) -> list[tuple[str, Entry]]:
        return [(key, entry) for _, key, entry in self._first]


def _order(key: str, entry: Entry) -> Order | None:
    """Its place in the ranking; ``None`` for what ``anomaly.json`` does not hold."""
    try:
        order = order_of(key, entry)
        _ = order.step + order.micro_step + order.call_id + order.rank  # numbers all, so that they can be sorted
    except (KeyError, TypeError, AttributeError):
        return None
    return order


# From CSV files


def _run_directories(directory: Path, *, all_runs: bool) -> list[Path]:
    """The directories to look at: the one named, else those of the latest run below a root, or of every run."""
    if parse_directory_name(directory.name) is not None:
        return [directory] if directory.is_dir() else []
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
    steps: frozenset[int],
    rules: Sequence[Rule],
    *,
    all_runs: bool,
    progress: Callable[[int, int], None],
) -> Analysis:
    ranking = _Ranking(top)
    evaluators: dict[int, Evaluator] = {}
    for number, path in enumerate(runs):
        progress(number, len(runs))
        parsed = parse_directory_name(path.name)
        rank = parsed.rank if parsed else 0
        chosen = rules or _rules_of(path)
        if all_runs or rank not in evaluators:  # a restart of the same run goes on with what was remembered
            evaluators[rank] = Evaluator(builtin_rules(chosen, rank), rank=rank)
        ranking.add(_judged(path, evaluators[rank], steps))
    progress(len(runs), len(runs))
    run = "" if all_runs else _run_id(runs[-1])
    return Analysis(ranking.first(), ranking.total, ranking.by_rank, "csv", run)


def _rules_of(path: Path) -> Sequence[Rule]:
    """The rules that the run itself had, else the default ones."""
    configured = ((read_run_file(path) or {}).get("config") or {}).get("alert") or {}
    try:
        rules = AlertConfig.model_validate(configured).rules
    except ValueError:  # of another version
        rules = ()
    return rules or AlertConfig.model_validate({"rules": default_rules()}).rules


def _judged(path: Path, evaluator: Evaluator, steps: frozenset[int]) -> Iterator[tuple[str, Entry]]:
    for step in recorded_steps(path):
        found = evaluator.judge(step, ())
        if not steps or step.step in steps:
            for anomaly in found:
                yield anomaly.key, anomaly.entry()


def recorded_steps(directory: Path) -> Iterator[RecordedStep]:
    """The steps of a run directory as the rules saw them while it ran, with the numbers that the files have.

    The order of execution is that of the kinds, and of the lines within each: files do not say how forward and backward
    passes took turns.
    """
    described = {int(line["step"]): line for line in read_steps(directory)}
    for rows in read_by_steps(directory):
        by_step: dict[int, list[RecordedRow]] = {}
        for row in rows:
            by_step.setdefault(row.step, []).append(row)
        for number in sorted(by_step):
            yield _recorded_step(number, by_step[number], described.get(number, {}))


_KINDS = list(STAGES)


def _recorded_step(number: int, found: list[RecordedRow], line: dict[str, str]) -> RecordedStep:
    found.sort(key=lambda row: (stage_of(row.kind), _KINDS.index(row.kind) if row.kind in STAGES else len(_KINDS)))
    rows: list[Row] = []
    numbers: list[float] = []
    for one in found:
        cells = {column: value for column, value in one.values.items() if isinstance(value, float) and column != "id"}
        if cells:
            shape = tuple(int(size) for size in re.findall(r"\d+", str(one.values.get("shape", ""))))
            dtype = str(one.values.get("dtype", ""))
            rows.append(Row(one.kind, one.name, one.stage, one.micro_step, shape, dtype, tuple(cells)))
            numbers += cells.values()
    scale = line.get("grad_scale") or ""
    return RecordedStep(
        model="",
        step=number,
        rows=rows,
        numbers=np.array(numbers, dtype=np.float64),
        micro_steps=int(line["micro_steps"]) if line.get("micro_steps") else None,
        skipped=line.get("skipped") == "1",
        grad_scale=float(scale) if scale else math.nan,
        complete=line.get("complete") != "0",
    )


def _silent(done: int, total: int) -> None:
    del done, total
