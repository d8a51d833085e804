"""Any tensor as a few flat dense pieces that together hold each of its elements once.

Statistics do not depend on the order of elements, so a transposed tensor is read as it lies in memory.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from msmon.backends.base import UnsupportedTensorError
from msmon.runtime.interruption import from_signal_handler

if TYPE_CHECKING:
    from collections.abc import Iterator

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
_READ_BY = ("dequantize", "to_dense")
"""Methods by which a class may hand out its elements as a tensor of torch's own."""


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


def _dense_values(tensor: Tensor) -> tuple[Tensor, int]:
    tensor = of_torchs_own_class(tensor)
    if tensor.is_meta:
        raise UnsupportedTensorError("a meta or fake tensor has no elements")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):  # noqa: SLF001 - torch has no public name for it
        raise UnsupportedTensorError(
            "a transform or a trace is under way, and its tensors have no elements of their own"
        )
    if tensor._is_zerotensor():  # noqa: SLF001 - as above
        return tensor.new_empty(0), tensor.numel()
    if lacks_memory(tensor):
        raise UnsupportedTensorError("its memory has been given back")
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.dequantize(), 0
    if tensor.is_mkldnn:
        return tensor.to_dense(), 0
    if tensor.is_nested:
        parts = [_dense_values(part)[0].reshape(-1) for part in tensor.unbind()]
        return torch.cat(parts) if parts else tensor.new_empty(0, layout=torch.strided), 0
    return (tensor, 0) if tensor.layout is torch.strided else _stored_values(tensor)


def _stored_values(tensor: Tensor) -> tuple[Tensor, int]:
    size = tensor.numel()
    if tensor.layout is torch.sparse_coo:
        values = tensor.coalesce().values()
    elif tensor.layout in _SPARSE_COMPRESSED:
        values = tensor.values()
    else:
        raise UnsupportedTensorError(f"unknown layout {tensor.layout}")
    return values, size - values.numel()


def of_torchs_own_class(tensor: Tensor) -> Tensor:
    """The same elements without what a subclass may do when it is asked for them.

    A subclass without ``__torch_dispatch__`` keeps its elements as torch does. One with it may keep anything anywhere:
    what its own ``dequantize`` or ``to_dense`` computes is read instead.

    Raises:
        UnsupportedTensorError: It has none of these, or packs numbers into codes.
    """
    cls = type(tensor)
    if cls in TORCHS_OWN:
        return tensor
    if cls.__torch_dispatch__ is _NO_DISPATCH:
        if torch.nn.Parameter in cls.__mro__ and not (tensor.is_floating_point() or tensor.is_complex()):
            raise UnsupportedTensorError(f"a {cls.__name__} packs its numbers into {tensor.dtype}")
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch has no public name for it
            return torch.Tensor.as_subclass(tensor, torch.Tensor)
    if tensor.is_nested:
        return tensor  # a jagged one, which is taken apart
    if hasattr(tensor, "fake_mode"):
        raise UnsupportedTensorError("a meta or fake tensor has no elements")
    for name in _READ_BY:
        if getattr(cls, name) is not getattr(torch.Tensor, name):
            values: Tensor = getattr(tensor, name)()
            if type(values) in TORCHS_OWN and values.shape == tensor.shape:
                return values
    raise UnsupportedTensorError(f"only {cls.__name__} itself knows where its elements are")


def lacks_memory(tensor: Tensor) -> bool:
    """Whether a tensor of torch's own class names memory that its storage does not have, as FSDP leaves parameters behind.

    Reading it, torch itself dies of a signal.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_mkldnn or tensor.numel() == 0:
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.dtype.itemsize
    return tensor.untyped_storage().nbytes() < needed or tensor.data_ptr() == 0


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
