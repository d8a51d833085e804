"""The examples, as their users run them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Runner

REPOSITORY = Path(__file__).resolve().parents[2]
GPT = REPOSITORY / "examples" / "gpt"


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]


@pytest.mark.slow
def test_gpt_in_two_processes(runner: Runner) -> None:
    """The demo's command trains the GPT, its loss falls as without msmon, and every step of both ranks is on record."""
    arguments = ["--steps", "60", "--width", "32", "--depth", "2", "--heads", "2", "--context", "32"]
    bare = runner.bare(GPT / "train.py", *arguments, ranks=2)
    options = ["--config", str(GPT / "monitor.json")]
    watched = runner.monitored(GPT / "train.py", *arguments, ranks=2, options=options)
    assert watched.returncode == 0, watched.stderr
    assert losses(watched.stdout) == losses(bare.stdout)
    assert losses(watched.stdout)[-1] < losses(watched.stdout)[0] - 2
    for rank in (0, 1):
        assert [int(line["step"]) for line in watched.steps(rank)] == list(range(60))
        assert {row.step for row in watched.rows("grad_reduced", rank)} == set(range(60))
        assert {row.step for row in watched.rows("exp_avg", rank)} == set(range(1, 60))
    assert "60 training steps seen, 60 collected" in watched.stderr

    shown = runner.call([sys.executable, str(GPT / "show.py"), str(watched.output)])
    assert shown.returncode == 0, shown.stderr
    assert "grad_unreduced_0-99.csv" in shown.stdout
    assert "blocks.1.attention.output" in shown.stdout


@pytest.mark.slow
def test_gpt_blown_up(runner: Runner) -> None:
    """``--blow`` is an honest blow-up: the step after it has by far the largest weight update on record."""
    arguments = ["--steps", "45", "--width", "32", "--depth", "1", "--heads", "2", "--context", "32", "--blow", "40"]
    watched = runner.monitored(GPT / "train.py", *arguments, options=["--weights"])
    assert watched.returncode == 0, watched.stderr
    name = "head.weight"
    before = {row.step: row["norm"] for row in watched.rows("param_origin") if row.name == name}
    after = {row.step: row["norm"] for row in watched.rows("param_updated") if row.name == name}
    change = {step: abs(after[step] - before[step]) for step in before}
    assert max(change, key=lambda step: change[step]) == 40


def test_the_training_script_knows_nothing_of_msmon() -> None:
    """The example's training script does not mention msmon."""
    assert "msmon" not in (GPT / "train.py").read_text().lower()
