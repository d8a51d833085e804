"""Output that anything may have happened to: every command uses what it can, names the rest, and ends as it says it does."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from alert_steps import evaluator
from conftest import MSMON
from typer.testing import CliRunner

from msmon.alerts.entries import journal_of
from msmon.alerts.files import AnomalyFile
from msmon.alerts.stage import Alerts, JudgedSink
from msmon.errors import MsmonError
from msmon.offline.merge import merge
from msmon.record.table import Row
from msmon.sinks.base import RecordedStep
from msmon.sinks.csv import CsvSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SEEDS = int(os.environ.get("MSMON_TEST_SEEDS", "60"))
RUNS = ("Dec31_23-59-58-rank{}-aaaaaaaa", "Jan01_00-00-01-rank{}-bbbbbbbb")
COLUMNS = ("min", "max", "norm", "mean", "zeros", "nans", "shape", "dtype", "id")
STATISTICS = COLUMNS[:6]
KINDS = ("param_origin", "actv", "grad_unreduced", "grad_reduced", "exp_avg", "update")


def write_root(root: Path) -> None:
    """Two runs of two ranks, each with parts of its parameters, and an anomaly in the last step."""
    for number, name in enumerate(RUNS):
        for rank in range(2):
            directory = root / name.format(rank)
            directory.mkdir(parents=True)
            parameters = [
                {"name": f"w{place}", "shape": [2, 3], "dtype": "torch.float32", "whole_shape": [4, 3], "offset": [2 * rank, 0]}
                for place in range(2)
            ]  # fmt: skip
            report = {
                "started": f"202{number}-12-31T23:59:58+00:00",
                "rank": rank,
                "models": [{"parameters": parameters}],
            }
            rules = {
                "rules": [{"rule_name": "AnomalyNan"}, {"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}]
            }
            (directory / "run.json").write_text(json.dumps({**report, "config": {"alert": rules}}, indent=1))
            file = AnomalyFile(root, rank, directory.name[-8:], directory.name)
            alerts = Alerts(evaluator("AnomalyNan", rank=rank), file=file)
            sink = JudgedSink(CsvSink(directory, COLUMNS, 6, 2), list(STATISTICS), alerts)
            for step in range(4):
                rows = [
                    Row(kind, f"w{place}", 0, 0 if kind == "actv" else None, (2, 3), "torch.float32")
                    for kind in KINDS
                    for place in range(2)
                ]
                values = np.full((len(rows), len(STATISTICS)), 1.0 + step / 8)
                values[-1] = math.nan if step == 3 else 1
                values[:, -1] = np.isnan(values[:, 0])
                sink.write(RecordedStep("", step, rows, values.ravel(), 1, step == 2, 1024.0, complete=True))
            alerts.release()
            ((key, entry),) = list(json.loads(file.path.read_text()).items())[-1:]
            journal_of(file.path).write_text(json.dumps({f"{key}_2": entry}) + '\n{"torn')  # as a kill leaves it
    structure = {
        "0:": {"class": "Net", "training": True, "input": {"config": "tensor", "tensor": "size=(4, 3), dtype=torch.float32"}, "output": {"config": "tensor", "tensor": "size=(4, 2), dtype=torch.float32"}, "input_grad": {"config": "tensor"}, "output_grad": {"config": "tensor"}, "parameters": {}},
        "0:w": {"class": "Linear", "training": True, "parameters": {"weight": {"shape": [2, 3], "dtype": "torch.float32", "trainable": True}}},
    }  # fmt: skip
    (root / "module_struct/rank0").mkdir(parents=True)
    (root / "module_struct/rank0/module_struct.json").write_text(json.dumps(structure))


# What may happen to a file

TOKENS = [
    b"\0", b"\0" * 3000, b'"', b'""', b"\n", b"\r", b",", b",,,,,,,,,,,,", b"{", b"}", b"[", b"]", b":", b"\xff\xfe", b"\xef\xbb\xbf",
    "²".encode(), b"9" * 4400, b"-1", b"None", b"nan", b"inf", b"1e999", b"true", b"null", str(2**63).encode(), str(2**64).encode(),
    b"[" * 100_000, b'{"a":' * 50_000, b"x" * 140_000, b"\x1b[31m", "\u202e".encode(), b"\xed\xa0\x80", b"\\ud800", b"step", b"shape", b"[2, 3",
]  # fmt: skip
ODD: list[Any] = [
    None, True, -1, 0, 2**63, 2**70, 1e308, math.nan, math.inf, "", "²", "x" * 1000, "\x1b[31m\u202e\n", "\ud800", [], {}, [[]],
    [None], {"": None}, {"step": 1}, ["2", 3], "[2, 3]", "0001-01-01T00:00:00", "9999-12-31T23:59:59+00:00", "../../etc",
]  # fmt: skip


def cut(content: bytes, dice: random.Random) -> bytes:
    return content[: dice.randrange(len(content) + 1)]


def flip(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.randrange(1, 8)):
        if changed:
            changed[dice.randrange(len(changed))] = dice.randrange(256)
    return bytes(changed)


def insert(content: bytes, dice: random.Random) -> bytes:
    for _ in range(dice.randrange(1, 4)):
        begin = dice.randrange(len(content) + 1)
        content = content[:begin] + dice.choice(TOKENS) + content[min(begin + dice.randrange(12), len(content)) :]
    return content


def repeat(content: bytes, dice: random.Random) -> bytes:
    begin = dice.randrange(len(content) + 1)
    return content[:begin] + content[begin // 2 :] * dice.randrange(1, 4)


def encode(content: bytes, dice: random.Random) -> bytes:
    text = content.decode("utf-8", "replace")
    return text.encode(dice.choice(["utf-16", "utf-8-sig", "utf-32", "latin-1"]), "replace")


def exchange(content: bytes, dice: random.Random) -> bytes:
    """Another value somewhere in a JSON document, or another cell or header in a table."""
    try:
        document = json.loads(content)
    except ValueError:
        lines = [line.split(b",") for line in content.split(b"\n")]
        for _ in range(dice.randrange(1, 6)):
            cells = dice.choice(lines)
            cells[dice.randrange(len(cells))] = str(dice.choice(ODD)).encode("utf-8", "replace")
        return b"\n".join(b",".join(cells) for cells in lines)
    for _ in range(dice.randrange(1, 4)):
        node = document
        while isinstance(node, (dict, list)) and node:
            key = dice.choice(list(node)) if isinstance(node, dict) else dice.randrange(len(node))
            inner = node[key]
            if not isinstance(inner, (dict, list)) or not inner or dice.random() < 0.2:
                if dice.random() < 0.2 and isinstance(node, dict):
                    del node[key]
                else:
                    node[key] = dice.choice(ODD)
                break
            node = inner
    return json.dumps(document, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass")


CONTENTS: list[Callable[[bytes, random.Random], bytes]] = [cut, flip, insert, repeat, encode, exchange, exchange]


def replace(path: Path, dice: random.Random) -> None:
    """Something else in the place of the file."""
    what = dice.randrange(8)
    content = path.read_bytes()
    path.unlink()
    if what == 0:
        path.mkdir()
    elif what == 1:
        os.mkfifo(path)
    elif what == 2:
        path.symlink_to("nowhere")
    elif what == 3:
        path.symlink_to(path.name)
    elif what == 4:
        path.write_bytes(content)
        os.truncate(path, 20 * 2**30)
    elif what == 5:
        path.symlink_to("/dev/zero")
    elif what == 6:
        path.with_name(
            path.name.replace("_0", f"_{dice.choice(['²', '9' * 30, 'x'])}").replace(".csv", ".1.csv")
        ).write_bytes(content)


def damage(root: Path, dice: random.Random) -> None:
    for _ in range(dice.randrange(1, 5)):
        files = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size < 2**24)
        path = dice.choice(files)
        if dice.random() < 0.2:
            replace(path, dice)
        else:
            path.write_bytes(dice.choice(CONTENTS)(path.read_bytes(), dice))
    if dice.random() < 0.1:
        directory = dice.choice(sorted(path for path in root.iterdir() if "-rank" in path.name))
        shutil.rmtree(directory)
        directory.write_text("no directory any more")


def commands(root: Path) -> Iterator[list[str]]:
    structure = str(root / "module_struct/rank0/module_struct.json")
    yield ["analyse", str(root), "--exit-code"]
    yield ["analyse", str(root), "--all-runs", "--csv", "-s", "0-99999999999999"]
    yield ["analyse", str(root / RUNS[1].format(0)), "--json", "-k", "1"]
    yield ["merge", str(root), "-o", str(root / "whole")]
    yield ["merge", str(root), "--run", "aaaaaaaa", "--json"]
    yield ["csv2tb", str(root), "-o", str(root / "tb")]
    yield ["print-struct", "--read", structure]
    yield ["print-struct", "--read", structure, "--json"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good")
    write_root(root)
    return root


def hung(*_: object) -> None:
    raise AssertionError("a command hangs")


def check(done: Any, arguments: list[str]) -> None:
    """It ended with a code that is documented, and an error of ours if with any."""
    if isinstance(done.exception, MsmonError):
        assert done.exception.hint
        assert done.exception.exit_code in {1, 2}
    else:
        assert done.exception is None or isinstance(done.exception, SystemExit), arguments
        assert done.exit_code in {0, 1, 3}
    assert "\x1b" not in done.output
    assert "\u202e" not in done.output


def test_everything_is_read(good: Path, tmp_path: Path) -> None:
    """Of what nothing happened to, nothing is left out: otherwise this file would show little."""
    from msmon_cli.app import app

    shutil.copytree(good, tmp_path / "root")
    for arguments in commands(tmp_path / "root"):
        done = CliRunner().invoke(app, arguments)
        check(done, arguments)
        assert not isinstance(done.exception, MsmonError)
        assert "left out:" not in done.output


def test_what_a_killed_merge_has_left(good: Path, tmp_path: Path) -> None:
    """Merging again is not in its way, though the process has the same number, as the first one of a container has."""
    root = shutil.copytree(good, tmp_path / "root")
    merged = merge(root).directory
    files = {path: path.read_bytes() for path in merged.iterdir()}
    assert len(files) > 2
    for path in files:
        path.write_text("half")
        path.with_name(f".{path.name}.{os.getpid()}.tmp").write_text("half")
    merge(root)
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_damaged_output(good: Path, seed: int, tmp_path: Path) -> None:
    """No traceback, no hang, no control character on the terminal, whatever the files hold."""
    from msmon_cli.app import app

    dice = random.Random(seed)
    root = tmp_path / "root"
    shutil.copytree(good, root)
    damage(root, dice)
    signal.signal(signal.SIGALRM, hung)
    signal.alarm(100)
    try:
        for arguments in commands(root):
            check(CliRunner().invoke(app, arguments, env={"NO_COLOR": "1"}, catch_exceptions=True), arguments)
    finally:
        signal.alarm(0)


@pytest.mark.slow
def test_the_real_command(good: Path, tmp_path: Path) -> None:
    """The process ends with a documented code and without a traceback as well."""
    for seed in range(3):
        root = tmp_path / str(seed)
        shutil.copytree(good, root)
        damage(root, random.Random(1000 + seed))
        for arguments in list(commands(root))[:6:2]:
            done = subprocess.run([MSMON, *arguments], capture_output=True, text=True, timeout=900)
            assert done.returncode in {0, 1, 2, 3}
            assert "Traceback" not in done.stderr
