"""The table of versions in docs/frameworks.md is that of the environment in which the tests of each framework run."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "frameworks.md"
BEGIN, END = "<!-- versions: written by a test -->\n", "<!-- end of versions -->\n"
TESTED = [
    ("DDP, FSDP1, FSDP2, tensor parallel, pipelines, ZeroRedundancyOptimizer", "torch", "test_sharded.py"),
    ("DeepSpeed", "deepspeed", "test_deepspeed.py"),
    ("Megatron-core", "megatron-core", "test_megatron.py"),
    ("Trainer", "transformers", "test_trainers.py"),
    ("accelerate", "accelerate", "test_trainers.py"),
    ("LoRA", "peft", "test_trainers.py"),
    ("SFTTrainer", "trl", "test_trainers.py"),
    ("Lightning", "lightning", "test_trainers.py"),
]
"""Of each framework: its package, and the tests below tests/integration."""


def table() -> str:
    lines = ["| framework | package | version | tests |", "|---|---|---|---|"]
    for framework, package, tests in TESTED:
        assert (REPOSITORY / "tests" / "integration" / tests).exists()
        lines.append(
            f"| {framework} | {package} | {version(package).partition('+')[0]} | `tests/integration/{tests}` |"
        )
    return "\n".join(lines) + "\n"


def test_versions_are_those_of_the_tests() -> None:
    """UPDATE_SNAPSHOTS=1 writes the table anew."""
    try:
        expected = table()
    except PackageNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed: run `make setup`")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    written, end, after = rest.partition(END)
    assert end, "the page has lost its markers"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        PAGE.write_text(before + BEGIN + expected + END + after, encoding="utf-8")
    else:
        assert written == expected
