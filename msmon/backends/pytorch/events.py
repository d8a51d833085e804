"""What happens in a training, told to whoever listens: a backward pass begins, an optimizer steps, a step is skipped.

One set of patches serves all listeners of the process; it is installed with the first and undone with the last.
Optimizer steps come from torch's public global step hooks, so ``optimizer.step`` itself is never replaced.
"""

from __future__ import annotations

import itertools
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.utils.checkpoint
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from msmon.backends.pytorch import devices, dynamo
from msmon.backends.pytorch.adapters import deepspeed, megatron, pipelining
from msmon.backends.pytorch.internals import graph_task, private, step_code
from msmon.backends.pytorch.module_hook import WithoutHooks, is_compiling, without_hooks, wrap_reduce
from msmon.bootstrap import discovery
from msmon.bootstrap.dynamo import mark, run_as_it_is, with_all_it_calls
from msmon.runtime.ledger import Ledger
from msmon.runtime.references import IdentitySet

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module
    from torch.optim import Optimizer

    from msmon.backends.pytorch.adapters.steps import StepUnderWay

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Listener(Protocol):
    """Hears what happens. Its methods must not raise."""

    def backward_begins(self) -> None:
        """An outermost backward pass that accumulates gradients begins."""

    def backward_ends(self) -> None:
        """It has returned, or an exception has left it."""

    def gradients_zeroed(self, owner: Optimizer | Module) -> None:
        """``owner.zero_grad()`` was called."""

    def step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """``optimizer.step(*args[1:], **kwargs)`` begins; may return other arguments (a wrapped closure)."""

    def step_ends(self, optimizer: Optimizer) -> None:
        """``optimizer.step`` returned."""

    def scaler_steps(self, optimizer: Optimizer, scale: torch.Tensor | None) -> Callable[[], None]:
        """``GradScaler.step(optimizer)`` begins with this loss scale; what is returned is called when it has returned."""

    def engine_steps(self, find: Callable[[], StepUnderWay | None]) -> Callable[[bool], None]:
        """An engine begins a training step, and ``find`` tells of what; what is returned is called after it.

        It is told whether the step came to its end.
        """


class ModuleListener(Protocol):
    """Hears what happens to modules. Its methods must not raise."""

    def mode_changed(self, module: Module) -> None:
        """``module.train()`` or ``module.eval()`` was called."""

    def modules_wrapped(self) -> None:
        """``torch.compile`` has put a wrapper around a module."""


OUTSIDE = "task", -1
"""The identity of no backward pass."""

on_modules: IdentitySet[ModuleListener] = IdentitySet()
"""Who hears it, whoever else listens."""

_listeners: list[Listener] = []
_ledger = Ledger()
_followed: set[str] = set()
_serials = itertools.count()
_passes: dict[int, int] = {}
"""Backward passes under way: the thread that called each, and its number."""


_installed = 0
"""How often the patches were installed. A wrapper of an earlier time, which others have wrapped before it could be taken
out, passes calls on to the one below and does nothing else."""


class _Checkpoint(threading.local):
    training = False


_checkpoint = _Checkpoint()


def subscribe(listener: Listener) -> None:
    """Tell this listener what happens from now on."""
    if not _listeners:
        _install()
    _listeners.append(listener)


def follow_frameworks() -> None:
    """Learn from pipeline stages which micro-batch they work on, and from frameworks when they step, once there are any."""
    if not _listeners:
        return
    follow: dict[str, Callable[[], bool]] = {
        "stages": lambda: pipelining.follow_stages(_ledger),
        "engines": lambda: deepspeed.follow_engines(_ledger, _engine_steps),
        "optimizers": lambda: megatron.follow_optimizers(_ledger, _engine_steps, _wrap_zero_grad),
        "schedules": lambda: megatron.follow_schedules(_ledger),
    }
    _followed.update(what for what, install in follow.items() if what not in _followed and install())


def unsubscribe(listener: Listener) -> None:
    """Tell this listener nothing more."""
    if listener in _listeners:
        _listeners.remove(listener)
        if not _listeners:
            _ledger.undo()
            _followed.clear()


def in_backward() -> bool:
    """Whether a backward pass that accumulates gradients is under way: not one of ``torch.autograd.grad`` alone."""
    return bool(_passes)


def in_checkpoint() -> bool:
    """Whether this thread is in the first forward of a reentrant checkpoint, which runs without gradients though it trains."""
    return _checkpoint.training


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
    return "task", graph_task()


def waiting_for_backward() -> int | None:
    """The thread that waits for the only backward pass under way."""
    return next(iter(_passes), None) if len(_passes) == 1 else None


class _StepInPython:
    """Has torch's wrapper around ``optimizer.step``, which calls the hooks, run as Python code when Dynamo meets it.

    Dynamo breaks the graph at the step inside it anyway. Were the wrapper compiled as well, with nothing in it to compute,
    its hooks would have been called for the last time.
    """

    def __init__(self) -> None:
        for code in step_code:
            mark(code, below=False)

    def remove(self) -> None:
        """Take it back."""
        for code in step_code:
            mark(code, below=False, undo=True)


def _install() -> None:
    global _installed  # noqa: PLW0603 - one set of patches a process
    _installed += 1
    dynamo.keep_out()
    _ledger.keep(dynamo.WhenLoaded(_dynamo_loaded))
    _ledger.keep(register_optimizer_step_pre_hook(_step_begins))
    _ledger.keep(register_optimizer_step_post_hook(_step_ends))
    _ledger.keep(_StepInPython())
    _ledger.patch(torch.autograd, "backward", _wrap_backward)
    _ledger.patch(torch.utils.checkpoint.CheckpointFunction, "apply", _wrap_checkpoint)
    if private("torch.jit._recursive.get_hook_stubs", None, "scripting a model that is watched may fail") is not None:
        _ledger.patch(torch.jit._recursive, "get_hook_stubs", _wrap_script_hooks)  # noqa: SLF001 - torch has no public place
    for module in devices.graph_makers():
        _ledger.patch(module, "make_graphed_callables", _wrap_graphing)
    _ledger.patch(torch.nn.Module, "train", _wrap_train)
    _ledger.patch(torch.nn.Module, "__reduce_ex__", wrap_reduce)
    _ledger.patch(torch.optim.Optimizer, "zero_grad", _wrap_zero_grad)
    _ledger.patch(torch.nn.Module, "zero_grad", _wrap_zero_grad)
    _ledger.patch(_scaler_class(), "step", _wrap_scaler_step)


def _dynamo_loaded() -> None:
    wrappers, utilities = sys.modules["torch._dynamo.eval_frame"], sys.modules["torch._dynamo.utils"]
    if hasattr(wrappers, "OptimizedModule"):
        _ledger.patch(wrappers.OptimizedModule, "__init__", _wrap_wrapping)
    if hasattr(utilities, "nn_module_get_all_hooks"):
        _ledger.patch(utilities, "nn_module_get_all_hooks", _wrap_listing_of_hooks)


def _scaler_class() -> type:
    """``torch.amp.GradScaler``; before torch 2.3 there was only the one for CUDA. torch_npu's inherits its ``step``."""
    scaler: type = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    return scaler


def _wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    installed = _installed

    @run_as_it_is
    def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
        if is_compiling() or graph_task() != -1 or installed != _installed:
            return original(*args, **kwargs)
        for listener in tuple(_listeners):
            listener.backward_begins()
        thread = threading.get_ident()
        _passes[thread] = next(_serials)
        try:
            return original(*args, **kwargs)
        finally:
            for listener in tuple(_listeners):
                listener.backward_ends()
            _passes.pop(thread, None)

    return backward


def _wrap_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    @run_as_it_is
    def apply(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
        if is_compiling():
            return original(*args, **kwargs)
        before = _checkpoint.training
        _checkpoint.training = before or torch.is_grad_enabled()
        try:
            return original(*args, **kwargs)
        finally:
            _checkpoint.training = before

    return apply


def _wrap_wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    @run_as_it_is
    def construct(self: Module, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passes on whatever torch takes
        original(self, *args, **kwargs)
        if not is_compiling():
            _wrapped(self)

    return construct


@with_all_it_calls
def _wrapped(module: Module) -> None:
    """``torch.compile`` has put a wrapper around a module."""
    dynamo.keep_out()
    discovery.note_module(module)
    for listener in list(on_modules):
        listener.modules_wrapped()


def _wrap_listing_of_hooks(original: Callable[..., Any]) -> Callable[..., Any]:
    def nn_module_get_all_hooks(mod: Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on whatever Dynamo takes and returns
        return original(WithoutHooks(mod), *args, **kwargs)  # it compiles torch's own modules only when they have any

    return nn_module_get_all_hooks


def _wrap_script_hooks(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_hook_stubs(module: Module) -> Any:  # noqa: ANN401 - passes on whatever torch returns
        with without_hooks(module):  # a scripted module compiles the hooks of its source
            return original(module)

    return get_hook_stubs


def _wrap_graphing(original: Callable[..., Any]) -> Callable[..., Any]:
    @run_as_it_is
    def make_graphed_callables(callables: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
        given = callables if isinstance(callables, tuple) else (callables,)
        modules = [part for module in given if isinstance(module, torch.nn.Module) for part in module.modules()]
        with without_hooks(*modules):  # it refuses modules that have any
            return original(callables, *args, **kwargs)

    return make_graphed_callables


def _wrap_train(original: Callable[..., Any]) -> Callable[..., Any]:
    @run_as_it_is
    def train(self: Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
        result = original(self, *args, **kwargs)
        if not is_compiling():
            for listener in list(on_modules):
                listener.mode_changed(self)
        return result

    return train


def _wrap_zero_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    @run_as_it_is
    def zero_grad(self: Optimizer | Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
        result = original(self, *args, **kwargs)
        if not is_compiling():
            for listener in tuple(_listeners):
                listener.gradients_zeroed(self)
        return result

    return zero_grad


def _wrap_scaler_step(original: Callable[..., Any]) -> Callable[..., Any]:
    installed = _installed

    @run_as_it_is
    def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on whatever torch takes and returns
        if is_compiling() or installed != _installed:
            return original(self, optimizer, *args, **kwargs)
        scale = getattr(self, "_scale", None)
        ended = [listener.scaler_steps(optimizer, scale) for listener in tuple(_listeners)]
        result = original(self, optimizer, *args, **kwargs)
        for call in ended:
            call()
        return result

    return step


def _engine_steps(find: Callable[[], StepUnderWay | None]) -> Callable[[bool], None]:
    ended = [listener.engine_steps(find) for listener in tuple(_listeners)]

    def after(complete: bool) -> None:  # noqa: FBT001 - the only thing it is told
        for call in ended:
            call(complete)

    return after


@with_all_it_calls
def _step_begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    if is_compiling():
        return None
    changed = None
    for listener in tuple(_listeners):
        answer = listener.step_begins(optimizer, args, kwargs)
        if answer is not None:
            args, kwargs = changed = answer
    return changed


@with_all_it_calls
def _step_ends(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    del args, kwargs
    if is_compiling():
        return
    for listener in tuple(_listeners):
        listener.step_ends(optimizer)
