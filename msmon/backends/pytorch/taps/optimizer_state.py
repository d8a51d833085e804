"""Optimizer state before the step: a file a key of the state (``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``, …)."""

from __future__ import annotations

import itertools
import re
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from msmon import log
from msmon.backends.base import UnsupportedTensorError
from msmon.backends.pytorch.roots import optimizer_parameters
from msmon.backends.pytorch.watched import WatchedParameter
from msmon.runtime.references import IdentitySet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from msmon.backends.pytorch.adapters.plain import PlainAdapter
    from msmon.backends.pytorch.recorder import StepRecorder
    from msmon.backends.pytorch.taps.reduction import Reduction

_UNSAFE = re.compile(r"[^\w.-]")
_POSITION = re.compile(r"\[\d+\]")
_LONGEST = 100
"""Characters of a key in a file's name."""


class OptimizerStateTap:
    """Reads every state tensor that exists. There is none before the first step, and for plain SGD never."""

    part = "recording of optimizer state"

    def __init__(self, reduction: Reduction, adapter: PlainAdapter) -> None:
        self._reduction = reduction
        self._adapter = adapter
        self._stepped: IdentitySet[Optimizer] = IdentitySet()
        self._owners: dict[
            str, list[weakref.ref[Optimizer]]
        ] = {}  # by name: optimizers of that name, each at its number

    def read(
        self, recorder: StepRecorder, optimizers: Sequence[Optimizer], parameters: Sequence[WatchedParameter]
    ) -> None:
        """Add a row a state tensor.

        Args:
            recorder: The step under way.
            optimizers: The one that steps and, where an optimizer wraps others, those it wraps. The first that has a
                key is the one whose tensor is read.
            parameters: Its watched parameters.
        """
        by_kind: dict[str, list[tuple[WatchedParameter, Tensor]]] = {}
        for watched in [*parameters, *_unwatched_holder(optimizers[0], parameters)]:
            found: dict[str, Tensor] = {}
            for optimizer in optimizers:
                for key, tensor in self._adapter.state(optimizer, watched.parameter):
                    found.setdefault(key, tensor)
            shared = _is_shared(optimizers[0], watched, found)
            if shared or watched.name:
                owner = self._as_owner(optimizers[0], watched, parameters) if shared else watched
                self._sort(by_kind, owner, found)
        for optimizer in optimizers if parameters else ():
            own = dict(self._adapter.own_state(optimizer))
            if own:
                self._sort(by_kind, self._as_owner(optimizer, parameters[0], parameters), own)
        for kind, tensors in by_kind.items():
            self._reduction.add(recorder, kind, tensors)
        self._say_when_stateless(optimizers[0], bool(by_kind))

    def _sort(
        self,
        by_kind: dict[str, list[tuple[WatchedParameter, Tensor]]],
        owner: WatchedParameter,
        found: Mapping[str, Tensor],
    ) -> None:
        for key, tensor in found.items():
            kind = _UNSAFE.sub("_", _POSITION.sub("", key))[:_LONGEST]
            if tensor.dtype in {torch.uint8, torch.int8} and owner.parameter.is_floating_point():
                reason = "8-bit codes, whose numbers only the optimizer knows"
                self._reduction.leave_out(owner.name, kind, UnsupportedTensorError(reason))
                continue
            position = "".join(_POSITION.findall(key))
            named = replace(owner, name=owner.name + position) if position else owner
            by_kind.setdefault(kind, []).append((named, tensor))

    def _as_owner(
        self, optimizer: Optimizer, watched: WatchedParameter, parameters: Sequence[WatchedParameter]
    ) -> WatchedParameter:
        """An optimizer in place of a parameter: its class, below what the names of its parameters have in common."""
        levels = zip(*(each.name.split(".")[:-1] for each in parameters), strict=False)
        in_common = itertools.takewhile(lambda level: len(set(level)) == 1, levels)
        name = ".".join([*(level[0] for level in in_common), type(optimizer).__name__])
        alike = self._owners.setdefault(name, [])
        found = (reference() for reference in alike)
        free = (place for place, other in enumerate(found) if other is None or other is optimizer)
        place = next(free, len(alike))
        alike[place : place + 1] = [weakref.ref(optimizer)]
        return replace(watched, name=f"{name}_{place}" if place else name)

    def _say_when_stateless(self, optimizer: Optimizer, has_state: bool) -> None:  # noqa: FBT001 - private, one caller
        if not has_state and optimizer in self._stepped:
            name = type(optimizer).__name__
            log.say(f"{name} keeps no state tensors: mv_distribution records nothing for it", once=f"state:{name}")

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, and not only been asked to: it has its state now, if it keeps any."""
        self._stepped.add(optimizer)


def _unwatched_holder(optimizer: Optimizer, parameters: Sequence[WatchedParameter]) -> list[WatchedParameter]:
    """The one parameter that has state, without a name, when ``targets`` do not select it."""
    state: Any = optimizer.state
    if len(state) != 1 or not parameters:
        return []
    holder = next(iter(state))
    if not isinstance(holder, torch.Tensor) or any(watched.parameter is holder for watched in parameters):
        return []
    return [WatchedParameter(holder, "", parameters[0].stage)]


def _is_shared(optimizer: Optimizer, watched: WatchedParameter, state: Mapping[str, Tensor]) -> bool:
    """Whether the state of a parameter is about all parameters of its optimizer.

    One that sees its parameters as one vector (LBFGS) keeps what it knows of that under its first parameter.
    """
    if len(optimizer.state) != 1 or not any(tensor.shape != watched.parameter.shape for tensor in state.values()):
        return False
    held = optimizer_parameters(optimizer)
    total = sum(parameter.numel() for parameter in held)
    return len(held) > 1 and any(tensor.numel() == total for tensor in state.values())
