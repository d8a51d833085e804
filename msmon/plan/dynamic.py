"""Start and stop while the training runs, as a state machine: which steps are collected, under which configuration.

::

    idle ──(a file that says on)──► armed ──(the next step begins)──► collecting ──(times reached, off, 0 times)──► idle
                                      ▲                                   │
                                      └────────(the file changes)─────────┘

A file that cannot be used never comes here: collection goes on under the old configuration, or stays off.
"""

from __future__ import annotations

from dataclasses import dataclass
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
