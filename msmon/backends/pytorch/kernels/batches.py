"""Where the elements of tensors lie: what kernels need that read memory themselves."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from msmon.backends.pytorch.kernels.layouts import is_freed

if TYPE_CHECKING:
    from collections.abc import Iterable

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

    def part(self, places: Iterable[int]) -> Batch:
        """Only the tensors at these places."""
        part = Batch()
        for place in places:
            part.add(self.lines[place], self._tensors[place])
        return part

    def blocks(self, itemsize: int, size: int) -> tuple[array[int], array[int], array[int]]:
        """Cut tensors into blocks of at most ``size`` elements.

        Returns:
            Addresses and counts of the blocks, and how many blocks each tensor has; an empty tensor has one too.
        """
        if max(self.counts) <= size:
            return self.addresses, self.counts, array("q", (1,)) * len(self.counts)
        addresses, counts, pieces = array("q"), array("q"), array("q")
        for address, count in zip(self.addresses, self.counts, strict=True):
            starts = range(0, max(count, 1), size)
            addresses.extend(range(address, address + max(count, 1) * itemsize, size * itemsize))
            counts.extend([size] * (len(starts) - 1))
            counts.append(count - starts[-1])
            pieces.append(len(starts))
        return addresses, counts, pieces
