"""The hooks on modules, on the graph and on parameters: torch.compile may trace them, and sees that they do nothing.

A hook that Dynamo skips breaks the user's graph at every call. These are traced and, while they are, return at once: no
operation, no state, no guard. See :mod:`msmon.backends.pytorch.dynamo`.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from typing import TYPE_CHECKING, Any

import torch

from msmon.bootstrap.dynamo import run_as_it_is, with_all_it_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
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

    @with_all_it_calls
    def __call__(self, module: Module, *call: Any) -> None:  # noqa: ANN401 - whatever the module takes and returns
        """What torch calls."""
        if not is_compiling() and id(module) == self.owner:
            self.observe(module, *call)

    @with_all_it_calls
    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook(None, self.observe)  # not the pickled form, which nobody could tell from a hook of the user

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes anything, does nothing, is always there


class NodeHook:
    """Calls ``observe(*gradients)`` when a backward pass comes to a node of autograd's graph.

    Not in a backward pass that torch compiles (compiled autograd): there it is called while that is traced, if at all.

    Args:
        observe: What is called; must not raise.
    """

    def __init__(self, observe: Callable[..., None]) -> None:
        self.observe = observe

    @with_all_it_calls
    def __call__(self, *gradients: Any) -> None:  # noqa: ANN401 - what autograd hands over
        """What torch calls."""
        if not is_compiling():
            self.observe(*gradients)


class ParameterHook:
    """Calls ``observe(parameter)`` when autograd has accumulated a gradient; see :class:`NodeHook`.

    Args:
        collecting: Whether the step under way is collected: all that is asked in one that is not.
        observe: What is called; must not raise.
    """

    def __init__(self, collecting: Callable[[], bool], observe: Callable[[Tensor], None]) -> None:
        self.collecting = collecting
        self.observe = observe

    @with_all_it_calls
    def __call__(self, parameter: Tensor) -> None:
        """What torch calls."""
        if not is_compiling() and self.collecting():
            self.observe(parameter)


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

    @run_as_it_is
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


class WithoutHooks:
    """The hooks of a module as they are without msmon's: to be looked at, not to be changed.

    Args:
        module: The module.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        hooks = (*module._forward_hooks.items(), *module._forward_pre_hooks.items())  # noqa: SLF001 - torch has no public name for it
        self._ours = {key for key, hook in hooks if is_ours(hook)}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of the module
        value = getattr(self._module, name)
        if isinstance(value, dict):  # hooks, and flags of hooks under the same keys
            return {key: held for key, held in value.items() if key not in self._ours}
        return value


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
