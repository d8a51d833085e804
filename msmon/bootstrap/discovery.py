"""Notes every module and every optimizer that a process constructs. Standard library only, nothing is decided here.

Constructed includes copied and unpickled: ``__setstate__`` is where those come to life.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

from msmon.bootstrap.dynamo import run_as_it_is, with_all_it_calls

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

modules: dict[int, weakref.ref[Any]] = {}
"""Every live module, and some that are gone. Keyed by id, since a module may compare by value and then not be hashable.

References that are dead are dropped by :func:`note_module`, and not by callbacks of theirs: what a signal handler of the
script raises while such a callback runs is lost.
"""

on_optimizer: list[Callable[[Any], None]] = []
"""Called with each optimizer when it is constructed."""

stopped = False
"""The user has asked msmon to end this run (``print_struct``, say), and it is at it."""

counts = {"modules": 0, "optimizers": 0}
"""How many were ever seen: what the message says when nothing could be watched."""

compiling: Callable[[], bool] = bool
"""Whether torch.compile is tracing: torch's function for it, from when Dynamo is loaded on."""

notes_modules = False
"""Whether every module that is constructed is noted: the process runs under ``msmon run``."""

_DYNAMOS_CONSTRUCTOR = "unpatched_nn_module_init"
_FEWEST = 1024
_purge_at = _FEWEST


def note_modules(cls: type) -> None:
    """Note every instance of ``torch.nn.Module`` from now on."""
    global notes_modules  # noqa: PLW0603 - one class a process
    _after(cls, "__init__", note_module)
    _after(cls, "__setstate__", note_module)
    notes_modules = True


def note_optimizers(cls: type) -> None:
    """Note every instance of ``torch.optim.Optimizer`` from now on."""
    _after(cls, "__init__", note_optimizer)
    _after(cls, "__setstate__", note_optimizer)


def forget_modules(cls: type) -> None:
    """Give ``torch.nn.Module`` its own constructor back: modules are looked for in memory when an optimizer wants them."""
    global notes_modules  # noqa: PLW0603 - as above
    for name in ("__init__", "__setstate__"):
        original = getattr(vars(cls).get(name), "__msmon_original__", None)
        if original is not None:
            setattr(cls, name, original)
    notes_modules = False


def dynamo_imported(module: ModuleType) -> None:
    """Have Dynamo trace torch's own constructor of modules, and see that ours does nothing when an optimizer is constructed.

    Dynamo itself replaces ``torch.nn.Module.__init__``. It remembers what it found there when it was imported, and takes
    that whenever the constructor is called in a function that it compiles.

    Args:
        module: ``torch._dynamo.mutation_guard``, just executed.
    """
    global compiling  # noqa: PLW0603 - as above
    compiler = sys.modules.get("torch.compiler")
    compiling = getattr(compiler, "is_compiling", compiling)
    found = getattr(module, _DYNAMOS_CONSTRUCTOR, None)
    if found is None:  # another Dynamo: modules are looked for when an optimizer wants them
        forget_modules(module.Module)
    else:
        setattr(module, _DYNAMOS_CONSTRUCTOR, getattr(found, "__msmon_original__", found))


def _after(cls: type, name: str, note: Callable[[Any], None]) -> None:
    original = vars(cls)[name]
    if hasattr(original, "__msmon_original__"):
        return

    @functools.wraps(original)
    @run_as_it_is
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passes on whatever the class takes
        original(self, *args, **kwargs)
        if not compiling():
            note(self)

    construct.__msmon_original__ = original  # type: ignore[attr-defined]  # how others know ours
    setattr(cls, name, construct)


@with_all_it_calls
def note_module(module: Any) -> None:  # noqa: ANN401 - torch is not imported here
    """Note a module, once."""
    key = id(module)
    known = modules.get(key)
    if known is not None and known() is module:
        return
    counts["modules"] += 1
    modules.pop(key, None)  # a new module with the id of a dead one would get its place in the order
    modules[key] = weakref.ref(module)
    if len(modules) >= _purge_at:
        _purge()


def _purge() -> None:
    """Drop the references that are dead; how many may gather before the next time keeps the cost of a module constant."""
    global _purge_at  # noqa: PLW0603 - one registry a process
    for key, reference in list(modules.items()):
        if reference() is None:
            removed = modules.pop(key, reference)
            if removed is not reference:  # another thread has just noted a new module with this id
                modules.setdefault(key, removed)
    _purge_at = max(_FEWEST, 2 * len(modules))


@with_all_it_calls
def note_optimizer(optimizer: Any) -> None:  # noqa: ANN401 - torch is not imported here
    """Tell of an optimizer."""
    counts["optimizers"] += 1
    for call in on_optimizer:
        call(optimizer)
