"""Run directories: names, several processes at once, resuming, and run.json."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from msmon import log
from msmon.errors import OutputError
from msmon.offline.reader import kinds, run_directories
from msmon.runtime.run_directory import (
    DirectoryName,
    make_run_directory,
    parse_directory_name,
    read_run_file,
    stamp,
    write_run_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

NOON = 1764417600.0  # 2025-11-29 12:00:00 UTC
RUN = "0123abcd"


@pytest.fixture
def local_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("local_zone")
def test_stamp() -> None:
    """P2: Mmmdd_HH-MM-SS; the clock is this machine's local one, whatever the zone."""
    assert stamp(NOON) == "Nov29_07-00-00"
    assert stamp(NOON + 40 * 86400 + 3601) == "Jan08_08-00-01"


@pytest.fixture
def said_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_said", {})
    monkeypatch.setattr(log, "_speaker", "")


def test_name(tmp_path: Path) -> None:
    """A directory is called after the time, the rank and the run, and is made with its root."""
    before = stamp(time.time())
    directory = make_run_directory(tmp_path / "a b" / "root", 3, RUN).path
    assert directory.is_dir()
    assert directory.parent == tmp_path / "a b" / "root"
    assert directory.name.endswith(f"-rank3-{RUN}")
    assert before <= directory.name[: len(before)] <= stamp(time.time())


def test_parse_name() -> None:
    """Only names of run directories are taken for such."""
    parsed = parse_directory_name("Nov29_20-18-27-rank12-9e1fc733")
    assert parsed == DirectoryName((10, "29_20-18-27"), 12, "9e1fc733")
    for name in (
        "Nov29_20-18-27",
        "Xyz29_20-18-27-rank0-9e1fc733",
        "nov29_20-18-27-rank0-9e1fc733",
        "Nov29_20-18-27-rank0-9e1fc733.tmp",
        "anomaly_detected",
    ):
        assert parse_directory_name(name) is None


def test_same_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted worker of the same run, within the same second, has a directory of its own."""
    monkeypatch.setattr(time, "time", lambda: NOON)
    made = [make_run_directory(tmp_path, 0, RUN).path for _ in range(3)]
    assert len(set(made)) == 3
    assert run_directories(tmp_path) == made
    assert make_run_directory(tmp_path, 1, RUN).path.name[:15] == made[0].name[:15]


def _make_many(root: str, rank: int, run: str, barrier: multiprocessing.synchronize.Barrier) -> None:
    barrier.wait()
    for _ in range(5):
        make_run_directory(Path(root), rank, run)


def test_eight_processes_at_once(tmp_path: Path) -> None:
    """B16: eight processes that start together on a root that is not there each have their own directories."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    root = tmp_path / "a" / "b"
    processes = [
        context.Process(target=_make_many, args=(str(root), number // 2, RUN, barrier)) for number in range(8)
    ]  # two at a time share a rank
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 8
    assert len(run_directories(root)) == 40
    assert [len(run_directories(root, rank)) for rank in range(4)] == [10] * 4


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    for name in (
        "Feb01_10-00-00-rank0-aaaaaaaa",
        "Feb01_10-00-05-rank0-bbbbbbbb",
        "Feb01_10-00-05-rank1-bbbbbbbb",
        "Mar01_09-00-00-rank0-cccccccc",
    ):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("rank", "first", "last", "found"),
    [
        (0, "Feb01_10-00-00", "Feb01_10-00-00", "Feb01_10-00-00-rank0-aaaaaaaa"),  # both ends count
        (0, "Feb01_10-00-00", "Feb01_10-00-05", "Feb01_10-00-05-rank0-bbbbbbbb"),  # the latest of several
        (1, "Feb01_10-00-00", "Feb01_10-00-05", "Feb01_10-00-05-rank1-bbbbbbbb"),
        (0, "Feb01_00-00-00", "Mar02_00-00-00", "Mar01_09-00-00-rank0-cccccccc"),  # months by the calendar
        (0, "Feb01_10-00-01", "Feb01_10-00-04", None),
        (2, "Jan01_00-00-00", "Dec31_23-59-59", None),
    ],
)
def test_resume(earlier: Path, rank: int, first: str, last: str, found: str | None) -> None:
    """``append_output``: go on in this rank's directory between two timestamps; without one, in a new one."""
    directory = make_run_directory(earlier, rank, RUN, resume=[first, last]).path
    assert directory.is_dir()
    if found is None:
        assert directory.name.endswith(RUN)
    else:
        assert directory.name == found


ALWAYS = ["Jan01_00-00-00", "Dec31_23-59-59"]


def test_one_process_in_a_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str], said_anew: None) -> None:
    """A directory that is written to is not gone on with, however it was made; once it is released, it is."""
    first = make_run_directory(tmp_path, 0, RUN)
    second = make_run_directory(tmp_path, 0, RUN, resume=ALWAYS)
    assert second.path != first.path
    assert not second.resumed
    assert f"another process writes to {first.path}, so a new directory is made" in capfd.readouterr().err
    second.release()
    third = make_run_directory(tmp_path, 0, RUN, resume=ALWAYS)
    assert third.path == second.path
    assert third.resumed
    assert capfd.readouterr().err == ""


def test_lock_of_a_parent(tmp_path: Path) -> None:
    """A forked child that lets go of its parent's directory takes the lock from nobody, and keeps it for nobody."""
    directory = make_run_directory(tmp_path, 0, RUN)
    (released, releases), (ends, end) = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(end)
        if os.read(ends, 1) == b"r":
            directory.release()
        os.write(releases, b".")
        os.read(ends, 1)
        os._exit(0)
    try:
        os.write(end, b"r")
        assert os.read(released, 1) == b"."
        assert make_run_directory(tmp_path, 0, RUN, resume=ALWAYS).path != directory.path
        if os.fork() == 0:  # one that does not let go
            os.close(end)
            os.read(ends, 1)
            os._exit(0)
        directory.release()
        stamped = directory.path.name.partition("-rank")[0]
        assert make_run_directory(tmp_path, 0, "cccccccc", resume=[stamped, stamped]).resumed
    finally:
        os.close(end)
        with contextlib.suppress(ChildProcessError):
            while os.wait():
                pass


@pytest.mark.parametrize("kind", ["pipe", "link", "of another"])
def test_strange_locks(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str], said_anew: None) -> None:
    """A lock that is a pipe, a link or cannot be opened is neither waited for nor followed: a new directory is made."""
    earlier = make_run_directory(tmp_path, 0, "aaaaaaaa")
    earlier.release()
    lock = earlier.path / ".lock"
    lock.unlink()
    if kind == "pipe":
        os.mkfifo(lock)
    elif kind == "link":
        (tmp_path / "victim").write_text("precious")
        lock.symlink_to(tmp_path / "victim")
    else:
        lock.mkdir()
    assert make_run_directory(tmp_path, 0, "bbbbbbbb", resume=ALWAYS).path != earlier.path
    assert "so a new directory is made" in capfd.readouterr().err


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no locks, nobody is assumed to be there."""
    earlier = make_run_directory(tmp_path, 0, RUN)

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert make_run_directory(tmp_path, 0, RUN, resume=ALWAYS).path == earlier.path
    monkeypatch.setattr("sys.platform", "win32")
    assert make_run_directory(tmp_path, 0, RUN, resume=ALWAYS).path == earlier.path


def test_nothing_to_resume(tmp_path: Path, capfd: pytest.CaptureFixture[str], said_anew: None) -> None:
    """``append_output`` that finds no directory says so."""
    make_run_directory(tmp_path, 1, RUN).release()
    assert not make_run_directory(tmp_path, 0, RUN, resume=ALWAYS).resumed
    assert "rank 0 has no directory from Jan01_00-00-00 to Dec31_23-59-59 here" in capfd.readouterr().err


def test_documents_are_restored(tmp_path: Path, capfd: pytest.CaptureFixture[str], said_anew: None) -> None:
    """A directory that is gone comes back with its documents, locked, and that is said once; what is there stays."""
    directory = make_run_directory(tmp_path / "root", 0, RUN)
    assert not directory.restore()  # nothing is in it yet
    directory.describe({"started": "1"})
    directory.add("stack_info.csv", "a,b\n")
    assert not directory.restore()
    for _ in range(2):
        shutil.rmtree(tmp_path / "root")
        assert directory.restore()
        assert read_run_file(directory.path) == {"started": "1"}
        assert (directory.path / "stack_info.csv").read_text() == "a,b\n"
        assert make_run_directory(tmp_path / "root", 0, RUN, resume=ALWAYS).path != directory.path
    assert capfd.readouterr().err.count("was removed or renamed") == 1
    directory.path.rename(tmp_path / "away")
    shutil.rmtree(tmp_path / "root")
    (tmp_path / "root").write_text("a file in its place")
    for _ in range(2):
        with pytest.raises(OSError, match="Not a directory"):
            directory.restore()


def test_order_of_runs(tmp_path: Path) -> None:
    """Runs stand in the order in which they were started, also over New Year; where run.json does not say, by name and date."""
    runs = {
        "Dec31_23-59-58-rank0-aaaaaaaa": "2024-12-31T23:59:50+00:00",
        "Jan01_00-10-00-rank0-bbbbbbbb": "2025-01-01T00:09:00+00:00",
        "Dec31_23-59-59-rank0-cccccccc": "2025-12-31T23:59:00+00:00",
        "Jan01_00-00-01-rank0-cccccccc": "2025-12-31T23:59:00+00:00",  # a second monitor of the same process
        "Jan01_00-00-02-rank0-dddddddd": "no time",
        "Jan02_00-00-00-rank0-eeeeeeee": None,
    }
    for name, started in reversed(runs.items()):
        (tmp_path / name).mkdir()
        if started is not None:
            (tmp_path / name / "run.json").write_text(json.dumps({"started": started}))
        os.utime(tmp_path / name, (1767400000, 1767400000))  # 2026-01-03
    assert [path.name for path in run_directories(tmp_path)] == list(runs)
    resumed = make_run_directory(tmp_path, 0, RUN, resume=ALWAYS)
    assert resumed.path.name == "Jan02_00-00-00-rank0-eeeeeeee"


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    """A file in the way, or a file system that cannot be written, is one clear error with a hint."""
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/no")):
        with pytest.raises(OutputError, match="cannot write below") as caught:
            make_run_directory(root, 0, RUN)
        assert "--output" in caught.value.hint
        assert str(root) in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "seteuid") or os.geteuid() != 0, reason="needs root to become somebody else")
def test_no_permission() -> None:
    """A root that may not be written, or not be read when resuming, is the same clear error."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        root = Path(folder, "root")
        root.mkdir(mode=0o300)
        os.seteuid(65534)
        try:
            with pytest.raises(OutputError, match="Permission denied"):
                make_run_directory(root, 0, RUN)
            with pytest.raises(OutputError, match="Permission denied"):
                make_run_directory(root, 0, RUN, resume=["Jan01_00-00-00", "Dec31_23-59-59"])
        finally:
            os.seteuid(0)


def test_directories_in_order(earlier: Path) -> None:
    """Run directories are found by rank or all, oldest first; files and other names are no run directories."""
    (earlier / "Feb01_09-00-00-rank0-dddddddd").write_text("a file")
    (earlier / "module_struct").mkdir()
    found = [path.name[:14] for path in run_directories(earlier, 0)]
    assert found == ["Feb01_10-00-00", "Feb01_10-00-05", "Mar01_09-00-00"]
    assert len(run_directories(earlier)) == 4
    assert run_directories(earlier / "nowhere") == []


def test_run_file(tmp_path: Path) -> None:
    """run.json is replaced whole, leaves nothing beside it, and holds any text, names that are no Unicode included."""
    write_run_file(tmp_path, {"started": "1", "command": ["python", "\udce4.py", "层"]})
    write_run_file(tmp_path, {"started": "1", "command": ["python", "\udce4.py", "层"], "models": [1]})
    assert read_run_file(tmp_path) == {"started": "1", "command": ["python", "\udce4.py", "层"], "models": [1]}
    assert "层" in (tmp_path / "run.json").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert kinds(tmp_path) == []


def test_run_file_of_a_resumed_run(tmp_path: Path) -> None:
    """What an earlier run said in the same directory is kept, without its models; one entry a run, oldest first."""
    for started in ("1", "2", "2", "3"):
        write_run_file(tmp_path, {"started": started, "config": {"eps": 1}, "models": ["big"]})
    content = read_run_file(tmp_path)
    assert content is not None
    assert content["started"] == "3"
    assert content["models"] == ["big"]
    assert content["resumed_from"] == [{"started": "1", "config": {"eps": 1}}, {"started": "2", "config": {"eps": 1}}]


def test_run_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write leaves the earlier content, and nothing half-written beside it."""
    write_run_file(tmp_path, {"started": "1"})

    def refuse(source: object, target: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        write_run_file(tmp_path, {"started": "2"})
    monkeypatch.undo()
    assert json.loads((tmp_path / "run.json").read_text()) == {"started": "1"}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("content", ["", "{", "[1]", '"x"'])
def test_run_file_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    """A run.json that is absent or broken is none, and does not keep a new one from being written."""
    assert read_run_file(tmp_path) is None
    (tmp_path / "run.json").write_text(content)
    assert read_run_file(tmp_path) is None
    write_run_file(tmp_path, {"started": "1"})
    assert read_run_file(tmp_path) == {"started": "1"}
