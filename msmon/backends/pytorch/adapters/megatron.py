"""Megatron-core: gradients are added up in buffers of its own, and its optimizers put their own tensors into torch's.

Autograd leaves the gradient of one micro-batch on a parameter, and Megatron adds it to ``main_grad``, a view of a buffer,
right after the parameter's own hooks have run. ``start_grad_sync`` hands the sum of all micro-batches to communication. The
optimizer inside holds float32 copies of parameters of 16 bits, and under ``DistributedOptimizer`` this rank's stretch of
each; the model gets them after its step. So the step of Megatron's optimizer is the training step.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from msmon.backends.pytorch.adapters import pipelining
from msmon.backends.pytorch.adapters.plain import NOT_IN_USE, PlainAdapter
from msmon.backends.pytorch.adapters.steps import StepUnderWay
from msmon.runtime.references import IdentityTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from msmon.backends.base import Tell
    from msmon.backends.pytorch.adapters.steps import StepBegins
    from msmon.runtime.ledger import Ledger

_BUFFERS = "megatron.core.distributed.param_and_grad_buffer"
_DATA_PARALLEL = "megatron.core.distributed.distributed_data_parallel"
_OPTIMIZERS = "megatron.core.optimizer.optimizer"
_DISTRIBUTED_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_SYNC = "start_grad_sync"
_BUCKETS = ("_ParamAndGradBucketGroup", "Bucket")  # from 0.9.0 on, and before

_PAIRS = {
    "DistributedOptimizer": (
        ("model_fp32_groups", "shard_fp32_groups"),
        ("model_float16_groups", "shard_fp32_from_float16_groups"),
        ("model_float16_groups", "shard_float16_groups"),
    ),
    "Float16OptimizerWithFloat16Params": (
        ("fp32_from_fp32_groups", "fp32_from_fp32_groups"),
        ("float16_groups", "fp32_from_float16_groups"),
    ),
    "FP32Optimizer": (),
}
"""Megatron's optimizers, and where each keeps parameters of the model beside the tensors that torch's optimizer holds.

Of several for one parameter the first is what counts: with ``use_precision_aware_optimizer`` the float32 copies are None.
"""


class _Held(NamedTuple):
    """What torch's optimizer holds of a parameter.

    Attributes:
        tensor: The parameter itself, a copy, or this rank's stretch of either.
        offset: Where in the flat parameter that begins; ``None`` when it is all of it.
    """

    tensor: Tensor
    offset: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """The same part of a tensor that is laid out like the parameter."""
        return tensor if self.offset is None else tensor.view(-1).narrow(0, self.offset, self.tensor.numel())


_wrappers: list[weakref.ref[Any]] = []
"""Megatron's optimizers in this process, latest last; only those around one of torch's."""

_held: IdentityTable[Any, dict[int, _Held]] = IdentityTable()
"""By wrapper, and the identity of the model's parameter."""

_under_way: set[int] = set()
"""Identities of the wrappers that step: some step inside themselves, by way of their base class."""

_used_scale: IdentityTable[Any, Tensor | None] = IdentityTable()
"""By wrapper: the loss scale of the gradients at hand, which is another one before the step begins."""


class MegatronAdapter(PlainAdapter):
    """See :class:`msmon.backends.base.Adapter`."""

    name = "megatron"
    keeps_gradients = False

    def __init__(self, *, main_grad: bool = True) -> None:
        super().__init__(main_grad=main_grad)
        self._places: dict[int, dict[str, Any]] = {}

    def applies(self, models: Sequence[Module], optimizers: Sequence[Optimizer]) -> str:
        """Parameters with a ``main_grad`` in one of Megatron's buffers, or an optimizer inside one of Megatron's."""
        wrappers = [wrapper for optimizer in optimizers if (wrapper := _wrapper_of(optimizer)) is not None]
        buffered = _BUFFERS in sys.modules and any(map(_in_buffer, (p for model in models for p in model.parameters())))
        if not wrappers and not buffered:
            return NOT_IN_USE
        if _bucket_class() is None:
            return f"megatron-core {_version()} has no {_BUFFERS}.{_BUCKETS[0]}.{_SYNC}"
        return next((reason for wrapper in wrappers if (reason := _not_understood(wrapper))), "")

    def tell_unreduced(self, ledger: Ledger, tell: Tell[Tensor]) -> None:
        """See :meth:`msmon.backends.base.Adapter.tell_unreduced`."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - Megatron's own
                tell(functools.partial(_sums, self))
                return original(self, *args, **kwargs)

            return start_grad_sync

        ledger.patch(_bucket_class(), _SYNC, wrap)

    def told_at_the_end(self, parameter: Tensor) -> bool:
        """When communication starts, or would if there were other ranks."""
        return _in_buffer(parameter)

    def unreduced_gradient(self, parameter: Tensor) -> Tensor | None:
        """The sum so far: what is in the buffer, and what Megatron is about to add to it."""
        if not _in_buffer(parameter):
            return super().unreduced_gradient(parameter)
        added = getattr(parameter, "grad_added_to_main_grad", False) and not getattr(parameter, "zero_out_wgrad", False)
        main_grad: Tensor = parameter.main_grad  # type: ignore[attr-defined]  # Megatron has put it there
        return main_grad if added or parameter.grad is None else main_grad.clone().add_(parameter.grad)

    def weight(self, parameter: Tensor) -> Tensor | None:
        """The model's own parameter, or the stretch of it that this rank's optimizer updates."""
        held = _held_of(parameter)
        if held is None:
            return None if _is_spread(parameter) else super().weight(parameter)
        return held.of(parameter.detach())

    def reduced_gradient(self, parameter: Tensor) -> Tensor | None:
        """What is on the optimizer's tensor, unscaled and clipped; outside its step, what is in the buffer."""
        held = _held_of(parameter)
        if held is None:
            return None if _is_spread(parameter) else super().reduced_gradient(parameter)
        own = getattr(held.tensor, "decoupled_grad", None)  # with use_precision_aware_optimizer
        if own is None and held.tensor.is_leaf:  # one that is not is a float32 parameter's: it uses the buffer itself
            own = held.tensor.grad
        if own is not None or not _in_buffer(parameter):
            return own
        return held.of(parameter.main_grad)  # type: ignore[attr-defined]  # Megatron has put it there

    def state(self, optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`msmon.backends.base.Adapter.state`."""
        held = _held_of(parameter)
        yield from super().state(optimizer, parameter if held is None else held.tensor)

    def steps_taken(self, optimizer: Optimizer, parameter: Tensor) -> Any:  # noqa: ANN401 - as the optimizer keeps it
        """See :meth:`msmon.backends.base.Adapter.steps_taken`."""
        held = _held_of(parameter)
        return super().steps_taken(optimizer, parameter if held is None else held.tensor)

    def param_groups(self, optimizer: Optimizer) -> Mapping[int, dict[str, Any]]:
        """See :meth:`msmon.backends.base.Adapter.param_groups`."""
        groups = super().param_groups(optimizer)
        wrapper = _wrapper_of(optimizer)
        kept = {} if wrapper is None else _held_in(wrapper)
        return {**groups, **{key: groups[id(held.tensor)] for key, held in kept.items() if id(held.tensor) in groups}}

    def place(self, parameter: Tensor) -> dict[str, Any]:
        """Where this rank's stretch begins, and which part of the whole tensor parallelism has left here."""
        if id(parameter) not in self._places:  # what knows it may be gone before the model
            self._places[id(parameter)] = self._find_place(parameter)
        return self._places[id(parameter)]

    @staticmethod
    def _find_place(parameter: Tensor) -> dict[str, Any]:
        here = _across_tensor_ranks(parameter)
        if not _is_spread(parameter):
            return here
        whole = here.get("whole_shape", list(parameter.shape))
        held = _held_of(parameter)
        if held is None or held.offset is None:
            return {"shape": [0], "whole_shape": whole}
        place = {"shape": [held.tensor.numel()], "whole_shape": whole}
        start = here.get("offset") if here else [0]
        if start is None or any(start[1:]) or whole[1:] != list(parameter.shape[1:]):
            return place  # a stretch of some columns lies in many places of the whole
        return {**place, "flat_offset": start[0] * math.prod(whole[1:]) + held.offset}

    def describe(self, root: Module) -> dict[str, Any]:
        """See :meth:`msmon.backends.base.Adapter.describe`; and the version."""
        return {**super().describe(root), "megatron_core": _version()}


def _in_buffer(parameter: Tensor) -> bool:
    return isinstance(getattr(parameter, "main_grad", None), torch.Tensor)


def _sums(bucket: Any) -> Iterator[tuple[Tensor, Tensor]]:  # noqa: ANN401 - a group of buckets, or before 0.9.0 a bucket
    """The sums in the buckets, unless their communication has begun before."""
    if getattr(bucket, "grad_reduce_handle", None) is None and getattr(bucket, "communication_handle", None) is None:
        for each in getattr(bucket, "buckets", [bucket]):
            for parameter in each.params_list:
                yield parameter, parameter.main_grad


def trained_by(optimizer: Optimizer) -> list[Tensor] | None:
    """The model's parameters that an optimizer trains, if Megatron has put other tensors into it."""
    wrapper = _wrapper_of(optimizer)
    if wrapper is None or _not_understood(wrapper) or not _pairs_of(wrapper):
        return None
    if _has_stretches(wrapper):
        return [parameter for buffer in wrapper.buffers for parameter in buffer.param_index_map]
    names = [name for name, _ in _pairs_of(wrapper)]
    return [parameter for name in names for group in getattr(wrapper, name) for parameter in group]


def follow_optimizers(
    ledger: Ledger, step_begins: StepBegins, wrap_zero_grad: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> bool:
    """Patch the optimizers of this process, and what zeroes gradients, if it has imported them.

    Args:
        ledger: Takes the patches.
        step_begins: Told that one of Megatron's optimizers steps.
        wrap_zero_grad: Wraps what zeroes the gradients of a module.

    Returns:
        Whether it has.
    """
    module = sys.modules.get(_OPTIMIZERS)
    base = getattr(module, "MegatronOptimizer", None)
    if base is None:
        return False
    made_before = (found for found in gc.get_objects() if base in type(found).__mro__)
    _wrappers[:] = [weakref.ref(found) for found in made_before if "optimizer" in vars(found)]
    ledger.patch(base, "__init__", _wrap_constructor)
    mixed = getattr(module, "MixedPrecisionOptimizer", None)
    distributed = getattr(sys.modules.get(_DISTRIBUTED_OPTIMIZER), "DistributedOptimizer", None)
    for kind in (mixed, distributed, getattr(module, "FP32Optimizer", None)):
        name = "step_with_ready_grads" if hasattr(kind, "step_with_ready_grads") else "step"  # since 0.8.0, and before
        if name in vars(kind or object):
            ledger.patch(kind, name, functools.partial(_wrap_step, step_begins=step_begins))
    if hasattr(mixed, "prepare_grads"):
        ledger.patch(mixed, "prepare_grads", functools.partial(_wrap_prepare, step_begins=step_begins))
    parallel = getattr(sys.modules.get(_DATA_PARALLEL), "DistributedDataParallel", None)
    if hasattr(parallel, "zero_grad_buffer"):
        ledger.patch(parallel, "zero_grad_buffer", wrap_zero_grad)
    return True


def follow_schedules(ledger: Ledger) -> bool:
    """Patch the schedules of this process, if it has imported them, to know which micro-batch they work on.

    Chunks take turns, and several forwards may come before the first backward pass.

    Returns:
        Whether it has.
    """
    schedules = sys.modules.get(_SCHEDULES)
    if not hasattr(schedules, "forward_step") or not hasattr(schedules, "backward_step"):
        return False
    begun: dict[int, int] = {}  # by the identity of a chunk: the micro-batch that comes next
    made: dict[int, int] = {}  # by the identity of an output: the micro-batch that it came of

    def wrap_forward(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_step(step: Any, data: Any, model: Any, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - Megatron's own
            current = begun.get(id(model), 0)
            begun[id(model)] = current + 1 if current + 1 < num_microbatches else 0
            with pipelining.working_on(current):
                result = original(step, data, model, num_microbatches, *args, **kwargs)
            made[_identity(result)] = current
            return result

        return forward_step

    def wrap_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def backward_step(given: Any, output: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - Megatron's own
            with pipelining.working_on(made.pop(_identity(output), None)):
                return original(given, output, *args, **kwargs)

        return backward_step

    ledger.patch(schedules, "forward_step", wrap_forward)
    ledger.patch(schedules, "backward_step", wrap_backward)
    return True


def _identity(output: Any) -> int:  # noqa: ANN401 - a tensor, a list with one, or since 0.7.0 a tuple of that and more
    output = output[0] if isinstance(output, tuple) else output
    return id(output[0] if isinstance(output, list) and output else output)


def _wrap_constructor(original: Callable[..., Any]) -> Callable[..., Any]:
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passes on whatever the class takes
        original(self, *args, **kwargs)
        _wrappers.append(weakref.ref(self))

    return construct


def _wrap_step(original: Callable[..., Any], step_begins: StepBegins) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - Megatron's own
        if id(self) in _under_way:
            return original(self, *args, **kwargs)
        _under_way.add(id(self))
        ended, complete = step_begins(functools.partial(_step_of, self)), False
        try:
            result = original(self, *args, **kwargs)
            complete = True
            return result
        finally:
            _under_way.discard(id(self))
            ended(complete)

    return step


def _wrap_prepare(original: Callable[..., Any], step_begins: StepBegins) -> Callable[..., Any]:
    """Gradients are unscaled here; when they are not finite, Megatron goes on without a step."""

    def prepare_grads(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - Megatron's own
        _used_scale[self] = _loss_scale(self)
        overflow = original(self, *args, **kwargs)
        if overflow:
            step_begins(functools.partial(_step_of, self))(True)  # noqa: FBT003 - the only thing it is told
        return overflow

    return prepare_grads


def _step_of(wrapper: Any) -> StepUnderWay | None:  # noqa: ANN401 - a MegatronOptimizer
    if wrapper.optimizer is None or _not_understood(wrapper):
        return None  # it trains nothing, or its steps are those of the optimizer inside
    scale = _used_scale.pop(wrapper, _loss_scale(wrapper))
    return StepUnderWay(wrapper.optimizer, 1 if scale is None else scale)


def _loss_scale(wrapper: Any) -> Tensor | None:  # noqa: ANN401 - as above
    return getattr(getattr(wrapper, "grad_scaler", None), "_scale", None)


def _wrapper_of(optimizer: Optimizer) -> Any:  # noqa: ANN401 - as above
    return next((each for each in _living() if vars(each).get("optimizer") is optimizer), None)


def _living() -> Iterator[Any]:
    """Latest first."""
    return (wrapper for reference in reversed(_wrappers) if (wrapper := reference()) is not None)


def _held_of(parameter: Tensor) -> _Held | None:
    found = (_held_in(wrapper).get(id(parameter)) for wrapper in _living())
    return next((held for held in found if held is not None), None)


def _held_in(wrapper: Any) -> dict[int, _Held]:  # noqa: ANN401 - as above
    """By the identity of the model's parameter. The pairs of a wrapper are made with it, and stay."""
    known = _held.get(wrapper)
    if known is None:
        known = {}
        if _not_understood(wrapper):
            return known
        for names in _pairs_of(wrapper):
            for parameters, tensors in zip(*(getattr(wrapper, name) for name in names), strict=True):
                for parameter, tensor in zip(parameters, tensors, strict=True):
                    if tensor is not None and id(parameter) not in known:
                        known[id(parameter)] = _Held(tensor, _offset(wrapper, parameter))
        _held[wrapper] = known
    return known


def _offset(wrapper: Any, parameter: Tensor) -> int | None:  # noqa: ANN401 - as above
    if not _has_stretches(wrapper):
        return None
    return int(wrapper._get_model_param_range_map(parameter)["param"].start)  # noqa: SLF001 - Megatron has no public place


def _has_stretches(wrapper: Any) -> bool:  # noqa: ANN401 - as above
    return _kind(wrapper) == "DistributedOptimizer"


def _is_spread(parameter: Tensor) -> bool:
    """Whether a ``DistributedOptimizer`` trains a parameter, though maybe nothing of it on this rank."""
    return any(
        parameter in buffer.param_index_map
        for wrapper in _living()
        if _has_stretches(wrapper)
        for buffer in getattr(wrapper, "buffers", ())
    )


def _kind(wrapper: Any) -> str:  # noqa: ANN401 - as above
    return next((base.__name__ for base in type(wrapper).__mro__ if base.__name__ in _PAIRS), "")


def _pairs_of(wrapper: Any) -> tuple[tuple[str, str], ...]:  # noqa: ANN401 - as above
    return _PAIRS.get(_kind(wrapper), ())


def _not_understood(wrapper: Any) -> str:  # noqa: ANN401 - as above
    """Why the parameters behind an optimizer's tensors are not known; empty when they are."""
    name = type(wrapper).__name__
    if not _kind(wrapper):
        return f"where {name} of megatron-core {_version()} keeps its parameters is not known"
    needed = [name for pair in _pairs_of(wrapper) for name in pair]
    needed += ["buffers", "_get_model_param_range_map"] if _has_stretches(wrapper) else []
    missing = [attribute for attribute in needed if not hasattr(wrapper, attribute)]
    return f"{name} of megatron-core {_version()} has no {missing[0]}" if missing else ""


def _bucket_class() -> type | None:
    module = sys.modules.get(_BUFFERS)
    found = (getattr(module, name, None) for name in _BUCKETS)
    return next((kind for kind in found if hasattr(kind, _SYNC)), None)


def _version() -> str:
    return str(getattr(sys.modules.get("megatron.core"), "__version__", "of an unknown version"))


def _across_tensor_ranks(parameter: Any) -> dict[str, Any]:  # noqa: ANN401 - a Parameter, with what Megatron adds to it
    """Shape of the whole, and where this rank's part begins; empty for what is equal on all ranks.

    Experts, and layers of pipeline stages, are others on other ranks under the same names: their place is not told.
    """
    groups: Any = sys.modules.get("megatron.core.parallel_state")
    if groups is None or not groups.model_parallel_is_initialized():
        return {}
    whole, offset = list(parameter.shape), [0] * parameter.dim()
    if groups.get_pipeline_model_parallel_world_size() > 1 or not getattr(parameter, "allreduce", True):
        return {"whole_shape": whole}
    size = groups.get_tensor_model_parallel_world_size()
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return {}
    whole[parameter.partition_dim] *= size
    offset[parameter.partition_dim] = groups.get_tensor_model_parallel_rank() * parameter.shape[parameter.partition_dim]
    return {"whole_shape": whole, **({"offset": offset} if getattr(parameter, "partition_stride", 1) == 1 else {})}
