"""The application, and the one place where an error becomes text and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from msmon import env
from msmon.errors import ExitCode, MsmonError
from msmon_cli import console
from msmon_cli.commands import analyse, csv2tb, doctor, merge, print_struct, run, switch, validate_config

EPILOG = """
Examples:

  msmon run -- python train.py

  msmon run --config monitor.json -- torchrun --nproc-per-node 2 train.py

  msmon analyse monitor_output

  msmon print-struct -- python train.py

  msmon validate-config monitor.json

  msmon csv2tb monitor_output

  msmon doctor
"""

app = typer.Typer(
    name="msmon",
    help="See inside any training run of a neural network, without touching its code.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)
app.command(
    "run",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] --",
    no_args_is_help=True,
)(run.run)
app.command(
    "print-struct",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] --",
    no_args_is_help=True,
)(print_struct.print_struct)
app.command("analyse", no_args_is_help=True)(analyse.analyse)
app.command("merge", no_args_is_help=True)(merge.merge)
app.command("validate-config")(validate_config.validate_config)
app.command("csv2tb")(csv2tb.csv2tb)
app.command("doctor", context_settings={"allow_interspersed_args": False}, options_metavar="[OPTIONS] --")(
    doctor.doctor
)
app.command("on")(switch.on)
app.command("off")(switch.off)
app.command("status")(switch.status)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.show_version()
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """See inside any training run of a neural network, without touching its code."""


def main() -> NoReturn:
    """Run the command line, and end the process with its exit code."""
    try:
        app()
    except MsmonError as error:
        console.show_error(error)
        if os.environ.get(env.DEBUG):
            traceback.print_exc()
        sys.exit(error.exit_code)
    sys.exit(ExitCode.DONE)
