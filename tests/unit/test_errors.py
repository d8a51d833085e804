"""The error tree, and the page that explains every slug."""

from __future__ import annotations

import re
from pathlib import Path

import msmon
from msmon import errors
from msmon.errors import MISSING, ArgumentError, ConfigError, ExitCode, MsmonError, OutputError, Problem

ROOT = Path(msmon.__file__).parents[1]


def slugs_in_use() -> set[str]:
    sources = [*(ROOT / "msmon").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]
    assert len(sources) > 40
    found = {match for path in sources for match in re.findall(r'slug(?:: str)? ?= ?"([^"]*)"', path.read_text())}
    classes = [value for value in vars(errors).values() if isinstance(value, type) and hasattr(value, "slug")]
    return found | {value.slug for value in classes if isinstance(value.slug, str)}


def test_every_slug_is_explained() -> None:
    """Every slug in the sources has a heading in docs/messages.md with a paragraph below it, and no heading is left over."""
    page = (ROOT / "docs" / "messages.md").read_text()
    sections = re.findall(r"^## (\S+)\n\n(.+?)(?=\n#|\Z)", page, flags=re.MULTILINE | re.DOTALL)
    explained = dict(sections)
    assert len(explained) == len(sections)
    assert explained.keys() == slugs_in_use()
    assert all(len(text.split()) > 15 for text in explained.values())


def test_exit_codes() -> None:
    """Each error ends the command with the code of its kind."""
    assert MsmonError("x").exit_code == 1
    assert OutputError("x").exit_code == 1
    assert ArgumentError("x").exit_code == 2
    assert ConfigError("f", [Problem("a", "b")]).exit_code == ExitCode.USAGE == 2
    assert errors.CommandNotFoundError("x").exit_code == 127
    assert errors.CommandNotExecutableError("x").exit_code == 126


def test_every_error_is_one_of_ours() -> None:
    """One base catches them all; a wrong argument is a TypeError as well."""
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) == 10
    assert all(issubclass(value, MsmonError) for value in classes)
    assert issubclass(ArgumentError, TypeError)
    assert MsmonError("what", hint="how").hint == "how"


def test_a_problem_in_words() -> None:
    """A problem without a path or value is about the whole document."""
    assert Problem("", "no good").describe("") == "no good"
    assert Problem("a.b", "no good").describe("f.json") == "no good in `f.json` at `a.b`"
    assert Problem("a", "no good", None).describe("") == "no good at `a`: null"
    assert Problem("a", "no good", {1, 2}).describe("").endswith(": {1, 2}")
    assert Problem("a", "no good", MISSING).describe("").endswith("`a`")
    assert "层" in Problem("a", "no good", "层").describe("")
