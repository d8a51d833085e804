"""``anomaly.json`` of a rank: appended to across restarts, replaced whole at each write, so that it can always be read."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from typing import TYPE_CHECKING, Any

from msmon import log
from msmon.regular_file import read_regular, write_whole

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


class AnomalyFile:
    """Where the anomalies of one rank are kept.

    What an earlier run left in the file stays; ``runs.json`` beside it says at which entry each run begins. While another
    process writes there, a second job in the same place say, this one has a file of its own, named after its directory.

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
        self._new: list[Anomaly] = []
        self._room = LIMIT
        self._opened = self._written = False
        self._lock: int | None = None

    def open(self) -> None:
        """Take over what is there, and make sure that there is a file.

        Raises:
            OSError: It cannot be read or written; the next call of any method tries again.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._lock is None and not self._take():
            self.path = self.path.with_name(own_file(self._directory))
            log.say(f"another process writes anomalies to the same place: those of this one go to {self.path}")
        earlier = self._read_earlier()
        self._entries = {key: _text(entry) for key, entry in earlier.items()}
        if self.path.name == FILE:
            self._note_run(earlier)
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
        if self._written and not self._new:
            return
        for anomaly in self._new:
            self._entries[self._free_key(anomaly)] = _text(anomaly.entry())
        self._new.clear()
        self._written = False
        self._write()
        self._written = True

    def release(self) -> None:
        """Write no more: another process may have the file."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError):  # the script may close all descriptors, and use the number again
                if os.path.samestat(os.fstat(lock), self.path.with_name(LOCK_FILE).stat()):
                    os.close(lock)

    def _take(self) -> bool:
        """Whether no other process writes here; where the file system has no locks, none is assumed to."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would be waited for
        self._lock = os.open(self.path.with_name(LOCK_FILE), flags)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _note_run(self, earlier: dict[str, Any]) -> None:
        runs_path = self.path.with_name(RUNS_FILE)
        runs = _read_object(runs_path)
        if not runs and earlier:
            runs[""] = {"directory": "", "first": 0}  # a run that did not say
        runs.setdefault(self._run, {"first": len(earlier)})["directory"] = self._directory
        _replace(runs_path, json.dumps(runs, indent=1) + "\n")

    def _free_key(self, anomaly: Anomaly) -> str:
        """Its key; with a number when a run before, or a restart, came to the same tensor in the same step."""
        number, key = 1, anomaly.key
        while key in self._entries:
            number += 1
            key = f"{anomaly.key}_{number}"
        return key

    def _read_earlier(self) -> dict[str, dict[str, Any]]:
        if not self.path.exists():
            return {}
        try:
            earlier = read_entries(self.path)
        except ValueError:
            aside = self.path.with_name(f"anomaly.unreadable-{self._run}.json")
            self.path.replace(aside)
            log.say(f"{self.path} could not be read and is now {aside.name}")
            return {}
        if earlier:
            log.say(f"{self.path} has {len(earlier)} anomalies of earlier runs: new ones are added", once="earlier")
        return earlier

    def _write(self) -> None:
        lines = [f"  {json.dumps(key, ensure_ascii=False)}: {text}" for key, text in self._entries.items()]
        _replace(self.path, "{\n" + ",\n".join(lines) + "\n}\n" if lines else "{}\n")


def own_file(directory: str) -> str:
    """The file of a process that found ``anomaly.json`` taken, by the name of its run directory."""
    return f"anomaly.{directory}.json"


def read_entries(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a file, in its order.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no such file.
    """
    try:
        content = json.loads(read_regular(path).decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError(f"{path} is nested too deep") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no object")  # noqa: TRY004 - what is wrong is a value in a file
    return content


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return read_entries(path)
    except (OSError, ValueError):
        return {}


def _text(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False)


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
    write_whole(path, text.encode("utf-8", "backslashreplace"))
