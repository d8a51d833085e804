"""What can be done here: a key whose packages are not installed is refused with that reason, never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msmon.errors import Problem
from msmon.sinks import tensorboard

if TYPE_CHECKING:
    from msmon.config.schema import MonitorConfig


def unavailable(config: MonitorConfig) -> list[Problem]:
    """The parts of a valid configuration that cannot be carried out here.

    Args:
        config: A valid configuration.
    """
    if config.format != "tensorboard" or tensorboard.available():
        return []
    hint = "pip install 'msmon[tensorboard]'"
    return [Problem("format", "TensorBoard is not installed", config.format, hint, slug="missing-extra")]
