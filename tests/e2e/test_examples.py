"""The examples, as their users run them."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import MSMON

from msmon.offline.reader import kinds, read_kind

if TYPE_CHECKING:
    from conftest import Runner

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GPT = EXAMPLES / "gpt"
IN_PARTS = ["fsdp", "pipeline", "tensor_parallel", "deepspeed", "megatron"]


@dataclass(frozen=True)
class Example:
    """A training in one process.

    Attributes:
        folder: Its name below examples/.
        arguments: Sizes small enough for a test.
        kinds: Files that its monitor.json asks for.
        falls_to: Share of its first value that ``learned`` must come below.
        learned: The printed figure that falls while it learns.
        models: Labels of its models.
    """

    folder: str
    arguments: str
    kinds: set[str]
    falls_to: float
    learned: str = "loss"
    models: tuple[str, ...] = ("",)


GRADIENTS = {"grad_unreduced", "grad_reduced"}
WEIGHTS = {"param_origin", "param_updated"}
MOMENTS = {"exp_avg", "exp_avg_sq"}
ACTIVATIONS = {"actv", "actv_grad"}
TRAININGS = [
    Example("digits", "--steps 60 --width 16 --depth 1", GRADIENTS | WEIGHTS | ACTIVATIONS, falls_to=0.5),
    Example("lstm", "--steps 60 --width 32 --depth 1 --length 24", GRADIENTS | {"actv_grad"}, falls_to=0.7),
    Example("moe", "--steps 80 --width 32", GRADIENTS | MOMENTS | ACTIVATIONS, falls_to=0.6),
    Example(
        "gan",
        "--steps 150 --width 32",
        GRADIENTS | WEIGHTS | MOMENTS | {"actv"},
        falls_to=0.5,
        learned="distance",
        models=("Generator", "Discriminator"),
    ),
    Example("trainer", "--steps 30 --width 32 --depth 1 --length 32", GRADIENTS | MOMENTS | ACTIVATIONS, falls_to=0.8),
    Example("accelerate", "--steps 40", GRADIENTS | MOMENTS, falls_to=0.7),
    Example("lightning", "--steps 40", GRADIENTS | MOMENTS, falls_to=0.7),
    Example("lora", "--steps 20 --width 32 --length 32", GRADIENTS | MOMENTS, falls_to=0.9),
    Example("sft", "--steps 30", GRADIENTS | MOMENTS, falls_to=0.5),
    Example("vae", "--steps 80 --width 64", GRADIENTS | MOMENTS | ACTIVATIONS, falls_to=0.7),
]


def figures(text: str, name: str = "loss") -> list[float]:
    return [float(figure) for figure in re.findall(rf"{name} (\d+\.\d+)", text)]


@pytest.mark.slow
def test_gpt_in_two_processes(runner: Runner) -> None:
    """The demo's command trains the GPT, its loss falls as without msmon, and every step of both ranks is on record."""
    arguments = ["--steps", "60", "--width", "32", "--depth", "2", "--heads", "2", "--context", "32"]
    script = runner.write((GPT / "train.py").read_text())
    bare = runner.bare(script, *arguments, ranks=2)
    options = ["--config", str(GPT / "monitor.json")]
    watched = runner.monitored(script, *arguments, ranks=2, options=options)
    assert watched.returncode == 0, watched.stderr
    assert figures(watched.stdout) == figures(bare.stdout)
    assert figures(watched.stdout)[-1] < figures(watched.stdout)[0] - 2
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
@pytest.mark.parametrize(
    ("folder", "sizes", "kinds_there"),
    [
        ("fsdp", ["--steps", "40", "--width", "32", "--depth", "1"], GRADIENTS | WEIGHTS | MOMENTS),
        ("pipeline", ["--steps", "60"], GRADIENTS | MOMENTS | ACTIVATIONS),
        ("tensor_parallel", ["--steps", "40"], GRADIENTS | WEIGHTS | MOMENTS),
        ("deepspeed", ["--steps", "40"], GRADIENTS | WEIGHTS | MOMENTS),
        ("megatron", ["--steps", "40"], GRADIENTS | WEIGHTS | MOMENTS),
    ],
)
def test_in_parts(runner: Runner, folder: str, sizes: list[str], kinds_there: set[str]) -> None:
    """Two processes with a part each train as without msmon, and every step of both is on record."""
    example = (EXAMPLES / folder / "train.py").read_text()
    environment = {}
    if folder == "megatron":  # it asks for CUDA throughout
        example = f"import megatron_on_cpu\nmegatron_on_cpu.install()\n{example}"
        environment["PYTHONPATH"] = str(EXAMPLES.parent / "tests" / "integration")
    script = runner.write(example)
    bare = runner.bare(script, *sizes, ranks=2, **environment)
    options = ["--config", str(EXAMPLES / folder / "monitor.json")]
    watched = runner.monitored(script, *sizes, ranks=2, options=options, **environment)
    assert watched.returncode == 0, watched.stderr
    assert figures(watched.stdout) == figures(bare.stdout)
    assert figures(watched.stdout)[-1] < 0.7 * figures(watched.stdout)[0]
    for rank in (0, 1):
        (directory,) = watched.directories(rank)
        assert set(kinds(directory)) == kinds_there
        assert {row.step for row in watched.rows("grad_reduced", rank)} == set(range(int(sizes[1])))
    if folder == "fsdp":
        merged = runner.call([MSMON, "merge", str(watched.output)])
        assert merged.returncode == 0, merged.stderr
        rows = read_kind(Path(merged.stdout.strip()), "grad_reduced")
        assert {tuple(json.loads(str(row.values["shape"]))) for row in rows if row.name == "head.weight"} == {(256, 32)}


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


@pytest.mark.slow
@pytest.mark.parametrize("example", TRAININGS, ids=lambda example: example.folder)
def test_training(runner: Runner, example: Example) -> None:
    """Under its own monitor.json it prints what it prints bare, it learns, and every step of every model is on record."""
    script, arguments = EXAMPLES / example.folder / "train.py", example.arguments.split()
    bare = runner.bare(script, *arguments)
    assert bare.returncode == 0, bare.stderr
    watched = runner.monitored(script, *arguments, options=["--config", str(script.with_name("monitor.json"))])
    assert watched.returncode == 0, watched.stderr
    assert watched.stdout == bare.stdout
    learned = figures(watched.stdout, example.learned)
    assert learned[-1] < example.falls_to * learned[0]

    steps = range(int(arguments[1]))
    for label in example.models:
        lines = [line for line in watched.steps() if line["model"] == label and line["complete"] == "1"]
        assert [int(line["step"]) for line in lines] == list(steps)
    (directory,) = watched.directories()
    assert set(kinds(directory)) == example.kinds
    models = watched.run_file()["models"]
    assert {model["label"] for model in models} == set(example.models)
    names = {
        parameter["name"]
        for model in models
        for parameter in model["parameters"]
        if parameter["watched"] and parameter["trainable"]
    }
    assert names
    for kind in example.kinds & ACTIVATIONS:
        rows = watched.rows(kind)
        assert {row.step for row in rows} == set(steps)
        assert {row.name.split(".")[0] for row in rows} >= set(example.models) - {""}
    for kind in example.kinds - ACTIVATIONS:
        first = 1 if kind in MOMENTS else 0
        rows = {(row.name, row.step) for row in watched.rows(kind)}
        assert rows >= {(name, step) for name in names for step in steps[first:]}, kind


@pytest.mark.parametrize("folder", ["gpt", *IN_PARTS, *(example.folder for example in TRAININGS)])
def test_the_training_script_knows_nothing_of_msmon(folder: str) -> None:
    """An example's training script does not mention msmon."""
    assert "msmon" not in (EXAMPLES / folder / "train.py").read_text().lower()
