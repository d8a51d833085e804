"""The writer thread: waits for a step's numbers, hands them to the sinks. The training thread only hands over."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from msmon import log
from msmon.runtime.references import IdentitySet
from msmon.sinks.base import RecordedStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from msmon.record.table import StepTable
    from msmon.sinks.base import Sink

STALL_LIMIT = 5.0
"""Seconds that a training step waits for the disk before msmon gives up waiting in this run."""

IN_FLIGHT = 8
"""Tables that may wait for a device."""

EXIT_LIMIT = 30.0
"""Seconds that the end of the process waits for the last rows."""

FORK_LIMIT = 1.0
"""Seconds that a fork waits for the table that is being written."""

_SLICE = 0.1
"""Seconds that are waited at a time: a process that is stopped and continued in one of them has waited no longer."""

TABLE, END = "table", "end"

_writers: IdentitySet[Writer] = IdentitySet()


class Writer:
    """Writes step tables in the background, one at a time.

    Handing over a table waits until the one before it is written. In a real training that has long happened; it is
    what bounds memory and keeps the promise that a row is on disk before the next step ends. It never waits for a
    device: while that still computes a table, up to :data:`IN_FLIGHT` may queue behind it. A disk that hangs stops the
    waiting after :data:`STALL_LIMIT`; tables that find the writer busy are then dropped and counted, until it has
    caught up.

    Args:
        sink: Where steps go.
        wake: What wakes the thread: :data:`TABLE`, :data:`END`, or anything else for ``otherwise``.
        otherwise: Called on the thread.
    """

    def __init__(
        self,
        sink: Sink,
        wake: queue.SimpleQueue[object] | None = None,
        otherwise: Callable[[], None] = lambda: None,
    ) -> None:
        self.sink = sink
        self._tables: deque[StepTable] = deque()  # the first is being written; it leaves when it is
        self._wake: queue.SimpleQueue[object] = queue.SimpleQueue() if wake is None else wake
        self._otherwise = otherwise
        self._progress = threading.Lock()  # released when a table is written; a plain lock bears interruption anywhere
        self._progress.acquire()
        self._writing = threading.Lock()  # held while a table is written, and while the process forks
        self._stalled = False
        self._ended = False
        self._thread: threading.Thread | None = None
        self.written = 0
        self.dropped = 0
        _writers.add(self)

    def submit(self, table: StepTable) -> None:
        """Hand a table over. Called on the training thread."""
        if self._stalled and self._tables:
            self.dropped += 1
            return
        self._stalled = False
        self._tables.append(table)
        self._wake_up()
        if not self._wait(STALL_LIMIT, unwritten=1):
            self._stalled = True
            log.say(
                f"writing takes over {STALL_LIMIT:.0f} s a step: steps are left out until the disk has caught up",
                once="stalled",
            )

    def drain(self, limit: float = EXIT_LIMIT) -> bool:
        """Wait until everything handed over is written.

        Returns:
            Whether it is, within ``limit`` seconds.
        """
        if self._tables:
            self._wake_up()
        done = self._wait(limit, unwritten=0)
        if not done:
            log.say(f"the last rows could not be written within {limit:.0f} s", once="drain")
        return done

    def end(self) -> bool:
        """Write what is left and end the thread. Tables that come later are written by whoever hands them over.

        A thread that is inside a tensor library when the interpreter ends aborts the process: Python ends it by
        unwinding its stack, which C++ code does not let through.

        Returns:
            Whether everything is written. If not, the thread hangs, and is left alone.
        """
        self._ended = self.drain()
        if self._ended and self._thread is not None:
            self._wake.put(END)
            self._thread.join(timeout=EXIT_LIMIT)
            self._thread = None
        return self._ended

    def close(self) -> None:
        """Write what is left, end the thread and close the sink."""
        self.end()
        self._wake.put(END)  # for a thread that hung until now
        self.sink.close()

    def pause(self) -> bool:
        """Let no table be written until :meth:`go_on`; returns whether none is, a disk that hangs not being waited for."""
        return self._writing.acquire(timeout=0 if self._stalled else FORK_LIMIT)

    def go_on(self) -> None:
        """Write again."""
        self._writing.release()

    def _wake_up(self) -> None:
        if self._ended:
            self._write_all()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="msmon-writer", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is shutting down and starts no more threads
                self._thread = None
                self._write_all()
        self._wake.put(TABLE)

    def _wait(self, limit: float, *, unwritten: int) -> bool:
        left = limit
        while len(self._tables) > unwritten and not (unwritten and self._device_is_busy()):
            if left <= 0:
                return False
            began = time.monotonic()
            self._progress.acquire(timeout=min(left, _SLICE))
            left -= min(time.monotonic() - began, 2 * _SLICE)  # the time that the process was stopped does not count
        return True

    def _device_is_busy(self) -> bool:
        try:
            return len(self._tables) <= IN_FLIGHT and not self._tables[0].numbers.ready()
        except IndexError:  # it was written this very moment
            return False

    def _loop(self) -> None:
        while (why := self._wake.get()) != END:
            if why != TABLE:
                self._otherwise()
            self._write_all()

    def _write_all(self) -> None:
        while self._tables:
            with self._writing:
                self._write(self._tables[0])
            self._tables.popleft()
            if self._progress.locked():
                self._progress.release()

    def _write(self, table: StepTable) -> None:
        try:
            self.sink.write(_arrived(table))
        except OSError as error:
            self._lose(f"a step could not be written ({error.strerror or error}), training goes on without it")
        except Exception as error:  # noqa: BLE001 - the writer thread must outlive one bad table
            self._lose(f"a step could not be recorded ({type(error).__name__}: {error}), training goes on")
        else:
            self.written += 1

    def _lose(self, why: str) -> None:
        self.dropped += 1
        log.say(why, once=f"lost: {why}")


def _arrived(table: StepTable) -> RecordedStep:
    numbers = table.numbers.wait()
    extras = dict(zip(table.extra_names, table.extras.wait().tolist(), strict=True))
    return RecordedStep(
        model=table.model,
        step=table.step,
        rows=table.rows,
        numbers=numbers,
        micro_steps=table.micro_steps,
        skipped=table.skipped or extras.get("found_inf", 0.0) > 0,
        grad_scale=extras.get("grad_scale", float("nan")),
        complete=table.complete,
        supplement=table.supplement,
        first=table.first,
    )


_paused: dict[int, list[Writer]] = {}


def _before_fork() -> None:
    _paused[threading.get_ident()] = [writer for writer in list(_writers) if writer.pause()]


def _after_fork() -> None:
    for writer in _paused.pop(threading.get_ident(), ()):
        writer.go_on()


if hasattr(os, "register_at_fork"):
    # A lock that a writer holds while the process forks (of an import, of stderr, of a rule) stays locked in the child
    # for ever, and the child's own writer would wait for it: so no table is under way when a process forks.
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
