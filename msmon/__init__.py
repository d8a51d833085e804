"""See inside any training run of a neural network, without touching its code.

``import msmon`` imports no tensor framework: the public names below are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msmon.config.load import load_config
    from msmon.config.schema import MonitorConfig
    from msmon.errors import MsmonError

__version__ = "0.1.0"

_LAZY = {
    "MonitorConfig": "msmon.config.schema",
    "MsmonError": "msmon.errors",
    "load_config": "msmon.config.load",
}

__all__ = ["MonitorConfig", "MsmonError", "__version__", "load_config"]


def __getattr__(name: str) -> object:
    """Load a public name on first use (PEP 562)."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
