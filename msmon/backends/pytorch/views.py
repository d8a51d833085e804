"""Views that autograd knows as such, and what of a gradient of their base is theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node


class ViewOfBase(NamedTuple):
    """How a view lies in its base.

    Attributes:
        shape: Of the view.
        strides: Of the view.
        offset: Of its first element, from that of the base.
        base_shape: Of the base.
        base_strides: Of the base.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    base_shape: torch.Size
    base_strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> ViewOfBase | None:
        """``None`` for a tensor that is no view to write to, of a tensor that an operation with a gradient made."""
        if not tensor.requires_grad or not tensor._is_view():  # noqa: SLF001 - torch has no public name for it
            return None
        base = tensor._base  # noqa: SLF001 - as above
        if base is None or base.grad_fn is None or base.dtype != tensor.dtype or base.is_conj() != tensor.is_conj():
            return None
        if tensor.layout != torch.strided or base.layout != torch.strided or tensor.is_nested:
            return None
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            return None  # nobody can write to it
        offset = int(tensor.storage_offset() - base.storage_offset())
        return cls(tensor.shape, tensor.stride(), offset, base.shape, base.stride())

    @staticmethod
    def edge(tensor: Tensor) -> tuple[Node, int]:
        """Where the gradient of the base of this view goes now."""
        base = tensor._base  # noqa: SLF001 - as above
        assert base is not None and base.grad_fn is not None  # noqa: PT018, S101 - what of() has made sure of
        return base.grad_fn, base.output_nr

    def cut(self, gradient: Tensor) -> Tensor | None:
        """The part of a gradient of the base that belongs to the view, without a copy where the layout allows it."""
        if gradient.layout != torch.strided or gradient.shape != self.base_shape:
            return None
        with torch.no_grad():
            laid = gradient
            if gradient.stride() != self.base_strides:
                laid = torch.empty_strided(
                    self.base_shape, self.base_strides, dtype=gradient.dtype, device=gradient.device
                ).copy_(gradient)
            return laid.as_strided(self.shape, self.strides, laid.storage_offset() + self.offset)
