"""From calls of ``optimizer.step`` to training steps.

A model may be trained by several optimizers (one for matrices and one for the rest, an actor and a critic in one
module, one per parameter). A *round* holds at most one step of each parameter; it is one training step. It ends when
every optimizer that stepped lately, and that holds none of the parameters that stepped, has stepped as well, or when
one steps that holds such a parameter. So the number of rounds is the number of steps of the optimizer that steps most
often; optimizers that take turns on the same parameters make a round each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MEMORY = 16
"""Rounds after which an optimizer that no longer steps is not waited for."""


class Rounds:
    """Groups steps of the optimizers of one model into training steps.

    Args:
        first: Number of the first training step.
    """

    def __init__(self, first: int = 0) -> None:
        self.step = first
        self.open = False
        self._stepped: set[int] = set()
        self._touched: set[int] = set()
        self._awaited: list[int] = []
        self._last: dict[int, int] = {}
        self._held: dict[int, frozenset[int]] = {}

    def know(self, optimizer: int, parameters: Iterable[int] = ()) -> None:
        """An optimizer of this model exists, or now holds these parameters.

        The first round waits for it, later ones only if it ever stepped.
        """
        self._held[optimizer] = frozenset(parameters)

    def forget(self, optimizer: int) -> None:
        """An optimizer is gone; another may get its number."""
        self._held.pop(optimizer, None)
        self._last.pop(optimizer, None)
        self._stepped.discard(optimizer)

    def would_repeat(self, optimizer: int) -> bool:
        """Whether a step of this optimizer belongs to the next round: close the one under way first."""
        return optimizer in self._stepped or not self._held.get(optimizer, frozenset()).isdisjoint(self._touched)

    def stepped(self, optimizer: int) -> bool:
        """An optimizer has stepped.

        Returns:
            Whether the round is complete, so that it can be closed at once.
        """
        if not self.open:
            self.open = True
            lately = [other for other, step in self._last.items() if step >= self.step - _MEMORY]
            self._awaited = lately or list(self._held)
        self._stepped.add(optimizer)
        self._touched |= self._held.get(optimizer, frozenset())
        while self._awaited and self._cannot_join(self._awaited[-1]):
            self._awaited.pop()
        return not self._awaited

    def _cannot_join(self, optimizer: int) -> bool:
        return optimizer not in self._held or self.would_repeat(optimizer)

    def close(self) -> None:
        """End the round under way and go on to the next step."""
        self._last.update(dict.fromkeys(self._stepped, self.step))
        self._stepped, self._touched, self.open, self.step = set(), set(), False, self.step + 1
