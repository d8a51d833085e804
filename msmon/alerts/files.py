"""The anomalies of a rank: ``anomaly.json``, replaced whole so that it can always be read, and a journal beside it.

While the file is small it is replaced at each anomalous step. Once it is larger, entries are added to the journal, and go
into the file when they are a share of it, and at the end: so what is written grows with the number of anomalies and not
with its square. Readers see both (:func:`msmon.alerts.entries.iterate_entries`).
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import stat
import sys
from typing import TYPE_CHECKING, Any

from msmon import log
from msmon.alerts.entries import iterate_entries, journal_of
from msmon.regular_file import read_regular, write_all, write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from msmon.alerts.anomaly import Anomaly

FOLDER = "anomaly_detected"
FILE = "anomaly.json"
RUNS_FILE = "runs.json"
LOCK_FILE = ".lock"

LIMIT = 10_000
"""Anomalies that one run adds to a file: a model that has gone to NaN makes thousands a step, and the first matter."""

SMALL = 128 * 2**10
"""Bytes of a file that is replaced at each anomalous step: some 400 anomalies."""

SHARE = 8
"""A larger one is replaced when the entries that it lacks have more than this part of its bytes."""


class AnomalyFile:
    """Where the anomalies of one rank are kept.

    What an earlier run left in the file, or a killed one in its journal, stays; ``runs.json`` beside it says at which entry
    each run begins. While another process writes there, a second job in the same place say, this one has a file of its own,
    named after its directory.

    Args:
        root: Output root.
        rank: This rank.
        run: Id of the run.
        directory: Name of its run directory.
    """

    def __init__(self, root: Path, rank: int, run: str, directory: str) -> None:
        self.path = root / FOLDER / f"rank{rank}" / FILE
        self._run, self._directory = run, directory
        self._entries: dict[str, str] = {}
        self._runs: dict[str, dict[str, Any]] = {}
        self._first = 0  # entries of earlier runs
        self._new: list[Anomaly] = []
        self._unwritten: list[str] = []  # lines for the journal
        self._room = LIMIT
        self._opened = False
        self._size: int | None = None  # of the file; None while it lacks what neither the journal has
        self._journal_size = 0
        self._lock: tuple[int, os.stat_result] | None = None

    def open(self) -> None:
        """Take over what is there, and make sure that there is a file.

        Raises:
            OSError: It cannot be read or written; the next call of any method tries again.
        """
        self._claim()
        self._read_earlier()
        self._note_run()
        self._opened = True
        self.flush()

    def add(self, anomalies: Iterable[Anomaly]) -> None:
        """Keep anomalies.

        Raises:
            OSError: They could not be written; the next call tries again.
        """
        for anomaly in anomalies:
            if self._room <= 0:
                log.say(
                    f"{self.path} has {LIMIT:,} anomalies of this run: further ones are counted, not written",
                    once=f"full:{self.path}",
                )
                break
            self._new.append(anomaly)
            self._room -= 1
        self.flush()

    def flush(self) -> None:
        """Write what is not written yet.

        Raises:
            OSError: It could not be written; the next call tries again.
        """
        if not self._opened:
            self.open()
            return
        for anomaly in self._new:
            key = self._free_key(anomaly)
            text = self._entries[key] = _text(anomaly.entry())
            self._unwritten.append(f"{{{_text(key)}: {text}}}\n")
        self._new.clear()
        if self._unwritten or self._size is None:
            self._write()

    def fold(self) -> None:
        """Write everything into the file itself, at the end of a run.

        Raises:
            OSError: It could not be written; what was written before is in the journal.
        """
        self.flush()
        if (
            self._journal_size and self.path.parent.is_dir()
        ):  # a place that was removed is made again for what is new only
            self._write(whole=True)

    def release(self) -> None:
        """Write no more: another process may have the file."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):  # the script may close all descriptors, and use the number again
                if os.path.samestat(os.fstat(lock[0]), lock[1]):
                    os.close(lock[0])

    def _claim(self) -> None:
        """See that no other process writes to the same file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._is_claimed():
            return
        self.release()
        if not self._take() and self.path.name == FILE:
            self.path = self.path.with_name(own_file(self._directory))
            self._entries = dict(itertools.islice(self._entries.items(), self._first, None))
            self._first = 0
            log.say(f"another process writes anomalies to the same place: those of this one go to {self.path}")

    def _is_claimed(self) -> bool:
        try:
            return self._lock is not None and os.path.samestat(
                os.fstat(self._lock[0]), self.path.with_name(LOCK_FILE).lstat()
            )
        except OSError:
            return False

    def _take(self) -> bool:
        """Whether no other process writes here; where the file system has no locks, none is assumed to."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would be waited for
        descriptor = os.open(self.path.with_name(LOCK_FILE), flags, 0o666)
        self._lock = descriptor, os.fstat(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _note_run(self) -> None:
        if self.path.name != FILE:
            return
        if not self._runs:
            count = len(self._entries)
            self._runs = {run: about for run, about in read_runs(self.path).items() if about["first"] <= count}
            if not self._runs and count:
                self._runs[""] = {"directory": "", "first": 0}  # a run that did not say
            mine = self._runs.setdefault(self._run, {"first": count})
            mine["directory"] = self._directory
            self._first = mine["first"]
        write_whole(self.path.with_name(RUNS_FILE), f"{json.dumps(self._runs, indent=1)}\n")

    def _free_key(self, anomaly: Anomaly) -> str:
        """Its key; with a number when a run before, or a restart, came to the same tensor in the same step."""
        number, key = 1, anomaly.key
        while key in self._entries:
            number += 1
            key = f"{anomaly.key}_{number}"
        return key

    def _read_earlier(self) -> None:
        self._entries = {}
        journal = journal_of(self.path)
        try:
            for key, entry in iterate_entries(self.path):
                self._entries[key] = _text(entry)
            self._size = None if os.path.lexists(journal) else self.path.stat().st_size
        except FileNotFoundError:
            return
        except ValueError:
            for damaged in (self.path, journal):
                if os.path.lexists(damaged):
                    aside = damaged.with_name(f"anomaly.unreadable-{self._run}{damaged.suffix}")
                    damaged.replace(aside)
                    log.say(f"{damaged} could not be read to its end and is now {aside.name}")
        if self._entries:
            log.say(
                f"{self.path} has {len(self._entries)} anomalies of earlier runs: new ones are added", once="earlier"
            )

    def _write(self, *, whole: bool = False) -> None:
        """Bring what is unwritten to the journal; all to the file, now and then."""
        if not (os.path.lexists(self.path) and self._is_claimed()):
            self._restore()
        lines = "".join(self._unwritten).encode("utf-8", "backslashreplace")
        if whole or self._size is None or self._size <= SMALL + SHARE * (self._journal_size + len(lines)):
            try:
                self._replace()
            except OSError:
                self._append(lines)  # there may be room for a few bytes where there is none for all
                raise
        elif not self._append(lines):
            self._replace()

    def _restore(self) -> None:
        """Somebody has taken the file away, or with it the lock: begin anew, with everything that it had."""
        if self._size is not None and not os.path.lexists(self.path):
            log.say(f"{self.path} was removed or renamed: it is written again", once=f"gone:{self.path}")
        self._size = None
        self._claim()
        self._note_run()

    def _append(self, lines: bytes) -> bool:
        """Add lines to the journal; ``False`` where that is not as it was left."""
        if self._size is None:
            return False
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        flags |= 0 if self._journal_size else os.O_CREAT
        try:
            descriptor = os.open(journal_of(self.path), flags, 0o666)
        except OSError:
            return False  # the file itself is written, or that says why not
        with open(descriptor, "ab", buffering=0) as journal:  # noqa: PTH123 - pathlib takes no descriptor
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_size != self._journal_size:
                return False
            try:
                write_all(journal, lines)
            except OSError:
                journal.truncate(self._journal_size)
                raise
        self._journal_size += len(lines)
        self._unwritten.clear()
        return True

    def _replace(self) -> None:
        """Write the file whole; then there is no journal."""
        lines = [f"  {_text(key)}: {text}" for key, text in self._entries.items()]
        content = ("{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n").encode("utf-8", "backslashreplace")
        write_whole(self.path, content)
        self._size = len(content)
        self._unwritten.clear()
        journal_of(self.path).unlink(missing_ok=True)
        self._journal_size = 0


def own_file(directory: str) -> str:
    """The file of a process that found ``anomaly.json`` taken, by the name of its run directory."""
    return f"anomaly.{directory}.json"


def read_runs(path: Path) -> dict[str, dict[str, Any]]:
    """Id → directory and first entry of each run in an ``anomaly.json``, in their order; empty when that is not known."""
    try:
        content = json.loads(read_regular(path.with_name(RUNS_FILE)))
    except (OSError, ValueError, RecursionError):
        return {}
    described = content.items() if isinstance(content, dict) else ()
    return {run: about for run, about in described if isinstance(about, dict) and _is_place(about.get("first"))}


def _is_place(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < sys.maxsize


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
