"""What the benchmarks share: a process that computes when asked, and the machine. Standard library only.

The original's environment runs these files too.
"""

from __future__ import annotations

import json
import platform
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
