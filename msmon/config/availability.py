"""What this version of msmon can do: a key whose feature is not there yet is refused with its reason, never ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msmon.errors import MISSING, Problem

if TYPE_CHECKING:
    from msmon.config.schema import MonitorConfig

FEATURES = {
    "mg_direction": "directions of gradients",
    "ur_distribution": "updates of the optimizer",
    "cc_distribution.enable": "communication",
    "recording_l2_features": "high-order features",
}


def unavailable(config: MonitorConfig, *, dynamic: bool = False) -> list[Problem]:
    """The parts of a valid configuration that this version cannot carry out.

    Args:
        config: A valid configuration.
        dynamic: Whether dynamic start and stop is asked for.
    """
    problems = [
        _refuse(path, MISSING if isinstance(value, tuple) else value, feature)
        for path, feature in FEATURES.items()
        if (value := _look_up(config, path)) not in (False, ())
    ]
    if config.format == "tensorboard":
        problems.append(_refuse("format", config.format, f"the format {config.format}", 'use "csv"'))
    if dynamic:
        problems.append(_refuse("dynamic_on", MISSING, "dynamic start and stop", "unset DYNAMIC_MONITOR or --dynamic"))
    return problems


def _look_up(config: MonitorConfig, path: str) -> object:
    value: object = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _refuse(path: str, value: object, feature: str, hint: str = "") -> Problem:
    return Problem(
        path,
        f"this version does not record {feature} yet" if not hint else f"this version does not have {feature} yet",
        value,
        hint or f"remove `{path}` or set it to its default",
        slug="not-available-yet",
    )
