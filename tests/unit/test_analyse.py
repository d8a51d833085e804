"""The ranking of anomalies: its order, what it reads, and the command."""

from __future__ import annotations

import csv
import json
import math
import os
import pty
import random
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from alert_steps import evaluator, row, step
from conftest import MSMON
from typer.testing import CliRunner

from msmon.alerts.files import AnomalyFile
from msmon.alerts.stage import Alerts, JudgedSink
from msmon.config.schema import AlertConfig
from msmon.offline.analyse import NoAnomalyDataError, analyse
from msmon.sinks.csv import CsvSink

if TYPE_CHECKING:
    from pathlib import Path

NAN = math.nan


def entry(**changes: Any) -> tuple[str, dict[str, Any]]:
    described = {
        "rank": 0,
        "step": 1,
        "micro_step": 0,
        "pp_stage": 0,
        "vpp_stage": 0,
        "call_id": 0,
        "name": f"w{changes.get('pp_stage', '')}",
        "kind": "actv",
        **changes,
    }
    tag = f"{described['vpp_stage']}:{described.pop('name')}/rank{described['rank']}/{described.pop('kind')}"
    message = f"AnomalyNan: norm nan in {tag} at step {described['step']}"
    key = f"{tag}_step_{described['step']}_call_{described['call_id']}"
    return key, {**described, "tag_name": tag, "message": message, "group_mates": [0]}


def dump(root: Path, rank: int, *entries: tuple[str, dict[str, Any]]) -> None:
    folder = root / "anomaly_detected" / f"rank{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "anomaly.json").write_text(json.dumps(dict(entries)))


IN_ORDER = [
    entry(kind="param_origin", call_id=90),  # what the forward found
    entry(call_id=5),
    entry(call_id=6),
    entry(call_id=6, rank=1),
    entry(pp_stage=1),
    entry(vpp_stage=1),
    entry(vpp_stage=1, pp_stage=1),
    entry(kind="actv_grad", vpp_stage=1, pp_stage=1),
    entry(kind="grad_unreduced", vpp_stage=1),
    entry(kind="acc_grad", pp_stage=1),
    entry(kind="grad_reduced", call_id=1),
    entry(kind="post_grad", call_id=2),
    entry(kind="exp_avg", pp_stage=1),
    entry(kind="momentum_buffer"),
    entry(kind="param_updated", call_id=1),
    entry(micro_step=1),
    entry(micro_step=1, kind="actv_grad"),
    entry(step=2, kind="param_origin"),
    entry(step=10),
]
"""P52: step, micro-batch, forward, backward, optimizer; stages upwards, then downwards; order of execution."""


def test_order(tmp_path: Path) -> None:
    """However the entries lie in the files of the ranks, the ranking is the order in which they came to be."""
    shuffled = random.Random(0).sample(IN_ORDER, len(IN_ORDER))
    for rank in (0, 1):
        dump(tmp_path, rank, *(one for one in shuffled if one[1]["rank"] == rank))
    for directory in (tmp_path, tmp_path / "anomaly_detected"):
        analysis = analyse(directory, top=100)
        assert analysis.first == IN_ORDER
        assert (analysis.total, analysis.by_rank, analysis.source) == (19, {0: 18, 1: 1}, "anomaly.json")
    assert analyse(tmp_path, top=3).first == IN_ORDER[:3]
    assert [one["step"] for _, one in analyse(tmp_path, steps=[2, 10]).first] == [2, 10]


def test_nothing_there(tmp_path: Path) -> None:
    """A directory without any output is an error with a hint."""
    for directory in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NoAnomalyDataError) as caught:
            analyse(directory)
        assert caught.value.hint


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    """A damaged file, and entries that are none, are named; the rest is ranked."""
    dump(tmp_path, 0, entry(), ("x", {"step": 1}), ("y", {**entry()[1], "step": None}))
    dump(tmp_path, 1)
    (tmp_path / "anomaly_detected" / "rank1" / "anomaly.json").write_text('{"half')
    dump(tmp_path, 2, entry(rank=2))
    analysis = analyse(tmp_path)
    assert analysis.total == 2
    assert [path.parent.name for path in analysis.unreadable] == ["rank0", "rank1"]


def test_damaged_files_hide_nothing(tmp_path: Path) -> None:
    """Where no file of the ranks can be read, the rows are judged; with neither, no anomaly is not said to be health."""
    record(tmp_path, "Nov28_10-00-00", "aaaaaaaa", 3, dumped=True)
    damaged = tmp_path / "anomaly_detected" / "rank0" / "anomaly.json"
    damaged.write_text('{"half')
    analysis = analyse(tmp_path)
    assert (analysis.source, analysis.total, analysis.unreadable) == ("csv", 1, [damaged])
    (directory,) = tmp_path.glob("Nov*")
    shutil.rmtree(directory)
    done = run(str(tmp_path), "--exit-code")
    assert done.exit_code == 1
    assert done.stdout == "no anomalies in what could be read\n"
    assert f"{damaged}: left out: everything after 0 entries (no JSON" in done.stderr


def test_progress(tmp_path: Path) -> None:
    """It is told after every file."""
    for rank in range(3):
        dump(tmp_path, rank, entry(rank=rank))
    told: list[tuple[int, int]] = []
    analyse(tmp_path, progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def record(root: Path, stamp: str, run: str, bad_step: int, *, dumped: bool, rank: int = 0) -> None:
    """A run of five steps that goes wrong at one of them."""
    directory = root / f"{stamp}-rank{rank}-{run}"
    directory.mkdir(parents=True)
    alerts = Alerts(
        evaluator("AnomalyNan", rank=rank), file=AnomalyFile(root, rank, run, directory.name) if dumped else None
    )
    sink = JudgedSink(CsvSink(directory, ("norm", "nans", "shape", "dtype"), 6, 2), ["norm", "nans"], alerts)
    for number in range(5):
        value = [NAN, 2.0] if number == bad_step else [1.0, 0.0]
        rows = {row("w"): value, row("w", "param_origin"): [1.0, 0.0], row("empty", shape=(0,)): [0.0, 0.0]}
        sink.write(step(number, rows))
    alerts.release()


def first_steps(root: Path, **options: Any) -> list[int]:
    return [one["step"] for _, one in analyse(root, **options).first]


@pytest.mark.parametrize("dumped", [True, False])
def test_the_latest_run(tmp_path: Path, dumped: bool) -> None:
    """Of several runs in one place the latest is ranked; the others when asked for."""
    record(tmp_path, "Nov28_10-00-00", "aaaaaaaa", 1, dumped=dumped)
    record(tmp_path, "Nov29_10-00-00", "bbbbbbbb", 3, dumped=dumped)
    record(tmp_path, "Nov29_10-00-00", "bbbbbbbb", 2, dumped=dumped, rank=1)
    assert first_steps(tmp_path) == [2, 3]
    assert analyse(tmp_path).run == "bbbbbbbb"
    assert analyse(tmp_path).left_out == (1 if dumped else 0)
    assert first_steps(tmp_path, all_runs=True) == [1, 2, 3]


def test_a_latest_run_without_anomalies(tmp_path: Path) -> None:
    """What an earlier run found does not pass for a finding of the latest."""
    record(tmp_path, "Nov28_10-00-00", "aaaaaaaa", 1, dumped=True)
    record(tmp_path, "Nov29_10-00-00", "bbbbbbbb", 99, dumped=True)
    assert (analyse(tmp_path).total, analyse(tmp_path).left_out) == (0, 1)


def test_a_clock_that_went_back(tmp_path: Path) -> None:
    """The run that was added to the files last is the latest, though the name of its directory says otherwise."""
    for rank in (0, 1):
        record(tmp_path, "Nov29_10-00-00", "aaaaaaaa", 1, dumped=True, rank=rank)
    record(tmp_path, "Nov28_10-00-00", "bbbbbbbb", 3, dumped=True)
    assert (analyse(tmp_path).run, first_steps(tmp_path)) == ("bbbbbbbb", [3])


def test_two_jobs_at_once(tmp_path: Path) -> None:
    """Each has files of its own in the same place: the one that began last is ranked, or both."""
    root = tmp_path / "anomaly_detected" / "rank0"
    lock = AnomalyFile(tmp_path, 0, "aaaaaaaa", "Nov29_10-00-00-rank0-aaaaaaaa")
    lock.open()
    record(tmp_path, "Nov29_10-00-01", "bbbbbbbb", 2, dumped=True)
    lock.add(evaluator("AnomalyNan").judge(step(4, {row("w"): [NAN]}), ["norm"]))
    lock.release()
    assert len(list(root.glob("anomaly*.json"))) == 2
    assert (analyse(tmp_path).run, first_steps(tmp_path)) == ("bbbbbbbb", [2])
    assert analyse(tmp_path).left_out == 1
    assert first_steps(tmp_path, all_runs=True) == [2, 4]


def test_csv_gives_what_the_run_would_have_said(tmp_path: Path) -> None:
    """Rules applied afterwards find the same tensors, statistics and steps; one directory alone can be named."""
    record(tmp_path / "said", "Nov28_10-00-00", "aaaaaaaa", 3, dumped=True)
    record(tmp_path / "later", "Nov28_10-00-00", "aaaaaaaa", 3, dumped=False)
    said, later = (analyse(tmp_path / name) for name in ("said", "later"))
    assert (said.source, later.source) == ("anomaly.json", "csv")
    assert [one["message"] for _, one in later.first] == [one["message"] for _, one in said.first]
    assert said.first[0][1]["message"] == "AnomalyNan: norm nan, nans 2 in 0:w/rank0/grad_reduced at step 3"
    (directory,) = (tmp_path / "later").iterdir()
    assert analyse(directory).first == later.first


def test_other_rules_afterwards(tmp_path: Path) -> None:
    """Rules that are given are applied to the rows, whatever the run found."""
    record(tmp_path, "Nov28_10-00-00", "aaaaaaaa", 3, dumped=True)
    rules = AlertConfig.model_validate({"rules": [{"rule_name": "AnomalyNan", "args": {"threshold": 0.5}}]}).rules
    analysis = analyse(tmp_path, rules=rules, top=100)
    assert analysis.source == "csv"
    assert analysis.total == 10


# The command


def run(*arguments: str, **environment: str) -> Any:
    from msmon_cli.app import app

    return CliRunner().invoke(app, ["analyse", *arguments], env={"COLUMNS": "120", "NO_COLOR": "1", **environment})


def test_command(tmp_path: Path) -> None:
    """A table on stdout, the rest on stderr, the result beside the files of the ranks; exit code on request."""
    record(tmp_path, "Nov28_10-00-00", "aaaaaaaa", 3, dumped=True)
    done = run(str(tmp_path))
    assert done.exit_code == 0
    first, header, line = done.stdout.splitlines()
    assert first == "1 anomaly on 1 rank:"
    assert header.split() == ["#", "step", "micro", "rank", "kind", "tensor", "finding"]
    assert line.split(maxsplit=6) == ["1", "3", "0", "0", "grad_reduced", "0:w", "AnomalyNan: norm nan, nans 2"]
    assert "wrote" in done.stderr
    result = tmp_path / "anomaly_detected" / "anomaly_analyse.json"
    assert json.loads(result.read_text()) == dict(analyse(tmp_path).first)
    assert "replaced" in run(str(tmp_path)).stderr
    assert run(str(tmp_path), "--exit-code").exit_code == 3
    assert run(str(tmp_path), "--exit-code", "-s", "[4]").exit_code == 0


LONG_NAME = "transformer.encoder.blocks.10.attention.projection.with_a_long_name.weight"


def dump_names(root: Path) -> list[str]:
    """Names that are long, and that do something to a terminal."""
    names = [LONG_NAME, "\x1b[31mred\u202e", "two\nlines[bold]", "w"]
    dump(root, 0, *(entry(step=number, name=name) for number, name in enumerate(names)))
    return [f"0:{name}" for name in (LONG_NAME, r"\x1b[31mred\u202e", r"two\nlines[bold]", "w")]


@pytest.mark.parametrize("columns", ["20", "80", "200"])
def test_a_line_an_anomaly(columns: str, tmp_path: Path) -> None:
    """For `grep`, whatever COLUMNS says: nothing cut, nothing wrapped, nothing that a terminal would act on."""
    shown = dump_names(tmp_path)
    done = run(str(tmp_path), COLUMNS=columns)
    found, header, *lines = done.stdout.splitlines()
    assert found == "4 anomalies on 1 rank:"
    assert [line.split(maxsplit=6)[5:] for line in lines] == [[name, "AnomalyNan: norm nan"] for name in shown]
    assert {line.index("AnomalyNan") for line in lines} == {header.index("finding")}


def test_a_narrow_terminal(tmp_path: Path) -> None:
    """There, what was found stands below the tensor; names are whole."""
    shown = dump_names(tmp_path)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"}
    with os.fdopen(theirs, "wb") as terminal:
        subprocess.run([MSMON, "analyse", str(tmp_path)], stdout=terminal, stderr=subprocess.DEVNULL, env=environment)
    lines = os.read(ours, 100_000).decode().splitlines()
    os.close(ours)
    assert [line.split()[-1] for line in lines[2::2]] == shown
    assert {line.strip() for line in lines[3::2]} == {"AnomalyNan: norm nan"}
    assert max(map(len, lines)) <= 110


def test_as_csv(tmp_path: Path) -> None:
    """The same rows, a header, and nothing else on stdout."""
    shown = dump_names(tmp_path)
    lines = list(csv.DictReader(run(str(tmp_path), "--csv").stdout.splitlines()))
    assert [line["tensor"] for line in lines] == shown
    assert lines[1] == {
        "number": "2", "step": "1", "micro_step": "0", "rank": "0", "kind": "actv", "tensor": shown[1], "finding": "AnomalyNan: norm nan",
    }  # fmt: skip
    assert run(str(tmp_path), "--csv", "--json").exit_code == 2


def test_json_holds_what_a_terminal_would_act_on(tmp_path: Path) -> None:
    """As escapes of JSON: names come back as they were."""
    dump_names(tmp_path)
    printed = run(str(tmp_path), "--json").stdout
    assert "\x1b" not in printed
    assert "\u202e" not in printed
    assert json.loads(printed)["anomalies"][1]["tag_name"] == "0:\x1b[31mred\u202e/rank0/actv"


def test_damaged_entries(tmp_path: Path) -> None:
    """Those before a damaged place are ranked; an entry without what all have is named."""
    key, whole = entry()
    path = tmp_path / "anomaly_detected/rank0/anomaly.json"
    wrong = [{**whole, "message": None}, {**whole, "step": True}, {**whole, "rank": "0"}, [], None]
    dump(tmp_path, 0, (key, whole), *((f"x{number}", one) for number, one in enumerate(wrong)))  # type: ignore[arg-type]
    analysis = analyse(tmp_path)
    assert (analysis.total, analysis.damaged) == (1, True)
    assert analysis.faults == [f"{path}: left out: an entry that is no anomaly (entry 2 and 4 more)"]
    for rest in ('"half', "[" * 100_000, f'"a": {"9" * 5000}', '"a": 1 "b"', "\0" * 1000):
        path.write_text(f"{{{json.dumps(key)}: {json.dumps(whole)},\n{rest}")
        analysis = analyse(tmp_path)
        assert [one for one, _ in analysis.first] == [key]
        assert analysis.faults[0].startswith(f"{path}: left out: ")
        assert "everything after " in analysis.faults[0]


def test_command_as_json(tmp_path: Path) -> None:
    """One document, which names everything that the table shows."""
    record(tmp_path, "Nov28_10-00-00", "aaaaaaaa", 3, dumped=False)
    output = tmp_path / "elsewhere.json"
    done = run(str(tmp_path), "--json", "-o", str(output), "-k", "1", "-s", "0-3")
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert (document["source"], document["total"], document["written_to"]) == ("csv", 1, str(output))
    assert document["anomalies"][0]["tag_name"] == "0:w/rank0/grad_reduced"
    assert output.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-k", "0"], "-k"),
        (["-s", "one"], "no step"),
        (["-s", "1-"], "no step"),
        (["-s", "²"], "no step"),
        (["-s", "1-" + "9" * 4400], "no step"),
        (["-c", "absent.json"], "cannot read"),
    ],
)
def test_wrong_options(tmp_path: Path, arguments: list[str], said: str) -> None:
    """P53: each is a usage error that says what is wrong."""
    record(tmp_path, "Nov28_10-00-00", "aaaaaaaa", 3, dumped=True)
    done = run(str(tmp_path), *arguments)
    assert done.exit_code != 0
    assert said in done.output + str(done.exception)


def test_runs_that_are_left_out_are_named(tmp_path: Path) -> None:
    """The latest run is the one that was started last, also over New Year; which others there are is said."""
    for stamp, name, started in (
        ("Dec31_23-00-00", "aaaaaaaa", "2025-12-31T23:00:00+00:00"),
        ("Jan01_01-00-00", "bbbbbbbb", "2026-01-01T01:00:00+00:00"),
    ):
        record(tmp_path, stamp, name, 1, dumped=False)
        (tmp_path / f"{stamp}-rank0-{name}" / "run.json").write_text(json.dumps({"started": started}))
    shown = run(str(tmp_path))
    assert "ranked is the latest run, bbbbbbbb; --all-runs ranks these too: aaaaaaaa" in shown.output
    assert "ranked is the latest run" not in run(str(tmp_path), "--all-runs").output


def test_merge_names_the_runs_that_it_leaves_out(tmp_path: Path) -> None:
    """Merged is the run that was started last."""
    from msmon_cli.app import app

    parameter = {"name": "w", "shape": [2], "whole_shape": [2], "flat_offset": 0}
    for stamp, name, started in (
        ("Dec31_23-00-00", "aaaaaaaa", "2025-12-31T23:00:00+00:00"),
        ("Jan01_01-00-00", "bbbbbbbb", "2026-01-01T01:00:00+00:00"),
    ):
        directory = tmp_path / f"{stamp}-rank0-{name}"
        directory.mkdir()
        (directory / "grad_reduced_0-0.csv").write_text("vpp_stage,name,step,norm\n0,w,0,1.0\n")
        report = {"started": started, "models": [{"parameters": [parameter]}]}
        (directory / "run.json").write_text(json.dumps(report))
    shown = CliRunner().invoke(app, ["merge", str(tmp_path)], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert shown.exit_code == 0, shown.output
    assert "merged is the latest run, bbbbbbbb; --run merges another: aaaaaaaa" in shown.output
