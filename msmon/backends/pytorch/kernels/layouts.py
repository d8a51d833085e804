"""Any tensor as a few flat dense pieces that together hold each of its elements once.

Statistics do not depend on the order of elements, so a transposed tensor is read as it lies in memory.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch

from msmon.backends.base import UnsupportedTensorError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

AS_FLOAT32 = frozenset(
    dtype
    for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if (dtype := getattr(torch, name, None)) is not None
)
"""Dtypes that float32 holds exactly, and processors compute with slowly or not at all."""

_NO_OFFSET = 1 << 40
"""No tensor begins so many bytes after address 0, and memory that a process is given seldom lies below: a cheap first look."""

_SPARSE_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def dense_values(tensor: Tensor) -> tuple[Tensor, int]:
    """The explicitly stored elements of a tensor, and how many further elements are zero because they are not stored.

    Raises:
        UnsupportedTensorError: The tensor has no data (meta, fake, freed).
    """
    if tensor.is_meta or hasattr(tensor, "fake_mode"):
        raise UnsupportedTensorError("a meta or fake tensor has no elements")
    if is_freed(tensor):
        raise UnsupportedTensorError("its memory has been given back")
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    elif tensor.is_mkldnn:
        tensor = tensor.to_dense()
    elif tensor.is_nested:
        parts = [part.reshape(-1) for part in tensor.unbind()]
        tensor = torch.cat(parts) if parts else torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    if tensor.layout is torch.strided:
        return tensor, 0
    size = tensor.numel()
    if tensor.layout is torch.sparse_coo:
        values = tensor.coalesce().values()
    elif tensor.layout in _SPARSE_COMPRESSED:
        values = tensor.values()
    else:
        raise UnsupportedTensorError(f"unknown layout {tensor.layout}")
    return values, size - values.numel()


def is_freed(tensor: Tensor) -> bool:
    """Whether a tensor's storage was resized to nothing under it, as FSDP does: torch itself would read at address 0."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_mkldnn:
        return False
    if tensor.data_ptr() >= _NO_OFFSET or tensor.numel() == 0:
        return False
    return tensor.untyped_storage().nbytes() == 0


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
