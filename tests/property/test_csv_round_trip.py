"""What the sink writes, the reader reads, whatever the names and numbers."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from msmon.offline.reader import read_kind, read_steps
from msmon.record.table import Row
from msmon.sinks.base import RecordedStep
from msmon.sinks.csv import CsvSink, format_number, round_numbers

awkward = st.text(
    st.characters(categories=None) | st.sampled_from(list(',"\n\r\t \x0b\x0c\x1c\x85\u2028层=@\ud800')), max_size=12
)
rows = st.lists(
    st.tuples(awkward, st.integers(0, 3), st.lists(st.integers(1, 4), max_size=3), st.floats(), st.integers(0, 10**6)),
    min_size=1,
    max_size=5,
)


def same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(rows, min_size=1, max_size=3), label=awkward, micro=st.booleans())
@example(steps=[[('\ud800,"\n\r', 0, [2], 1.0, 0)]], label="\ud800", micro=False)
def test_round_trip(steps: list[list[tuple[str, int, list[int], float, int]]], label: str, micro: bool) -> None:
    """Names with commas, quotes, line ends, any Unicode and lone surrogates come back as they were, with their numbers."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        sink = CsvSink(directory, ("nans", "norm", "shape", "dtype"), 17, 100)
        for step, described in enumerate(steps):
            table = [
                Row("kind", name, stage, step if micro else None, tuple(shape), "torch.float32")
                for name, stage, shape, _, _ in described
            ]
            numbers = np.array([[nans, norm] for *_, norm, nans in described], dtype=np.float64).reshape(-1)
            sink.write(RecordedStep(label, step, table, numbers, 1, False, math.nan, True))
        found = read_kind(directory, "kind")
        expected = [(step, *line) for step, described in enumerate(steps) for line in described]
        assert len(found) == len(expected)
        for line, (step, name, stage, shape, norm, nans) in zip(found, expected, strict=True):
            assert (line.name, line.stage, line.step) == (name, stage, step)
            assert line.micro_step == (step if micro else None)
            assert line.values["shape"] == str(shape)
            assert line.values["dtype"] == "torch.float32"
            assert line["nans"] == nans
            assert same(line["norm"], float(format_number(norm, 17)))
        assert [line["model"] for line in read_steps(directory)] == [label] * len(steps)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 20))
def test_numbers_stay_visible(value: float, ndigits: int) -> None:
    """A number never prints as another one further off than its decimals say, and only 0 prints as 0."""
    written = float(format_number(value, ndigits))
    assert (written == 0) == (value == 0)
    if ndigits:
        assert abs(written - value) <= 10.0 ** (1 - ndigits) * abs(value) + 5e-324, "as many significant digits"
    assert abs(written - value) <= 0.5 * 10.0**-ndigits * (1 + 1e-9) + abs(value) * 1e-15 or (
        abs(written - value) <= 0.5 * 10.0 ** (1 - max(ndigits, 1)) * abs(value) * (1 + 1e-9) + 5e-324
    )


@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(
        st.floats() | st.floats(-10, 10) | st.integers(-(10**9), 10**9).map(lambda n: n / 2e6), max_size=20
    ),
    ndigits=st.integers(0, 30),
)
@example(values=[2.675, 0.5, 1.5, -0.0, 1e22, 4.5035996e9, 5e-7, -5e-7, 4.9e-7, 5e-324], ndigits=6)
@example(values=[2.675, 0.285, 1.005, 1e15], ndigits=2)
def test_numbers_of_a_step(values: list[float], ndigits: int) -> None:
    """All numbers of a step at once are rounded as each alone is."""
    rounded = round_numbers(np.array(values, dtype=np.float64), ndigits)
    assert [repr(value) for value in rounded.tolist()] == [format_number(value, ndigits) for value in values]
