"""The end of the process, in processes of their own: signals, exits, forks. No torch is needed here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import pytest

PREAMBLE = """\
import asyncio, atexit, ctypes, multiprocessing, os, signal, subprocess, sys, threading, time
from msmon.runtime import termination
from msmon.runtime.termination import Termination

def finish():
    print("finished on", threading.current_thread().name, flush=True)

def hang():  # in C, and no signal wakes it
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

def me(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
"""
MAIN = "finished on MainThread"
WATCHING = "finished on msmon-signals"


@dataclass(frozen=True)
class Ended:
    code: int
    lines: list[str]
    err: str


def python(code: str) -> Ended:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PREAMBLE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    return Ended(done.returncode, done.stdout.splitlines(), done.stderr)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('x')", 1),
        ("me(signal.SIGINT); time.sleep(60)", -signal.SIGINT),
    ],
)
def test_finished_at_exit(code: str, status: int) -> None:
    """A normal end, sys.exit, an exception and Ctrl-C finish once, and end with the status they have anyway."""
    ended = python(f"t = Termination(finish)\n{code}")
    assert ended.code == status
    assert ended.lines == [MAIN]
    assert ended.err.splitlines()[-1:] == python(f"pass\n{code}").err.splitlines()[-1:]


@pytest.mark.parametrize("code", ["os._exit(4)", "me(signal.SIGKILL); time.sleep(60)"])
def test_ends_that_run_no_code(code: str) -> None:
    """os._exit and SIGKILL run nothing of ours."""
    assert python(f"t = Termination(finish)\n{code}").lines == []


def test_sigterm() -> None:
    """SIGTERM finishes on the main thread, and the parent sees a process that SIGTERM ended."""
    ended = python("t = Termination(finish)\nme()\ntime.sleep(60)\nprint('not reached')")
    assert ended == Ended(-signal.SIGTERM, [MAIN], "")


def test_sigterm_while_the_main_thread_hangs() -> None:
    """When the main thread is stuck in C, the watching thread finishes and ends the process by the signal."""
    ended = python(
        """
        t = Termination(finish)
        threading.Thread(target=lambda: (time.sleep(0.2), me()), daemon=True).start()
        hang()
        """
    )
    assert ended == Ended(-signal.SIGTERM, [WATCHING], "")


def test_sigterm_twice() -> None:
    """A second SIGTERM, as launchers and process groups send it, does not cut off what the first has begun."""
    ended = python(
        """
        def finish():
            me()
            for _ in range(20):
                time.sleep(0.01)
            print("done", flush=True)

        t = Termination(finish)
        me()
        time.sleep(60)
        """
    )
    assert ended == Ended(-signal.SIGTERM, ["done"], "")


def test_sigterm_during_the_end() -> None:
    """SIGTERM while the last rows are written at exit waits until they are."""
    ended = python(
        """
        def finish():
            me()
            for _ in range(20):
                time.sleep(0.01)
            print("done", flush=True)

        t = Termination(finish)
        """
    )
    assert ended == Ended(-signal.SIGTERM, ["done"], "")


def test_main_thread_comes_back() -> None:
    """A main thread that comes back while the watching thread finishes waits for it."""
    ended = python(
        """
        termination.HANDLER_LIMIT = 0.1
        begun = threading.Event()

        def finish():
            begun.set()
            for _ in range(50):
                time.sleep(0.01)
            print("done on", threading.current_thread().name, flush=True)

        t = Termination(finish)
        mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        libc.pthread_mutex_lock(mutex)
        threading.Thread(target=lambda: (time.sleep(0.2), me(), begun.wait(), libc.pthread_mutex_unlock(mutex)), daemon=True).start()
        libc.pthread_mutex_lock(mutex)
        time.sleep(60)
        """
    )
    assert ended == Ended(-signal.SIGTERM, ["done on msmon-signals"], "")


def test_sigterm_inside_of_msmon() -> None:
    """A signal that comes while msmon is at work is handled a moment later, so that nothing is caught half-way."""
    ended = python(
        """
        from msmon.runtime.guard import Guard

        def work():
            me()
            for _ in range(20):
                time.sleep(0.01)
            print("whole", flush=True)

        t = Termination(finish)
        Guard("a part").run(work)
        time.sleep(60)
        """
    )
    assert ended == Ended(-signal.SIGTERM, ["whole", MAIN], "")


def test_sigterm_inside_of_msmon_for_long() -> None:
    """If msmon's frame stays for long (a closure of the user runs in it), the watching thread takes over."""
    ended = python(
        """
        from msmon.runtime.guard import Guard
        termination.HANDLER_LIMIT = 0.2
        t = Termination(finish)
        Guard("a part").run(lambda: (me(), [time.sleep(0.01) for _ in range(6000)]))
        """
    )
    assert ended == Ended(-signal.SIGTERM, [WATCHING], "")


@pytest.mark.parametrize("order", ["before", "after"])
def test_handler_of_the_user(order: str) -> None:
    """The user's own handler, installed before or after, is called as ever; at the normal end everything is written."""
    install = "signal.signal(signal.SIGTERM, lambda *_: print('theirs', flush=True))"
    lines = [install, "t = Termination(finish)"]
    code = "\n".join(lines if order == "before" else reversed(lines))
    ended = python(f"{code}\nme()\nprint('goes on', flush=True)")
    assert ended == Ended(0, ["theirs", "goes on", MAIN], "")


def test_handler_that_calls_the_one_before() -> None:
    """A handler over ours that passes the signal on keeps its say: without msmon there was nothing to pass it to."""
    ended = python(
        """
        t = Termination(finish)
        before = signal.getsignal(signal.SIGTERM)

        def theirs(number, frame):
            print("theirs", flush=True)
            if callable(before):
                before(number, frame)
            print("goes on", flush=True)

        signal.signal(signal.SIGTERM, theirs)
        me()
        """
    )
    assert ended == Ended(0, ["theirs", "goes on", MAIN], "")


def test_scripts_see_the_default_action() -> None:
    """Looked at or replaced, our handler is SIG_DFL to a script; who puts SIG_DFL back still ends with rows written."""
    ended = python(
        """
        t = Termination(finish)
        theirs = lambda *_: print("theirs", flush=True)
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        print(signal.signal(signal.SIGTERM, theirs) is signal.SIG_DFL)
        print(signal.getsignal(signal.SIGTERM) is theirs)
        me()
        print(signal.signal(signal.SIGTERM, signal.SIG_DFL) is theirs, flush=True)
        print(signal.signal(signal.SIGINT, signal.SIG_DFL) is signal.default_int_handler, flush=True)
        me()
        time.sleep(60)
        """
    )
    assert ended == Ended(-signal.SIGTERM, ["True", "True", "True", "theirs", "True", "True", MAIN], "")


def test_disguise_is_taken_off() -> None:
    """Undone, or in a forked child, the functions of signal are Python's own."""
    ended = python(
        """
        own = signal.signal, signal.getsignal
        t = Termination(finish)
        print(own == (signal.signal, signal.getsignal))
        t.undo()
        print(own == (signal.signal, signal.getsignal))
        """
    )
    assert ended == Ended(0, ["False", "True"], "")


def test_handler_that_restores_the_one_before() -> None:
    """A handler over ours that puts the one before back and sends the signal again ends by it, with rows written."""
    ended = python(
        """
        t = Termination(finish)
        before = signal.getsignal(signal.SIGTERM)

        def theirs(number, frame):
            signal.signal(number, before)
            me()

        signal.signal(signal.SIGTERM, theirs)
        me()
        time.sleep(60)
        """
    )
    assert ended == Ended(-signal.SIGTERM, [MAIN], "")


def test_ignored_sigterm() -> None:
    """A signal that is ignored stays ignored."""
    ended = python(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nt = Termination(finish)\nme()\nprint('on', flush=True)"
    )
    assert ended == Ended(0, ["on", MAIN], "")


def test_sigint_is_untouched() -> None:
    """Ctrl-C keeps Python's own handler."""
    ended = python(
        "before = signal.getsignal(signal.SIGINT)\nt = Termination(finish)\nprint(signal.getsignal(signal.SIGINT) is before)"
    )
    assert ended.lines == ["True", MAIN]


def test_not_on_the_main_thread() -> None:
    """Attached on another thread, where no handler can be installed, the exit still finishes."""
    ended = python(
        """
        thread = threading.Thread(target=lambda: Termination(finish))
        thread.start()
        thread.join()
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        """
    )
    assert ended == Ended(0, ["True", MAIN], "")


def test_undo() -> None:
    """Undone, no handler, no thread, no descriptor and no wakeup is left, and nothing is called at exit."""
    ended = python(
        """
        descriptors = set(os.listdir("/proc/self/fd"))
        t = Termination(finish)
        threads = [thread for thread in threading.enumerate() if thread.name == "msmon-signals"]
        t.undo()
        for thread in threads:
            thread.join(30)
        print(len(threads), threading.active_count())
        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, signal.set_wakeup_fd(-1))
        print(set(os.listdir("/proc/self/fd")) == descriptors)
        t.undo()
        """
    )
    assert ended == Ended(0, ["1 1", "True -1", "True"], "")


def test_undo_leaves_what_others_installed() -> None:
    """Handler and wakeup of others stay when ours are taken back."""
    ended = python(
        """
        t = Termination(finish)
        theirs = lambda *_: None
        signal.signal(signal.SIGTERM, theirs)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        t.undo()
        print(signal.getsignal(signal.SIGTERM) is theirs, signal.set_wakeup_fd(-1) == writer)
        """
    )
    assert ended == Ended(0, ["True True"], "")


def test_event_loop_that_owns_the_wakeup() -> None:
    """Where an event loop has the wakeup descriptor it keeps it, and SIGTERM finishes all the same."""
    ended = python(
        """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        t = Termination(finish)
        print(signal.set_wakeup_fd(writer) == writer, threading.active_count(), flush=True)
        me()
        time.sleep(60)
        """
    )
    assert ended == Ended(-signal.SIGTERM, ["True 1", MAIN], "")


def test_event_loop_that_takes_the_wakeup_later() -> None:
    """A loop that took the wakeup over does not keep a signal that came inside of msmon from being seen through."""
    ended = python(
        """
        from msmon.runtime.guard import Guard
        t = Termination(finish)

        async def main():
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print, "usr1")
            Guard("a part").run(lambda: (me(), print("whole", flush=True)))
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    assert ended == Ended(-signal.SIGTERM, ["whole", MAIN], "")


def test_forked_child() -> None:
    """A forked child that forgets the parent's monitor writes nothing, ends by signals as ever, and tells nobody."""
    ended = python(
        """
        t = Termination(finish)
        os.register_at_fork(after_in_child=t.after_fork)
        for _ in range(20):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            os.kill(child, signal.SIGTERM)
            assert os.waitpid(child, 0)[1] == signal.SIGTERM
        child = os.fork()
        if child == 0:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            assert signal.set_wakeup_fd(-1) == -1
            sys.exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        time.sleep(0.1)
        print("parent goes on", flush=True)
        """
    )
    assert ended == Ended(0, ["parent goes on", MAIN], "")


def test_signal_of_a_child_that_still_shares_our_descriptor() -> None:
    """A child that gets SIGTERM before it has let go of the parent's descriptor does not end the parent."""
    ended = python(
        """
        termination.HANDLER_LIMIT = 0.1
        t = Termination(finish)
        child = os.fork()  # nobody tells the monitor
        if child == 0:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(6))
            me()
            time.sleep(60)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        time.sleep(0.5)
        print("parent goes on", flush=True)
        """
    )
    assert ended == Ended(0, ["6", "parent goes on", MAIN], "")


def test_child_of_multiprocessing() -> None:
    """A process of multiprocessing that monitors by itself, as those that mp.spawn starts, finishes though it skips atexit."""
    ended = python(
        """
        def work():
            Termination(finish)

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join()
        print("parent", process.exitcode, flush=True)
        """
    )
    assert ended == Ended(0, [MAIN, "parent 0"], "")


def test_executed_programs_inherit_nothing() -> None:
    """A program that the script starts has none of our descriptors, and the default action for SIGTERM."""
    ended = python(
        """
        t = Termination(finish)
        code = "import os, signal; print(len(os.listdir('/proc/self/fd')), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
        found = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout]
        t.undo()
        found.append(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
        print(found[0] == found[1], "True" in found[0], flush=True)
        """
    )
    assert ended == Ended(0, ["True True"], "")


def test_descriptors_closed_by_the_script() -> None:
    """A script that closes every descriptor, as daemons do, goes on quietly."""
    ended = python("t = Termination(finish)\nos.closerange(3, 256)\nprint('on', flush=True)")
    assert ended == Ended(0, ["on", MAIN], "")


def test_finish_that_fails() -> None:
    """SIGTERM ends the process even if writing what is left fails."""
    ended = python(
        """
        def finish():
            print("failing", flush=True)
            raise SystemExit(9)

        t = Termination(finish)
        me()
        time.sleep(60)
        """
    )
    assert ended.lines == ["failing"]
    assert ended.code in {9, -signal.SIGTERM}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_first_process_of_a_container() -> None:
    """Process 1, which the kernel spares default signals, keeps its default action: SIGTERM stays without effect."""
    code = PREAMBLE + "t = Termination(finish)\nme()\ntime.sleep(0.2)\nprint(os.getpid(), 'on', flush=True)"
    done = subprocess.run(
        ["unshare", "--fork", "--pid", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if "unshare" in done.stderr:
        pytest.skip(f"no process namespace can be made: {done.stderr.strip()}")
    assert done.stdout.splitlines() == ["1 on", MAIN]
