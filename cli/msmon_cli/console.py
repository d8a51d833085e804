"""What the terminal shows: data on stdout, everything else on stderr, understandable without colour."""

from __future__ import annotations

import contextlib
import csv
import json
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape as escape_markup
from rich.text import Text
from rich.tree import Tree

import msmon
from msmon.errors import ConfigError, MsmonError
from msmon.log import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from msmon.bootstrap.doctor import Examination
    from msmon.offline.analyse import Analysis
    from msmon.offline.structure import ModuleNode

_TENSOR = re.compile(r"size=(?P<size>.+), dtype=torch\.(?P<dtype>\w+)")

_COLUMNS = ("#", "step", "micro", "rank", "kind", "tensor", "finding")
_NUMBERS = 4
"""Columns of numbers, which come first."""

_err = Console(stderr=True, highlight=False, soft_wrap=True)
_out = Console(highlight=False, soft_wrap=True)


def escape(text: str) -> str:
    """Text for rich that shows as it is, and does nothing to the terminal. Everything that is not ours goes through here."""
    return escape_markup(printable(text))


def show_error(error: MsmonError) -> None:
    """What is wrong and where, an empty line, how to mend it, what explains it."""
    if isinstance(error, ConfigError):
        for problem in error.problems:
            _error(problem.describe(error.source), problem.hint, problem.slug)
    else:
        _error(error.message, error.hint, error.slug)


def _error(text: str, hint: str, slug: str) -> None:
    _err.print(f"[bold red]error:[/] {escape(text)}\n")
    if hint:
        _err.print(f"[bold]hint:[/] {escape(hint)}")
    _err.print(f"more: msmon explain {slug}\n")


def show_warning(text: str) -> None:
    """A line on stderr."""
    _err.print(f"[yellow]warning:[/] {escape(text)}")


def show_note(text: str) -> None:
    """A line on stderr that is no warning."""
    _err.print(escape(text))


def show_line(text: str) -> None:
    """A line of data."""
    _out.print(escape(text))


def show_page(text: str) -> None:
    """Markdown: laid out on a terminal, as it is written anywhere else."""
    if _out.is_terminal:
        from msmon_cli.markdown import Page

        Console(highlight=False).print(Page(text))
    else:
        _out.print(text, markup=False, end="")


def show_topics(slugs: Mapping[str, str], pages: Mapping[str, str]) -> None:
    """What there is to be explained, a line each."""
    width = max(map(len, [*slugs, *pages]))
    for title, topics in {"Errors": slugs, "Pages": pages}.items():
        _out.print(f"[bold]{title}[/]")
        for name, text in topics.items():
            _out.print(f"  {name:{width}}  {escape(text)}")
    _out.print("\nAlso: any key of the configuration, alert rule, kind of file, or line that msmon wrote.")


def show_json(document: object) -> None:
    """A JSON document, without colour. What a terminal would act on is an escape of JSON."""
    lines = json.dumps(document, indent=2, ensure_ascii=False).split("\n")
    encoding = (getattr(sys.stdout, "encoding", "") or "").lower()
    if encoding.replace("-", "") == "utf8" and all(line.isprintable() for line in lines):
        print("\n".join(lines))  # noqa: T201 - data goes out untouched by rich
    else:
        print(json.dumps(document, indent=2))  # noqa: T201 - as above


def show_trees(roots: Iterable[ModuleNode]) -> None:
    """Models as trees: names, classes, what goes in and comes out, parameters."""
    for root in roots:
        tree = Tree(_label(root), guide_style="dim")
        _grow(tree, root)
        _out.print(tree, soft_wrap=False, overflow="fold")
    _err.print("∇ marks a tensor whose gradient came back", style="dim")


def _grow(tree: Tree, node: ModuleNode) -> None:
    for child in node.children:
        _grow(tree.add(_label(child)), child)


def _label(node: ModuleNode) -> str:
    described = node.described
    head = [f"[bold]{escape(node.name)}[/]"] if node.name else []
    head += [f"({node.count} equal)"] if node.count > 1 else []
    head += [f"[cyan]{escape(described['class'])}[/]"] if "class" in described else []
    lines = [" ".join(head)]
    if "output" in described:
        flow = " → ".join(_side(described, side) for side in ("input", "output"))
        lines.append(f"  {escape(flow)}")
    parameters = [
        f"{name} {one['shape']}{'' if one['trainable'] else ' frozen'}"
        for name, one in described.get("parameters", {}).items()
    ]
    if parameters:
        lines.append(f"  [dim]{escape(', '.join(parameters))}[/]")
    return "\n".join(lines)


def _side(described: Mapping[str, Any], side: str) -> str:
    """``(4, 3) float32 ∇``; of several tensors ``tuple[2] { … , … }``."""
    gradients = [text for key, text in described.get(f"{side}_grad", {}).items() if key != "config"]
    tensors: list[str] = []
    for key, text in described[side].items():
        match = _TENSOR.fullmatch(text)
        if match is not None:
            came = "size=" in gradients[len(tensors)] if len(tensors) < len(gradients) else False
            tensors.append(f"{match['size']} {match['dtype']}{' ∇' if came else ''}")
        elif key != "config":
            tensors.append(text.removeprefix("<class '").removesuffix("'>"))
    config = described[side]["config"]
    return ", ".join(tensors) if config in {"tensor", "list[1]"} else f"{config} {{{', '.join(tensors)}}}"


def show_anomalies(analysis: Analysis) -> None:
    """The first anomalies as a table, one a line, nothing cut, in the order in which they came to be.

    On a terminal that is too narrow for it, what was found stands below each tensor.
    """
    table = [_COLUMNS, *([printable(str(cell)) for cell in cells] for cells in _anomalies(analysis))]
    widths = [max(cell_len(row[place]) for row in table) for place in range(len(_COLUMNS) - 1)]
    lines = [
        "  ".join(
            _aligned(cell, width, right=place < _NUMBERS)
            for place, (cell, width) in enumerate(zip(row, widths, strict=False))
        )
        for row in table
    ]
    narrow = _out.is_terminal and any(
        cell_len(line) + 2 + cell_len(row[-1]) > _out.width for line, row in zip(lines, table, strict=True)
    )
    for number, (line, row) in enumerate(zip(lines, table, strict=True)):
        style = {0: "bold", 1: "bold red"}.get(number, "")
        if narrow:
            _out.print(Text(line.rstrip(), style))
            if number:
                _out.print(Text(f"    {row[-1]}", style))
        else:
            _out.print(Text(f"{line}  {row[-1]}", style))


def show_anomalies_as_csv(analysis: Analysis) -> None:
    """The first anomalies as CSV, one a line, with a header."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("number", "step", "micro_step", "rank", "kind", "tensor", "finding"))
    writer.writerows([printable(str(cell)) for cell in cells] for cells in _anomalies(analysis))


def _anomalies(analysis: Analysis) -> Iterator[tuple[object, ...]]:
    for number, (_, entry) in enumerate(analysis.first, start=1):
        tensor, _, where = str(entry["tag_name"]).rpartition("/rank")
        kind = where.partition("/")[2]
        finding = str(entry["message"]).removesuffix(f" in {entry['tag_name']} at step {entry['step']}")
        yield number, entry["step"], entry["micro_step"], entry["rank"], kind, tensor, finding


def _aligned(cell: str, width: int, *, right: bool) -> str:
    gap = " " * (width - cell_len(cell))
    return f"{gap}{cell}" if right else f"{cell}{gap}"


def show_processes(found: Examination) -> None:
    """The processes of a command that were reached, one a line, and what came of them all."""
    for process in found.processes:
        command = " ".join(" ".join(process.command).split())
        show_line(f"{process.pid:>7} of {process.parent:>7}  {process.decision:19}  {command}")
    ranks = ", ".join(map(str, found.ranks))
    _err.print(f"training steps were made by rank {ranks}" if ranks else "no training step was seen")
    _err.print(f"exit code of the command: {found.exit_code}")
    if found.ranks:
        _err.print("what was recorded is removed: `msmon run -- COMMAND` keeps it")
    _err.print("a Python process that is not listed has lost PYTHONPATH or its environment, or is on another host")


@contextlib.contextmanager
def progress(what: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, in a terminal only; yields what is to be called with how much is done, and of how much."""
    from rich.progress import Progress

    with Progress(console=_err, transient=True, disable=not (shown and _err.is_terminal)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_version() -> None:
    """The versions that matter, from metadata: no framework is imported."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    show_line(f"msmon {msmon.__version__} (python {platform.python_version()}, torch {torch})")
