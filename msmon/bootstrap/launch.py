"""From ``msmon run … -- COMMAND`` to the command itself, in the same process."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msmon
from msmon import env
from msmon.bootstrap import unreached
from msmon.bootstrap.settings import Settings, marks_path
from msmon.errors import CommandNotExecutableError, CommandNotFoundError
from msmon.regular_file import write_whole
from msmon.runtime.process import run_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from msmon.config.schema import MonitorConfig

SITE_FOLDER = Path(__file__).resolve().parent / "site"
_IGNORED_BY_PYTHON = [getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signal, name)]
"""Python ignores these, and what is ignored stays ignored across exec."""


def find_command(command: str) -> str:
    """The executable that a shell would run.

    Raises:
        CommandNotFoundError: There is none.
        CommandNotExecutableError: It exists and cannot be executed.
    """
    if os.sep in command:
        path: str | None = command
        if not os.path.exists(command):  # noqa: PTH110 - Path.exists raises for what cannot be
            raise CommandNotFoundError(f"no such file: `{command}`", hint="check the path after `--`")
    else:
        path = shutil.which(command)
        if path is None and os.path.exists(command):  # noqa: PTH110 - as above
            hint = f"write ./{command}, or python {command}"
            raise CommandNotFoundError(f"no such command: `{command}` is a file here, not on the PATH", hint=hint)
    if path is None:
        raise CommandNotFoundError(
            f"no such command: `{command}`", hint="write the command after `--`, as in `msmon run -- python train.py`"
        )
    if Path(path).is_dir() or not os.access(path, os.X_OK):
        hint = f"did you mean `msmon run -- python {command}`?" if command.endswith(".py") else "check its permissions"
        raise CommandNotExecutableError(f"cannot execute `{command}`", hint=hint)
    return path


def prepare_environment(
    config: MonitorConfig,
    command: Sequence[str],
    *,
    output: str = "",
    source: str = "",
    options: dict[str, Any] | None = None,
    grad_acc_steps: int | None = None,
    alerts: dict[str, Any] | None = None,
    dynamic: bool = False,
    first_step: int | None = None,
    temporary: bool = False,
) -> tuple[dict[str, str], list[str]]:
    """The environment of the command, with the settings file written.

    Args:
        config: A checked configuration.
        command: The command and its arguments.
        output: Output root; empty for ``MONITOR_OUTPUT_DIR``, else ``./monitor_output``.
        source: The configuration file, for the report and to be followed.
        options: What options put over the file.
        grad_acc_steps: Micro-batches a step, when the user said so.
        alerts: What the command line says of alerts.
        dynamic: Follow the file; ``DYNAMIC_MONITOR`` asks for it too.
        first_step: Number of the first training step, when the user said so.
        temporary: The output is removed when the command has ended.

    Returns:
        The environment, and what the user should know before the command starts.
    """
    root = str(Path(output).expanduser().absolute()) if output else env.output_root()
    settings = Settings(
        version=msmon.__version__,
        package=str(Path(msmon.__file__).resolve().parent),
        output_root=root,
        document=config.model_dump(mode="json", exclude_unset=True),
        source=str(Path(source).absolute()) if source else "",
        options=options or {},
        grad_acc_steps=grad_acc_steps,
        command=env.shown(list(command)),
        alerts=alerts or {},
        dynamic=dynamic or env.dynamic_requested(),
        first_step=first_step,
        temporary=temporary,
    )
    path, notes = _write_settings(settings)
    identity = run_id()
    environment = dict(os.environ)
    environment.update(
        {
            env.SETTINGS: path,
            env.SETTINGS_FORWARDED: path,
            env.RUN_ID: identity,
            env.RUN_ID_FORWARDED: identity,
            # who says at its end that nothing was recorded
            env.MAIN_PID: str(os.getpid()) if config.kinds and config.collect_times and not notes else "",
            "PYTHONPATH": _python_path(os.environ.get("PYTHONPATH", "")),
        }
    )
    return environment, notes


def run_command(executable: str, command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """Become the command: same process, same signals, same exit code.

    Raises:
        CommandNotExecutableError: The system refuses to execute it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    # Of a run that this one is inside of: it is this one that speaks.
    unreached.leave_mark(marks_path(os.environ), unreached.TOLD)
    expected = environment.get(env.MAIN_PID) and environment.get(env.ENABLED) != "0"
    send_away = _stand_by(marks_path(environment)) if expected else None
    try:
        os.execve(executable, list(command), environment)  # noqa: S606 - it is the command that is started, not a shell
    except OSError as error:
        if send_away is not None:
            send_away()
        hint = "is its first line `#!interpreter`?"
        raise CommandNotExecutableError(f"cannot execute `{command[0]}` ({error.strerror})", hint=hint) from error


def _stand_by(marks: str) -> Callable[[], None] | None:
    try:
        write_whole(marks, b"", mode=stat.S_IRUSR | stat.S_IWUSR)
    except OSError:  # the disk has no room any more: then nobody speaks at the end
        return None
    return unreached.stand_by(marks)


def warnings_about(command: Sequence[str]) -> list[str]:
    """What in a command keeps msmon out of its processes, a line each."""
    found = []
    words = [Path(word).name for word in command]
    flags = _python_flags(command)
    if flags:
        found.append(f"python {flags} ignores PYTHONPATH, so nothing can be watched in that process; leave {flags} out")
    if words[0] == "env" and ("-i" in words or "-" in words or "--ignore-environment" in words):
        found.append("env -i empties the environment, so nothing can be watched; name the variables to drop with -u")
    if words[0] in {"sudo", "su"}:
        found.append(f"{words[0]} drops most of the environment; put msmon inside: `{words[0]} … msmon run -- …`")
    if "opentelemetry-instrument" in words:
        found.append(
            "opentelemetry-instrument does not run the sitecustomize it hides; write `opentelemetry-instrument msmon run -- …`"
        )
    if words[0] == "deepspeed":
        found.extend(_deepspeed_warnings())
    return found


def _deepspeed_warnings() -> list[str]:
    found = []
    if Path("sitecustomize.py").exists():
        found.append(
            "deepspeed puts this directory before PYTHONPATH: the sitecustomize.py here hides msmon's on other hosts"
        )
    for place in (Path(), Path.home()):
        file = place / ".deepspeed_env"
        if file.is_file() and env.SETTINGS_FORWARDED in file.read_text(encoding="utf-8", errors="replace"):
            found.append(f"{file} keeps settings of an earlier run with msmon; remove its lines with MSMON")
    return found


def _python_flags(command: Sequence[str]) -> str:
    """``-I``, ``-E`` or ``-S`` among the interpreter's own flags, alone or combined as in ``-Es``."""
    if not Path(command[0]).name.startswith("python"):
        return ""
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word in {"-", "--"}:
            return ""
        if word.startswith("--"):
            continue
        for position, letter in enumerate(word[1:], start=2):
            if letter in "IES":
                return f"-{letter}"
            if letter in "cm":
                return ""
            if letter in "WX":  # takes the rest of the word, else the next one
                if position == len(word):
                    next(words, None)
                break
    return ""


def _python_path(current: str) -> str:
    """Our folder first, once; the rest as it was, an empty element (the working directory) included."""
    ours = str(SITE_FOLDER)
    rest = [entry for entry in current.split(os.pathsep) if entry != ours] if current else []
    return os.pathsep.join([ours, *rest])


def _write_settings(settings: Settings) -> tuple[str, list[str]]:
    try:
        Path(settings.output_root).mkdir(parents=True, exist_ok=True)
        return settings.write(settings.output_root), []
    except OSError as error:
        note = f"cannot write to {settings.output_root} ({error.strerror}): the command runs, nothing is recorded"
        return settings.write(tempfile.mkdtemp(prefix="msmon-")), [note]
