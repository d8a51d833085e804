"""What the terminal shows: data on stdout, everything else on stderr, understandable without colour."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.markup import escape

import msmon
from msmon.errors import ConfigError, MsmonError

DOCS = "docs/messages.md"

_err = Console(stderr=True, highlight=False, soft_wrap=True)
_out = Console(highlight=False, soft_wrap=True)


def show_error(error: MsmonError) -> None:
    """What is wrong and where, an empty line, how to mend it, where it is explained."""
    if isinstance(error, ConfigError):
        for problem in error.problems:
            _error(problem.describe(error.source), problem.hint, problem.slug)
    else:
        _error(error.message, error.hint, error.slug)


def _error(text: str, hint: str, slug: str) -> None:
    _err.print(f"[bold red]error:[/] {escape(text)}\n")
    if hint:
        _err.print(f"[bold]hint:[/] {escape(hint)}")
    _err.print(f"see {DOCS}#{slug}\n")


def show_warning(text: str) -> None:
    """A line on stderr."""
    _err.print(f"[yellow]warning:[/] {escape(text)}")


def show_line(text: str) -> None:
    """A line of data."""
    _out.print(escape(text))


def show_json(document: object) -> None:
    """A JSON document, without colour."""
    print(json.dumps(document, indent=2, ensure_ascii=False))  # noqa: T201 - data goes out untouched by rich


def show_version() -> None:
    """The versions that matter, from metadata: no framework is imported."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    show_line(f"msmon {msmon.__version__} (python {platform.python_version()}, torch {torch})")
