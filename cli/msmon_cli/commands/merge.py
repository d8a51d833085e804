"""``msmon merge``."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - Typer reads the annotations
from typing import Annotated

import typer

from msmon_cli import console
from msmon_cli.values import usable_path


def merge(
    directory: Annotated[
        Path,
        typer.Argument(help="Output root of the run.", metavar="DIR", show_default=False, callback=usable_path),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where to. Default: `merged` in DIR.", show_default=False, callback=usable_path
        ),
    ] = None,
    run: Annotated[
        str, typer.Option("--run", help="The run with this id: 2db450a0. Default: the latest.", show_default=False)
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Merge the rows of all ranks into rows of whole tensors, where FSDP or tensor parallel has spread these.

    Weights, reduced gradients and optimizer state. What comes out is a run directory that every command reads.

    For example:

      msmon merge monitor_output

      msmon merge monitor_output --run 2db450a0 --output whole
    """
    from msmon.offline.histories import other_runs
    from msmon.offline.merge import merge as merge_ranks
    from msmon.runtime.run_directory import parse_directory_name

    merged = merge_ranks(directory, output, run=run)
    parsed = parse_directory_name(merged.directory.name)
    others = other_runs(directory, parsed.run) if parsed is not None and not run else []
    if parsed is not None and others:
        console.show_note(f"merged is the latest run, {parsed.run}; --run merges another: {', '.join(others)}")
    for fault in merged.faults:
        console.show_warning(fault)
    for kind, reason in sorted(merged.left_out.items()):
        console.show_note(f"{kind}: left out, {reason}")
    if as_json:
        console.show_json(
            {
                "schema_version": 1,
                "output": str(merged.directory),
                "ranks": merged.ranks,
                "rows": merged.rows,
                "left_out": merged.left_out,
                "faults": merged.faults,
            }
        )
        return
    console.show_line(str(merged.directory))
    console.show_note(
        f"{sum(merged.rows.values()):,} rows of {len(merged.rows)} kinds of data from {len(merged.ranks)} ranks"
    )
