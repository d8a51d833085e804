"""``msmon csv2tb``."""

from __future__ import annotations

import dataclasses
from pathlib import Path  # noqa: TC003 - Typer reads the annotations
from typing import Annotated

import typer

from msmon_cli import console
from msmon_cli.values import usable_path


def csv2tb(  # noqa: PLR0917 - Typer calls it by name
    directory: Annotated[
        Path,
        typer.Argument(
            help="Output root of the runs, or one run directory.",
            metavar="DIR",
            show_default=False,
            callback=usable_path,
        ),
    ],
    first: Annotated[
        str,
        typer.Option(
            "--from", help="Only directories of this timestamp and later: Dec03_21-34-40.", show_default=False
        ),
    ] = "",
    last: Annotated[
        str, typer.Option("--to", help="Only directories of this timestamp and earlier.", show_default=False)
    ] = "",
    run: Annotated[str, typer.Option("--run", help="Only the run with this id: 2db450a0.", show_default=False)] = "",
    types: Annotated[
        str,
        typer.Option(
            "--types", help="Kinds of data, comma-separated: grad_reduced,actv. Default: all.", show_default=False
        ),
    ] = "",
    processes: Annotated[int, typer.Option("--processes", "-j", min=1, help="How many processes convert.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to. Default: {now}-csv2tensorboard_by_step in DIR.",
            show_default=False,
            callback=usable_path,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Convert the CSV files of runs into event files for TensorBoard.

    Runs whose steps follow one another are joined; runs that have the same steps get a directory each. Values that are NaN or
    infinite are counted under the tags `nonfinite/…`. Needs the extra tensorboard.

    For example:

      msmon csv2tb monitor_output

      msmon csv2tb monitor_output --from Dec03_21-34-40 --types grad_reduced -j 8
    """
    from msmon.offline.csv2tb import convert

    with console.progress("converting", shown=not as_json) as advance:
        done = convert(
            directory,
            first=first or None,
            last=last or None,
            run=run or None,
            kinds=[word for part in types.split(",") if (word := part.strip())] or None,
            processes=processes,
            output=output,
            progress=advance,
        )
    for note in done.notes():
        console.show_warning(note)
    if as_json:
        series = [dataclasses.asdict(one) for one in done.series]
        document = {
            "schema_version": 1,
            "output": str(done.output),
            "runs": done.runs,
            "series": series,
            "faults": done.faults,
        }
        console.show_json(document)
        return
    console.show_line(str(done.output))
    ranks = len({one.rank for one in done.series})
    kinds = len({one.kind for one in done.series})
    values = sum(one.values for one in done.series)
    console.show_note(f"{values} values of {kinds} kinds of data, {ranks} ranks")
    console.show_note(f"next: {done.next_command()}")
