"""Keeps torch.compile from compiling msmon: its functions run between the user's graphs and belong to none of them.

Without this, Dynamo would trace our hooks wherever they run under a compiled function: more graphs, and rows missing in
the steps in which it only replays them. What it meets inside a function that it compiles, hooks and wrappers, it does
trace, so as to see that they do nothing there: anything else would break the user's graph.
"""

from __future__ import annotations

import pkgutil
import sys
from typing import TYPE_CHECKING, Any

import msmon
from msmon.bootstrap.dynamo import with_all_it_calls
from msmon.runtime.guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_RULES = ("torch._dynamo.trace_rules", "torch._dynamo.skipfiles")
"""Where torch keeps what it does not trace: today, and in torch 2.1."""

_LAST = "torch._dynamo.eval_frame"
"""The module of Dynamo that imports the others."""

_TRACED = ("msmon.backends.pytorch.events", "msmon.backends.pytorch.module_hook", "msmon.bootstrap.discovery")
"""What Dynamo shall trace."""

_told = False

with_all_it_calls(Guard.run)


def keep_out() -> None:
    """Tell Dynamo to skip this package, all but :data:`_TRACED`, once it is loaded; loading it ourselves would cost a second."""
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
    """The largest parts of a package with nothing in them that is traced."""
    for _, part, is_package in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not any(f"{traced}.".startswith(f"{part}.") for traced in _TRACED):
            yield part
        elif is_package:
            yield from _skipped(sys.modules[part])


class WhenLoaded:
    """Calls a function once Dynamo is loaded: now or later.

    ``torch.compile``, which loads it, stays as it is: Dynamo knows it by its identity.

    Args:
        call: What is called, once.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        if _LAST in sys.modules:
            call()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:  # noqa: ANN401 - as importlib calls it
        """Find what the other finders find, and have a call made when it was executed."""
        if name != _LAST:
            return None
        found = (finder.find_spec(name, path, target) for finder in tuple(sys.meta_path) if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = spec.loader if spec is not None else None
        execute = getattr(loader, "exec_module", None)
        if execute is not None:

            def execute_and_tell(module: ModuleType) -> None:
                del loader.exec_module
                execute(module)
                self.remove()
                self._call()

            loader.exec_module = execute_and_tell
        return spec

    def remove(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
