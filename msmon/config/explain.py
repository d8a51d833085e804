"""A configuration in words: what would be recorded, and what is wrong as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msmon.errors import MISSING, ConfigError

if TYPE_CHECKING:
    from msmon.config.schema import MonitorConfig


def explain(config: MonitorConfig) -> list[str]:
    """What a run under this configuration records, a line each."""
    lines = list(config.kinds) or ["nothing: no kind of data is switched on"]
    lines.append(f"columns: {', '.join(config.columns)}")
    lines.append(f"of: {', '.join(config.targets) if config.targets else 'every parameter and module'}")
    times = "" if config.collect_times >= 100_000_000 else f", {config.collect_times} times"  # noqa: PLR2004 - the default
    every = "every step" if config.step_interval == 1 else f"every {config.step_interval} steps"
    lines.append(f"{every} from step {config.start_step} on{times}")
    if config.module_ranks:
        lines.append(f"on ranks {', '.join(map(str, config.module_ranks))}")
    if config.alert.rules:
        kept = "written to anomaly.json" if config.alert.dump else "said, not written"
        lines.append(f"alerts: {', '.join(rule.rule_name for rule in config.alert.rules)}; anomalies are {kept}")
    return lines


def as_documents(error: ConfigError) -> list[dict[str, Any]]:
    """The problems of a configuration as JSON objects."""
    return [
        {
            "path": problem.path,
            "message": problem.message,
            "hint": problem.hint,
            "slug": problem.slug,
            **({} if problem.value is MISSING else {"value": repr(problem.value)}),
        }
        for problem in error.problems
    ]
