"""What torch has no public name for: looked up in one place, and what is given up where a torch does not have it.

Functions of torch's extension are looked up once, when this is imported. Each has a stand-in with which the rest of msmon
works on; what cannot be recorded without it is said once.
"""

from __future__ import annotations

import contextlib
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
import torch.fx._symbolic_trace
import torch.utils._python_dispatch

from msmon import log

if TYPE_CHECKING:
    from collections.abc import Callable


def private(name: str, instead: Any, without: str) -> Any:  # noqa: ANN401 - whatever torch has there
    """Something of torch by its full name, or what stands in for it, and then say what is given up.

    Args:
        name: Beginning with ``torch.``.
        instead: Stands in.
        without: What is given up.
    """
    value: Any = torch
    for part in name.split(".")[1:]:
        value = getattr(value, part, _NOTHING)
        if value is _NOTHING:
            log.say(f"this torch has no {name}: {without}", once=name)
            return instead
    return value


_NOTHING = object()
_NO_ACTIVATIONS = "activations are not recorded"

graph_task: Callable[[], int] = private(
    "torch._C._current_graph_task_id",
    lambda: -1,
    "backward passes begun in autograd.grad or C++ are told apart no longer",
)
"""Autograd's number of the backward pass that this thread is in, -1 outside."""

_interpreter: Callable[[], object] = private("torch._C._functorch.peek_interpreter_stack", object, _NO_ACTIVATIONS)
_tracing: Callable[[], object] = private("torch._C._get_tracing_state", object, _NO_ACTIVATIONS)
dispatch_modes: Callable[[], int] = private("torch._C._len_torch_dispatch_stack", lambda: 1, _NO_ACTIVATIONS)
"""How many dispatch modes are active."""

_mode: Callable[..., object] = getattr(torch._C, "_get_dispatch_mode", lambda _key: True)  # noqa: SLF001 - not in torch 2.1
_mode_keys: Any = getattr(torch._C, "_TorchDispatchModeKey", None)  # noqa: SLF001 - as above

next_sequence_number: Callable[[], int] | None = private(
    "torch._C._autograd._get_sequence_nr", None, "gradients of activations are not recorded"
)
"""The number of the next node that autograd makes on this thread."""

unseen: Callable[[], contextlib.AbstractContextManager[object]] = private(
    "torch.utils._python_dispatch._disable_current_modes",
    contextlib.nullcontext,
    "dispatch modes see what msmon computes",
)
"""Hides what is computed inside from dispatch modes."""

_step_hook: Any = private("torch.optim.Optimizer.profile_hook_step", None, "steps left by an exception are not noticed")
step_code = frozenset(
    constant
    for constant in getattr(getattr(_step_hook, "__code__", None), "co_consts", ())
    if isinstance(constant, CodeType)
)
"""The code of torch's wrapper around every ``step``."""


def transformed() -> bool:
    """Whether tensors are not what they seem: functorch's transforms, tracing of all kinds.

    Where that cannot be told they might be, so that nothing is looked at.
    """
    return (
        getattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", False)  # noqa: SLF001 - is_fx_tracing() logs a warning
        or _modes_of_tracing()
        or _interpreter() is not None
        or _tracing() is not None
    )


def _modes_of_tracing() -> bool:
    """Whether operations make fake tensors or are written down, as torch's own dispatch modes do."""
    if not dispatch_modes():
        return False
    keys = [getattr(_mode_keys, name, None) for name in ("FAKE", "PROXY", "FUNCTIONAL")]
    return any(key is None or _mode(key) is not None for key in keys)
