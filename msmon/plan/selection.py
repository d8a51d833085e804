"""Which parameters are watched: ``targets``."""

from __future__ import annotations

import difflib
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_STAGE_PREFIX = re.compile(r"^\d+:")
_GLOB_CHARACTERS = frozenset("*?[")


class Selection:
    """Selects names that start with a target, or with something that a glob target matches.

    Args:
        targets: The keys of ``targets``; none selects everything. A leading ``0:`` (pipeline stage) is ignored.
    """

    def __init__(self, targets: Iterable[str]) -> None:
        self._targets = {target: _STAGE_PREFIX.sub("", target) for target in targets}
        self._matched: set[str] = set()

    def selects(self, *names: str) -> bool:
        """Whether any of the names of one parameter is selected."""
        if not self._targets:
            return True
        matching = [target for target, prefix in self._targets.items() if any(_starts(name, prefix) for name in names)]
        self._matched.update(matching)
        return bool(matching)

    def unmatched(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Targets that selected nothing so far, each with up to three close names among those that exist."""
        known = list(names)
        prefixes = list(dict.fromkeys(p for name in known for p in _prefixes(name)))
        return {
            target: difflib.get_close_matches(prefix, prefixes, n=3, cutoff=0.5)
            for target, prefix in self._targets.items()
            if target not in self._matched
        }


def _starts(name: str, target: str) -> bool:
    if _GLOB_CHARACTERS.isdisjoint(target):
        return name.startswith(target)
    return fnmatchcase(name, target + "*")


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]
