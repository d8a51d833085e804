"""From calls of ``optimizer.step`` to training steps.

A model may be trained by several optimizers (one for matrices and one for the rest, an actor and a critic in one
module, one per parameter). A *round* holds at most one step of each; it is one training step. It ends when every
optimizer that stepped lately has stepped, or when one steps again. So the number of rounds is the number of steps of
the optimizer that steps most often.
"""

from __future__ import annotations

_MEMORY = 16
"""Rounds after which an optimizer that no longer steps is not waited for."""


class Rounds:
    """Groups steps of the optimizers of one model into training steps.

    Args:
        first: Number of the first training step.
    """

    def __init__(self, first: int = 0) -> None:
        self.step = first
        self._stepped: set[int] = set()
        self._last: dict[int, int] = {}
        self._known: set[int] = set()

    @property
    def open(self) -> bool:
        """Whether a round is under way."""
        return bool(self._stepped)

    def know(self, optimizer: int) -> None:
        """An optimizer of this model exists; the first round waits for it, later ones only if it ever stepped."""
        self._known.add(optimizer)

    def would_repeat(self, optimizer: int) -> bool:
        """Whether a step of this optimizer belongs to the next round: close the one under way first."""
        return optimizer in self._stepped

    def stepped(self, optimizer: int) -> bool:
        """An optimizer has stepped.

        Returns:
            Whether the round is complete, so that it can be closed at once.
        """
        self._stepped.add(optimizer)
        lately = {other for other, step in self._last.items() if step >= self.step - _MEMORY}
        return (lately or self._known) <= self._stepped

    def close(self) -> None:
        """End the round under way and go on to the next step."""
        self._last.update(dict.fromkeys(self._stepped, self.step))
        self._stepped.clear()
        self.step += 1
