"""What this version of msmon can do: a key whose feature is not there yet is refused with its reason, never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msmon.errors import MISSING, Problem
from msmon.sinks import tensorboard

if TYPE_CHECKING:
    from msmon.config.schema import MonitorConfig

FEATURES = {
    "alert.rules": "alerts",
    "alert.dump": "alerts",
}


def unavailable(config: MonitorConfig) -> list[Problem]:
    """The parts of a valid configuration that this version cannot carry out.

    Args:
        config: A valid configuration.
    """
    problems = [
        _refuse(path, MISSING if isinstance(value, tuple) else value, feature)
        for path, feature in FEATURES.items()
        if (value := _look_up(config, path)) not in (False, ())
    ]
    if config.format == "tensorboard" and not tensorboard.available():
        hint = "pip install 'msmon[tensorboard]'"
        problems.append(Problem("format", "TensorBoard is not installed", config.format, hint, slug="missing-extra"))
    return problems


def _look_up(config: MonitorConfig, path: str) -> object:
    value: object = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _refuse(path: str, value: object, feature: str) -> Problem:
    return Problem(
        path,
        f"this version does not record {feature} yet",
        value,
        f"remove `{path}` or set it to its default",
        slug="not-available-yet",
    )
