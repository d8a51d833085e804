"""What the compiled kernels do to the process that they run in: threads, forks, imports, and what happens without them."""

from __future__ import annotations

import platform
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest
import torch

from msmon import log
from msmon.backends.pytorch.kernels import choose, code_cache, compiled, fused
from msmon.backends.pytorch.kernels.choose import choose_kernel
from msmon.backends.pytorch.kernels.compiled import readable_here
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
    monkeypatch.setattr(fused, "SHARED", 256)
    monkeypatch.setattr(fused, "_TAKE", 64)
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


@pytest.mark.usefixtures("threads")
def test_results_do_not_depend_on_threads(kernel: FusedKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread or several: the same bits, in one go of torch's own threads, and only where the user allows several."""
    shared: list[int] = []
    parallel = fused._parallel
    monkeypatch.setattr(fused, "_parallel", lambda *arguments: (shared.append(1), parallel(*arguments)))
    torch.set_num_threads(1)
    alone = kernel.reduce(numbers(), SIX, 0.1)
    assert not shared
    for count in (2, 3):
        torch.set_num_threads(count)
        for _ in range(20):
            together = kernel.reduce(numbers(), SIX, 0.1)
            assert torch.equal(together.nan_to_num(7), alone.nan_to_num(7))
        assert torch.get_num_threads() == count
    assert len(shared) == 40
    monkeypatch.setattr(fused, "_parallel", None)  # a system whose OpenMP has no such entry
    assert torch.equal(kernel.reduce(numbers(), SIX, 0.1).nan_to_num(7), alone.nan_to_num(7))


def test_several_callers(kernel: FusedKernel) -> None:
    """Threads of the user may call at the same time."""
    expected = [HostKernel().reduce(numbers(seed), SIX, 0.1) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            found = list(pool.map(lambda seed: kernel.reduce(numbers(seed), SIX, 0.1), range(8)))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7, equal_nan=True)


def run(code: str, **environment: str) -> str:
    """Run a script that prints nothing but its answer; warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=900, check=False, env={"PATH": "/usr/bin:/bin", **environment},
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
    """A process that is forked after threads were at work, such as a data loader's worker, can go on; so can its parent."""
    answer = run(
        BIG
        + """
    torch.set_num_threads(2)
    assert round(norm()) == 5_000_000
    child = os.fork()
    if child == 0:
        os._exit(0 if round(norm()) == 5_000_000 else 3)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), round(norm()), threading.active_count())
    """
    )
    assert answer == "0 5000000 1"


LOADED = """
    loaded = ["llvmlite" in sys.modules]
    kernel.reduce([torch.tensor(1.0)], list(Statistic), 1e-8)
    loaded.append("llvmlite" in sys.modules)
    norm()
    loaded.append("llvmlite" in sys.modules)
    print(loaded, [name for name in sys.modules if name in {"numba", "triton"}])
"""


@pytest.mark.slow
def test_compiler_is_imported_when_needed(tmp_path: Path) -> None:
    """Neither choosing nor a single number (a step counter of Adam beside parameters on a GPU) loads the compiler.

    Nor does anything in a later run, which finds the code on disk.
    """
    cache = tmp_path / "code"
    assert run(BIG + LOADED, MSMON_CODE_CACHE=str(cache)) == "[False, False, True] []"
    kept = sorted(cache.iterdir())
    assert len(kept) == 1
    assert run(BIG + LOADED, MSMON_CODE_CACHE=str(cache)) == "[False, False, False] []"
    assert sorted(cache.iterdir()) == kept
    assert run(BIG + LOADED, MSMON_CODE_CACHE="0") == "[False, False, True] []"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [("missing", "llvmlite is not installed: pip install msmon[cpu]"), ("failing", "RuntimeError: no such processor")],
)
def test_without_a_compiler(
    broken: str, reason: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """When nothing can be compiled, statistics are the same, and the reason is said once."""

    def fail(name: str) -> Any:
        if broken == "missing":
            raise metadata.PackageNotFoundError(name)
        raise RuntimeError("no such processor")

    monkeypatch.setattr(log, "_said", {})
    if broken == "missing":
        monkeypatch.setattr(metadata, "version", fail)
    else:
        monkeypatch.setattr(fused, "Loops", fail)
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


@pytest.mark.parametrize(
    ("name", "features", "there"),
    [("x86_64 new", {"f16c"}, True), ("aarch64", {}, True), ("x86_64 old", {"avx"}, False)],
)
def test_processors_that_cannot_read_halves(
    name: str, features: set[str], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 is compiled only where the processor converts it: elsewhere a call into the void would end the process."""
    monkeypatch.setattr(code_cache, "processor", lambda: code_cache.Processor(name, frozenset(features)))
    assert readable_here() == ["float64", "float32", *(["float16"] if there else []), "bfloat16"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_processors_without_wide_registers(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops of fewer lanes, as other processors get them, have the same results."""
    here = code_cache.processor()
    narrow = code_cache.Processor(here.name, frozenset(f for f in here.features if not f.startswith("avx512")))
    tensors = [tensor.to(dtype) for tensor in numbers()]
    wide = FusedKernel(HostKernel()).reduce(tensors, SIX, 0.1)
    monkeypatch.setattr(code_cache, "processor", lambda: narrow)
    assert "<64 x" not in compiled._source("float32")
    found = FusedKernel(HostKernel()).reduce(tensors, SIX, 0.1)
    torch.testing.assert_close(found, wide, rtol=2e-6, atol=1e-7, equal_nan=True)


def test_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary tensors are read once, by the fast loop; those that it cannot tell once more, and only those."""
    read: list[tuple[str, int]] = []

    class Other(HostKernel):
        def reduce(self, tensors: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
            read.append(("other", len(tensors)))
            return super().reduce(tensors, *arguments, **keywords)

    run_loop = fused._run

    def counted(loops: Any, batch: Any, *arguments: Any, **keywords: Any) -> Any:
        read.append(("fast" if keywords["fast"] else "precise", len(batch.lines)))
        return run_loop(loops, batch, *arguments, **keywords)

    monkeypatch.setattr(fused, "_run", counted)
    kernel = FusedKernel(Other())
    kernel.reduce(numbers(), SIX, 0.1)
    assert read == [("fast", 7)]
    read.clear()
    tiny, huge, broken = torch.full((900,), 1e-25), torch.full((900,), 1e25), torch.tensor([1.0, float("nan")])
    found = kernel.reduce([*numbers(), tiny, huge, broken, torch.zeros(3)], SIX, 0.1)
    assert read == [("fast", 11), ("precise", 3), ("other", 1)]
    assert found[7:9, 2].tolist() == pytest.approx([3e-24, 3e26])
    assert found[9, 5] == 1


def reload(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Load the loops of float32, and which of its two ways they came: ``read`` or ``compiled``."""
    ways = []
    for name, way in (("_map", "read"), ("_compile", "compiled")):
        original = getattr(code_cache, name)

        def counted(*arguments: Any, original: Any = original, way: str = way) -> Any:
            result = original(*arguments)
            ways.append(way)
            return result

        monkeypatch.setattr(code_cache, name, counted)
    monkeypatch.setenv("MSMON_CODE_CACHE", str(cache))
    kernel = FusedKernel(HostKernel())
    monkeypatch.undo()
    assert kernel.reduce([torch.tensor([3.0, 4.0])], SIX, 1e-8).tolist() == [[3, 4, 5, 3.5, 0, 0]]
    return ways


cached = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="code is kept on disk on Linux on x86-64 only"
)


@cached
def test_kept_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is compiled once, and read from then on; another version of the compiler compiles anew."""
    cache = tmp_path / "code"
    assert reload(cache, monkeypatch) == ["compiled"]
    assert reload(cache, monkeypatch) == ["read"]
    assert cache.stat().st_mode & 0o777 == 0o700
    (kept,) = cache.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(metadata, "version", lambda _name: "0.0")
    assert reload(cache, monkeypatch) == ["compiled"]
    assert len(list(cache.iterdir())) == 2


@cached
@pytest.mark.parametrize("spoilt", ["damaged", "empty", "writable", "symbolic link", "foreign folder", "no folder"])
def test_code_that_is_not_trusted(spoilt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is damaged, or what others may have written, is never executed: it is compiled again."""
    cache = tmp_path / "code"
    reload(cache, monkeypatch)
    (kept,) = cache.iterdir()
    content = kept.read_bytes()
    if spoilt == "damaged":
        kept.write_bytes(content[:-8] + b"\xcc" * 8)
    elif spoilt == "empty":
        kept.write_bytes(b"")
    elif spoilt == "writable":
        kept.chmod(0o622)
    elif spoilt == "symbolic link":
        kept.rename(tmp_path / "elsewhere")
        kept.symlink_to(tmp_path / "elsewhere")
    elif spoilt == "foreign folder":
        cache.chmod(0o777)
    else:
        kept.unlink()
        cache.rmdir()
        cache.write_text("a file")
    assert reload(cache, monkeypatch) == ["compiled"]
    if spoilt in {"damaged", "empty", "writable", "symbolic link"}:
        assert reload(cache, monkeypatch) == ["read"]  # it was replaced
        assert kept.read_bytes() == content


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
