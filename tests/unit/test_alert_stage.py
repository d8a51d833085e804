"""What is done about anomalies: what is said, what is kept, what is started, and what a fault of a rule does not do."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from alert_steps import evaluator, row, step

from msmon import log
from msmon.alerts import command as command_module
from msmon.alerts import files
from msmon.alerts.command import INTERVAL, AlertCommand
from msmon.alerts.custom import load_custom_rules
from msmon.alerts.entries import iterate_entries
from msmon.alerts.evaluate import Evaluator, builtin_rules, custom_rule
from msmon.alerts.files import AnomalyFile, read_runs
from msmon.alerts.options import AlertOptions, OnAlert
from msmon.alerts.setup import make_alerts
from msmon.alerts.stage import Alerts, JudgedSink
from msmon.config.schema import AlertConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import FileIO

    from msmon.alerts.observations import Observations
    from msmon.sinks.base import RecordedStep

NAN = math.nan
NINE = ["rank", "step", "micro_step", "pp_stage", "vpp_stage", "call_id", "tag_name", "message", "group_mates"]


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_said", {})
    monkeypatch.setattr(log, "_speaker", "")


def bad(number: int, *names: str, good: int = 0) -> RecordedStep:
    """A step in which tensors of these names are NaN."""
    return step(number, {**{row(name): [NAN] for name in names}, **{row(f"good{i}"): [1.0] for i in range(good)}})


def anomaly_file(root: Path, run: str = "0123abcd") -> AnomalyFile:
    return AnomalyFile(root, 0, run, f"Nov29_15-32-03-rank0-{run}")


def read(root: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((root / "anomaly_detected" / "rank0" / "anomaly.json").read_text())
    return content


# What is said


def test_lines(capfd: pytest.CaptureFixture[str]) -> None:
    """A line a tensor, at most five a step, then how many more."""
    alerts = Alerts(evaluator("AnomalyNan"))
    alerts.judge(bad(3, "a", "b", good=2), ["norm"])
    assert capfd.readouterr().err.splitlines() == [
        "msmon: anomaly: AnomalyNan: norm nan in 0:a/rank0/grad_reduced at step 3",
        "msmon: anomaly: AnomalyNan: norm nan in 0:b/rank0/grad_reduced at step 3",
    ]
    alerts = Alerts(evaluator("AnomalyNan"))
    alerts.judge(bad(4, *"abcdefgh"), ["norm"])
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[-1] == "msmon: anomaly: and 3 more at step 4"
    assert (alerts.found, alerts.first and alerts.first.name) == (8, "a")


def test_what_goes_on_is_not_said_again(capfd: pytest.CaptureFixture[str]) -> None:
    """Of a thousand bad steps in a row only what is new, and a line now and then; after a good one it begins anew."""
    alerts = Alerts(evaluator("AnomalyNan"))
    for number in range(1000):
        alerts.judge(bad(number, "a", "b"), ["norm"])
    assert len(capfd.readouterr().err.splitlines()) == 2 + 9
    alerts.judge(bad(1000, "c", "a"), ["norm"])
    assert "0:c/" in capfd.readouterr().err
    alerts.judge(bad(1001, good=1), ["norm"])
    alerts.judge(bad(1002, "a"), ["norm"])
    assert "0:a/" in capfd.readouterr().err


def test_order_of_execution(capfd: pytest.CaptureFixture[str]) -> None:
    """What is named first came first: weights as found, forward, backward, optimizer, micro-batch by micro-batch."""
    rows = [
        row("w", "grad_reduced"),
        row("w", "exp_avg"),
        row("x.output", "actv", micro=1),
        row("x.output", "actv_grad", micro=0),
        row("x.output", "actv", micro=0),
        row("w", "param_origin"),
    ]
    findings = evaluator("AnomalyNan").judge(step(0, {one: [NAN] for one in rows}), ["norm"])
    assert [(a.kind, a.micro_step, a.call_id) for a in findings] == [
        ("param_origin", 0, 5),
        ("actv", 0, 4),
        ("actv_grad", 0, 3),
        ("actv", 1, 2),
        ("grad_reduced", 1, 0),
        ("exp_avg", 1, 1),
    ]


# anomaly.json


def test_file(tmp_path: Path) -> None:
    """P10, P45: the place, the key and the nine fields of an entry."""
    judge = evaluator("AnomalyNan", pp_stage=2, group_mates=[0, 4])
    Alerts(judge, file=anomaly_file(tmp_path)).judge(step(7, {row("ok"): [1.0], row("w", stage=1): [NAN]}), ["norm"])
    ((key, entry),) = read(tmp_path).items()
    assert key == "1:w/rank0/grad_reduced_step_7_call_1"
    assert list(entry) == NINE
    assert entry == {
        "rank": 0,
        "step": 7,
        "micro_step": 0,
        "pp_stage": 2,
        "vpp_stage": 1,
        "call_id": 1,
        "tag_name": "1:w/rank0/grad_reduced",
        "message": "AnomalyNan: norm nan in 1:w/rank0/grad_reduced at step 7",
        "group_mates": [0, 4],
    }


def test_file_is_there_without_anomalies(tmp_path: Path) -> None:
    """An empty object says that nothing was found."""
    Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path))
    assert read(tmp_path) == {}


def test_file_can_be_read_at_any_time(tmp_path: Path) -> None:
    """While anomalies come in, every look at the file sees whole entries, and never fewer than the look before."""
    alerts = Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path))
    done = threading.Event()
    seen: list[int] = []

    def look() -> None:
        while not done.is_set():
            seen.append(len(read(tmp_path)))

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(200):
        alerts.judge(bad(number, "a", "b"), ["norm"])
    done.set()
    reader.join()
    assert seen == sorted(seen)
    assert len(set(seen)) > 1
    assert len(read(tmp_path)) == 400


def test_a_restart_adds_to_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing of an earlier run is lost, also when the same step comes again; that the file had content is said."""
    first = Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path))
    first.judge(bad(1, "a"), ["norm"])
    first.release()
    Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path, "4567abcd")).judge(bad(1, "a", "b"), ["norm"])
    assert "has 1 anomalies of earlier runs" in capfd.readouterr().err
    key = "0:a/rank0/grad_reduced_step_1_call_0"
    assert list(read(tmp_path)) == [key, f"{key}_2", "0:b/rank0/grad_reduced_step_1_call_1"]
    runs = json.loads((tmp_path / "anomaly_detected" / "rank0" / "runs.json").read_text())
    assert {run: described["first"] for run, described in runs.items()} == {"0123abcd": 0, "4567abcd": 1}


def test_two_jobs_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """While one writes, the other has a file of its own; neither loses an entry; afterwards the place is free again."""
    one, other, third = (anomaly_file(tmp_path, run) for run in ("0123abcd", "4567abcd", "89ababcd"))
    both = [Alerts(evaluator("AnomalyNan"), file=file) for file in (one, other)]
    for number in range(3):
        for alerts in both:
            alerts.judge(bad(number, "a"), ["norm"])
    folder = tmp_path / "anomaly_detected" / "rank0"
    own = folder / "anomaly.Nov29_15-32-03-rank0-4567abcd.json"
    assert (
        f"another process writes anomalies to the same place: those of this one go to {own}" in capfd.readouterr().err
    )
    assert len(read(tmp_path)) == len(json.loads(own.read_text())) == 3
    both[0].release()
    Alerts(evaluator("AnomalyNan"), file=third).judge(bad(0, "b"), ["norm"])
    assert len(read(tmp_path)) == 4
    assert [path.name for path in sorted(folder.glob("*.json"))] == [own.name, "anomaly.json", "runs.json"]


def test_a_descriptor_of_the_script_is_left_alone(tmp_path: Path) -> None:
    """A script that closes all descriptors gets the number of ours for a file of its own: that one stays open."""
    file = anomaly_file(tmp_path)
    file.open()
    folder = file.path.parent
    (mine,) = (
        int(entry.name)
        for entry in Path("/proc/self/fd").iterdir()
        if entry.is_symlink() and entry.readlink() == folder / ".lock"
    )
    os.close(mine)
    script = os.open(tmp_path / "script", os.O_CREAT | os.O_WRONLY)
    assert script == mine
    file.release()
    os.write(script, b"still open")
    os.close(script)


def test_what_could_not_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A full disk is said once; anomalies of that time are kept until there is room, the end of the run at the latest."""
    alerts = Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path))
    alerts.judge(bad(0, "a"), ["norm"])
    with monkeypatch.context() as full:
        full.setattr(files, "write_whole", _no_space)
        for number in range(1, 4):
            alerts.judge(bad(number, "a"), ["norm"])
    assert len(read(tmp_path)) == 1
    assert capfd.readouterr().err.count("anomalies could not be written (No space left on device)") == 1
    alerts.flush()
    assert [entry["step"] for entry in read(tmp_path).values()] == [0, 1, 2, 3]


def test_a_file_that_cannot_be_read_at_first_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier runs found is never lost to an error of the disk: the file is taken over when it can be read again."""
    first = Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path))
    first.judge(bad(0, "a"), ["norm"])
    first.release()
    with monkeypatch.context() as broken:
        broken.setattr(files, "iterate_entries", _no_space)
        alerts = Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path, "4567abcd"))
        alerts.judge(bad(1, "b"), ["norm"])
    assert len(read(tmp_path)) == 1
    alerts.judge(bad(2, "b"), ["norm"])
    assert [entry["step"] for entry in read(tmp_path).values()] == [0, 1, 2]


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_damaged_file_is_put_aside(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What cannot be read is kept under another name, and said."""
    folder = tmp_path / "anomaly_detected" / "rank0"
    folder.mkdir(parents=True)
    (folder / "anomaly.json").write_text('{"half')
    Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path)).judge(bad(1, "a"), ["norm"])
    assert len(read(tmp_path)) == 1
    assert (folder / "anomaly.unreadable-0123abcd.json").read_text() == '{"half'
    assert "could not be read" in capfd.readouterr().err


def test_what_can_be_read_of_a_damaged_file_stays(tmp_path: Path) -> None:
    """The entries before the damage, and those of a journal; the damaged files are kept as they are, too."""
    alerts = Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path))
    for number in range(4):
        alerts.judge(bad(number, "a"), ["norm"])
    alerts.release()
    folder = tmp_path / "anomaly_detected" / "rank0"
    damaged = (folder / "anomaly.json").read_text()[:-40]
    (folder / "anomaly.json").write_text(damaged)
    (folder / "anomaly.journal.jsonl").write_text('{"late": {}}\nno JSON\n[]\n{"later": {}}\n')
    Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path, "4567abcd")).judge(bad(4, "b"), ["norm"])
    assert [entry.get("step") for entry in read(tmp_path).values()] == [0, 1, 2, None, None, 4]
    assert (folder / "anomaly.unreadable-4567abcd.json").read_text() == damaged
    assert "no JSON" in (folder / "anomaly.unreadable-4567abcd.jsonl").read_text()
    assert {run: about["first"] for run, about in read_runs(folder / "anomaly.json").items()} == {
        "0123abcd": 0,
        "4567abcd": 5,
    }


# Its journal


LARGE = 60
"""Anomalies that make a file which is not replaced at each step any more."""


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is not small for long."""
    monkeypatch.setattr(files, "SMALL", 4096)


def filled(root: Path, count: int = LARGE, run: str = "0123abcd") -> Alerts:
    """A run that has found so many anomalies, one a step."""
    alerts = Alerts(evaluator("AnomalyNan"), file=anomaly_file(root, run))
    for number in range(count):
        alerts.judge(bad(number, "a"), ["norm"])
    return alerts


def steps_found(root: Path) -> list[int]:
    """The steps of all entries, in their order, as every reader sees them."""
    return [entry["step"] for _, entry in iterate_entries(root / "anomaly_detected" / "rank0" / "anomaly.json")]


def written_by_this_thread() -> int:
    """Bytes that it has written in all."""
    counts = dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())
    return int(counts["wchar"])


def test_what_is_written_grows_with_the_anomalies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with their square: the second half of them costs little more than twice what the second quarter did."""
    monkeypatch.setattr(log, "say", lambda *_, **__: None)
    alerts = Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path))
    counts = {}
    for number in range(4001):
        if number in {1000, 2000, 4000}:
            counts[number] = written_by_this_thread()
        alerts.judge(bad(number, "a"), ["norm"])
    assert counts[4000] - counts[2000] < 2.5 * (counts[2000] - counts[1000])
    assert steps_found(tmp_path) == list(range(4001))


@pytest.mark.usefixtures("early")
def test_what_earlier_runs_found_is_not_written_at_each_step(tmp_path: Path) -> None:
    """Beside thousands of earlier entries a few new ones cost a few lines, and the file once at the end."""
    alerts = filled(tmp_path, 1000)
    alerts.flush()
    alerts.release()
    later = Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path, "4567abcd"))
    before = written_by_this_thread()
    for number in range(9):
        later.judge(bad(number, "b"), ["norm"])
    assert written_by_this_thread() - before < 9 * 1000
    assert steps_found(tmp_path) == [*range(1000), *range(9)]
    later.flush()
    assert len(read(tmp_path)) == 1009


@pytest.mark.usefixtures("early")
def test_journal(tmp_path: Path) -> None:
    """While a run goes on it has what the file lacks, an object a line; at its end the file has everything."""
    alerts = filled(tmp_path)
    folder = tmp_path / "anomaly_detected" / "rank0"
    kept = read(tmp_path)
    lines = [json.loads(line) for line in (folder / "anomaly.journal.jsonl").read_text().splitlines()]
    late = {key: entry for line in lines for key, entry in line.items()}
    assert len(lines) == len(late) > 0
    assert [entry["step"] for entry in (kept | late).values()] == list(range(LARGE))
    assert steps_found(tmp_path) == list(range(LARGE))
    alerts.flush()
    assert [path.name for path in sorted(folder.iterdir())] == [".lock", "anomaly.json", "runs.json"]
    assert read(tmp_path) == kept | late
    alerts.flush()
    alerts.judge(bad(LARGE, "a"), ["norm"])
    assert steps_found(tmp_path) == list(range(LARGE + 1))


@pytest.mark.usefixtures("early")
def test_readers_see_every_finished_step(tmp_path: Path) -> None:
    """Whoever reads file and journal while anomalies come in sees all that were kept before, in their order."""
    alerts = Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path))
    finished = 0
    done = threading.Event()
    looked = threading.Semaphore(0)
    looks = []

    def look() -> None:
        while not done.is_set():
            at_least = finished
            looks.append((at_least, steps_found(tmp_path)))
            looked.release()

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(400):
        alerts.judge(bad(number, "a"), ["norm"])
        finished = number + 1
        if finished % 40 == 0:
            assert looked.acquire(timeout=900)
    done.set()
    reader.join()
    assert len({at_least for at_least, _ in looks}) > 1
    for at_least, seen in looks:
        assert seen == list(range(len(seen)))
        assert len(seen) >= at_least


@pytest.mark.parametrize("left", ["as it was", "torn", "folded already"])
@pytest.mark.usefixtures("early")
def test_a_run_takes_over_the_journal_of_a_killed_one(left: str, tmp_path: Path) -> None:
    """All of it goes into the file, before what is new, once; a line that the kill has torn is none."""
    alerts = filled(tmp_path)
    alerts.release()
    folder = tmp_path / "anomaly_detected" / "rank0"
    journal = folder / "anomaly.journal.jsonl"
    text = journal.read_text()
    if left == "torn":
        journal.write_text(text[:-20])
    elif left == "folded already":  # killed after the file was replaced, and before the journal was removed
        alerts.flush()
        alerts.release()
        journal.write_text(text)
    there = LARGE - (left == "torn")
    assert steps_found(tmp_path) == list(range(there))
    later = Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path, "4567abcd"))
    assert not journal.exists()
    assert len(read(tmp_path)) == there
    later.judge(bad(7, "b"), ["norm"])
    later.flush()
    assert [entry["step"] for entry in read(tmp_path).values()] == [*range(there), 7]
    runs = read_runs(folder / "anomaly.json")
    assert {run: about["first"] for run, about in runs.items()} == {"0123abcd": 0, "4567abcd": there}


@pytest.mark.parametrize("hindrance", ["removed", "cut short", "grown", "a link", "a pipe"])
@pytest.mark.usefixtures("early")
def test_a_journal_that_is_not_as_it_was_left(hindrance: str, tmp_path: Path) -> None:
    """Nothing is added to it: the file is replaced."""
    alerts = filled(tmp_path)
    journal = tmp_path / "anomaly_detected" / "rank0" / "anomaly.journal.jsonl"
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(journal.stat().st_size))
    if hindrance == "cut short":
        os.truncate(journal, journal.stat().st_size - 10)
    elif hindrance == "grown":
        journal.write_text(journal.read_text() + "something")
    else:
        journal.unlink()
        if hindrance == "a link":
            journal.symlink_to(victim)
        elif hindrance == "a pipe":
            os.mkfifo(journal)
    alerts.judge(bad(LARGE, "a"), ["norm"])
    assert [entry["step"] for entry in read(tmp_path).values()] == list(range(LARGE + 1))
    assert not os.path.lexists(journal)
    assert not any(victim.read_bytes())


@pytest.mark.usefixtures("early")
def test_a_full_disk_in_the_middle_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written of it is taken back, and the whole line comes when there is room."""

    def full(file: FileIO, content: bytes) -> None:
        file.write(content[:20])
        _no_space()

    alerts = filled(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(files, "write_all", full)
        disk.setattr(files, "write_whole", _no_space)
        for number in range(LARGE, LARGE + 3):
            alerts.judge(bad(number, "a"), ["norm"])
    assert steps_found(tmp_path) == list(range(LARGE))
    alerts.judge(bad(LARGE + 3, "a"), ["norm"])
    assert steps_found(tmp_path) == list(range(LARGE + 4))


@pytest.mark.usefixtures("early")
def test_no_room_for_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anomalies go to the journal for as long as that has room, and readers see them."""
    alerts = filled(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(files, "write_whole", _no_space)
        for number in range(LARGE, 2 * LARGE):
            alerts.judge(bad(number, "a"), ["norm"])
        alerts.flush()
        assert steps_found(tmp_path) == list(range(2 * LARGE))
    alerts.flush()
    assert len(read(tmp_path)) == 2 * LARGE


def test_file_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The first anomalies are kept, the rest is counted."""
    monkeypatch.setattr(files, "LIMIT", 5)
    alerts = Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path))
    for number in range(4):
        alerts.judge(bad(number, "a", "b"), ["norm"])
    assert [entry["step"] for entry in read(tmp_path).values()] == [0, 0, 1, 1, 2]
    assert alerts.found == 8
    assert "further ones are counted" in capfd.readouterr().err


def test_a_place_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is said once; anomalies are still found and said."""
    (tmp_path / "anomaly_detected").write_text("in the way")
    alerts = Alerts(evaluator("AnomalyNan"), file=anomaly_file(tmp_path))
    for number in range(3):
        alerts.judge(bad(number, "a"), ["norm"])
    assert capfd.readouterr().err.count("could not be written") == 1
    assert alerts.found == 3


# The place is taken away while a run goes on


def take_away(root: Path, what: str) -> None:
    folder = root / "anomaly_detected"
    if what == "renamed":
        folder.rename(root / "elsewhere")
    elif (folder / what).is_dir():
        shutil.rmtree(folder / what)
    else:
        (folder / what).unlink()


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("count", [3, LARGE])
@pytest.mark.parametrize("what", ["", "rank0", "renamed", "rank0/anomaly.json", "rank0/.lock"])
def test_what_was_taken_away_comes_back(
    what: str, count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the next anomaly: all entries, those of earlier runs too, and where each run begins; and that is said once."""
    filled(tmp_path, 2).release()
    alerts = filled(tmp_path, count, "4567abcd")
    take_away(tmp_path, what)
    for number in range(count, count + 3):
        alerts.judge(bad(number, "b"), ["norm"])
    assert steps_found(tmp_path) == [0, 1, *range(count + 3)]
    runs = read_runs(tmp_path / "anomaly_detected" / "rank0" / "anomaly.json")
    assert {run: about["first"] for run, about in runs.items()} == {"0123abcd": 0, "4567abcd": 2}
    said = capfd.readouterr().err.count("anomaly.json was removed or renamed: it is written again")
    assert said == (what != "rank0/.lock")
    later = anomaly_file(tmp_path, "89ababcd")
    later.open()
    assert later.path.name != "anomaly.json", "the place is not kept for the run"
    for kept in (alerts, later):
        kept.release()


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("what", ["", "renamed"])
def test_what_was_taken_away_before_the_end(what: str, tmp_path: Path) -> None:
    """Without a new anomaly it does not come back: whoever cleans up at the end of a script has it clean."""
    alerts = filled(tmp_path)
    take_away(tmp_path, what)
    alerts.flush()
    assert not (tmp_path / "anomaly_detected").exists()


def test_another_job_takes_a_place_that_was_taken_away(tmp_path: Path) -> None:
    """Then both keep what they find, the first in a file of its own."""
    filled(tmp_path, 2).release()
    first = filled(tmp_path, 3, "4567abcd")
    take_away(tmp_path, "")
    filled(tmp_path, 4, "89ababcd")
    first.judge(bad(3, "a"), ["norm"])
    own = tmp_path / "anomaly_detected" / "rank0" / "anomaly.Nov29_15-32-03-rank0-4567abcd.json"
    assert [entry["step"] for entry in json.loads(own.read_text()).values()] == [0, 1, 2, 3]
    assert steps_found(tmp_path) == [0, 1, 2, 3]


# Faults, and users' own rules


class Sink:
    """Keeps steps, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.steps: list[RecordedStep] = []
        self.error = error
        self.closed = False

    def write(self, step: RecordedStep) -> None:
        if self.error is not None:
            raise self.error
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def test_a_fault_of_a_rule_loses_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Rows are kept, the rule is switched off and that is said once, the other rules go on."""

    def broken(seen: Observations) -> list[bool]:
        raise ZeroDivisionError("of mine")

    rules = [custom_rule("mine", broken), *builtin_rules(AlertConfig(rules=[{"rule_name": "AnomalyNan"}]).rules, 0)]  # type: ignore[list-item]
    alerts, sink = Alerts(Evaluator(rules)), Sink()
    judged = JudgedSink(sink, ["norm"], alerts)
    for number in range(3):
        judged.write(bad(number, "a"))
    judged.close()
    assert [one.step for one in sink.steps] == [0, 1, 2]
    assert alerts.found == 3
    assert sink.closed
    assert capfd.readouterr().err.count("rule mine switched off, training goes on: ZeroDivisionError: of mine") == 1


def test_a_step_that_is_not_kept_is_judged() -> None:
    """A full disk hides no anomaly, and the writer still learns of the disk."""
    alerts = Alerts(evaluator("AnomalyNan"))
    with pytest.raises(OSError, match="full"):
        JudgedSink(Sink(OSError("full")), ["norm"], alerts).write(bad(0, "a"))
    assert alerts.found == 1


def test_custom_rule() -> None:
    """It sees rows, columns and values, and answers by row, by row and column, or with nothing."""

    def by_row(seen: Observations) -> list[bool]:
        norms = seen.values[:, seen.columns.index("norm")]
        return [one.name.endswith("bias") and norm > 10 for one, norm in zip(seen.rows, norms, strict=True)]

    numbers = {row("a.bias"): [11.0, 0], row("a.weight"): [11.0, 0], row("b.bias"): [9.0, 0]}
    answers: list[tuple[Callable[[Observations], object], list[str]]] = [
        (by_row, ["a.bias norm max"]),
        (lambda seen: seen.values > 10, ["a.bias norm", "a.weight norm"]),
        (lambda seen: None, []),
    ]
    for rule, found in answers:
        anomalies = Evaluator([custom_rule("mine", rule)]).judge(step(0, numbers), ["norm", "max"])
        assert [" ".join([a.name, *(s.op for s in a.signals)]) for a in anomalies] == found


def test_custom_rules_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By module and function, and from entry points; one that cannot be had is said, and the others are used."""
    (tmp_path / "own_checks.py").write_text("class Rules:\n    @staticmethod\n    def large(seen): return None\n")
    information = tmp_path / "own_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[msmon.rules]\npackaged = own_checks:Rules.large\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rules = load_custom_rules(["own_checks:Rules.large", "own_checks:nothing", "nowhere:rule", "own_checks:__name__"])
    assert [rule.name for rule in rules] == ["packaged", "own_checks:Rules.large"]
    said = capfd.readouterr().err
    assert "rule own_checks:nothing left out: AttributeError" in said
    assert "rule nowhere:rule left out: ModuleNotFoundError" in said
    assert "rule own_checks:__name__ left out: TypeError: it is not callable" in said


# Putting it together


@pytest.mark.parametrize(
    ("dump", "on_alert", "kept"),
    [
        (False, None, False),
        (True, None, True),
        (True, OnAlert.LOG, False),
        (False, OnAlert.DUMP, True),
        (False, OnAlert.STOP, True),
    ],
)
def test_on_alert(tmp_path: Path, dump: bool, on_alert: OnAlert | None, kept: bool) -> None:
    """The option goes over the configuration; only stop stops."""
    stops: list[str] = []
    config = AlertConfig.model_validate({"rules": [{"rule_name": "AnomalyNan"}], "dump": dump})
    options = AlertOptions(on_alert=on_alert)
    alerts = make_alerts(config, options, rank=0, root=tmp_path, run="0123abcd", directory="d", stop=stops.append)
    assert alerts is not None
    alerts.judge(bad(0, "a"), ["norm"])
    assert (tmp_path / "anomaly_detected").exists() is kept
    assert bool(stops) is alerts.stops is (on_alert is OnAlert.STOP)


def test_no_rule_no_alerts(tmp_path: Path) -> None:
    """Without a rule for this rank there is nothing to do, and no file."""
    for rules in ([], [{"rule_name": "AnomalyNan", "ranks": [1]}]):
        config = AlertConfig.model_validate({"rules": rules, "dump": True})
        assert make_alerts(config, rank=0, root=tmp_path, run="0123abcd", directory="d") is None
    assert not list(tmp_path.iterdir())


def test_command(tmp_path: Path) -> None:
    """It gets the message as its last argument, no shell reads it, and it starts once a minute at most."""
    now = [0.0]
    out = tmp_path / "out of it"
    code = "import os, sys; open(sys.argv[1], 'a').write(sys.argv[2] + os.environ['MSMON'] + chr(10))"
    command = AlertCommand(f"'{sys.executable}' -c '{code.replace(chr(39), chr(34))}' '{out}'", clock=lambda: now[0])
    message = "norm nan; $(touch hacked) in 0:a at step 1"
    assert command.start(message)
    assert not command.start(message)
    wait_for(lambda: out.exists() and out.read_text().count("\n") == 1)
    now[0] = INTERVAL + 1
    assert command.start(message)
    wait_for(lambda: out.read_text() == f"{message}0\n" * 2)


def test_a_command_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """One that is not there, ends with an error, or does not end."""
    assert not AlertCommand("/nowhere/at all").start("x")
    assert "--on-alert-command: [Errno 2]" in capfd.readouterr().err
    monkeypatch.setattr(command_module, "RUN_LIMIT", 0.2)
    for command, what in (("sh -c 'exit 3'", "ended with code 3"), ("sh -c 'sleep 60'", "took over 0 s and was ended")):
        monkeypatch.setattr(log, "_said", {})
        assert AlertCommand(command).start("x")
        said: list[str] = []
        wait_for(lambda said=said: bool(said.append(capfd.readouterr().err) or "".join(said)))  # type: ignore[misc]  # of a lambda with a default
        assert f"--on-alert-command {what}" in "".join(said)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
