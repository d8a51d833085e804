"""What happens in a training, told to whoever listens: a backward pass begins, an optimizer steps, a step is skipped.

One set of patches serves all listeners of the process; it is installed with the first and undone with the last.
Optimizer steps come from torch's public global step hooks, so ``optimizer.step`` itself is never replaced.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from msmon.backends.pytorch import dynamo
from msmon.runtime.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module
    from torch.optim import Optimizer

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Listener(Protocol):
    """Hears what happens. Its methods must not raise."""

    def backward_begins(self) -> None:
        """An outermost backward pass that accumulates gradients begins."""

    def gradients_zeroed(self, owner: Optimizer | Module) -> None:
        """``owner.zero_grad()`` was called."""

    def step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """``optimizer.step(*args[1:], **kwargs)`` begins; may return other arguments (a wrapped closure)."""

    def step_ends(self, optimizer: Optimizer) -> None:
        """``optimizer.step`` returned."""

    def scaler_steps(self, optimizer: Optimizer, scale: torch.Tensor | None) -> Callable[[], None]:
        """``GradScaler.step(optimizer)`` begins with this loss scale; what is returned is called when it has returned."""


_listeners: list[Listener] = []
_ledger = Ledger()
_serials = itertools.count()
_passes: dict[int, int] = {}
"""Backward passes under way: the thread that called each, and its number."""

_is_compiling = getattr(torch.compiler, "is_compiling", lambda: False)  # torch 2.1 and 2.2 do not have it


def subscribe(listener: Listener) -> None:
    """Tell this listener what happens from now on."""
    if not _listeners:
        _install()
    _listeners.append(listener)


def unsubscribe(listener: Listener) -> None:
    """Tell this listener nothing more."""
    if listener in _listeners:
        _listeners.remove(listener)
        if not _listeners:
            _ledger.undo()


def current_backward() -> tuple[str, int]:
    """Identifies the backward pass that a gradient hook runs in.

    A pass begun through ``torch.autograd.backward`` (as ``Tensor.backward`` does) has one identity, nested passes of
    reentrant checkpointing included, also in autograd's own threads as long as it is the only one under way. One begun
    in another way is known by autograd's number for it.
    """
    under_way = _passes.get(threading.get_ident())
    if under_way is None and len(_passes) == 1:
        under_way = next(iter(_passes.values()), None)
    if under_way is not None:
        return "pass", under_way
    return "task", torch._C._current_graph_task_id()  # noqa: SLF001 - autograd has no public name for it


def waiting_for_backward() -> int | None:
    """The thread that waits for the only backward pass under way."""
    return next(iter(_passes), None) if len(_passes) == 1 else None


def _install() -> None:
    dynamo.keep_out()
    _ledger.patch(torch, "compile", _wrap_compile)
    _ledger.keep(register_optimizer_step_pre_hook(_step_begins))
    _ledger.keep(register_optimizer_step_post_hook(_step_ends))
    _ledger.patch(torch.autograd, "backward", _wrap_backward)
    _ledger.patch(torch.optim.Optimizer, "zero_grad", _wrap_zero_grad)
    _ledger.patch(torch.nn.Module, "zero_grad", _wrap_zero_grad)
    for scaler in _scaler_classes():
        _ledger.patch(scaler, "step", _wrap_scaler_step)


def _scaler_classes() -> list[type]:
    """``torch.amp.GradScaler``; before torch 2.3 there was only the one for CUDA."""
    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    return [scaler]


def _wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
        if _is_compiling() or torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            return original(*args, **kwargs)
        for listener in tuple(_listeners):
            listener.backward_begins()
        thread = threading.get_ident()
        _passes[thread] = next(_serials)
        try:
            return original(*args, **kwargs)
        finally:
            del _passes[thread]

    return backward


def _wrap_compile(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001, ANN401 - stands in for torch.compile
        result = original(*args, **kwargs)
        dynamo.keep_out()
        return result

    return compile


def _wrap_zero_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    def zero_grad(self: Optimizer | Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
        result = original(self, *args, **kwargs)
        if not _is_compiling():
            for listener in tuple(_listeners):
                listener.gradients_zeroed(self)
        return result

    return zero_grad


def _wrap_scaler_step(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
        scale = getattr(self, "_scale", None)
        ended = [listener.scaler_steps(optimizer, scale) for listener in tuple(_listeners)]
        result = original(self, optimizer, *args, **kwargs)
        for call in ended:
            call()
        return result

    return step


def _step_begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    changed = None
    for listener in tuple(_listeners):
        answer = listener.step_begins(optimizer, args, kwargs)
        if answer is not None:
            args, kwargs = changed = answer
    return changed


def _step_ends(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    del args, kwargs
    for listener in tuple(_listeners):
        listener.step_ends(optimizer)
