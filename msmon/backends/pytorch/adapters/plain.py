"""Plain PyTorch, and what leaves parameters, gradients and state where plain PyTorch has them: DDP, compiled models.

DDP copies a gradient into its bucket, or reduces it in place, in a hook on the accumulation node. A post-accumulate
hook of the parameter runs before that, so it reads the local gradient, with bucket views and overlapping too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from msmon.backends.pytorch.adapters.parts import part_here, place_of, tensors_inside
from msmon.backends.pytorch.adapters.registered import registered_parameters
from msmon.backends.pytorch.naming import walk_parameters, wrappers_around

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from msmon.backends.base import NamedParameter, Tell
    from msmon.runtime.ledger import Ledger

NOT_IN_USE = "not in use"
"""Why an adapter does not apply that nobody needs to be told about."""

_COUNTER = "step"
"""A state entry that counts; it is no state to watch."""

_NAMELESS = "state"
"""The key of state that is no mapping."""


class PlainAdapter:
    """See :class:`msmon.backends.base.Adapter`.

    Args:
        main_grad: Read ``main_grad`` where a parameter has one.
    """

    name = "plain"
    keeps_gradients = True

    def __init__(self, *, main_grad: bool = True) -> None:
        self._main_grad = main_grad

    def applies(self, models: Sequence[Module], optimizers: Sequence[Optimizer]) -> str:
        """Always."""
        del models, optimizers
        return ""

    def parameters(self, root: Module) -> Iterator[NamedParameter[Parameter]]:
        """See :meth:`msmon.backends.base.Adapter.parameters`."""
        yield from walk_parameters(root, registered_parameters())

    def accumulates(self, parameter: Tensor) -> bool:
        """See :meth:`msmon.backends.base.Adapter.accumulates`."""
        del parameter
        return True

    def tell_unreduced(self, ledger: Ledger, tell: Tell[Tensor]) -> None:
        """Nothing to tell: autograd's hooks do."""

    def told_at_the_end(self, parameter: Tensor) -> bool:
        """See :meth:`msmon.backends.base.Adapter.told_at_the_end`."""
        del parameter
        return False

    def unreduced_gradient(self, parameter: Tensor) -> Tensor | None:
        """``parameter.grad``: after this backward pass, before any communication."""
        return part_here(parameter.grad)

    def weight(self, parameter: Tensor) -> Tensor | None:
        """The parameter itself, or this rank's part of it."""
        return part_here(parameter)

    def reduced_gradient(self, parameter: Tensor) -> Tensor | None:
        """``parameter.main_grad`` where a framework has set one, else ``parameter.grad``."""
        main_grad = self.main_grad(parameter)
        return part_here(parameter.grad if main_grad is None else main_grad)

    def main_grad(self, parameter: Tensor) -> Tensor | None:
        """Where a framework, or the script, adds up gradients beside ``.grad``, when that is to be read."""
        found = getattr(parameter, "main_grad", None) if self._main_grad else None
        return found if isinstance(found, torch.Tensor) else None

    def state(self, optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in ``optimizer.state[parameter]`` but the step counter. Looking creates no entry.

        Keys of dictionaries inside are joined by dots, positions in lists stand in brackets: ``block_0.factors[1]``.
        """
        entries = optimizer.state.get(parameter)
        if entries is None:
            return
        if not hasattr(entries, "items"):
            entries = {_NAMELESS: entries}
        yield from _parts_inside({key: value for key, value in entries.items() if key != _COUNTER})

    def own_state(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that an optimizer keeps under a word, and not under a parameter: ``state["global_state"]``."""
        entries: Any = optimizer.state
        if hasattr(entries, "items"):
            yield from _parts_inside({key: value for key, value in entries.items() if isinstance(key, str)})

    def steps_taken(self, optimizer: Optimizer, parameter: Tensor) -> Any:  # noqa: ANN401 - as the optimizer keeps it
        """``optimizer.state[parameter]["step"]``."""
        return optimizer.state.get(parameter, {}).get(_COUNTER)

    def param_groups(self, optimizer: Optimizer) -> Mapping[int, dict[str, Any]]:
        """Those that the parameters are in."""
        return {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}

    def place(self, parameter: Tensor) -> dict[str, Any]:
        """Of a ``DTensor``: where in the whole this rank's part lies."""
        return place_of(parameter)

    def describe(self, root: Module) -> dict[str, Any]:
        """The classes of the wrappers around the user's model, outermost first."""
        return {"wrappers": wrappers_around(root)}


def _parts_inside(entries: Mapping[Any, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in tensors_inside(entries):
        part = part_here(value)
        if part is not None:
            yield key, part
