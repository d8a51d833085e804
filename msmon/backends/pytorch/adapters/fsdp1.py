"""``FullyShardedDataParallel``: each rank holds a stretch of the flattened parameters of a unit, under their own names.

The gradient of a unit exists whole only between the end of its backward pass and its reduce-scatter. The patched function
is called there, whole gradient in place, in every version from torch 2.1 on; it is looked up when it is called, so that it
does not matter whether the unit was built, or has run its forward, before msmon came.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from msmon.backends.pytorch.adapters.plain import NOT_IN_USE, PlainAdapter
from msmon.backends.pytorch.adapters.registered import flat_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from msmon.backends.base import Tell
    from msmon.runtime.ledger import Ledger

_PLACE = "_post_backward_reshard"


class Fsdp1Adapter(PlainAdapter):
    """See :class:`msmon.backends.base.Adapter`."""

    name = "fsdp1"

    def __init__(self, *, main_grad: bool = True) -> None:
        super().__init__(main_grad=main_grad)
        self._places: dict[int, tuple[Any, int]] = {}  # of each original parameter: its unit's flat one, and its number

    def applies(self, models: Sequence[Module], optimizers: Sequence[Optimizer]) -> str:
        """Units with original parameters."""
        del models
        if "torch.distributed.fsdp" not in sys.modules:
            return NOT_IN_USE
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        flat = [unit for unit in flat_parameters() if _holds(unit, held)]
        if not flat:
            return NOT_IN_USE
        if any(parameter._params is None for parameter in flat):  # noqa: SLF001 - FSDP has no public place for them
            return "use_orig_params=False leaves one flat parameter a unit, and rows are of those; pass use_orig_params=True"
        if not hasattr(_runtime(), _PLACE):
            return f"torch {torch.__version__} has no {_PLACE}"
        return ""

    def accumulates(self, parameter: Tensor) -> bool:
        """Parameters that FSDP was told to ignore are ordinary ones."""
        return not getattr(parameter, "_fsdp_flattened", False)

    def tell_unreduced(self, ledger: Ledger, tell: Tell[Tensor]) -> None:
        """See :meth:`msmon.backends.base.Adapter.tell_unreduced`."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def post_backward_reshard(state: Any, handle: Any, *unused: Any) -> Any:  # noqa: ANN401 - FSDP's own
                tell(functools.partial(_cut, handle.flat_param))
                return original(state, handle, *unused)

            return post_backward_reshard

        ledger.patch(_runtime(), _PLACE, wrap)

    def weight(self, parameter: Tensor) -> Tensor | None:
        """This rank's stretch; most parameters of a unit have none on most ranks."""
        return parameter if parameter.numel() or self.accumulates(parameter) else None

    def reduced_gradient(self, parameter: Tensor) -> Tensor | None:
        """See :meth:`msmon.backends.base.Adapter.reduced_gradient`."""
        gradient = super().reduced_gradient(parameter)
        return gradient if gradient is None or gradient.numel() or self.accumulates(parameter) else None

    def state(self, optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`msmon.backends.base.Adapter.state`."""
        if self.weight(parameter) is not None:
            yield from super().state(optimizer, parameter)

    def place(self, parameter: Tensor) -> dict[str, Any]:
        """The parameter's own shape, and where in its flat form this rank's stretch begins."""
        if self.accumulates(parameter):
            return {}
        if id(parameter) not in self._places:
            for flat in flat_parameters():
                self._places.update((id(each), (flat, number)) for number, each in enumerate(flat._params or ()))  # noqa: SLF001
        flat, number = self._places[id(parameter)]
        stretch = flat._shard_param_infos[number]  # noqa: SLF001 - as above
        offset = {"flat_offset": stretch.intra_param_start_idx} if stretch.in_shard else {}
        return {"whole_shape": list(flat._shapes[number]), **offset}  # noqa: SLF001 - as above


def _runtime() -> Any:  # noqa: ANN401 - a module
    import torch.distributed.fsdp._runtime_utils as runtime  # noqa: PLC0415 - only where FSDP is in use

    return runtime


def _holds(flat: Any, held: set[int]) -> bool:  # noqa: ANN401 - a FlatParameter
    return id(flat) in held or any(id(parameter) in held for parameter in flat._params or ())  # noqa: SLF001 - as above


def _cut(flat: Any) -> Iterator[tuple[Tensor, Tensor]]:  # noqa: ANN401 - a FlatParameter
    """Each original parameter with its part of the whole gradient of the unit, as a view."""
    if flat.grad is None or flat._params is None:  # noqa: SLF001 - as above
        return
    gradient, start, number = flat.grad.detach(), 0, 0
    for size, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):  # noqa: SLF001 - as above
        if not is_padding:
            yield flat._params[number], gradient[start : start + size].view(flat._shapes[number])  # noqa: SLF001
            number += 1
        start += size
