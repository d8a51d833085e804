"""`msmon explain`: whatever an error, a message or a configuration names is explained where msmon is installed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from conftest import MSMON
from unit.test_errors import slugs_in_use

from msmon.alerts.catalogue import default_rules
from msmon.config.schema import MonitorConfig
from msmon.errors import OptionError
from msmon_cli import pages

REPOSITORY = Path(__file__).parents[2]
LINES = re.findall(r"^\| (`.+?`) \| (.+) \|$", pages.explain("messages"), flags=re.MULTILINE)


def explain(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}, **env}
    return subprocess.run([MSMON, "explain", *words], env=environment, capture_output=True, text=True, timeout=900)


def test_what_there_is() -> None:
    """Every slug and every page is listed, a line each."""
    done = explain()
    assert (done.returncode, done.stderr) == (0, "")
    names = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert set(names) == slugs_in_use() | {path.stem for path in (REPOSITORY / "docs").glob("*.md")}


@pytest.mark.parametrize("word", pages.topics())
def test_every_word_has_a_text(word: str) -> None:
    """No link is left in it that leads to a file."""
    text = pages.explain(word)
    assert len(text.split()) > 5
    assert not re.search(r"\]\((\w+\.md|#)", text)


def test_words_of_a_configuration() -> None:
    """Every key and every alert rule."""
    for key in MonitorConfig.model_fields:
        assert f"**key** `{key}`\n" in pages.explain(key)
    for rule in default_rules():
        name = rule["rule_name"]
        assert f"**rule** `{name}`\n" in pages.explain(name) == pages.explain(name.lower())
        assert f"**{name}" in pages.explain(name)


@pytest.mark.parametrize(("cell", "meaning"), LINES)
def test_lines_on_stderr(cell: str, meaning: str) -> None:
    """A line is found as it was printed, whatever stands in place of …"""
    for pattern in re.findall(r"`([^`]+)`", cell):
        assert meaning in pages.explain(f"msmon: [rank 3] {pattern.replace('…', 'Some thing (4)')}")


def test_part_of_a_line() -> None:
    """A few words of it will do."""
    assert "could not start in a process" in pages.explain("cannot watch this process")


@pytest.mark.parametrize("folder", ["msmon", "cli/msmon_cli", "docs"])
def test_what_points_here_is_explained(folder: str) -> None:
    """Wherever the program or a page says `msmon explain WORD`, and no text of the program names a file of docs/."""
    for path in sorted((REPOSITORY / folder).rglob("*.*")):
        if path.suffix not in {".py", ".md"}:
            continue
        for word in re.findall(r"`msmon explain (\w[\w.-]*)`", path.read_text()):
            if word.isupper():
                continue  # stands for any
            assert pages.explain(word), path


@pytest.mark.parametrize(
    ("word", "close"), [("wrong-optoin", "wrong-option"), ("AnomalySpiek", "AnomalySpike"), ("##", "")]
)
def test_a_word_without_a_page(word: str, close: str) -> None:
    """One message, with what comes close."""
    with pytest.raises(OptionError, match=re.escape(f"`{word}`")) as error:
        pages.explain(word)
    assert ("did you mean" in error.value.hint) == bool(close)
    assert close in error.value.hint
    assert "`msmon explain` lists" in error.value.hint


def test_as_the_user_sees_it() -> None:
    """Markdown as it is written when piped, laid out to the width of a terminal; exit code 2 for what is not there."""
    piped = explain("AnomalyInf")
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, pages.explain("AnomalyInf"), "")
    for width in (40, 80):
        shown = explain("alerts", FORCE_COLOR="1", TERM="xterm", COLUMNS=str(width))
        lines = re.sub(r"\x1b\[[\d;]*m", "", shown.stdout).splitlines()
        assert width / 2 < max(map(len, lines)) <= width
        assert not re.search(r"Anomal\w*…", "".join(lines)), "names in tables are not cut"
    missing = explain("wrong-optoin")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.endswith("more: msmon explain wrong-option\n\n")
