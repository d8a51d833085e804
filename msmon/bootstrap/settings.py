"""The settings file: how ``msmon run`` tells the processes it starts what to do.

A file rather than variables, since launchers pass only some variables on; its path travels in two of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msmon import env
from msmon.bootstrap.unreached import PREFIX
from msmon.regular_file import read_regular, write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from msmon.alerts.options import AlertOptions
    from msmon.config.schema import MonitorConfig


@dataclass(frozen=True)
class Settings:
    """What a run was asked for.

    Attributes:
        version: Of the msmon that started the run.
        package: Absolute path of its ``msmon`` folder: where a process imports it from when it has none of its own.
        output_root: Absolute path.
        document: The configuration, as a JSON document.
        source: The configuration file, or empty.
        options: What options put over the file, as a JSON document.
        grad_acc_steps: Micro-batches a step, when the user said so.
        command: The command of the run.
        alerts: What the command line says of alerts, as plain values.
        first_step: Number of the first training step, when the user said so.
        dynamic: Whether the file is followed: launchers may drop ``DYNAMIC_MONITOR`` on the way to other hosts.
        temporary: Whether the output is removed when the command has ended, so that nobody is told where it is.
    """

    version: str
    package: str
    output_root: str
    document: dict[str, Any]
    source: str
    options: dict[str, Any]
    grad_acc_steps: int | None
    command: list[str]
    alerts: dict[str, Any] = field(default_factory=dict)
    dynamic: bool = False
    first_step: int | None = None
    temporary: bool = False

    def config(self) -> MonitorConfig:
        """The configuration as a value; it was checked before the run began."""
        from msmon.config.schema import MonitorConfig  # noqa: PLC0415 - pydantic is imported in training processes only

        return MonitorConfig.model_validate(self.document)

    def alert_options(self) -> AlertOptions:
        """What the command line says of alerts."""
        from msmon.alerts.options import AlertOptions, OnAlert  # noqa: PLC0415 - as above

        on_alert = self.alerts.get("on_alert")
        return AlertOptions(
            on_alert=OnAlert(on_alert) if on_alert else None,
            command=self.alerts.get("command", ""),
            rules=tuple(self.alerts.get("rules", ())),
        )

    def for_report(self) -> dict[str, Any]:
        """What ``run.json`` says of it."""
        return {"run_id": env.run_id(), "config_file": self.source, "command": self.command}

    def write(self, folder: str) -> str:
        """Write the file into a folder, whole: hosts that share the folder may write the same one at the same time.

        Its name, which travels in the environment, holds the digest of its content: who can write to the folder can
        take it away, but have no process believe another one. Runs that are asked for the same have one file, which
        stays: a process of any of them may start at any time. Nobody else may read it, since arguments may hold secrets.

        Returns:
            Its path.

        Raises:
            OSError: It cannot be written.
        """
        content = json.dumps(asdict(self), indent=2).encode()
        path = Path(folder, f"{PREFIX}{hashlib.sha256(content).hexdigest()}.json")
        write_whole(path, content, mode=0o600)
        return str(path)


def settings_path(environment: Mapping[str, str] = os.environ) -> str:
    """Where the settings of a process's run are; empty when it was not started by ``msmon run``."""
    return environment.get(env.SETTINGS) or environment.get(env.SETTINGS_FORWARDED) or ""


def marks_path(environment: Mapping[str, str]) -> str:
    """Where the processes of a run leave marks: see :mod:`msmon.bootstrap.unreached`."""
    return f"{settings_path(environment)}.{env.run_id(environment)}"


def read_settings(path: str) -> Settings:
    """Read the file.

    Raises:
        OSError: It cannot be read.
        ValueError, TypeError: It is not a settings file of this version, or not as it was written.
    """
    content = read_regular(path)
    if hashlib.sha256(content).hexdigest() != Path(path).stem.rpartition("-")[2]:
        raise ValueError(f"{path} is not as `msmon run` has written it")
    return Settings(**json.loads(content))
