"""Notes every module and every optimizer that a process constructs. Standard library only, nothing is decided here.

Constructed includes copied and unpickled: ``__setstate__`` is where those come to life.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

modules: dict[int, weakref.ref[Any]] = {}
"""Every live module. Keyed by id, since a module may compare by value and then not be hashable."""

on_optimizer: list[Callable[[Any], None]] = []
"""Called with each optimizer when it is constructed."""

stopped = False
"""The user has asked msmon to end this run (``print_struct``, say), and it is at it."""

counts = {"modules": 0, "optimizers": 0}
"""How many were ever seen: what the message says when nothing could be watched."""


def note_modules(cls: type) -> None:
    """Note every instance of ``torch.nn.Module`` from now on."""
    _after(cls, "__init__", note_module)
    _after(cls, "__setstate__", note_module)


def note_optimizers(cls: type) -> None:
    """Note every instance of ``torch.optim.Optimizer`` from now on."""
    _after(cls, "__init__", _note_optimizer)
    _after(cls, "__setstate__", _note_optimizer)


def forget(cls: type) -> None:
    """Give a class its own constructors back."""
    for name in ("__init__", "__setstate__"):
        original = getattr(vars(cls).get(name), "__msmon_original__", None)
        if original is not None:
            setattr(cls, name, original)


def _after(cls: type, name: str, note: Callable[[Any], None]) -> None:
    original = vars(cls)[name]
    if hasattr(original, "__msmon_original__"):
        return

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passes on whatever the class takes
        original(self, *args, **kwargs)
        note(self)

    construct.__msmon_original__ = original  # type: ignore[attr-defined]  # how a second call and forget() know ours
    setattr(cls, name, construct)


def note_module(module: Any) -> None:  # noqa: ANN401 - torch is not imported here
    """Note a module, once."""
    key = id(module)
    if key in modules and modules[key]() is module:
        return
    counts["modules"] += 1
    modules[key] = weakref.ref(module, lambda reference: _drop(key, reference))


def _drop(key: int, reference: weakref.ref[Any]) -> None:
    if modules.get(key) is reference:
        del modules[key]


def _note_optimizer(optimizer: Any) -> None:  # noqa: ANN401 - torch is not imported here
    counts["optimizers"] += 1
    for call in on_optimizer:
        call(optimizer)
