"""A training step as a framework makes it, around the steps of the optimizers inside."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer


class StepUnderWay(NamedTuple):
    """A framework is about to step.

    Attributes:
        optimizer: What will step inside, as often as it has groups, or not at all.
        loss_scale: What the loss of its backward passes was multiplied by.
    """

    optimizer: Optimizer
    loss_scale: float | Tensor = 1


StepBegins: TypeAlias = "Callable[[Callable[[], StepUnderWay | None]], Callable[[bool], None]]"
"""Is told that a framework steps, with what finds out more; what it returns is called after the step, and is told whether
that came to its end. Neither raises."""
