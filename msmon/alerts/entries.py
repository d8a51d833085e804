"""Reads an ``anomaly.json`` entry by entry, so that one of any size, or one that ends too early, can be read.

The journal beside it has the entries that it lacks: a JSON object a line, which holds one entry under its key.
"""

from __future__ import annotations

import codecs
import json
from typing import TYPE_CHECKING, Any

from msmon.regular_file import open_regular, read_regular

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

_PIECE = 2**16
_LONGEST = 2**20
"""Characters of one entry."""

_SPACE = " \t\r\n"


def journal_of(path: Path) -> Path:
    """Where the entries are that a file lacks."""
    return path.with_suffix(".journal.jsonl")


def iterate_entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Each key of the object in a file with its value, then those that its journal has, all in their order.

    Everything that can be read comes before an error.

    Raises:
        OSError: One of them cannot be read.
        ValueError: One of them is damaged: what is missing, in words.
    """
    late, fault = _of_journal(path)  # first: what is folded in the meantime is in the file then
    count = 0
    try:
        for key, entry in _of_file(path):
            late.pop(key, None)
            yield key, entry
            count += 1
    except FileNotFoundError:
        if not late:
            raise
    except ValueError as error:
        what = f"everything after {count:,} entries ({error})"
        fault = ValueError(f"{what}; {fault}" if fault else what)
    yield from late.items()
    if fault is not None:
        raise fault


def _of_journal(path: Path) -> tuple[dict[str, Any], Exception | None]:
    """The entries of the journal of a file, and what keeps others from being read.

    An unfinished line at its end is what a process leaves that was ended while it wrote.
    """
    journal = journal_of(path)
    try:
        *lines, _ = read_regular(journal).decode("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return {}, None
    except OSError as error:
        return {}, error
    found = [_entry_of(line) for line in lines]
    damaged = found.count(None)
    entries = {key: entry for one in found if one is not None for key, entry in one.items()}
    return entries, ValueError(f"{damaged:,} lines of {journal.name}") if damaged else None


def _entry_of(line: str) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _of_file(path: Path) -> Iterator[tuple[str, Any]]:
    with open_regular(path) as file:
        text = _Text(file)
        text.take("{")
        while True:
            if text.next() == "}":
                return
            key = text.value()
            if not isinstance(key, str):
                raise ValueError(f"no key, but {type(key).__name__}")  # noqa: TRY004 - what is wrong is a value in a file
            text.take(":")
            yield key, text.value()
            if text.next() != "}":
                text.take(",")


class _Text:
    """What is still to be read of a JSON document, and no more of it than one entry."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("replace").decode
        self._text = ""
        self._place = 0
        self._scan = json.JSONDecoder().raw_decode

    def next(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            while self._place < len(self._text):
                if self._text[self._place] not in _SPACE:
                    return self._text[self._place]
                self._place += 1
            if not self._more():
                return ""

    def take(self, character: str) -> None:
        """Go beyond a certain character."""
        found = self.next()
        if found != character:
            raise ValueError(f"`{found}` in place of `{character}`" if found else "the end is missing")
        self._place += 1

    def value(self) -> Any:  # noqa: ANN401 - JSON
        """The next value, whole."""
        self.next()
        while (found := self._scanned()) is None or (found[1] == len(self._text) and self._more()):
            pass  # what follows a value shows that it has ended
        value, self._place = found
        return value

    def _scanned(self) -> tuple[Any, int] | None:
        """A value and where it ends; ``None`` where it goes on in what has been read just now."""
        try:
            return self._scan(self._text, self._place)
        except json.JSONDecodeError as error:
            if len(self._text) - self._place > _LONGEST or not self._more():
                raise ValueError(f"no JSON ({error.msg})") from None
            return None
        except RecursionError:
            raise ValueError("brackets in brackets, too deep") from None

    def _more(self) -> bool:
        piece = self._file.read(_PIECE)
        self._text = self._text[self._place :] + self._decode(piece, not piece)
        self._place = 0
        return bool(piece)
