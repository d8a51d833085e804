"""The conversion to TensorBoard by msmon and by the original, of the same CSV files."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from compat.conftest import PYTHON_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

    from compat.recording import Recording

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("compat"),
    pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason="needs the original: make test-compat"),
]

CONVERT = """
import sys
from {package}.pytorch.monitor.csv2tb import csv2tensorboard_by_step
csv2tensorboard_by_step(sys.argv[1], process_num=2, output_dirpath=sys.argv[2])
"""


def convert(python: str, package: str, source: Path, output: Path) -> None:
    done = subprocess.run(
        [python, "-c", CONVERT.format(package=package), str(source), str(output)], capture_output=True, text=True, timeout=900
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def points(root: Path) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Run of TensorBoard and tag → steps and values."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for directory in {path.parent for path in root.rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            points = [(event.step, event.value) for event in events.Scalars(tag)]
            found[str(directory.relative_to(root)), tag] = points
    return found


@pytest.mark.parametrize("scenario", ["little", "accumulation-every-micro-batch", "chunks", "two-ranks"])
def test_same_tags_and_values(original: Recording, scenario: str, tmp_path: Path) -> None:
    """Directories, tags, steps and values are the same; more are `steps.csv` and the tags about values that are not finite."""
    source = original.directories(scenario)[0].parent
    convert(os.environ[PYTHON_VARIABLE], "msprobe", source, tmp_path / "theirs")
    convert(sys.executable, "msmon", source, tmp_path / "ours")
    theirs, ours = points(tmp_path / "theirs"), points(tmp_path / "ours")
    assert theirs
    assert {key: value for key, value in ours.items() if not key[1].startswith(("nonfinite/", "steps/"))} == theirs
