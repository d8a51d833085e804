"""High-order features in a real training: attention, linear layers, experts; and the training is what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Finished, Runner

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("features.py")
TARGETS = {
    "attention_hook": ["0:blocks.*.core", "blocks.?.other"],
    "linear_hook": [],
    "moe_router_weight_hook": ["blocks.0.gate", "0:blocks.1.gate"],
    "moe_router_logit_hook": ["*.gate"],
}
COLUMNS = {
    "attention_hook": ["entropy", "softmax_max"],
    "linear_hook": ["sr", "kernel_norm"],
    "moe_router_weight_hook": ["router_weight_similarity"],
    "moe_router_logit_hook": ["per_token_expert_entropy"],
}
CONFIG: dict[str, Any] = {
    "recording_l2_features": True,
    "l2_targets": TARGETS,
    "sa_order": "b,s,h,d",
    "ndigits": 12,
    "step_count_per_record": 100,
}


def library(runner: Runner, **config: Any) -> Finished:
    path = runner.write_config(**config)
    return runner.bare(SCRIPT, "library", CONFIG=str(path), MONITOR_OUTPUT_DIR=str(runner.output))


@pytest.fixture(params=["library", "run"])
def finished(request: pytest.FixtureRequest, runner: Runner) -> Finished:
    if request.param == "library":
        return library(runner, **CONFIG)
    return runner.monitored(SCRIPT, config=CONFIG)


def test_rows(finished: Finished, runner: Runner) -> None:
    """Every feature of every module, step and micro-batch, to float64; none of evaluations and recomputations."""
    assert finished.returncode == 0, finished.stderr
    truth = {
        tuple(json.loads(key)): numbers
        for key, numbers in json.loads((runner.folder / "truth.json").read_text()).items()
    }
    assert {key[0] for key in truth} == set(COLUMNS)
    found = {}
    for kind, columns in COLUMNS.items():
        for row in finished.rows(kind):
            assert list(row.values) == columns
            key = kind, row.name, row.step, row.micro_step
            assert key not in found
            found[key] = [row[column] for column in columns]
    assert set(found) == set(truth)
    for key, numbers in found.items():
        assert numbers == pytest.approx(truth[key], rel=1e-2 if key[0] == "linear_hook" else 1e-5), key
    assert len(finished.steps()) == 3
    assert "switched off" not in finished.stderr


def test_headers(runner: Runner) -> None:
    """Files have the columns of the original: weights no micro_step."""
    done = library(runner, **CONFIG)
    headers = {
        path.name.split("_0-")[0]: path.read_text().split("\n", 1)[0] for path in done.directories()[0].glob("*hook*")
    }
    assert headers == {
        "attention_hook": "vpp_stage,name,step,micro_step,entropy,softmax_max",
        "linear_hook": "vpp_stage,name,step,sr,kernel_norm",
        "moe_router_weight_hook": "vpp_stage,name,step,router_weight_similarity",
        "moe_router_logit_hook": "vpp_stage,name,step,micro_step,per_token_expert_entropy",
    }


def test_training_is_unchanged(runner: Runner) -> None:
    """Losses, weights and the state of the random generator are equal to the bit, and rows were written."""
    runner.environment.pop("TRUTH")
    bare = runner.bare(SCRIPT)
    assert bare.returncode == 0, bare.stderr
    everything = {
        **CONFIG,
        "mg_direction": True,
        "ur_distribution": True,
        "wg_distribution": True,
        "xy_distribution": True,
    }
    for done in (library(runner, **everything), runner.monitored(SCRIPT, config=everything)):
        assert done.returncode == 0, done.stderr
        assert done.stdout == bare.stdout
        assert "switched off" not in done.stderr
    for kind in (*COLUMNS, "other", "update", "update_ratio", "actv"):
        assert done.rows(kind), kind


def test_what_is_not_selected(runner: Runner) -> None:
    """Without a list there is nothing; a name that does not exist is said with close ones; other modules cost no hook call."""
    done = library(
        runner,
        **{**CONFIG, "l2_targets": {"attention_hook": [], "linear_hook": ["blocks.0.kqv", "head", "blocks.0.core"]}},
    )
    assert done.returncode == 0, done.stderr
    assert [row.name for row in done.rows("linear_hook")] == ["head.linear"] * 3
    assert not done.rows("attention_hook")
    assert done.stderr.count("`blocks.0.kqv` is no module; close: blocks.0.qkv") == 1
    assert done.stderr.count("blocks.0.core.linear has no linear_hook") == 1


def test_what_is_no_attention(runner: Runner) -> None:
    """A module that is given no query and key is named once; training and the other rows go on."""
    targets = {"attention_hook": ["blocks.0", "head", "blocks.0.core"]}
    done = library(runner, **{**CONFIG, "l2_targets": targets})
    assert {row.name for row in done.rows("attention_hook")} == {"blocks.0.core.attention"}
    assert done.stderr.count("query and key are not among its arguments") == 2
