"""``msmon analyse``."""

from __future__ import annotations

import os
from pathlib import Path  # noqa: TC003 - Typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from msmon.errors import ExitCode, OutputError
from msmon.log import printable
from msmon_cli import console
from msmon_cli.values import usable_path, whole_number, wrong_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msmon.offline.analyse import Analysis


class StepRanges:
    """Which steps are wanted.

    Args:
        ranges: They are in one of these.
    """

    def __init__(self, ranges: Sequence[range]) -> None:
        self._ranges = ranges

    def __contains__(self, step: object) -> bool:
        return any(step in each for each in self._ranges)


def analyse(  # noqa: PLR0917 - Typer calls it by name
    directory: Annotated[
        Path,
        typer.Argument(
            help="Output root, its anomaly_detected, or one run directory.", metavar="DIR", callback=usable_path
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where anomaly_analyse.json goes. Default: anomaly_detected.",
            show_default=False,
            callback=usable_path,
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", "--topk", "-k", min=1, help="How many to keep.")] = 8,
    steps: Annotated[
        str,
        typer.Option("--steps", "--step", "-s", help="Only these steps, such as 3,7,10-20.", show_default=False),
    ] = "",
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="Apply the rules of this configuration to the CSV files.",
            show_default=False,
            callback=usable_path,
        ),
    ] = None,
    all_runs: Annotated[
        bool, typer.Option("--all-runs", help="Rank every run below DIR, not only the latest.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="End with 3 when there are anomalies.")] = False,
) -> None:
    """Rank the anomalies of a run over all its ranks: which tensor was first?

    Reads what the ranks wrote while the run went on; where they wrote nothing, the rules are applied to the CSV files.

    For example:

      msmon analyse monitor_output

      msmon analyse monitor_output -k 20 -s 100-200 --json
    """
    from msmon.config.load import load_config
    from msmon.offline.analyse import analyse as rank_anomalies
    from msmon.offline.analyse import result_path, write_result
    from msmon.offline.histories import other_runs

    if as_json and as_csv:
        raise typer.BadParameter("choose one of --json and --csv", param_hint="--csv")
    wanted = _steps(steps)
    rules = load_config(config).alert.rules if config is not None else ()
    if config is not None and not rules:
        raise typer.BadParameter(f"{printable(str(config))} has no alert rules", param_hint="--config")
    with console.progress("reading") as progress:
        analysis = rank_anomalies(directory, top=top, steps=wanted, rules=rules, all_runs=all_runs, progress=progress)
    path = result_path(directory) if output is None else output
    if os.path.isdir(path):  # noqa: PTH112 - Path.is_dir raises for what cannot be
        path = result_path(path)
    replaced = os.path.lexists(path)
    try:
        write_result(analysis, path)
    except OSError as error:
        hint = "choose another place with --output"
        raise OutputError(f"cannot write `{path}` ({error.strerror or error})", hint=hint) from error
    if as_json:
        console.show_json(_document(analysis, path))
    else:
        others = other_runs(directory, analysis.run) if analysis.run and not all_runs else []
        _show(analysis, path, others, as_csv=as_csv, replaced=replaced)
    if exit_code and analysis.total:
        raise typer.Exit(ExitCode.ANOMALIES)
    if exit_code and analysis.damaged:
        raise typer.Exit(ExitCode.FAILED)


def _show(analysis: Analysis, path: Path, others: list[str], *, as_csv: bool, replaced: bool) -> None:
    for fault in analysis.faults:
        console.show_warning(fault)
    total, ranks, shown = analysis.total, len(analysis.by_rank), len(analysis.first)
    found = f"{total:,} {'anomalies' if total > 1 else 'anomaly'} on {ranks} rank{'s' if ranks > 1 else ''}"
    if as_csv:
        console.show_anomalies_as_csv(analysis)
    elif not total:
        console.show_line("no anomalies" + (" in what could be read" if analysis.damaged else ""))
    else:
        console.show_line(f"{found}; the first {shown}:" if shown < total else f"{found}:")
        console.show_anomalies(analysis)
    if others:
        console.show_note(f"ranked is the latest run, {analysis.run}; --all-runs ranks these too: {', '.join(others)}")
    if analysis.left_out:
        console.show_note(f"{analysis.left_out:,} anomalies of other runs are left out (--all-runs ranks them too)")
    if analysis.source == "csv":
        console.show_note("no anomaly.json was used: the rules were applied to the CSV files")
    console.show_note(f"{'replaced' if replaced else 'wrote'} {path}")


def _document(analysis: Analysis, path: Path) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "source": analysis.source,
        "run": analysis.run,
        "total": analysis.total,
        "by_rank": {str(rank): count for rank, count in sorted(analysis.by_rank.items())},
        "left_out": analysis.left_out,
        "unreadable": [str(unreadable) for unreadable in analysis.unreadable],
        "faults": analysis.faults,
        "written_to": str(path),
        "anomalies": [{"key": key, **entry} for key, entry in analysis.first],
    }


def _steps(text: str) -> StepRanges | None:
    """``3,7,10-20``, also in the brackets of the original's list; ``None`` for no step at all."""
    found: list[range] = []
    for word in text.strip("[] ").replace(" ", "").split(","):
        if not word:
            continue
        begin, dash, end = word.partition("-")
        first, last = whole_number(begin), whole_number(end if dash else begin)
        if first is None or last is None:
            hint = "write steps and ranges of steps: 3,7,10-20"
            raise wrong_value("--steps", word, "no step, and no range of steps", hint)
        found.append(range(first, last + 1))
    return StepRanges(found) if found else None
