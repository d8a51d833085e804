"""The application, and the one place where an error becomes text and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from msmon import env
from msmon.errors import ExitCode, MsmonError, OutputError, UnusablePathError
from msmon_cli import console, streams
from msmon_cli.commands import analyse, csv2tb, doctor, explain, merge, print_struct, run, switch, validate_config

EPILOG = """
Examples:

  msmon run -- python train.py

  msmon run --config monitor.json -- torchrun --nproc-per-node 2 train.py

  msmon analyse monitor_output

  msmon print-struct -- python train.py

  msmon validate-config monitor.json

  msmon csv2tb monitor_output

  msmon doctor

  msmon explain AnomalySpike
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
app.command("explain")(explain.explain)
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
    streams.prepare()
    code: object = ExitCode.DONE
    try:
        app()
    except SystemExit as ending:
        code = ending.code
    except MsmonError as error:
        code = _failed(error)
    except streams.PrintingError as error:
        code = _failed(_unprinted(error))
    except OSError as error:  # a place that cannot be read or written, and of which no command knows more to say
        code = _failed(_unusable(error))
    try:
        print(end="", flush=True)  # noqa: T201 - unlike a method of sys.stdout it bears that there is none
    except OSError as error:
        code = _failed(_unprinted(error))
    sys.exit(code)  # type: ignore[arg-type]


def _failed(error: MsmonError) -> ExitCode:
    console.show_error(error)
    if os.environ.get(env.DEBUG):
        traceback.print_exc()
    return error.exit_code


def _unprinted(error: OSError) -> MsmonError:
    return OutputError(f"cannot write what was to be printed ({error.strerror})", hint="is the disk full?")


def _unusable(error: OSError) -> MsmonError:
    where = "" if error.filename is None else f"`{os.fsdecode(error.filename)}`: "
    return UnusablePathError(f"{where}{error.strerror or error}", hint="check the path and its permissions")
