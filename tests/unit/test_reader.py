"""What is read of files that somebody or something has damaged, and what is said of the rest."""

from __future__ import annotations

import json
import os
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from msmon.errors import OutputError
from msmon.offline.analyse import analyse
from msmon.offline.csv2tb import convert
from msmon.offline.merge import merge
from msmon.offline.reader import CsvFile, StepIndex, Unreadable, kind_files, read_kind, read_steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HEAD = "vpp_stage,name,step,norm,shape,dtype\n"
GOOD = '0,fc,0,1.5,"[2, 3]",torch.float32\n'
LATER = '0,fc,1,2.5,"[2, 3]",torch.float32\n'


def read(path: Path, content: bytes) -> tuple[list[tuple[str, int, dict[str, float | str]]], list[str]]:
    path.write_bytes(content)
    unreadable = Unreadable()
    rows = [(row.name, row.step, row.values) for row in CsvFile(path, "kind", unreadable).rows()]
    return rows, [line.removeprefix(f"{path}: left out: ") for line in unreadable.lines()]


@pytest.mark.parametrize(
    ("content", "steps", "said"),
    [
        (HEAD + GOOD + LATER, [0, 1], []),
        ("\ufeff" + HEAD + GOOD, [0], []),
        ((HEAD + GOOD + LATER).replace("\n", "\r\n"), [0, 1], []),
        (HEAD + GOOD + LATER[:9], [0], ["an unfinished line (line 3)"]),
        (HEAD + '0,"fc' + "\n" + LATER, [1], ["an unfinished line (line 2)"]),
        (HEAD + GOOD + "1,2\n" + "0,a,b,c,d,e,f\n" + LATER, [0, 1], ["a line that does not fit the header (line 3 and 1 more)"]),
        (HEAD + GOOD.replace(",0,1.5", ",²,1.5") + LATER, [1], ["a line that does not fit the header (line 2)"]),
        (HEAD + GOOD.replace(",0,1.5", f",{2**63},1.5") + LATER, [1], ["a line that does not fit the header (line 2)"]),
        (HEAD + GOOD.replace(",0,1.5", f",{'1' * 4400},1.5") + LATER, [1], ["a line that does not fit the header (line 2)"]),
        (HEAD + GOOD.replace("0,fc", "zero,fc") + LATER, [1], ["a line that does not fit the header (line 2)"]),
        (HEAD + GOOD.replace("fc", "f" * 140_000) + LATER, [1], ["a line that is not CSV (field larger than field limit (131072)) (line 2)"]),
        (HEAD + GOOD.replace("fc", "f" * 1_500_000) + LATER, [1], ["a line that is not CSV (longer than 1,048,576 bytes) (line 2)"]),
        (HEAD + GOOD.replace("fc", "\0" * 1_500_000) + LATER, [1], ["a line that is not CSV (longer than 1,048,576 bytes) (line 2)"]),
        (HEAD + '"\n","' * 300_000 + "\n" + LATER, [1], None),
        ("time,loss\n1,2\n", [], ["the whole file, which has no column `step` and `name`"]),
        ("", [], ["the whole file, which has no column `step` and `name`"]),
    ],
    ids=lambda value: None if isinstance(value, (list, type(None))) else "",
)  # fmt: skip
def test_damaged_lines(content: str, steps: list[int], said: list[str] | None, tmp_path: Path) -> None:
    """Lines that are whole are read, wherever the damage is; the rest is named with its first line."""
    rows, found = read(tmp_path / "kind_0-9.csv", content.encode("utf-8", "surrogatepass"))
    assert [step for _, step, _ in rows] == steps
    assert said is None or found == said
    assert len(found) <= 1


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A line in another encoding costs that line, a file in another encoding the file."""
    path = tmp_path / "kind_0-9.csv"
    rows, said = read(path, HEAD.encode() + b"0,\xff,0,1,,\n" + LATER.encode())
    assert ([row[1] for row in rows], said) == ([1], ["a line that is not UTF-8 (line 2)"])
    rows, said = read(path, (HEAD + GOOD).encode("utf-16"))
    assert rows == []
    assert "a line that is not UTF-8 (line 1)" in said[0]


def test_damaged_cells(tmp_path: Path) -> None:
    """A cell that is no number, or no shape, costs that cell."""
    rows, said = read(
        tmp_path / "kind_0-9.csv",
        b'vpp_stage,name,step,norm,note,shape\n0,a,0,1,hm,[2]\n0,b,0,large,hm,[2; 3]\n0,c,0,None,,"(2,)"\n0,d,0,1e999,,',
    )
    assert [row[2] for row in rows] == [{"norm": 1.0, "shape": "[2]"}, {}, {"shape": "(2,)"}]
    assert said[0].split("; ") == [
        "a cell of `note` that is no number (line 2 and 1 more)",
        "a cell of `norm` that is no number (line 3)",
        "a shape that is none (line 3)",
        "an unfinished line (line 5)",
    ]


@pytest.mark.parametrize("column", ["param_name", "module_name"])
def test_older_monitors(column: str, tmp_path: Path) -> None:
    """Their column of names has another name, chunks may be missing, and a value that was not there is `None`."""
    rows, said = read(tmp_path / "kind_0-9.csv", f"{column},step,norm,max\n0:fc,3,1.5,None\n".encode())
    assert rows == [("0:fc", 3, {"norm": 1.5})]
    assert not said


def test_what_is_no_file(tmp_path: Path) -> None:
    """Directories, pipes, links to nowhere and into circles are named, and nothing waits for them."""
    (tmp_path / "folder_0-1.csv").mkdir()
    os.mkfifo(tmp_path / "pipe_0-1.csv")
    (tmp_path / "dangling_0-1.csv").symlink_to("nowhere")
    (tmp_path / "circle_0-1.csv").symlink_to("circle_0-1.csv")
    (tmp_path / "good_0-1.csv").write_text(HEAD + GOOD)
    (tmp_path / "steps.csv").symlink_to("/dev/zero")
    unreadable = Unreadable()
    kinds = [kind for kind, _ in kind_files(tmp_path)]
    assert kinds == ["circle", "dangling", "folder", "good", "pipe"]
    assert [len(read_kind(tmp_path, kind, unreadable)) for kind in kinds] == [0, 0, 0, 1, 0]
    assert read_steps(tmp_path, unreadable) == []
    assert [line.rpartition("/")[2] for line in unreadable.lines()] == [
        "circle_0-1.csv: left out: the whole file (Too many levels of symbolic links)",
        "dangling_0-1.csv: left out: the whole file (No such file or directory)",
        "folder_0-1.csv: left out: the whole file (Is a directory)",
        "pipe_0-1.csv: left out: the whole file (Not a regular file)",
        "steps.csv: left out: the whole file (Not a regular file)",
    ]


def test_a_file_of_holes(tmp_path: Path) -> None:
    """What a truncated file leaves, up to 20 GB of it, is jumped over; the rows behind are read."""
    path = tmp_path / "kind_0-9.csv"
    path.write_text(HEAD + GOOD)
    with path.open("r+b") as file:
        file.seek(20 * 2**30)
        file.write(b"\n" + LATER.encode())
        file.truncate(40 * 2**30)
    unreadable = Unreadable()
    assert [row.step for row in CsvFile(path, "kind", unreadable).rows()] == [0, 1]
    assert "longer than" in unreadable.lines()[0]


def test_a_file_that_grows_or_shrinks(tmp_path: Path) -> None:
    """What is added while a file is read is left for the next time; what is gone is missing."""
    path = tmp_path / "kind_0-9.csv"
    path.write_text(HEAD + GOOD)
    rows = []
    for row in CsvFile(path, "kind").rows():
        rows.append(row)
        with path.open("a") as file:
            file.write(LATER)
    assert len(rows) == 1
    index = StepIndex()
    index.add(CsvFile(path, "kind"))
    path.write_text(HEAD)
    assert [list(index.rows(step, block)) for step, blocks in index.steps() for block in blocks] == [[], []]
    index.close()


def test_many_quotes_without_an_end(tmp_path: Path) -> None:
    """A file of such lines is given up, not read again and again."""
    rows, (said,) = read(
        tmp_path / "kind_0-9.csv", (HEAD + ('0,"fc\n' + f"{'x' * 10_000}\n" * 14) * 101 + GOOD).encode()
    )
    assert rows == []
    assert "everything from line" in said


def write_parts(root: Path, tensors: int, rows: int) -> None:
    """Two ranks, each with half of every parameter."""
    for rank in range(2):
        directory = root / f"Nov29_10-00-00-rank{rank}-0123abcd"
        directory.mkdir(parents=True)
        names = [f"w{number}" for number in range(tensors)]
        parts = [{"name": name, "shape": [2, 3], "whole_shape": [4, 3], "offset": [2 * rank, 0]} for name in names]
        (directory / "run.json").write_text(json.dumps({"models": [{"parameters": parts}]}))
        lines = [f'0,{name},{step},1.5,"[2, 3]",f\n' for step in range(rows // tensors) for name in names]
        (directory / "grad_reduced_0-99999.csv").write_text(HEAD + "".join(lines))
        steps = [f",{step},1,0,,1\n" for step in range(rows // tensors)]
        (directory / "steps.csv").write_text("model,step,micro_steps,skipped,grad_scale,complete\n" + "".join(steps))


def test_rows_of_a_rank_are_not_written_over(tmp_path: Path) -> None:
    """`merge` into the output root itself would replace what the first rank recorded."""
    write_parts(tmp_path, 2, 8)
    path = tmp_path / "Nov29_10-00-00-rank0-0123abcd/grad_reduced_0-99999.csv"
    before = path.read_bytes()
    with pytest.raises(OutputError, match="holds the rows of a rank"):
        merge(tmp_path, tmp_path)
    assert path.read_bytes() == before
    assert merge(tmp_path).rows == {"grad_reduced": 8}


@pytest.mark.slow
@pytest.mark.parametrize("tensors", [1, 100])
@pytest.mark.parametrize("run", [analyse, merge, convert])
def test_memory_is_that_of_a_step(run: Callable[[Path], object], tensors: int, tmp_path: Path) -> None:
    """However many steps a file has, the commands hold the rows of one, and a few numbers for each of the others."""
    write_parts(tmp_path / "warm", tensors, 200)
    run(tmp_path / "warm")
    write_parts(tmp_path / "large", tensors, 1_000)
    tracemalloc.start()
    run(tmp_path / "large")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 700_000
