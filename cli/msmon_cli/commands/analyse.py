"""``msmon analyse``."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - Typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from msmon.errors import ExitCode, OutputError
from msmon_cli import console

if TYPE_CHECKING:
    from msmon.offline.analyse import Analysis

_LONGEST = 10_000_000
"""Steps in a range of ``--steps``."""


def analyse(  # noqa: PLR0917 - Typer calls it by name
    directory: Annotated[
        Path, typer.Argument(help="Output root, its anomaly_detected, or one run directory.", metavar="DIR")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where anomaly_analyse.json goes. Default: anomaly_detected.", show_default=False
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
            "--config", "-c", help="Apply the rules of this configuration to the CSV files.", show_default=False
        ),
    ] = None,
    all_runs: Annotated[
        bool, typer.Option("--all-runs", help="Rank every run below DIR, not only the latest.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
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

    wanted = _steps(steps)
    rules = load_config(config).alert.rules if config is not None else ()
    if config is not None and not rules:
        raise typer.BadParameter(f"{config} has no alert rules", param_hint="--config")
    with console.progress("reading") as progress:
        analysis = rank_anomalies(directory, top=top, steps=wanted, rules=rules, all_runs=all_runs, progress=progress)
    path = result_path(directory) if output is None else output
    if path.is_dir():
        path = result_path(path)
    replaced = path.exists()
    try:
        write_result(analysis, path)
    except OSError as error:
        hint = "choose another place with --output"
        raise OutputError(f"cannot write `{path}` ({error.strerror})", hint=hint) from error
    if as_json:
        console.show_json(_document(analysis, path))
    else:
        others = other_runs(directory, analysis.run) if analysis.run and not all_runs else []
        _show(analysis, path, others, replaced=replaced)
    if exit_code and analysis.total:
        raise typer.Exit(ExitCode.ANOMALIES)
    if exit_code and analysis.unreadable and analysis.source == "anomaly.json":
        raise typer.Exit(ExitCode.FAILED)


def _show(analysis: Analysis, path: Path, others: list[str], *, replaced: bool) -> None:
    for unreadable in analysis.unreadable:
        console.show_warning(f"{unreadable} is no whole anomaly.json: what could not be read is left out")
    if not analysis.total:
        console.show_line("no anomalies" + (" in what could be read" if analysis.unreadable else ""))
    else:
        total, ranks, shown = analysis.total, len(analysis.by_rank), len(analysis.first)
        found = f"{total:,} {'anomalies' if total > 1 else 'anomaly'} on {ranks} rank{'s' if ranks > 1 else ''}"
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
        "written_to": str(path),
        "anomalies": [{"key": key, **entry} for key, entry in analysis.first],
    }


def _steps(text: str) -> list[int]:
    """``3,7,10-20``, also in the brackets of the original's list."""
    found: list[int] = []
    for word in text.strip("[] ").replace(" ", "").split(","):
        first, dash, last = word.partition("-")
        if not word:
            continue
        if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) - int(first) > _LONGEST:
            raise typer.BadParameter(f"{word!r} is no step, and no range of steps such as 10-20", param_hint="--steps")
        found += range(int(first), int(last or first) + 1)
    return found
