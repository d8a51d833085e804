"""From a JSON file to a configuration, or to every problem it has: path, value, close match and fix."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from msmon.config.availability import unavailable
from msmon.config.schema import MonitorConfig
from msmon.errors import MISSING, ConfigError, Problem
from msmon.regular_file import read_regular

if TYPE_CHECKING:
    from os import PathLike

_COMMAND_LINE = "command line"


def load_config(path: str | PathLike[str]) -> MonitorConfig:
    """Read and check a configuration file.

    Args:
        path: A JSON file in UTF-8.

    Raises:
        ConfigError: The file cannot be read, is not JSON, or has problems; all of them are named.
    """
    return parse_config(read_document(path), source=str(path))


def read_document(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a JSON file whose top level is an object.

    Raises:
        ConfigError: The file cannot be read, is not JSON, repeats a key, or is not an object.
    """
    source = str(path)
    try:
        text = _read(path).decode("utf-8-sig")
        document = json.loads(text, object_pairs_hook=_unique_keys)
    except OSError as error:
        problem = Problem("", f"cannot read the file ({error.strerror})", hint="check the path given with --config")
        raise ConfigError(source, [problem]) from error
    except json.JSONDecodeError as error:
        hint = "JSON knows no comments, no trailing commas, and only double quotes"
        problem = Problem("", f"line {error.lineno}, column {error.colno}: {error.msg}", hint=hint, slug="invalid-json")
        raise ConfigError(source, [problem]) from error
    except UnicodeDecodeError as error:
        problem = Problem("", "the file is not UTF-8", hint="save it as UTF-8", slug="invalid-json")
        raise ConfigError(source, [problem]) from error
    except _RepeatedKeyError as error:
        problem = Problem(str(error), "the key is there twice", hint="keep one of them", slug="invalid-json")
        raise ConfigError(source, [problem]) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or brackets as deep
        problem = Problem("", f"no JSON that can be read ({error})", hint="is it the right file?", slug="invalid-json")
        raise ConfigError(source, [problem]) from error
    if not isinstance(document, dict):
        problem = Problem("", "the top level must be an object", document, "write {…}")
        raise ConfigError(source, [problem])
    return document


def _read(path: str | PathLike[str]) -> bytes:
    if Path(path).is_fifo():  # `--config <(…)`: the shell writes it
        return Path(path).read_bytes()
    return read_regular(path)


def parse_config(document: dict[str, Any], *, source: str = _COMMAND_LINE) -> MonitorConfig:
    """Check a document.

    Args:
        document: What the JSON file holds.
        source: The file, for messages.

    Raises:
        ConfigError: With every problem found.
    """
    try:
        config = MonitorConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(source, [_problem(details) for details in error.errors()]) from None
    problems = unavailable(config)
    if problems:
        raise ConfigError(source, problems)
    return config


class _RepeatedKeyError(ValueError):
    """A key stands twice in one object."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _RepeatedKeyError(key)
        result[key] = value
    return result


def _problem(details: Any) -> Problem:  # noqa: ANN401 - pydantic's ErrorDetails, whose home moved between versions
    location = tuple(details["loc"])
    path = _json_path(location)
    if details["type"] == "extra_forbidden":
        if path == "switch":  # accepted when it stands alone
            return Problem(path, "is the older name of `dynamic_on`, which is there too", hint="keep one of them")
        known = _known_keys(location[:-1])
        return Problem(path, "unknown key", MISSING, _close(str(location[-1]), known), slug="unknown-key")
    value = details.get("input", MISSING)
    if details["type"] == "missing":
        return Problem(path, "a required key is missing", MISSING, f"add `{path}`")
    if details["type"] == "literal_error":
        choices = [choice.strip("'") for choice in details["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        if location[0] == "sa_order":
            choices = ["s,b,h,d", "b,s,h,d"]
        return Problem(path, "unknown value", value, _close(str(value), choices))
    kind = details["type"]
    message = _MESSAGES.get(kind) or details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return Problem(path, message, value, _fix(kind, str(location[0])))


_MESSAGES = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}


def _fix(kind: str, key: str) -> str:
    if kind == "bool_type":
        return "write true or false, without quotes"
    if kind == "tuple_type":
        return "write […]"
    if _MESSAGES.get(kind) == "must be an object":
        return "write {…}"
    field = MonitorConfig.model_fields.get(key)
    default = field.get_default(call_default_factory=True) if field else None
    if isinstance(default, (int, float, str)):
        return f"the default is {json.dumps(default)}"
    return f"`msmon explain {key}` says what it takes"


def _json_path(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier():
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part, ensure_ascii=False)}]"
    return text


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    """The keys allowed at a place in the document, found by walking the schema along the path."""
    model: Any = MonitorConfig
    for part in location:
        if isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields:
            model = model.model_fields[str(part)].annotation
        elif get_args(model):
            model = next((a for a in get_args(model) if isinstance(a, type) and issubclass(a, BaseModel)), None)
    if isinstance(model, type) and issubclass(model, BaseModel):
        return list(model.model_fields)
    return []


def _close(word: str, known: list[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if match:
        return f"did you mean `{match[0]}`?"
    return "known are: " + ", ".join(f"`{name}`" for name in known)
