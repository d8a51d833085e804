"""Every change made to somebody else's object goes through a ledger, so that it can be undone without a trace."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Removable(Protocol):
    """A hook handle."""

    def remove(self) -> None:
        """Take the hook out."""


class Ledger:
    """Remembers patches and hooks, and undoes them in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._undo)

    def keep(self, handle: Removable) -> None:
        """Remember a hook handle."""
        self._undo.append(handle.remove)

    def patch(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:  # noqa: ANN401 - any module or class
        """Replace a function of a module or class by ``wrap(function)``.

        When undone, the original returns unless somebody else has patched over ours in between: then theirs stays,
        with ours, which must be inert by itself, beneath it.
        """
        inherited = name not in vars(owner)
        original = getattr(owner, name)
        stored = vars(owner).get(name)  # not always what getattr says: a class may keep a descriptor of its method
        wrapper = functools.wraps(original)(wrap(original))
        setattr(owner, name, wrapper)

        def undo() -> None:
            if vars(owner).get(name) is wrapper:
                if inherited:
                    delattr(owner, name)
                else:
                    setattr(owner, name, stored)

        self._undo.append(undo)

    def undo(self) -> None:
        """Undo everything, last first. A second call does nothing."""
        while self._undo:
            self._undo.pop()()
