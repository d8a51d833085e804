"""Activations: what goes into the modules of a model and comes out, and the gradients of both."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch

from msmon.backends.pytorch import internals
from msmon.backends.pytorch.module_calls import INPUT, OUTPUT, Observer
from msmon.backends.pytorch.recorder import describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from msmon.backends.pytorch.module_calls import Call
    from msmon.backends.pytorch.recorder import StepRecorder
    from msmon.backends.pytorch.taps.reduction import Reduction
    from msmon.plan.selection import ModuleSelection
    from msmon.record.table import Row

FORWARD = "actv"
BACKWARD = "actv_grad"

Pair = tuple["Row", "Tensor"]
_Read = tuple["Call", "Row", "Tensor"]
"""A row whose name lacks the module's and which of its calls it was: the training step may turn out to be the next one."""


class ActivationTap(Observer):
    """Reads the tensors at the boundaries of modules.

    A tensor that one module hands to the next is read once: statistics of the latest tensors are kept as long as the
    tensors live and are not written to.

    Args:
        reduction: Statistics.
        selection: Which modules, and which of their tensors.
        forward: Record activations.
        backward: Record gradients of activations.
    """

    part = "recording of activations"

    def __init__(self, reduction: Reduction, selection: ModuleSelection, *, forward: bool, backward: bool) -> None:
        self._reduction = reduction
        self._selection = selection
        self._forward = forward
        self._backward = backward
        self.seen = False
        self._pending: list[_Read] = []
        self._latest: list[Pair] = []
        self._unfinished: dict[int, list[_Read]] = {}
        self._before_pass = 0
        self._read: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def begins(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Read inputs before the module can write to them; they are recorded when the module returns."""
        del args, kwargs
        self.seen = True
        pairs = self._pairs(call, INPUT, tensors)
        if pairs:
            self._unfinished[id(call)] = pairs

    def ends(self, call: Call, output: Any, tensors: Sequence[Tensor]) -> None:  # noqa: ANN401 - whatever a module returns
        """Read outputs."""
        del output
        self._pending += self._unfinished.pop(id(call), [])
        self._pending += self._pairs(call, OUTPUT, tensors)

    def fails(self, call: Call) -> None:
        """The inputs of a module that has failed are worth seeing."""
        self._pending += self._unfinished.pop(id(call), [])

    def wants(self, call: Call, side: str) -> bool:
        """Whether any gradient of this side is selected."""
        return self._backward and self._selection.wants(call.module.names, f"{side}_grad")

    def gradient(self, call: Call, side: str, position: int, gradient: Tensor, micro_step: int) -> None:
        """Read the gradient of a tensor."""
        self._before_pass = len(self._pending)
        element = call.elements[side][position]
        if self._backward and self._selection.takes(call.module.names, f"{side}_grad", element):
            self._read_one(call, _row(BACKWARD, call, side, position, gradient, micro_step), gradient, self._pending)
            self._before_pass = len(self._pending)

    def _pairs(self, call: Call, side: str, tensors: Sequence[Tensor]) -> list[_Read]:
        found: list[_Read] = []
        if self._forward and self._selection.wants(call.module.names, side):
            for position, tensor in enumerate(tensors):
                if self._selection.takes(call.module.names, side, call.elements[side][position]):
                    self._read_one(call, _row(FORWARD, call, side, position, tensor, call.micro_step), tensor, found)
        return found

    def _read_one(self, call: Call, row: Row, tensor: Tensor, found: list[_Read]) -> None:
        with torch.no_grad(), _unseen():
            numbers = self._numbers(call, row, tensor)
        if numbers is not None:
            found.append((call, row, numbers))

    def _numbers(self, call: Call, row: Row, tensor: Tensor) -> Tensor | None:
        known = self._read.get(id(tensor))
        version = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no public name for it
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        numbers = self._reduction.one(row, tensor, owner=call.module.name)
        if numbers is not None and not tensor.is_inference():
            self._read[id(tensor)] = weakref.ref(tensor), version, numbers
        return numbers

    def move(self, recorder: StepRecorder) -> None:
        """Hand everything read so far to the step, in the order of execution."""
        self._read.clear()
        self._before_pass = 0
        read, self._pending = self._pending, []
        pairs = [(_named(call, row), numbers) for call, row, numbers in read]
        if pairs:
            self._latest = pairs
        recorder.add([row for row, _ in pairs], [numbers for _, numbers in pairs])

    def forget(self) -> None:
        """Gradients were thrown away without a step: drop what was read up to the backward pass that made them."""
        del self._pending[: self._before_pass]
        self._pending = [(call, row._replace(micro_step=0), numbers) for call, row, numbers in self._pending]
        self._before_pass = 0

    def forget_all(self) -> None:
        """Drop everything."""
        self._pending = []
        self._latest = []
        self._unfinished.clear()
        self._read.clear()
        self._before_pass = 0

    @property
    def idle(self) -> bool:
        """Whether nothing was read since the last step."""
        return not self._pending and not self._unfinished

    def current(self) -> tuple[list[Pair], list[Pair]]:
        """Rows read since the last step, else those of that step: activations, and their gradients."""
        pairs = [(_named(call, row), numbers) for call, row, numbers in self._pending] or self._latest
        forward = [pair for pair in pairs if pair[0].kind == FORWARD]
        return forward, [pair for pair in pairs if pair[0].kind == BACKWARD]


def _unseen() -> contextlib.AbstractContextManager[object]:
    """Hides what is computed here from dispatch modes.

    One may count operations, or keep their results for a selective checkpoint and take ours for the user's.
    """
    if internals.dispatch_modes():
        return internals.unseen()
    return contextlib.nullcontext()


def _row(kind: str, call: Call, side: str, position: int, tensor: Tensor, micro_step: int) -> Row:  # noqa: PLR0917 - the parts of a row
    return describe(kind, f"{side}{call.suffixes[side][position]}", call.module.stage, tensor, micro_step)


def _named(call: Call, row: Row) -> Row:
    """Named ``fc.input``, ``fc.output_1`` of several, ``fc.input.mask`` of a keyword, ``fc@2.input`` in the third call."""
    again = f"@{call.number}" if call.number else ""
    return row._replace(name=f"{call.module.name}{again}.{row.name}")
