"""The hook on a module: the one piece of msmon that torch.compile may trace, so that it can see that it does nothing.

A hook that Dynamo skips breaks the user's graph at every module call. This one is traced and, while it is, returns at
once: no operation, no state, no guard. See :mod:`msmon.backends.pytorch.dynamo`.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.nn import Module

if hasattr(torch.compiler, "is_compiling"):
    is_compiling = torch.compiler.is_compiling
else:  # torch 2.1 and 2.2

    def is_compiling() -> bool:
        """Whether Dynamo is tracing, which nobody can say here."""
        return False


class ModuleHook:
    """Calls ``observe(module, args, kwargs[, output])`` before or after a forward of the module it was made for.

    Modules are copied and pickled without it; where a class does that in a way of its own, it becomes inert, and a file
    with a whole module loads where msmon is not installed.

    Args:
        module: The only module whose calls it passes on: replicas and shallow copies share its hooks. ``None``: no module.
        observe: What is called; must not raise.
    """

    def __init__(self, module: Module | None, observe: Callable[..., None]) -> None:
        self.owner = id(module)
        self.observe = observe

    def __call__(self, module: Module, *call: Any) -> None:  # noqa: ANN401 - whatever the module takes and returns
        """What torch calls."""
        if not is_compiling() and id(module) == self.owner:
            self.observe(module, *call)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook(None, self.observe)  # not the pickled form, which nobody could tell from a hook of the user

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, does nothing, is always there


def is_ours(hook: object) -> bool:
    """Whether a hook is one of these, or what is left of one in a module that was pickled."""
    return isinstance(hook, ModuleHook) or getattr(hook, "__func__", None) is contextlib.nullcontext.__exit__


_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip
"""Where a module keeps hooks, and what it keeps of each hook under the same key."""


def wrap_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """What pickle, ``copy.deepcopy`` and ``torch.save`` ask a module for: as it would be without msmon's hooks."""

    def __reduce_ex__(self: Module, protocol: Any) -> Any:  # noqa: ANN401, N807 - stands in for object's
        reduced = original(self, protocol)
        if is_compiling() or sys._getframe(1).f_code is _SHALLOW_COPY:  # noqa: SLF001 - a shallow copy shares the hooks
            return reduced
        if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):  # noqa: PLR2004 - where the state is
            return (*reduced[:2], _state_without_hooks(reduced[2]), *reduced[3:])
        return reduced

    return __reduce_ex__


_SHALLOW_COPY = copy.copy.__code__


def _state_without_hooks(state: dict[str, Any]) -> dict[str, Any]:
    ours = {key for name in _HOOKS[:2] for key, hook in (state.get(name) or {}).items() if isinstance(hook, ModuleHook)}
    if not ours:
        return state
    without = {
        name: type(state[name])((key, held) for key, held in state[name].items() if key not in ours)
        for name in _HOOKS
        if state.get(name)
    }
    return {**state, **without}


@contextlib.contextmanager
def without_hooks(*modules: Module) -> Iterator[None]:
    """These modules without msmon's hooks, for as long as this lasts."""
    held = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]  # noqa: SLF001 - torch has no public name for it
    before = [dict(hooks) for hooks in held]
    for hooks in held:
        for key in [key for key, hook in hooks.items() if is_ours(hook)]:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, all_hooks in zip(held, before, strict=True):
            hooks.clear()
            hooks.update(all_hooks)
