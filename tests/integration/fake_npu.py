"""A device named ``npu`` in Python only: each operator runs on a CPU tensor inside a wrapper, and waits are noted.

As on a real one, a copy into pinned memory arrives late: not before somebody waits for an event that was recorded behind
it; until then the host reads NaN. And a thread that was given no device cannot wait.
"""

from __future__ import annotations

import threading
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable

SYNCHRONISED: list[tuple[str, str]] = []
"""Thread and operator of everything that made the host wait for the device."""

COPIES: list[tuple[str, int]] = []
"""Thread and number of elements of every copy to the host that nothing waited for."""

CAPTURING = threading.Event()
"""Whether a graph is being captured."""

_READING = {
    *("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2"),
    *("aten::unique_dim", "aten::repeat_interleave"),
}
"""Operators that the host waits for, since they return a number or a shape that depends on the elements."""

_threads = threading.local()
_lock = threading.Lock()
_launched: list[Callable[[], object]] = []
_finished = 0


class NpuTensor(torch.Tensor):
    """Claims to be on ``npu:0``; the elements are in ``raw``."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls: Any, raw: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=torch.device("npu", 0),
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


def _note(what: str) -> None:
    SYNCHRONISED.append((threading.current_thread().name, what))


def _inner(value: Any) -> Any:
    return value.raw if isinstance(value, NpuTensor) else value


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = function._schema.name
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, NpuTensor)]
    device = kwargs.get("device")
    on_npu = bool(given) if device is None else torch.device(device).type == "npu"
    if name == "aten::record_stream":
        return None
    if name in _READING or (name in {"aten::index", "aten::index_put_"} and _by_mask(args[1])):
        _note(name)
    elif name == "aten::copy_":
        return _copy(args[0], args[1], kwargs.get("non_blocking", False) or args[2:3] == (True,))
    elif given and not on_npu and torch.device(device).type != "meta":
        _note(name)
    elif name == "aten::_to_copy" and not given and not (kwargs.get("non_blocking") and _is_pinned(args[0])):
        _note("to the device")
    if device is not None and on_npu:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = function(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    known = {id(value.raw): value for value in given} if function._schema.is_mutable else {}

    def outer(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not on_npu:
            return value
        return known[id(value)] if id(value) in known else NpuTensor(value)

    return tree_map(outer, result)


def _by_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype is torch.bool for index in indices)


def _is_pinned(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "pinned", False)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    if isinstance(target, NpuTensor) == isinstance(source, NpuTensor):
        _inner(target).copy_(_inner(source))
    elif isinstance(target, NpuTensor) or not (non_blocking and _is_pinned(target)):
        if not (non_blocking and _is_pinned(source)):
            _note("aten::copy_")
        _inner(target).copy_(_inner(source))
    else:
        COPIES.append((threading.current_thread().name, source.numel()))
        seen = source.raw.clone()
        target.fill_(torch.nan)
        with _lock:
            _launched.append(lambda: target.copy_(seen))
    return target


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if (device is not None and torch.device(device).type == "npu") or any(
            isinstance(value, NpuTensor) for value in tree_leaves((args, kwargs))
        ):
            return _run(function, args, kwargs)
        name = function._schema.name
        if name in {"aten::pin_memory", "aten::_pin_memory"}:
            return _pin(args[0].clone())
        if kwargs.get("pin_memory"):
            return _pin(function(*args, **{**kwargs, "pin_memory": False}))
        return function(*args, **kwargs)


def _pin(tensor: Any) -> Any:
    tensor.pinned = True
    return tensor


class Event:
    """Complete when somebody has waited for it or for a later one: the device is always behind."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._behind = 0

    def record(self, stream: Any = None) -> None:
        self._behind = len(_launched)

    def query(self) -> bool:
        return _finished >= self._behind

    def synchronize(self) -> None:
        global _finished
        if not hasattr(_threads, "device"):
            raise RuntimeError("the context of this thread is NULL")
        _note("event")
        with _lock:
            for copy in _launched[_finished : self._behind]:
                copy()
            _finished = max(_finished, self._behind)


def install() -> TorchDispatchMode:
    """Make ``device="npu"`` work in this process; keep what is returned."""
    from msmon.backends.pytorch.kernels import layouts

    # torch_npu's tensors are of torch's own class, and have memory; these are not, and theirs is that of ``raw``.
    lacks_memory = layouts.lacks_memory
    layouts.TORCHS_OWN |= {NpuTensor}
    layouts.lacks_memory = lambda tensor: lacks_memory(_inner(tensor))

    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    module: Any = types.ModuleType("torch.npu")

    def set_device(device: Any) -> None:
        _threads.device = device

    module.__dict__.update(
        Event=Event,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=set_device,
        current_stream=lambda *device: torch.Stream(device="npu"),
        synchronize=lambda *device: _note("device"),
        is_current_stream_capturing=CAPTURING.is_set,
        _is_in_bad_fork=lambda: False,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    _setup_privateuseone_for_python_backend(rename="npu", backend_module=module)
    set_device(0)
    mode = _Mode()
    mode.__enter__()
    return mode
