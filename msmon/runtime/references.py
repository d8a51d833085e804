"""Objects of the script that are noted without being kept alive.

The classes of :mod:`weakref` run Python code when an object dies, wherever the script happens to be. An exception that a
signal handler raises while such code runs (Ctrl-C, a time limit) is printed and lost. Nothing runs here: entries whose
object is gone are dropped when others are added. Objects are told apart by identity, since they may compare by value.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Generic, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Iterator

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

_FEWEST = 32


class IdentityTable(Generic[K, V]):
    """A value for each of some objects that live elsewhere."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[K], V]] = {}
        self._purge_at = _FEWEST

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self:
            self._entries.pop(id(key), None)  # of a dead object with the same id: its place in the order goes too
        self._entries[id(key)] = weakref.ref(key), value
        if len(self._entries) >= self._purge_at:
            for number, entry in list(self._entries.items()):
                if entry[0]() is None:
                    removed = self._entries.pop(number, entry)
                    if removed is not entry:  # another thread has just noted a new object with this identity
                        self._entries.setdefault(number, removed)
            self._purge_at = max(_FEWEST, 2 * len(self._entries))

    @overload
    def get(self, key: K) -> V | None: ...

    @overload
    def get(self, key: K, default: D) -> V | D: ...

    def get(self, key: K, default: D | None = None) -> V | D | None:
        """The value of an object, or ``default``."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else default

    def pop(self, key: K, default: D) -> V | D:
        """Take an object out; its value, or ``default``."""
        value = self.get(key, default)
        self._entries.pop(id(key), None)
        return value

    def __contains__(self, key: object) -> bool:
        entry = self._entries.get(id(key))
        return entry is not None and entry[0]() is key

    def __iter__(self) -> Iterator[K]:
        return iter([key for reference, _ in list(self._entries.values()) if (key := reference()) is not None])


class IdentitySet(IdentityTable[K, None]):
    """Some objects that live elsewhere, in the order in which they were added."""

    def add(self, key: K) -> None:
        """Note an object."""
        if key not in self:
            self[key] = None

    def discard(self, key: K) -> None:
        """Note an object no longer."""
        self.pop(key, None)
