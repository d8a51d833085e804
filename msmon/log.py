"""What msmon says: on stderr, each thing once, with the rank that says it. Never on stdout."""

from __future__ import annotations

import sys

from msmon.runtime.interruption import from_signal_handler

_said: dict[str, object] = {}
_speaker = ""


def set_rank(rank: int, world_size: int) -> None:
    """Name the rank in every following line (left out when there is only one)."""
    global _speaker  # noqa: PLW0603 - one process has one rank
    _speaker = f"[rank {rank}] " if world_size > 1 else ""


def say(text: str, *, once: str = "") -> None:
    """Write a line on stderr.

    Args:
        text: The line.
        once: A key; a second line with the same key is dropped.
    """
    mine = object()
    if once and _said.setdefault(once, mine) is not mine:  # one atomic call: a lock could hang in a signal handler
        return
    try:
        stream = sys.__stderr__ or sys.stderr  # what the script redirects is for its own words
        stream.write(f"msmon: {_speaker}{printable(text)}\n")
        stream.flush()
    except (OSError, ValueError, AttributeError, RuntimeError) as error:
        # stderr closed, full, absent, or in use by what a signal interrupted: training goes on without the line
        if from_signal_handler(error):
            raise


def printable(text: str) -> str:
    r"""Text that can be shown on a terminal in one line.

    What a terminal would act on (escape sequences, line ends) and what would change how the text around it reads (marks
    of writing direction, characters without a shape) is written as an escape, such as ``\x1b``.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
