"""From a configuration and the command line to what judges the steps of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msmon.alerts.command import AlertCommand
from msmon.alerts.custom import load_custom_rules
from msmon.alerts.evaluate import Evaluator, builtin_rules
from msmon.alerts.files import AnomalyFile
from msmon.alerts.options import AlertOptions, OnAlert
from msmon.alerts.stage import Alerts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from msmon.config.schema import AlertConfig


def make_alerts(
    config: AlertConfig,
    options: AlertOptions | None = None,
    *,
    rank: int,
    root: Path,
    run: str,
    directory: str,
    pp_stage: int = 0,
    group_mates: Sequence[int] = (),
    stop: Callable[[str], None] | None = None,
) -> Alerts | None:
    """What judges the steps of a rank; ``None`` when there is no rule, of any origin.

    Args:
        config: The configuration's part.
        options: The command line's part.
        rank: This rank.
        root: Output root.
        run: Id of the run.
        directory: Name of its run directory.
        pp_stage: Place of the rank in its pipeline.
        group_mates: Ranks of its pipeline.
        stop: Ends the run.
    """
    options = options or AlertOptions()
    rules = [*builtin_rules(config.rules, rank), *load_custom_rules(options.rules)]
    if not rules:
        return None
    dump = config.dump if options.on_alert is None else options.on_alert is not OnAlert.LOG
    return Alerts(
        Evaluator(rules, rank=rank, pp_stage=pp_stage, group_mates=group_mates),
        file=AnomalyFile(root, rank, run, directory) if dump else None,
        command=AlertCommand(options.command) if options.command else None,
        stop=stop if options.on_alert is OnAlert.STOP else None,
    )
