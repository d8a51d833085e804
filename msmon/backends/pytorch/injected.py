"""What ``msmon run`` does inside a training process: finds the models and optimizers, and watches them.

The models an optimizer trains are looked up when it is constructed, so that a wrapper made later does not change their
names; they are watched when training shows itself, at the first backward pass or step. By then every model and
optimizer of the usual script exists, so that it is known whether names need a model's label.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msmon import env, log
from msmon.backends.base import NamedParameter
from msmon.backends.pytorch import events
from msmon.backends.pytorch.adapters.registered import registered_parameters
from msmon.backends.pytorch.first_step import FirstStep, learn_first_step, note_optimizer
from msmon.backends.pytorch.module_calls import ModuleCalls
from msmon.backends.pytorch.naming import class_name, innermost, walk_parameters
from msmon.backends.pytorch.roots import find_roots, optimizer_parameters
from msmon.backends.pytorch.session import Session
from msmon.backends.pytorch.taps.modules import wants_modules
from msmon.backends.pytorch.watched import Naming
from msmon.bootstrap import discovery
from msmon.plan.names import unique_label
from msmon.runtime.guard import Guard
from msmon.runtime.references import IdentitySet, IdentityTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from msmon.backends.pytorch.watch import Watch
    from msmon.bootstrap.settings import Settings

MODEL_LIMIT = 256
"""Models watched in one process; a script that makes a copy of its model for every task (MAML) would have thousands."""


@dataclass
class _Waiting:
    """An optimizer that is not watched yet, with the models found when it was constructed."""

    optimizer: weakref.ref[Optimizer]
    roots: list[weakref.ref[Module]]


class InjectedMonitor:
    """Watches everything that trains in this process.

    Args:
        settings: What ``msmon run`` was asked for.
    """

    def __init__(self, settings: Settings) -> None:
        self._lock = threading.RLock()  # a thread waits for its optimizer to be watched by the one that is at it
        self._waiting: list[_Waiting] = []
        self._calls: list[ModuleCalls] = []
        self._names: IdentityTable[Module, dict[int, tuple[str, str]]] = IdentityTable()
        self._labels: list[str] = []
        self._refused: IdentitySet[Optimizer] = IdentitySet()  # optimizers that it is no use to look at again
        self._guard = Guard("looking for models")
        self._grad_acc_steps = settings.grad_acc_steps
        self._first_step = settings.first_step
        self.session = Session(
            settings.config(),
            settings.output_root,
            injected=settings.for_report(),
            on_training=self.watch_waiting,
            config_path=settings.source,
            alert_options=settings.alert_options(),
            options=settings.options,
            temporary=settings.temporary,
        )

    def after_fork(self) -> None:
        """In a forked child: whoever held the lock is not here."""
        self._lock = threading.RLock()

    def optimizer_constructed(self, optimizer: Optimizer) -> None:
        """Remember an optimizer with the models that own its parameters now, and that it has loaded a state when told again."""
        note_optimizer(optimizer)
        self._guard.run(self._remember, optimizer)

    def _remember(self, optimizer: Optimizer) -> None:
        tensors = optimizer_parameters(optimizer)
        roots = [innermost(root) for root in find_roots(tensors)[0]]
        self._note_names(roots, tensors)
        waiting = _Waiting(weakref.ref(optimizer), [weakref.ref(root) for root in roots])
        with self._lock:
            self._waiting.append(waiting)
            events.follow_frameworks()
            if wants_modules(self.session.config) and not env.dynamic_requested():
                self._hook_modules(roots)

    def _note_names(self, roots: Sequence[Module], tensors: Sequence[Tensor]) -> None:
        """Remember the names of a model's parameters, which may be swapped out when it is watched (``functional_call``)."""
        known = [self._names.get(root, {}) for root in roots]
        if not all(any(id(tensor) in names for names in known) for tensor in tensors):
            registered = registered_parameters()
            for root in roots:
                found = walk_parameters(root, registered)
                self._names[root] = {id(each.parameter): (each.name, each.raw_name) for each in found}

    def _earlier(self, root: Module, tensors: Sequence[Tensor]) -> list[NamedParameter[Any]]:
        """Those of an optimizer's parameters that a model had when the optimizer was constructed."""
        names = self._names.get(root, {})
        return [NamedParameter(*names[id(tensor)], tensor) for tensor in tensors if id(tensor) in names]

    def _hook_modules(self, roots: Sequence[Module]) -> None:
        """Put hooks on the modules of models that have none: their first forward in training has them watched."""
        hooked = [calls.root() for calls in self._calls]
        hooked += [root() for watch in self.session.watches for root in watch.roots]
        new = [root for root in roots if not any(root is other for other in hooked)]
        self._calls += [ModuleCalls(root, functools.partial(self._guard.run, self.watch_waiting)) for root in new]

    def _take_calls(self, root: Module) -> ModuleCalls | None:
        """The hooks put on a model when its optimizer was constructed."""
        found = next((calls for calls in self._calls if calls.root() is root), None)
        self._calls = [calls for calls in self._calls if calls is not found and calls.root() is not None]
        return found

    def watch_waiting(self, stepping: Optimizer | None = None) -> None:
        """Watch what was constructed since the last call.

        Args:
            stepping: An optimizer about to step, which may have come to life unseen.
        """
        with self._lock:
            self._watch_waiting(stepping)

    def _watch_waiting(self, stepping: Optimizer | None) -> None:
        if stepping in self._refused:
            return
        if stepping is not None and not any(waiting.optimizer() is stepping for waiting in self._waiting):
            self._waiting.append(_Waiting(weakref.ref(stepping), []))
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        components = _components(waiting)
        first = not self._labels
        several = not first or sum(bool(component.roots) for component in components) > 1
        for component in components:  # a fault with one costs no other
            alone = first and len(components) == 1
            Guard("monitoring of a model").run(self._watch, component, several=several, alone=alone)
            for optimizer in component.optimizers:
                if self.session.find(optimizer) is None:
                    self._refused.add(optimizer)

    def _watch(self, component: _Component, *, several: bool, alone: bool) -> None:
        existing = self._existing(component)
        if existing is not None:
            self._add_new_roots(existing, component)
            for optimizer in component.optimizers:
                existing.add_optimizer(optimizer)
            return
        if len(self._labels) >= MODEL_LIMIT:
            log.say(f"more than {MODEL_LIMIT} models in this process: the rest is not watched", once="models")
            return
        labels = []
        for root in component.roots:
            labels.append(unique_label(class_name(root), self._labels))
            self._labels.append(labels[-1])
        prefixed = several or len(labels) > 1
        label: str | None = "+".join(labels) if several else ""
        if not labels and not alone:
            label = None
        watch = self.session.watch(
            component.roots,
            component.optimizers,
            label=label,
            prefixes=[f"{label}." if prefixed else "" for label in labels],
            calls=[self._take_calls(root) for root in component.roots],
            earlier=[self._earlier(root, component.tensors) for root in component.roots],
            first_step=self._said_first_step(component),
            grad_acc_steps=self._grad_acc_steps,
        )
        if not labels:
            self._labels.append(next(iter(watch.inventory.all_names), ""))

    def _said_first_step(self, component: _Component) -> FirstStep | None:
        """What ``--first-step`` says of a model that is there when training begins; ``None`` leaves it to be learned.

        Workers that a launcher starts anew go on later than the command did, if it is known where.
        """
        if self._first_step is None or self.session.steps_seen:
            return None
        said = FirstStep(self._first_step, "--first-step")
        if os.environ.get(env.RESTARTS, "0") != "0":
            learned = self._guard.run(learn_first_step, component.roots, component.optimizers)
            return learned if learned is not None and learned.value else said
        return said

    def _existing(self, component: _Component) -> Watch | None:
        """The watch that already has a model or a tensor of this component."""
        for watch in self.session.watches:
            known = [root() for root in watch.roots]
            if any(root is other for root in component.roots for other in known):
                return watch
            if any(id(tensor) in watch.inventory.by_id for tensor in component.tensors):
                return watch
        return None

    def _add_new_roots(self, watch: Watch, component: _Component) -> None:
        """Models around a watched one (a new head on a known body, say); one that brings no new tensor has no rows."""
        known = [root() for root in watch.roots]
        new = {id(tensor) for tensor in component.tensors} - watch.inventory.by_id.keys()
        for root in component.roots:
            if not any(root is other for other in known) and not new.isdisjoint(map(id, root.parameters())):
                label = unique_label(class_name(root), self._labels)
                self._labels.append(label)
                watch.add_root(root, Naming(f"{label}.", squash=self.session.config.squash_name))


@dataclass
class _Component:
    """Models and optimizers that belong together, because an optimizer trains several models, or several train one."""

    roots: list[Module]
    optimizers: list[Optimizer]
    tensors: list[Tensor]


def _components(waiting: list[_Waiting]) -> list[_Component]:
    found: dict[int, _Component] = {}  # of each model and tensor
    held: dict[int, set[int]] = {}
    for entry in waiting:
        optimizer = entry.optimizer()
        if optimizer is None:
            continue
        tensors = optimizer_parameters(optimizer)
        roots = _still_right(entry, tensors, held)
        parts = {id(part): found[id(part)] for part in (*roots, *tensors) if id(part) in found}
        first, *others = {id(component): component for component in parts.values()}.values() or [_Component([], [], [])]
        for other in (*others, _Component(roots, [optimizer], tensors)):
            known = set(map(id, first.roots))
            first.roots += [root for root in other.roots if id(root) not in known]
            first.optimizers += other.optimizers
            first.tensors += other.tensors
            found.update((id(part), first) for part in (*other.roots, *other.tensors))
    return list({id(component): component for component in found.values()}.values())


def _still_right(entry: _Waiting, tensors: list[Tensor], held: dict[int, set[int]]) -> list[Module]:
    """The models found at construction if they still hold all of the optimizer's parameters, else those that do now.

    Parameters are replaced in between when a model is sharded, for instance.

    Args:
        entry: The optimizer and its models.
        tensors: Its parameters.
        held: The parameters of each model looked at so far, for the next optimizer of the same one.
    """
    roots = [root for reference in entry.roots if (root := reference()) is not None]
    registered = registered_parameters()
    if roots and len(roots) == len(entry.roots):
        for root in roots:
            if id(root) not in held:
                held[id(root)] = {id(p) for part in root.modules() for p in registered(part).values()}
        if all(any(id(tensor) in held[id(root)] for root in roots) for tensor in tensors):
            return roots
    found: list[Module] = []
    for root in find_roots(tensors)[0]:
        inner = innermost(root)
        if not any(inner is other for other in found):
            found.append(inner)
    return found or roots  # of a model whose parameters are swapped out for a call


_monitor: InjectedMonitor | None = None


def start(settings: Settings) -> None:
    """Watch this process from its first optimizer on. Called once, when that optimizer is constructed."""
    global _monitor  # noqa: PLW0603 - one a process
    if _monitor is not None:
        return
    _monitor = InjectedMonitor(settings)
    discovery.on_optimizer.append(_monitor.optimizer_constructed)


def recorded() -> bool:
    """Whether this process has recorded, or will record, any training step."""
    return _monitor is not None and _monitor.session.place is not None


def _after_fork() -> None:
    if _monitor is not None:
        _monitor.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
