"""``msmon print-struct``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from msmon_cli import console
from msmon_cli.values import usable_path

STDERR = 2
"""The file of that number, whatever ``sys.stderr`` is now."""


def print_struct(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="The training command and its arguments.", metavar="COMMAND", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the structure seen by rank 0 to this file too.",
            show_default=False,
            callback=usable_path,
        ),
    ] = None,
    read: Annotated[
        Path | None,
        typer.Option(
            "--read",
            "-r",
            help="Show a file that is there, instead of a run.",
            show_default=False,
            callback=usable_path,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON instead of the tree.")] = False,
) -> None:
    """Run a training command to the end of its first step, and show how its model is built.

    Names, classes, shapes and dtypes of inputs, outputs and their gradients: what `targets` can name. What the command
    itself prints goes to stderr.

    For example:

      msmon print-struct -- python train.py

      msmon print-struct --read monitor_output/module_struct/rank0/module_struct.json
    """
    from msmon.offline.structure import as_trees, read_structure

    if read is None and not command:
        raise typer.BadParameter("name a command after `--`, or a file with --read", param_hint="COMMAND")
    path = read or _run(command or [])
    content = read_structure(path)
    if output is not None:
        _copy(path, output)
    if as_json:
        console.show_json(content)
    else:
        console.show_trees(as_trees(content))


def _copy(path: Path, output: Path) -> None:
    from msmon.errors import OutputError
    from msmon.regular_file import read_regular

    try:
        output.write_bytes(read_regular(path))
    except OSError as error:
        hint = "choose another place with --output"
        raise OutputError(f"cannot write `{output}` ({error.strerror or error})", hint=hint) from error


def _run(command: list[str]) -> Path:
    """Run the command; returns the file of rank 0, or of the first rank that has one."""
    from msmon import env
    from msmon.bootstrap import launch
    from msmon.config.load import parse_config
    from msmon.errors import MsmonError

    executable = launch.find_command(command[0])
    config = parse_config({"print_struct": True, "format": "api"})
    environment, notes = launch.prepare_environment(config, command)
    environment[env.MAIN_PID] = ""  # what was not seen is said here
    for note in [*notes, *launch.warnings_about(command)]:
        console.show_warning(note)
    folder = Path(env.output_root()) / "module_struct"
    before = _files(folder)
    done = subprocess.run(command, executable=executable, env=environment, stdout=STDERR, check=False)
    found = [path for path, written in _files(folder).items() if before.get(path) != written]
    if done.returncode != 0:
        raise typer.Exit(done.returncode if done.returncode > 0 else 128 - done.returncode)
    if not found:
        hint = "does the command make a training step? MSMON_DEBUG=1 says what each process did"
        raise MsmonError("the command ended without a training step of a model that msmon could see", hint=hint)
    console.show_note(f"{len(found)} rank{'s' if len(found) > 1 else ''}: {os.path.relpath(folder)}")
    return min(found, key=lambda path: int(path.parent.name.removeprefix("rank")))


def _files(folder: Path) -> dict[Path, int]:
    """The file of each rank, and when it was written: those of an earlier run stay there."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("rank*/module_struct.json")}
