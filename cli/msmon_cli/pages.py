"""What the documentation says of a word: the slug of an error, a line on stderr, a key, a rule, a column, a whole page.

The pages are those of ``docs/``, which the package carries along.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from msmon.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLACES = (Path(__file__).with_name("docs"), Path(__file__).parents[2] / "docs")  # of a wheel, of a checkout
MESSAGES = "messages"
"""The page of errors and lines on stderr: what it says of a word goes before what others say."""

_SHORTEST = 6
"""Letters that a part of a line must have to be looked for."""

_HEADING = re.compile(r"(#+) (.+)")
_CODE = re.compile(r"`([^`]+)`")
_BAR = re.compile(r"(?<!\\)\|")
_BOLD = re.compile(r"\*\*(.+?)\*\*")
_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\((?:(\w+)\.md)?(?:#([\w-]+))?\)")


def explain(words: str) -> str:
    """What the pages say, in Markdown: a page, a section, or rows of tables and paragraphs.

    Args:
        words: The name of a page, a heading in the form of a slug, a word that begins a row or a paragraph, or a line
            that msmon wrote on stderr, or a part of it.

    Raises:
        OptionError: No page says anything of it.
    """
    wanted = words.strip().removesuffix(".md").lower()
    found = _pages().get(wanted) or _sections().get(wanted) or "\n\n".join(_about_word(wanted) or _about_line(wanted))
    if found:
        return _LINK.sub(_as_command, found).rstrip("\n") + "\n"
    close = difflib.get_close_matches(words, topics(), n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise OptionError(f"no page explains `{words}`", hint=f"{hint}`msmon explain` lists what there is")


def topics() -> list[str]:
    """Every word that is explained, as one may write it."""
    return list(dict.fromkeys([*slugs(), *_pages(), *_sections(), *(word for word in _remarks() if " " not in word)]))


def slugs() -> dict[str, str]:
    """The slugs of errors, each with the first sentence about it."""
    found = {}
    for slug, text in _sections_of(_pages()[MESSAGES], level=2):
        found[slug] = " ".join(text.partition("\n\n")[2].split()).partition(". ")[0].partition(": ")[0].rstrip(".")
    return found


def pages() -> dict[str, str]:
    """The names of the pages, each with its title."""
    return {name: text.partition("\n")[0].lstrip("# ") for name, text in _pages().items()}


@cache
def _pages() -> dict[str, str]:
    folder = next(place for place in _PLACES if place.is_dir())
    paths = sorted(folder.glob("*.md"), key=lambda path: (path.stem != MESSAGES, path.stem))
    return {path.stem: _COMMENT.sub("", path.read_text(encoding="utf-8")) for path in paths}


@cache
def _sections() -> dict[str, str]:
    found: dict[str, str] = {}
    for page in _pages().values():
        for level in (2, 3):
            for slug, text in _sections_of(page, level):
                found.setdefault(slug, text)
    return found


def _sections_of(page: str, level: int) -> Iterator[tuple[str, str]]:
    """The sections of a level, each under its heading, in the form in which links name it, and with all below it."""
    name, lines, inside_code = "", [""], False
    for line in [*page.splitlines(), "# "]:
        inside_code ^= line.startswith("```")
        heading = None if inside_code else _HEADING.match(line)
        if heading is not None and len(heading[1]) <= level:
            if name:
                yield name, "\n".join(lines)
            name = re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") if len(heading[1]) == level else ""
            lines = []
        lines.append(line)


@cache
def _remarks() -> dict[str, list[str]]:
    """Rows of tables by what stands as code in their first cell, paragraphs by what they begin with in bold."""
    found: dict[str, list[str]] = {}
    for name, page in _pages().items():
        for block in page.split("\n\n"):
            lines = block.splitlines()
            if len(lines) > 2 and lines[1].startswith("|--"):  # noqa: PLR2004 - a head, a rule, and rows
                for row in [line for line in lines[2:] if line.startswith("|")]:
                    text = f"{_as_list(lines[0], row)}\n\nMore: `msmon explain {name}`"
                    for word in _CODE.findall(_BAR.split(row)[1]):
                        found.setdefault(word, []).append(text)
            elif bold := _BOLD.match(block):
                for word in re.findall(r"[\w.:-]+", bold[1]):
                    found.setdefault(word.rstrip(".:"), []).append(block)
    return found


def _as_list(head: str, row: str) -> str:
    """A row of a table by itself: a line a cell, whatever the width of the terminal."""
    names, cells = ([cell.strip().replace("\\|", "|") for cell in _BAR.split(line)[1:-1]] for line in (head, row))
    lines = [f"- {name}: {cell}" for name, cell in zip(names[1:], cells[1:], strict=True) if cell]
    return "\n".join([f"**{names[0]}** {cells[0]}".replace("****", "").strip(), "", *lines])


def _about_word(wanted: str) -> list[str]:
    return [remark for word, remarks in _remarks().items() if word.lower() == wanted for remark in remarks]


def _about_line(line: str) -> list[str]:
    """What is said of lines like this one: … stands for what differs, and a part of a line will do."""
    found: tuple[int, list[str]] = 0, []
    for pattern, remarks in _remarks().items():
        fixed = [part.strip().lower() for part in pattern.split("…") if part.strip()]
        if " " not in pattern or max(map(len, fixed), default=0) < _SHORTEST:
            continue
        whole = re.search(".*".join(map(re.escape, fixed)), line)
        if whole or (len(line) >= _SHORTEST and line in pattern.lower()):
            found = max(found, (sum(map(len, fixed)), remarks))  # the one that says most of it
    return found[1]


def _as_command(link: re.Match[str]) -> str:
    """A link to another place of the documentation, as what shows that place here."""
    text, page, section = link.groups()
    command = f"`msmon explain {section or page}`"
    return command if text in {section, f"{page}.md"} else f"{text} ({command})"
