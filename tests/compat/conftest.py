"""The recordings that the comparison needs, made once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from compat.recording import Recording, record

PYTHON_VARIABLE = "MSMON_COMPAT_PYTHON"


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """What msmon writes."""
    return record(sys.executable, "msmon", tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """What the original writes."""
    return record(str(Path(os.environ[PYTHON_VARIABLE]).absolute()), "original", tmp_path_factory.mktemp("original"))
