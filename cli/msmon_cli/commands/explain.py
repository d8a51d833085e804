"""``msmon explain``."""

from __future__ import annotations

from typing import Annotated

import typer

from msmon_cli import console, pages


def _complete(incomplete: str) -> list[str]:
    return [topic for topic in pages.topics() if topic.startswith(incomplete)]


def explain(
    words: Annotated[
        str,
        typer.Argument(
            help="What the last line of an error names; a line that msmon wrote, or a part of it; a configuration key, "
            "an alert rule, a kind of file, a page. Without it: what there is.",
            show_default=False,
            autocompletion=_complete,
        ),
    ] = "",
) -> None:
    """Explain an error, a message or a word of the configuration: the documentation, in the terminal."""
    if words:
        console.show_page(pages.explain(words))
    else:
        console.show_topics(pages.slugs(), pages.pages())
