"""``msmon run``."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import shutil
from pathlib import Path  # noqa: TC003 - Typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from msmon.alerts.options import OnAlert  # noqa: TC001 - Typer reads the annotations
from msmon.errors import ConfigError
from msmon_cli import console
from msmon_cli.values import usable_path, usable_text, whole_number, wrong_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from msmon.config.schema import MonitorConfig

WHAT, SELECTION, ALERTS, OUTPUT = "What to watch", "Selection", "Alerts", "Output"
OPTIONS = {
    "xy_distribution": "--activations",
    "forward_only": "--forward-only",
    "backward_only": "--backward-only",
    "mg_direction": "--directions",
    "ur_distribution": "--updates",
    "cc_distribution": "--communication",
    "stack_info": "--stacks",
    "ops": "--ops",
    "step_interval": "--every",
    "start_step": "--start",
    "collect_times": "--times",
    "module_ranks": "--ranks",
    "dynamic_on": "--dynamic",
    "format": "--format",
    "ndigits": "--ndigits",
    "step_count_per_record": "--steps-per-file",
}
"""Key of the configuration → the option that sets it."""

ALL_STATISTICS = ["min", "max", "norm", "mean", "zeros", "nans"]


def run(  # noqa: PLR0917 - Typer calls it by name
    command: Annotated[
        list[str],
        typer.Argument(
            help="The command and its arguments, passed on as they are.", metavar="COMMAND", show_default=False
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="A JSON configuration; options below go over it.",
            show_default=False,
            callback=usable_path,
        ),
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights", help="Weights before and after each step.", rich_help_panel=WHAT)
    ] = False,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Weight gradients, before and after reduction.", rich_help_panel=WHAT)
    ] = False,
    micro_batches: Annotated[
        bool,
        typer.Option(
            "--micro-batch-gradients", help="Unreduced gradients after every micro-batch.", rich_help_panel=WHAT
        ),
    ] = False,
    optimizer_state: Annotated[
        bool,
        typer.Option(
            "--optimizer-state", help="exp_avg, exp_avg_sq and every other state tensor.", rich_help_panel=WHAT
        ),
    ] = False,
    activations: Annotated[
        bool,
        typer.Option("--activations", help="Inputs and outputs of modules, and their gradients.", rich_help_panel=WHAT),
    ] = False,
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="Of activations, not their gradients.", rich_help_panel=WHAT)
    ] = False,
    backward_only: Annotated[
        bool, typer.Option("--backward-only", help="Of activations, only their gradients.", rich_help_panel=WHAT)
    ] = False,
    directions: Annotated[
        bool,
        typer.Option(
            "--directions", help="Share of elements whose gradient and momentum agree in sign.", rich_help_panel=WHAT
        ),
    ] = False,
    updates: Annotated[
        bool, typer.Option("--updates", help="Adam's update, and that over the weight.", rich_help_panel=WHAT)
    ] = False,
    communication: Annotated[
        bool,
        typer.Option(
            "--communication", help="What torch.distributed operators send and receive.", rich_help_panel=WHAT
        ),
    ] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Where in the code each module is called.", rich_help_panel=WHAT)
    ] = False,
    ops: Annotated[
        str,
        typer.Option(
            "--ops",
            help="Statistics, comma-separated: min,max,norm,mean,zeros,nans; also shape,dtype,id.",
            show_default=False,
            rich_help_panel=WHAT,
        ),
    ] = "",
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--targets",
            "-t",
            help="Names to watch, by prefix or glob; repeatable.",
            show_default=False,
            rich_help_panel=SELECTION,
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option("--every", help="Collect every N-th step.", show_default=False, rich_help_panel=SELECTION),
    ] = None,
    start: Annotated[
        int | None,
        typer.Option("--start", help="First step to collect.", show_default=False, rich_help_panel=SELECTION),
    ] = None,
    times: Annotated[
        int | None,
        typer.Option("--times", help="Steps to collect, then no more.", show_default=False, rich_help_panel=SELECTION),
    ] = None,
    ranks: Annotated[
        str,
        typer.Option(
            "--ranks",
            help="Ranks that monitor, comma-separated. Default: all.",
            show_default=False,
            rich_help_panel=SELECTION,
        ),
    ] = "",
    grad_acc_steps: Annotated[
        int | None,
        typer.Option(
            "--grad-acc-steps",
            min=1,
            help="Micro-batches a step. Default: learned.",
            show_default=False,
            rich_help_panel=SELECTION,
        ),
    ] = None,
    first_step: Annotated[
        int | None,
        typer.Option(
            "--first-step",
            min=0,
            max=2**53,
            help="Number of the first training step, when training is resumed. Default: learned from what is loaded, else 0.",
            metavar="N",
            show_default=False,
            rich_help_panel=SELECTION,
        ),
    ] = None,
    dynamic: Annotated[
        bool,
        typer.Option(
            "--dynamic",
            help="Follow the file of --config while training: `msmon on`, `msmon off`.",
            rich_help_panel=SELECTION,
        ),
    ] = False,
    alerts: Annotated[
        bool | None,
        typer.Option(
            "--alerts/--no-alerts",
            help="Judge each step by the default rules. Default: on without a file, else as that says.",
            show_default=False,
            rich_help_panel=ALERTS,
        ),
    ] = None,
    on_alert: Annotated[
        OnAlert | None,
        typer.Option(
            "--on-alert",
            help="At an anomaly: say it; write it to anomaly.json too; end the run too. Default: dump without a file.",
            show_default=False,
            rich_help_panel=ALERTS,
        ),
    ] = None,
    on_alert_command: Annotated[
        str,
        typer.Option(
            "--on-alert-command",
            help="Start this at an anomaly, at most once a minute a process, its message as last argument; no shell.",
            metavar="COMMAND",
            show_default=False,
            rich_help_panel=ALERTS,
        ),
    ] = "",
    rules: Annotated[
        list[str] | None,
        typer.Option(
            "--rule",
            help="A rule of your own, imported where training runs; repeatable.",
            metavar="MODULE:FUNCTION",
            show_default=False,
            rich_help_panel=ALERTS,
        ),
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            envvar="MONITOR_OUTPUT_DIR",
            help="Root of the output. Default: ./monitor_output.",
            callback=usable_text,
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = "",
    file_format: Annotated[
        str,
        typer.Option(
            "--format",
            help="csv, tensorboard (an extra), or api: memory only.",
            show_default=False,
            rich_help_panel=OUTPUT,
        ),
    ] = "",
    ndigits: Annotated[
        int | None, typer.Option("--ndigits", help="Decimals in CSV.", show_default=False, rich_help_panel=OUTPUT)
    ] = None,
    steps_per_file: Annotated[
        int | None,
        typer.Option(
            "--steps-per-file", help="Steps that a CSV file covers.", show_default=False, rich_help_panel=OUTPUT
        ),
    ] = None,
) -> None:
    """Run a training command and record what its weights, gradients, activations and optimizer state do, step by step.

    The command itself is unchanged: same process, same output, same exit code.
    With neither a file nor options: weight gradients, all six statistics.

    For example:

      msmon run -- python train.py

      msmon run --gradients --every 100 -- torchrun --nproc-per-node 8 train.py

      msmon run --activations -t blocks.3.mlp -- python train.py

      msmon run -c monitor.json -t 'blocks.*.attn' -- accelerate launch train.py

      msmon run --on-alert stop -- python train.py
    """
    from msmon import env
    from msmon.bootstrap import launch
    from msmon.config.explain import without_effect
    from msmon.config.load import parse_config, read_document

    executable = launch.find_command(command[0])
    options = _as_document(
        param_distribution=weights or None,
        wg_distribution=gradients or micro_batches or None,
        monitor_mbs_grad=micro_batches or None,
        mv_distribution=optimizer_state or None,
        xy_distribution=activations or None,
        forward_only=forward_only or None,
        backward_only=backward_only or None,
        mg_direction=directions or None,
        ur_distribution=updates or None,
        cc_distribution={"enable": True, "cc_pre_hook": True} if communication else None,
        stack_info=stacks or None,
        ops=_words(ops),
        targets={target: {} for target in targets or []},
        step_interval=every,
        start_step=start,
        collect_times=times,
        module_ranks=[_rank(word) for word in _words(ranks)],
        format=file_format,
        ndigits=ndigits,
        step_count_per_record=steps_per_file,
    )
    if config is None and not (stacks or directions or any(key.endswith("_distribution") for key in options)):
        options["wg_distribution"] = True
        options.setdefault("ops", ALL_STATISTICS)
    _add_alerts(options, alerts if config is not None or alerts is not None else True)
    extra = _alert_options(on_alert, on_alert_command, rules or [])
    with _naming_options():  # by themselves: what is wrong here is not in the file
        checked = parse_config(options)
    if config is not None:
        checked = parse_config({**read_document(config), **options}, source=str(config))
    if dynamic and config is None:
        raise typer.BadParameter("needs a file to follow: name one with --config", param_hint="--dynamic")
    environment, notes = launch.prepare_environment(
        checked,
        command,
        output=output,
        source=str(config or ""),
        options=options,
        grad_acc_steps=grad_acc_steps,
        alerts=extra,
        dynamic=dynamic,
        first_step=first_step,
    )
    if config is None and env.dynamic_requested():
        notes.append(f"{env.DYNAMIC} is set, and there is no file to follow: name one with --config")
    if checked.forward_only and checked.backward_only:
        notes.append("forward_only and backward_only are both on: no activations will be recorded")
    if not checked.kinds:
        notes.append("no kind of data is switched on, so nothing will be recorded; add --gradients, for instance")
    notes += without_effect(checked) if checked.kinds else []
    notes += _alert_notes(checked, extra)
    for note in [*notes, *launch.warnings_about(command)]:
        console.show_warning(note)
    launch.run_command(executable, command, environment)


def _add_alerts(options: dict[str, Any], wanted: bool | None) -> None:
    from msmon.alerts.catalogue import default_rules

    if wanted:
        options["alert"] = {"rules": default_rules(), "dump": True}
    elif wanted is not None:
        options["alert"] = {"rules": [], "dump": False}


def _alert_notes(checked: MonitorConfig, extra: dict[str, Any]) -> list[str]:
    """What was asked for and cannot happen."""
    if extra and not checked.alert.rules and not extra.get("rules"):
        return ["no alert rule is on, so nothing will come of the options for alerts; add --alerts"]
    if extra and checked.format == "api":
        return ["format api keeps nothing, and applies no alert rule"]
    return []


def _alert_options(on_alert: OnAlert | None, command: str, rules: list[str]) -> dict[str, Any]:
    """What the settings file says of alerts beside the configuration."""
    for rule in rules:
        module, _, function = rule.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *function.split(".")]):
            raise wrong_value("--rule", rule, "not MODULE:FUNCTION", "write it as checks:too_large")
    try:
        words = shlex.split(command)
    except ValueError as error:
        hint = "quote it as for a shell"
        raise wrong_value("--on-alert-command", command, f"not a command ({error})", hint) from None
    if words and shutil.which(words[0]) is None:
        hint = "give its path, or put it on the PATH"
        raise wrong_value("--on-alert-command", words[0], "no command that exists", hint)
    return _as_document(on_alert=on_alert.value if on_alert else None, command=command, rules=rules)


@contextlib.contextmanager
def _naming_options() -> Iterator[None]:
    """Problems of values that came from the command line are named after its options."""
    try:
        yield
    except ConfigError as error:
        problems = [
            dataclasses.replace(problem, path=OPTIONS.get(re.split(r"[.\[]", problem.path)[0], problem.path))
            for problem in error.problems
        ]
        raise ConfigError(error.source, problems) from None


def _as_document(**options: object) -> dict[str, Any]:
    """The options that were given, under the names of the configuration's keys."""
    return {key: value for key, value in options.items() if value not in (None, "", [], {})}


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _rank(word: str) -> int | str:
    number = whole_number(word)
    return word if number is None else number
