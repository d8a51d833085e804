"""Every environment variable that msmon reads or sets, declared once.

Standard library only: this module is imported in processes that may never train.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SETTINGS = "MSMON_CONFIG"
"""Absolute path of the settings file that ``msmon run`` wrote for the processes it starts."""

SETTINGS_FORWARDED = "PYTHON_MSMON_CONFIG"
"""The same path under a name that launchers forward to other hosts (DeepSpeed passes on ``PYTHON*`` only)."""

ENABLED = "MSMON"
"""``0`` switches every injected process off."""

DEBUG = "MSMON_DEBUG"
"""``1``, or a file: say in every process what the injection decided, and why."""

RUN_ID = "MSMON_RUN_ID"
"""Eight hexadecimal digits shared by every process of a run; made by ``msmon run``."""

RUN_ID_FORWARDED = "PYTHON_MSMON_RUN_ID"
"""The same under a name that launchers forward to other hosts."""

MAIN_PID = "MSMON_MAIN_PID"
"""The process that became the command: at its end it says so if nothing was recorded."""

OUTPUT_DIR = "MONITOR_OUTPUT_DIR"
"""Root of the output; the name is that of the original."""

DYNAMIC = "DYNAMIC_MONITOR"
"""``True`` asks for dynamic start and stop; the name is that of the original."""

CODE_CACHE = "MSMON_CODE_CACHE"
"""Folder of machine code compiled for this processor, by default ``~/.cache/msmon/code``; ``0``: keep none."""

HIDE_ARGUMENTS = "MSMON_HIDE_ARGUMENTS"
"""``1``: leave the arguments of the command out of the files that msmon writes; they may hold tokens."""

DEFAULT_OUTPUT_DIR = "monitor_output"

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Where launchers say which process this is, most specific first."""

WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""How often torchrun has started the workers anew: they may find its store with what those before them left there."""

JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID", "PMIX_NAMESPACE")
"""Together they name a job that several hosts share."""


def output_root() -> str:
    """Absolute path of the output root: ``$MONITOR_OUTPUT_DIR``, else ``./monitor_output``."""
    return os.path.abspath(os.path.expanduser(os.environ.get(OUTPUT_DIR) or DEFAULT_OUTPUT_DIR))  # noqa: PTH100, PTH111 - pathlib costs start-up time


def dynamic_requested() -> bool:
    """Whether ``DYNAMIC_MONITOR`` asks for dynamic start and stop."""
    return os.environ.get(DYNAMIC, "").strip().lower() in {"1", "true"}


_MOST_DIGITS = 18


def run_id(environment: Mapping[str, str] = os.environ) -> str:
    """The run's id as an environment has it; empty where it has none."""
    return environment.get(RUN_ID) or environment.get(RUN_ID_FORWARDED) or ""


def first_number(names: tuple[str, ...], default: int) -> int:
    """The first of these variables that holds a whole number, else ``default``."""
    for name in names:
        text = os.environ.get(name, "")
        if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
            return int(text)
    return default


def shown(command: list[str]) -> list[str]:
    """A command as files may have it: without its arguments where :data:`HIDE_ARGUMENTS` asks for that."""
    return command[:1] if os.environ.get(HIDE_ARGUMENTS, "") not in {"", "0"} else command
