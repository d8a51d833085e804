"""Shared by all tests: real scripts in real processes, under ``msmon run``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from msmon.offline.reader import RecordedRow, read_kind, read_steps, run_directories

if TYPE_CHECKING:
    from collections.abc import Iterator

MSMON = str(Path(sys.executable).with_name("msmon"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SIX = ["min", "max", "norm", "mean", "zeros", "nans"]
# A worker thread of gloo that frees the tensors of the last operation while the interpreter ends aborts the process, with
# and without msmon (https://github.com/pytorch/pytorch/issues/190489): scripts give it the time to do so before.
SETTLE = "__import__('time').sleep(0.2)"

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)

# A shell ignores these for what it starts in the background, and what is ignored stays ignored in every process started
# from there. The tests are about signals that arrive.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@dataclass(frozen=True)
class Finished:
    """A process that has ended, and what its monitor wrote."""

    returncode: int
    stdout: str
    stderr: str
    output: Path

    def directories(self, rank: int = 0) -> list[Path]:
        return run_directories(self.output, rank)

    def rows(self, kind: str, rank: int = 0) -> list[RecordedRow]:
        """Rows of one kind over all directories of a rank."""
        return [row for directory in self.directories(rank) for row in read_kind(directory, kind)]

    def steps(self, rank: int = 0) -> list[dict[str, str]]:
        return [line for directory in self.directories(rank) for line in read_steps(directory)]

    def run_file(self, rank: int = 0) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.directories(rank)[0] / "run.json").read_text())
        return content


class Runner:
    """Runs scripts in a directory of their own, bare or under ``msmon run``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "out"
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("MSMON", "MONITOR_", "DYNAMIC_"))},
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",  # DeepSpeed, which transformers imports, says on stdout that it looks for one
            "NO_COLOR": "1",
            "COLUMNS": "80",
        }

    def write(self, source: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        source = textwrap.dedent(source)
        path.write_text(f"{source}\n{SETTLE}\n" if "init_process_group" in source else source)
        return path

    def write_config(self, **config: Any) -> Path:
        path = self.folder / "monitor.json"
        path.write_text(json.dumps(config))
        return path

    def call(self, command: list[str], *, timeout: float = 900, **env: str) -> Finished:
        done = subprocess.run(
            command, cwd=self.folder, env={**self.environment, **env}, capture_output=True, text=True, timeout=timeout
        )
        return Finished(done.returncode, done.stdout, done.stderr, self.output)

    def bare(self, script: Path, *args: str, ranks: int = 0, **env: str) -> Finished:
        """The script without msmon."""
        return self.call([*launcher(ranks), str(script), *args], **env)

    def monitored(
        self,
        script: Path,
        *args: str,
        ranks: int = 0,
        options: list[str] | None = None,
        config: dict[str, Any] | None = None,
        **env: str,
    ) -> Finished:
        """The script under ``msmon run``, with a configuration or options (all gradients by default)."""
        chosen = list(options or [])
        if config is not None:
            chosen += ["--config", str(self.write_config(**config))]
        command = [MSMON, "run", "--output", str(self.output), *chosen, "--", *launcher(ranks), str(script), *args]
        return self.call(command, **env)


def launcher(ranks: int) -> list[str]:
    """``python``, or ``torchrun`` with so many processes."""
    return [TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)] if ranks else [sys.executable]


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


@pytest.fixture(autouse=True)
def leave_no_trace() -> Iterator[None]:
    """What a test that fails half-way leaves behind must not decide how the next one ends."""
    environment, folder, path = dict(os.environ), Path.cwd(), list(sys.path)
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    tracing, profiling = sys.gettrace(), sys.getprofile()
    yield
    sys.settrace(tracing)
    sys.setprofile(profiling)
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
