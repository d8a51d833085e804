"""Where the elements of tensors lie: what kernels need that read memory themselves."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from msmon.backends.pytorch.kernels.layouts import is_freed

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes whose elements lie where they say."""


def lies_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor fill one stretch of memory, in whatever order."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_neg():
        return False
    if tensor.is_meta or is_freed(tensor):
        return False
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


class Batch:
    """Tensors of one dtype.

    Attributes:
        lines: Their lines in the table.
        addresses: Where their elements begin.
        counts: How many elements they have.
    """

    def __init__(self) -> None:
        self.lines: list[int] = []
        self.addresses = array("q")
        self.counts = array("q")
        self._tensors: list[Tensor] = []

    def add(self, line: int, tensor: Tensor) -> None:
        """Take in a tensor, which lives as long as the batch."""
        self.lines.append(line)
        self.addresses.append(tensor.data_ptr())
        self.counts.append(tensor.numel())
        self._tensors.append(tensor)

    def blocks(self, itemsize: int, size: int) -> tuple[array[int], array[int], list[int]]:
        """Cut tensors into blocks of at most ``size`` elements.

        Returns:
            Addresses and counts of the blocks, and the number of each tensor's first one; an empty tensor has one too.
        """
        addresses, counts = array("q"), array("q")
        first_blocks = []
        for address, count in zip(self.addresses, self.counts, strict=True):
            first_blocks.append(len(counts))
            for begin in range(0, max(count, 1), size):
                addresses.append(address + begin * itemsize)
                counts.append(min(size, count - begin))
        return addresses, counts, first_blocks
