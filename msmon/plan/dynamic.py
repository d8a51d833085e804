"""Start and stop while the training runs, as a state machine: which steps are collected, under which configuration.

::

    idle ──(a file that says on)──► armed ──(the next step begins)──► collecting ──(times reached, off, 0 times)──► idle
                                      ▲                                   │
                                      └────────(the file changes)─────────┘

A file that cannot be used never comes here: collection goes on under the old configuration, or stays off.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msmon.config.schema import MonitorConfig


@dataclass(frozen=True)
class Decision:
    """What happens at the boundary between two training steps.

    Attributes:
        collect: Whether the step that begins is collected.
        config: The configuration that it is collected under.
        changed: Whether hooks have to be put on, taken off or exchanged.
        write_back: Whether ``dynamic_on`` is to be set to false in the file: the configured steps are collected.
    """

    collect: bool
    config: MonitorConfig
    changed: bool = False
    write_back: bool = False


class DynamicController:
    """Decides at each step boundary.

    The first step of the training is never collected: the configuration at its start counts as a change in it.

    Args:
        config: The configuration at the start.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        self._next: MonitorConfig | None = config
        self._collecting = False
        self._collected = 0
        self._since = 0

    def configure(self, config: MonitorConfig) -> None:
        """The file was changed to this valid configuration; it counts from the next step boundary on."""
        self._next = config

    @property
    def collecting(self) -> bool:
        """Whether collection is on, be this step collected or left out by ``step_interval``."""
        return self._collecting

    def would_collect_next(self) -> bool:
        """Whether the step after this one is collected if no file comes until then."""
        collected = self._collected + (self._since % self._config.step_interval == 0)
        due = (self._since + 1) % self._config.step_interval == 0
        return self._collecting and due and collected < self._config.collect_times

    def step_ends(self) -> Decision:
        """A training step is over; decide about the next one."""
        if self._collecting:
            self._since += 1
            self._collected += (self._since - 1) % self._config.step_interval == 0
        if self._next is not None:
            return self._begin(self._next)
        if self._collecting and self._collected >= self._config.collect_times:
            self._collecting = False
            return Decision(collect=False, config=self._config, changed=True, write_back=True)
        return self._go_on(changed=False)

    def _begin(self, config: MonitorConfig) -> Decision:
        before = self._collecting
        self._next, self._config = None, config
        self._collecting = config.dynamic_on and config.collect_times > 0
        self._collected = self._since = 0
        if config.dynamic_on and config.collect_times == 0:
            return Decision(collect=False, config=config, changed=before, write_back=True)
        return self._go_on(changed=self._collecting or before)

    def _go_on(self, *, changed: bool) -> Decision:
        collect = self._collecting and self._since % self._config.step_interval == 0
        return Decision(collect=collect, config=self._config, changed=changed)


class DynamicGate:
    """Lets a :class:`DynamicController` decide which steps of one model are collected; see :class:`StepGate`.

    Args:
        config: The configuration at the start.
        first_step: Number of the first training step.

    Attributes:
        step: The training step under way.
        silent: This rank records nothing, though it counts like the others.
    """

    def __init__(self, config: MonitorConfig, first_step: int) -> None:
        self.collected = 0
        self.step = first_step
        self.silent = False
        self._controller = DynamicController(config)
        self._collect = False
        self._scheduled: list[tuple[int, MonitorConfig]] = []

    def schedule(self, config: MonitorConfig, step: int = 0) -> int:
        """A new configuration, from this step on, or from the next one when that has begun. May be called on any thread.

        Returns:
            By how many steps it came too late.
        """
        self._scheduled.append((step, config))
        return max(0, self.step + 1 - step) if step else 0

    def wants(self, step: int) -> bool:
        """Whether a step, the one under way or the next, is collected."""
        return self._collect if step == self.step else not self.silent and self._controller.would_collect_next()

    def count(self) -> None:
        """A step was collected."""
        self.collected += 1

    @property
    def finished(self) -> bool:
        """Whether nothing is collected until another configuration comes."""
        return not self._controller.collecting

    def step_ends(self, step: int) -> Decision:
        """The step before this one is over."""
        self.step = step
        while self._scheduled and self._scheduled[0][0] <= step:
            self._controller.configure(self._scheduled.pop(0)[1])
        decision = self._controller.step_ends()
        if self.silent and decision.collect:
            decision = replace(decision, collect=False)
        self._collect = decision.collect
        return decision
