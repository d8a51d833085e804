"""``--on-alert-command``: starts a command of the user's, without a shell, in the background, not too often."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from msmon import env, log

if TYPE_CHECKING:
    from collections.abc import Callable

INTERVAL = 60.0
"""Seconds between two starts at least."""

RUN_LIMIT = 60.0
"""Seconds that a command may take."""


class AlertCommand:
    """Starts a command at anomalies.

    Args:
        command: Split as a shell would, but no shell interprets it. The message is added as its last argument.
        clock: Seconds, monotonic.
    """

    def __init__(self, command: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._words = shlex.split(command)
        self._clock = clock
        self._next = 0.0

    def start(self, message: str) -> bool:
        """Start it, unless it was started a moment ago. Returns without waiting for its end.

        Returns:
            Whether it was started.
        """
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + INTERVAL
        try:  # here, not on the thread: the process may end before that gets to it
            started = subprocess.Popen(
                [*self._words, message],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, env.ENABLED: "0"},
            )
        except (OSError, ValueError) as error:
            log.say(f"--on-alert-command: {error}", once="alert command")
            return False
        threading.Thread(target=_see_through, args=(started,), name="msmon-alert", daemon=True).start()
        return True


def _see_through(started: subprocess.Popen[bytes]) -> None:
    try:
        code = started.wait(RUN_LIMIT)
    except subprocess.TimeoutExpired:
        started.kill()
        code = started.wait()
        log.say(f"--on-alert-command took over {RUN_LIMIT:.0f} s and was ended", once="alert command")
    if code > 0:
        log.say(f"--on-alert-command ended with code {code}", once="alert command")
