"""The one broad ``except`` of the hot path: a fault of ours is said once, the part that failed is switched off."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from msmon import env, log
from msmon.runtime.interruption import from_signal_handler

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


class Guard:
    """Runs one part of msmon inside the user's training.

    Args:
        part: Its name in the message, such as ``weight gradients``.
    """

    def __init__(self, part: str) -> None:
        self.part = part
        self.broken = False

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call ``function``; after its first failure, do nothing any more.

        Returns:
            What the function returns; ``None`` once the part is switched off.
        """
        if self.broken:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if from_signal_handler(error):
                raise
            self.fail(error)
            return None

    def fail(self, error: BaseException) -> None:
        """Switch the part off and say why, once."""
        self.broken = True
        where = traceback.extract_tb(error.__traceback__)[-1:] if error.__traceback__ else []
        place = f" ({Path(where[0].filename).name}:{where[0].lineno})" if where else ""
        text = " ".join(str(error).split())[:300]
        log.say(f"{self.part} switched off, training goes on: {type(error).__name__}: {text}{place}")
        if os.environ.get(env.DEBUG):
            traceback.print_exception(error)
