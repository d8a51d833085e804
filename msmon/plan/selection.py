"""Which parameters are watched: ``targets``."""

from __future__ import annotations

import difflib
import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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


class ModuleSelection:
    """Selects modules, and which of their tensors: the entries of ``targets``.

    A module is selected by its own name (or by a glob pattern that matches the whole of it), unlike a parameter, for
    which a prefix is enough: otherwise nobody could choose a module without everything inside it.

    Args:
        targets: Name or pattern → side (``input``, ``output``, ``input_grad``, ``output_grad``) → place, such as
            ``tuple[2]:0``; a side without a place (``None``) is left out unless all are.
        everything: Modules that are not named are selected too, whole (``all_xy``, or no target at all).
    """

    def __init__(self, targets: Mapping[str, Mapping[str, str | None]], *, everything: bool) -> None:
        self._entries = {_STAGE_PREFIX.sub("", target): dict(places) for target, places in targets.items()}
        self._everything = everything or not targets
        self._found: dict[tuple[str, ...], dict[str, str | None] | None] = {}

    def selects(self, names: tuple[str, ...]) -> bool:
        """Whether a module with these names (forms of one name) is watched."""
        return self._entry(names) is not None

    def wants(self, names: tuple[str, ...], side: str) -> bool:
        """Whether any tensor of this side of a module is watched."""
        entry = self._entry(names)
        return entry is not None and (not any(entry.values()) or entry.get(side) is not None)

    def takes(self, names: tuple[str, ...], side: str, position: int) -> bool:
        """Whether the tensor at this position of a side is watched."""
        if not self.wants(names, side):
            return False
        entry = self._entry(names) or {}
        _, colon, index = (entry.get(side) or "").partition(":")
        return not colon or int(index) == position

    def unmatched(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Targets that are no module's name, each with up to three close names among those that exist."""
        known = list(dict.fromkeys(names))
        return {
            target: difflib.get_close_matches(target, known, n=3, cutoff=0.5)
            for target in self._entries
            if not any(_is(name, target) for name in known)
        }

    def _entry(self, names: tuple[str, ...]) -> dict[str, str | None] | None:
        if names not in self._found:
            self._found[names] = next(
                (places for target, places in self._entries.items() if any(_is(name, target) for name in names)),
                {} if self._everything else None,
            )
        return self._found[names]


def _is(name: str, target: str) -> bool:
    return name == target or (not _GLOB_CHARACTERS.isdisjoint(target) and fnmatchcase(name, target))
