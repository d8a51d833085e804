"""Says at the end of a run that it never reached a training, when no process of the run can say so itself.

The command may never start a Python, or one that does not look at ``PYTHONPATH``; then nothing of msmon is in any of its
processes. So ``msmon run`` leaves a process behind before it becomes the command: it belongs to no process and no session
of the command's, holds stderr only, sleeps until the command has ended, and reads what the processes of the run have left.
They leave marks in the mode of an empty file beside the settings, which costs one call of the kernel. The file is named
after the settings and the run, and gone when the run has ended.

That process runs this very file, alone: standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

REACHED = stat.S_IXUSR
"""A Python process of the run has found its settings. ``sitecustomize`` leaves it, and knows its number."""

TOLD = stat.S_IXGRP
"""A run inside of this one says what there is to say. The command's own process takes the file away when it has spoken."""

TRAINED = stat.S_IXOTH
"""A process of the run has trained, whether or not that left rows."""

PREFIX = ".msmon-"
"""How the names of settings and marks begin."""

_NEEDED = ("PYTHONHOME", "LD_LIBRARY_PATH", "PATH")
"""What an interpreter may need of the environment to start."""

_NOT_REACHED = (
    "nothing was reached: the command started no Python process that found msmon's settings, so nothing was recorded. "
    "Did it train in a container or on another host, with python -I, -E or -S, "
    "or through a script that sets or clears PYTHONPATH?"
)
_NOT_TRAINED = (
    "no training step was seen in any process by the end of the command (MSMON_DEBUG=1 shows what each process decided)"
)


def leave_mark(marks: str, mark: int) -> None:
    """Leave a mark. Where that is not possible, nothing is said of the run."""
    path = Path(marks)
    if path.name.startswith(PREFIX):  # else the variable is somebody else's
        with contextlib.suppress(OSError):
            path.chmod(stat.S_IMODE(path.stat().st_mode) | mark)


def stand_by(marks: str) -> Callable[[], None]:
    """Leave the process behind that speaks when the command has ended.

    Args:
        marks: The file for marks. It is removed by that process, or by the command's own when it speaks.

    Returns:
        What sends it away: the command could not be started.
    """
    # The first process of a container would find one more child than it has started, and takes all others along.
    if not hasattr(os, "pidfd_open") or os.getpid() == 1:
        return _nothing
    try:
        command = os.pidfd_open(os.getpid())
        waiting, calling_off = os.pipe()  # closed when this process becomes the command
        child = os.fork()
    except OSError:  # no process or descriptor is left, or a kernel without pidfd_open
        return _nothing
    if child == 0:
        _leave_family(command, waiting, marks)
    os.close(command)
    os.close(waiting)
    with contextlib.suppress(ChildProcessError):  # whoever ignores SIGCHLD has none to wait for
        os.waitpid(child, 0)

    def send_away() -> None:
        os.write(calling_off, b"\0")

    return send_away


def _nothing() -> None:
    pass


def _leave_family(command: int, waiting: int, marks: str) -> NoReturn:
    try:
        os.setsid()  # no signal of a terminal or to the group of the command
        if os.fork() == 0:
            os.chdir("/")
            _keep_only(command, waiting)
            words = [sys.executable, "-s", "-S", __file__, marks, str(command), str(waiting)]
            needed = {name: os.environ[name] for name in _NEEDED if name in os.environ}
            os.execve(sys.executable, words, needed)  # noqa: S606 - a small process in the place of a copy of this one
    finally:
        os._exit(0)


def _keep_only(*kept: int) -> None:
    """Keep no pipe from its reader's end, and no file from whoever removes it: stderr alone is needed."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if descriptor in kept:
            os.set_inheritable(descriptor, True)  # noqa: FBT003 - it takes no keywords
        elif descriptor > 2:  # noqa: PLR2004 - stderr
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(descriptor)


def _wait_and_tell(marks: str, command: int, waiting: int) -> None:
    started = not os.read(waiting, 1)
    if started:
        end = select.poll()
        end.register(command)
        end.poll()
    text = _finding(Path(marks)) if started else ""
    Path(marks).unlink()
    if text:
        os.write(2, f"msmon: {text}\n".encode())


def _finding(marks: Path) -> str:
    """What is to be said, if anything."""
    mode = stat.S_IMODE(marks.stat().st_mode)
    if mode & ~(REACHED | TOLD | TRAINED) != stat.S_IRUSR | stat.S_IWUSR:
        return ""  # a file system that keeps no modes
    if mode & (TOLD | TRAINED) or _recorded(marks):
        return ""
    return _NOT_TRAINED if mode & REACHED else _NOT_REACHED


def _recorded(marks: Path) -> bool:
    """As in ``sitecustomize``: the run has a directory, or has gone on with one."""
    written, run_id = marks.stat().st_mtime, marks.name.rpartition(".")[2]
    for directory in marks.parent.iterdir():
        if directory.name.endswith(f"-{run_id}"):
            return True
        report = directory / "run.json"
        if report.is_file() and report.stat().st_mtime >= written and run_id.encode() in report.read_bytes():
            return True
    return False


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # nobody is there to hear it any more, or the folder is gone
        _wait_and_tell(sys.argv[1], *map(int, sys.argv[2:]))
