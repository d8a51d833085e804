"""How many training steps a run has behind it, as whatever was loaded or drives the training says it.

Each of these answers only when it is certain. A number that is wrong would be worse than none: then steps are counted from
0, and ``msmon run --first-step`` is there.
"""

from __future__ import annotations

import gc
import math
import sys
from typing import TYPE_CHECKING, Any

import torch

from msmon.backends.pytorch.adapters import deepspeed
from msmon.backends.pytorch.adapters.parts import part_here

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import CodeType, FrameType

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

_LARGEST = 2**53
_WRAPPERS_DEEP = 8
_BY_BATCH = ("OneCycleLR", "CyclicLR")
"""Schedulers that are made to step with each batch; any other may as well step with each epoch."""


def from_trainer(optimizers: Sequence[Optimizer]) -> int | None:
    """``state.global_step`` of the transformers ``Trainer`` that is executing a training step with one of the optimizers."""
    kind = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    frame: FrameType | None = sys._getframe() if kind is not None else None  # noqa: SLF001 - a model does not know its trainer
    while frame is not None:
        # Only of a call that soon ends: looking at the locals of a frame keeps them alive until it does.
        trainer: Any = frame.f_locals.get("self") if frame.f_code.co_name == "training_step" else None
        if kind in type(trainer).__mro__ and _holds(getattr(trainer, "optimizer", None), optimizers):
            return _whole(trainer.state.global_step)
        frame = frame.f_back
    return None


def from_lightning(models: Sequence[Module]) -> int | None:
    """``global_step`` of Lightning's ``Trainer``, which counts the steps of all optimizers together: so only with one."""
    for model in models:
        trainer: Any = vars(model).get("_trainer")
        names = {(base.__module__.partition(".")[0], base.__name__) for base in type(trainer).__mro__}
        if names & {("lightning", "Trainer"), ("pytorch_lightning", "Trainer")} and len(trainer.optimizers) == 1:
            return _whole(trainer.global_step)
    return None


def from_deepspeed(optimizers: Sequence[Optimizer]) -> int | None:
    """``global_steps`` of the DeepSpeed engine that one of the optimizers is in."""
    found = (engine for engine in deepspeed.engines() if _holds(vars(engine).get("optimizer"), optimizers))
    return next((_whole(engine.global_steps) for engine in found), None)


def from_megatron() -> int | None:
    """``iteration`` of Megatron-LM's global arguments, which loading a checkpoint sets."""
    for name in ("megatron.training.global_vars", "megatron.global_vars"):
        arguments = getattr(sys.modules.get(name), "_GLOBAL_ARGS", None)
        iteration = getattr(arguments, "iteration", None)
        if iteration is not None:
            return _whole(iteration)
    return None


def from_state(optimizer: Optimizer) -> int | None:
    """The largest ``step`` in an optimizer's state, or in its param groups where it is kept there (Apex, TransformerEngine)."""
    entries = [*optimizer.state.values(), *optimizer.param_groups]
    found = [entry["step"] for entry in entries if hasattr(entry, "items") and "step" in entry]
    return max((number for value in _values(found) if (number := _whole(value)) is not None), default=None)


def from_scheduler(optimizer: Optimizer) -> tuple[int, str] | None:
    """``last_epoch`` of a scheduler that steps with each batch, and the scheduler's name.

    Nothing leads from an optimizer to its scheduler, so everything that the garbage collector knows is looked at: called
    once, and only where a state without a count was loaded. accelerate's scheduler steps once for each process.
    """
    if "accelerate.scheduler" in sys.modules:
        return None
    for candidate in gc.get_objects():
        name = type(candidate).__name__
        if name in _BY_BATCH and type(candidate).__module__ == "torch.optim.lr_scheduler":
            count = _whole(candidate.last_epoch)
            if _holds(candidate.optimizer, [optimizer]) and count:
                return count, name
    return None


def holds_state(optimizer: Optimizer) -> bool:
    """Whether an optimizer has a state that steps have made: some make one of zeros when they are constructed."""
    count = from_state(optimizer)
    if count is not None:
        return count > 0
    entries = [entry for entry in optimizer.state.values() if hasattr(entry, "values")]
    return any(isinstance(value, torch.Tensor) for entry in entries for value in entry.values())


def makes_state_only(optimizer: Optimizer) -> bool:
    """Whether an optimizer steps with zeros, for ``torch.distributed.checkpoint`` to have its state there to load into."""
    code = _code_that_makes_state()
    if optimizer.state or code is None:
        return False
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - such a step looks like any other
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _code_that_makes_state() -> CodeType | None:
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code: CodeType | None = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    return code


def _holds(optimizer: Any, wanted: Sequence[Optimizer]) -> bool:  # noqa: ANN401 - whatever a framework puts around one
    """Whether an optimizer is one of these, or a wrapper around one."""
    for _ in range(_WRAPPERS_DEEP):
        if optimizer is None or any(optimizer is one for one in wanted):
            return optimizer is not None
        optimizer = getattr(optimizer, "optimizer", None)
    return False


def _values(counts: Iterable[Any]) -> Iterator[float]:
    """Numbers as they are kept: plain, or in tensors of one element, of which those on a device are brought here at once."""
    on_devices: dict[torch.device, list[Tensor]] = {}
    for count in counts:
        tensor = part_here(count) if isinstance(count, torch.Tensor) else None
        if isinstance(count, (int, float)):
            yield count
        elif type(tensor) is torch.Tensor and tensor.numel() == 1 and tensor.device.type != "meta":
            on_devices.setdefault(tensor.device, []).append(tensor.detach().reshape(()).double())
    for tensors in on_devices.values():
        yield float(torch.stack(tensors).max())


def _whole(value: object) -> int | None:
    """A count of steps; ``None`` when it cannot be one."""
    fits = isinstance(value, (int, float)) and math.isfinite(value) and value == int(value) and 0 <= value < _LARGEST
    return int(value) if fits else None  # type: ignore[call-overload]  # it is a number
