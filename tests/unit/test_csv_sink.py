"""CSV files: headers, cells, buckets, and what a failing or killed write leaves behind."""

from __future__ import annotations

import math
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from msmon.offline.reader import kinds, read_kind, read_steps
from msmon.record.table import Row
from msmon.sinks.base import RecordedStep
from msmon.sinks.csv import CsvSink, format_number, whole_records

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SIX = ["min", "max", "norm", "mean", "zeros", "nans"]


def row(
    name: str = "fc.weight",
    *,
    kind: str = "grad_reduced",
    stage: int = 0,
    micro: int | None = None,
    shape: tuple[int, ...] = (2, 3),
) -> Row:
    return Row(kind, name, stage, micro, shape, "torch.float32")


def recorded(step: int, rows: list[Row], numbers: Sequence[Sequence[float]], **changes: Any) -> RecordedStep:
    described: dict[str, Any] = {
        "model": "",
        "micro_steps": 1,
        "skipped": False,
        "grad_scale": math.nan,
        "complete": True,
    }
    flat = np.array([number for line in numbers for number in line], dtype=np.float64)
    return RecordedStep(step=step, rows=rows, numbers=flat, **{**described, **changes})


def sink(
    directory: Path, columns: Sequence[str] = ("norm", "shape", "dtype"), *, ndigits: int = 6, steps_per_file: int = 1
) -> CsvSink:
    return CsvSink(directory, columns, ndigits, steps_per_file)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("columns", "header", "cells"),
    [
        (("norm", "shape", "dtype"), "norm,shape,dtype", '3.0,"[2, 3]",torch.float32'),
        ((*SIX, "shape", "dtype"), "min,max,norm,mean,zeros,nans,shape,dtype", '1.0,2.0,3.0,4.0,5.0,6,"[2, 3]",torch.float32'),
        (("nans", "dtype", "id", "min", "shape"), "nans,dtype,id,min,shape", '6,torch.float32,0,1.0,"[2, 3]"'),
        (("shape", "dtype"), "shape,dtype", '"[2, 3]",torch.float32'),
    ],
)  # fmt: skip
def test_header_and_order(tmp_path: Path, columns: tuple[str, ...], header: str, cells: str) -> None:
    """P12: stage, name, step, then the columns in their order, for ops in any order."""
    values = dict(zip(SIX, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0), strict=True))
    sink(tmp_path, columns).write(recorded(7, [row()], [[values[name] for name in columns if name in values]]))
    assert (tmp_path / "grad_reduced_7-7.csv").read_text() == f"vpp_stage,name,step,{header}\n0,fc.weight,7,{cells}\n"


def test_micro_step_column(tmp_path: Path) -> None:
    """P14: only kinds whose rows have a micro-batch have the column."""
    rows = [row(kind="grad_unreduced", micro=0), row(kind="grad_unreduced", micro=1, stage=2), row()]
    sink(tmp_path).write(recorded(0, rows, [[1], [2], [3]]))
    assert (tmp_path / "grad_unreduced_0-0.csv").read_text().splitlines() == [
        "vpp_stage,name,step,micro_step,norm,shape,dtype",
        '0,fc.weight,0,0,1.0,"[2, 3]",torch.float32',
        '2,fc.weight,0,1,2.0,"[2, 3]",torch.float32',
    ]
    assert "micro_step" not in (tmp_path / "grad_reduced_0-0.csv").read_text()
    assert [found.micro_step for found in read_kind(tmp_path, "grad_unreduced")] == [0, 1]
    assert [found.micro_step for found in read_kind(tmp_path, "grad_reduced")] == [None]


def test_order_of_execution(tmp_path: Path) -> None:
    """``id`` is a row's place in the order of execution of its step, over all kinds; rows keep their order."""
    rows = [row("b"), row("a", kind="exp_avg"), row("a"), row("c", kind="exp_avg")]
    sink(tmp_path, ("id", "shape", "dtype")).write(recorded(0, rows, [[]] * 4))
    assert [(found.name, found["id"]) for found in read_kind(tmp_path, "grad_reduced")] == [("b", 0), ("a", 2)]
    assert [(found.name, found["id"]) for found in read_kind(tmp_path, "exp_avg")] == [("a", 1), ("c", 3)]
    assert kinds(tmp_path) == ["exp_avg", "grad_reduced"]


@pytest.mark.parametrize(
    ("value", "ndigits", "text"),
    [
        (203.39619999, 4, "203.3962"),  # P17
        (77.1125529, 6, "77.112553"),
        (1.0, 6, "1.0"),
        (0.0, 6, "0.0"),
        (-0.0, 6, "-0.0"),
        (1.6e-14, 6, "1.6e-14"),  # the original writes 0.0
        (1.23456789e-14, 6, "1.23457e-14"),
        (-1.23456789e-14, 6, "-1.23457e-14"),
        (4.9e-7, 6, "4.9e-07"),
        (5.1e-7, 6, "5.1e-07"),
        (5.57277e-07, 6, "5.57277e-07"),
        (1.525884e-05, 6, "1.52588e-05"),
        (0.001234562, 6, "0.00123456"),
        (0.09999999, 6, "0.1"),
        (0.1234567, 6, "0.123457"),
        (0.4, 0, "0.4"),
        (0.44, 0, "0.4"),
        (203.7, 0, "204.0"),
        (1e30, 6, "1e+30"),
        (5e-324, 6, "5e-324"),
        (1.23456789e-30, 20, "1.23456789e-30"),
        (1 / 3, 20, "0.3333333333333333"),
        (math.inf, 6, "inf"),
        (-math.inf, 6, "-inf"),
        (math.nan, 6, "nan"),
    ],
)
def test_numbers(value: float, ndigits: int, text: str) -> None:
    """So many decimals; a value that would print as 0 keeps that many significant digits; nan and inf as such."""
    assert format_number(value, ndigits) == text
    assert float(text) == pytest.approx(value, abs=10.0**-ndigits, nan_ok=True)


def test_cells_of_special_tensors(tmp_path: Path) -> None:
    """A tensor without elements has an empty cell where there is no value; nans is a whole number; 0-d has shape []."""
    rows = [row("empty", shape=(0, 4)), row("scalar", shape=()), row("bad", shape=(3,))]
    numbers = [
        [math.nan, math.nan, 0, math.nan, math.nan, 0],
        [1, 1, 1, 1, 0, 0],
        [math.nan, math.nan, math.nan, math.nan, 0, 2],
    ]
    sink(tmp_path, (*SIX, "shape", "dtype")).write(recorded(0, rows, numbers))
    assert (tmp_path / "grad_reduced_0-0.csv").read_text().splitlines()[1:] == [
        '0,empty,0,,,0.0,,,0,"[0, 4]",torch.float32',
        "0,scalar,0,1.0,1.0,1.0,1.0,0.0,0,[],torch.float32",
        "0,bad,0,nan,nan,nan,nan,0.0,2,[3],torch.float32",
    ]
    empty, _, bad = read_kind(tmp_path, "grad_reduced")
    assert "mean" not in empty.values
    with pytest.raises(KeyError):
        _ = empty["mean"]
    assert empty["norm"] == 0
    assert math.isnan(bad["mean"])
    assert bad.values["shape"] == "[3]"


def test_buckets(tmp_path: Path) -> None:
    """P4: three steps a file, seven steps: the name is the bucket, not the content."""
    target = sink(tmp_path, steps_per_file=3)
    for step in range(7):
        target.write(recorded(step, [row()], [[step]]))
    assert names(tmp_path) == ["grad_reduced_0-2.csv", "grad_reduced_3-5.csv", "grad_reduced_6-8.csv", "steps.csv"]
    assert [(found.step, found["norm"]) for found in read_kind(tmp_path, "grad_reduced")] == [(s, s) for s in range(7)]
    assert len((tmp_path / "grad_reduced_6-8.csv").read_text().splitlines()) == 2


def test_buckets_of_a_later_start(tmp_path: Path) -> None:
    """P7: a run that begins at step 10 begins with file 10; with three steps a file, in the bucket of step 10."""
    sink(tmp_path).write(recorded(10, [row()], [[1]]))
    sink(tmp_path, steps_per_file=3).write(recorded(10, [row()], [[1]]))
    assert names(tmp_path) == ["grad_reduced_10-10.csv", "grad_reduced_9-11.csv", "steps.csv"]


def test_files_are_read_by_step(tmp_path: Path) -> None:
    """Files are read in the order of steps, not of their names."""
    target = sink(tmp_path)
    for step in (9, 10, 100):
        target.write(recorded(step, [row()], [[step]]))
    assert [found.step for found in read_kind(tmp_path, "grad_reduced")] == [9, 10, 100]


def test_steps_file(tmp_path: Path) -> None:
    """A line a step: micro-batches, skipped, loss scale if any, and whether it came to its end."""
    target = sink(tmp_path)
    target.write(recorded(0, [row()], [[1]], micro_steps=4, grad_scale=65536.0, skipped=True))
    target.write(recorded(1, [row()], [[1]], model="Net", complete=False))
    assert read_steps(tmp_path) == [
        {"model": "", "step": "0", "micro_steps": "4", "skipped": "1", "grad_scale": "65536.0", "complete": "1"},
        {"model": "Net", "step": "1", "micro_steps": "1", "skipped": "0", "grad_scale": "", "complete": "0"},
    ]


def test_step_without_rows(tmp_path: Path) -> None:
    """A step in which nothing came up is still a step."""
    sink(tmp_path).write(recorded(0, [], []))
    assert names(tmp_path) == ["steps.csv"]
    assert len(read_steps(tmp_path)) == 1


def test_no_files_yet(tmp_path: Path) -> None:
    """A directory that holds no steps has none to read."""
    assert read_steps(tmp_path) == []
    assert read_kind(tmp_path, "grad_reduced") == []
    assert kinds(tmp_path) == []


def test_going_on_in_a_file(tmp_path: Path) -> None:
    """A file of the same columns is gone on with."""
    for step in range(3):
        sink(tmp_path, steps_per_file=10).write(recorded(step, [row()], [[step]]))
    assert names(tmp_path) == ["grad_reduced_0-9.csv", "steps.csv"]
    assert [found.step for found in read_kind(tmp_path, "grad_reduced")] == [0, 1, 2]
    assert (tmp_path / "grad_reduced_0-9.csv").read_text().count("vpp_stage") == 1


@pytest.mark.parametrize(
    "torn",
    ['0,fc.weight,1,2.0,"[2, ', '0,"a\nb', '0,"a ""quoted""\n', "0", "层".encode()[:2], '0,"' + "long" * 99],
)
def test_torn_line(tmp_path: Path, torn: str | bytes) -> None:
    """A line that a kill left unfinished is not read, and is cut off before the next is written."""
    path = tmp_path / "grad_reduced_0-9.csv"
    sink(tmp_path, steps_per_file=10).write(recorded(0, [row()], [[1]]))
    whole = path.read_bytes()
    path.write_bytes(whole + (torn if isinstance(torn, bytes) else torn.encode()))
    assert [found.step for found in read_kind(tmp_path, "grad_reduced")] == [0]
    sink(tmp_path, steps_per_file=10).write(recorded(2, [row()], [[1]]))
    assert path.read_bytes() == whole + whole.splitlines(keepends=True)[1].replace(b",0,1.0", b",2,1.0")


def test_file_of_other_columns(tmp_path: Path) -> None:
    """A file of other columns is left as it is; this one goes beside it, and both are read."""
    sink(tmp_path, ("norm", "shape", "dtype")).write(recorded(0, [row()], [[1]]))
    before = (tmp_path / "grad_reduced_0-0.csv").read_bytes()
    for _ in range(2):
        sink(tmp_path, ("max", "shape", "dtype")).write(recorded(0, [row()], [[2]]))
    sink(tmp_path, ("min", "shape", "dtype")).write(recorded(0, [row()], [[3]]))
    assert names(tmp_path) == ["grad_reduced_0-0.1.csv", "grad_reduced_0-0.2.csv", "grad_reduced_0-0.csv", "steps.csv"]
    assert (tmp_path / "grad_reduced_0-0.csv").read_bytes() == before
    assert len((tmp_path / "grad_reduced_0-0.1.csv").read_text().splitlines()) == 3
    assert len(read_kind(tmp_path, "grad_reduced")) == 4


def test_rows_with_features(tmp_path: Path) -> None:
    """Rows with numbers of their own have a file of their own columns; histograms have none; the others stay as they are."""
    features = row("core", kind="attention_hook", micro=1)._replace(features=("entropy", "softmax_max"))
    histogram = row(kind="update_histogram")._replace(features=("1", "2", "inf"))
    bare = row("core", kind="linear_hook")._replace(features=("sr",))
    rows = [row(), features, histogram, bare, row("fc.bias", shape=(0,))]
    sink(tmp_path, ("nans", "norm", "shape", "dtype")).write(
        recorded(3, rows, [[1, 2], [0.5, math.nan], [7, 8, 9], [1e-9], [0, 4]])
    )
    assert (tmp_path / "attention_hook_3-3.csv").read_text() == (
        "vpp_stage,name,step,micro_step,entropy,softmax_max\n0,core,3,1,0.5,nan\n"
    )
    assert (tmp_path / "linear_hook_3-3.csv").read_text() == "vpp_stage,name,step,sr\n0,core,3,1e-09\n"
    assert [(line.name, line["nans"], line["norm"]) for line in read_kind(tmp_path, "grad_reduced")] == [
        ("fc.weight", 1, 2),
        ("fc.bias", 0, 4),
    ]
    assert kinds(tmp_path) == ["attention_hook", "grad_reduced", "linear_hook"]


def test_numbers_that_do_not_fit(tmp_path: Path) -> None:
    """More or fewer numbers than the rows have: nothing is written under a wrong name."""
    for numbers in ([[1], [2], [3]], [[1]]):
        with pytest.raises(ValueError, match="numbers for rows"):
            sink(tmp_path).write(recorded(0, [row(), row("fc.bias")], numbers))
    assert names(tmp_path) == []


def test_empty_file_in_the_way(tmp_path: Path) -> None:
    """A file without a header is not taken for ours."""
    (tmp_path / "grad_reduced_0-0.csv").write_bytes(b"")
    sink(tmp_path).write(recorded(0, [row()], [[1]]))
    assert (tmp_path / "grad_reduced_0-0.1.csv").exists()
    assert len(read_kind(tmp_path, "grad_reduced")) == 1


def test_nothing_but_files(tmp_path: Path) -> None:
    """Nothing is left beside the files, and nothing is held open between steps."""
    target = sink(tmp_path)
    target.write(recorded(0, [row()], [[1]]))
    target.close()
    assert all(not name.startswith(".") for name in names(tmp_path))


@pytest.mark.parametrize(
    "content", [b"", b"abc", b'a,"b\n', b"a\n", b'a,"b\nc"\n', b'a\nb,"c\n"x', b'"a""\n""b"\nc', b"\n\n"]
)
def test_whole_records(content: bytes) -> None:
    """Of every beginning of a file, exactly the records whose last newline is there are whole."""
    ends, quoted = [0], False
    for position, byte in enumerate(content):
        quoted ^= byte == ord('"')
        if byte == ord("\n") and not quoted:
            ends.append(position + 1)
    for length in range(len(content) + 1):
        assert whole_records(content[:length]) == content[: max(end for end in ends if end <= length)]


# Failing writes


def test_directory_taken_away(tmp_path: Path) -> None:
    """A directory that is gone and cannot be made is an OSError, every time; when it can be, writing goes on."""
    directory = tmp_path / "out" / "run"
    target = sink(directory, steps_per_file=10)
    (tmp_path / "out").touch()
    for step in range(2):
        with pytest.raises(OSError, match="out"):
            target.write(recorded(step, [row()], [[1]]))
    (tmp_path / "out").unlink()
    target.write(recorded(2, [row()], [[1]]))
    assert [found.step for found in read_kind(directory, "grad_reduced")] == [2]
    assert [line["step"] for line in read_steps(directory)] == ["2"]


def test_one_kind_fails(tmp_path: Path) -> None:
    """When one kind cannot be written the others are, and the step is not on the list of steps."""
    (tmp_path / "exp_avg_0-0.csv").mkdir()
    rows = [row(kind="grad_unreduced"), row(kind="exp_avg"), row(kind="grad_reduced")]
    with pytest.raises(IsADirectoryError):
        sink(tmp_path).write(recorded(0, rows, [[1], [2], [3]]))
    assert [len(read_kind(tmp_path, kind)) for kind in ("grad_unreduced", "grad_reduced")] == [1, 1]
    assert read_steps(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("steps_per_file", [1, 1000])
def test_full_disk(small_disk: Path, steps_per_file: int) -> None:
    """A write that fails part-way is undone: every file ends in a whole line, earlier steps are whole, later ones follow.

    Both when a file grows and when each step has its own.
    """
    target = sink(small_disk, steps_per_file=steps_per_file)
    rows = [row(f"{'layer' * 8}.{number}.weight") for number in range(40)]
    kept, failed = [], 0
    for step in range(60):
        try:
            target.write(recorded(step, rows, [[number] for number in range(40)]))
            kept.append(step)
        except OSError as error:  # noqa: PERF203 - each step may fail
            assert error.errno == 28
            failed += 1
    assert kept
    assert failed
    assert all(path.read_bytes().endswith(b"\n") for path in small_disk.iterdir())
    assert not [name for name in names(small_disk) if name.startswith(".")]
    found = read_kind(small_disk, "grad_reduced")
    assert [found[start].step for start in range(0, len(found), 40)][: len(kept)] == kept
    assert len(found) % 40 == 0
    whole = [int(line["step"]) for line in read_steps(small_disk)]
    assert whole == kept
    if steps_per_file == 1:
        for path in list(small_disk.glob("grad_reduced_*"))[:3]:
            path.unlink()
        target.write(recorded(60, rows, [[number] for number in range(40)]))
        assert read_steps(small_disk)[-1]["step"] == "60"


@pytest.mark.parametrize("gone", ["steps.csv", "grad_reduced_0-9.csv", ""])
def test_what_was_deleted_is_begun_anew(tmp_path: Path, gone: str) -> None:
    """A file, or the whole directory, that the user deletes in mid-run comes back with the next step."""
    directory = tmp_path / "run"
    directory.mkdir()
    writer = sink(directory, steps_per_file=10)
    for step in range(3):
        writer.write(recorded(step, [row()], [[1.0]]))
        if step == 1:
            (directory / gone).unlink() if gone else shutil.rmtree(directory)
    steps = [int(line["step"]) for line in read_steps(directory)]
    rows = [found.step for found in read_kind(directory, "grad_reduced")]
    assert steps == ([0, 1, 2] if gone.startswith("grad") else [2])
    assert rows == ([0, 1, 2] if gone.startswith("steps") else [2])
