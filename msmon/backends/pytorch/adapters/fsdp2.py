"""``fully_shard``: parameters are ``DTensor``, and each rank holds its part.

Autograd accumulates into an unsharded copy that the optimizer never sees. A group of parameters hands those gradients to one
function that reduces them; while accumulation without synchronisation goes on they stay with the group.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from msmon.backends.pytorch.adapters.parts import part_here
from msmon.backends.pytorch.adapters.plain import NOT_IN_USE, PlainAdapter
from msmon.backends.pytorch.adapters.registered import fsdp2_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from msmon.backends.base import Tell
    from msmon.runtime.ledger import Ledger

_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


class Fsdp2Adapter(PlainAdapter):
    """See :class:`msmon.backends.base.Adapter`."""

    name = "fsdp2"

    def __init__(self, *, main_grad: bool = True) -> None:
        super().__init__(main_grad=main_grad)
        self._sharded: set[int] = set()

    def applies(self, models: Sequence[Module], optimizers: Sequence[Optimizer]) -> str:
        """Models of which ``fully_shard`` has taken a module."""
        del optimizers
        self._sharded = {id(p.sharded_param) for model in models for p in fsdp2_parameters(model.modules())}
        if not self._sharded:
            return NOT_IN_USE
        if not hasattr(sys.modules.get(_MODULE), "foreach_reduce"):
            return f"torch {torch.__version__} has no {_MODULE}.foreach_reduce"
        return ""

    def accumulates(self, parameter: Tensor) -> bool:
        """A hook on a sharded parameter would come after the reduction, and slow offloading down."""
        return id(parameter) not in self._sharded

    def tell_unreduced(self, ledger: Ledger, tell: Tell[Tensor]) -> None:
        """See :meth:`msmon.backends.base.Adapter.tell_unreduced`."""
        groups = sys.modules[_MODULE]

        def wrap_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
            def foreach_reduce(fsdp_params: Any, unsharded_grads: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - FSDP's own
                tell(
                    lambda: (
                        (p.sharded_param, gradient) for p, gradient in zip(fsdp_params, unsharded_grads, strict=True)
                    )
                )
                return original(fsdp_params, unsharded_grads, *args, **kwargs)

            return foreach_reduce

        def wrap_post_backward(original: Callable[..., Any]) -> Callable[..., Any]:
            def post_backward(self: Any, *unused: Any) -> Any:  # noqa: ANN401 - FSDP's own
                result = original(self, *unused)
                tell(functools.partial(_kept, self))
                return result

            return post_backward

        ledger.patch(groups, "foreach_reduce", wrap_reduce)
        ledger.patch(groups.FSDPParamGroup, "post_backward", wrap_post_backward)


def _kept(group: Any) -> Iterator[tuple[Tensor, Tensor]]:  # noqa: ANN401 - an FSDPParamGroup
    """The gradients that a group has accumulated so far without synchronisation."""
    for parameter in () if group.reduce_grads else group.fsdp_params:
        unsharded = getattr(parameter, "_unsharded_param", None)
        in_computation = None if unsharded is None else unsharded.grad
        gradient = part_here(
            in_computation if parameter.unsharded_accumulated_grad is None else parameter.unsharded_accumulated_grad
        )
        if gradient is not None:
            yield parameter.sharded_param, gradient
