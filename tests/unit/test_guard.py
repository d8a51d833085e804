"""The one broad except."""

from __future__ import annotations

import functools
import signal
from typing import TYPE_CHECKING

import pytest

from msmon import env
from msmon.runtime.guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable


def fail(text: str) -> None:
    raise ValueError(text)


def test_guard_passes_on(capfd: pytest.CaptureFixture[str]) -> None:
    """A part that works returns what it returns, with any arguments, and says nothing."""
    guard = Guard("a part")
    assert guard.run(lambda a, b: a + b, 1, b=2) == 3
    assert not guard.broken
    assert capfd.readouterr().err == ""


def test_guard_switches_off(capfd: pytest.CaptureFixture[str]) -> None:
    """After its first failure a part is not called any more; cause and place are said once, on one line."""
    guard = Guard("a part")
    called = []
    assert guard.run(fail, "first\nline " + "x" * 1000) is None
    assert guard.run(lambda: called.append(1)) is None
    assert guard.run(fail, "second") is None
    assert not called
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("msmon: a part switched off, training goes on: ValueError: first line x")
    assert "(test_guard.py:" in line
    assert len(line) < 500


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_guard_lets_the_user_end(error: type[BaseException]) -> None:
    """Ctrl-C and sys.exit inside of msmon end the script, and switch nothing off."""
    guard = Guard("a part")

    def interrupted() -> None:
        raise error

    with pytest.raises(error):
        guard.run(interrupted)
    assert not guard.broken


class _Limit:
    def __call__(self, number: int, frame: object) -> None:
        raise TimeoutError("time is over")

    def method(self, number: int, frame: object) -> None:
        self(number, frame)


def _limit(limit: _Limit, number: int, frame: object) -> None:
    limit(number, frame)


@pytest.mark.parametrize("handler", [_Limit(), _Limit().method, functools.partial(_limit, _Limit())])
def test_guard_lets_signal_handlers_of_the_script_raise(handler: Callable[[int, object], None]) -> None:
    """An exception that the script's own signal handler raises while msmon is at work is the script's to catch."""
    guard = Guard("a part")
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError):
            guard.run(signal.raise_signal, signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not guard.broken
    assert guard.run(fail, "ours") is None
    assert guard.broken


def test_guard_debug(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """With MSMON_DEBUG the traceback is shown."""
    monkeypatch.setenv(env.DEBUG, "1")
    Guard("a part").run(fail, "why")
    assert "Traceback" in capfd.readouterr().err


def test_failure_without_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """An error that was never raised can be reported too."""
    Guard("a part").fail(ValueError("x"))
    assert capfd.readouterr().err == "msmon: a part switched off, training goes on: ValueError: x\n"
