"""What the default alert rules cost the writer thread, against writing the same step; and how long ranking takes.

``python benchmarks/alerts.py [--steps 60] [--ranks 1000] [--anomalies 1000] [--json FILE]``
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from side_by_side import cpu_model

from msmon.alerts.anomaly import Anomaly, Signal
from msmon.alerts.catalogue import default_rules
from msmon.alerts.evaluate import Evaluator, builtin_rules
from msmon.alerts.files import FILE, FOLDER
from msmon.alerts.stage import Alerts
from msmon.config.schema import AlertConfig
from msmon.offline.analyse import analyse
from msmon.record.table import Row
from msmon.sinks.base import RecordedStep
from msmon.sinks.csv import CsvSink

SIX = ("min", "max", "norm", "mean", "zeros", "nans")
ROWS = (10, 100, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of each size (default: 60)")
    parser.add_argument("--ranks", type=int, default=1000, help="files to rank (default: 1000)")
    parser.add_argument("--anomalies", type=int, default=1000, help="anomalies in each (default: 1000)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = {
        "rules": [rules(rows, arguments.steps) for rows in ROWS],
        "ranking": ranking(arguments.ranks, arguments.anomalies),
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
    }
    print(as_markdown(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def rules(rows: int, steps: int) -> dict[str, Any]:
    """Processor time of judging a step of so many tensors and of writing it, in turns."""
    alerts = Alerts(Evaluator(builtin_rules(AlertConfig.model_validate({"rules": default_rules()}).rules, 0)))
    judged, written = [], []
    with tempfile.TemporaryDirectory() as folder:
        sink = CsvSink(Path(folder), SIX, 6, 1)
        for number in range(steps):
            step = healthy_step(number, rows)
            written.append(thread_seconds(sink.write, step))
            judged.append(thread_seconds(alerts.judge, step, SIX))
        sink.close()
    assert alerts.found == 0, "the steps are meant to be healthy"
    return {
        "rows": rows,
        "judge_us_per_row": 1e6 * statistics.median(judged) / rows,
        "write_us_per_row": 1e6 * statistics.median(written) / rows,
        "ratio": statistics.median(one / other for one, other in zip(judged, written, strict=True)),
    }


def healthy_step(number: int, rows: int) -> RecordedStep:
    """Norms that vary by tens of percent."""
    numbers = np.random.default_rng(number).lognormal(sigma=0.2, size=(rows, len(SIX)))
    numbers[:, SIX.index("nans")] = 0
    kinds = ("grad_unreduced", "grad_reduced")
    described = [Row(kinds[i % 2], f"blocks.{i // 2}.weight", 0, None, (64, 64), "torch.float32") for i in range(rows)]
    return RecordedStep("", number, described, numbers.ravel(), 1, skipped=False, grad_scale=math.nan, complete=True)


def thread_seconds(call: Any, *args: Any) -> float:
    begin = time.thread_time()
    call(*args)
    return time.thread_time() - begin


def ranking(ranks: int, anomalies: int) -> dict[str, Any]:
    """Seconds to rank the anomalies of so many ranks."""
    with tempfile.TemporaryDirectory() as root:
        for rank in range(ranks):
            folder = Path(root) / FOLDER / f"rank{rank}"
            folder.mkdir(parents=True)
            found = [anomaly(rank, number) for number in range(anomalies)]
            content = json.dumps({one.key: one.entry() for one in found})
            (folder / FILE).write_text(content, encoding="utf-8")
        begin = time.perf_counter()
        analysis = analyse(Path(root))
        taken = time.perf_counter() - begin
    assert analysis.total == ranks * anomalies
    return {"ranks": ranks, "anomalies": analysis.total, "seconds": taken}


def anomaly(rank: int, number: int) -> Anomaly:
    signals = (Signal("norm", math.nan, "AnomalyNan", ""),)
    mates = tuple(range(rank % 4, 16, 4))
    return Anomaly(
        rank, 100 + number // 50, 0, rank % 4, 0, number % 50, f"blocks.{number % 50}.weight", "grad_reduced", signals, mates
    )  # fmt: skip


def as_markdown(figures: dict[str, Any]) -> str:
    lines = ["| tensors a step | rules, us a tensor | CSV, us a tensor | rules to CSV |", "|---|---|---|---|"]
    lines += [
        f"| {one['rows']:,} | {one['judge_us_per_row']:.2f} | {one['write_us_per_row']:.2f} | {one['ratio']:.2f} |"
        for one in figures["rules"]
    ]
    ranked = figures["ranking"]
    lines += [
        "",
        f"{ranked['anomalies']:,} anomalies of {ranked['ranks']:,} ranks: ranked in {ranked['seconds']:.1f} s",
    ]
    return "\n".join([*lines, "", figures["machine"]])


if __name__ == "__main__":
    main()
