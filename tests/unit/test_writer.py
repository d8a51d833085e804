"""The writer thread: order, back pressure, failing and hanging disks, the end of the process."""

from __future__ import annotations

import itertools
import math
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from msmon import log
from msmon.record.table import Row, StepTable
from msmon.runtime import writer as writer_module
from msmon.runtime.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from msmon.sinks.base import RecordedStep


class Arrived:
    """Numbers that are there, or that fail to come."""

    def __init__(self, *numbers: float, error: Exception | None = None) -> None:
        self._numbers = np.array(numbers)
        self._error = error
        self.here = threading.Event()
        self.here.set()

    def ready(self) -> bool:
        return self.here.is_set()

    def wait(self) -> NDArray[np.float64]:
        self.here.wait(60)
        if self._error is not None:
            raise self._error
        return self._numbers


def table(step: int, **changes: Any) -> StepTable:
    rows = [Row("grad_reduced", "fc", 0, None, (1,), "torch.float32")]
    described: dict[str, Any] = {"numbers": Arrived(float(step)), "extras": Arrived()}
    return StepTable("", step, rows, **{**described, **changes})


class Sink:
    """Keeps steps; waits for, or fails at, what the test says."""

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []
        self.threads: set[str] = set()
        self.may_write = threading.Event()
        self.may_write.set()
        self.writing = threading.Event()
        self.errors: dict[int, Exception] = {}
        self.closed = 0

    def write(self, step: RecordedStep) -> None:
        self.threads.add(threading.current_thread().name)
        self.writing.set()
        self.may_write.wait(60)
        if step.step in self.errors:
            raise self.errors[step.step]
        self.steps.append(step)

    def close(self) -> None:
        self.closed += 1

    @property
    def numbers(self) -> list[int]:
        return [step.step for step in self.steps]


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
def writer(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    monkeypatch.setattr(log, "_said", {})
    target = Writer(sink)
    yield target
    sink.may_write.set()
    target.close()


def test_order(writer: Writer, sink: Sink) -> None:
    """Steps are written in the order handed over, all on one thread of ours."""
    for step in range(500):
        writer.submit(table(step))
    assert writer.drain()
    assert sink.numbers == list(range(500))
    assert sink.threads == {"msmon-writer"}
    assert (writer.written, writer.dropped) == (500, 0)


def test_no_thread_before_the_first_table(writer: Writer) -> None:
    """A writer that gets nothing starts nothing."""
    assert writer.drain()
    assert not [thread for thread in threading.enumerate() if thread.name == "msmon-writer"]


def test_at_most_one_table_is_unwritten(writer: Writer, sink: Sink) -> None:
    """Handing over returns at once while the writer is free, and waits for the table before while it is not."""
    sink.may_write.clear()
    writer.submit(table(0))
    returned = threading.Event()

    def submit_another() -> None:
        writer.submit(table(1))
        returned.set()

    thread = threading.Thread(target=submit_another)
    thread.start()
    assert sink.writing.wait(60)
    assert not returned.wait(0.2)
    sink.may_write.set()
    assert returned.wait(60)
    assert 0 in sink.numbers
    thread.join()
    assert writer.drain()
    assert sink.numbers == [0, 1]


def test_previous_step_is_kept_when_the_next_is_handed_over(writer: Writer, sink: Sink) -> None:
    """A row is on disk before the next step ends: at every return all tables but the last are written."""
    for step in range(200):
        writer.submit(table(step))
        assert len(sink.steps) >= step


def test_stalled_sink(
    writer: Writer, sink: Sink, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A disk that hangs is waited for once until it has caught up; steps that find it busy are left out and counted, and it is said once."""
    monkeypatch.setattr(writer_module, "STALL_LIMIT", 0.2)
    sink.may_write.clear()
    for step in range(6):
        writer.submit(table(step))
    assert writer.dropped == 4
    assert capfd.readouterr().err.count("steps are left out") == 1
    sink.may_write.set()
    assert writer.drain()
    writer.submit(table(6))
    assert writer.drain()
    for step in range(7, 200):  # it has caught up: steps are waited for again, none is lost
        writer.submit(table(step))
    assert writer.drain()
    assert sink.numbers == [0, 1, *range(6, 200)]
    assert (writer.written, writer.dropped) == (196, 4)


def test_a_device_is_not_waited_for(writer: Writer, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a device computes a table, further ones may be handed over, a bounded number of them, and none is lost."""
    monkeypatch.setattr(writer_module, "STALL_LIMIT", 0.2)
    late = Arrived(0.0)
    late.here.clear()
    writer.submit(table(0, numbers=late))
    for step in range(1, writer_module.IN_FLIGHT):
        writer.submit(table(step))
    assert sink.numbers == []
    late.here.set()
    assert writer.drain()
    assert sink.numbers == list(range(writer_module.IN_FLIGHT))
    assert writer.dropped == 0


def test_failing_sink(writer: Writer, sink: Sink, capfd: pytest.CaptureFixture[str]) -> None:
    """A step that cannot be written is said once for each cause; the training thread never sees it, and others follow."""
    full, broken = OSError(28, "No space left on device"), ValueError("broken")
    sink.errors = {1: full, 2: full, 4: full, 5: broken, 6: broken, 7: OSError("odd")}
    for step in range(9):
        writer.submit(table(step))
    assert writer.drain()
    assert sink.numbers == [0, 3, 8]
    assert (writer.written, writer.dropped) == (3, 6)
    said = capfd.readouterr().err
    assert said.count("No space left on device") == 1
    assert said.count("ValueError: broken") == 1
    assert said.count("odd") == 1
    assert said.count("training goes on") == 3


def test_numbers_that_never_come(writer: Writer, sink: Sink, capfd: pytest.CaptureFixture[str]) -> None:
    """A device that fails to deliver costs that step, not the thread."""
    writer.submit(table(0, numbers=Arrived(error=RuntimeError("device lost"))))
    writer.submit(table(1))
    assert writer.drain()
    assert sink.numbers == [1]
    assert "device lost" in capfd.readouterr().err


def test_what_a_table_becomes(writer: Writer, sink: Sink) -> None:
    """Numbers about the step itself become its loss scale and whether it was skipped."""
    writer.submit(table(0, micro_steps=3, complete=False))
    writer.submit(table(1, extra_names=["grad_scale", "found_inf"], extras=Arrived(8.0, 1.0)))
    writer.submit(table(2, extra_names=["grad_scale", "found_inf"], extras=Arrived(4.0, 0.0), skipped=False))
    writer.submit(table(3, skipped=True))
    assert writer.drain()
    plain, overflow, fine, skipped = sink.steps
    assert (plain.micro_steps, plain.complete, plain.skipped) == (3, False, False)
    assert math.isnan(plain.grad_scale)
    assert (overflow.grad_scale, overflow.skipped) == (8.0, True)
    assert (fine.grad_scale, fine.skipped) == (4.0, False)
    assert skipped.skipped
    assert [step.numbers.tolist() for step in sink.steps] == [[0.0], [1.0], [2.0], [3.0]]


def test_drain_has_a_limit(writer: Writer, sink: Sink, capfd: pytest.CaptureFixture[str]) -> None:
    """The end of the process does not wait for ever for a disk that hangs."""
    sink.may_write.clear()
    writer.submit(table(0))
    assert not writer.drain(limit=0.2)
    assert not writer.drain(limit=0.2)
    assert capfd.readouterr().err.count("the last rows could not be written") == 1


def test_close(sink: Sink) -> None:
    """Closing writes what is left, ends the thread and closes the sink."""
    writer = Writer(sink)
    for step in range(3):
        writer.submit(table(step))
    writer.close()
    assert sink.numbers == [0, 1, 2]
    assert sink.closed == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "msmon-writer"]


def test_end(writer: Writer, sink: Sink) -> None:
    """No thread is left, and what comes later is written where it is handed over."""
    writer.submit(table(0))
    assert writer.end()
    assert not [thread for thread in threading.enumerate() if thread.name == "msmon-writer"]
    assert sink.threads == {"msmon-writer"}
    writer.submit(table(1))
    assert sink.numbers == [0, 1]
    assert sink.threads == {"msmon-writer", threading.current_thread().name}
    assert writer.end()


def test_close_without_tables(sink: Sink) -> None:
    """A writer that got nothing can be closed."""
    Writer(sink).close()
    assert sink.closed == 1


def test_no_more_threads(writer: Writer, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the interpreter shuts down no thread can be started: the table is written where it is handed over.

    From Python 3.12 on the interpreter refuses in this way.
    """

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for step in range(3):
        writer.submit(table(step))
    assert writer.drain(limit=0.2)
    assert sink.numbers == [0, 1, 2]
    assert sink.threads == {threading.current_thread().name}


def test_interrupted_hand_over(writer: Writer, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C that lands in the middle of handing a table over loses neither it nor what comes later."""
    writer.submit(table(0))
    assert writer.drain()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "_wake_up", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.submit(table(1))
    assert writer.drain()
    writer.submit(table(2))
    assert writer.drain()
    assert sink.numbers == [0, 1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_no_table_is_under_way_when_the_process_forks(
    writer: Writer, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that a sink takes is free in a child, however long a write holds it; the parent goes on writing."""
    taken = threading.Lock()

    def write(step: RecordedStep) -> None:
        with taken:
            sink.writing.set()
            threading.Event().wait(0.3)
        sink.steps.append(step)

    monkeypatch.setattr(sink, "write", write)
    writer.submit(table(0))
    assert sink.writing.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if taken.acquire(timeout=900) else 1)
    assert os.waitpid(child, 0)[1] == 0
    writer.submit(table(1))
    assert writer.drain()
    assert sink.numbers == [0, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_hanging_disk_does_not_keep_a_process_from_forking(
    writer: Writer, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork waits for the writer for a limited time."""
    monkeypatch.setattr(writer_module, "FORK_LIMIT", 0.1)
    sink.may_write.clear()
    writer.submit(table(0))
    assert sink.writing.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sink.numbers == []
    sink.may_write.set()
    assert writer.drain()
    assert sink.numbers == [0]


def test_time_in_which_the_process_is_stopped(writer: Writer, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is stopped for an hour and continued (docker pause, a scheduler) has not waited for an hour."""
    clock = itertools.count(0.0, 3600.0)
    monkeypatch.setattr(writer_module.time, "monotonic", lambda: next(clock))
    sink.may_write.clear()
    writer.submit(table(0))
    opener = threading.Timer(1.0, sink.may_write.set)
    opener.start()
    for step in range(1, 4):
        writer.submit(table(step))
    assert writer.drain()
    assert (sink.numbers, writer.dropped) == ([0, 1, 2, 3], 0)
