"""DeepSpeed: its optimizers hold float32 tensors of DeepSpeed's own, each with this rank's parts of several parameters.

Autograd accumulates into the model's parameters, whole and not yet reduced, at every stage of ZeRO. What the optimizer uses
exists in its own tensors only while the engine steps, group after group; so the engine's step is the training step.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from msmon.backends.pytorch.adapters.plain import NOT_IN_USE, PlainAdapter
from msmon.backends.pytorch.adapters.steps import StepUnderWay
from msmon.bootstrap import discovery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from msmon.backends.pytorch.adapters.steps import StepBegins
    from msmon.runtime.ledger import Ledger

_ENGINES = "deepspeed.runtime.engine"
_STEP = "_take_model_step"
_STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
_KEPT_IN = {
    _STAGE_3: ("fp16_groups", "fp32_partitioned_groups_flat", "grad_position", "sub_group_to_group_id"),
    "DeepSpeedZeroOptimizer": ("bit16_groups", "single_partition_of_fp32_groups"),
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_flat_partition"),
    "FP16_UnfusedOptimizer": ("fp16_groups", "fp32_groups"),
}
"""DeepSpeed's optimizers, and where each keeps the model's parameters by group, their float32 masters, and what else is read."""


class _Part(NamedTuple):
    """What this rank's optimizer has of a parameter.

    Attributes:
        master: The optimizer's tensor that it lies in.
        shape: Of the part.
        start: Where in the flat master it begins.
        offset: Where in the flat parameter it begins; ``None`` when it is all of it.
    """

    master: Tensor
    shape: tuple[int, ...]
    start: int = 0
    offset: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The part in a tensor that is laid out like the master."""
        return tensor if self.offset is None else tensor.narrow(0, self.start, *self.shape)


class _Group(NamedTuple):
    """Where a parameter is: in which group of which of DeepSpeed's optimizers, and at which place in it."""

    wrapper: weakref.ref[Any]
    number: int
    place: int


class DeepSpeedAdapter(PlainAdapter):
    """See :class:`msmon.backends.base.Adapter`."""

    name = "deepspeed"
    keeps_gradients = False

    def __init__(self, *, main_grad: bool = True) -> None:
        super().__init__(main_grad=main_grad)
        self._groups: dict[int, _Group] = {}

    def applies(self, models: Sequence[Module], optimizers: Sequence[Optimizer]) -> str:
        """Optimizers that an engine has taken, and has put its own tensors into."""
        if _engine_class() is None:
            return NOT_IN_USE
        _look_for_engines(models)
        wrappers = [wrapper for optimizer in optimizers if (wrapper := _wrapper_of(optimizer)) is not None]
        for wrapper in wrappers:
            reason = _not_understood(wrapper)
            if reason:
                return reason
            for number, group in enumerate(getattr(wrapper, _kept_in(wrapper)[0])):
                for place, parameter in enumerate(group):
                    self._groups[id(parameter)] = _Group(weakref.ref(wrapper), number, place)
        return "" if wrappers else NOT_IN_USE

    def weight(self, parameter: Tensor) -> Tensor | None:
        """This rank's part of the float32 master; of a parameter that is not trained, what this rank has of it."""
        if id(parameter) in self._groups:
            part = self._part(parameter)
            return None if part is None else part.of(part.master)
        return _stored(parameter)

    def reduced_gradient(self, parameter: Tensor) -> Tensor | None:
        """This rank's part, unscaled and clipped; there is one only while the optimizer steps."""
        part = self._part(parameter)
        return None if part is None or part.master.grad is None else part.of(part.master.grad)

    def state(self, optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of what the optimizer has for the master."""
        part = self._part(parameter)
        for key, value in super().state(optimizer, part.master) if part is not None else ():
            if part is not None and (part.offset is None or value.shape == part.master.shape):
                yield key, part.of(value)

    def steps_taken(self, optimizer: Optimizer, parameter: Tensor) -> Any:  # noqa: ANN401 - as the optimizer keeps it
        """See :meth:`msmon.backends.base.Adapter.steps_taken`."""
        part = self._part(parameter)
        return None if part is None else super().steps_taken(optimizer, part.master)

    def param_groups(self, optimizer: Optimizer) -> Mapping[int, dict[str, Any]]:
        """See :meth:`msmon.backends.base.Adapter.param_groups`."""
        return {
            key: optimizer.param_groups[getattr(wrapper, "sub_group_to_group_id", {}).get(group.number, group.number)]
            for key, group in self._groups.items()
            if (wrapper := group.wrapper()) is not None and wrapper.optimizer is optimizer
        }

    def place(self, parameter: Tensor) -> dict[str, Any]:
        """The parameter's own shape, and where in its flat form this rank's part begins."""
        part = self._part(parameter)
        whole = tuple(getattr(parameter, "ds_shape", parameter.shape))
        if part is not None and part.offset is None:
            return {}
        if part is not None:
            return {"shape": list(part.shape), "whole_shape": list(whole), "flat_offset": part.offset}
        stored = self.weight(parameter)
        if stored is parameter:
            return {}
        return {"shape": [0] if stored is None else list(stored.shape), "whole_shape": list(whole)}

    def describe(self, root: Module) -> dict[str, Any]:
        """See :meth:`msmon.backends.base.Adapter.describe`; and how ZeRO spreads the model."""
        wrappers = {id(wrapper): wrapper for group in self._groups.values() if (wrapper := group.wrapper()) is not None}
        engines = [engine for engine in _engines() if id(vars(engine).get("optimizer")) in wrappers]
        return {
            **super().describe(root),
            "deepspeed": sys.modules["deepspeed"].__version__,
            "zero_stage": [engine.zero_optimization_stage() for engine in engines],
        }

    def _part(self, parameter: Tensor) -> _Part | None:
        group = self._groups.get(id(parameter))
        wrapper = None if group is None else group.wrapper()
        if group is None or wrapper is None:
            return None
        masters = getattr(wrapper, _kept_in(wrapper)[1])
        if hasattr(parameter, "ds_id"):
            return _part_of_stage_3(wrapper, masters[group.number], parameter)
        if not hasattr(parameter, "_hp_mapping"):
            return _Part(masters[group.number][group.place], tuple(parameter.shape))
        fragment = parameter._hp_mapping  # noqa: SLF001 - DeepSpeed has no public place for it
        if fragment is None:
            return None
        place = fragment.hp_fragment_address
        return _Part(masters[group.number], (place.numel,), place.start, fragment.lp_fragment_address.start)


def _part_of_stage_3(wrapper: Any, master: Tensor, parameter: Any) -> _Part | None:  # noqa: ANN401 - DeepSpeed's own
    """All ranks have parts of one size; the last ones are filled up."""
    _, start, size = wrapper.grad_position[parameter.ds_id]
    offset = size * wrapper._get_param_partition_rank(parameter)  # noqa: SLF001 - as above
    here = min(size, parameter.ds_numel - offset)
    return _Part(master, (here,), start, offset) if here > 0 and master.numel() else None  # none: it is on disk


def _stored(parameter: Any) -> Tensor | None:  # noqa: ANN401 - a Parameter, with what DeepSpeed adds to it
    """A parameter that no optimizer trains: stage 3 keeps a part of it on each rank."""
    kept = getattr(parameter, "ds_tensor", None)
    if kept is None:
        return parameter  # type: ignore[no-any-return]
    group = getattr(parameter, "ds_process_group", None)
    rank = torch.distributed.get_rank(group)
    here = min(kept.numel(), parameter.ds_numel - kept.numel() * rank)
    return kept.flatten().narrow(0, 0, here) if here > 0 else None


def trained_by(optimizer: Optimizer) -> list[Tensor] | None:
    """The model's parameters that an optimizer trains, if an engine has put other tensors into it."""
    wrapper = _wrapper_of(optimizer)
    if wrapper is None or _not_understood(wrapper):
        return None
    return [parameter for group in getattr(wrapper, _kept_in(wrapper)[0]) for parameter in group]


def follow_engines(ledger: Ledger, step_begins: StepBegins) -> bool:
    """Patch the engines of this process, if it has imported them.

    Args:
        ledger: Takes the patch.
        step_begins: Told that an engine steps.

    Returns:
        Whether it has.
    """
    kind = _engine_class()
    if kind is None or not hasattr(kind, _STEP):
        return False

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - DeepSpeed's own
            ended, complete = step_begins(functools.partial(_step_of, self)), False
            try:
                result = original(self, *args, **kwargs)
                complete = True
                return result
            finally:
                ended(complete)

        return take_model_step

    ledger.patch(kind, _STEP, wrap)
    return True


def _step_of(engine: Any) -> StepUnderWay | None:  # noqa: ANN401 - a DeepSpeedEngine
    wrapper = vars(engine).get("optimizer")
    if wrapper is None or isinstance(wrapper, torch.optim.Optimizer) or _not_understood(wrapper):
        return None  # its steps are the training steps
    return StepUnderWay(wrapper.optimizer, float(getattr(wrapper, "loss_scale", 1)))


def in_construction() -> bool:
    """Whether an engine is being made further up the stack: some step once, with zeros, to have their state there."""
    kind = _engine_class()
    if kind is None:
        return False
    code = inspect.unwrap(vars(kind)["__init__"]).__code__
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - an engine does not say that it is not ready
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _engine_class() -> type | None:
    return getattr(sys.modules.get(_ENGINES), "DeepSpeedEngine", None)


_known: list[weakref.ref[Any]] = []
_looked_at = -1


def _engines() -> list[Any]:
    """The engines of this process."""
    global _looked_at  # noqa: PLW0603 - looked for again only when there are new modules
    kind = _engine_class()
    if kind is None:
        return []
    if _looked_at != discovery.counts["modules"]:
        _looked_at = discovery.counts["modules"]
        modules = list(discovery.modules.values())
        _known[:] = [reference for reference in modules if kind in type(reference()).__mro__]
    return [engine for reference in _known if (engine := reference()) is not None]


def _look_for_engines(models: Sequence[Module]) -> None:
    """Without ``msmon run`` nobody has noted the modules that were constructed."""
    kind = _engine_class()
    if hasattr(torch.nn.Module.__init__, "__msmon_original__"):
        return
    candidates = models if any(kind in type(model).__mro__ for model in models) else gc.get_objects()
    for candidate in candidates:
        if kind in type(candidate).__mro__:
            discovery.note_module(candidate)


def _wrapper_of(optimizer: Optimizer) -> Any:  # noqa: ANN401 - one of DeepSpeed's optimizers
    wrappers = (vars(engine).get("optimizer") for engine in _engines())
    return next((wrapper for wrapper in wrappers if vars(wrapper or object).get("optimizer") is optimizer), None)


def _kept_in(wrapper: Any) -> tuple[str, ...]:  # noqa: ANN401 - as above
    names = (base.__name__ for base in type(wrapper).__mro__)
    return next((_KEPT_IN[name] for name in names if name in _KEPT_IN), ())


def _not_understood(wrapper: Any) -> str:  # noqa: ANN401 - as above
    """Why the parameters behind an optimizer's tensors are not known; empty when they are."""
    version = getattr(sys.modules.get("deepspeed"), "__version__", "")
    if not hasattr(_engine_class(), _STEP):
        return f"deepspeed {version} has no DeepSpeedEngine.{_STEP}"
    name, needed = type(wrapper).__name__, _kept_in(wrapper)
    if not needed:
        return f"where {name} of deepspeed {version} keeps its parameters is not known"
    missing = [attribute for attribute in needed if not hasattr(wrapper, attribute)]
    return f"{name} of deepspeed {version} has no {missing[0]}" if missing else ""
