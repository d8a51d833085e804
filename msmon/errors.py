"""Every error that msmon raises on purpose.

::

    MsmonError                     exit 1
    ├── ConfigError                exit 2    a configuration that cannot be used, with all its problems
    ├── ArgumentError (TypeError)  exit 2    a wrong argument to a public call
    ├── OptionError                exit 2    an option or argument of the command line that cannot be used
    ├── OutputError                exit 1    a place that cannot be written
    ├── UnusablePathError          exit 1    a place that cannot be read or written, and of which no more is known
    ├── MissingExtraError          exit 1    a library that this needs is not installed
    ├── NoRecordingError           exit 1    a directory without what is to be read
    ├── CommandNotFoundError       exit 127  `msmon run -- COMMAND`: no such command
    └── CommandNotExecutableError  exit 126  `msmon run -- COMMAND`: not executable

Each carries a slug, which ``docs/messages.md`` explains, and a hint: one action that mends it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum

MISSING = object()
"""Marks a problem that has no value to show (a key that is absent)."""


class ExitCode(IntEnum):
    """Exit codes of the ``msmon`` command; ``msmon run`` ends with the code of its command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    ANOMALIES = 3
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127
    INTERRUPTED = 130


class MsmonError(Exception):
    """Base of all errors of msmon.

    Args:
        message: What is wrong and where, in one line.
        hint: One action that mends it.
    """

    slug = "failed"
    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a configuration.

    Attributes:
        path: JSON path, such as ``alert.rules[0].args``; empty for the whole document.
        message: What is wrong.
        value: The offending value, or :data:`MISSING`.
        hint: How to mend it.
        slug: The paragraph of ``docs/messages.md`` that explains it.
    """

    path: str
    message: str
    value: object = MISSING
    hint: str = ""
    slug: str = "invalid-config"

    def describe(self, source: str) -> str:
        """One line: what, in which file, at which path, with which value."""
        where = f" in `{source}`" if source else ""
        at = f" at `{self.path}`" if self.path else ""
        value = "" if self.value is MISSING else f": {_shorten(self.value)}"
        return f"{self.message}{where}{at}{value}"


class ConfigError(MsmonError):
    """A configuration that cannot be used.

    Args:
        source: The file (or the words ``command line``) it came from.
        problems: Everything that is wrong with it, at least one.
    """

    exit_code = ExitCode.USAGE

    def __init__(self, source: str, problems: list[Problem]) -> None:
        super().__init__("; ".join(problem.describe(source) for problem in problems), hint=problems[0].hint)
        self.slug = problems[0].slug
        self.source = source
        self.problems = problems


class ArgumentError(MsmonError, TypeError):
    """A wrong argument to a public call."""

    slug = "wrong-argument"
    exit_code = ExitCode.USAGE


class OptionError(MsmonError):
    """An option or argument of the command line has a value that cannot be used."""

    slug = "wrong-option"
    exit_code = ExitCode.USAGE


class UnusablePathError(MsmonError):
    """A file or directory cannot be read or written."""

    slug = "unusable-path"


class OutputError(MsmonError):
    """A directory or file that cannot be written."""

    slug = "output-unwritable"


class MissingExtraError(MsmonError):
    """Something optional is asked for, and the library that it needs is not installed."""

    slug = "missing-extra"


class NoRecordingError(MsmonError):
    """A directory does not hold the output of a run that is to be read."""

    slug = "no-recording"


class CommandNotFoundError(MsmonError):
    """The command after ``--`` does not exist."""

    slug = "command-not-found"
    exit_code = ExitCode.NOT_FOUND


class CommandNotExecutableError(MsmonError):
    """The command after ``--`` exists and cannot be executed."""

    slug = "command-not-executable"
    exit_code = ExitCode.NOT_EXECUTABLE


def _shorten(value: object, limit: int = 80) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
