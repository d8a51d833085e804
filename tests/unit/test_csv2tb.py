"""CSV files as event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import pytest

from msmon.errors import ArgumentError, MissingExtraError, NoRecordingError, OutputError
from msmon.offline.csv2tb import Conversion, convert
from msmon.sinks import tensorboard

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("tensorboard")

FIRST, LATER = "Nov29_10-00-00-rank0-0123abcd", "Nov29_11-00-00-rank0-4567abcd"
HEAD = "vpp_stage,name,step,norm,max,shape,dtype\n"


def line(step: int, norm: object, name: str = "fc", stage: int = 0) -> str:
    return f'{stage},{name},{step},{norm},1.0,"[2, 3]",torch.float32\n'


def write(directory: Path, name: str, *lines: str, head: str = HEAD) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(head + "".join(lines), newline="")
    return path


def accumulated(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def series(done: Conversion, tag: str, run: str = "rank0/grad_reduced") -> dict[int, float]:
    events = accumulated(done.output / run).Scalars(tag)
    steps = [event.step for event in events]
    assert steps == sorted(set(steps))
    return {event.step: event.value for event in events}


def test_tags_and_values(tmp_path: Path) -> None:
    """A rank and kind is a run of TensorBoard; chunks and micro-batches are in the tag; text and empty cells are left out."""
    write(
        tmp_path / FIRST,
        "grad_reduced_0-1.csv",
        line(0, 2.5),
        line(0, 3, stage=1),
        line(1, ""),
        line(1, "1e-12", stage=1),
    )
    micro = "vpp_stage,name,step,micro_step,norm\n"
    write(tmp_path / FIRST, "grad_unreduced_0-0.csv", "0,fc,0,0,1\n", "0,fc,0,1,2\n", head=micro)
    done = convert(tmp_path)
    assert done.output.parent == tmp_path
    assert done.output.name.endswith("-csv2tensorboard_by_step")
    assert series(done, "vp0:fc/norm") == {0: 2.5}
    assert series(done, "vp0:fc/max") == {0: 1, 1: 1}
    assert series(done, "vp1:fc/norm") == {0: 3, 1: pytest.approx(1e-12)}
    assert series(done, "vp0:fc:micro1/norm", "rank0/grad_unreduced") == {0: 2}
    assert set(accumulated(done.output / "rank0/grad_reduced").Tags()["scalars"]) == {
        *(f"vp{stage}:fc/{op}" for stage in (0, 1) for op in ("norm", "max")), "nonfinite/in_step", "nonfinite/so_far",
    }  # fmt: skip
    assert [(one.kind, one.steps, one.values) for one in done.series] == [
        ("grad_reduced", 2, 7),
        ("grad_unreduced", 1, 2),
    ]


def test_wall_time(tmp_path: Path) -> None:
    """An event carries the time at which its file was written."""
    path = write(tmp_path / FIRST, "grad_reduced_0-0.csv", line(0, 1))
    os.utime(path, (1e9, 1e9))
    assert accumulated(convert(tmp_path).output / "rank0/grad_reduced").Scalars("vp0:fc/norm")[0].wall_time == 1e9


def test_not_finite(tmp_path: Path) -> None:
    """NaN and infinities are there as they are, counted, and named; TensorBoard draws no infinity."""
    write(
        tmp_path / FIRST,
        "grad_reduced_0-3.csv",
        line(0, 1),
        line(1, "nan"),
        line(1, "-inf", "out"),
        line(2, 1),
        line(3, "inf"),
    )
    done = convert(tmp_path)
    found = series(done, "vp0:fc/norm")
    assert math.isnan(found[1])
    assert found[3] == math.inf
    assert series(done, "vp0:out/norm") == {1: -math.inf}
    assert series(done, "nonfinite/in_step") == {0: 0, 1: 2, 2: 0, 3: 1}
    assert series(done, "nonfinite/so_far") == {0: 0, 1: 2, 2: 2, 3: 3}
    texts = accumulated(done.output / "rank0/grad_reduced").Tensors("nonfinite/where")
    assert {event.step: event.tensor_proto.string_val[0].decode() for event in texts} == {
        1: "- `vp0:fc/norm`: nan\n- `vp0:out/norm`: -inf",
        3: "- `vp0:fc/norm`: inf",
    }
    assert any("3 values are NaN or infinite (grad_reduced)" in note for note in done.notes())


RESTARTED = "Nov29_10-30-00-rank0-0123abcd"
AGAIN = "Nov29_12-00-00-rank0-89abcdef"
LAST = "Nov29_13-00-00-rank0-456789ab"


@pytest.mark.parametrize("processes", [1, 3])
def test_resumed(processes: int, tmp_path: Path) -> None:
    """Runs whose steps follow one another are one curve; of a step that a run has twice, the later rows count."""
    write(tmp_path / FIRST, "grad_reduced_0-3.csv", *(line(step, step) for step in range(4)), line(3, 3, "gone"))
    write(tmp_path / RESTARTED, "grad_reduced_2-2.csv", line(2, 20))
    write(tmp_path / RESTARTED, "grad_reduced_3-5.csv", line(3, 30), line(4, 40), line(4, 41))
    write(tmp_path / LATER, "grad_reduced_3-5.csv", line(5, 50))
    write(tmp_path / LATER.replace("rank0", "rank1"), "grad_reduced_0-0.csv", line(0, 7))
    done = convert(tmp_path, processes=processes)
    assert series(done, "vp0:fc/norm") == {0: 0, 1: 1, 2: 20, 3: 30, 4: 41, 5: 50}
    assert series(done, "vp0:fc/norm", "rank1/grad_reduced") == {0: 7}
    assert "vp0:gone/norm" not in accumulated(done.output / "rank0/grad_reduced").Tags()["scalars"]
    assert done.runs == ("0123abcd", "4567abcd")
    assert [note.partition(";")[0] for note in done.notes()] == [
        "2 runs are joined (0123abcd, 4567abcd)",
        "up to 2 steps are recorded again: the later ones count",
    ]
    only = convert(tmp_path, run="4567abcd", output=tmp_path / "only")
    assert series(only, "vp0:fc/norm") == {5: 50}
    assert not only.notes()


@pytest.mark.parametrize("processes", [1, 3])
def test_runs_with_the_same_steps(processes: int, tmp_path: Path) -> None:
    """A run that numbers from 0 again, or goes back, replaces nothing: each history has a directory, and that is said."""
    write(tmp_path / FIRST, "grad_reduced_0-3.csv", *(line(step, step) for step in range(4)))
    write(tmp_path / LATER, "grad_reduced_0-0.csv", line(0, 70))
    write(tmp_path / AGAIN, "grad_reduced_4-4.csv", line(4, 4))  # goes on with the first
    write(tmp_path / LAST, "grad_reduced_2-2.csv", line(2, 80))  # goes on with the second
    done = convert(tmp_path, processes=processes)
    assert series(done, "vp0:fc/norm", "89abcdef/rank0/grad_reduced") == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}
    assert series(done, "vp0:fc/norm", "456789ab/rank0/grad_reduced") == {0: 70, 2: 80}
    (note,) = done.notes()
    assert "2 histories have the same steps (0123abcd and 89abcdef, 4567abcd and 456789ab)" in note
    assert {one.history for one in done.series} == {"89abcdef", "456789ab"}


def test_run_that_went_back_to_a_checkpoint(tmp_path: Path) -> None:
    """It continues what was before the checkpoint; what it left behind stays whole beside it."""
    write(tmp_path / FIRST, "grad_reduced_0-5.csv", *(line(step, step) for step in range(6)))
    write(tmp_path / LATER, "grad_reduced_3-3.csv", line(3, 30), line(4, 40))  # killed in its turn
    (tmp_path / LATER / "run.json").write_text('{"models": [{"first_step": {"value": 3, "source": "--first-step"}}]}')
    done = convert(tmp_path)
    assert series(done, "vp0:fc/norm", "4567abcd/rank0/grad_reduced") == {0: 0, 1: 1, 2: 2, 3: 30, 4: 40}
    assert series(done, "vp0:fc/norm", "0123abcd/rank0/grad_reduced") == {step: step for step in range(6)}
    assert done.histories == (("0123abcd",), ("0123abcd", "4567abcd"))


def test_files_of_many_steps(tmp_path: Path) -> None:
    """What a file's name covers is not what a run has recorded: a run that goes on in the same range is joined."""
    write(tmp_path / FIRST, "grad_reduced_0-99.csv", line(0, 1), line(1, 1))
    write(tmp_path / LATER, "grad_reduced_0-99.csv", line(2, 2))
    (tmp_path / LATER / "steps.csv").write_text("model,step\n,2\n,3\n")
    assert series(convert(tmp_path), "vp0:fc/norm") == {0: 1, 1: 1, 2: 2}


def test_over_new_year(tmp_path: Path) -> None:
    """Names of directories have no year: run.json says which run was started last."""
    write(tmp_path / "Dec31_23-00-00-rank0-0123abcd", "grad_reduced_0-1.csv", line(0, 1), line(1, 1))
    write(tmp_path / "Jan01_01-00-00-rank0-4567abcd", "grad_reduced_2-2.csv", line(2, 2))
    (tmp_path / "Dec31_23-00-00-rank0-0123abcd/run.json").write_text('{"started": "2026-12-31T23:00:00+00:00"}')
    (tmp_path / "Jan01_01-00-00-rank0-4567abcd/run.json").write_text('{"started": "2027-01-01T01:00:00+00:00"}')
    done = convert(tmp_path)
    assert done.runs == ("0123abcd", "4567abcd")
    assert series(done, "vp0:fc/norm") == {0: 1, 1: 1, 2: 2}


def test_what_cannot_be_read(tmp_path: Path) -> None:
    """A torn last line, lines of other cells and files of other tools are left out and named; the rest is converted."""
    torn = write(tmp_path / FIRST, "grad_reduced_0-0.csv", line(0, 1), line(0, 2, "out"), '0,last,0,"[2')
    quoted = write(tmp_path / FIRST, "grad_reduced_1-1.csv", line(1, 1), '0,"a\nb')
    short = write(tmp_path / FIRST, "grad_reduced_2-2.csv", line(2, 1), "0,fc\n", line(2, 3, "out"), "x,y,z,1,1,1,1\n")
    other = write(tmp_path / FIRST, "grad_reduced_3-3.csv", "1,2\n", head="time,loss\n")
    empty = write(tmp_path / FIRST, "grad_reduced_4-4.csv", head="")
    latin = tmp_path / FIRST / "grad_reduced_5-5.csv"
    latin.write_bytes(HEAD.encode() + line(5, 5).encode() + b"0,\xff,5,1,1,1,1\n")
    done = convert(tmp_path)
    assert series(done, "vp0:fc/norm") == {0: 1, 1: 1, 2: 1, 5: 5}
    assert series(done, "vp0:out/norm") == {0: 2, 2: 3}
    (faults,) = [one.faults for one in done.series]
    assert [fault.partition(": ")[::2] for fault in faults[:5]] == [
        (str(torn), "left out: an unfinished line (line 4)"),
        (str(quoted), "left out: an unfinished line (line 3)"),
        (str(short), "left out: a line that does not fit the header (line 3 and 1 more)"),
        (str(other), "left out: the whole file, which has no column `step` and `name`"),
        (str(empty), "left out: the whole file, which has no column `step` and `name`"),
    ]
    assert faults[5] == f"{latin}: left out: a line that is not UTF-8 (line 3)"
    assert done.notes() == faults


def test_odd_names(tmp_path: Path) -> None:
    """Names with commas, quotes and line ends stay what they are."""
    write(
        tmp_path / FIRST,
        "grad_reduced_0-0.csv",
        line(0, 1, '"a,b"'),
        line(0, 2, '"say ""x"""'),
        line(0, 3, '"two\nlines"'),
    )
    done = convert(tmp_path)
    for name, value in (("a,b", 1), ('say "x"', 2), ("two\nlines", 3)):
        assert series(done, f"vp0:{name}/norm") == {0: value}


def test_chosen(tmp_path: Path) -> None:
    """Both timestamps are included; one run directory alone can be named; types are chosen."""
    write(tmp_path / FIRST, "grad_reduced_0-0.csv", line(0, 1))
    write(tmp_path / FIRST, "actv_0-0.csv", line(0, 1))
    write(tmp_path / LATER, "grad_reduced_1-1.csv", line(1, 2))
    for first, last, expected in (
        ("Nov29_10-00-00", "Nov29_10-00-00", {0: 1}),
        ("Nov29_10-00-01", None, {1: 2}),
        (None, "Nov29_11-00-00", {0: 1, 1: 2}),
    ):
        done = convert(tmp_path, first=first, last=last, kinds=["grad_reduced"], output=tmp_path / "again")
        assert [one.kind for one in done.series] == ["grad_reduced"]
        assert series(done, "vp0:fc/norm") == expected
        assert len(list((tmp_path / "again/rank0/grad_reduced").iterdir())) == 1  # that of the call before is replaced
    done = convert(tmp_path / FIRST)
    assert done.output.parent == tmp_path
    assert [one.kind for one in done.series] == ["actv", "grad_reduced"]


def test_what_is_known_of_steps(tmp_path: Path) -> None:
    """`steps.csv` is a kind of data too, under the tags that it has while a training runs."""
    write(tmp_path / FIRST, "grad_reduced_0-1.csv", line(0, 1), line(1, 2))
    head = "model,step,micro_steps,skipped,grad_scale,complete\n"
    write(tmp_path / FIRST, "steps.csv", ",0,2,0,1024,1\n", "D,0,,1,,1\n", ",1,2,1,512,0\n", head=head)
    done = convert(tmp_path)
    assert [(one.kind, one.steps) for one in done.series] == [("grad_reduced", 2), ("steps", 2)]
    found = {
        tag: series(done, tag, "rank0/steps") for tag in accumulated(done.output / "rank0/steps").Tags()["scalars"]
    }
    assert {tag: values for tag, values in found.items() if not tag.startswith("nonfinite/")} == {
        "steps/micro_steps": {0: 2, 1: 2},
        "steps/skipped": {0: 0, 1: 1},
        "steps/grad_scale": {0: 1024, 1: 512},
        "steps/complete": {0: 1, 1: 0},
        "steps/D/skipped": {0: 1},
        "steps/D/complete": {0: 1},
    }
    assert [one.kind for one in convert(tmp_path, kinds=["steps"], output=tmp_path / "only").series] == ["steps"]


def test_event_files_of_others(tmp_path: Path) -> None:
    """They are neither removed nor mixed with what is converted; those of an earlier conversion are replaced."""
    write(tmp_path / FIRST, "grad_reduced_0-0.csv", line(0, 1))
    place = tmp_path / "there/rank0/grad_reduced"
    place.mkdir(parents=True)
    theirs = place / "events.out.tfevents.1764000000.host.1.0"
    theirs.write_text("precious")
    with pytest.raises(OutputError, match="event files that csv2tb has not made"):
        convert(tmp_path, output=tmp_path / "there")
    assert [path.name for path in place.iterdir()] == [theirs.name]
    assert theirs.read_text() == "precious"
    theirs.rename(tmp_path / theirs.name)
    for value in (1, 2):
        write(tmp_path / FIRST, "grad_reduced_0-0.csv", line(0, value))
        assert series(convert(tmp_path, output=tmp_path / "there"), "vp0:fc/norm") == {0: value}
        assert len(list(place.iterdir())) == 1


def test_progress(tmp_path: Path) -> None:
    """It is heard of, and comes to its end."""
    write(tmp_path / FIRST, "grad_reduced_0-0.csv", line(0, 1))
    heard: list[tuple[int, int]] = []
    convert(tmp_path, progress=lambda done, total: heard.append((done, total)))
    assert heard == sorted(heard)
    assert 0.5 < heard[-1][0] / heard[-1][1] <= 1


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is said in one line, with what is there."""
    root = tmp_path / "root"
    write_into = root / FIRST
    root.mkdir()
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str, str]] = [
        (tmp_path / "absent", {}, NoRecordingError, "no such directory", "output root"),
        (tmp_path, {}, NoRecordingError, "no run directory", f"is it `{root}`"),
        (root, {"first": "Dec01_00-00-00"}, NoRecordingError, "from Dec01_00-00-00", FIRST),
        (root, {"run": "ffffffff"}, NoRecordingError, "of the run ffffffff", FIRST),
        (root, {"kinds": ["actv"]}, NoRecordingError, "types actv", "grad_reduced"),
        (root, {"first": "yesterday"}, ArgumentError, "'yesterday'", "Dec03_21-34-40"),
        (root, {"first": "Nov30_00-00-00", "last": "Nov01_00-00-00"}, ArgumentError, "is after", "exchange"),
        (root, {"processes": 0}, ArgumentError, "0", "1 or more"),
        (root, {"output": root / FIRST / "grad_reduced_0-0.csv"}, OutputError, "cannot write", "another place"),
    ]
    with pytest.raises(NoRecordingError, match="no run directory") as nothing:
        convert(root)
    assert "Dec03_21-34-40-rank0" in nothing.value.hint
    write_into.mkdir()
    with pytest.raises(NoRecordingError, match="no CSV files"):
        convert(root)
    (write_into / "events.out.tfevents.1").touch()
    with pytest.raises(NoRecordingError, match="no CSV files") as live:
        convert(root)
    assert "tensorboard --logdir" in live.value.hint
    other = write(write_into, "grad_reduced_0-0.csv", "1,2\n", head="time,loss\n")
    with pytest.raises(NoRecordingError, match="which has no column `step` and `name`"):
        convert(root)
    assert [entry.name for entry in root.iterdir()] == [FIRST]
    other.write_text(HEAD + line(0, 1))
    for place, arguments, kind, message, hint in wrong:
        with pytest.raises(kind, match=message) as caught:
            convert(place, **arguments)
        assert hint in caught.value.hint  # type: ignore[attr-defined]
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError) as extra:
        convert(root)
    assert "msmon[tensorboard]" in extra.value.hint
