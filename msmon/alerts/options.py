"""What the command line says of alerts, beside the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class OnAlert(str, Enum):
    """What happens at an anomaly."""

    LOG = "log"
    DUMP = "dump"
    STOP = "stop"


@dataclass(frozen=True)
class AlertOptions:
    """Nothing here can come from a configuration file: it names code and commands.

    Attributes:
        on_alert: ``None`` follows the configuration's ``dump``.
        command: A command line to start at an anomaly; empty for none.
        rules: Users' own rules, as ``module:function``.
    """

    on_alert: OnAlert | None = None
    command: str = ""
    rules: tuple[str, ...] = ()
