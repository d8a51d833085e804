"""Alerts on the writer thread: a sink around another, which judges each step once its rows are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msmon import log
from msmon.runtime.guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from msmon.alerts.anomaly import Anomaly
    from msmon.alerts.command import AlertCommand
    from msmon.alerts.evaluate import Evaluator, Findings
    from msmon.alerts.files import AnomalyFile
    from msmon.sinks.base import RecordedStep, Sink

LINES = 5
"""Anomalies said of one step; the rest is a number."""


class Alerts:
    """What is done about anomalies.

    Args:
        evaluator: Finds them.
        file: Keeps them.
        command: Is started.
        stop: Ends the run.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        *,
        file: AnomalyFile | None = None,
        command: AlertCommand | None = None,
        stop: Callable[[str], None] | None = None,
    ) -> None:
        self.found = 0
        self.first: Anomaly | None = None
        self._evaluator = evaluator
        self._file, self._command, self._stop = file, command, stop
        self._guard = Guard("alerts")
        self._streak: dict[str, int] = {}
        self._said: dict[str, set[tuple[str, ...]]] = {}
        if file is not None:
            self._keep(file.open)

    @property
    def stops(self) -> bool:
        """Whether an anomaly ends the run."""
        return self._stop is not None

    def judge(self, step: RecordedStep, statistics: Sequence[str]) -> None:
        """Look at a step; whatever goes wrong here costs no row."""
        self._guard.run(self._judge, step, statistics)

    def flush(self) -> None:
        """The run ends: bring everything into the file itself, and try once more to write what could not be written."""
        if self._file is not None:
            self._guard.run(self._keep, self._file.fold)

    def release(self) -> None:
        """Nothing more is written by this process."""
        if self._file is not None:
            self._file.release()

    def _judge(self, step: RecordedStep, statistics: Sequence[str]) -> None:
        findings = self._evaluator.judge(step, statistics)
        if not len(findings):
            if step.supplement:
                return
            self._streak[step.model] = 0
            self._said.pop(step.model, None)
            return
        (first,) = findings.first(1)
        self.found += len(findings)
        self.first = self.first or first
        self._say(step, findings)
        if self._file is not None:
            self._keep(self._file.add, findings)
        if self._command is not None:
            self._command.start(first.message)
        if self._stop is not None:
            self._stop(first.message)

    def _say(self, step: RecordedStep, findings: Findings) -> None:
        """The first few; of steps that follow each other only what is new, and now and then how many there are."""
        streak = self._streak[step.model] = self._streak.get(step.model, 0) + 1
        said = self._said.setdefault(step.model, set())
        shown = 0
        for anomaly in findings.first(LINES):
            what = anomaly.tag, *(f"{signal.rule} {signal.op}" for signal in anomaly.signals)
            if what not in said:
                said.add(what)
                log.say(f"anomaly: {anomaly.message}")
                shown += 1
        more = len(findings) - shown
        if shown and more:
            log.say(f"anomaly: and {more:,} more at step {step.step}")
        elif not shown and streak & (streak - 1) == 0:  # the 1st, 2nd, 4th, 8th, … step in a row
            log.say(f"anomaly: {more:,} at step {step.step}, for {streak} steps in a row now")

    def _keep(self, write: Callable[..., None], *args: Findings) -> None:
        try:
            write(*args)
        except OSError as error:
            log.say(f"anomalies could not be written ({error.strerror or error}), training goes on", once="anomalies")


class JudgedSink:
    """See :class:`msmon.sinks.base.Sink`. Rows go first, so that no fault of a rule can lose one.

    Args:
        sink: Keeps the rows.
        statistics: What the numbers of rows are.
        alerts: Judges them.
    """

    def __init__(self, sink: Sink, statistics: Sequence[str], alerts: Alerts) -> None:
        self._sink = sink
        self._statistics = tuple(statistics)
        self._alerts = alerts

    def write(self, step: RecordedStep) -> None:
        """Keep a step, then judge it; a step that could not be kept is judged all the same."""
        try:
            self._sink.write(step)
        finally:
            self._alerts.judge(step, self._statistics)

    def close(self) -> None:
        """No further step will come."""
        self._sink.close()
