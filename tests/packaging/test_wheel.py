"""What a user gets from ``pip install msmon``: a wheel, in an environment that knows nothing of this repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from msmon import __version__
from msmon.offline.reader import read_kind, run_directories

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
print("trained")
"""


@dataclass(frozen=True)
class Installed:
    """A fresh virtual environment with the wheel, outside the repository."""

    wheel: Path
    environment: Path
    folder: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command of that environment, in an empty folder."""
        env = {
            name: value for name, value in os.environ.items() if not name.startswith(("MSMON", "MONITOR_", "PYTHON"))
        }
        env |= {"PATH": f"{self.environment / 'bin'}{os.pathsep}{env['PATH']}", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        executable = str(self.environment / "bin" / command[0])
        return subprocess.run(
            [executable, *command[1:]], cwd=self.folder, env=env, capture_output=True, text=True, timeout=900
        )

    def imports(self, module: str) -> bool:
        return self.run("python", "-c", f"import {module}").returncode == 0


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel built from this checkout and installed; what it depends on comes from the environment of the tests."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(REPOSITORY)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = place.glob("*.whl")
    environment = place / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=900)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    # A path of a .pth file is searched, and .pth files in it are not read: this checkout stays out.
    (environment / "lib" / version / "site-packages" / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    folder = place / "empty"
    folder.mkdir()
    return Installed(wheel, environment, folder)


@pytest.mark.slow
def test_the_wheel_holds_two_packages_and_their_data(installed: Installed) -> None:
    """msmon and msmon_cli, typed, with the sitecustomize, the completions and the licence; no tests, no `cli`."""
    with zipfile.ZipFile(installed.wheel) as archive:
        names = archive.namelist()
    metadata, data = f"msmon-{__version__}.dist-info", f"msmon-{__version__}.data"
    assert {name.partition("/")[0] for name in names} == {"msmon", "msmon_cli", metadata, data}
    for name in [
        "msmon/py.typed",
        "msmon_cli/py.typed",
        "msmon/bootstrap/site/sitecustomize.py",
        f"{metadata}/licenses/LICENSE",
        f"{data}/data/share/bash-completion/completions/msmon",
    ]:
        assert name in names


@pytest.mark.slow
def test_the_installed_command_works(installed: Installed) -> None:
    """`msmon` is on the PATH, runs from the environment, and so does `python -m msmon_cli`."""
    for command in (["msmon"], ["python", "-m", "msmon_cli"]):
        done = installed.run(*command, "--version")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"msmon {__version__} (python ")
    place = installed.run("python", "-c", "import msmon, msmon_cli; print(msmon.__file__, msmon_cli.__file__)").stdout
    assert [Path(file).is_relative_to(installed.environment) for file in place.split()] == [True, True]


@pytest.mark.slow
def test_nothing_else_is_installed(installed: Installed) -> None:
    """Neither `cli` nor `tests` nor `benchmarks` becomes a module of the user's environment."""
    assert installed.imports("msmon")
    assert [name for name in ("cli", "tests", "benchmarks", "scripts", "conftest") if installed.imports(name)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("share/bash-completion/completions/msmon", "msmon.bash"),
        ("share/zsh/site-functions/_msmon", "_msmon"),
        ("share/fish/vendor_completions.d/msmon.fish", "msmon.fish"),
        ("share/msmon/msmon.ps1", "msmon.ps1"),
    ],
)
def test_completions_are_installed(place: str, source: str, installed: Installed) -> None:
    """Each shell's completion lies where the shell, or a packager, looks for it."""
    assert (installed.environment / place).read_text() == (REPOSITORY / "completions" / source).read_text() != ""


@pytest.mark.slow
def test_the_installed_msmon_explains(installed: Installed) -> None:
    """The pages are in the wheel, once."""
    for page in (REPOSITORY / "docs").glob("*.md"):
        assert installed.run("msmon", "explain", page.stem).stdout.splitlines()[0] == page.read_text().splitlines()[0]
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = [name for name in wheel.namelist() if name.endswith("messages.md")]
    assert names == ["msmon_cli/docs/messages.md"]


@pytest.mark.slow
def test_the_installed_msmon_records_a_training(installed: Installed) -> None:
    """`msmon run -- python script.py` from the wheel records, with the sitecustomize of the installed package."""
    (installed.folder / "train.py").write_text(SCRIPT)
    done = installed.run("msmon", "run", "--output", "out", "--", "python", "train.py")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    (directory,) = run_directories(installed.folder / "out")
    rows = read_kind(directory, "grad_reduced")
    assert [(row.name, row.step) for row in rows] == [(name, step) for step in range(3) for name in ("weight", "bias")]
    assert rows[0]["norm"] == pytest.approx(12**0.5, rel=1e-5)


@pytest.mark.parametrize("module", ["msmon", "msmon.env", "msmon.bootstrap", "msmon.bootstrap.discovery"])
def test_importing_msmon_imports_no_framework(module: str) -> None:
    """`import msmon` and what an injected process needs first load neither a framework nor what the terminal needs."""
    code = f"""
import sys
import {module}
print([name for name in ("torch", "mindspore", "numpy", "typer", "rich", "pydantic") if name in sys.modules])
import pydantic
print("pydantic" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert done.stdout.splitlines() == ["[]", "True"]
