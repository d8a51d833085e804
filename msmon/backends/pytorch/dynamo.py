"""Keeps torch.compile from compiling msmon: its functions run between the user's graphs and belong to none of them.

Without this, Dynamo would trace our hooks wherever they run under a compiled function: more graphs, and rows missing in
the steps in which it only replays them.
"""

from __future__ import annotations

import pkgutil
import sys
from typing import TYPE_CHECKING

import msmon
from msmon.backends.pytorch import module_hook

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_RULES = ("torch._dynamo.trace_rules", "torch._dynamo.skipfiles")
"""Where torch keeps what it does not trace: today, and in torch 2.1."""

_told = False


def keep_out() -> None:
    """Tell Dynamo to skip this package, once it is loaded; loading it ourselves would cost a second.

    All but the hook on modules, which it shall trace: :mod:`msmon.backends.pytorch.module_hook`.
    """
    global _told  # noqa: PLW0603 - one compiler a process
    if _told:
        return
    for name in _RULES:
        rules = sys.modules.get(name)
        if rules is not None and hasattr(rules, "add"):
            for part in _skipped(msmon):
                rules.add(part)
            _told = True
            return


def _skipped(package: ModuleType) -> Iterator[str]:
    """The largest parts of a package without the traced hook in them."""
    for _, part, is_package in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not module_hook.__name__.startswith(f"{part}.") and part != module_hook.__name__:
            yield part
        elif is_package:
            yield from _skipped(sys.modules[part])
