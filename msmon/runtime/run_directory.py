"""The directory of one rank's output: its name, whose it is, and ``run.json`` in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from msmon import log
from msmon.errors import OutputError
from msmon.regular_file import read_regular, write_whole
from msmon.runtime.interruption import from_signal_handler

if sys.platform != "win32":
    import fcntl
from msmon.runtime.interruption import pass_on

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

RUN_FILE = "run.json"
LOCK_FILE = ".lock"
_STAMP = re.compile(r"[A-Z][a-z]{2}\d{2}_\d{2}-\d{2}-\d{2}")
_NAME = re.compile(rf"(?P<stamp>{_STAMP.pattern})-rank(?P<rank>\d+)-(?P<run>[0-9a-f]{{8}})")
_DAY = 86400.0
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def stamp(moment: float) -> str:
    """``Mmmdd_HH-MM-SS`` in local time, whatever the locale."""
    local = time.localtime(moment)
    return f"{_MONTHS[local.tm_mon - 1]}{time.strftime('%d_%H-%M-%S', local)}"


class RunDirectory:
    """The directory that one monitor of this process writes to.

    Args:
        path: The directory.
        lock: A descriptor whose lock keeps other processes out; ``None`` where the file system has no locks.
        resumed: Whether an earlier run has written there.
    """

    def __init__(self, path: Path, lock: int | None = None, *, resumed: bool = False) -> None:
        self.path = path
        self.resumed = resumed
        self._hold(lock)
        self._documents: dict[str, str] = {}
        self._complete = False

    def _hold(self, lock: int | None) -> None:
        self._lock, self._owner = lock, os.getpid()
        self._lock_file = 0 if lock is None else os.fstat(lock).st_ino

    def describe(self, report: dict[str, Any]) -> None:
        """Write ``run.json``.

        Raises:
            OSError: It cannot be written; an earlier one is unharmed.
        """
        text = self._documents[RUN_FILE] = _run_file_text(self.path, report)
        self._complete = False
        write_whole(self.path / RUN_FILE, text)
        self._complete = True

    def add(self, name: str, text: str) -> None:
        """Write another document whole.

        Raises:
            OSError: It cannot be written.
        """
        self._documents[name] = text
        write_whole(self.path / name, text)

    def restore(self) -> bool:
        """Write the documents again when ``run.json`` is gone, with a new directory when that is gone too.

        The absence of a file is what counts: on some file systems the identity of a directory changes by itself.

        Returns:
            Whether somebody has removed or renamed what was there.

        Raises:
            OSError: They cannot be written, now.
        """
        if not self._documents or (self.path / RUN_FILE).exists():
            return False
        was_there = self._complete
        if not self.path.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            self.release()
            with contextlib.suppress(OSError, _TakenError):  # rows are worth more than the lock
                self._hold(_take_lock(self.path))
            what = f"{self.path} was removed or renamed: rows go on in a new directory of that name"
        else:
            what = f"{RUN_FILE} was removed from {self.path}: it is written again"
        if was_there:
            log.say(what, once=f"gone:{self.path}")
        for name, text in list(self._documents.items()):
            write_whole(self.path / name, text)
        self._complete = True
        return was_there

    def release(self) -> None:
        """Let other processes have the directory; in a forked child, let go of the parent's lock."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):  # the script may close all descriptors, and use the number again
                if os.fstat(lock).st_ino == self._lock_file:
                    if sys.platform != "win32" and os.getpid() == self._owner:
                        fcntl.flock(lock, fcntl.LOCK_UN)  # children may have copies of the descriptor
                    os.close(lock)


class _TakenError(Exception):
    """Another process writes to a directory, or it cannot be known that none does."""


def make_run_directory(root: Path, rank: int, run_id: str, *, resume: Sequence[str] = ()) -> RunDirectory:
    """Make this rank's directory, or find the one to go on in.

    No two monitors write to one directory: each holds a lock in its own. Who finds the directory to go on in taken has
    a new one, and that is said.

    Args:
        root: Output root; made when absent. Several ranks and several runs may share it.
        rank: This process's rank.
        run_id: Eight hexadecimal digits.
        resume: Two timestamps: go on in this rank's latest directory between them (inclusive), when there is one.

    Raises:
        OutputError: The directory cannot be made.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        return (_resume(root, rank, resume) if resume else None) or _make(root, rank, run_id)
    except OSError as error:
        if from_signal_handler(error):
            raise
        hint = "choose another place with --output or MONITOR_OUTPUT_DIR"
        raise OutputError(f"cannot write below `{root}` ({error.strerror})", hint=hint) from error


def _resume(root: Path, rank: int, resume: Sequence[str]) -> RunDirectory | None:
    found = _between(root, rank, resume[0], resume[1])
    if found is None:
        log.say(
            f"append_output: rank {rank} has no directory from {resume[0]} to {resume[1]} here, so a new one is made"
        )
        return None
    try:
        return RunDirectory(found, _take_lock(found), resumed=True)
    except _TakenError:
        log.say(f"append_output: another process writes to {found}, so a new directory is made")
    except OSError as error:
        if from_signal_handler(error):
            raise
        log.say(f"append_output: {found} cannot be locked ({error.strerror}), so a new directory is made")
    return None


def _make(root: Path, rank: int, run_id: str) -> RunDirectory:
    moment = time.time()
    while True:
        directory = root / f"{stamp(moment)}-rank{rank}-{run_id}"
        try:
            directory.mkdir()
            return RunDirectory(directory, _take_lock(directory))
        except (FileExistsError, _TakenError):
            moment += 1  # another process of the same run and rank, within the same second


def _take_lock(directory: Path) -> int | None:
    """Keep other processes out of a directory until the descriptor is closed, which the end of the process does.

    Returns:
        The descriptor; ``None`` where there are no locks, and nobody is assumed to be there.

    Raises:
        _TakenError: Another process is there.
        OSError: The file for the lock cannot be opened.
    """
    if sys.platform == "win32":
        return None
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(directory / LOCK_FILE, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _TakenError
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        os.close(descriptor)
        raise _TakenError from error
    except OSError as error:  # this file system has no locks
        pass_on(error)
        os.close(descriptor)
        return None
    return descriptor


class DirectoryName(NamedTuple):
    """The parts of a run directory's name.

    Attributes:
        order: Sorts by time within a year; the name has no year.
        rank: The rank.
        run: The run's id.
    """

    order: tuple[int, str]
    rank: int
    run: str


def parse_directory_name(name: str) -> DirectoryName | None:
    """The parts of a run directory's name; ``None`` for any other name."""
    match = _NAME.fullmatch(name)
    if match is None or match["stamp"][:3] not in _MONTHS:
        return None
    return DirectoryName(sortable(match["stamp"]), int(match["rank"]), match["run"])


def is_stamp(text: object) -> bool:
    """Whether this is a timestamp as directories carry it."""
    return isinstance(text, str) and bool(_STAMP.fullmatch(text)) and text[:3] in _MONTHS


def sortable(text: str) -> tuple[int, str]:
    """Sorts timestamps by time within a year."""
    return _MONTHS.index(text[:3]), text[3:]


def by_time(directories: Iterable[Path]) -> list[Path]:
    """Run directories in the order in which their runs were started.

    ``started`` in ``run.json`` counts. Where that is missing, or the same (two monitors in one process), the time in the
    name does, which has no year: it is the last one with that time before the directory was last changed.
    """
    return sorted(directories, key=_moment)


def _moment(directory: Path) -> tuple[float, float, str]:
    began = (read_run_file(directory) or {}).get("started")
    try:
        started: float | None = datetime.fromisoformat(str(began)).timestamp()
    except (ValueError, OverflowError):
        started = None
    parsed = parse_directory_name(directory.name)
    named = _time_of(parsed, directory, started) if parsed is not None else 0.0
    return (named if started is None else started, named, directory.name)


def _time_of(name: DirectoryName, directory: Path, started: float | None) -> float:
    """The time in a name, in the year that fits: right after the start of the process, or before the last change."""
    month, rest = name.order
    near = started
    if near is None:
        try:
            near = directory.stat().st_mtime
        except OSError as error:
            pass_on(error)
            near = time.time()
    year = time.localtime(near).tm_year
    texts = [f"{candidate}-{month + 1:02}-{rest}" for candidate in (year - 1, year, year + 1)]
    found = [moment for text in texts if (moment := _local_time(text)) is not None]
    if started is not None:
        return min(found, key=lambda moment: abs(moment - started), default=0.0)
    return max((moment for moment in found if moment <= near + _DAY), default=0.0)


def _local_time(text: str) -> float | None:
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%d_%H-%M-%S"))
    except (ValueError, OverflowError):  # the 29th of February, or the 39th of March
        return None


def _between(root: Path, rank: int, first: str, last: str) -> Path | None:
    low, high = sortable(first), sortable(last)
    candidates = [
        entry
        for entry in root.iterdir()
        if (parsed := parse_directory_name(entry.name))
        and parsed.rank == rank
        and low <= parsed.order <= high
        and entry.is_dir()
    ]
    return by_time(candidates)[-1] if candidates else None


def write_run_file(directory: Path, content: dict[str, Any]) -> None:
    """Write ``run.json`` whole: it is replaced, never half-written.

    When a directory is resumed, what it said of the runs before stays under ``resumed_from``, without their models.

    Raises:
        OSError: It cannot be written; an earlier one is unharmed.
    """
    write_whole(directory / RUN_FILE, _run_file_text(directory, content))


def _run_file_text(directory: Path, content: dict[str, Any]) -> str:
    earlier = read_run_file(directory) or {}
    before = earlier.pop("resumed_from", [])
    if earlier and earlier.get("started") != content.get("started"):
        before = [*before, {key: value for key, value in earlier.items() if key != "models"}]
    return json.dumps({**content, **({"resumed_from": before} if before else {})}, indent=2, ensure_ascii=False) + "\n"


def read_run_file(directory: Path) -> dict[str, Any] | None:
    """The content of ``run.json``, or ``None`` when there is none that can be read."""
    path = directory / RUN_FILE
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        pass_on(error)
        return None
    return content if isinstance(content, dict) else None


def utc_now() -> str:
    """The time in ISO 8601, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
