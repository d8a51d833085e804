"""Which training steps are collected."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepGate:
    """Decides step by step: from ``start`` on, every ``interval`` steps, ``times`` times in all.

    Args:
        start: First step that may be collected.
        interval: Distance between collected steps.
        times: How many steps are collected; 0 collects none.
    """

    start: int
    interval: int
    times: int
    collected: int = 0

    def wants(self, step: int) -> bool:
        """Whether this step is collected."""
        return not self.finished and step >= self.start and (step - self.start) % self.interval == 0

    def count(self) -> None:
        """A step was collected."""
        self.collected += 1

    @property
    def finished(self) -> bool:
        """Whether no further step will be collected."""
        return self.collected >= self.times
