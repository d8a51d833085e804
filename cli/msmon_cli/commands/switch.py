"""``msmon on``, ``msmon off`` and ``msmon status``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from msmon_cli import console
from msmon_cli.values import usable_path

File = Annotated[
    Path,
    typer.Argument(
        help="The configuration of a run under DYNAMIC_MONITOR=True.", show_default=False, callback=usable_path
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def on(file: File, as_json: Json = False) -> None:
    """Start recording in a run that watches this configuration, from its next step on.

    Sets `dynamic_on` in the file, and nothing else.
    """
    _switch(file, on=True, as_json=as_json)


def off(file: File, as_json: Json = False) -> None:
    """Stop recording in a run that watches this configuration, from its next step on."""
    _switch(file, on=False, as_json=as_json)


def status(file: File, as_json: Json = False) -> None:
    """Say whether a configuration asks for recording, and of what."""
    from msmon.config.explain import explain
    from msmon.config.load import load_config

    config = load_config(file)
    _show(file, on=config.dynamic_on, as_json=as_json)
    if not as_json:
        for line in explain(config):
            console.show_line(f"  {line}")


def _switch(file: Path, *, on: bool, as_json: bool) -> None:
    from msmon.config.edit import set_dynamic
    from msmon.config.load import load_config

    load_config(file)  # a run would not take over a file with problems: they are named here
    set_dynamic(file, on=on)
    _show(file, on=on, as_json=as_json)


def _show(file: Path, *, on: bool, as_json: bool) -> None:
    if as_json:
        console.show_json({"schema_version": 1, "file": str(file), "dynamic_on": on})
    else:
        console.show_line(f"{file}: {'on' if on else 'off'}")
