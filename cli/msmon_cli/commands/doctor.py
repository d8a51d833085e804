"""``msmon doctor``."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from msmon_cli import console
from msmon_cli.commands.print_struct import STDERR


def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="A short run of the training command.", metavar="COMMAND", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Find out why nothing is recorded.

    Without a command: whether msmon reaches a Python process of this environment, and what a training there needs.
    With one: runs it to its end, and lists the Python processes that were reached and what each of them decided.
    What the command itself prints goes to stderr. Exit code 1: nothing can be recorded, or nothing would have been.

    For example:

      msmon doctor

      msmon doctor -- torchrun --nproc-per-node 2 train.py --steps 2
    """
    healthy = _examine(command, as_json=as_json) if command else _check(as_json=as_json)
    if not healthy:
        raise typer.Exit(1)


def _check(*, as_json: bool) -> bool:
    from msmon.bootstrap.doctor import check_environment

    checks = check_environment()
    if as_json:
        console.show_json({"schema_version": 1, "checks": [dataclasses.asdict(check) for check in checks]})
    else:
        for check in checks:
            console.show_line(f"{check.state:7} {check.name}: {check.found}")
            if check.hint:
                console.show_line(f"        {check.hint}")
    return all(check.state != "failed" for check in checks)


def _examine(command: list[str], *, as_json: bool) -> bool:
    from msmon.bootstrap import launch
    from msmon.bootstrap.doctor import examine

    executable = launch.find_command(command[0])
    for warning in launch.warnings_about(command):
        console.show_warning(warning)
    found = examine(command, executable, stdout=STDERR)
    if as_json:
        console.show_json({"schema_version": 1, **dataclasses.asdict(found)})
    else:
        console.show_processes(found)
    return bool(found.ranks)
