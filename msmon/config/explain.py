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
    return [*lines, *without_effect(config)]


def without_effect(config: MonitorConfig) -> list[str]:
    """Keys that change nothing, since another one says so; a line each."""
    communication = config.cc_distribution
    wanted = any(hooks is not None for _, hooks in config.l2_targets)
    cases = {
        "monitor_mbs_grad needs wg_distribution": config.monitor_mbs_grad and not config.wg_distribution,
        "forward_only needs xy_distribution": config.forward_only and not config.xy_distribution,
        "backward_only needs xy_distribution": config.backward_only and not config.xy_distribution,
        "all_xy needs xy_distribution": config.all_xy and not config.xy_distribution,
        "recording_l2_features needs l2_targets": config.recording_l2_features and not wanted,
        "l2_targets needs recording_l2_features": wanted and not config.recording_l2_features,
        "cc_distribution needs enable": not communication.enable
        and (communication.cc_pre_hook or communication.cc_log_only or bool(communication.cc_codeline)),
    }
    found = [f"{text}: as it is, it has no effect" for text, holds in cases.items() if holds]
    return [*found, *(["collect_times is 0: nothing is recorded"] if config.collect_times == 0 else [])]


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
