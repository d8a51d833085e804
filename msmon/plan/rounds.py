"""From calls of ``optimizer.step`` to training steps.

A model may be trained by several optimizers (one for matrices and one for the rest, an actor and a critic in one
module, one per parameter), each from any step on and as often as it likes. A *round* holds at most one step of each
parameter; it is one training step.

What tells rounds apart is backward passes. A step that no backward pass has preceded since the step before belongs to
the round of that, also when that round has ended already. A step after a backward pass begins a new round, unless its
optimizer is one that has a backward pass of its own within a round (a generator after its discriminator), and comes
after those that have stepped, as it did before. So optimizers that take turns on the same parameters make a round each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_MEMORY = 16
"""Rounds after which an optimizer that no longer steps is not waited for."""


@dataclass
class _Known:
    """An optimizer.

    Attributes:
        held: Its parameters.
        last: The last round in which it stepped.
        own_pass: Whether a backward pass came between the step before and its own; ``None``: not known yet.
    """

    held: frozenset[int]
    last: int | None = None
    own_pass: bool | None = None


class Rounds:
    """Groups steps of the optimizers of one model into training steps.

    Args:
        first: Number of the first training step.
    """

    def __init__(self, first: int = 0) -> None:
        self.step = first
        self.open = False
        self._known: dict[int, _Known] = {}
        self._order: list[int] = []  # in which they step in a round
        self._place: dict[int, int] = {}  # of each in that order
        self._stepped: list[int] = []
        self._touched: set[int] = set()
        self._awaited: list[int] = []
        self._passed = False
        self._since_pass: list[int] = []  # who has stepped since the last backward pass began
        self._ended: tuple[list[int], set[int]] = [], set()  # who stepped in the round before, and on what

    def know(self, optimizer: int, parameters: Iterable[int] = ()) -> None:
        """An optimizer of this model exists, or now holds these parameters.

        The first round waits for it, later ones only if it ever stepped.
        """
        held = frozenset(parameters)
        if optimizer in self._known:
            self._known[optimizer].held = held
        else:
            self._known[optimizer] = _Known(held)

    def forget(self, optimizer: int) -> None:
        """An optimizer is gone; another may get its number."""
        self._known.pop(optimizer, None)
        for members in (self._order, self._stepped, self._ended[0], self._awaited, self._since_pass):
            if optimizer in members:
                members.remove(optimizer)
        self._place = {other: place for place, other in enumerate(self._order)}

    @property
    def passed(self) -> bool:
        """Whether a backward pass has begun since the last step."""
        return self._passed

    def backward_begins(self) -> bool:
        """A backward pass begins.

        Returns:
            Whether the round under way can be closed: those that it still waits for come right after the others, or not.
        """
        self._passed = True
        self._since_pass = []
        if not self.open:
            return False
        self._awaited = [other for other in self._awaited if self._known[other].own_pass is not False]
        return not self._awaited

    def would_repeat(self, optimizer: int) -> bool:
        """Whether a step of this optimizer belongs to the next round: close the one under way first."""
        if optimizer in self._stepped or not self._held(optimizer).isdisjoint(self._touched):
            return True
        if not (self.open and self._passed):
            return False
        is_new = optimizer not in self._place and bool(self._ended[0])
        return is_new or self._comes_before(optimizer, self._stepped)

    def joins_ended(self, optimizer: int) -> bool:
        """Whether a step of this optimizer belongs to the round that has ended, and none has begun since."""
        stepped, touched = self._ended
        if self.open or self._passed or not stepped:
            return False
        return optimizer not in stepped and self._held(optimizer).isdisjoint(touched)

    def joined(self, optimizer: int) -> None:
        """An optimizer has stepped, and that belongs to the round that has ended."""
        stepped, touched = self._ended
        self._note(optimizer, stepped, self.step - 1)
        stepped.append(optimizer)
        touched |= self._held(optimizer)

    def stepped(self, optimizer: int) -> bool:
        """An optimizer has stepped.

        Returns:
            Whether the round is complete, so that it can be closed at once.
        """
        self._note(optimizer, self._stepped, self.step)
        if not self.open:
            self.open = True
            self._awaited = self._expected(optimizer)
        self._stepped.append(optimizer)
        self._touched |= self._held(optimizer)
        while self._awaited and self._cannot_join(self._awaited[-1]):
            self._awaited.pop()
        return not self._awaited

    def close(self) -> None:
        """End the round under way and go on to the next step."""
        self._ended = self._stepped, self._touched
        self._stepped, self._touched, self.open, self.step = [], set(), False, self.step + 1

    def _held(self, optimizer: int) -> frozenset[int]:
        known = self._known.get(optimizer)
        return frozenset() if known is None else known.held

    def _note(self, optimizer: int, before: list[int], step: int) -> None:
        """Learn from a step: its place among the others, and whether it has a backward pass of its own."""
        known = self._known.setdefault(optimizer, _Known(frozenset()))
        known.last = step
        known.own_pass = self._passed
        if any(other == optimizer or not self._held(other).isdisjoint(known.held) for other in self._since_pass):
            self._since_pass = []  # those were of a round before
        if optimizer not in self._place:
            place = self._place.get(before[-1], -1) + 1 if before else len(self._order)
            self._put(optimizer, place)
        else:
            # Without a backward pass between, these come before it in the same round, whichever round they were put in.
            moved = [other for other in self._since_pass if self._place.get(other, -1) > self._place[optimizer]]
            if moved:
                self._order = [other for other in self._order if other not in moved]
                place = self._order.index(optimizer)
                self._order[place:place] = moved
                self._place = {other: number for number, other in enumerate(self._order)}
        self._since_pass.append(optimizer)
        self._passed = False

    def _put(self, optimizer: int, place: int) -> None:
        self._order.insert(place, optimizer)
        if place == len(self._order) - 1:
            self._place[optimizer] = place
        else:
            self._place = {other: number for number, other in enumerate(self._order)}

    def _comes_before(self, optimizer: int, others: Iterable[int]) -> bool:
        place = self._place.get(optimizer)
        return place is not None and any(self._place.get(other, -1) > place for other in others)

    def _expected(self, first: int) -> list[int]:
        """Those that a round, begun by this optimizer, waits for."""
        if not self._ended[0]:
            return list(self._known)  # the first round
        place = self._place[first]
        return [
            other
            for other, known in self._known.items()
            if known.last is not None
            and known.last >= self.step - (_MEMORY if known.own_pass else 1)
            and self._place[other] > place
        ]

    def _cannot_join(self, optimizer: int) -> bool:
        if optimizer not in self._known or self.would_repeat(optimizer):
            return True
        return bool(self._ended[0]) and self._comes_before(optimizer, self._stepped[-1:])
