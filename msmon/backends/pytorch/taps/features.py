"""High-order features of the modules in ``l2_targets``: attention, linear layers, routers of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from msmon import log
from msmon.backends.base import UnsupportedTensorError
from msmon.backends.pytorch import features
from msmon.backends.pytorch.attention import attention_inputs
from msmon.backends.pytorch.kernels.layouts import whole_values
from msmon.backends.pytorch.module_calls import Observer
from msmon.plan.selection import ModuleSelection
from msmon.record.table import Row
from msmon.runtime.interruption import from_signal_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module

    from msmon.backends.pytorch.features import Order
    from msmon.backends.pytorch.module_calls import Call, WatchedModule
    from msmon.backends.pytorch.recorder import StepRecorder
    from msmon.config.schema import L2Targets

ATTENTION = "attention_hook"
LINEAR = "linear_hook"
ROUTER_WEIGHT = "moe_router_weight_hook"
ROUTER_LOGIT = "moe_router_logit_hook"

_FEATURES = {
    ATTENTION: ("attention", features.ATTENTION),
    LINEAR: ("linear", features.LINEAR),
    ROUTER_WEIGHT: ("moe_router", features.ROUTER_WEIGHT),
    ROUTER_LOGIT: ("moe_router", features.ROUTER_LOGIT),
}
"""Kind of row → the last part of its name, and its columns."""


class FeatureTap(Observer):
    """Reads numbers of a module that stand for more than one tensor.

    Attention and logits have a row a call. A weight has one a step, at the module's first forward in it.

    Args:
        targets: Modules by kind. No list, or an empty one, is no module; but an empty list for ``linear_hook`` is every
            module that has a matrix.
        order: The dimensions of an attention's query and key.
    """

    part = "recording of high-order features"

    def __init__(self, targets: L2Targets, order: Order) -> None:
        named = {kind: getattr(targets, kind) for kind in _FEATURES}
        self._selections = {
            kind: ModuleSelection({target: {} for target in found}, everything=False)
            for kind, found in named.items()
            if found or (kind == LINEAR and found is not None)
        }
        self._every_matrix = named[LINEAR] == ()
        self._order = order
        self._norms = features.SpectralNorms()
        self._pending: list[tuple[Row, Tensor]] = []
        self._read: set[tuple[str, int, str]] = set()

    def selects(self, watched: WatchedModule) -> bool:
        """Whether a module is looked at."""
        module = watched.reference()
        return any(
            selection.selects(watched.names)
            and not (kind == LINEAR and self._every_matrix and (module is None or not _may_have_matrix(module)))
            for kind, selection in self._selections.items()
        )

    def unmatched(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Targets that are no module's name, each with up to three close names."""
        known = list(names)
        return {
            target: close for found in self._selections.values() for target, close in found.unmatched(known).items()
        }

    def begins(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Read an attention's inputs, and weights."""
        del tensors
        module = call.module.reference()
        if module is None:
            return
        if self._takes(call, ATTENTION):
            self._add(call, ATTENTION, lambda: features.attention(*attention_inputs(module, args, kwargs, self._order)))
        if self._takes(call, LINEAR) and not (self._every_matrix and _matrix(module) is None):
            name = f"{call.module.stage}:{call.module.name}"
            self._add(call, LINEAR, lambda: self._norms.linear(name, _needed_matrix(module)))
        if self._takes(call, ROUTER_WEIGHT):
            self._add(call, ROUTER_WEIGHT, lambda: features.router_weight_similarity(_needed_matrix(module)))

    def ends(self, call: Call, output: Any, tensors: Sequence[Tensor]) -> None:  # noqa: ANN401 - whatever a module returns
        """Read a router's logits: its first output of floating-point numbers."""
        del output
        if self._takes(call, ROUTER_LOGIT):
            self._add(call, ROUTER_LOGIT, lambda: features.router_logit_entropy(_logits(tensors)))

    def _takes(self, call: Call, kind: str) -> bool:
        selection = self._selections.get(kind)
        if selection is None or not selection.selects(call.module.names):
            return False
        return kind in {ATTENTION, ROUTER_LOGIT} or (kind, call.module.stage, call.module.name) not in self._read

    def _add(self, call: Call, kind: str, compute: Callable[[], Tensor]) -> None:
        last, columns = _FEATURES[kind]
        by_call = kind in {ATTENTION, ROUTER_LOGIT}
        again = f"@{call.number}" if by_call and call.number else ""
        name = f"{call.module.name}{again}.{last}".removeprefix(".")
        if not by_call:
            self._read.add((kind, call.module.stage, call.module.name))
        try:
            with torch.no_grad():
                numbers = compute()
        except Exception as error:  # of this tensor: the others have their rows
            if from_signal_handler(error):
                raise
            reason = str(error) if isinstance(error, UnsupportedTensorError) else f"{type(error).__name__}: {error}"
            log.say(f"{name} has no {kind}: {' '.join(reason.split())[:300]}", once=f"unsupported:{kind}:{name}")
        else:
            row = Row(kind, name, call.module.stage, call.micro_step if by_call else None, (), "", columns)
            self._pending.append((row, numbers))

    def move(self, recorder: StepRecorder) -> None:
        """Hand everything read so far to the step, in the order of execution."""
        pairs, self._pending = self._pending, []
        recorder.add([row for row, _ in pairs], [numbers for _, numbers in pairs])

    def step_is_over(self) -> None:
        """Weights are to be read again."""
        self._read.clear()

    def forget(self) -> None:
        """Drop everything read."""
        self._pending = []
        self._read.clear()


def _may_have_matrix(module: Module) -> bool:
    """Whether a module has a weight at all: a sharded one takes its shape in the forward only."""
    return getattr(module, "weight", None) is not None or getattr(module, "wg", None) is not None


def _matrix(module: Module) -> Tensor | None:
    """``weight`` or ``wg`` of a module, or the weight of its part ``wg``, when that is a matrix that is all here."""
    gate = getattr(module, "wg", None)
    for candidate in (getattr(module, "weight", None), gate, getattr(gate, "weight", None)):
        if isinstance(candidate, torch.Tensor) and not torch.nn.parameter.is_lazy(candidate):
            sharded = hasattr(candidate, "device_mesh")
            if candidate.dim() == 2 and candidate.numel() and candidate.is_floating_point() and not sharded:  # noqa: PLR2004 - a matrix
                return candidate
    return None


def _needed_matrix(module: Module) -> Tensor:
    matrix = _matrix(module)
    if matrix is None:
        raise UnsupportedTensorError("it has no matrix `weight` or `wg` that is whole on this rank")
    return whole_values(matrix)


def _logits(tensors: Sequence[Tensor]) -> Tensor:
    found = next((tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim()), None)
    if found is None:
        raise UnsupportedTensorError("it returns no logits")
    return whole_values(found)
