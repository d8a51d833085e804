"""What msmon says."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from msmon import log

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(log, "_said", {})
    yield
    log.set_rank(0, 1)


def test_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    """A line goes to stderr, with our name in front; stdout stays the script's."""
    log.say("something happened")
    captured = capfd.readouterr()
    assert captured.err == "msmon: something happened\n"
    assert captured.out == ""


def test_what_a_terminal_would_act_on(capfd: pytest.CaptureFixture[str]) -> None:
    """Escape sequences, line ends and marks of writing direction in a name stay text."""
    log.say("layer \x1b[2J\u202e\nmsmon: all is well")
    assert capfd.readouterr().err == "msmon: layer \\x1b[2J\\u202e\\nmsmon: all is well\n"


def test_redirected_stderr(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """What a script redirects holds its own words only; without a real stderr the redirected one must do."""
    caught = io.StringIO()
    with contextlib.redirect_stderr(caught):
        log.say("a")
        assert caught.getvalue() == ""
        monkeypatch.setattr(sys, "__stderr__", None)
        log.say("b")
    assert caught.getvalue() == "msmon: b\n"
    assert capfd.readouterr().err == "msmon: a\n"


def test_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    """A line with a key is said once; one without as often as it is said."""
    for _ in range(3):
        log.say("a", once="key")
        log.say("b")
    log.say("c", once="other key")
    assert capfd.readouterr().err == "msmon: a\nmsmon: b\nmsmon: b\nmsmon: b\nmsmon: c\n"


def test_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """The rank that speaks is named when there are several."""
    log.set_rank(3, 8)
    log.say("a")
    log.set_rank(0, 1)
    log.say("b")
    assert capfd.readouterr().err == "msmon: [rank 3] a\nmsmon: b\n"


class _Broken(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), ValueError("closed"), RuntimeError("reentrant call"), BrokenPipeError()],
)
def test_stderr_that_fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A stderr that is closed, full or interrupted in a write never raises."""
    monkeypatch.setattr(sys, "__stderr__", _Broken(error))
    log.say("a")


def test_no_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without stderr is spared."""
    monkeypatch.setattr(sys, "__stderr__", None)
    monkeypatch.setattr(sys, "stderr", None)
    log.say("a")


def test_closed_descriptor() -> None:
    """With the descriptor of stderr closed, the process goes on and nothing lands on stdout."""
    code = "import os; os.close(2); from msmon import log; log.say('a'); log.say('b', once='k'); print('done')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900)
    assert done.stdout == "done\n"


def test_interrupted_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler that speaks while a line is being said does not hang: no lock is held."""

    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            if "outer" in text:
                log.say("inner", once="key")
                log.say("outer again", once="outer")
            return super().write(text)

    stderr = Interrupting()
    monkeypatch.setattr(sys, "__stderr__", stderr)
    log.say("outer", once="outer")
    assert stderr.getvalue() == "msmon: inner\nmsmon: outer\n"
