"""Dynamic start and stop, against a model that only looks at the history of files and steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from msmon.config.schema import MonitorConfig
from msmon.plan.dynamic import DynamicController

CONFIGS = st.builds(
    lambda on, times, interval: MonitorConfig(dynamic_on=on, collect_times=times, step_interval=interval),
    st.booleans(),
    st.integers(0, 4),
    st.integers(1, 3),
)
HISTORIES = st.lists(st.one_of(st.none(), CONFIGS), max_size=40)
"""What happens one after the other: a step ends (``None``), or the file changes."""


def expected(start: MonitorConfig, history: list[MonitorConfig | None]) -> list[tuple[int, MonitorConfig]]:
    """Steps that are collected, each with its configuration: of every file, those after the step in which it came."""
    files: list[tuple[int, MonitorConfig]] = [(0, start)]
    step = 0
    for event in history:
        if event is None:
            step += 1
        else:
            files.append((step, event))
    effective = [
        (s, c) for position, (s, c) in enumerate(files) if not any(s == later for later, _ in files[position + 1 :])
    ]
    found = []
    for position, (came, config) in enumerate(effective):
        last = effective[position + 1][0] if position + 1 < len(effective) else step
        steps = range(came + 1, last + 1)[:: config.step_interval][: config.collect_times]
        found += [(s, config) for s in steps if config.dynamic_on]
    return found


@given(CONFIGS, HISTORIES)
def test_which_steps_are_collected(start: MonitorConfig, history: list[MonitorConfig | None]) -> None:
    """Each valid file counts from the step after it came, from 0, until its times are over or another one comes."""
    controller = DynamicController(start)
    found, step = [], 0
    for event in history:
        if event is not None:
            controller.configure(event)
            continue
        step += 1
        decision = controller.step_ends()
        if decision.collect:
            found.append((step, decision.config))
    assert found == expected(start, history)


@given(CONFIGS, HISTORIES)
def test_written_back_once_a_file(start: MonitorConfig, history: list[MonitorConfig | None]) -> None:
    """The file is set to off once for each file that said on and was collected to its end, and never while collecting."""
    controller = DynamicController(start)
    files = 1
    written = 0
    for event in [*history, *([None] * 20)]:
        if event is not None:
            files += 1
            controller.configure(event)
            continue
        decision = controller.step_ends()
        written += decision.write_back
        assert not (decision.write_back and decision.collect)
    assert written <= files
    last = next((event for event in reversed(history) if event is not None), start)
    if last.dynamic_on:
        assert written >= 1


@given(HISTORIES)
def test_hooks_change_with_collection_only(history: list[MonitorConfig | None]) -> None:
    """What is off stays untouched: no change is asked for between two steps that are off under the same file."""
    controller = DynamicController(MonitorConfig())
    on = False
    for event in history:
        if event is not None:
            controller.configure(event)
            continue
        decision = controller.step_ends()
        if decision.collect:
            assert decision.changed or on
            on = True
        elif decision.changed:
            on = False
