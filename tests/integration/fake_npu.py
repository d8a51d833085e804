"""A device named ``npu`` in Python only: each operator runs on a CPU tensor inside a wrapper; copies to the host are noted."""

from __future__ import annotations

import threading
import types
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

SYNCHRONISED: list[tuple[int, str]] = []
"""Thread and operator of everything that made the host wait for the device."""


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


def _inner(value: Any) -> Any:
    return value.raw if isinstance(value, NpuTensor) else value


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = function._schema.name
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, NpuTensor)]
    device = kwargs.get("device")
    on_npu = bool(given) if device is None else torch.device(device).type == "npu"
    if name in {"aten::_local_scalar_dense", "aten::equal"} or (given and not on_npu):
        SYNCHRONISED.append((threading.get_ident(), name))
    if device is not None and on_npu:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = function(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if name == "aten::copy_":
        return args[0]
    known = {id(value.raw): value for value in given} if function._schema.is_mutable else {}

    def outer(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not on_npu:
            return value
        return known[id(value)] if id(value) in known else NpuTensor(value)

    return tree_map(outer, result)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if (device is not None and torch.device(device).type == "npu") or any(
            isinstance(value, NpuTensor) for value in tree_leaves((args, kwargs))
        ):
            return _run(function, args, kwargs)
        return function(*args, **kwargs)


class Stream:
    """The only stream."""

    def synchronize(self) -> None:
        SYNCHRONISED.append((threading.get_ident(), "stream"))


class Event:
    """An event that has always happened."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        SYNCHRONISED.append((threading.get_ident(), "event"))


def install() -> TorchDispatchMode:
    """Make ``device="npu"`` work in this process; keep what is returned."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    stream = Stream()
    module = types.ModuleType("torch.npu")
    module.__dict__.update(
        Stream=Stream,
        Event=Event,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        current_stream=lambda *device: stream,
        default_stream=lambda *device: stream,
        synchronize=lambda *device: SYNCHRONISED.append((threading.get_ident(), "device")),
        _is_in_bad_fork=lambda: False,
        manual_seed=lambda seed: None,
        manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    _setup_privateuseone_for_python_backend(rename="npu", backend_module=module)
    mode = _Mode()
    mode.__enter__()
    return mode
