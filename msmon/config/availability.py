"""What this version of msmon can do: a key whose feature is not there yet is refused with its reason, never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msmon.errors import Problem

if TYPE_CHECKING:
    from msmon.config.schema import MonitorConfig


def unavailable(config: MonitorConfig) -> list[Problem]:
    """The parts of a valid configuration that this version cannot carry out.

    Args:
        config: A valid configuration.
    """
    if config.format != "tensorboard":
        return []
    message = "this version does not have the format tensorboard yet"
    return [Problem("format", message, config.format, 'use "csv"', slug="not-available-yet")]
