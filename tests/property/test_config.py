"""Configurations that hypothesis makes up."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from msmon.config.load import parse_config
from msmon.errors import ConfigError

OPS = ["min", "max", "norm", "mean", "zeros", "nans", "shape", "dtype", "id"]
STAMPS = st.sampled_from(["Jan01_00-00-00", "Dec31_23-59-59"])

documents = st.fixed_dictionaries(
    {},
    optional={
        "targets": st.dictionaries(st.text(), st.fixed_dictionaries({}, optional={"input": st.just("tuple[3]:1")})),
        "wg_distribution": st.booleans(),
        "param_distribution": st.booleans(),
        "mv_distribution": st.booleans(),
        "monitor_mbs_grad": st.booleans(),
        "squash_name": st.booleans(),
        "ops": st.lists(st.sampled_from(OPS)),
        "eps": st.floats(min_value=1e-300, max_value=1e300),
        "ndigits": st.integers(0, 20),
        "start_step": st.integers(min_value=0),
        "step_interval": st.integers(min_value=1),
        "collect_times": st.integers(min_value=0),
        "module_ranks": st.lists(st.integers(min_value=0)),
        "step_count_per_record": st.integers(1, 1_000_000),
        "append_output": st.just([]) | st.tuples(STAMPS, STAMPS).map(lambda stamps: sorted(stamps, reverse=True)),
    },
)

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
KEYS = ["targets", "ops", "eps", "ndigits", "cc_distribution", "alert", "l2_targets", "sa_order", "format", "append_output",
        "module_ranks", "start_step", "wg_distribution", "switch", "dynamic_on"]  # fmt: skip


@given(documents)
def test_round_trip(document: dict[str, Any]) -> None:
    """A valid configuration survives being written as JSON and read again."""
    config = parse_config(document)
    again = parse_config(json.loads(json.dumps(config.model_dump(mode="json"))))
    assert again == config
    sparse = parse_config(json.loads(json.dumps(config.model_dump(mode="json", exclude_unset=True))))
    assert sparse == config


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), anything, max_size=4))
def test_never_a_traceback(document: dict[str, Any]) -> None:
    """Whatever a file holds, it is a configuration or every problem has a message, a hint and a line to show."""
    try:
        parse_config(document)
    except ConfigError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.message
            assert problem.hint
            assert problem.path
            assert problem.describe("monitor.json")
