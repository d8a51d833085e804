"""Event files of real trainings: written live, and converted from CSV, read back with TensorBoard's own reader."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import pytest
from conftest import MSMON, SIX

from msmon.offline.reader import kinds, read_kind

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Runner

pytestmark = pytest.mark.slow
pytest.importorskip("tensorboard")

SCRIPT = """
    import os
    import torch
    from torch import nn
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step + 100 * rank))
        if step == 2 and rank == 1:
            inputs[0, 0] = torch.nan
        model(inputs).pow(2).mean().backward()
        optimizer.step()
    torch.distributed.destroy_process_group()
"""
CONFIG = {"wg_distribution": True, "xy_distribution": True, "ur_distribution": True, "ops": SIX, "ndigits": 12}


def accumulated(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0, "tensors": 0}).Reload()


def points(directory: Path) -> dict[tuple[str, int], float]:
    """Every scalar: tag and step → value."""
    events = accumulated(directory)
    return {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}


def same(one: dict[tuple[str, int], float], other: dict[tuple[str, int], float]) -> None:
    assert one.keys() == other.keys()
    assert one
    for key, value in other.items():
        assert one[key] == pytest.approx(value, rel=1e-6, abs=1e-12, nan_ok=True), key


def test_converted_and_live(runner: Runner) -> None:
    """Both hold every number of the CSV files of the same training, NaN included, and say where that came from."""
    script = runner.write(SCRIPT)
    table = runner.monitored(script, ranks=2, config=CONFIG)
    assert table.returncode == 0, table.stderr
    done = runner.call([MSMON, "csv2tb", "out", "-j", "2", "-o", "tb", "--json"])
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    expected: list[dict[tuple[str, int], float]] = [{}, {}]
    for rank in (0, 1):
        (directory,) = table.directories(rank)
        for kind in kinds(directory):
            rows = read_kind(directory, kind)
            numbers = {
                (f"vp{row.stage}:{row.name}{'' if row.micro_step is None else f':micro{row.micro_step}'}/{op}", row.step): float(value)
                for row in rows for op, value in row.values.items() if op in SIX
            }  # fmt: skip
            found = points(runner.folder / f"tb/rank{rank}/{kind}")
            bad = [key for key, value in numbers.items() if not math.isfinite(value)]
            assert sum(value for (tag, _), value in found.items() if tag == "nonfinite/in_step") == len(bad)
            same({key: value for key, value in found.items() if not key[0].startswith("nonfinite/")}, numbers)
            (said,) = [one for one in document["series"] if (one["rank"], one["kind"]) == (rank, kind)]
            assert (said["values"], said["non_finite"], said["faults"]) == (len(numbers), len(bad), [])
            for (tag, step), value in numbers.items():
                name, op = tag.removeprefix("vp").rsplit("/", 1)
                expected[rank][f"{name}/rank{rank}/{kind}_{op}", step] = value
    first = accumulated(runner.folder / "tb/rank1/actv").Tensors("nonfinite/where")[0]
    assert first.step == 2
    assert first.tensor_proto.string_val[0].startswith(b"- `vp0:0.input:micro0/min`: nan")
    other = accumulated(runner.folder / "tb/rank0/grad_unreduced").Tensors("nonfinite/where")
    assert min(event.step for event in other) == 3  # that rank's own gradient is NaN once its weights are

    runner.output = runner.folder / "live"
    live = runner.monitored(script, ranks=2, config={**CONFIG, "format": "tensorboard"})
    assert live.returncode == 0, live.stderr
    assert re.search(r"next: +tensorboard --logdir .*live", live.stderr)
    for rank in (0, 1):
        (directory,) = live.directories(rank)
        assert not list(directory.glob("*.csv"))
        found = points(directory)
        assert {key[1] for key in found if key[0] == "steps/complete"} == {0, 1, 2, 3}
        same(
            {key: value for key, value in found.items() if not key[0].startswith(("nonfinite/", "steps/"))},
            expected[rank],
        )
        histograms = accumulated(directory).Tags()["histograms"]
        assert f"0:0.weight/rank{rank}/update" in histograms
        assert f"0:0.weight/rank{rank}/update_ratio" in histograms


def test_killed_and_resumed(runner: Runner) -> None:
    """A run that goes on from an earlier step of one that was killed is one series with it; a line that was cut off is named."""
    source = """
        import os, signal, sys, torch
        from torch import nn
        from msmon.pytorch import TrainerMon
        first, last, rate = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        TrainerMon("monitor.json", params_have_main_grad=False).set_monitor(
            model=model, grad_acc_steps=1, optimizer=optimizer, start_iteration=first)
        for step in range(first, last):
            optimizer.zero_grad()
            (model(torch.ones(1, 3)).sum() * (step + 1) * rate).backward()
            optimizer.step()
        if rate == 1:
            model(torch.ones(1, 3)).sum().backward()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    script = runner.write(source)
    runner.write_config(wg_distribution=True, ops=["max"], step_count_per_record=4)
    killed = runner.bare(script, "0", "6", "1", MONITOR_OUTPUT_DIR=str(runner.output))
    assert killed.returncode == -9, killed.stderr
    torn = max(runner.output.glob("*/grad_reduced_4-7.csv"))
    with torn.open("ab") as file:
        file.write(b"0,bias,7,1")
    again = runner.bare(script, "3", "9", "2", MONITOR_OUTPUT_DIR=str(runner.output))
    assert again.returncode == 0, again.stderr
    done = runner.call([MSMON, "csv2tb", "out", "-o", "tb"])
    assert done.returncode == 0, done.stderr
    assert f"{torn.relative_to(runner.folder)}: left out: an unfinished line (line " in done.stderr.replace("\n", "")
    assert "2 histories have the same steps" in done.stderr
    first, second = (directory.name[-8:] for directory in again.directories())
    kept = points(runner.folder / f"tb/{first}/rank0/grad_reduced")
    assert {step: value for (tag, step), value in kept.items() if tag == "vp0:bias/max"} == {
        step: float(step + 1) for step in range(6)
    }
    found = points(runner.folder / f"tb/{second}/rank0/grad_reduced")
    assert {step: value for (tag, step), value in found.items() if tag == "vp0:bias/max"} == {
        step: float(step + 1 if step < 3 else 2 * (step + 1)) for step in range(9)
    }


def test_the_library_call(runner: Runner) -> None:
    """`csv2tensorboard_by_step` in a script without a main guard, with several processes; nothing on stdout."""
    table = runner.monitored(runner.write(SCRIPT), ranks=2, config={"wg_distribution": True})
    assert table.returncode == 0, table.stderr
    stamp = table.directories()[0].name[:14]
    source = f"""
        from msmon.pytorch.monitor.csv2tb import csv2tensorboard_by_step
        print(csv2tensorboard_by_step("out", "{stamp}", "Dec31_23-59-59", 2, ["grad_reduced"]))
        try:
            csv2tensorboard_by_step("out", data_type_list="actv")
        except TypeError as error:
            print(error)
    """
    done = runner.bare(runner.write(source, "convert.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "None\ndata_type_list is not a list: 'actv'\n"
    (output,) = runner.output.glob("*-csv2tensorboard_by_step")
    assert sorted(str(path.relative_to(output)) for path in output.glob("*/*")) == [
        "rank0/grad_reduced",
        "rank1/grad_reduced",
    ]
    assert f"output has been saved to {output.relative_to(runner.folder)}" in done.stderr
