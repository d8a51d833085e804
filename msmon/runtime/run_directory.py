"""The directory of one rank's output, and ``run.json`` in it."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from msmon.errors import OutputError
from msmon.runtime.interruption import from_signal_handler

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RUN_FILE = "run.json"
_STAMP = re.compile(r"[A-Z][a-z]{2}\d{2}_\d{2}-\d{2}-\d{2}")
_NAME = re.compile(rf"(?P<stamp>{_STAMP.pattern})-rank(?P<rank>\d+)-(?P<run>[0-9a-f]{{8}})")
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def stamp(moment: float) -> str:
    """``Mmmdd_HH-MM-SS`` in local time, whatever the locale."""
    local = time.localtime(moment)
    return f"{_MONTHS[local.tm_mon - 1]}{time.strftime('%d_%H-%M-%S', local)}"


def make_run_directory(root: Path, rank: int, run_id: str, *, resume: Sequence[str] = ()) -> Path:
    """Make this rank's directory, or find the one to go on in.

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
        if resume:
            found = _between(root, rank, resume[0], resume[1])
            if found is not None:
                return found
        moment = time.time()
        while True:
            directory = root / f"{stamp(moment)}-rank{rank}-{run_id}"
            try:
                directory.mkdir()
            except FileExistsError:
                moment += 1  # a restarted worker of the same run, within the same second
            else:
                return directory
    except OSError as error:
        if from_signal_handler(error):
            raise
        hint = "choose another place with --output or MONITOR_OUTPUT_DIR"
        raise OutputError(f"cannot write below `{root}` ({error.strerror})", hint=hint) from error


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


def _between(root: Path, rank: int, first: str, last: str) -> Path | None:
    low, high = sortable(first), sortable(last)
    candidates = [
        (parsed.order, entry)
        for entry in root.iterdir()
        if (parsed := parse_directory_name(entry.name)) and parsed.rank == rank and low <= parsed.order <= high
    ]
    return max(candidates)[1] if candidates else None


def write_run_file(directory: Path, content: dict[str, Any]) -> None:
    """Write ``run.json`` whole: it is replaced, never half-written.

    In a directory that is gone on with, what it said of the runs before stays under ``resumed_from``, models left out.

    Raises:
        OSError: It cannot be written; an earlier one is unharmed.
    """
    earlier = read_run_file(directory) or {}
    before = earlier.pop("resumed_from", [])
    if earlier and earlier.get("started") != content.get("started"):
        before = [*before, {key: value for key, value in earlier.items() if key != "models"}]
    text = json.dumps({**content, **({"resumed_from": before} if before else {})}, indent=2, ensure_ascii=False) + "\n"
    beside = directory / f".{RUN_FILE}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        beside.write_text(text, encoding="utf-8", errors="backslashreplace")  # a lone surrogate becomes JSON's escape
        beside.replace(directory / RUN_FILE)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def read_run_file(directory: Path) -> dict[str, Any] | None:
    """The content of ``run.json``, or ``None`` when there is none that can be read."""
    try:
        content = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def utc_now() -> str:
    """The time in ISO 8601, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
