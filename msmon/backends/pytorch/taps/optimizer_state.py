"""Optimizer state before the step: a file a key of the state (``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``, …)."""

from __future__ import annotations

import re
import weakref
from typing import TYPE_CHECKING

from msmon import log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from msmon.backends.pytorch.adapters.plain import PlainAdapter
    from msmon.backends.pytorch.recorder import StepRecorder
    from msmon.backends.pytorch.taps.reduction import Reduction
    from msmon.backends.pytorch.watched import WatchedParameter

_UNSAFE = re.compile(r"[^\w.-]")


class OptimizerStateTap:
    """Reads every state tensor that exists. There is none before the first step, and for plain SGD never."""

    part = "recording of optimizer state"

    def __init__(self, reduction: Reduction, adapter: PlainAdapter) -> None:
        self._reduction = reduction
        self._adapter = adapter
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

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
        by_key: dict[str, list[tuple[WatchedParameter, Tensor]]] = {}
        for watched in parameters:
            found: dict[str, Tensor] = {}
            for optimizer in optimizers:
                for key, tensor in self._adapter.state(optimizer, watched.parameter):
                    found.setdefault(_UNSAFE.sub("_", key), tensor)
            for key, tensor in found.items():
                by_key.setdefault(key, []).append((watched, tensor))
        for key, named in by_key.items():
            self._reduction.add(recorder, key, named)
        self._say_when_stateless(optimizers[0], bool(by_key))

    def _say_when_stateless(self, optimizer: Optimizer, has_state: bool) -> None:  # noqa: FBT001 - private, one caller
        if not has_state and optimizer in self._stepped:
            name = type(optimizer).__name__
            log.say(f"{name} keeps no state tensors: mv_distribution records nothing for it", once=f"state:{name}")

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, and not only been asked to: it has its state now, if it keeps any."""
        self._stepped.add(optimizer)
