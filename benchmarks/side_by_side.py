"""What the benchmarks share: a process that computes when asked, and the machine. Standard library only.

The original's environment runs these files too.
"""

from __future__ import annotations

import json
import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess


def ask(process: subprocess.Popen[str], name: str, **request: Any) -> dict[str, Any]:
    """Send a request to a process, a line of JSON, and wait for its answer, another one."""
    assert process.stdin
    assert process.stdout
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline() or "{}")
    if not answer:
        raise SystemExit(f"`{name}` ended with exit code {process.wait()}")
    return answer


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def about() -> dict[str, Any]:
    """When and where figures were measured."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": {
            "system": platform.platform(),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
        },
    }


def signature(figures: dict[str, Any], versions: dict[str, str]) -> str:
    """The line under a table: versions, machine, date."""
    machine = figures["machine"]
    numbers = ", ".join(f"{name} {number}" for name, number in sorted(versions.items()))
    where = f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}, {machine['system']}"
    return f"{numbers}; {where}; {figures['date']}"


def publish(figures: dict[str, Any], table: str, file: Path | None) -> None:
    """Print a table, and write its figures to a file if there shall be one."""
    print(table)
    if file:
        file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
