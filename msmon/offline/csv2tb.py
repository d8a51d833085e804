"""CSV files as TensorBoard event files: one a rank and kind of data, so that TensorBoard lays ranks over one another.

``<output>/rank{R}/{kind}/events.out.tfevents.….msmon-csv2tb`` holds the tags ``vp{stage}:{name}[:micro{n}]/{op}``, as the
original writes them, and of ``steps.csv`` the tags ``steps/{column}``. Steps ascend. Runs whose steps follow one another are
joined. Runs that have the same steps are separate histories, each in a directory named after its last run. Of a step that a
run has recorded again, after an elastic restart for instance, the later rows count, and so does the later line of a row that
one directory has twice.

Files are read twice: once to see where each step lies, once in the order of steps. No more than a step is held.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shlex
import signal
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msmon.errors import ArgumentError, MsmonError, NoRecordingError, OutputError
from msmon.offline.histories import histories
from msmon.offline.reader import STEPS, CsvFile, StepIndex, Unreadable, kind_files, run_directories
from msmon.runtime.run_directory import is_stamp, parse_directory_name, sortable, stamp
from msmon.sinks import tensorboard
from msmon.sinks.csv import STEPS_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from msmon.offline.reader import RecordedRow

MARK = ".msmon-csv2tb"
"""How the names of event files end that are made here. No other file is ever touched."""


@dataclass
class Series:
    """What became of one kind of data of one rank.

    Attributes:
        rank: The rank.
        kind: The kind of data.
        files: CSV files read.
        steps: Steps written.
        values: Numbers written.
        non_finite: How many of them are NaN or infinite.
        repeated: Steps that the same run has recorded again: the later ones count.
        history: The last run of its history, when there are several histories.
        faults: What could not be read, in words.
    """

    rank: int
    kind: str
    files: int = 0
    steps: int = 0
    values: int = 0
    non_finite: int = 0
    repeated: int = 0
    history: str = ""
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Conversion:
    """What was written.

    Attributes:
        output: The directory for ``tensorboard --logdir``.
        runs: Ids of the runs, first to last.
        series: What became of each kind of data of each rank.
        faults: What could not be read, a line a file.
        histories: Ids of the runs that continue each other; of several histories, each has a directory.
    """

    output: Path
    runs: tuple[str, ...]
    series: list[Series]
    faults: list[str]
    histories: tuple[tuple[str, ...], ...] = ()

    def notes(self) -> list[str]:
        """What is worth saying: runs that were joined, what could not be read, values that are not finite."""
        found = list(self.faults)
        repeated = max((one.repeated for one in self.series), default=0)
        if len(self.histories) > 1:
            named = ", ".join(" and ".join(runs) for runs in self.histories)
            found.append(
                f"{len(self.histories)} histories have the same steps ({named}): each has its own directory; "
                "--run converts one run"
            )
        elif len(self.runs) > 1:
            found.append(f"{len(self.runs)} runs are joined ({', '.join(self.runs)}); --run converts one of them")
        if repeated:
            found.append(f"up to {repeated} steps are recorded again: the later ones count")
        non_finite = sum(one.non_finite for one in self.series)
        if non_finite:
            kinds = ", ".join(dict.fromkeys(one.kind for one in self.series if one.non_finite))
            found.append(f"{non_finite} values are NaN or infinite ({kinds}): see the tags {tensorboard.NON_FINITE}/…")
        return found

    def next_command(self) -> str:
        """Shows every step: by default TensorBoard shows a sample of a thousand."""
        return f"tensorboard --logdir {shlex.quote(str(self.output))} --samples_per_plugin scalars=1000000,text=100"


def convert(
    root: str | os.PathLike[str],
    *,
    first: str | None = None,
    last: str | None = None,
    run: str | None = None,
    kinds: Sequence[str] | None = None,
    processes: int = 1,
    output: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Conversion:
    """Convert the CSV files below an output root.

    Args:
        root: Output root of the runs, or one run directory.
        first: Only directories of this timestamp and later, such as ``Dec03_21-34-40``.
        last: Only directories of this timestamp and earlier.
        run: Only directories of the run with this id.
        kinds: Kinds of data; by default all that are there.
        processes: How many processes convert.
        output: By default ``{now}-csv2tensorboard_by_step`` beside the run directories.
        progress: Hears how much is done, and of how much.

    Raises:
        ArgumentError: An argument of the wrong type or value.
        NoRecordingError: There is nothing to convert.
        MissingExtraError: TensorBoard is not installed.
        OutputError: The event files cannot be written.
    """
    _check(first, last, processes)
    tensorboard.require()
    folder = _expanded(root)
    directories = _chosen(folder, first, last, run)
    unreadable = Unreadable()
    found = histories(directories)
    tasks = [
        task
        for history in found
        for task in _tasks(history.directories, kinds, history.name if len(found) > 1 else "", unreadable)
    ]
    if not tasks:
        raise _nothing_to_convert(folder, directories, kinds)
    beside = directories[0].parent
    target = _expanded(output) if output else beside / f"{stamp(time.time())}-csv2tensorboard_by_step"
    _check_target(target, tasks)
    tasks.sort(key=lambda task: -task.size)  # the longest first
    try:
        series = _convert_all(tasks, target, min(processes, len(tasks)), progress)
    except OSError as error:
        raise OutputError(
            f"cannot write below `{target}` ({error.strerror or error})", hint="choose another place"
        ) from error
    if not any(one.values for one in series):
        missing = "; ".join(fault for one in series for fault in one.faults[:1])
        raise NoRecordingError(
            f"no file in `{folder}` holds a row ({missing or 'headers only'})", hint="is it the right directory?"
        )
    runs = dict.fromkeys(parsed.run for one in directories if (parsed := parse_directory_name(one.name)))
    series.sort(key=lambda one: (one.history, one.rank, one.kind))
    faults = [*unreadable.lines(), *(fault for one in series for fault in one.faults)]
    return Conversion(target, tuple(runs), series, faults, tuple(tuple(history.runs) for history in found))


# What is converted


def _expanded(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # of `~name`, when there is no such user
        raise ArgumentError(f"no such place: `{os.fspath(path)}` ({error})", hint="write the whole path") from error


def _check_target(target: Path, tasks: Sequence[_Task]) -> None:
    """TensorBoard would mix what is converted with what event files of others in the same directory say.

    Raises:
        OutputError: It would, or cannot write there at all.
    """
    if not str(target).isascii() and str(target) != str(target).encode("utf-8", "replace").decode():
        raise OutputError(f"TensorBoard takes no path that is not UTF-8: `{target}`", hint="choose another place")
    for task in tasks:
        directory = target / task.place
        if any(not name.endswith(MARK) for name in _event_files(directory)):
            hint = "choose another place with --output"
            raise OutputError(f"`{directory}` holds event files that csv2tb has not made", hint=hint)


def _event_files(directory: Path) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if "tfevents" in name]  # noqa: PTH208 - names are wanted
    except OSError:
        return []


def _check(first: str | None, last: str | None, processes: object) -> None:
    for value in (first, last):
        if value is not None and not is_stamp(value):
            raise ArgumentError(f"no timestamp: {value!r}", hint="write it as directories are named: Dec03_21-34-40")
    if first is not None and last is not None and sortable(first) > sortable(last):
        raise ArgumentError(f"the first timestamp, {first}, is after the last, {last}", hint="exchange them")
    if not isinstance(processes, int) or processes < 1:
        raise ArgumentError(f"no number of processes: {processes!r}", hint="1 or more")


def _chosen(folder: Path, first: str | None, last: str | None, run: str | None) -> list[Path]:
    """The run directories to convert, in the order in which their runs were started."""
    if not os.path.isdir(folder):  # noqa: PTH112 - Path.is_dir raises for what cannot be
        what = "no directory" if os.path.lexists(folder) else "no such directory"
        raise NoRecordingError(f"{what}: `{folder}`", hint="name the output root of a run, by default monitor_output")
    alone = folder.resolve()
    every = [alone] if parse_directory_name(alone.name) else run_directories(folder)
    if not every:
        inside = next((entry for entry in sorted(folder.iterdir()) if run_directories(entry)), None)
        hint = f"is it `{inside}`?" if inside else "run directories are called Dec03_21-34-40-rank0-2db450a0"
        raise NoRecordingError(f"no run directory in `{folder}`", hint=hint)
    chosen = []
    for directory in every:
        parsed = parse_directory_name(directory.name)
        if parsed is None or run not in {None, parsed.run}:
            continue
        if (first is None or sortable(first) <= parsed.order) and (last is None or parsed.order <= sortable(last)):
            chosen.append(directory)
    if not chosen:
        wanted = " ".join(
            [
                *([f"of the run {run}"] if run else []),
                *([f"from {first}"] if first else []),
                *([f"to {last}"] if last else []),
            ]
        )
        hint = f"there are {every[0].name} to {every[-1].name}" if len(every) > 1 else f"there is {every[0].name}"
        raise NoRecordingError(f"no run directory {wanted} in `{folder}`", hint=hint)
    return chosen


@dataclass(frozen=True)
class _Task:
    """A kind of data of a rank: its files, each with the place of its directory in the order of runs, and its first step too many."""

    rank: int
    kind: str
    files: list[tuple[int, Path, int | None]]
    history: str = ""

    @property
    def size(self) -> int:
        """Bytes to read, where that is known."""
        return sum(os.path.getsize(path) for _, path, _ in self.files if os.path.isfile(path))  # noqa: PTH113, PTH202 - as above

    @property
    def place(self) -> Path:
        """Where its event file goes, below the output."""
        return Path(self.history, f"rank{self.rank}", self.kind)


def _tasks(
    directories: Mapping[Path, int | None], kinds: Sequence[str] | None, history: str, unreadable: Unreadable
) -> Iterator[_Task]:
    files: dict[tuple[int, str], list[tuple[int, Path, int | None]]] = {}
    for order, (directory, until) in enumerate(directories.items()):
        parsed = parse_directory_name(directory.name)
        steps = directory / STEPS_FILE
        for kind, path in [*kind_files(directory, unreadable), *([(STEPS, steps)] if os.path.lexists(steps) else [])]:
            if parsed is not None and (kinds is None or kind in kinds):
                files.setdefault((parsed.rank, kind), []).append((order, path, until))
    for (rank, kind), found in files.items():
        yield _Task(rank, kind, found, history)


def _nothing_to_convert(folder: Path, directories: list[Path], kinds: Sequence[str] | None) -> NoRecordingError:
    there = sorted({kind for directory in directories for kind, _ in kind_files(directory)})
    if there:
        return NoRecordingError(
            f"no data of the types {', '.join(kinds or ())} in `{folder}`", hint=f"there are {', '.join(there)}"
        )
    if any(directory.glob("events.out.tfevents.*") for directory in directories):
        hint = f"these are event files already: tensorboard --logdir {shlex.quote(str(folder))}"
    else:
        hint = "the run recorded nothing, or with another format"
    return NoRecordingError(f"no CSV files in the run directories of `{folder}`", hint=hint)


# Processes

_shared: Any = None
"""In a worker: how much all of them have done."""


def _convert_all(
    tasks: list[_Task], target: Path, processes: int, progress: Callable[[int, int], None]
) -> list[Series]:
    total = 2 * sum(task.size for task in tasks)
    if processes == 1:
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done += more
            progress(done, total)

        return [_convert(task, target, count) for task in tasks]
    # A script without `if __name__ == "__main__"` can call this where processes are forked, as with the original.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    shared = context.Value("q", 0)
    with ProcessPoolExecutor(processes, context, _begin_worker, (shared,)) as pool:
        futures = [pool.submit(_convert_in_worker, task, target) for task in tasks]
        try:
            waiting = set(futures)
            while waiting:
                _, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                progress(shared.value, total)
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            hint = "was it killed for want of memory? Use fewer processes"
            raise MsmonError("a converting process has ended before its work was done", hint=hint) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker(shared: Any) -> None:  # noqa: ANN401 - multiprocessing has no public types for them
    global _shared  # noqa: PLW0603 - the way in which a pool gives its workers what cannot be pickled
    _shared = shared
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all processes: one that speaks of it is enough


def _convert_in_worker(task: _Task, target: Path) -> Series:
    def count(more: int) -> None:
        with _shared.get_lock():
            _shared.value += more

    return _convert(task, target, count)


# One kind of data of one rank


def _convert(task: _Task, target: Path, count: Callable[[int], None]) -> Series:
    """Write the event file of a task; ``count`` hears of bytes that are read, twice each."""
    series = Series(task.rank, task.kind, files=len(task.files), history=task.history)
    unreadable = Unreadable()
    with contextlib.closing(StepIndex()) as index:
        orders = []
        for order, path, until in task.files:  # runs in their order
            file = CsvFile(path, task.kind, unreadable)
            index.add(file, until)
            orders.append(order)
            count(file.size)
        _write(series, target / task.place, index, orders, count)
    series.faults = unreadable.lines()
    return series


def _write(
    series: Series, directory: Path, index: StepIndex, orders: Sequence[int], count: Callable[[int], None]
) -> None:
    earlier = [directory / name for name in _event_files(directory) if name.endswith(MARK)]
    events, non_finite = tensorboard.EventFile(directory, suffix=MARK), tensorboard.NonFinite()
    try:
        for step, blocks in index.steps():
            last = max(orders[block[0]] for block in blocks)
            counting = [block for block in blocks if orders[block[0]] == last]
            series.steps += 1
            series.repeated += len(counting) < len(blocks)
            rows: dict[str, dict[str, float]] = {}
            for block in counting:
                rows.update((_tag(row), row.numbers()) for row in index.rows(step, block))
                count(block[3] - block[2])
            found = [(f"{tag}{op}", value) for tag, numbers in rows.items() for op, value in numbers.items()]
            moment = index.files[counting[-1][0]].written
            directory.mkdir(parents=True, exist_ok=True)
            events.add(step, [*tensorboard.scalars(found), *non_finite.values(found)], wall_time=moment, flush=False)
            series.values += len(found)
    finally:
        events.close()
    for path in earlier:  # of an earlier conversion to the same place
        path.unlink(missing_ok=True)
    series.non_finite = non_finite.total


def _tag(row: RecordedRow) -> str:
    """The tag of a row's numbers, without their names."""
    if row.kind == STEPS:
        return tensorboard.step_tag(row.name, "")
    return f"vp{row.stage}:{row.name}{'' if row.micro_step is None else f':micro{row.micro_step}'}/"
