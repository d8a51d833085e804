"""The hook on a module: the one piece of msmon that torch.compile may trace, so that it can see that it does nothing.

A hook that Dynamo skips breaks the user's graph at every module call. This one is traced and, while it is, returns at
once: no operation, no state, no guard. See :mod:`msmon.backends.pytorch.dynamo`.
"""

from __future__ import annotations

import contextlib
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

    Copied or pickled with its module it becomes inert, and a file with a whole module loads where msmon is not installed.

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
