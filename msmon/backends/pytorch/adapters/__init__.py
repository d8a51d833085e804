"""One file a training framework, behind :class:`msmon.backends.base.Adapter`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msmon import log
from msmon.backends.pytorch.adapters.deepspeed import DeepSpeedAdapter
from msmon.backends.pytorch.adapters.fsdp1 import Fsdp1Adapter
from msmon.backends.pytorch.adapters.fsdp2 import Fsdp2Adapter
from msmon.backends.pytorch.adapters.megatron import MegatronAdapter
from msmon.backends.pytorch.adapters.plain import NOT_IN_USE, PlainAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Module
    from torch.optim import Optimizer

ADAPTERS: tuple[type[PlainAdapter], ...] = (
    DeepSpeedAdapter,
    Fsdp1Adapter,
    Fsdp2Adapter,
    MegatronAdapter,
    PlainAdapter,
)
"""Most specific first; the last applies to everything."""


def choose_adapter(
    models: Sequence[Module], optimizers: Sequence[Optimizer], *, main_grad: bool = True
) -> PlainAdapter:
    """The first adapter that understands the models and their optimizers.

    One whose framework is in use in a way that it does not understand says why.
    """
    for kind in ADAPTERS:
        adapter = kind(main_grad=main_grad)
        reason = adapter.applies(models, optimizers)
        if not reason:
            return adapter
        if reason != NOT_IN_USE:
            log.say(f"{adapter.name} is recorded as plain PyTorch: {reason}", once=f"adapter:{adapter.name}:{reason}")
    return PlainAdapter(main_grad=main_grad)
