"""The core imports no tensor framework, and ``import msmon`` imports next to nothing."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import msmon

FRAMEWORKS = ("torch", "mindspore")
CORE = ("alerts", "config", "plan", "stats", "record", "sinks", "runtime", "offline", "bootstrap")


def modules(*packages: str) -> list[str]:
    folder = Path(msmon.__file__).parent
    found = []
    for package in packages:
        found.append(f"msmon.{package}")
        found += [name for _, name, _ in pkgutil.walk_packages([str(folder / package)], f"msmon.{package}.")]
    return [name for name in found if ".site" not in name]


def imported_by(*statements: str) -> set[str]:
    """Every module that a fresh interpreter has loaded after these statements."""
    code = "\n".join([*statements, "import sys", "print(*sys.modules)"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    return set(done.stdout.split())


def test_core_imports_no_framework() -> None:
    """Configuration, plans, statistics, records, sinks, runtime and the offline part hold no tensor."""
    names = [*modules(*CORE), "msmon.errors", "msmon.env", "msmon.log", "msmon.backends.base"]
    assert len(names) > 25
    loaded = imported_by(*(f"import {name}" for name in names))
    assert set(names) <= loaded
    assert not loaded.intersection(FRAMEWORKS)


def test_the_check_can_fail() -> None:
    """The same check sees the framework in the backend that uses it."""
    assert "torch" in imported_by("import msmon.backends.pytorch.kernels.eager")


@pytest.mark.parametrize("heavy", [*FRAMEWORKS, "numpy", "pydantic", "typer", "rich", "multiprocessing"])
def test_import_msmon_is_light(heavy: str) -> None:
    """``import msmon`` brings in none of the heavy ones; public names come on first use."""
    assert heavy not in imported_by("import msmon", "assert msmon.__version__")


def test_public_names() -> None:
    """Every public name can be had, and no other."""
    for name in msmon.__all__:
        assert getattr(msmon, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = msmon.nothing
    loaded = imported_by("from msmon import MonitorConfig, load_config, MsmonError")
    assert "msmon.config.schema" in loaded
    assert "torch" not in loaded


@pytest.mark.parametrize("name", ["msmon.env", "msmon.log"])
def test_standard_library_only(name: str) -> None:
    """What is imported in processes that may never train needs nothing but the standard library."""
    before = imported_by("pass")
    new = {one.partition(".")[0] for one in imported_by(f"import {name}") - before}
    assert new <= {*sys.stdlib_module_names, "msmon"}
