"""Values of options that more than one command takes: from text to a value, or to an error that names the option."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import typer  # noqa: TC002 - Typer reads the annotations

from msmon.errors import OptionError

_MOST_DIGITS = 18
_LONGEST_NAME = 255
"""Bytes of a part of a path, on every file system that trainings write to."""


def usable_path(value: Path | None, param: typer.CallbackParam) -> Path | None:
    """A path that a file could have, ``~`` and ``~name`` expanded.

    Raises:
        OptionError: No file can have it.
    """
    if value is None:
        return None
    hint = f"give {_named(param)} a path that a file can have"
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:
        raise OptionError(f"no such place: `{_shortened(str(value))}` ({error})", hint=hint) from error
    refusal = _refusal(path)
    if refusal:
        raise OptionError(f"no such place: `{_shortened(str(value))}` ({refusal})", hint=hint)
    return path


def _refusal(path: Path) -> str:
    try:
        if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
            return os.strerror(errno.ENAMETOOLONG)
        os.lstat(path)
    except ValueError as error:  # no bytes for such characters, a NUL
        return str(error)
    except OSError as error:
        return os.strerror(error.errno) if error.errno in {errno.ENAMETOOLONG, errno.ELOOP} else ""
    return ""


def usable_text(value: str, param: typer.CallbackParam) -> str:
    """The same for an option whose value is kept as text.

    Raises:
        OptionError: No file can have that path.
    """
    return str(usable_path(Path(value), param)) if value else value


def whole_number(word: str) -> int | None:
    """A whole number in plain digits; ``None`` for everything else, more than 18 digits included."""
    return int(word) if word.isascii() and word.isdigit() and len(word) <= _MOST_DIGITS else None


def wrong_value(option: str, word: str, expected: str, hint: str) -> OptionError:
    """The error for a word that an option cannot have."""
    return OptionError(f"{option}: `{_shortened(word)}` is {expected}", hint=hint)


def _named(param: typer.CallbackParam) -> str:
    longest = max(param.opts, key=len)
    return longest if longest.startswith("-") else str(param.metavar or longest.upper())


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:60]}…{text[-15:]}"  # noqa: PLR2004 - a line of a terminal
