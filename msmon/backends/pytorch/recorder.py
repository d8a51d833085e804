"""Collects one training step: rows described on the host, numbers left on their device."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from msmon.backends.pytorch.devices import Arriving, accumulation_dtype
from msmon.record.table import Row, StepTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


def describe(kind: str, name: str, stage: int, tensor: Tensor, micro_step: int | None = None) -> Row:
    """The row of a tensor, without its numbers."""
    shape = () if tensor.is_nested else tuple(tensor.shape)  # a nested tensor has no one size
    return Row(kind, name, stage, micro_step, shape, _dtype_name(tensor.dtype))


_dtype_name = functools.cache(str)


class StepRecorder:
    """Rows and numbers of the step under way."""

    def __init__(self) -> None:
        self._added: list[tuple[list[Row], Sequence[Tensor]]] = []
        self._extras: dict[str, Tensor] = {}
        self.skipped = False

    def __len__(self) -> int:
        return sum(len(rows) for rows, _ in self._added)

    def add(self, rows: Iterable[Row], numbers: Sequence[Tensor]) -> None:
        """Add rows.

        Args:
            rows: What the numbers are about, in their order.
            numbers: Tensors that together hold the numbers of each row: its ``features``, or the run's statistics.
        """
        self._added.append((list(rows), numbers))  # one operation: Ctrl-C leaves no rows without their numbers

    def note(self, name: str, value: Tensor) -> None:
        """Add a 0-d tensor about the step itself, such as the loss scale. It is copied on its device."""
        dtype = accumulation_dtype(value.device)
        self._extras[name] = value.detach().reshape(1).to(dtype, copy=True)

    def drop(self, names: set[tuple[int, str]], *, but: str) -> None:
        """Take rows out again, by their stage and name, unless they are of the kind ``but``."""
        for place, (rows, numbers) in enumerate(self._added):
            kept = [number for number, row in enumerate(rows) if row.kind == but or (row.stage, row.name) not in names]
            if len(kept) < len(rows):
                lines = torch.cat([part.reshape(-1) for part in numbers]).reshape(len(rows), -1)
                self._added[place] = [rows[number] for number in kept], [lines[kept]]

    def finish(
        self,
        model: str,
        step: int,
        micro_steps: int | None,
        *,
        complete: bool = True,
        supplement: bool = False,
        first: int = 0,
    ) -> StepTable:
        """Start the one packed copy to the host, and hand everything over."""
        rows = [row for added, _ in self._added for row in added]
        parts = [part.reshape(-1) for _, numbers in self._added for part in numbers]
        size = sum(part.numel() for part in parts)
        packed = _Packed([*parts, *self._extras.values()])
        return StepTable(
            model=model,
            step=step,
            rows=rows,
            numbers=_Part(packed, slice(None, size)),
            extras=_Part(packed, slice(size, None)),
            extra_names=list(self._extras),
            micro_steps=micro_steps,
            skipped=self.skipped,
            complete=complete,
            supplement=supplement,
            first=first,
        )


class _Packed:
    """All numbers of a step in one copy."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._arriving = Arriving(parts, 0)
        self._numbers: NDArray[np.float64] | None = None

    def ready(self) -> bool:
        """Whether the numbers are here, without waiting for them."""
        return self._arriving.ready()

    def numbers(self) -> NDArray[np.float64]:
        """Blocks until they are here; asked for on the writer thread only.

        No ``cached_property``: before Python 3.12 one lock of all packed numbers would be held while waiting.
        """
        if self._numbers is None:
            self._numbers = self._arriving.wait()
        return self._numbers


class _Part(NamedTuple):
    """See :class:`msmon.record.table.PendingNumbers`."""

    packed: _Packed
    place: slice

    def ready(self) -> bool:
        return self.packed.ready()

    def wait(self) -> NDArray[np.float64]:
        return self.packed.numbers()[self.place]


def parts_by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """Positions of tensors by device, since a kernel reduces the tensors of one device at a time."""
    positions: dict[torch.device, list[int]] = {}
    for position, tensor in enumerate(tensors):
        positions.setdefault(tensor.device, []).append(position)
    return positions
