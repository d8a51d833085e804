"""DeepSpeed: its optimizers hold float32 tensors of DeepSpeed's own, each with this rank's parts of several parameters.

Autograd accumulates into the model's parameters, whole and not yet reduced, at every stage of ZeRO. What the optimizer uses
exists in its own tensors only while the engine steps, group after group; so the engine's step is the training step.
"""

from __future__ import annotations

import functools
import gc
import inspect
import math
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
_KEPT_IN = {
    "DeepSpeedZeroOptimizer_Stage3": (
        "fp16_groups",
        "fp32_partitioned_groups_flat",
        "grad_position",
        "sub_group_to_group_id",
    ),
    "DeepSpeedZeroOptimizer": ("bit16_groups", "single_partition_of_fp32_groups"),
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_flat_partition"),
    "FP16_Optimizer": ("fp16_groups", "fp32_groups_flat"),
    "FP16_UnfusedOptimizer": ("fp16_groups", "fp32_groups"),
}
"""DeepSpeed's optimizers, and where each keeps the model's parameters by group, their float32 masters, and what else is read."""


class _Part(NamedTuple):
    """What this rank's optimizer has of a parameter.

    Attributes:
        master: The optimizer's tensor that it lies in.
        shape: Of the part.
        start: Where in the flat master it begins; ``None`` when it is all of it.
        offset: Where in the flat parameter it begins; ``None`` when it is all of it.
    """

    master: Tensor
    shape: tuple[int, ...]
    start: int | None = None
    offset: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The part in a tensor that is laid out like the master."""
        return tensor if self.start is None else tensor.narrow(0, self.start, math.prod(self.shape)).view(self.shape)


class _Group(NamedTuple):
    """Where a parameter is.

    Attributes:
        wrapper: One of DeepSpeed's optimizers.
        number: Of the group in it.
        place: In the group.
        before: Elements of the parameters before it in the group.
    """

    wrapper: weakref.ref[Any]
    number: int
    place: int
    before: int


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
                before = 0
                for place, parameter in enumerate(group):
                    self._groups[id(parameter)] = _Group(weakref.ref(wrapper), number, place, before)
                    before += parameter.numel()
        return "" if wrappers else NOT_IN_USE

    def weight(self, parameter: Tensor) -> Tensor | None:
        """This rank's part of the float32 master; of a parameter that is not trained, what this rank has of it."""
        part = self._part(parameter)
        return None if part is None else part.of(part.master)

    def reduced_gradient(self, parameter: Tensor) -> Tensor | None:
        """This rank's part, unscaled and clipped, while the optimizer steps; one that is offloaded exists always."""
        part = self._part(parameter)
        if id(parameter) not in self._groups or part is None or part.master.grad is None:
            return None
        return part.of(part.master.grad) if part.start is None or self._steps_now(parameter, part.master) else None

    def _steps_now(self, parameter: Tensor, master: Tensor) -> bool:
        """Whether the optimizer has been given this master: the flat ones it gets one after the other."""
        wrapper = self._groups[id(parameter)].wrapper()
        groups: list[dict[str, Any]] = [] if wrapper is None else wrapper.optimizer.param_groups
        return any(master is tensor for group in groups for tensor in group["params"])

    def state(self, optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of what the optimizer has for the master."""
        part = self._part(parameter)
        for key, value in super().state(optimizer, part.master) if part is not None else ():
            if part is not None and (part.start is None or value.shape == part.master.shape):
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
        whole = {"whole_shape": list(getattr(parameter, "ds_shape", parameter.shape))}
        if part is None:
            return {"shape": [0], **whole}
        return {} if part.offset is None else {"shape": list(part.shape), **whole, "flat_offset": part.offset}

    def describe(self, root: Module) -> dict[str, Any]:
        """See :meth:`msmon.backends.base.Adapter.describe`; and how ZeRO spreads the model."""
        wrappers = {id(group.wrapper()) for group in self._groups.values()}
        found = [engine for engine in engines() if id(_wrapper_in(engine)) in wrappers]
        return {
            **super().describe(root),
            "deepspeed": sys.modules["deepspeed"].__version__,
            "zero_stage": [engine.zero_optimization_stage() for engine in found],
        }

    def _part(self, parameter: Tensor) -> _Part | None:
        group = self._groups.get(id(parameter))
        if group is None:
            return _part_that_is_not_trained(parameter)
        wrapper = group.wrapper()
        if wrapper is None:
            return None
        masters = getattr(wrapper, _kept_in(wrapper)[1])
        if hasattr(parameter, "ds_id"):
            return _part_of_stage_3(wrapper, masters[group.number], parameter)
        if not hasattr(parameter, "_hp_mapping"):
            master, shape = masters[group.number], tuple(parameter.shape)
            return _Part(master, shape, group.before) if torch.is_tensor(master) else _Part(master[group.place], shape)
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


def _part_that_is_not_trained(parameter: Any) -> _Part | None:  # noqa: ANN401 - a Parameter, with what DeepSpeed adds to it
    """It has no master: stage 3 keeps a part of it on each rank, others keep it whole."""
    kept = getattr(parameter, "ds_tensor", None)
    if kept is None:
        return _Part(parameter, tuple(parameter.shape))
    offset = kept.numel() * torch.distributed.get_rank(parameter.ds_process_group)
    here = min(kept.numel(), parameter.ds_numel - offset)
    return _Part(kept.flatten(), (here,), 0, offset) if here > 0 else None


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
    wrapper = _wrapper_in(engine)
    if wrapper is None or _not_understood(wrapper):
        return None
    return StepUnderWay(wrapper.optimizer, float(getattr(wrapper, "loss_scale", None) or 1))


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


def engines() -> list[Any]:
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
    if discovery.notes_modules:
        return
    candidates = models if any(kind in type(model).__mro__ for model in models) else gc.get_objects()
    for candidate in candidates:
        if kind in type(candidate).__mro__:
            discovery.note_module(candidate)


def _wrapper_in(engine: Any) -> Any:  # noqa: ANN401 - a DeepSpeedEngine, and one of DeepSpeed's optimizers
    """What the engine steps with; ``None`` when that is torch's own, whose steps are the training steps, or not there yet."""
    wrapper = vars(engine).get("optimizer")
    return None if isinstance(wrapper, torch.optim.Optimizer) else wrapper


def _wrapper_of(optimizer: Optimizer) -> Any:  # noqa: ANN401 - as above
    wrappers = (_wrapper_in(engine) for engine in engines())
    return next((w for w in wrappers if w is not None and getattr(w, "optimizer", None) is optimizer), None)


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
