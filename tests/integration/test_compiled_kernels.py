"""What the compiled kernels do to the process that they run in: threads, forks, imports, and what happens without them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from msmon import log
from msmon.backends.pytorch.kernels import choose, fused
from msmon.backends.pytorch.kernels.choose import choose_kernel
from msmon.backends.pytorch.kernels.compiled import readable
from msmon.backends.pytorch.kernels.eager import EagerKernel
from msmon.backends.pytorch.kernels.fused import FusedKernel
from msmon.backends.pytorch.kernels.host import HostKernel
from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SIX = list(Statistic)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FusedKernel:
    """A kernel that shares out even little work."""
    monkeypatch.setattr(fused, "BLOCK", 64)
    monkeypatch.setattr(fused, "SHARE", 256)
    return FusedKernel(HostKernel())


@pytest.fixture
def threads() -> Iterator[None]:
    """The number of torch's threads is put back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in (1, 5000, 0, 63, 64, 65, 12_345)]


def our_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("msmon-kernel")}


@pytest.mark.usefixtures("threads")
def test_results_do_not_depend_on_threads(kernel: FusedKernel) -> None:
    """One thread or several: the same bits, and as many threads at a time as the user allows torch."""
    before = our_threads()
    torch.set_num_threads(1)
    alone = kernel.reduce(numbers(), SIX, 0.1)
    assert our_threads() == before
    for count in (2, 3):
        torch.set_num_threads(count)
        for _ in range(20):
            together = kernel.reduce(numbers(), SIX, 0.1)
            assert torch.equal(together.nan_to_num(7), alone.nan_to_num(7))
        assert torch.get_num_threads() == count
        assert len(our_threads() - before) < count + 1
    assert our_threads()


def test_several_callers(kernel: FusedKernel) -> None:
    """Threads of the user may call at the same time."""
    expected = [HostKernel().reduce(numbers(seed), SIX, 0.1) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            found = list(pool.map(lambda seed: kernel.reduce(numbers(seed), SIX, 0.1), range(8)))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14, equal_nan=True)


def run(code: str, **environment: str) -> str:
    """Run a script that prints nothing but its answer; warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=120, check=False, env={"PATH": "/usr/bin:/bin", **environment},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


BIG = """
    import os, sys, threading, torch
    from msmon.backends.pytorch.kernels.choose import choose_kernel
    from msmon.stats.definitions import Statistic
    kernel, tensor = choose_kernel(), torch.ones(5_000_000)
    def norm():
        return kernel.reduce([tensor], [Statistic.NORM], 1e-8).item() ** 2
"""


@pytest.mark.slow
def test_forks() -> None:
    """A process that is forked after threads were started, such as a data loader's worker, can go on; so can its parent."""
    answer = run(
        BIG
        + """
    torch.set_num_threads(2)
    assert round(norm()) == 5_000_000
    assert threading.active_count() == 2
    child = os.fork()
    if child == 0:
        good = round(norm()) == 5_000_000 and threading.active_count() == 2
        sys.exit(0 if good else 3)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), round(norm()))
    """
    )
    assert answer == "0 5000000"


@pytest.mark.slow
def test_one_thread() -> None:
    """OMP_NUM_THREADS=1 holds for us too."""
    assert run(BIG + "\n    print(round(norm()), threading.active_count())", OMP_NUM_THREADS="1") == "5000000 1"


@pytest.mark.slow
def test_compiler_is_imported_when_needed() -> None:
    """Neither choosing nor a single number (a step counter of Adam beside parameters on a GPU) loads the compiler."""
    answer = run(
        BIG
        + """
    loaded = ["llvmlite" in sys.modules]
    kernel.reduce([torch.tensor(1.0)], list(Statistic), 1e-8)
    loaded.append("llvmlite" in sys.modules)
    norm()
    loaded.append("llvmlite" in sys.modules)
    print(loaded, [name for name in sys.modules if name in {"numba", "triton"}])
    """
    )
    assert answer == "[False, False, True] []"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [("missing", "llvmlite is not installed: pip install msmon[cpu]"), ("failing", "RuntimeError: no such processor")],
)
def test_without_a_compiler(
    broken: str, reason: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """When nothing can be compiled, statistics are the same, and the reason is said once."""

    def fail(_name: str) -> Any:
        raise RuntimeError("no such processor")

    monkeypatch.setattr(log, "_said", {})
    if broken == "missing":
        monkeypatch.delitem(sys.modules, "msmon.backends.pytorch.kernels.fused")
        monkeypatch.delitem(sys.modules, "msmon.backends.pytorch.kernels.compiled")
        monkeypatch.setitem(sys.modules, "llvmlite", None)
    else:
        monkeypatch.setattr(fused, "compile_loop", fail)
    chosen = choose_kernel()
    for _ in range(2):
        assert chosen.reduce([torch.ones(4)], [Statistic.NORM], 1e-8).item() == 2.0
    assert capfd.readouterr().err == f"msmon: slower statistics on CPU ({reason})\n"


def test_a_gpu_kernel_is_tried_out() -> None:
    """A kernel whose results are not those of plain torch is not used."""

    class Wrong(HostKernel):
        def reduce(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
            return super().reduce(*arguments, **keywords) * (1 + 1e-6)

    choose._try_out(HostKernel(), EagerKernel(), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="wrong"):
        choose._try_out(Wrong(), EagerKernel(), torch.device("cpu"))


def test_processors_that_cannot_read_halves() -> None:
    """float16 is compiled only where the processor converts it: elsewhere a call into the void would end the process."""
    assert "float16" in readable("x86_64", {"f16c": True})
    assert "float16" in readable("arm64", {})
    assert readable("x86_64", {"f16c": False}) == ["float64", "float32", "bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("target", [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)], ids=str)
def test_gpu_code(target: tuple[str, Any, int], tmp_path: Path) -> None:
    """Triton compiles the kernels for GPUs: its interpreter takes more than its compiler does."""
    answer = run(f"""
    import warnings
    warnings.simplefilter("ignore")
    import triton, triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from msmon.backends.pytorch.kernels import device
    blocks = dict(addresses="*i64", counts="*i64", lines="*fp64", threshold_at="*fp32", DTYPE="constexpr", CHUNK="constexpr")
    tensors = dict(lines="*fp64", counts="*i64", first_blocks="*i64", table="*fp64", scale_at="*fp64", CHUNK="constexpr")
    sources = [
        ASTSource(fn=device.reduce_blocks, signature=blocks, constexprs=dict(DTYPE=dtype, CHUNK=device.CHUNK))
        for dtype in (tl.float32, tl.float16, tl.bfloat16)
    ]
    sources.append(ASTSource(fn=device.combine_blocks, signature=tensors, constexprs=dict(CHUNK=device.CHUNK)))
    for source in sources:
        binary = triton.compile(source, target=GPUTarget{target!r}).kernel
        print(len(binary) > 1000, end=" ")
    """, HOME=str(tmp_path))  # fmt: skip
    assert answer == "True True True True"
