"""What an optimizer does with gradients: whether they agree with their first moment, and Adam's update itself."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from msmon import log
from msmon.backends.base import UnsupportedTensorError
from msmon.backends.pytorch.devices import accumulation_dtype
from msmon.backends.pytorch.histogram import Histogram
from msmon.backends.pytorch.kernels.layouts import TORCHS_OWN, of_torchs_own_class
from msmon.backends.pytorch.recorder import describe
from msmon.record.table import HISTOGRAM
from msmon.stats.histogram import BINS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from msmon.backends.pytorch.adapters.plain import PlainAdapter
    from msmon.backends.pytorch.recorder import StepRecorder
    from msmon.backends.pytorch.taps.reduction import Reduction
    from msmon.backends.pytorch.watched import WatchedParameter

DIRECTION = "other"
UPDATE = "update"
RATIO = "update_ratio"

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")

_ADAM = frozenset({"Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam", "NpuFusedAdam", "NpuFusedAdamW"})
"""Classes, and their subclasses, whose update is Adam's. Others keep the same state and do something else with it."""


class DirectionTap:
    """Share of elements whose gradient and first moment agree in sign: 1 before a parameter's first step."""

    part = "recording of directions of gradients"

    def __init__(self, reduction: Reduction, adapter: PlainAdapter) -> None:
        self._reduction = reduction
        self._adapter = adapter
        self._seen: set[int] = set()

    def read(
        self, recorder: StepRecorder, optimizers: Sequence[Optimizer], parameters: Sequence[WatchedParameter]
    ) -> None:
        """Add a row a parameter that has a gradient.

        Args:
            recorder: The step under way.
            optimizers: The one about to step and, where an optimizer wraps others, those it wraps.
            parameters: Its watched parameters.
        """
        named: list[tuple[WatchedParameter, Tensor]] = []
        for watched in parameters:
            gradient = self._adapter.reduced_gradient(watched.parameter)
            if gradient is None:
                continue
            state = _state(self._adapter, optimizers, watched.parameter)
            moment = next((state[key] for key in _FIRST_MOMENTS if key in state), None)
            if moment is not None:
                agreement = functools.partial(direction, gradient, moment)
                share = self._reduction.attempt(watched.name, DIRECTION, agreement)
                if share is not None:
                    named.append((watched, share))
            elif id(watched.parameter) not in self._seen:
                named.append((watched, torch.ones((), dtype=torch.float32, device=gradient.device)))
            else:
                log.say(
                    f"{type(optimizers[0]).__name__} keeps no first moment: mg_direction records nothing for it",
                    once=f"direction:{type(optimizers[0]).__name__}",
                )
            self._seen.add(id(watched.parameter))
        self._reduction.add(recorder, DIRECTION, named)


@torch.no_grad()
def direction(gradient: Tensor, moment: Tensor) -> Tensor:
    r"""Share of elements that agree in sign, :math:`\frac12 + \frac1{2n} \sum_i \mathrm{sign}(g_i) \mathrm{sign}(m_i)`.

    An element that is zero or NaN in either counts half. Source: own, after the values of the original.

    Returns:
        0-d float32.
    """
    if gradient.shape != moment.shape:
        raise UnsupportedTensorError("its first moment has another shape")
    gradient, moment = _dense(gradient), _dense(moment)
    if gradient.dtype != moment.dtype:
        gradient = gradient.to(moment.dtype)
    agreement = (gradient.sign() * moment.sign()).mean(dtype=accumulation_dtype(moment.device))
    return (agreement / 2 + 0.5).float()


class UpdateTap:
    """Adam's update, and its ratio to the weight, right after the step that made it.

    Nothing is kept from before the step: the state holds what the update was made of. The update of one parameter
    exists at a time.

    Args:
        reduction: Statistics.
        adapter: Where state is.
        histograms: Whether elements are counted by bin too.
    """

    part = "recording of updates"

    def __init__(self, reduction: Reduction, adapter: PlainAdapter, *, histograms: bool) -> None:
        self._reduction = reduction
        self._adapter = adapter
        self._histogram = Histogram() if histograms else None
        self._with_gradient: set[int] = set()

    def note_gradients(self, parameters: Sequence[WatchedParameter]) -> None:
        """Remember which parameters the step is going to update: the state of the others tells of an earlier one."""
        self._with_gradient.update(
            id(watched.parameter)
            for watched in parameters
            if self._adapter.reduced_gradient(watched.parameter) is not None
        )

    def forget_gradients(self) -> None:
        """The step is not taken."""
        self._with_gradient.clear()

    def read(
        self, recorder: StepRecorder, optimizers: Sequence[Optimizer], parameters: Sequence[WatchedParameter]
    ) -> None:
        """Add rows of the updates just applied.

        Args:
            recorder: The step under way.
            optimizers: The one that has stepped and, where an optimizer wraps others, those it wraps.
            parameters: Its watched parameters.
        """
        adams = [optimizer for optimizer in optimizers if _is_adam(optimizer)]
        if adams[:1] == [optimizers[0]]:
            adams = adams[:1]
        if not adams:
            name = type(optimizers[0]).__name__
            log.say(f"{name} is no Adam: ur_distribution records nothing for it", once=f"update:{name}")
            return
        groups = {key: (adam, group) for adam in adams for key, group in self._adapter.param_groups(adam).items()}
        for watched in parameters:
            adam, group = groups.get(id(watched.parameter), (None, {}))
            if adam is not None and id(watched.parameter) in self._with_gradient:
                self._reduction.attempt(
                    watched.name, UPDATE, functools.partial(self._read_one, recorder, adam, group, watched)
                )
        self._with_gradient.clear()

    def _read_one(
        self, recorder: StepRecorder, adam: Optimizer, group: Mapping[str, Any], watched: WatchedParameter
    ) -> None:
        state = dict(self._adapter.state(adam, watched.parameter))
        moments = [state[key] for key in _MOMENTS if key in state]
        if any(type(moment) not in TORCHS_OWN for moment in moments):
            raise UnsupportedTensorError(f"{type(moments[0]).__name__} holds rounded moments, not those of the update")
        steps = self._adapter.steps_taken(adam, watched.parameter)
        update = adam_update(state if steps is None else {**state, "step": steps}, group)
        if update is not None:
            self._add(recorder, watched, update)

    def _add(self, recorder: StepRecorder, watched: WatchedParameter, update: Tensor) -> None:
        weight = self._adapter.weight(watched.parameter)
        if weight is None:
            return
        with torch.no_grad():
            weight = of_torchs_own_class(weight).detach()
        if weight.is_complex():
            weight = torch.view_as_real(weight)
        if update.shape != weight.shape:
            raise UnsupportedTensorError("its moments have another shape than the weight")
        self._add_one(recorder, UPDATE, watched, update)
        self._add_one(recorder, RATIO, watched, update.div_(weight))

    def _add_one(self, recorder: StepRecorder, kind: str, watched: WatchedParameter, values: Tensor) -> None:
        self._reduction.add(recorder, kind, [(watched, values)])
        if self._histogram is not None:
            row = describe(kind + HISTOGRAM, watched.name, watched.stage, values)
            recorder.add([row._replace(features=BINS)], [self._histogram.counts(values)])


@torch.no_grad()
def adam_update(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor | None:
    r"""Adam's update :math:`\hat m / (\sqrt{\hat v} + \epsilon)`, before the learning rate.

    :math:`\hat m = m / (1 - \beta_1^t)`, :math:`\hat v = v / (1 - \beta_2^t)`; with ``amsgrad`` :math:`v` is the largest so
    far. Weight decay of AdamW is no part of it; that of Adam has gone into the gradient. With ``maximize`` the gradient
    has had its sign changed. Source: D. Kingma, J. Ba, "Adam", 2015, algorithm 1; S. Reddi et al., "On the convergence of
    Adam and beyond", 2018.

    Args:
        state: The parameter's, after the step.
        group: Its param group: ``betas``, ``eps``, and ``step`` where the state has none.

    Returns:
        float32 (float64 of float64 state), of a complex parameter its real and imaginary parts; ``None`` before the
        first step.
    """
    first, second = state.get("exp_avg"), state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
    if first is None or second is None or first.shape != second.shape:
        return None
    wide = torch.float64 if first.dtype in {torch.float64, torch.complex128} else torch.float32
    first, second = (torch.view_as_real(part) if part.is_complex() else part for part in (first, second))
    denominator = second.to(wide, copy=True).div_(_correction(state, group, 1)).sqrt_().add_(group["eps"])
    return first.to(wide, copy=True).div_(_correction(state, group, 0)).div_(denominator)


def _correction(state: Mapping[str, Any], group: Mapping[str, Any], number: int) -> Tensor | float:
    """``1 - beta ** step``, on the device of the step where that is a tensor: nothing waits for it."""
    step = state.get("step", group.get("step"))
    if step is None or not group.get("bias_correction", True):
        return 1.0
    beta = group["betas"][number]
    if isinstance(step, torch.Tensor):
        step = step.to(accumulation_dtype(step.device))
    return 1 - beta**step  # type: ignore[no-any-return]  # a number or a tensor, as the optimizer keeps it


def _is_adam(optimizer: Optimizer) -> bool:
    return any(cls.__name__ in _ADAM for cls in type(optimizer).__mro__)


def _state(adapter: PlainAdapter, optimizers: Sequence[Optimizer], parameter: Tensor) -> dict[str, Tensor]:
    """State tensors of a parameter, of the first optimizer that has any."""
    return next((found for optimizer in optimizers if (found := dict(adapter.state(optimizer, parameter)))), {})


def _dense(tensor: Tensor) -> Tensor:
    tensor = of_torchs_own_class(tensor).detach()
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
