"""Any tensor as a few flat dense pieces that together hold each of its elements once.

Statistics do not depend on the order of elements, so a transposed tensor is read as it lies in memory.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch

from msmon.backends.base import UnsupportedTensorError
from msmon.backends.pytorch.adapters.parts import part_here
from msmon.backends.pytorch.devices import accumulation_dtype
from msmon.runtime.interruption import from_signal_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

AS_FLOAT32 = frozenset(
    dtype
    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if (dtype := getattr(torch, name, None)) is not None
)
"""Dtypes that float32 holds exactly, and processors compute with slowly or not at all."""

_SPARSE_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


TORCHS_OWN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes that keep their elements where torch says."""

_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_NO_FUNCTION = (torch.Tensor.__torch_function__.__func__, torch.nn.Parameter.__torch_function__)  # type: ignore[attr-defined]

_READ_BY = ("dequantize", "to_dense")
"""Methods by which a class may hand out its elements as a tensor of torch's own."""

_SHARE_BYTES = frozenset(
    dtype for name in ("quint4x2", "quint2x4") if (dtype := getattr(torch, name, None)) is not None
)
"""Quantised dtypes of which a byte holds several elements."""


def dense_values(tensor: Tensor) -> tuple[Tensor, int]:
    """The explicitly stored elements of a tensor, and how many further elements are zero because they are not stored.

    Returns:
        A strided tensor of torch's own class that owns the memory it names, and the number of hidden zeros.

    Raises:
        UnsupportedTensorError: The elements cannot be read: there are none (meta, fake, freed), they are packed in a way
            only their class knows, or they belong to a transform under way.
    """
    try:
        return _dense_values(tensor)
    except UnsupportedTensorError:
        raise
    except Exception as error:  # a subclass runs code of its own in whatever is asked of it
        if from_signal_handler(error):
            raise
        reason = f"a {type(tensor).__name__} cannot be read as numbers ({type(error).__name__})"
        raise UnsupportedTensorError(reason) from error


def whole_values(tensor: Tensor) -> Tensor:
    """The elements of a tensor in its own shape, strided. Runs under ``torch.no_grad``.

    Raises:
        UnsupportedTensorError: See :func:`dense_values`, or it has no one shape (nested).
    """
    tensor = _with_elements(tensor)
    if tensor.is_nested:
        raise UnsupportedTensorError("a nested tensor has no one shape")
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.layout is not torch.strided:
        if tensor.layout is torch.sparse_coo or tensor.layout in _SPARSE_COMPRESSED:
            _stored_values(tensor)
        return tensor.to_dense()
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if _is_zero(tensor) else tensor


def _dense_values(tensor: Tensor) -> tuple[Tensor, int]:
    tensor = _with_elements(tensor)
    if tensor.is_nested:
        parts = [_dense_values(part)[0].reshape(-1) for part in tensor.unbind()]
        return torch.cat(parts) if parts else _nothing_like(tensor), 0
    if _is_zero(tensor):
        return _nothing_like(tensor), tensor.numel()
    if tensor.is_quantized:
        return tensor.dequantize(), 0
    if tensor.is_mkldnn:
        return tensor.to_dense(), 0
    return (tensor, 0) if tensor.layout is torch.strided else _stored_values(tensor)


def _with_elements(tensor: Tensor) -> Tensor:
    """A tensor of torch's own class, detached, all of which can be read by operations."""
    tensor = of_torchs_own_class(tensor)
    if tensor.is_meta:
        raise UnsupportedTensorError("a meta or fake tensor has no elements")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):  # noqa: SLF001 - torch has no public name for it
        raise UnsupportedTensorError(
            "a transform or a trace is under way, and its tensors have no elements of their own"
        )
    if not _is_zero(tensor) and lacks_memory(tensor):
        raise UnsupportedTensorError("its memory has been given back")
    return tensor.detach()


def _is_zero(tensor: Tensor) -> bool:
    """Whether a tensor is zeros without memory, as torch makes them of gradients that vanish."""
    return tensor._is_zerotensor()  # noqa: SLF001 - torch has no public name for it


def _nothing_like(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _stored_values(tensor: Tensor) -> tuple[Tensor, int]:
    size = tensor.numel()
    if tensor.layout is torch.sparse_coo:
        values = tensor.coalesce().values()
    elif tensor.layout in _SPARSE_COMPRESSED:
        values = tensor.values()
    else:
        raise UnsupportedTensorError(f"unknown layout {tensor.layout}")
    if lacks_memory(values):
        raise UnsupportedTensorError("its memory has been given back")
    return values, size - values.numel()


def of_torchs_own_class(tensor: Tensor) -> Tensor:
    """The elements of any tensor as one of torch's own classes. Runs under ``torch.no_grad``.

    A subclass that leaves operations alone keeps its elements as torch does. Any other is asked: by its own ``dequantize``
    or ``to_dense``, then by a cast. What it answers is believed when it is a tensor without secrets, of the same shape
    and device, and of numbers where the tensor is. Of a ``DTensor`` the elements are those of this rank's part.

    Raises:
        UnsupportedTensorError: It gives no such answer, or packs numbers into codes.
    """
    cls = type(tensor)
    if cls in TORCHS_OWN or _is_nested(tensor):  # a jagged one is a subclass, which is taken apart
        return tensor
    if hasattr(tensor, "fake_mode"):
        raise UnsupportedTensorError("a meta or fake tensor has no elements")
    part = part_here(tensor)
    if part is None:
        raise UnsupportedTensorError("this rank has no part of it")
    if part is not tensor:
        return of_torchs_own_class(part)
    if issubclass(cls, torch.nn.Parameter) and not _dispatches(cls) and not _holds_numbers(tensor):
        raise UnsupportedTensorError(f"a {cls.__name__} packs its numbers into {tensor.dtype}")
    return _asked(tensor)


def _asked(tensor: Tensor) -> Tensor:
    for ask in _ways_to_ask(type(tensor)):
        try:
            answer = ask(tensor)
        except Exception as error:  # noqa: PERF203 - a class may raise anything, and still answer the next question
            if from_signal_handler(error):
                raise
        else:
            if _is_believable(answer, tensor):
                return _stripped(answer)
    raise UnsupportedTensorError(f"only {type(tensor).__name__} itself knows where its elements are")


@functools.lru_cache(maxsize=256)
def _ways_to_ask(cls: type[Tensor]) -> tuple[Callable[[Tensor], Any], ...]:
    methods = tuple(
        operator.methodcaller(name) for name in _READ_BY if getattr(cls, name) is not getattr(torch.Tensor, name)
    )
    if _dispatches(cls):
        return (*methods, _widened)
    function = cls.__torch_function__
    if getattr(function, "__func__", function) not in _NO_FUNCTION:
        return (*methods, _cast)
    return methods or (_stripped,)


def _dispatches(cls: type) -> bool:
    """Whether a class makes something else of operations than torch: its memory may hold anything."""
    return cls.__torch_dispatch__ is not _NO_DISPATCH  # type: ignore[attr-defined]  # a class of tensors


def _cast(tensor: Tensor) -> Any:  # noqa: ANN401 - whatever the class returns
    """To the dtype that kernels read. Of most dtypes that is their own, but ``__torch_function__`` is asked."""
    return tensor.to(torch.float32 if tensor.dtype in AS_FLOAT32 else tensor.dtype)


def _widened(tensor: Tensor) -> Any:  # noqa: ANN401 - as above
    """To another dtype, since a cast with nothing to do is not handed to ``__torch_dispatch__``."""
    wide = torch.float32 if tensor.dtype in AS_FLOAT32 else accumulation_dtype(tensor.device)
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - else torch gives results the class of what they came from
        return tensor.to(torch.complex128 if tensor.is_complex() else wide)


def _is_believable(answer: object, tensor: Tensor) -> TypeGuard[Tensor]:
    if not isinstance(answer, torch.Tensor) or _dispatches(type(answer)):
        return False
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch has no public name for it
        numbers = _holds_numbers(answer) or not _holds_numbers(tensor)
        return numbers and answer.shape == tensor.shape and answer.device == tensor.device


def _holds_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_nested(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as above
        return tensor.is_nested


def _stripped(tensor: Tensor) -> Tensor:
    if type(tensor) in TORCHS_OWN:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as above
        return torch.Tensor.as_subclass(tensor, torch.Tensor)


def lacks_memory(tensor: Tensor) -> bool:
    """Whether a tensor of torch's own class names memory that its storage does not have, as FSDP leaves parameters behind.

    Reading it, torch itself dies of a signal.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_mkldnn or tensor.numel() == 0:
        return False
    if not torch._C._has_storage(tensor):  # noqa: SLF001 - torch has no public name for it
        return False  # a device that keeps elements in its own way, and hands them out itself
    size = tensor.untyped_storage().nbytes()
    if tensor.dtype in _SHARE_BYTES:
        return size == 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.dtype.itemsize
    return size < needed or tensor.data_ptr() == 0


def flat_pieces(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Split a dense tensor into 1-d pieces of at most ``limit`` elements, copying no more than a piece at a time."""
    if tensor.numel() == 0:
        return
    if tensor.dim() > 1 and not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        if flat.numel() <= limit:
            yield flat
        else:
            yield from torch.split(flat, limit)
    elif tensor.numel() <= limit:
        yield tensor.reshape(-1)
    else:
        rows = max(1, limit // (tensor.numel() // tensor.shape[0]))
        for part in torch.split(tensor, rows):
            yield from flat_pieces(part if part.shape[0] > 1 else part[0], limit)


def magnitude(part: Tensor, wide: torch.dtype) -> Tensor:
    """The absolute values of complex numbers; NaN when either part is, even beside an infinity."""
    real, imaginary = part.real.to(wide), part.imag.to(wide)
    return torch.where(real.isnan() | imaginary.isnan(), torch.nan, torch.hypot(real, imaginary))


@functools.lru_cache(maxsize=16)
def least_float32_from(eps: float) -> float:
    """The smallest float32 that is not below ``eps``: comparing a float32 with it is comparing with ``eps`` exactly."""
    with np.errstate(over="ignore"):
        single = np.float32(eps)
    return float(single if float(single) >= eps else np.nextafter(single, np.float32(np.inf)))
