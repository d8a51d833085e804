"""Training loops of every shape, one after the other in one process, each on a model class of its own."""

from __future__ import annotations

import copy
import gc
import os
import sys
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint
from truth import Truth, batch, fingerprint, net, run_scenarios, scenario, train


def loss_of(model: Any, step: int) -> torch.Tensor:
    return model(batch(step)).pow(2).mean()


@scenario
def accumulation(truth: Truth) -> None:
    """Three micro-batches a step; the last window has one."""
    model = net("Accumulation")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step, window in enumerate([3, 3, 1]):
        for micro in range(window):
            (loss_of(model, 10 * step + micro) / 3).backward()
        truth.before(step, model, optimizer, "Accumulation.")
        optimizer.step()
        truth.after(step, model, "Accumulation.", micro_steps=window)
        optimizer.zero_grad()


@scenario
def zeroed_in_place(truth: Truth) -> None:
    """``set_to_none=False``, and gradients of an earlier pass thrown away by ``model.zero_grad``."""
    model = net("ZeroedInPlace")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss_of(model, 100 + step).backward()
        model.zero_grad() if step == 1 else optimizer.zero_grad(set_to_none=False)
        loss_of(model, step).backward()
        truth.before(step, model, optimizer, "ZeroedInPlace.")
        optimizer.step()
        truth.after(step, model, "ZeroedInPlace.")
        optimizer.zero_grad(set_to_none=False)


@scenario
def closures(truth: Truth) -> None:
    """A closure given by position, by keyword, and none in both ways."""
    model = net("Closures")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        truth.gradients("grad_unreduced", step, model, "Closures.")
        truth.gradients("grad_reduced", step, model, "Closures.")
        return loss

    losses = []
    for step in range(4):
        truth.weights("param_origin", step, model, "Closures.")
        truth.state(step, model, optimizer, "Closures.")
        if step in {1, 3}:
            closure()
        call: Any = [lambda: optimizer.step(closure), lambda: optimizer.step(None)]
        call += [lambda: optimizer.step(closure=closure), lambda: optimizer.step(closure=None)]
        losses.append(call[step]())
        truth.after(step, model, "Closures.")
    assert losses[1] is None
    assert losses[0] > losses[2] > 0


@scenario
def line_search(truth: Truth) -> int:
    """LBFGS: gradients exist only inside the closure; what is recorded is its first evaluation."""
    model = net("LineSearch").double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    evaluations = 0

    def closure() -> torch.Tensor:
        nonlocal evaluations
        optimizer.zero_grad()
        loss = model(batch(0).double()).pow(2).mean()
        loss.backward()
        evaluations += 1
        if first[0]:
            first[0] = False
            truth.gradients("grad_unreduced", step, model, "LineSearch.")
            truth.gradients("grad_reduced", step, model, "LineSearch.")
        return loss

    for step in range(2):
        first = [True]
        truth.weights("param_origin", step, model, "LineSearch.")
        truth.state(step, model, optimizer, "LineSearch.")
        optimizer.step(closure)
        truth.after(step, model, "LineSearch.")
    return evaluations


def _scaled(truth: Truth, label: str, optimizer_class: Any, **arguments: Any) -> None:
    model = net(label)
    label += "."
    optimizer = optimizer_class(model.parameters(), lr=0.1, **arguments)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        inputs = batch(step) * (float("inf") if step == 1 else 1.0)
        scaler.scale(model(inputs).pow(2).mean()).backward()
        scale = scaler.get_scale()
        truth.gradients("grad_unreduced", step, model, label)
        truth.weights("param_origin", step, model, label)
        truth.state(step, model, optimizer, label)
        for name, parameter in model.named_parameters():
            truth.note("grad_reduced", step, label + name, parameter.grad * (1 / scale))
        scaler.step(optimizer)
        scaler.update()
        truth.after(step, model, label, skipped=int(step == 1), grad_scale=scale)


@scenario
def grad_scaler(truth: Truth) -> None:
    """A skipped step is a step; gradients that the optimizer gets are unscaled."""
    _scaled(truth, "GradScaler_", torch.optim.SGD, momentum=0.9)


@scenario
def grad_scaler_fused(truth: Truth) -> None:
    """A fused optimizer unscales by itself, and skips by itself."""
    _scaled(truth, "GradScalerFused", torch.optim.AdamW, fused=True)


@scenario
def gradient_of_scaled_loss(truth: Truth) -> None:
    """B10: Linear(2, 1) on ones, scale 65536: the gradient is 1.414214."""
    for fused in (False, True):
        model = type(f"Scaled{fused}", (nn.Linear,), {})(2, 1, bias=False)
        optimizer = torch.optim.Adam(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)


@scenario
def schedulers(truth: Truth) -> list[str]:
    """An LR scheduler made before the first step and one made in the middle: torch has nothing to warn of."""
    model = net("Schedulers")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        for step in range(3):
            train(truth, model, optimizer, [step])
            scheduler.step()
            if step == 0:
                scheduler = StepLR(optimizer, 1, gamma=0.5)
    return [str(warning.message) for warning in caught]


@scenario
def adversaries(truth: Truth) -> None:
    """A GAN: two models, two optimizers, two critic steps for one of the generator; gradients cross over."""
    generator, critic = type("Generator", (nn.Linear,), {})(4, 4), net("Critic")
    one, other = torch.optim.Adam(generator.parameters(), lr=0.1), torch.optim.RMSprop(critic.parameters(), lr=0.01)
    critic_step = 0
    for step in range(2):
        for _ in range(2):
            other.zero_grad()
            (critic(batch(critic_step)) - critic(generator(batch(critic_step)).detach())).mean().backward()
            truth.before(critic_step, critic, other, "Critic.")
            other.step()
            truth.after(critic_step, critic, "Critic.")
            critic_step += 1
        one.zero_grad()
        critic(generator(batch(step))).mean().backward()  # leaves gradients in the critic, too
        truth.before(step, generator, one, "Generator.")
        one.step()
        truth.after(step, generator, "Generator.")
    other.zero_grad()


@scenario
def two_optimizers(truth: Truth) -> None:
    """One module, one optimizer a layer: one training step."""
    model = net("TwoOptimizers")
    one, other = (
        torch.optim.AdamW(model[0].parameters(), lr=0.1),
        torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9),
    )
    label = "TwoOptimizers."
    for step in range(3):
        one.zero_grad()
        other.zero_grad()
        loss_of(model, step).backward()
        truth.gradients("grad_unreduced", step, model, label)
        truth.gradients("grad_reduced", step, model, label)
        truth.weights("param_origin", step, model, label)
        truth.state(step, model, one, label)
        truth.state(step, model, other, label)
        one.step()
        other.step()
        truth.after(step, model, label)


@scenario
def two_rates(truth: Truth) -> None:
    """One module whose second optimizer steps every other time (delayed actor): its rows come up when it steps."""
    model = net("TwoRates")
    often, rarely = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)
    label = "TwoRates."
    for step in range(4):
        model.zero_grad()
        loss_of(model, step).backward()
        stepping = [often, rarely] if step % 2 == 0 else [often]
        for index, optimizer in zip((0, 2), stepping, strict=False):
            truth.gradients("grad_unreduced", step, model[index], f"{label}{index}.")
            truth.gradients("grad_reduced", step, model[index], f"{label}{index}.")
            truth.weights("param_origin", step, model[index], f"{label}{index}.")
            optimizer.step()
            truth.weights("param_updated", step, model[index], f"{label}{index}.")
        truth.steps.append({"model": "TwoRates", "step": step, "micro_steps": 1, "skipped": 0, "complete": 1})


def _in_backward(truth: Truth, label: str) -> Any:
    """The same training on a twin without hooks: what is true of one whose optimizers step inside the backward pass."""
    torch.manual_seed(5)
    model, twin = net(label), net(f"{label}Twin")
    twin.load_state_dict(model.state_dict())
    return model, twin


def _train_twins(truth: Truth, model: Any, twin: Any, label: str) -> None:
    for step in range(3):
        truth.weights("param_origin", step, twin, label)
        gradients = torch.autograd.grad(loss_of(twin, step), list(twin.parameters()))
        for (name, parameter), gradient in zip(twin.named_parameters(), gradients, strict=True):
            truth.note("grad_unreduced", step, label + name, gradient)
            truth.note("grad_reduced", step, label + name, gradient)
            parameter.data.add_(gradient, alpha=-0.1)
        loss_of(model, step).backward()
        truth.after(step, model, label)


@scenario
def optimizer_in_backward(truth: Truth) -> None:
    """torch's own: one optimizer a parameter, stepping as soon as its gradient is there."""
    model, twin = _in_backward(truth, "OptimizerInBackward")
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    _train_twins(truth, model, twin, "OptimizerInBackward.")


@scenario
def optimizer_in_hook(truth: Truth) -> None:
    """The recipe of torch's tutorial: a post-accumulate hook steps and throws the gradient away."""
    model, twin = _in_backward(truth, "OptimizerInHook")
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1, foreach=False) for parameter in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    _train_twins(truth, model, twin, "OptimizerInHook.")


class Sharpness(torch.optim.Optimizer):
    """SAM: an optimizer around another; the script calls its two halves, or its step with a closure."""

    def __init__(self, parameters: Any, base: Any, **arguments: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **arguments})
        self.base_optimizer = base(self.param_groups, **arguments)
        self.param_groups = self.base_optimizer.param_groups
        self.seen: Any = None

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def first_step(self) -> None:
        self.moved = [0.05 * parameter.grad for parameter in self._parameters()]
        for parameter, move in zip(self._parameters(), self.moved, strict=True):
            parameter.add_(move)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter, move in zip(self._parameters(), self.moved, strict=True):
            parameter.sub_(move)
        if self.seen is not None:
            self.seen()
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


@scenario
def sharpness(truth: Truth) -> None:
    """The outer optimizer's step is never called: the inner one's steps count."""
    model = net("Sharp")
    optimizer = Sharpness(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.first_step()
        loss_of(model, step).backward()
        optimizer.seen = lambda: truth.before(step, model, optimizer.base_optimizer, "Sharp.")  # noqa: B023 - called in this step
        optimizer.second_step()
        truth.after(step, model, "Sharp.")
        optimizer.zero_grad()


@scenario
def sharpness_step(truth: Truth) -> list[int]:
    """The outer optimizer's step calls the inner one's: one training step, not two."""
    model = net("SharpStep")
    optimizer = Sharpness(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    inner = 0

    def count(*_: Any) -> None:
        nonlocal inner
        inner += 1

    optimizer.base_optimizer.register_step_post_hook(count)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        truth.weights("param_origin", step, model, "SharpStep.")
        truth.state(step, model, optimizer.base_optimizer, "SharpStep.")

        def closure() -> None:
            loss_of(model, step).backward()  # noqa: B023 - called in this step
            for kind in ("grad_unreduced", "grad_reduced"):  # those of the first pass were thrown away
                truth.gradients(kind, step, model, "SharpStep.")  # noqa: B023 - called in this step

        optimizer.step(closure)
        truth.after(step, model, "SharpStep.")
    return [inner]


class SharpnessInState(Sharpness):
    """One that keeps what it needs in its own state."""

    @torch.no_grad()
    def first_step(self) -> None:
        super().first_step()
        for parameter, move in zip(self._parameters(), self.moved, strict=True):
            self.state[parameter]["moved"] = move


@scenario
def sharpness_state(truth: Truth) -> None:
    """State of the outer optimizer and of the one inside are both recorded."""
    model = net("SharpState")
    optimizer = SharpnessInState(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        truth.weights("param_origin", step, model, "SharpState.")
        truth.state(step, model, optimizer, "SharpState.")
        truth.state(step, model, optimizer.base_optimizer, "SharpState.")

        def closure() -> None:
            loss_of(model, step).backward()  # noqa: B023 - called in this step
            for kind in ("grad_unreduced", "grad_reduced"):
                truth.gradients(kind, step, model, "SharpState.")  # noqa: B023 - called in this step

        optimizer.step(closure)
        truth.after(step, model, "SharpState.")


class Doubled(torch.optim.SGD):
    """A subclass whose step calls the step it overrides."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@scenario
def super_step(truth: Truth) -> None:
    """``super().step()`` inside ``step``: one training step."""
    model = net("SuperStep")
    train(truth, model, Doubled(model.parameters(), lr=0.1))


class Lookahead(torch.optim.Optimizer):
    """A third-party wrapper that never runs the constructor of its base class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer, self.counter = inner, 0
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.counter += 1
        if self.counter % 2 == 0:
            for slow, fast in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
                fast.copy_(slow.lerp_(fast, 0.5))
        return loss


@scenario
def lookahead(truth: Truth) -> None:
    """Its inner optimizer's steps are the training steps."""
    model = net("Ahead")
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.1))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        truth.before(step, model, optimizer, "Ahead.")
        optimizer.step()
        truth.steps.append({"model": "Ahead", "step": step, "micro_steps": 1})


@scenario
def bare_parameter(truth: Truth) -> None:
    """SAC's temperature: an optimizer over a tensor of no module."""
    model = net("WithTemperature")
    log_alpha = torch.zeros(1, requires_grad=True)
    one, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([log_alpha], lr=0.1)
    for step in range(2):
        train(truth, model, one, [step])
        other.zero_grad()
        (log_alpha.exp() * 2).sum().backward()
        truth.note("grad_reduced", step, "bare_parameter_0", log_alpha.grad)
        other.step()
    truth.rows = [row for row in truth.rows if row[1].startswith("bare")]


class Failing(torch.optim.SGD):
    """Raises in the middle of a step, once."""

    fail = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.fail:
            self.fail = False
            raise FloatingPointError("half-way")
        return super().step(closure)


@scenario
def exception_in_step(truth: Truth) -> None:
    """A step that the script leaves by an exception is on record, as incomplete, and the next has the next number."""
    model = net("FailingStep")
    optimizer = Failing(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        truth.before(step, model, optimizer, "FailingStep.")
        optimizer.fail = step == 1
        try:
            optimizer.step()
        except FloatingPointError:
            truth.steps.append({"model": "FailingStep", "step": step, "micro_steps": 1, "complete": 0})
            continue
        truth.after(step, model, "FailingStep.")


class Explode(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise FloatingPointError("in backward")


@scenario
def exception_in_backward(truth: Truth) -> None:
    """A backward pass that fails half-way leaves no row behind once its gradients are thrown away."""
    model = net("FailingBackward")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if step == 1:
            hidden = Explode.apply(model[0](batch(50)))
            try:
                model[2](hidden).sum().backward()
            except FloatingPointError:
                optimizer.zero_grad()
        train(truth, model, optimizer, [step])


@scenario
def evaluation(truth: Truth) -> None:
    """Forward passes without training in between: no_grad, inference_mode, eval, and a gradient with respect to inputs."""
    model = net("Evaluated")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        train(truth, model, optimizer, [step])
        model.eval()
        with torch.no_grad():
            model(batch(20))
        with torch.inference_mode():
            model(batch(21))
        inputs = batch(22).requires_grad_()
        torch.autograd.grad(model(inputs).sum(), inputs)
        model.train()


@scenario
def functional_regions(truth: Truth) -> None:
    """torch.func and vmap over the model's parameters between two steps."""
    model = net("Functional")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def functional_loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x[None],)).pow(2).mean()

    for step in range(3):
        detached = {name: parameter.detach() for name, parameter in model.named_parameters()}
        torch.func.vmap(torch.func.grad(functional_loss), in_dims=(None, 0))(detached, batch(30))
        train(truth, model, optimizer, [step])


@scenario
def averaged(truth: Truth) -> list[bool]:
    """Copies for an exponential moving average: they write no row, and the original is not disturbed."""
    model = net("Averaged")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    swa = torch.optim.swa_utils.AveragedModel(model)
    equal = []
    for step in range(3):
        train(truth, model, optimizer, [step])
        ema = copy.deepcopy(model)
        swa.update_parameters(model)
        ema(batch(step)).sum().backward()  # a copy's gradients are its own
        equal.append(all(torch.equal(a, b) for a, b in zip(ema.parameters(), model.parameters(), strict=True)))
    return equal


@scenario
def copied_while_watched(truth: Truth) -> None:
    """deepcopy of (model, optimizer) after a step, then the copy is trained: it has its own label and count."""
    model = net("Original")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(truth, model, optimizer, range(2))
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(truth, twin, twin_optimizer, range(2), label="Original_1.")
    train(truth, model, optimizer, range(2, 4))


@scenario
def saved_while_watched(truth: Truth) -> None:
    """torch.save of a whole model and its optimizer while they are watched, load, and train what was loaded."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(truth, model, optimizer, range(2))
    path = Path(os.environ["TRUTH"]).with_name("whole.pt")
    torch.save((model, optimizer), path)
    loaded, loaded_optimizer = torch.load(path, weights_only=False)
    train(truth, loaded, loaded_optimizer, range(2), label="Sequential_1.")
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    train(truth, model, optimizer, range(2, 3))


@scenario
def folds(truth: Truth) -> None:
    """Models made in turn, the old ones freed: each has its own rows, from step 0 on."""
    for number in range(3):
        model = net("Fold")
        label = f"Fold_{number}." if number else "Fold."
        train(truth, model, torch.optim.Adam(model.parameters(), lr=0.1), range(2), label=label)


@scenario
def optimizer_made_again(truth: Truth) -> None:
    """A second optimizer on the same model goes on with its count."""
    model = net("Again")
    train(truth, model, torch.optim.Adam(model.parameters(), lr=0.1), range(2))
    train(truth, model, torch.optim.SGD(model.parameters(), lr=0.1), range(2, 4))


@scenario
def optimizer_every_epoch(truth: Truth) -> None:
    """A new optimizer every epoch, the old ones kept: ten steps are ten."""
    model, kept = net("Epochs"), []
    for epoch in range(5):
        kept.append(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        train(truth, model, kept[-1], range(2 * epoch, 2 * epoch + 2))


@scenario
def phases(truth: Truth) -> None:
    """Two optimizers over the same parameters, by turns."""
    model = net("Phases")
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)]
    for phase in range(4):
        train(truth, model, optimizers[phase % 2], range(3 * phase, 3 * phase + 3))


@scenario
def new_head_every_task(truth: Truth) -> None:
    """Continual learning: a new head and a new optimizer every task."""
    model = net("Tasks")
    for task in range(4):
        model[2] = nn.Linear(3, task + 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        StepLR(optimizer, 1)  # it keeps the optimizer alive in a cycle
        train(truth, model, optimizer, range(3 * task, 3 * task + 3))


@scenario
def head_replaced(truth: Truth) -> None:
    """Fine-tuning with a new head: the old one's rows are gone, under the same name stands the new one."""
    model = net("NewHead")
    train(truth, model, torch.optim.Adam(model.parameters(), lr=0.1), range(2))
    model[2] = nn.Linear(3, 2)
    train(truth, model, torch.optim.Adam(model.parameters(), lr=0.1), range(2, 4))


@scenario
def head_only(truth: Truth) -> None:
    """All is trained, then the head alone: weights of the rest are still recorded, its gradients are not."""
    model = net("HeadOnly")
    whole = torch.optim.Adam(model.parameters(), lr=0.1)
    train(truth, model, whole, range(2))
    model[0].requires_grad_(False)
    model.zero_grad()
    head = torch.optim.Adam(model[2].parameters(), lr=0.1)
    del whole
    train(truth, model, head, range(2, 4))


@scenario
def not_called_forward(truth: Truth) -> None:
    """A model used through other methods than forward; modules of its own are called as roots."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 3)
            self.heads = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])

        def compute_loss(self, x: torch.Tensor) -> torch.Tensor:
            return sum(head(self.body(x)) for head in self.heads).pow(2).mean()  # type: ignore[union-attr]

    model = Agent()
    train(truth, model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda step: model.compute_loss(batch(step)))


@scenario
def loss_wrapper(truth: Truth) -> None:
    """A module around the model, made after the optimizer, leaves the names as they are."""
    model = net("Wrapped")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class TrainStep(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).pow(2).mean()

    wrapper = TrainStep(model)
    train(truth, model, optimizer, loss=lambda step: wrapper(batch(step)))


@scenario
def shared_encoder(truth: Truth) -> dict[str, Any]:
    """Two models share an encoder, one optimizer each: every tensor has one row, under its first name."""
    encoder = nn.Linear(4, 3)
    one = type("TaskA", (nn.Sequential,), {})(OrderedDict(encoder=encoder, head=nn.Linear(3, 1)))
    other = type("TaskB", (nn.Sequential,), {})(OrderedDict(encoder=encoder, head=nn.Linear(3, 1)))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(other.head.parameters(), lr=0.1)]
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (one(batch(step)) + other(batch(step))).pow(2).mean().backward()
        for model, label in ((one, "TaskA."), (other.head, "TaskB.head.")):
            truth.gradients("grad_reduced", step, model, label)
            truth.gradients("grad_unreduced", step, model, label)
            truth.weights("param_origin", step, model, label)
        for optimizer in optimizers:
            optimizer.step()
        for model, label in ((one, "TaskA."), (other.head, "TaskB.head.")):
            truth.weights("param_updated", step, model, label)
        truth.steps.append({"model": "TaskA+TaskB", "step": step, "micro_steps": 1})
    return {}


@scenario
def two_modules_one_optimizer(truth: Truth) -> None:
    """An optimizer over two models: one training step, rows of both, told apart by their labels."""
    one, other = net("Encoder"), type("Decoder", (nn.Linear,), {})(1, 4)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        other(one(batch(step))).pow(2).mean().backward()
        truth.before(step, one, optimizer, "Encoder.")
        truth.before(step, other, optimizer, "Decoder.")
        optimizer.step()
        truth.weights("param_updated", step, one, "Encoder.")
        truth.weights("param_updated", step, other, "Decoder.")
        truth.steps.append({"model": "Encoder+Decoder", "step": step, "micro_steps": 1})


@scenario
def plain_list(truth: Truth) -> None:
    """Layers in a plain Python list: the root has no parameters, its layers are models of their own (forward-forward)."""

    class Layer(nn.Linear):
        pass

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [Layer(4, 4), Layer(4, 4)]

    root = Root()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in root.layers]
    for number, (layer, optimizer) in enumerate(zip(root.layers, optimizers, strict=True)):
        label = f"Layer_{number}." if number else "Layer."
        train(truth, layer, optimizer, range(2), label=label)


@scenario
def scripted_part(truth: Truth) -> None:
    """A scripted submodule takes no hooks of modules; its parameters' gradients are recorded."""
    model = type("PartlyScripted", (nn.Sequential,), {})(torch.jit.script(nn.Linear(4, 3)), nn.Linear(3, 1))
    train(truth, model, torch.optim.SGD(model.parameters(), lr=0.1))


@scenario
def data_parallel(truth: Truth) -> None:
    """nn.DataParallel: the names are those of the model inside."""
    model = net("Parallel")
    wrapper = nn.DataParallel(model)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    train(truth, model, optimizer, loss=lambda step: wrapper(batch(step)).pow(2).mean())


@scenario
def checkpointed(truth: Truth) -> list[float]:
    """B17: a weight shared by two layers, the first recomputed: one row a step, with the final gradient."""
    norms = []
    for reentrant in (True, False):
        label = "Reentrant" if reentrant else "NotReentrant"
        first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        second.weight = first.weight
        first.weight.data = torch.eye(3) * 0.5 + 0.1
        model = type(label, (nn.Sequential,), {})(first, second)
        inputs = torch.ones(1, 3, requires_grad=True)

        def loss(step: int) -> torch.Tensor:
            hidden = checkpoint(model[0], inputs, use_reentrant=reentrant)  # noqa: B023 - called in this round
            return model[1](torch.tanh(hidden)).sum()  # noqa: B023 - called in this round

        train(truth, model, torch.optim.SGD(model.parameters(), lr=0.1), range(2), loss=loss)
        norms.append(float(first.weight.grad.norm()))  # type: ignore[union-attr]
    return norms


@scenario
def checkpoint_values(truth: Truth) -> list[list[float]]:
    """Reentrant recomputation of a nested backward is one micro-batch, as without it."""
    model = net("Recomputed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(2):
            inputs = batch(10 * step + micro).requires_grad_()
            model[2](checkpoint(lambda x: model[1](model[0](x)), inputs, use_reentrant=True)).pow(2).mean().backward()
        truth.before(step, model, optimizer, "Recomputed.")
        optimizer.step()
        truth.after(step, model, "Recomputed.", micro_steps=2)
    return []


@scenario
def double_backward(truth: Truth) -> None:
    """A gradient penalty (create_graph) inside the loss."""
    model = net("Penalised")

    def loss(step: int) -> torch.Tensor:
        inputs = batch(step).requires_grad_()
        output = model(inputs).sum()
        (gradient,) = torch.autograd.grad(output, inputs, create_graph=True)
        return output.pow(2) + (gradient.norm(dim=1) - 1).pow(2).mean()

    train(truth, model, torch.optim.Adam(model.parameters(), lr=0.1), loss=loss)


@scenario
def graph_of_gradients(truth: Truth) -> float:
    """B12: ``backward(create_graph=True)`` in 50 steps holds no memory."""
    model = type("Graphs", (nn.Sequential,), {})(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    sizes = []
    for step in range(60):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(torch.randn(64, 256)).pow(2).mean().backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        if step in {9, 59}:
            sizes.append(_resident_megabytes())
    return sizes[1] - sizes[0]


def _resident_megabytes() -> float:
    with Path("/proc/self/status").open(encoding="ascii") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


@scenario
def weight_norm(truth: Truth) -> None:
    """Parametrised weights: the parameters are the originals, under torch's names."""
    model = type("Normed", (nn.Sequential,), {})(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 1)
    )
    train(truth, model, torch.optim.Adam(model.parameters(), lr=0.1))


@scenario
def swapped_for_evaluation(truth: Truth) -> None:
    """Schedule-free: weights are exchanged for evaluation and back; rows are those of training."""
    model = net("Swapped")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        train(truth, model, optimizer, [step])
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        with torch.no_grad():
            model(batch(60))
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(value)


@scenario
def in_a_thread(truth: Truth) -> None:
    """The training runs in a thread that is not the main one."""
    model = net("Threaded")
    failures: list[BaseException] = []

    def body() -> None:
        try:
            train(truth, model, torch.optim.Adam(model.parameters(), lr=0.1))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert not failures, failures


@scenario
def between_two_threads(truth: Truth) -> None:
    """Another thread's backward pass in the middle of a step does not end that step."""
    model, other = net("Slow"), net("Quick")
    quick = torch.optim.SGD(other.parameters(), lr=0.1)

    class Waiting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            thread = threading.Thread(target=train, args=(Truth(), other, quick, [0]))
            thread.start()
            thread.join()
            return super().step(closure)

    train(truth, model, Waiting(model.parameters(), lr=0.1), range(2))


@scenario
def freed(truth: Truth) -> list[bool]:
    """A model, its optimizer and its parameters are gone when the script lets go of them."""
    model = net("Freed")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    log_alpha = torch.zeros(1, requires_grad=True)
    temperature = torch.optim.SGD([log_alpha], lr=0.1)
    train(truth, model, optimizer)
    log_alpha.exp().sum().backward()
    temperature.step()
    references = [weakref.ref(item) for item in (model, optimizer, model[0].weight, temperature, log_alpha)]
    del model, optimizer, temperature, log_alpha
    gc.collect()
    deadline = time.monotonic() + 30  # the writer thread lets go of the parameters
    while any(reference() is not None for reference in references) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [reference() is None for reference in references]


@scenario
def converted_by_swapping(truth: Truth) -> None:
    """``model.to(dtype)`` with swapped tensors in the middle of training: rows go on, in the new dtype."""
    model = net("Converted")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(truth, model, optimizer, range(2))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    train(truth, model, optimizer, range(2, 4), loss=lambda step: model(batch(step).double()).pow(2).mean())


@scenario
def frozen_then_free(truth: Truth) -> None:
    """Frozen parameters have weights and no gradients; set free later, they have both."""
    model = net("Thawed")
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(truth, model, optimizer, range(2))
    model[0].requires_grad_(True)
    train(truth, model, optimizer, range(2, 4))


@scenario
def subset_in_optimizer(truth: Truth) -> None:
    """Only the head is in the optimizer: autograd leaves gradients on the rest as well, and all have rows; then all step."""
    model = net("Subset")
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": model[0].parameters()})
        model.zero_grad()
        loss_of(model, step).backward()
        truth.gradients("grad_unreduced", step, model, "Subset.")
        truth.gradients("grad_reduced", step, model, "Subset.")
        truth.weights("param_origin", step, model, "Subset.")
        optimizer.step()
        truth.after(step, model, "Subset.")


@scenario
def branches(truth: Truth) -> None:
    """A branch unused in a step has no gradient row in it, never the value of an earlier step."""
    model = net("Branches")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(
        truth, model, optimizer, range(4), loss=lambda s: (model if s % 2 == 0 else model[:1])(batch(s)).pow(2).mean()
    )


@scenario
def unused_in_one_micro_batch(truth: Truth) -> None:
    """A parameter that the second micro-batch does not reach keeps the gradient of the first."""
    model = net("HalfUsed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        model[0](batch(step)).pow(2).mean().backward()
        truth.before(step, model, optimizer, "HalfUsed.")
        optimizer.step()
        truth.after(step, model, "HalfUsed.", micro_steps=2)


@scenario(alone=True)
def spectators(truth: Truth) -> list[str]:
    """What else the script can see of its own objects is what it would be without a monitor."""
    model = net("Seen")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(truth, model, optimizer)
    before = set(optimizer.state)
    return [
        type(optimizer).step.__qualname__,
        *sorted(key for key in vars(model) if "hook" in key and vars(model)[key]),
        *sorted(key for key in vars(optimizer) if "hook" in key and vars(optimizer)[key]),
        str(len(before) == len(list(model.parameters()))),
    ]


# Two models train side by side first, so that every later one has its label before its names.
_warm = [net("WarmA"), net("WarmB")]
_warm_optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in _warm]
for _model, _optimizer in zip(_warm, _warm_optimizers, strict=True):
    loss_of(_model, 0).backward()
    _optimizer.step()

if __name__ == "__main__":
    run_scenarios(sys.argv[1:])
    print(fingerprint(torch.randn(3)))
