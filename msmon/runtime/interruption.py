"""Exceptions that are not ours though they come out of our code: the script's signal handlers may run anywhere."""

from __future__ import annotations

import functools
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType


def from_signal_handler(error: BaseException) -> bool:
    """Whether the script's own signal handler raised this while msmon was at work (a time limit, say)."""
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    entry = error.__traceback__
    while entry is not None:
        if entry.tb_frame.f_code in handlers:
            return True
        entry = entry.tb_next
    return False


def pass_on(error: BaseException) -> None:
    """Raise what the script's own signal handler has raised: a ``TimeoutError`` of its looks like a fault of a file.

    Raises:
        BaseException: ``error``, if it came from there.
    """
    if from_signal_handler(error):
        raise error


def _code_of(handler: object) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if callable(handler) and not hasattr(handler, "__code__"):  # an object that can be called
        handler = type(handler).__call__
    code: CodeType | None = getattr(handler, "__code__", None)
    return code
