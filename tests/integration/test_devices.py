"""Accelerators: what is recorded is as on a CPU, the training is the same to the bit, and the training thread never waits.

The NPU is one in Python only (``fake_npu.py``); CUDA is tested where there is a GPU.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from integration.conftest import HERE, integration_runner

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Finished, Runner

pytestmark = pytest.mark.slow

EVERYTHING = {
    "param_distribution": True,
    "wg_distribution": True,
    "monitor_mbs_grad": True,
    "mv_distribution": True,
    "xy_distribution": True,
    "all_xy": True,
    "mg_direction": True,
    "ur_distribution": True,
    "cc_distribution": {"enable": True, "cc_pre_hook": True},
    "recording_l2_features": True,
    "l2_targets": {"attention_hook": ["core"], "linear_hook": [], "moe_router_weight_hook": ["gate"]},
    "stack_info": True,
    "alert": {"rules": [{"rule_name": "AnomalyNan"}], "dump": True},
    "ops": ["min", "max", "norm", "mean", "zeros", "nans", "shape", "dtype"],
    "ndigits": 12,
}
KINDS = {
    *("param_origin", "param_updated", "grad_unreduced", "grad_reduced", "exp_avg", "exp_avg_sq", "actv", "actv_grad"),
    *("other", "update", "update_ratio", "cc", "attention_hook", "linear_hook", "moe_router_weight_hook"),
}


class Trained(NamedTuple):
    """A training on a device, and what the script says of it."""

    finished: Finished
    result: dict[str, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Trains on a device, with msmon and without; each once."""
    known: dict[tuple[str, bool], Trained] = {}

    def train(device: str, *, monitored: bool) -> Trained:
        if (device, monitored) not in known:
            runner = integration_runner(tmp_path_factory.mktemp(device))
            script = HERE / "on_device.py"
            done = runner.monitored(script, device, config=EVERYTHING) if monitored else runner.bare(script, device)
            assert done.returncode == 0, done.stderr
            assert "switched off" not in done.stderr, done.stderr
            known[device, monitored] = Trained(done, json.loads((runner.folder / "truth.json").read_text()))
        return known[device, monitored]

    return train


def rows(done: Finished) -> dict[tuple[Any, ...], dict[str, float | str]]:
    return {(row.kind, row.name, row.step, row.micro_step): row.values for kind in KINDS for row in done.rows(kind)}


def texts(values: dict[str, float | str]) -> dict[str, str]:
    return {column: value for column, value in values.items() if isinstance(value, str)}


def numbers(values: dict[str, float | str]) -> dict[str, float]:
    return {column: value for column, value in values.items() if not isinstance(value, str)}


def assert_the_weights_are_recorded(trained: Trained) -> None:
    """The last weights against float64."""
    for name, weights in trained.result["weights"].items():
        values = np.asarray(weights)
        (row,) = (
            row
            for row in trained.finished.rows("param_updated")
            if row.name == name and row.step == max(row.step for row in trained.finished.rows("param_updated"))
        )
        expected = {
            "min": values.min(),
            "max": values.max(),
            "norm": math.sqrt((values**2).sum()),
            "mean": values.mean(),
            "zeros": (np.abs(values) < 1e-8).mean(),
            "nans": 0.0,
        }
        assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_npu_trains_the_same(trained: Callable[..., Trained]) -> None:
    """Losses and weights with everything recorded are those without msmon, to the bit."""
    bare, monitored = (trained("npu", monitored=monitored).result for monitored in (False, True))
    assert monitored["losses"] == bare["losses"]
    assert monitored["weights"] == bare["weights"]


def test_npu_has_the_rows_of_the_cpu(trained: Callable[..., Trained]) -> None:
    """Every kind of data has the same rows as on a CPU, with the same values in float32."""
    on_npu, on_cpu = (trained(device, monitored=True) for device in ("npu", "cpu"))
    assert on_npu.result["losses"] == on_cpu.result["losses"]
    found, expected = rows(on_npu.finished), rows(on_cpu.finished)
    assert {kind for kind, *_ in found} == KINDS
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert texts(found[key]) == texts(values), key
        largest = max(1.0, *(abs(values.get(column, 0)) for column in ("min", "max")))  # a mean may cancel out
        assert numbers(found[key]) == pytest.approx(numbers(values), rel=2e-5, abs=1e-7 * largest, nan_ok=True), key
    assert_the_weights_are_recorded(on_npu)


def test_npu_is_never_waited_for(trained: Callable[..., Trained]) -> None:
    """A monitored step makes the host wait nowhere but on the writer thread, and starts one packed copy."""
    bare, monitored = (trained("npu", monitored=monitored).result for monitored in (False, True))
    assert bare["waited"] == monitored["waited"] == [[]] * 4
    assert bare["copies"] == [[]] * 4
    assert [len(copies) for copies in monitored["copies"]] == [1] * 4
    assert monitored["imported"] == []


def test_waiting_for_the_npu_would_be_seen(runner: Runner) -> None:
    """The stand-in notes whatever makes the host wait, and a copy is not there before it was waited for."""
    script = runner.write(
        """
        import threading, torch, fake_npu
        mode = fake_npu.install()
        ones, flags = torch.ones(3, device="npu"), torch.ones(3, device="npu") > 0
        pinned = torch.ones(3).pin_memory()
        def noted(call):
            fake_npu.SYNCHRONISED.clear()
            call()
            return [what for _, what in fake_npu.SYNCHRONISED]
        for call in (
            ones.sum().item, lambda: bool(flags.all()), ones.cpu, lambda: ones.to("cpu", non_blocking=True), flags.nonzero,
            lambda: ones[flags], lambda: torch.empty(3).copy_(ones, non_blocking=True), lambda: pinned.copy_(ones),
            lambda: torch.ones(3).to("npu", non_blocking=True), lambda: pinned.to("npu"), torch.npu.synchronize,
        ):
            assert len(noted(call)) == 1, call
        assert noted(lambda: (pinned.to("npu", non_blocking=True), ones + 1, ones.to("meta"))) == []
        host, event = torch.empty(3, pin_memory=True), torch.npu.Event()
        assert noted(lambda: host.copy_(ones, non_blocking=True)) == []
        ones.zero_()
        event.record()
        assert host.isnan().all() and not event.query()
        failed = []
        def wait():
            try:
                event.synchronize()
            except RuntimeError as error:
                failed.append(str(error))
        thread = threading.Thread(target=wait)
        thread.start(); thread.join()
        assert failed == ["the context of this thread is NULL"]
        assert noted(event.synchronize) == ["event"] and host.tolist() == [1, 1, 1]
        """
    )
    done = runner.bare(script)
    assert done.returncode == 0, done.stderr


def test_a_captured_graph_of_an_npu_is_seen(runner: Runner) -> None:
    """While a graph is being captured nothing is recorded: what were launched then would run at every replay."""
    script = runner.write(
        """
        import torch, fake_npu
        from msmon.backends.pytorch.devices import capturing
        assert not capturing()
        mode = fake_npu.install()
        assert not capturing()
        fake_npu.CAPTURING.set()
        assert capturing()
        del torch.npu.is_current_stream_capturing  # older ones cannot
        assert not capturing()
        """
    )
    done = runner.bare(script)
    assert done.returncode == 0, done.stderr


def test_triton_is_taken_on_an_npu_where_it_compiles_for_it(trained: Callable[..., Trained], runner: Runner) -> None:
    """Without triton-ascend the plain kernel is taken, and the reason said once; with it, what it compiles."""
    assert trained("npu", monitored=True).finished.stderr.count("slower statistics on npu (triton") == 1
    script = runner.write(
        """
        import sys
        import torch, triton.backends, fake_npu
        from msmon.backends.pytorch.kernels.choose import choose_kernel
        from msmon.stats.definitions import Statistic
        mode = fake_npu.install()
        triton.backends.backends[sys.argv[1]] = None
        kernel = choose_kernel()
        print(kernel.reduce([torch.tensor([3.0, 4.0]).to("npu")], [Statistic.NORM], 0).cpu().item())
        print(*(type(chosen).__name__ for chosen in kernel._chosen.values()))
        """
    )
    for backend, kernel in {"ascend": "DeviceKernel", "nvidia": "EagerKernel"}.items():
        done = runner.bare(script, backend)
        assert done.stdout.splitlines() == ["5.0", kernel], done.stderr
        assert ("triton-ascend is not installed" in done.stderr) == (backend == "nvidia")


def test_a_torch_npu_that_cannot_be_imported_is_left_alone(runner: Runner) -> None:
    """Without CANN an import of torch_npu fails: msmon never tries, and records a training on the CPU."""
    runner.write("raise ImportError('libhccl.so: cannot open shared object file')", "torch_npu/__init__.py")
    runner.environment["PYTHONPATH"] += f":{runner.folder}"
    done = runner.monitored(HERE / "on_device.py", "cpu", config=EVERYTHING)
    assert done.returncode == 0, done.stderr
    assert len(done.steps()) == 4
    assert "hccl" not in done.stderr
    assert json.loads((runner.folder / "truth.json").read_text())["imported"] == []


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_is_never_waited_for(trained: Callable[..., Trained]) -> None:
    """The same on a GPU, where torch itself raises an error when the host is made to wait."""
    bare, monitored = (trained("cuda", monitored=monitored) for monitored in (False, True))
    assert monitored.result["losses"] == bare.result["losses"]
    assert monitored.result["weights"] == bare.result["weights"]
    assert {kind for kind, *_ in rows(monitored.finished)} == KINDS
    assert_the_weights_are_recorded(monitored)
