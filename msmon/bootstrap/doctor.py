"""What keeps msmon out of processes: checks of this environment, and what each process of a command decided."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msmon import env
from msmon.bootstrap import launch
from msmon.config.load import parse_config
from msmon.runtime.run_directory import parse_directory_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_DECISION = re.compile(r"msmon: pid (?P<pid>\d+) of (?P<parent>\d+): (?P<text>.*)")
_START = re.compile(r"(?P<decision>waiting for torch|off: .*|start failed: .*) argv=(?P<argv>\[.*\]) flags=")

_PROBE = """
import json, torch, torch.optim
try:
    torch.zeros(1).numpy()
    numpy = ""
except RuntimeError as error:
    numpy = str(error)
devices = ["cpu"] + [name for name in ("cuda", "npu", "xpu", "mps") if hasattr(torch, name) and getattr(torch, name).is_available()]
print(json.dumps({"torch": torch.__version__, "numpy": numpy, "devices": devices}))
"""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        state: ``failed``: nothing can be recorded. ``missing``: something optional.
        found: What is there.
        hint: One action that mends it.
    """

    name: str
    state: Literal["ok", "missing", "failed"]
    found: str
    hint: str = ""


@dataclass(frozen=True)
class ReachedProcess:
    """A Python process that started with the settings of the run.

    Attributes:
        pid: Its number.
        parent: That of the process that started it.
        command: Its arguments, the interpreter first.
        decision: What became of it, in words.
        watched: Whether it has constructed an optimizer, and is watched.
    """

    pid: int
    parent: int
    command: list[str]
    decision: str
    watched: bool = False


@dataclass(frozen=True)
class Examination:
    """What came of a command.

    Attributes:
        exit_code: Of the command; negative: the signal that ended it.
        processes: Python processes that were reached, in the order of their start.
        ranks: Those that made a training step.
    """

    exit_code: int
    processes: list[ReachedProcess]
    ranks: list[int]


def check_environment() -> list[Check]:
    """Look at what a training under this interpreter needs."""
    with tempfile.TemporaryDirectory(prefix="msmon-") as folder:
        probe, decisions = _start_probe(folder)
    checks = [Check("python", "ok", f"{sys.executable} ({sys.version.split()[0]})")]
    if not any("waiting for torch" in text for _, _, text in decisions):
        why = "; ".join(text for _, _, text in decisions) or "nothing of msmon ran"
        hint = f"{env.ENABLED}=0 switches it off; else look for what sets PYTHONPATH, or runs another sitecustomize, in every Python"
        checks.append(Check("injection", "failed", f"a Python process was not reached: {why}", hint))
    else:
        checks.append(Check("injection", "ok", "a Python process is reached at its start"))
    checks += _torch_checks(probe)
    if importlib.util.find_spec("llvmlite") is None:
        checks.append(Check("cpu", "missing", "slower statistics of CPU tensors", "pip install msmon[cpu]"))
    checks.append(_check_output())
    return checks


def examine(command: Sequence[str], executable: str, *, stdout: int | None = None) -> Examination:
    """Run a command, record its first step somewhere temporary, and see what each process decided.

    Args:
        command: The command and its arguments.
        executable: What :func:`msmon.bootstrap.launch.find_command` found for it.
        stdout: Where its standard output goes.
    """
    config = parse_config({"wg_distribution": True, "ops": ["norm"], "collect_times": 1})
    with tempfile.TemporaryDirectory(prefix="msmon-") as folder:
        environment, log = _environment(config, command, folder)
        done = subprocess.run(command, executable=executable, env=environment, stdout=stdout, check=False)
        names = [parse_directory_name(path.name) for path in Path(folder).iterdir()]
        return Examination(
            done.returncode, processes_in(_decisions(log)), sorted({name.rank for name in names if name is not None})
        )


def processes_in(decisions: Iterable[tuple[int, int, str]]) -> list[ReachedProcess]:
    """Put together what each process decided.

    Args:
        decisions: Process, its parent, and a line of what ``MSMON_DEBUG`` shows.
    """
    found: list[ReachedProcess] = []
    for pid, parent, text in decisions:
        start = _START.match(text)
        if start is not None:  # an exec begins a new one of the same number
            found.append(ReachedProcess(pid, parent, _words(start["argv"]), _in_words(start["decision"])))
            continue
        place = next((place for place in reversed(range(len(found))) if found[place].pid == pid), None)
        before = found[place] if place is not None else ReachedProcess(pid, parent, ["(a fork)"], "")
        after = ReachedProcess(pid, parent, before.command, _in_words(text), watched=text.endswith("watching"))
        if place is None:
            found.append(after)
        elif not before.watched:
            found[place] = after
    return found


def _words(argv: str) -> list[str]:
    try:
        words: list[str] = ast.literal_eval(argv)
    except (SyntaxError, ValueError):  # long lines of several processes may run into each other
        return [argv]
    return words


def _in_words(decision: str) -> str:
    if decision == "waiting for torch":
        return "no torch"
    if decision.endswith("imported"):
        return "torch, no optimizer"
    return "watched" if decision.endswith("watching") else decision


def _environment(config: Any, command: Sequence[str], folder: str) -> tuple[dict[str, str], Path]:  # noqa: ANN401 - pydantic is imported late
    log = Path(folder, "decisions.log")
    environment, _ = launch.prepare_environment(config, command, output=folder, temporary=True)
    environment.update({env.DEBUG: str(log), env.MAIN_PID: ""})  # what was not seen is said here
    return environment, log


def _decisions(log: Path) -> list[tuple[int, int, str]]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return [
        (int(match["pid"]), int(match["parent"]), match["text"]) for line in lines if (match := _DECISION.match(line))
    ]


def _start_probe(folder: str) -> tuple[subprocess.CompletedProcess[str], list[tuple[int, int, str]]]:
    command = [sys.executable, "-c", _PROBE]
    environment, log = _environment(parse_config({}), command, folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done, _decisions(log)


def _torch_checks(probe: subprocess.CompletedProcess[str]) -> list[Check]:
    if importlib.util.find_spec("torch") is None:
        return [Check("torch", "failed", "not installed", "install the torch of your training into this environment")]
    if probe.returncode != 0:
        last = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        hint = "mend the installation: python -c 'import torch' has to work"
        if importlib.util.find_spec("torch_npu") is not None:
            hint = "torch_npu is installed, and torch loads it: it needs CANN (source its set_env.sh), or has to go"
        return [Check("torch", "failed", f"cannot be imported: {last}", hint)]
    found = json.loads(probe.stdout)
    checks = [Check("torch", "ok", f"{found['torch']} ({', '.join(found['devices'])})")]
    if found["numpy"]:
        checks.append(Check("numpy", "missing", f"does not fit torch: {found['numpy']}", "install the NumPy it wants"))
    return checks


def _check_output() -> Check:
    root = Path(env.output_root())
    above = next(place for place in (root, *root.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=above):
            return Check("output", "ok", str(root))
    except OSError as error:
        hint = f"choose another place with {env.OUTPUT_DIR}"
        return Check("output", "failed", f"cannot write to {above} ({error.strerror})", hint)
