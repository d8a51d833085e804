"""One watched model: its parameters, its count of training steps, and the taps on it."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.nn.parameter import is_lazy

from msmon import log
from msmon.backends.pytorch import events
from msmon.backends.pytorch.adapters.pipelining import current_micro_batch
from msmon.backends.pytorch.devices import capturing
from msmon.backends.pytorch.first_step import FirstStep, state_was_loaded
from msmon.backends.pytorch.recorder import StepRecorder, describe
from msmon.backends.pytorch.roots import optimizer_parameters
from msmon.backends.pytorch.taps import weights
from msmon.backends.pytorch.taps.communication import CommunicationTap
from msmon.backends.pytorch.taps.gradients import UNREDUCED, GradientTap
from msmon.backends.pytorch.taps.modules import ModuleTaps, named_modules, wants_modules
from msmon.backends.pytorch.taps.optimizer_state import OptimizerStateTap
from msmon.backends.pytorch.taps.reduction import Reduction
from msmon.backends.pytorch.taps.updates import DirectionTap, UpdateTap
from msmon.backends.pytorch.taps.weights import WeightTap
from msmon.backends.pytorch.watched import Inventory, Naming, WatchedParameter
from msmon.plan.dynamic import DynamicGate
from msmon.plan.gate import StepGate
from msmon.plan.rounds import Rounds
from msmon.plan.selection import Selection
from msmon.runtime.guard import Guard
from msmon.runtime.interruption import from_signal_handler
from msmon.runtime.ledger import Ledger
from msmon.sinks import tensorboard
from msmon.stats.definitions import Statistic

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
TapT = TypeVar("TapT", WeightTap, GradientTap, OptimizerStateTap, DirectionTap, UpdateTap, CommunicationTap, ModuleTaps)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from msmon.backends.base import Kernel, NamedParameter
    from msmon.backends.pytorch.adapters.plain import PlainAdapter
    from msmon.backends.pytorch.module_calls import ModuleCalls
    from msmon.config.schema import MonitorConfig
    from msmon.record.table import Row, StepTable


_BARE_NAMES = (f"bare_parameter_{number}" for number in itertools.count())
"""Names for parameters that belong to no module, counted through the process."""


@dataclass
class _OptimizerInUse:
    """An optimizer of a watched model.

    Attributes:
        reference: The optimizer.
        layout: Identities of the tensors in its param groups when ``parameters`` was read.
        parameters: Its watched parameters, in the order of the model.
        held: Identities of all its parameters.
        unhooked: Those of ``parameters`` without a gradient hook: frozen ones may be set free later.
        state_was_loaded: Whether it had a state before its first step here; ``None`` before that.
    """

    reference: weakref.ref[Optimizer]
    layout: list[int] = field(default_factory=list)
    parameters: list[WatchedParameter] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    unhooked: list[WatchedParameter] = field(default_factory=list)
    state_was_loaded: bool | None = None


def _entry(method: Callable[Concatenate[Watch, P], T]) -> Callable[Concatenate[Watch, P], T | None]:
    """A method by which others enter: one thread at a time is in, and a fault costs this model's rows and no others.

    Several threads may train one model. Of a model that was switched off nothing is called any more.
    """

    @functools.wraps(method)
    def entered(self: Watch, *args: P.args, **kwargs: P.kwargs) -> T | None:
        if self.guard.broken:
            return None
        with self.lock:
            if self._entered:  # from another entry, which sees what happens
                return method(self, *args, **kwargs)
            self._entered = True
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                if from_signal_handler(error):
                    raise
                self._switch_off(error)
                return None
            finally:
                self._entered = False

    return entered  # type: ignore[return-value]  # mypy calls the first argument positional only


@dataclass
class _Ended:
    """The training step that has ended last, while another optimizer's step may still belong to it.

    Attributes:
        step: Its number.
        config: What it was recorded under.
        collected: Whether it was.
        rows: How many rows of it have gone.
    """

    step: int
    config: MonitorConfig
    collected: bool
    rows: int


@dataclass
class _Joining:
    """What the training step to come has so far, while a step that belongs to the one before is under way."""

    recorder: StepRecorder
    collecting: bool
    listening: bool


class Watch:
    """Sees the training steps of one model, which one or several optimizers train.

    Args:
        config: What to record.
        kernel: Computes the statistics.
        adapter: Where the training framework keeps things.
        emit: Takes the table of each collected step, and the configuration that it was collected under.
        label: The model's name in ``steps.csv``.
        first_step: The first training step, and who said its number.
        grad_acc_steps: Micro-batches a step when the user said so; ``None`` counts backward passes.
        gate: Which steps are collected, when a file decides that while the training runs.
    """

    def __init__(
        self,
        config: MonitorConfig,
        kernel: Kernel[Tensor],
        adapter: PlainAdapter,
        emit: Callable[[StepTable, MonitorConfig], None],
        *,
        label: str,
        first_step: FirstStep,
        grad_acc_steps: int | None,
        gate: DynamicGate | None = None,
    ) -> None:
        self.config = config
        self.adapter = adapter
        self.label = label
        self.lock = threading.RLock()  # a signal handler may come back in
        self._entered = False
        self.guard = Guard(self._name("monitoring"))
        self.reports = Guard(self._name("reports"))
        taps = (WeightTap, OptimizerStateTap, GradientTap, ModuleTaps, DirectionTap, UpdateTap, CommunicationTap)
        self.guards = {tap.part: Guard(self._name(tap.part)) for tap in taps}
        self._stepping_thread = 0
        self._reached: set[int] = set()
        self.unreached: dict[int, str] = {}
        self.inventory = Inventory()
        self.roots: list[weakref.ref[Module]] = []
        self._namings: list[Naming] = []
        self.first_step = first_step
        self.rounds = Rounds(first_step.value)
        self.gate = gate or StepGate(config.start_step, config.step_interval, config.collect_times)
        self.ledger = Ledger()
        self._state_guard = Guard("looking at loaded optimizer state")
        self.report: dict[str, Any] = {}
        self.renamed: list[dict[str, Any]] = []
        self.described = True
        self._named_at = first_step.value
        self._kernel = kernel
        self._reduction = Reduction(kernel, [Statistic(op) for op in config.statistics], config.eps)
        self._next_config = config
        self.emit = emit
        self.on_step: Callable[[], None] = lambda: None
        self._selection = Selection(config.targets)
        self._grad_acc_steps = grad_acc_steps
        self._optimizers: dict[int, _OptimizerInUse] = {}
        self._unstepped: dict[int, _OptimizerInUse] = {}
        self._recorder = StepRecorder()
        self._ended: _Ended | None = None
        self._joining: _Joining | None = None
        self._unheld = StepRecorder()
        self._held_by_none: dict[int, WatchedParameter] = {}  # those of no optimizer, in the step under way or ended
        self._backward: tuple[str, int] | None = None
        self._settled_passes = 0
        self._open_passes = 0
        self._inside_step = False
        self._step_under_way = False
        self.left_over = False
        self.collecting = self.listening = self.gate.wants(self.rounds.step)
        self.finished: Callable[[], None] = lambda: None
        self.follows: Callable[[Watch], None] = lambda _: None
        self.communication: CommunicationTap | None = None  # the process has one; its session lends it to one watch
        self._make_taps()

    def _name(self, part: str) -> str:
        """A part of msmon in a message: of which model, where there are several."""
        return f"{part} of {self.label}" if self.label else part

    def _make_taps(self) -> None:
        config, adapter = self.config, self.adapter
        self.weights = WeightTap(self._reduction, adapter) if config.param_distribution else None
        self.state = OptimizerStateTap(self._reduction, adapter) if config.mv_distribution else None
        self.gradients = self._make_gradient_tap() if config.wg_distribution else None
        self.modules = self._make_module_taps() if wants_modules(config) else None
        self.directions = DirectionTap(self._reduction, adapter) if config.mg_direction else None
        self.updates = (
            UpdateTap(self._reduction, adapter, histograms=tensorboard.installed()) if config.ur_distribution else None
        )

    def _make_gradient_tap(self) -> GradientTap:
        return GradientTap(
            self._reduction,
            self.adapter,
            micro_step=self._pass_reached,
            collecting=lambda: self.listening and not self._inside_step and not capturing(),
            every_micro_batch=self.config.monitor_mbs_grad,
        )

    def _make_module_taps(self) -> ModuleTaps:
        guard = self.guards[ModuleTaps.part]
        return ModuleTaps(
            self.config,
            self._reduction,
            listening=lambda: self.listening and not self._inside_step and not guard.broken,
            micro_step=lambda: self._micro_batch(self._open_passes),
            pass_reached=self._pass_reached,
            trains=lambda: any(watched.parameter.requires_grad for watched in self.inventory.by_id.values()),
        )

    # What is watched

    @_entry
    def add_root(
        self,
        root: Module,
        naming: Naming,
        calls: ModuleCalls | None = None,
        earlier: Sequence[NamedParameter[Any]] = (),
    ) -> None:
        """Watch the parameters of a module, and the modules in it.

        Args:
            root: The module.
            naming: How its parameters and modules are named.
            calls: Hooks on its modules that are there already.
            earlier: Parameters that it had when its optimizer was constructed.
        """
        self.described = False
        self.roots.append(weakref.ref(root))
        self._namings.append(naming)
        self.inventory.take(root, self.adapter, naming, self._selection, earlier)
        self._add_modules(root, naming, calls)

    def _add_modules(self, root: Module, naming: Naming, calls: ModuleCalls | None = None) -> None:
        if not self.gate.finished:
            self._tap(self.modules, lambda tap: self.ledger.keep(tap.add_root(root, naming, calls)))

    @property
    def module_names(self) -> list[str]:
        """Names of all its modules, watched or not, in every form that a target may have."""
        found = zip(self.roots, self._namings, strict=True)
        every = (named_modules(root, naming) for reference, naming in found if (root := reference()) is not None)
        return list(dict.fromkeys(form for modules in every for watched in modules for form in watched.names))

    @_entry
    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Its steps are training steps of this model."""
        for number in [number for number, entry in self._optimizers.items() if entry.reference() is None]:
            del self._optimizers[number]
            self._unstepped.pop(number, None)
            self.rounds.forget(number)
        self.described = False
        if self._named_at != self.rounds.step:  # layers inserted or deleted between two optimizers have others' names
            self._look_at_names(optimizer_parameters(optimizer))
        before = self._optimizers.get(id(optimizer))
        entry = _OptimizerInUse(weakref.ref(optimizer))
        if before is not None and before.reference() is optimizer:
            entry.state_was_loaded = before.state_was_loaded
        self._optimizers[id(optimizer)] = self._unstepped[id(optimizer)] = entry
        self._refresh(optimizer)

    def owns(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer trains this model."""
        entry = self._optimizers.get(id(optimizer))
        return entry is not None and entry.reference() is optimizer

    def wrapped_by(self, optimizer: Optimizer) -> list[Optimizer]:
        """What an optimizer about to step may wrap: others of its parameters that never step but inside its step."""
        return self._find_wrapped(optimizer) or []

    @_entry
    def _find_wrapped(self, optimizer: Optimizer) -> list[Optimizer]:
        starts = self._unstepped.pop(id(optimizer), None)
        if starts is not None and starts.state_was_loaded is None:
            self.described = False
            starts.state_was_loaded = self._state_guard.run(state_was_loaded, optimizer, self.first_step.value)
        held = self._optimizers[id(optimizer)].held
        found = (entry.reference() for entry in self._unstepped.values() if not held.isdisjoint(entry.held))
        return [inner for inner in found if inner is not None]

    @property
    def alive(self) -> bool:
        """Whether any of its modules or, for parameters without one, of its optimizers still exists."""
        if self.roots:
            return any(root() is not None for root in self.roots)
        return any(entry.reference() is not None for entry in self._optimizers.values())

    @property
    def states_were_loaded(self) -> list[bool | None]:
        """Of each optimizer that still exists: whether it had a state before its first step; ``None`` before that."""
        return [entry.state_was_loaded for entry in self._optimizers.values() if entry.reference() is not None]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that still exist."""
        return [found for entry in self._optimizers.values() if (found := entry.reference()) is not None]

    def _refresh(self, optimizer: Optimizer) -> _OptimizerInUse:
        """Look at an optimizer's param groups again when they hold other tensors than before; hook what is new."""
        entry = self._optimizers[id(optimizer)]
        parameters = [parameter for parameter in optimizer_parameters(optimizer) if not is_lazy(parameter)]
        layout = [parameter._cdata for parameter in parameters]  # noqa: SLF001 - see WatchedParameter.hooked
        if layout != entry.layout:
            if any(id(parameter) not in self.inventory.by_id for parameter in parameters):
                self._take_new(parameters)
            entry.layout = layout
            entry.parameters = self.inventory.selected(parameters)
            entry.held = {id(parameter) for parameter in parameters}
            self.rounds.know(id(optimizer), entry.held)
            entry.unhooked = entry.parameters
        if entry.unhooked and self.gradients is not None and not self.gate.finished:
            guard = self.guards[GradientTap.part]
            self._tap(self.gradients, lambda tap: tap.observe(self.inventory, self.ledger, guard))
            self._tap(self.gradients, lambda tap: tap.hook(entry.unhooked, self.ledger, guard))
            entry.unhooked = [watched for watched in entry.unhooked if not watched.parameter.requires_grad]
        return entry

    def _look_at_names(self, in_use: Sequence[Tensor]) -> None:
        """Parameters have the names that they have in the models now; none has one that another has."""
        self._named_at, self.described = self.rounds.step, False
        now = Inventory()
        for reference, naming in zip(self.roots, self._namings, strict=True):
            root = reference()
            if root is not None:
                now.take(root, self.adapter, naming, self._selection)
        held = itertools.chain(in_use, *map(optimizer_parameters, self.optimizers))
        self._let_go({*now.by_id, *map(id, held)})
        changed = self.inventory.rename(now)
        if changed:
            self._tap(self.modules, ModuleTaps.look_again)
            self.renamed.append({"step": self.rounds.step, "names": changed})
            before, after = next(iter(changed.items()))
            count = f"{len(changed)} parameters have other names from step {self.rounds.step} on"
            log.say(f"{count}: {before} is {after} now, ...")

    def _let_go(self, in_use: set[int]) -> None:
        """Of parameters that neither a model nor an optimizer has any more, such as those of a head that was replaced."""
        gone = self.inventory.keep_only(in_use)
        for handle in [watched.handle for watched in gone if watched.handle is not None]:
            self.ledger.release(handle)
        if gone:
            dead = {id(watched.parameter) for watched in gone}
            self._tap(self.gradients, lambda tap: tap.forget(dead, forever=True))

    def _take_new(self, parameters: Sequence[Tensor]) -> None:
        self._look_at_names(parameters)
        self.inventory.take_bare(parameters, _BARE_NAMES, self._selection)
        self._tap(self.modules, ModuleTaps.look_again)

    # What happens

    @_entry
    def backward_begins(self) -> None:
        """New parameters are hooked; rows of gradients that were thrown away are forgotten."""
        self._tap(self.modules, ModuleTaps.backward_begins)
        if not (self._inside_step or self._step_under_way):  # else it is a closure's
            self._part_with_ended()
            if self.rounds.backward_begins():
                self.close_round(repeated=True)
        if not self.listening or self._inside_step:
            return
        for optimizer in self.optimizers:
            self._refresh(optimizer)
        self._hook_unheld()
        if self._open_passes and self._tap(
            self.gradients, lambda tap: tap.forget_discarded(self.inventory.by_id.values())
        ):
            self._forget_passes()

    def _hook_unheld(self) -> None:
        """Gradients of parameters that no optimizer holds are seen as well."""
        if self.gradients is not None and self._optimizers and not self.gate.finished:
            unheld, guard = self._find_held_by_none().values(), self.guards[GradientTap.part]
            self._tap(self.gradients, lambda tap: tap.hook(unheld, self.ledger, guard))

    @_entry
    def backward_ends(self) -> None:
        """A backward pass has ended: no further gradient of it will come."""
        if self.listening and not self._inside_step:
            self._tap(self.gradients, GradientTap.pass_ends)
        self._tap(self.modules, ModuleTaps.backward_ends)

    def _forget_passes(self) -> None:
        """The gradients of the backward passes so far were thrown away: they belong to no step."""
        self._open_passes = 0
        self._tap(self.modules, ModuleTaps.gradients_discarded)

    @_entry
    def gradients_zeroed(self, owner: Optimizer | Module) -> None:
        """Gradients of an optimizer or a module were zeroed: what backward passes left of them belongs to no step."""
        if self._inside_step or not self._open_passes:
            return
        if isinstance(owner, torch.nn.Module):
            zeroed = {id(parameter) for parameter in owner.parameters()}
        elif self.owns(owner):
            zeroed = self._optimizers[id(owner)].held
        else:
            return
        if self.gradients is None:
            discarded = not zeroed.isdisjoint(self.inventory.by_id)
        else:
            discarded = bool(self._tap(self.gradients, lambda tap: tap.forget(zeroed)))
        if discarded:
            self._forget_passes()

    def _pass_reached(self) -> int:
        """A backward pass has come to this model: count it once.

        Returns:
            Its micro-batch.
        """
        current = events.current_backward()
        if current not in {self._backward, events.OUTSIDE}:  # outside, a framework tells what earlier passes have left
            self._backward = current
            self.left_over = False
            self._open_passes += 1
            self._tap(self.modules, ModuleTaps.pass_begins)
        return self._micro_batch(self._open_passes - 1)

    def _micro_batch(self, passes: int) -> int:
        """The micro-batch that comes after so many backward passes of the step."""
        in_pipeline = current_micro_batch()
        if in_pipeline is not None:
            return in_pipeline
        return max(passes, 0) if self._grad_acc_steps is None else min(max(passes, 0), self._grad_acc_steps - 1)

    @_entry
    def step_begins(self, optimizer: Optimizer, inner: Sequence[Optimizer], *, backward_done: bool) -> None:
        """An optimizer is about to step: weights and state as they are before it.

        Args:
            optimizer: The one that steps.
            inner: Optimizers that it may wrap, asked for state that it does not have itself.
            backward_done: False when a closure will run backward passes inside the step.
        """
        thread = threading.get_ident()
        if self._step_under_way and self._stepping_thread != thread:
            text = "step at the same time: which of their rows belong to one training step cannot be told"
            log.say(f"optimizers of one model {text}", once="threads")
        self._stepping_thread = thread
        if id(optimizer) not in self._reached and backward_done and self.rounds.passed:
            self._look_for_gradients(optimizer)
        entry = self._refresh(optimizer) if self.collecting or len(self._optimizers) > 1 else None
        if backward_done and self._ended is not None and self.rounds.joins_ended(id(optimizer)):
            self._join_ended()
        else:
            self._part_with_ended()
            if not backward_done:
                self.rounds.backward_begins()
            if self.rounds.would_repeat(id(optimizer)):
                self.close_round(repeated=True)
        self._step_under_way = True
        if not self.collecting:
            return
        self._take_from_unheld(optimizer)
        entry = entry or self._refresh(optimizer)
        if not (self.rounds.open or self._joining):
            self._held_by_none, self._unheld = self._find_held_by_none(), StepRecorder()
            unheld = list(self._held_by_none.values())
            self._tap(self.weights, lambda tap: tap.read(self._unheld, weights.BEFORE, unheld))
        if backward_done:
            self._move_modules()
            self._tap(self.gradients, lambda tap: tap.move_unreduced(self._recorder, entry.parameters))
        self._tap(self.weights, lambda tap: tap.read(self._recorder, weights.BEFORE, self._weights_of(entry)))
        self._tap(self.state, lambda tap: tap.read(self._recorder, [optimizer, *inner], entry.parameters))

    def _look_for_gradients(self, optimizer: Optimizer) -> None:
        """Whether any gradient has ever reached what an optimizer holds; said when it steps after a backward pass without."""
        parameters = optimizer_parameters(optimizer)
        if self.adapter.name != "plain" or any(parameter.grad is not None for parameter in parameters):
            self._reached.add(id(optimizer))
            self.unreached.pop(id(optimizer), None)
        elif id(optimizer) not in self.unreached:
            name, count = type(optimizer).__name__, len(parameters)
            self.unreached[id(optimizer)] = f"no gradient has reached any of the {count} parameters that {name} trains"
            log.say(f"{self.unreached[id(optimizer)]}; was the model copied or replaced after its optimizer was made?")

    @_entry
    def note(self, name: str, value: Tensor) -> None:
        """Add a number about the step itself to one that is collected."""
        if self.collecting:
            self._recorder.note(name, value)

    @_entry
    def take_gradients(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """Gradients are what the optimizer will use: read them, and close the rows of the backward passes.

        Args:
            optimizer: The one that steps.
            scale: Loss scale, when a ``GradScaler`` drives this step.
        """
        if not self.collecting:
            return
        self._inside_step = True
        entry = self._optimizers[id(optimizer)]
        self._move_modules()
        divisor = _tensor(optimizer, "grad_scale")  # a fused optimizer unscales by itself, during the step
        self._tap(self.gradients, lambda tap: tap.move_unreduced(self._recorder, entry.parameters))
        self._tap(self.gradients, lambda tap: tap.read_reduced(self._recorder, entry.parameters, divisor))
        if not (self.rounds.open or self._joining):
            self._read_unheld(scale if divisor is None else divisor)
        optimizers = [optimizer, *self.wrapped_by(optimizer)]
        self._tap(self.directions, lambda tap: tap.read(self._recorder, optimizers, entry.parameters))
        self._tap(self.updates, lambda tap: tap.note_gradients(entry.parameters))
        found_inf = _tensor(optimizer, "found_inf")
        if found_inf is not None:
            self._recorder.note("found_inf", found_inf)
        if scale is not None:
            self._recorder.note("grad_scale", scale)

    @_entry
    def step_ends(self, optimizer: Optimizer, *, skipped: bool = False) -> None:
        """An optimizer has stepped, or a ``GradScaler`` has skipped its step."""
        if self.collecting:
            entry = self._optimizers[id(optimizer)]
            self._tap(self.weights, lambda tap: tap.read(self._recorder, weights.AFTER, self._weights_of(entry)))
            if not (self.rounds.open or self._joining):
                unheld = list(self._held_by_none.values())
                self._tap(self.weights, lambda tap: tap.read(self._unheld, weights.AFTER, unheld))
            if not skipped:
                self._tap(self.state, lambda tap: tap.note_step(optimizer))
                optimizers = [optimizer, *self.wrapped_by(optimizer)]
                self._tap(self.updates, lambda tap: tap.read(self._recorder, optimizers, entry.parameters))
            else:
                self._tap(self.updates, UpdateTap.forget_gradients)
            self._recorder.skipped |= skipped
        self._inside_step = False
        self._settle()
        if self._joining:
            self.rounds.joined(id(optimizer))
            self._leave_ended()
            return
        if self.rounds.stepped(id(optimizer)):
            self.close_round()
        else:
            self.listening = self.collecting or self.gate.wants(self.rounds.step + 1)
            self._step_under_way = False

    def _move_modules(self) -> None:
        self._tap(self.modules, lambda tap: tap.move(self._recorder))

    def _settle(self) -> None:
        """Backward passes up to here belong to this training step; those from here on may belong to the next."""
        self._settled_passes += self._open_passes
        self._open_passes = 0
        self._tap(self.communication, CommunicationTap.settle)
        self._tap(self.modules, ModuleTaps.settle)
        self._tap(self.gradients, GradientTap.settle)

    def _join_ended(self) -> None:
        """This step belongs to the training step that has ended: no backward pass has begun since."""
        ended = self._ended
        if ended is None:
            return
        self._joining = _Joining(self._recorder, collecting=self.collecting, listening=self.listening)
        self._recorder, self.collecting = StepRecorder(), ended.collected
        if self.collecting:
            self._tap(self.communication, lambda tap: tap.move(self._recorder, continued=True))

    def _take_from_unheld(self, optimizer: Optimizer) -> None:
        """Parameters that had no optimizer when the training step was read have one now: its rows stand for theirs."""
        held = self._optimizers[id(optimizer)].held
        taken = [watched for key, watched in self._held_by_none.items() if key in held]
        if taken:
            self._unheld.drop({(watched.stage, watched.name) for watched in taken}, but=UNREDUCED)
            for watched in taken:
                del self._held_by_none[id(watched.parameter)]

    def _leave_ended(self) -> None:
        joining, ended, self._joining = self._joining, self._ended, None
        if joining is None or ended is None:
            return
        recorder = self._recorder
        self._recorder, self.collecting, self.listening = joining.recorder, joining.collecting, joining.listening
        self._step_under_way = False
        self._supplement(ended, recorder)

    def _supplement(self, ended: _Ended, recorder: StepRecorder) -> None:
        if ended.collected and len(recorder):
            table = recorder.finish(self.label, ended.step, None, supplement=True, first=ended.rows)
            ended.rows += len(recorder)
            self.emit(table, ended.config)

    def _part_with_ended(self) -> None:
        """Nothing more can belong to the training step that has ended: what it has left to nobody goes."""
        ended, self._ended = self._ended, None
        if ended is not None:
            self._tap(self.gradients, GradientTap.forget_settled)
            unheld, self._unheld = self._unheld, StepRecorder()
            self._held_by_none.clear()
            self._supplement(ended, unheld)

    def _read_unheld(self, divisor: Tensor | None) -> None:
        """Read the gradients of parameters that no optimizer holds, or none yet: their rows go last."""
        parameters = list(self._held_by_none.values())
        self._tap(self.gradients, lambda tap: tap.move_unreduced(self._unheld, parameters))
        self._tap(self.gradients, lambda tap: tap.read_reduced(self._unheld, parameters, divisor))

    def close_round(self, *, complete: bool = True, repeated: bool = False) -> None:
        """The training step is over: hand its table on and go to the next.

        Args:
            complete: Whether it has come to its end.
            repeated: Whether the next one is under way already: what came after the last step belongs to that.
        """
        self._leave_ended()
        table, config, rows = None, self.config, len(self._recorder)
        if self.collecting:
            self._tap(self.communication, lambda tap: tap.move(self._recorder, settled_only=repeated))
            rows = len(self._recorder)
        collected = self.collecting
        if self.collecting and (complete or len(self._recorder)):
            counted = self.gradients is not None or self.modules is not None  # by their hooks
            micro_steps = self._settled_passes if counted else None
            table = self._recorder.finish(self.label, self.rounds.step, micro_steps, complete=complete)
        fresh, step = StepRecorder(), self.rounds.step
        try:
            self._recorder, self._step_under_way = fresh, False
            self._go_on(repeated=repeated)
            self._ended = _Ended(step, config, collected, rows) if complete and not repeated else None
        finally:  # Ctrl-C finds either this step still under way, or this one handed on and the next one ready
            if self._recorder is fresh:
                if self.rounds.step == step:
                    self.rounds.close()
                self._recorder = StepRecorder()
                if complete:
                    self.on_step()
                if table is not None:
                    self.emit(table, config)
        if not complete or repeated:
            self._ended = _Ended(step, config, collected, rows)
            self._part_with_ended()
        if self.gate.finished:
            self.ledger.undo()

    def _go_on(self, *, repeated: bool) -> None:
        self.rounds.close()
        if self.collecting:
            self.gate.count()
        self._settled_passes = 0
        self._tap(self.modules, lambda tap: tap.step_is_over(repeated=repeated))
        if self._hooks_change() or self.config is not self._next_config:
            self._follow_config()
        self.collecting = self.listening = self.gate.wants(self.rounds.step)

    def _hooks_change(self) -> bool:
        """Whether a file that is followed starts, stops or changes recording now: under the same configuration, maybe."""
        if not isinstance(self.gate, DynamicGate):
            return False
        decision = self.gate.step_ends(self.rounds.step)
        if decision.changed:
            self._next_config = decision.config
        if decision.write_back:
            self.finished()
        return decision.changed

    @_entry
    def reconfigure(self, config: MonitorConfig) -> None:
        """Compute other statistics from the next training step on, or at once when this one has no row yet."""
        self._next_config = config
        if not len(self._recorder) and not any(map(self._has_rows, (self.gradients, self.modules, self.communication))):
            self._follow_config()
            self._recorder = StepRecorder()

    def _follow_config(self) -> None:
        self.config = self._next_config
        for reduction in (self._reduction, self.communication.reduction if self.communication else self._reduction):
            reduction.change([Statistic(op) for op in self.config.statistics], self.config.eps)
        self._begin_anew()
        self.follows(self)

    def _begin_anew(self) -> None:
        """Another configuration: every hook out, other taps, hooks in again."""
        self.ledger.undo()
        self._selection = Selection(self.config.targets)
        before, self.inventory = self.inventory, Inventory()
        self._make_taps()
        for reference, naming in zip(self.roots, self._namings, strict=True):
            root = reference()
            if root is not None:
                self.inventory.take(root, self.adapter, naming, self._selection)
                self._add_modules(root, naming)
        self.inventory.take_over(before, self._selection)
        for entry in self._optimizers.values():
            entry.layout = []

    @_entry
    def abandon(self) -> None:
        """``optimizer.step`` was left by an exception, and training goes on: the step stays as far as it came."""
        if self._inside_step or self._step_under_way:
            self._inside_step = False
            self._settle()
            if self._joining:
                self._leave_ended()
            else:
                self.close_round(complete=False)

    @_entry
    def cut_short(self, *, normally: bool = False) -> None:
        """The process ends: what the step under way has left so far is its table.

        Args:
            normally: The script has come to its end. Gradients that came before another model's last step are then what
                its backward pass left here (a generator's in the discriminator), and belong to no step.
        """
        self._leave_ended()
        self._part_with_ended()
        if self.rounds.open:
            self.close_round(complete=not self._inside_step)
            self._part_with_ended()
        if not self.collecting:
            return
        if normally and not len(self._recorder) and (self.left_over or not self.rounds.passed):
            return  # an evaluation after the last step, or what a backward pass for another model has left
        self._move_modules()
        self._tap(self.gradients, lambda tap: tap.move_unreduced(self._recorder))
        if len(self._recorder) or self._has_rows(self.communication):
            self._settle()
            self.close_round(complete=False)

    def current_gradients(self) -> tuple[list[tuple[Row, Tensor]], list[tuple[Row, Tensor]]]:
        """Reduced and unreduced gradients as they are now."""
        return self._tap(self.gradients, lambda tap: tap.current(self.inventory.selected())) or ([], [])

    def current_activations(self) -> tuple[list[tuple[Row, Tensor]], list[tuple[Row, Tensor]]]:
        """Activations and their gradients, read since the last step."""
        return self._tap(self.modules, ModuleTaps.current) or ([], [])

    @_entry
    def add_tensor(self, kind: str, name: str, tensor: Tensor, statistics: Sequence[Statistic]) -> None:
        """Add a row about any tensor to the step under way, when that is collected."""
        if self.listening:
            row = describe(kind, name, 0, tensor)._replace(features=tuple(statistic.value for statistic in statistics))
            reduction = Reduction(self._kernel, statistics, self.config.eps)
            with torch.no_grad():
                numbers = reduction.one(row, tensor)
            if numbers is not None:
                self._recorder.add([row], [numbers])

    def start_anew(self) -> None:
        """After a fork: what the parent collected so far is the parent's."""
        self.lock, self._entered = threading.RLock(), False  # a thread of the parent's may have been inside
        self._forget_everything()

    @_entry
    def _forget_everything(self) -> None:
        self._recorder, self._unheld = StepRecorder(), StepRecorder()
        self._ended = self._joining = None
        self._held_by_none.clear()
        self.report = {}
        self._tap(self.gradients, lambda tap: tap.forget())
        self._tap(self.modules, ModuleTaps.forget)
        self._tap(self.communication, CommunicationTap.forget)

    def _weights_of(self, entry: _OptimizerInUse) -> list[WatchedParameter]:
        """The weights read at a step: those of its optimizer, and with the first of a round those of no optimizer."""
        if self.rounds.open or self._joining:
            return entry.parameters
        others = [other for other in self._optimizers.values() if other is not entry and other.reference() is not None]
        elsewhere = set().union(*(other.held for other in others)) - entry.held
        return [
            watched
            for key, watched in self.inventory.by_id.items()
            if watched.selected and key not in elsewhere and key not in self._held_by_none
        ]

    def _find_held_by_none(self) -> dict[int, WatchedParameter]:
        """Trainable parameters of the models that no optimizer holds, or none yet."""
        held = set().union(*(entry.held for entry in self._optimizers.values() if entry.reference() is not None))
        return {
            key: watched
            for key, watched in self.inventory.by_id.items()
            if key not in held and watched.selected and watched.parameter.requires_grad
        }

    def _tap(self, tap: TapT | None, call: Callable[[TapT], R]) -> R | None:
        """Use a tap, if there is one: a fault in it costs its rows and no others."""
        return None if tap is None else self.guards[tap.part].run(call, tap)

    def _has_rows(self, tap: GradientTap | ModuleTaps | CommunicationTap | None) -> bool:
        return tap is not None and bool(self.guards[tap.part].run(lambda: not tap.idle))

    def _switch_off(self, error: Exception) -> None:
        """A fault in what holds the taps together: nothing of this model is recorded any more."""
        self.collecting = self.listening = False
        self.guard.fail(error)
        Guard(self._name("removal of hooks")).run(self.ledger.undo)

    def detach(self) -> None:
        """Take every hook out, and let go of the parameters."""
        self.ledger.undo()
        self.collecting = False
        self.inventory = Inventory()
        self._optimizers.clear()
        self._unstepped.clear()


def _tensor(optimizer: Optimizer, name: str) -> Tensor | None:
    """What a ``GradScaler`` leaves on an optimizer during its step; something else of that name is not ours to read."""
    value = getattr(optimizer, name, None)
    return value if isinstance(value, torch.Tensor) else None
