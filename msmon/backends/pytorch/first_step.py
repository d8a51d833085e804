"""The number of the first training step: 0, unless a run goes on with an earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msmon.backends.pytorch.adapters import step_counts
from msmon.runtime.references import IdentitySet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Module
    from torch.optim import Optimizer

_noted: IdentitySet[Optimizer] = IdentitySet()
_loaded: IdentitySet[Optimizer] = IdentitySet()

BEGINNING = "beginning"
UNKNOWN = "unknown"


class FirstStep(NamedTuple):
    """Number of a model's first training step in this process, and who said it.

    Attributes:
        value: The number.
        source: ``--first-step``, ``start_iteration``, where it was learned, ``beginning``, or ``unknown`` when a state was
            loaded that says nothing about steps.
    """

    value: int = 0
    source: str = BEGINNING


def note_optimizer(optimizer: Optimizer) -> None:
    """An optimizer has come to life or, when it was noted before, has loaded a state: that too goes through ``__setstate__``."""
    (_loaded if optimizer in _noted else _noted).add(optimizer)


def state_was_loaded(optimizer: Optimizer, first_step: int) -> bool:
    """Whether an optimizer that is about to step for the first time has a state that earlier steps have made.

    Args:
        optimizer: The optimizer.
        first_step: Number of the first training step: frameworks may load a state in ways of their own.
    """
    known = optimizer not in _noted or optimizer in _loaded or first_step > 0
    return known and step_counts.holds_state(optimizer)


def learn_first_step(models: Sequence[Module], optimizers: Sequence[Optimizer]) -> FirstStep:
    """What is known when a model's training begins: whoever drives the training counts, else what was loaded.

    Args:
        models: The model, or several that one optimizer trains.
        optimizers: What trains them.
    """
    driven = {
        "Trainer.state.global_step": step_counts.from_trainer(optimizers),
        "Lightning's global_step": step_counts.from_lightning(models),
        "DeepSpeed's global_steps": step_counts.from_deepspeed(optimizers),
        "Megatron's iteration": step_counts.from_megatron(),
    }
    for source, value in driven.items():
        if value is not None:
            return FirstStep(value, source)
    loaded = [optimizer for optimizer in optimizers if optimizer in _loaded]
    counts = [count for optimizer in loaded if (count := step_counts.from_state(optimizer)) is not None]
    if counts:
        return FirstStep(max(counts), "the optimizer's state") if max(counts) else FirstStep()
    for optimizer in loaded:
        found = step_counts.from_scheduler(optimizer)
        if found is not None:
            return FirstStep(found[0], f"{found[1]}.last_epoch")
    return FirstStep(0, UNKNOWN) if any(map(step_counts.holds_state, loaded)) else FirstStep()
