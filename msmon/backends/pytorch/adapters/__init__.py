"""One file a training framework, behind :class:`msmon.backends.base.Adapter`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msmon.backends.pytorch.adapters.plain import PlainAdapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Module
    from torch.optim import Optimizer

ADAPTERS: tuple[type[PlainAdapter], ...] = (PlainAdapter,)
"""Most specific first; the last applies to everything."""


def choose_adapter(
    models: Sequence[Module], optimizers: Sequence[Optimizer], *, main_grad: bool = True
) -> PlainAdapter:
    """The first adapter that understands the models and their optimizers."""
    adapters = (kind(main_grad=main_grad) for kind in ADAPTERS)
    return next(adapter for adapter in adapters if not adapter.applies(models, optimizers))
