"""Where the elements of tensors lie: what kernels need that read memory themselves."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import torch

from msmon.backends.pytorch.kernels.layouts import TORCHS_OWN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_IN_MEMORY = frozenset(
    {"ADInplaceOrView"}
    | {layer + backend for layer in ("", "Autograd", "Autocast") for backend in ("CPU", "CUDA", "PrivateUse1")}
)
"""Dispatch keys of tensors whose elements lie as numbers where ``data_ptr`` says. Any other key means something else:
conjugated, negated, zero without memory, sparse, quantised, nested, functional, fake, wrapped by a transform."""

_judged: dict[int, bool] = {}
_dispatch_keys = getattr(torch._C, "_dispatch_keys", None)  # noqa: SLF001 - torch has no public name for it


def _lies_in_memory(tensor: Tensor) -> bool:
    if type(tensor) not in TORCHS_OWN or _dispatch_keys is None:
        return False
    keys = _dispatch_keys(tensor)
    found = _judged.get(keys.raw_repr())
    return _judge(keys) if found is None else found


def _judge(keys: Any) -> bool:  # noqa: ANN401 - torch gives the class no public name
    names = str(keys).removeprefix("DispatchKeySet(").removesuffix(")")
    found = _judged[keys.raw_repr()] = _IN_MEMORY.issuperset(names.split(", "))
    return found


def lies_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor fill one stretch of memory of its own, in whatever order."""
    if not _lies_in_memory(tensor):
        return False
    offset = tensor.storage_offset()
    needed = tensor.nbytes + offset * tensor.itemsize if offset else tensor.nbytes
    if tensor.untyped_storage().nbytes() < needed:
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
