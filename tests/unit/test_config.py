"""The configuration: every key, every refusal with its path and its cure, and the files of the original's guide."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from msmon.config.explain import as_documents, explain, without_effect
from msmon.config.load import load_config, parse_config, read_document
from msmon.config.schema import MonitorConfig, json_schema
from msmon.errors import MISSING, ConfigError, ExitCode, Problem
from msmon.sinks import tensorboard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DEFAULTS: dict[str, Any] = {
    "targets": {},
    "param_distribution": False,
    "wg_distribution": False,
    "mv_distribution": False,
    "xy_distribution": False,
    "all_xy": False,
    "forward_only": False,
    "backward_only": False,
    "monitor_mbs_grad": False,
    "mg_direction": False,
    "ur_distribution": False,
    "cc_distribution": {"enable": False, "cc_codeline": [], "cc_pre_hook": False, "cc_log_only": False},
    "stack_info": False,
    "recording_l2_features": False,
    "l2_targets": {
        "attention_hook": None,
        "linear_hook": None,
        "moe_router_weight_hook": None,
        "moe_router_logit_hook": None,
    },
    "sa_order": "s,b,h,d",
    "print_struct": False,
    "ops": ["norm"],
    "eps": 1e-8,
    "ndigits": 6,
    "start_step": 0,
    "step_interval": 1,
    "collect_times": 100_000_000,
    "module_ranks": [],
    "dynamic_on": False,
    "alert": {"rules": [], "dump": False},
    "format": "csv",
    "step_count_per_record": 1,
    "append_output": [],
    "squash_name": False,
}

TURBULENCE = {"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}
NAN_RULE = {"rule_name": "AnomalyNan", "args": {"threshold": 1e10}}


def problems(document: dict[str, Any]) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        parse_config(document, source="monitor.json")
    return caught.value.problems


def problem(document: dict[str, Any]) -> Problem:
    (only,) = problems(document)
    return only


def parsed(document: dict[str, Any]) -> MonitorConfig:
    return parse_config(document, source="monitor.json")


def test_defaults() -> None:
    """An empty document has every key of the contract at its default, and no other."""
    assert parsed({}).model_dump(mode="json") == DEFAULTS
    assert set(json_schema()["properties"]) == set(DEFAULTS)
    assert json_schema()["additionalProperties"] is False


def test_whole_default_document_is_accepted() -> None:
    """What a configuration writes as JSON can be read again: all defaults written out change nothing."""
    assert parsed(DEFAULTS) == parsed({})


@pytest.mark.parametrize("name", MonitorConfig.model_fields)
def test_every_key_is_described(name: str) -> None:
    """Every key has a text for the generated reference."""
    assert MonitorConfig.model_fields[name].description


def test_frozen() -> None:
    """A configuration cannot be changed, nor can its parts."""
    config = parsed({"targets": {"fc": {}}})
    for part, name in (
        (config, "eps"),
        (config.alert, "dump"),
        (config.cc_distribution, "enable"),
        (config.targets["fc"], "input"),
    ):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, name, None)


# The original's checks (compat.md): where it warned or said nothing, msmon refuses and says how to mend it.
@pytest.mark.parametrize(
    ("document", "path", "message", "hint"),
    [
        ({"ops": "norm"}, "ops", "must be a list", "write […]"),  # P69
        ({"ops": None}, "ops", "must be a list", "write […]"),
        ({"ops": ["nrom"]}, "ops[0]", "unknown value", "did you mean `norm`?"),  # P15
        ({"ops": ["norm", "bogus"]}, "ops[1]", "unknown value", "known are: `min`, `max`, `norm`"),
        ({"ops": [1]}, "ops[0]", "unknown value", "known are: "),
        ({"eps": "x"}, "eps", "must be a number", "the default is 1e-08"),  # P70
        ({"eps": True}, "eps", "must be a number", "the default is 1e-08"),
        ({"eps": 0}, "eps", "should be greater than 0", "the default is 1e-08"),
        ({"eps": float("nan")}, "eps", "should be greater than 0", "the default is 1e-08"),
        ({"ndigits": 3.5}, "ndigits", "must be a whole number", "the default is 6"),  # P71
        ({"ndigits": -1}, "ndigits", "should be greater than or equal to 0", "the default is 6"),
        ({"ndigits": 21}, "ndigits", "should be less than or equal to 20", "the default is 6"),
        ({"module_ranks": ["0"]}, "module_ranks[0]", "must be a whole number", "msmon explain"),  # P72
        ({"module_ranks": 0}, "module_ranks", "must be a list", "write […]"),
        ({"module_ranks": [-1]}, "module_ranks[0]", "should be greater than or equal to 0", "msmon explain"),
        ({"targets": ["fc"]}, "targets", "must be an object", "write {…}"),  # P73
        ({"targets": {"fc": "x"}}, "targets.fc", "must be an object", "write {…}"),
        ({"targets": {"a.fc": {"foo": 1}}}, 'targets["a.fc"].foo', "unknown key", "known are: `input`"),  # P74
        ({"targets": {"fc": {"inptu": "tensor"}}}, "targets.fc.inptu", "unknown key", "did you mean `input`?"),
        ({"targets": {"fc": {"input": "tensr"}}}, "targets.fc.input", 'must be "tensor"', "msmon explain"),
        ({"targets": {"fc": {"input": 1}}}, "targets.fc.input", 'must be "tensor"', "msmon explain"),
        ({"cc_distribution": []}, "cc_distribution", "must be an object", "write {…}"),  # P77
        ({"cc_distribution": {"x": 1}}, "cc_distribution.x", "unknown key", "known are: `enable`"),
        ({"cc_distribution": {"enabel": True}}, "cc_distribution.enabel", "unknown key", "did you mean `enable`?"),
        ({"cc_distribution": {"enable": 2}}, "cc_distribution.enable", "must be true or false", "without quotes"),
        ({"cc_distribution": {"cc_codeline": "a"}}, "cc_distribution.cc_codeline", "must be a list", "write […]"),
        ({"cc_distribution": {"cc_codeline": ["a["]}}, "cc_distribution.cc_codeline[0]", "must be a regular expression", ""),
        ({"cc_distribution": {"cc_codeline": [1]}}, "cc_distribution.cc_codeline[0]", "must be text", ""),
        ({"alert": []}, "alert", "must be an object", "write {…}"),  # P78
        ({"alert": {"rules": {}}}, "alert.rules", "must be a list", "write […]"),
        ({"alert": {"rules": [{}]}}, "alert.rules[0].rule_name", "a required key is missing", "add `alert.rules[0]."),
        ({"alert": {"rules": [{"rule_name": "AnomalyNaN"}]}}, "alert.rules[0].rule_name", "unknown value", "did you mean `AnomalyNan`?"),
        ({"alert": {"rules": [{**NAN_RULE, "args": {"threshold": -1}}]}}, "alert.rules[0].args.threshold", "should be greater", ""),
        ({"alert": {"rules": [{**NAN_RULE, "args": {"threshold": "a"}}]}}, "alert.rules[0].args.threshold", "must be a number", ""),
        ({"alert": {"rules": [NAN_RULE, {"rule_name": "AnomalyTurbulence"}]}}, "alert.rules[1]", "threshold", ""),  # P51
        ({"alert": {"rules": [{"rule_name": "AnomalyInf", "args": {"threshold": 1}}]}}, "alert.rules[0]", "no argument `threshold`", ""),
        ({"alert": {"rules": [{"rule_name": "AnomalyDead", "args": {"step": 3}}]}}, "alert.rules[0].args.step", "unknown key", "did you mean `steps`?"),
        ({"alert": {"rules": [{**NAN_RULE, "kind": ["actv"]}]}}, "alert.rules[0].kind", "unknown key", "did you mean `kinds`?"),
        ({"alert": {"rules": [{**NAN_RULE, "function": "os:system"}]}}, "alert.rules[0].function", "unknown key", "known are"),
        ({"alert": {"rules": [{"rule_name": "os:system"}]}}, "alert.rules[0].rule_name", "unknown value", "known are"),
        ({"alert": {"on_alert_command": "ls"}}, "alert.on_alert_command", "unknown key", "known are"),
        ({"alert": {"dump": 2}}, "alert.dump", "must be true or false", "without quotes"),
        ({"step_count_per_record": "3"}, "step_count_per_record", "must be a whole number", "the default is 1"),  # P79
        ({"step_count_per_record": 0}, "step_count_per_record", "should be greater than or equal to 1", "the default is 1"),
        ({"step_count_per_record": 1e7}, "step_count_per_record", "should be less than or equal to 1000000", "default is 1"),
        ({"append_output": "a"}, "append_output", "must be a list", "write […]"),  # P80
        ({"append_output": ["Dec03_21-34-40"]}, "append_output", "two timestamps", "msmon explain"),
        ({"append_output": ["Dec03_21-34-40", "2024-12-03"]}, "append_output", "two timestamps", "msmon explain"),  # P89
        ({"append_output": ["Dec03_21-34-40", "Xyz03_21-34-41"]}, "append_output", "two timestamps", "msmon explain"),
        ({"append_output": ["Dec03_21-34-40", "Dec03_21-34-39"]}, "append_output", "begins after it ends", "msmon explain"),
        ({"append_output": ["Dec31_23-00-00", "Jan01_01-00-00"]}, "append_output", "over New Year", "msmon explain"),
        ({"append_output": ["Feb30_00-00-00", "Mar01_00-00-00"]}, "append_output", "two timestamps", "msmon explain"),
        ({"append_output": ["Feb03_00-00-00", "Mar01_24-00-00"]}, "append_output", "two timestamps", "msmon explain"),
        ({"append_output": ["Feb00_00-00-00", "Mar01_00-00-00"]}, "append_output", "two timestamps", "msmon explain"),
        ({"append_output": ["Feb²3_00-00-00", "Mar01_00-00-00"]}, "append_output", "two timestamps", "msmon explain"),
        ({"targets": {"fc": {"input": "tuple[2]:5"}}}, "targets.fc.input", "its 2 tensors are 0 to 1", "msmon explain"),
        ({"targets": {"fc": {"output": "list[1]:1"}}}, "targets.fc.output", "its 1 tensors are 0 to 0", "msmon explain"),
        ({"targets": {"fc": {"output": "tuple[0]"}}}, "targets.fc.output", "it has no tensor", "msmon explain"),
        ({"alert": {"rules": [{"rule_name": "AnomalyGradient", "args": {"low": 5, "high": 4}}]}}, "alert.rules[0]", "must be below", "alert"),
        ({"append_output": ["Dec03_21-34-40", 1]}, "append_output[1]", "must be text", "msmon explain"),
        ({"start_step": -1}, "start_step", "should be greater than or equal to 0", "the default is 0"),  # P81
        ({"start_step": "x"}, "start_step", "must be a whole number", "the default is 0"),
        ({"start_step": True}, "start_step", "must be a whole number", "the default is 0"),
        ({"collect_times": -1}, "collect_times", "should be greater than or equal to 0", "the default is 100000000"),
        ({"step_interval": 0}, "step_interval", "should be greater than or equal to 1", "the default is 1"),
        ({"l2_targets": "x"}, "l2_targets", "must be an object", "write {…}"),  # P83
        ({"l2_targets": {"linear_hok": []}}, "l2_targets.linear_hok", "unknown key", "did you mean `linear_hook`?"),
        ({"l2_targets": {"linear_hook": "a"}}, "l2_targets.linear_hook", "must be a list", "write […]"),
        ({"l2_targets": {"linear_hook": [1]}}, "l2_targets.linear_hook[0]", "must be text", "msmon explain"),
        ({"sa_order": "x"}, "sa_order", "unknown value", "known are: `s,b,h,d`, `b,s,h,d`"),  # P84
        ({"sa_order": None}, "sa_order", "unknown value", "known are: `s,b,h,d`, `b,s,h,d`"),
        ({"format": "json"}, "format", "unknown value", "known are: `csv`, `tensorboard`, `api`"),  # P85
        ({"foo": 1}, "foo", "unknown key", "known are: `targets`"),
        ({"wg_distributoin": True}, "wg_distributoin", "unknown key", "did you mean `wg_distribution`?"),
        ({"switch": True, "dynamic_on": False}, "switch", "older name of `dynamic_on`", "keep one of them"),
    ],
    ids=str,
)  # fmt: skip
def test_refused(document: dict[str, Any], path: str, message: str, hint: str) -> None:
    """A wrong value is refused with the JSON path, what is wrong, and how to mend it or the close match."""
    found = problem(document)
    assert found.path == path
    assert message in found.message
    assert hint in found.hint
    assert found.hint


FLAGS = [name for name, default in DEFAULTS.items() if default is False]


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [2, "x", "false", 1, 0, None, []])
def test_flags_take_true_or_false_only(name: str, value: object) -> None:
    """P75, P76, P82: a flag is true or false; "false" in quotes is not taken for true, nor 1 for it."""
    found = problem({name: value})
    assert (found.path, found.message) == (name, "must be true or false")
    assert found.value == value


def test_refused_value_is_shown() -> None:
    """One line names what is wrong, the file, the path and the value; a long value is cut."""
    assert problem({"eps": "x"}).describe("monitor.json") == 'must be a number in `monitor.json` at `eps`: "x"'
    long = problem({"eps": "x" * 500}).describe("monitor.json")
    assert len(long) < 200
    assert long.endswith("…")
    assert problem({"foo": 1}).value is MISSING


def test_every_problem_is_named() -> None:
    """All problems are reported at once, not only the first."""
    document = {"ops": ["nrom"], "eps": "x", "foo": 1, "alert": {"rules": [{"rule_name": "X"}]}}
    assert {found.path for found in problems(document)} == {"ops[0]", "eps", "foo", "alert.rules[0].rule_name"}


def test_error_of_a_configuration() -> None:
    """The error ends the command with 2, and has the hint and the slug of its first problem."""
    with pytest.raises(ConfigError) as caught:
        parse_config({"foo": 1}, source="monitor.json")
    assert caught.value.exit_code is ExitCode.USAGE
    assert caught.value.slug == "unknown-key"
    assert caught.value.hint == caught.value.problems[0].hint
    assert "`foo`" in str(caught.value)


@pytest.mark.parametrize(
    ("document", "name", "value"),
    [
        ({"ops": []}, "ops", ("norm",)),  # P15
        ({"ops": ["max", "norm", "max"]}, "ops", ("max", "norm")),
        ({"ops": ["shape", "dtype", "id"]}, "ops", ("shape", "dtype", "id")),
        ({"eps": 1}, "eps", 1.0),
        ({"ndigits": 0}, "ndigits", 0),  # P71
        ({"ndigits": 20}, "ndigits", 20),
        ({"collect_times": 1e8}, "collect_times", 100_000_000),  # JSON reads 1e8 as a float
        ({"collect_times": 0}, "collect_times", 0),
        ({"step_count_per_record": 1_000_000}, "step_count_per_record", 1_000_000),
        ({"sa_order": "s, b,h,  d"}, "sa_order", "s,b,h,d"),  # P84
        ({"switch": True}, "dynamic_on", True),
        ({"module_ranks": [0, 3]}, "module_ranks", (0, 3)),
        ({"append_output": ["Dec03_21-34-40", "Dec03_21-34-41"]}, "append_output", ("Dec03_21-34-40", "Dec03_21-34-41")),
    ],
    ids=str,
)  # fmt: skip
def test_accepted(document: dict[str, Any], name: str, value: object) -> None:
    """Forms that users of the original write keep their meaning."""
    assert getattr(parsed(document), name) == value


@pytest.mark.parametrize("place", ["tensor", "tuple[2]:0", "tuple[1]", "list[3]:2", "tuple[2]: 0"])
def test_places_in_targets(place: str) -> None:
    """A target may say which tensor of a module it means."""
    target = parsed({"targets": {"a.0.fc": {"input": place, "output": None}}}).targets["a.0.fc"]
    assert target.input == place.replace(" ", "")
    assert target.output is None


def test_columns() -> None:
    """P12, P16: the configured ops in their order, then shape and dtype unless they are among them."""
    assert parsed({"ops": ["max", "id", "norm"]}).columns == ("max", "id", "norm", "shape", "dtype")
    assert parsed({"ops": ["dtype", "norm"]}).columns == ("dtype", "norm", "shape")
    assert parsed({"ops": ["dtype", "nans", "id", "min"]}).statistics == ("nans", "min")


def test_tensorboard_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the format is refused before anything starts, and the extra named."""
    monkeypatch.setattr(tensorboard.importlib.util, "find_spec", lambda _name: None)
    found = problem({"format": "tensorboard"})
    assert (found.path, found.slug) == ("format", "missing-extra")
    assert "msmon[tensorboard]" in found.hint


# The original's guide, section by section.
GUIDE_ACCEPTED: list[dict[str, Any]] = [
    {"targets": {}, "wg_distribution": True, "format": "csv", "ops": ["min", "max", "mean", "norm"], "ndigits": 16},
    {"targets": {}, "param_distribution": True, "format": "csv", "ops": ["norm", "min", "max", "nans"]},
    {"targets": {}, "wg_distribution": True, "format": "csv", "ops": ["norm", "min", "max", "nans"]},
    {"targets": {}, "mv_distribution": True, "format": "csv", "ops": ["norm", "min", "max", "nans"]},
    {"targets": {"module.encoder.layers.0.mlp": {}, "module.embedding.word_embedding.weight": {}}},
    {"wg_distribution": True, "monitor_mbs_grad": True},
    {"targets": {}, "xy_distribution": True, "forward_only": False, "all_xy": True, "ops": ["norm"]},
    {"targets": {}, "format": "csv", "stack_info": True},
    {"print_struct": True},
    {
        "l2_targets": {"linear_hook": ["0:0.self_attention.linear_qkv"]},
        "recording_l2_features": True,
        "sa_order": "b,s,h,d",
    },
    {"alert": {"rules": [NAN_RULE, TURBULENCE], "dump": True}},
]
GUIDE_WHOLE = {
    "targets": {
        "language_model.encoder.layers.0": {
            "input": "tuple[2]:0",
            "output": "tensor",
            "input_grad": "tuple[2]:0",
            "output_grad": "tuple[1]:0",
        }
    },
    "dynamic_on": False,
    "start_step": 0,
    "collect_times": 100000000,
    "step_interval": 1,
    "print_struct": False,
    "module_ranks": [0, 1, 2, 3],
    "ur_distribution": True,
    "xy_distribution": True,
    "all_xy": True,
    "forward_only": False,
    "backward_only": False,
    "mv_distribution": True,
    "param_distribution": True,
    "wg_distribution": True,
    "monitor_mbs_grad": True,
    "cc_distribution": {"enable": True, "cc_codeline": []},
    "alert": {"rules": [TURBULENCE], "dump": False},
    "format": "csv",
    "ops": ["min", "max", "norm", "zeros", "nans", "mean"],
    "eps": 1e-8,
    "ndigits": 12,
    "step_count_per_record": 1,
    "append_output": [],
    "squash_name": False,
}


@pytest.mark.parametrize("document", GUIDE_ACCEPTED, ids=str)
def test_guide_examples_that_work(document: dict[str, Any]) -> None:
    """The original guide's example files work unchanged."""
    config = parsed(document)
    for key in document:
        assert key in config.model_fields_set


def test_whole_guide_example() -> None:
    """The guide's full example is accepted."""
    config = parsed(GUIDE_WHOLE)
    assert config.ndigits == 12
    assert config.targets["language_model.encoder.layers.0"].output_grad == "tuple[1]:0"


# Files


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "monitor.json"
        path.write_bytes(content)
        return path

    return write


def file_problem(path: Path) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.source == str(path)
    (only,) = caught.value.problems
    return only


def test_file(write: Callable[[bytes], Path]) -> None:
    """A file is read, with or without a byte order mark."""
    assert load_config(write(b'{"ndigits": 3}')).ndigits == 3
    assert load_config(write(b'\xef\xbb\xbf{"ndigits": 4}')).ndigits == 4
    assert load_config(str(write('{"targets": {"层.0": {}}}'.encode()))).targets.keys() == {"层.0"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"ops": ["norm"],}', "line 1, column"),
        (b'{\n  "eps": 1e-8 // why\n}', "line 2, column"),
        (b"{'eps': 1}", "line 1, column 2"),
        (b"", "line 1, column 1"),
        ('{"eps": 1}'.encode("utf-16"), "not UTF-8"),
        (b'{"eps": ' + b"1" * 5000 + b"}", "digits"),
        (b"[" * 100_000, "recursion"),
        (b'{"eps": 1, "eps": 2}', "there twice"),
        (b'{"alert": {"dump": true, "dump": false}}', "there twice"),
    ],
    ids=["trailing comma", "comment", "single quotes", "empty", "UTF-16", "huge number", "deep", "repeated", "repeated inside"],
)  # fmt: skip
def test_files_that_are_no_json(write: Callable[[bytes], Path], content: bytes, message: str) -> None:
    """A file that is not the JSON one means is refused with the place and the likely cure, never by a traceback."""
    found = file_problem(write(content))
    assert message in found.message
    assert found.slug == "invalid-json"
    assert found.hint


@pytest.mark.parametrize("content", [b"[]", b'"norm"', b"null", b"3"])
def test_top_level(write: Callable[[bytes], Path], content: bytes) -> None:
    """The top level must be an object."""
    found = file_problem(write(content))
    assert (found.path, found.message, found.hint) == ("", "the top level must be an object", "write {…}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file and a directory are said as such."""
    for path, reason in ((tmp_path / "no.json", "No such file"), (tmp_path, "Is a directory")):
        found = file_problem(path)
        assert reason in found.message
        assert "--config" in found.hint


def test_document_is_read_without_checking(write: Callable[[bytes], Path]) -> None:
    """The command line lays its options over a document before it is checked."""
    assert read_document(write(b'{"foo": [1, {"a": null}]}')) == {"foo": [1, {"a": None}]}


# In words


def test_explained() -> None:
    """A configuration is explained in words: what, which columns, of what, when, where."""
    config = parsed(
        {
            "wg_distribution": True,
            "targets": {"fc": {}},
            "ops": ["max"],
            "start_step": 2,
            "step_interval": 3,
            "collect_times": 4,
            "module_ranks": [1],
        }
    )
    assert explain(config) == [
        "weight gradients: grad_unreduced, grad_reduced",
        "columns: max, shape, dtype",
        "of: fc",
        "every 3 steps from step 2 on, 4 times",
        "on ranks 1",
    ]
    nothing = explain(parsed({}))
    assert nothing[0].startswith("nothing:")
    assert nothing[2:] == ["of: every parameter and module", "every step from step 0 on"]


def test_problems_as_json() -> None:
    """Problems are available as plain values that JSON can hold."""
    with pytest.raises(ConfigError) as caught:
        parse_config({"foo": 1, "eps": "x"}, source="monitor.json")
    documents = json.loads(json.dumps(as_documents(caught.value)))
    assert {document["path"]: document.get("value") for document in documents} == {"foo": None, "eps": "'x'"}
    assert all({"message", "hint", "slug"} <= document.keys() for document in documents)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"wg_distribution": True, "monitor_mbs_grad": True}, []),
        ({"monitor_mbs_grad": True}, ["monitor_mbs_grad needs wg_distribution"]),
        (
            {"forward_only": True, "all_xy": True},
            ["forward_only needs xy_distribution", "all_xy needs xy_distribution"],
        ),
        ({"backward_only": True}, ["backward_only needs xy_distribution"]),
        ({"recording_l2_features": True}, ["recording_l2_features needs l2_targets"]),
        ({"recording_l2_features": True, "l2_targets": {"linear_hook": []}}, []),
        ({"l2_targets": {"linear_hook": ["a"]}}, ["l2_targets needs recording_l2_features"]),
        ({"cc_distribution": {"cc_pre_hook": True}}, ["cc_distribution needs enable"]),
        ({"cc_distribution": {"enable": True, "cc_codeline": ["a"]}}, []),
        ({"collect_times": 0}, ["collect_times is 0"]),
    ],
)
def test_keys_without_effect(document: dict[str, Any], said: list[str]) -> None:
    """A key that another one makes useless is named."""
    config = parse_config(document)
    found = without_effect(config)
    assert [line.partition(":")[0] for line in found] == said
    assert explain(config)[-len(found) :] == found or not found
