"""The recordings that the comparison needs, made once."""

from __future__ import annotations

import os
import sys

import pytest
from compat.recording import Recording, record

PYTHON_VARIABLE = "MSMON_COMPAT_PYTHON"


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """What msmon writes."""
    return record(sys.executable, "msmon", tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """What the original writes, where there is one."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        pytest.skip(f"{PYTHON_VARIABLE} names no Python with mindstudio-probe: run `make test-compat`")
    return record(python, "original", tmp_path_factory.mktemp("original"))
