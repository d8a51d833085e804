"""The end of the process: nothing that was computed is lost, and it ends as it would have ended without msmon.

``atexit`` covers a normal end, ``sys.exit`` and an exception. SIGTERM, whose default action runs no Python code, is
caught when nobody else handles it: rows are written, the default action is restored and the signal sent again, so that
the parent sees the same status.

Scripts do not see that handler: :func:`signal.getsignal` and :func:`signal.signal` say ``SIG_DFL`` in its place.

A small thread woken by :func:`signal.set_wakeup_fd` sees it through. When the signal comes while msmon itself is at
work, the handler does nothing and the thread sends the signal again a moment later, so that no table is caught half-way.
When the main thread cannot run the handler (it waits inside a collective, say), the thread does its work.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing.util
import os
import signal
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

from msmon.runtime.frames import MSMON, frames_from
from msmon.runtime.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

HANDLER_LIMIT = 2.0
"""Seconds that the main thread has for its handler before the watching thread takes over."""

FINISH_LIMIT = 60.0
"""Seconds that one thread waits for another that is writing what is left."""

_RETRY = 0.02
_signal, _getsignal = signal.signal, signal.getsignal
_masks: dict[int, set[int]] = {}
_STOP = 0
_CREDENTIALS = struct.Struct("iII")  # process, user, group: what Linux attaches to what it passes through a socket


class Termination:
    """Calls ``finish`` once, however the process ends (but for ``kill -9``).

    Args:
        finish: Writes what is left. Called on any thread, at most once.
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._process = os.getpid()
        self._owner: dict[str, int] = {}
        self._begun = False
        self.signalled = False
        self._over = _locked()
        self._heard = _locked()
        self._postponed = False
        self._disguise = Ledger()
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        atexit.register(self.finish)
        self._leaving_child = multiprocessing.util.Finalize(None, self.finish, exitpriority=10)
        self._catch_sigterm()

    def finish(self) -> None:
        """Run ``finish`` unless it ran; when another thread is at it, wait until it is done."""
        me = threading.get_ident()
        if self._owner.setdefault("thread", me) != me:  # atomic: whoever comes first owns the end
            if self._over.acquire(timeout=FINISH_LIMIT):
                self._over.release()
        elif not self._begun:
            self._begun = True
            try:
                self._finish()
            finally:
                self._over.release()
            if self._postponed:  # a signal came meanwhile
                _end_by(signal.SIGTERM)

    def undo(self) -> None:
        """Leave no handler, no thread and no descriptor behind. ``finish`` is not called any more."""
        self._forget()
        self._disguise.undo()
        if threading.current_thread() is threading.main_thread() and self._ours():
            _signal(signal.SIGTERM, signal.SIG_DFL)
        if self._wakeup is not None:
            _, writer = self._release_wakeup(self._wakeup)
            with contextlib.suppress(OSError):
                writer.send(bytes([_STOP]))  # the thread closes its end
            writer.close()

    def after_fork(self) -> None:
        """In a forked child: the parent's rows are not ours to write, its signals not ours to report."""
        self._forget()
        self._disguise.undo()
        if self._ours():
            _signal(signal.SIGTERM, signal.SIG_DFL)
        if self._wakeup is not None:
            for end in self._release_wakeup(self._wakeup):
                end.close()

    def _forget(self) -> None:
        self._finish = _nothing
        self._leaving_child.cancel()
        atexit.unregister(self.finish)

    def _release_wakeup(self, ends: tuple[socket.socket, socket.socket]) -> tuple[socket.socket, socket.socket]:
        self._wakeup = None
        if threading.current_thread() is threading.main_thread():
            current = signal.set_wakeup_fd(-1)
            if current != ends[1].fileno():  # somebody else has taken it over
                signal.set_wakeup_fd(current)
        return ends

    def _catch_sigterm(self) -> None:
        if threading.current_thread() is not threading.main_thread() or os.getpid() == 1:
            return  # only the main thread may; the kernel keeps default signals from a container's first process
        if _getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return  # the user handles it, or it is ignored: either way it stays as found
        _signal(signal.SIGTERM, self._handle)
        self._disguise.patch(signal, "getsignal", self._wrap_getsignal)
        self._disguise.patch(signal, "signal", self._wrap_signal)
        if not hasattr(socket, "SCM_CREDENTIALS"):
            return  # not Linux: the handler alone must do
        reader, writer = socket.socketpair()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        writer.settimeout(0)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if before != -1:  # an event loop owns it
            signal.set_wakeup_fd(before)
            reader.close()
            writer.close()
            return
        self._wakeup = reader, writer
        threading.Thread(target=self._watch, args=(reader,), name="msmon-signals", daemon=True).start()

    def _ours(self) -> bool:
        return _getsignal(signal.SIGTERM) == self._handle

    def _wrap_getsignal(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def getsignal(signalnum: int) -> Any:  # noqa: ANN401 - whatever a handler may be
            found = original(signalnum)
            return signal.SIG_DFL if found == self._handle else found

        return getsignal

    def _wrap_signal(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Ours stands for the default action: a script finds that in its place, and puts that back."""

        def install(signalnum: int, handler: Any) -> Any:  # noqa: ANN401 - as above
            default = signalnum == signal.SIGTERM and handler == signal.SIG_DFL and len(self._disguise) > 0
            found = original(signalnum, self._handle if default else handler)
            return signal.SIG_DFL if found == self._handle else found

        return install

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            _end_by(number)  # a child forked this very moment, which has not forgotten us yet
        if not self._ours():
            return  # a handler installed over this one passes the signal on: it is that one's to act on
        if self._wakeup is not None and _inside_msmon(frame):
            self._postponed = True
            with contextlib.suppress(OSError):  # full: then the thread is awake
                self._wakeup[1].send(bytes([number]))  # an event loop may have taken the wakeup over
            return
        self.signalled = True
        if self._heard.locked():
            self._heard.release()
        self.finish()
        _end_by(number)

    def _watch(self, reader: socket.socket) -> None:
        with contextlib.suppress(OSError), reader:  # the script may close all descriptors
            while (received := _signals_of_this_process(reader)) is not None and _STOP not in received:
                if signal.SIGTERM in received and self._ours():
                    self._see_through()

    def _see_through(self) -> None:
        deadline = time.monotonic() + HANDLER_LIMIT
        while not self._heard.acquire(timeout=_RETRY):
            if time.monotonic() > deadline:
                self.signalled = True
                self.finish()
                _end_by(signal.SIGTERM)
            if self._postponed and (main := threading.main_thread().ident) is not None:
                signal.pthread_kill(main, signal.SIGTERM)


def _locked() -> threading.Lock:
    """A plain lock, held: unlike an event or a condition it may be used in a signal handler."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _nothing() -> None:
    pass


def _inside_msmon(frame: FrameType | None) -> bool:
    return any(outer.f_code.co_filename.startswith(MSMON) for outer in frames_from(frame, without=()))


def _before_fork() -> None:
    _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop(threading.get_ident()))


if hasattr(os, "register_at_fork"):
    # Python forgets signals that reach a child before it has begun: held back, they find it ready.
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def _end_by(number: int) -> None:
    """End the process as the signal would have; :func:`signal.signal` works on the main thread only."""
    ctypes.CDLL(None).signal(number, 0)
    os.kill(os.getpid(), number)


def _signals_of_this_process(reader: socket.socket) -> bytes | None:
    """Wait for signals; ``None`` when no more can come.

    A process forked a moment ago still reports its signals here: the kernel says who wrote.
    """
    received, attached, _, _ = reader.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
    if not received:
        return None
    sender = next((_CREDENTIALS.unpack(data)[0] for _, kind, data in attached if kind == socket.SCM_CREDENTIALS), 0)
    return received if sender == os.getpid() else b""
