"""``msmon validate-config``."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - Typer reads the annotations
from typing import Annotated

import typer

from msmon.errors import ConfigError
from msmon_cli import console
from msmon_cli.values import usable_path


def validate_config(
    file: Annotated[
        Path | None, typer.Argument(help="The configuration to check.", show_default=False, callback=usable_path)
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema instead.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say what would be recorded.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check a configuration: every problem with its place, its value and its fix.

    Ends with 0 when there is none, else with 2.
    """
    from msmon.config import explain as explanation
    from msmon.config.load import load_config
    from msmon.config.schema import json_schema

    if schema:
        console.show_json(json_schema())
        return
    if file is None:
        raise typer.BadParameter("name a file, or ask for --schema", param_hint="FILE")
    try:
        config = load_config(file)
    except ConfigError as error:
        if as_json:
            console.show_json({"schema_version": 1, "file": str(file), "problems": explanation.as_documents(error)})
            raise typer.Exit(error.exit_code) from None
        raise
    lines = explanation.explain(config)
    if as_json:
        console.show_json({"schema_version": 1, "file": str(file), "problems": [], "records": lines})
        return
    console.show_line(f"{file}: ok")
    if explain:
        for line in lines:
            console.show_line(f"  {line}")
