"""Keeps torch.compile from compiling msmon: its functions run between the user's graphs and belong to none of them.

Without this, Dynamo would trace our hooks wherever they run under a compiled function: more graphs, and rows missing in
the steps in which it only replays them.
"""

from __future__ import annotations

import sys

_RULES = ("torch._dynamo.trace_rules", "torch._dynamo.skipfiles")
"""Where torch keeps what it does not trace: today, and in torch 2.1."""

_told = False


def keep_out() -> None:
    """Tell Dynamo to skip this package, once it is loaded; loading it ourselves would cost a second."""
    global _told  # noqa: PLW0603 - one compiler a process
    if _told:
        return
    for name in _RULES:
        rules = sys.modules.get(name)
        if rules is not None and hasattr(rules, "add"):
            rules.add("msmon")
            _told = True
            return
