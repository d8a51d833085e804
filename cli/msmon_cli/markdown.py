"""Markdown on a terminal. Slow to import, and of use to one command only."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.markdown import Markdown, MarkdownElement, TableElement
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


class _WholeTable(TableElement):
    """A table whose words are broken where there is no room, instead of cut."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in super().__rich_console__(console, options):
            if isinstance(part, Table):
                for column in part.columns:
                    column.overflow = "fold"
            yield part


class Page(Markdown):
    """Markdown without anything cut or hidden: tables are whole, links show where they lead."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {**Markdown.elements, "table_open": _WholeTable}

    def __init__(self, text: str) -> None:
        super().__init__(text, hyperlinks=False)
