"""Sees the forward calls of a model's modules, and the gradients that backward passes send through their boundaries.

Nothing is put into the graph: no view, no clone, no identity function. Each of those changes in which groups autograd
sums the gradients of a tensor with several consumers, and so the bits. Instead hooks sit on nodes that are there anyway:

- the gradient of an *output* comes to the node that made the output;
- the gradient that a module sends to an *input* leaves through nodes of the module whose next edge is that of the input.
  They are found after the forward, walking from the outputs back to the input, and never past where the forward began.

A view (what a linear layer makes of three dimensions, say) that is written to later gets another node, and its own is
left out of backward passes: what the node of its base sends or gets stands in for it then, cut to the view.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from msmon import log
from msmon.backends.pytorch import events, internals
from msmon.backends.pytorch.devices import capturing
from msmon.backends.pytorch.module_hook import ModuleHook, NodeHook
from msmon.backends.pytorch.naming import unwrap, walk_modules
from msmon.backends.pytorch.structure import MOST_TENSORS, elements, parts, suffixes, tensors_of
from msmon.backends.pytorch.views import ViewOfBase
from msmon.runtime.guard import Guard
from msmon.runtime.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.autograd.graph import Node
    from torch.nn import Module

INPUT, OUTPUT = "input", "output"

_DEEP, _FRAMES_ABOVE = 48, 64
"""From how many levels of modules on Python's limit for recursion is raised, and by how much more than a frame for each."""

_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
Edge = tuple["Node", int]
"""A node of autograd's graph, and which of its outputs (forward) a tensor is."""


@dataclass
class WatchedModule:
    """One module of a watched model.

    Attributes:
        reference: The module.
        name: Its name in the files; empty for the root.
        names: All forms of its name that a target may have.
        stage: Index of its model chunk.
        calls: Forwards so far in the micro-batch ``micro_step``.
        epoch: Backward passes that the model had seen at its last forward.
        calls_before: Of ``calls`` those before the last of these.
        settled: Of ``calls`` those before the last optimizer stepped, as of its last forward.
        period: Steps of optimizers that it had seen then.
        without_graph: Forwards inside reentrant checkpointing, whose graph is made when they are computed again.
    """

    reference: weakref.ref[Module]
    name: str
    names: tuple[str, ...]
    stage: int
    micro_step: int = -1
    calls: int = 0
    epoch: int = 0
    calls_before: int = 0
    settled: int = 0
    period: int = 0
    without_graph: list[Call] = field(default_factory=list)

    def named_as(self, other: WatchedModule) -> WatchedModule:
        """This module under the names that it has now."""
        self.name, self.names = other.name, other.names
        return self


@dataclass(eq=False)
class Call:
    """One forward of one module.

    Attributes:
        module: Which.
        micro_step: Backward passes that the step has seen before it.
        number: Forwards of this module before it in this micro-batch.
        period: Steps of optimizers before it.
        again: Whether it computes again what a checkpoint has thrown away: only its graph is of interest.
        elements: Of each side, for each of its tensors, the position of the argument or item that holds it.
        suffixes: Of each side, what the names of its tensors' rows end in.
        ignored: Whether it only marks that a module under way was called in a way that is not looked at.
        handled: Identity of the exception that was being handled when it began, by which it knows one of its own.
        edges: Where the gradients of its inputs go: position of the tensor.
        bases: Where those of the bases of inputs go that are views.
        reached: Of each output whose node a backward pass has reached: the last of these passes.
        nodes: Of each output with a node: the hook on that, which lives as long.
        begin: Nodes made by the forward have sequence numbers from here on.
    """

    module: WatchedModule
    micro_step: int
    number: int
    period: int = 0
    again: bool = False
    ignored: bool = False
    handled: int = 0
    elements: dict[str, list[int]] = field(default_factory=dict)
    suffixes: dict[str, list[str]] = field(default_factory=dict)
    edges: dict[Edge, int] = field(default_factory=dict)
    bases: dict[Edge, tuple[int, ViewOfBase]] = field(default_factory=dict)
    nodes: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    reached: dict[int, tuple[str, int]] = field(default_factory=dict)
    begin: int = 0


class Observer:
    """Looks at calls; does nothing by itself. Runs guarded by the one who gives it to :class:`ModuleCalls`.

    Attributes:
        part: Its name in messages.
    """

    part: str

    def begins(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """A forward begins; its inputs, with these tensors in them, are as they came."""

    def ends(self, call: Call, output: Any, tensors: Sequence[Tensor]) -> None:  # noqa: ANN401 - whatever a module returns
        """A forward has returned, with these tensors in its output."""

    def fails(self, call: Call) -> None:
        """An exception has left a forward."""

    def wants(self, call: Call, side: str) -> bool:
        """Whether gradients of this side (:data:`INPUT`, :data:`OUTPUT`) shall be looked for."""
        del call, side
        return False

    def gradient(self, call: Call, side: str, position: int, gradient: Tensor, micro_step: int) -> None:
        """A backward pass, of this micro-batch, has brought the gradient of one of the tensors of a side."""


@dataclass
class _Hooked:
    """A module with hooks.

    Attributes:
        reference: The module.
        ledger: The hooks, none on a scripted module.
        hooks: Each with its dictionary and its key there, so that it goes back to where it was: torch.compile, which
            looks at both, then knows what it has compiled.
    """

    reference: weakref.ref[Module]
    ledger: Ledger = field(default_factory=Ledger)
    hooks: list[tuple[dict[int, Any], int, ModuleHook]] = field(default_factory=list)

    def put(self, module: Module, before: ModuleHook, after: ModuleHook) -> None:
        """Put hooks on."""
        handle = module.register_forward_pre_hook(before, with_kwargs=True)
        self.ledger.keep(handle)
        self.hooks.append((module._forward_pre_hooks, handle.id, before))  # noqa: SLF001 - torch has no public name for it
        handle = module.register_forward_hook(after, with_kwargs=True, always_call=True)
        self.ledger.keep(handle)
        self.hooks.append((module._forward_hooks, handle.id, after))  # noqa: SLF001 - as above
        self.follow(training=module.training)

    def follow(self, *, training: bool) -> None:
        """Take the hooks out for an evaluation, or put them back."""
        for held, key, hook in self.hooks:
            if training:
                held[key] = hook
            else:
                held.pop(key, None)


class _Written:
    """True for a view that has been written to.

    While it lives its version says so. Otherwise its old node does, which the write holds on to until the backward
    pass: the node of a view that nobody has used is gone when that begins.

    Args:
        tensor: The view.
        hook: A hook on its node.
    """

    def __init__(self, tensor: Tensor, hook: object) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = tensor._version  # noqa: SLF001 - torch has no public name for it
        self._hook = weakref.ref(hook)
        self._unused = False
        self._used = False

    def pass_begins(self) -> None:
        """Look whether the old node is gone before any backward pass could have freed it."""
        if self._hook() is not None:
            self._used = True
        elif not self._used:
            self._unused = True

    def pass_ends(self) -> None:
        """What is still there may be let go of by the script."""
        self._used &= self._hook() is None

    def __bool__(self) -> bool:
        tensor = self._tensor()
        return not self._unused if tensor is None else tensor._version != self._version  # noqa: SLF001 - as above


class _Thread(threading.local):
    """What is under way on one thread."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.regions: dict[Node, list[tuple[Node, int, Edge]]] = {}


class ModuleCalls:
    """The hooks on the modules of one root.

    Only modules in training have them: torch computes evaluations of some modules in another way when they have hooks.

    Args:
        root: The model; its modules are hooked at once, those it gains later when a step begins.
        arrived: Called when a forward in training begins while nobody observes yet: may call :meth:`observe`.
    """

    def __init__(self, root: Module, arrived: Callable[[], None] | None = None) -> None:
        self.root = weakref.ref(root)
        self._arrived = arrived
        self._hooked: dict[int, _Hooked] = {}
        self._looked = False
        self._children = -1
        self._epoch = 0
        self._changed: Callable[[], None] = self.hook
        self._modules: dict[int, WatchedModule] = {}
        self._observers: list[tuple[Observer, Guard]] = []
        self._listening: Callable[[], bool] = lambda: self._arrived is not None
        self._micro_step: Callable[[], int] = lambda: 0
        self._pass_reached: Callable[[], int] = lambda: 0
        self._trains: Callable[[], bool] = lambda: True
        self._thread = _Thread()
        self._period = 0
        self._recent: list[Call] = []
        self._written: list[_Written] = []
        self._partial: dict[tuple[int, int], tuple[Call, int, Tensor | None, int]] = {}
        self._guard = Guard("looking at modules")
        self._room = 0
        self.hook()
        events.on_modules.add(self)

    def hook(self) -> None:
        """Put hooks on every module of the root that has none yet. Scripted modules take none."""
        self._hooked = {key: hooked for key, hooked in self._hooked.items() if hooked.reference() is not None}
        root = self.root()
        found = list(walk_modules(root, wrappers=True)) if root is not None else []
        self._make_room(1 + max((name.count(".") for _, _, name in found), default=0))
        for module, _, _ in found:
            key = id(module)
            if not self._has(module):
                self._hooked[key] = hooked = _Hooked(weakref.ref(module))
                if not isinstance(module, torch.jit.ScriptModule):
                    hooked.put(module, ModuleHook(module, self._begins), ModuleHook(module, self._ends))

    def _make_room(self, levels: int) -> None:
        """Let as many frames more lie on each other as torch needs for modules with hooks: one a level, and ours on top.

        A model that is nested so deep that Python just bears it would fail otherwise.
        """
        room = levels + _FRAMES_ABOVE if levels > _DEEP else 0
        if room > self._room:
            sys.setrecursionlimit(sys.getrecursionlimit() + room - self._room)
            self._room = room

    def _has(self, module: Module) -> bool:
        hooked = self._hooked.get(id(module))
        return hooked is not None and hooked.reference() is module

    def mode_changed(self, module: Module) -> None:
        """A module was switched to training or to evaluation."""
        if self._has(module):
            self._hooked[id(module)].follow(training=module.training)

    def modules_wrapped(self) -> None:
        """Somebody has wrapped a module, of this root perhaps."""
        self._guard.run(self._changed)

    def _look(self) -> None:
        """Once a step: has any module a new child, or one child less?"""
        self._looked = True
        count = 0
        for hooked in list(self._hooked.values()):
            module = hooked.reference()
            children = module.__dict__["_modules"].values() if module is not None else ()
            for child in children:
                count += child is not None
                if child is not None and not self._has(child):
                    self._children = -1
                    self._changed()
                    return
        if self._children not in {-1, count}:
            self._changed()
        self._children = count

    def observe(
        self,
        modules: Sequence[WatchedModule],
        observers: Sequence[tuple[Observer, Guard]],
        *,
        listening: Callable[[], bool],
        micro_step: Callable[[], int],
        pass_reached: Callable[[], int],
        trains: Callable[[], bool],
        changed: Callable[[], None],
    ) -> None:
        """Tell these observers of the calls of these modules from now on.

        Args:
            modules: Modules of this root.
            observers: Each with the guard that it runs under.
            listening: Whether the step under way is collected: the only thing asked in a step that is not.
            micro_step: The micro-batch that a forward belongs to.
            pass_reached: Told when a backward pass comes to this model; returns its micro-batch.
            trains: Whether any parameter of the model needs a gradient now.
            changed: Called when the root has other modules than before.
        """
        self._arrived = None
        known = {id(module): old for old in self._modules.values() if (module := old.reference()) is not None}
        self._modules = {
            id(module): known.get(id(module), watched)
            for watched in modules
            if (module := watched.reference()) is not None
        }
        self._observers = list(observers)
        self._listening, self._micro_step, self._pass_reached = listening, micro_step, pass_reached
        self._trains, self._changed = trains, changed

    def undo(self) -> None:
        """Take every hook out."""
        events.on_modules.discard(self)
        for hooked in self._hooked.values():
            hooked.ledger.undo()
        with contextlib.suppress(RecursionError):  # so deep is the stack just now that the limit has to stay
            sys.setrecursionlimit(sys.getrecursionlimit() - self._room)
            self._room = 0
        self._arrived = None
        self._hooked.clear()
        self._modules.clear()
        self._observers.clear()
        self._partial.clear()
        self._written.clear()

    def remove(self) -> None:
        """The same, as the ledger of the one who made this calls it."""
        self.undo()

    def settle(self) -> None:
        """An optimizer has stepped."""
        self._period += 1

    def step_is_over(self, *, repeated: bool = False) -> None:
        """The next forward is the first of its step; what an exception left under way is forgotten.

        Args:
            repeated: Forwards since the last optimizer stepped are the first of the next step.
        """
        for call in self._recent:
            if repeated and call.period == self._period:
                call.number -= call.module.settled
        self._recent.clear()
        self._looked = False
        self._written.clear()
        self._thread.calls.clear()
        self._thread.regions.clear()
        for watched in self._modules.values():
            if repeated and watched.period == self._period:
                watched.calls, watched.calls_before = watched.calls - watched.settled, 0
            else:
                watched.micro_step = -1
            watched.settled = 0
            watched.without_graph.clear()

    def pass_begins(self) -> None:
        """A backward pass has come to the model."""
        self._epoch += 1

    def passes_discarded(self) -> None:
        """Backward passes were thrown away: forwards since the last of them are the first of the step."""
        for watched in self._modules.values():
            since = watched.calls - watched.calls_before if watched.epoch == self._epoch else 0
            watched.micro_step, watched.calls, watched.calls_before = 0, since, 0
            watched.without_graph.clear()

    # A forward

    def _begins(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._listening():
            self._guard.run(self._begins_in_collected_step, module, args, kwargs)

    def _begins_in_collected_step(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        under_way = self._thread.calls
        again = internals.graph_task() != -1
        if not module.training or not (again or under_way or _in_training()) or internals.transformed() or capturing():
            self._ignore(module, under_way)
            return
        if not (again or under_way) and not self._outermost_counts():
            return
        watched = self._modules.get(id(module))
        if watched is None or watched.reference() is not module:
            return
        if under_way and _wraps(under_way[-1].module, watched):
            return  # a compiled module that runs uncompiled: its wrapper has the call
        if not again:
            call = self._number(watched)
        elif watched.without_graph:
            call = watched.without_graph.pop()
            call.again = True
        else:
            return  # the graph of the first forward is still the one that counts
        call.handled = id(sys.exc_info()[1])
        under_way.append(call)
        self._see_inputs(call, args, kwargs)

    def _outermost_counts(self) -> bool:
        """Whether a forward that begins outside of any other is one of training; makes sure that all modules are known."""
        if self._arrived is not None:
            self._arrived()
        if not (self._listening() and self._trains()):
            return False
        if not self._looked:
            self._guard.run(self._look)
        return True

    @staticmethod
    def _ignore(module: Module, under_way: list[Call]) -> None:
        """Mark a call that is not looked at where its end could be taken for that of a call under way."""
        for call in under_way:
            if call.module.reference() is module:
                under_way.append(Call(call.module, 0, 0, ignored=True, handled=id(sys.exc_info()[1])))
                return

    def _see_inputs(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = tensors_of(elements(args, kwargs))
        tensors = self._note(call, INPUT, found, len(args), list(kwargs))
        if not call.again:
            for observer, guard in self._observers:
                guard.run(observer.begins, call, args, kwargs, tensors)
        if torch.is_grad_enabled() and self._wants(call, INPUT):
            for position, tensor in enumerate(tensors):
                edge = _edge(tensor)
                if edge is not None:
                    call.edges.setdefault(edge, position)
                view = ViewOfBase.of(tensor)
                if view is not None:
                    call.bases.setdefault(view.edge(tensor), (position, view))
        call.begin = internals.next_sequence_number() if internals.next_sequence_number is not None else 0

    @staticmethod
    def _note(
        call: Call, side: str, found: list[tuple[int, Tensor]], positional: int, keywords: Sequence[str] = ()
    ) -> list[Tensor]:
        call.elements[side] = [element for element, _ in found]
        call.suffixes[side] = suffixes(found, positional, keywords)
        if len(found) >= MOST_TENSORS:
            name = f"{call.module.name}.{side}"
            log.say(f"{name} has {MOST_TENSORS:,} tensors or more: the rest is not recorded", once=f"many:{name}")
        return [tensor for _, tensor in found]

    def _number(self, watched: WatchedModule) -> Call:
        micro_step = self._micro_step()
        if micro_step != watched.micro_step:
            watched.micro_step, watched.calls, watched.calls_before = micro_step, 0, 0
        if watched.epoch != self._epoch:
            watched.epoch, watched.calls_before = self._epoch, watched.calls
        if watched.period != self._period:
            watched.period, watched.settled = self._period, watched.calls
        watched.calls += 1
        call = Call(watched, micro_step, watched.calls - 1, self._period)
        if watched.settled:
            self._recent.append(call)
        return call

    def _ends(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ANN401 - whatever a module returns
        del args, kwargs
        if self._guard.broken:
            self._thread.calls.clear()  # they hold nodes, and so the graph
        elif self._thread.calls:
            self._guard.run(self._ends_under_way, module, output)

    def _ends_under_way(self, module: Module, output: Any) -> None:  # noqa: ANN401 - as above
        under_way = self._thread.calls
        if not any(call.module.reference() is module for call in under_way):
            return
        while (call := under_way.pop()).module.reference() is not module:
            pass  # left by something that is no Exception
        if not call.ignored:
            error = sys.exc_info()[1]
            if error is None or id(error) == call.handled:
                self._guard.run(self._see_outputs, call, output)
            else:  # torch calls this from its handler
                for observer, guard in self._observers:
                    guard.run(observer.fails, call)
        call.edges, call.bases = {}, {}  # as above
        if not under_way:
            self._thread.regions.clear()

    def _see_outputs(self, call: Call, output: Any) -> None:  # noqa: ANN401 - as above
        found = tensors_of(parts(output))
        tensors = self._note(call, OUTPUT, found, sys.maxsize)
        if not call.again:
            for observer, guard in self._observers:
                guard.run(observer.ends, call, output, tensors)
        self._watch_gradients(call, tensors)

    # Gradients

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401 - whatever the function takes
        self._guard.run(function, *arguments)

    def _watch_gradients(self, call: Call, outputs: Sequence[Tensor]) -> None:
        made = [(position, edge) for position, tensor in enumerate(outputs) if (edge := _edge(tensor)) is not None]
        if not torch.is_grad_enabled() and not call.again:
            call.module.without_graph.append(call)
            return
        if not made:
            return
        output_wanted = self._wants(call, OUTPUT)
        self._hook_outputs(call, made, count=len(self._thread.calls) == 0 or call.again, wanted=output_wanted)
        if output_wanted:
            self._hook_bases(call, outputs)
        if self._wants(call, INPUT):
            self._hook_inputs(call, [edge for _, edge in made])

    def _wants(self, call: Call, side: str) -> bool:
        return internals.next_sequence_number is not None and any(
            observer.wants(call, side) for observer, _ in self._observers
        )

    def _hook_outputs(self, call: Call, made: Sequence[tuple[int, Edge]], *, count: bool, wanted: bool) -> None:
        if not (count or wanted):
            return
        by_node: dict[Node, list[tuple[int, int]]] = {}
        for position, (node, number) in made:
            by_node.setdefault(node, []).append((position, number))
        for node, places in by_node.items():
            if not _accumulates(node):
                hook = NodeHook(functools.partial(self._guarded, self._output_gradients, call, places, wanted))
                node.register_prehook(hook)
                for position, _ in places:
                    call.nodes[position] = weakref.ref(hook)

    def _hook_bases(self, call: Call, outputs: Sequence[Tensor]) -> None:
        """Where the gradient of an output comes to when it is a view that somebody writes to."""
        for position, tensor in enumerate(outputs):
            view = ViewOfBase.of(tensor)
            hook = call.nodes[position]() if position in call.nodes else None
            if view is not None and hook is not None:
                node, number = view.edge(tensor)
                if node._sequence_nr() >= call.begin and not _accumulates(node):  # noqa: SLF001 - as above
                    written = _Written(tensor, hook)
                    self._written.append(written)
                    observe = functools.partial(
                        self._guarded, self._base_gradient, call, position, (number, view, written)
                    )
                    node.register_prehook(NodeHook(observe))

    def _base_gradient(
        self,
        call: Call,
        position: int,
        base: tuple[int, ViewOfBase, _Written],
        gradients: Sequence[Tensor | None],
    ) -> None:
        number, view, written = base
        gradient = gradients[number]
        if gradient is None or not self._in_backward() or call.reached.get(position) == events.current_backward():
            return
        if written:
            self._tell(call, OUTPUT, position, self._guard.run(view.cut, gradient))

    def _output_gradients(
        self,
        call: Call,
        places: Sequence[tuple[int, int]],
        wanted: bool,  # noqa: FBT001 - bound by functools.partial
        gradients: Sequence[Tensor | None],
    ) -> None:
        if not self._in_backward():
            return
        self._pass_reached()
        if wanted:
            for position, number in places:
                call.reached[position] = events.current_backward()
                self._tell(call, OUTPUT, position, gradients[number])

    def _hook_inputs(self, call: Call, made: Sequence[Edge]) -> None:
        """Find the nodes through which gradients leave the module towards its inputs, and hook them."""
        exits = self._exits(made, call.edges, call.begin)
        for edge in made:
            if edge not in call.edges:
                self._thread.regions.setdefault(edge[0], exits)
        leaving: dict[int, list[tuple[Node, int, ViewOfBase | None]]] = {}
        for node, slot, edge in exits:
            if edge in call.edges:
                leaving.setdefault(call.edges[edge], []).append((node, slot, None))
            elif edge in call.bases:  # the module writes to an input that is a view
                position, view = call.bases[edge]
                leaving.setdefault(position, []).append((node, slot, view))
        for position, places in leaving.items():
            for node, slot, part in places:
                place = (slot, part), len(places)
                observe = functools.partial(self._guarded, self._input_gradient, call, position, *place)
                node.register_hook(NodeHook(observe))
        for node, number in made:  # an input handed through: what comes to the output goes to the input
            position = call.edges.get((node, number), -1)
            if position >= 0 and position not in leaving and not _accumulates(node):
                node.register_prehook(
                    NodeHook(functools.partial(self._guarded, self._handed_through, call, position, number))
                )

    def _exits(self, made: Sequence[Edge], inputs: Mapping[Edge, int], begin: int) -> list[tuple[Node, int, Edge]]:
        """Edges that lead out of the forward's own graph: node, which of its edges, and where that leads.

        The graph of a module inside has been walked already: its exits stand for it.
        """
        exits: dict[tuple[Node, int], Edge] = {}  # of a module inside with several outputs each leads to the same exits
        seen: set[Node] = set()
        stack = [node for node, number in made if (node, number) not in inputs]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            inner = self._thread.regions.get(node)
            leads = inner if inner is not None else _edges_of(node)
            for source, slot, edge in leads:
                target = edge[0]
                if edge in inputs or _accumulates(target) or target._sequence_nr() < begin:  # noqa: SLF001 - as above
                    exits[source, slot] = edge
                else:
                    stack.append(target)
        return [(source, slot, edge) for (source, slot), edge in exits.items()]

    def _input_gradient(
        self,
        call: Call,
        position: int,
        place: tuple[int, ViewOfBase | None],
        expected: int,
        leaving: Sequence[Tensor | None],
        _arriving: Sequence[Tensor | None],
    ) -> None:
        if not self._in_backward():
            return
        slot, view = place
        gradient = leaving[slot] if slot < len(leaving) else None
        if gradient is not None and view is not None:
            gradient = self._guard.run(view.cut, gradient)
        if expected == 1:
            self._tell(call, INPUT, position, gradient)
            return
        key = id(call), position
        _, _, total, seen = self._partial.get(key, (call, position, None, 0))
        if gradient is not None:
            with torch.no_grad():
                total = gradient if total is None else total + gradient
        self._partial[key] = call, position, total, seen + 1
        if seen + 1 == expected:
            self._complete(key)

    def _handed_through(self, call: Call, position: int, number: int, gradients: Sequence[Tensor | None]) -> None:
        if self._in_backward():
            self._tell(call, INPUT, position, gradients[number])

    def backward_begins(self) -> None:
        """A backward pass is about to begin, of this model or another."""
        for written in self._written:
            written.pass_begins()

    def backward_ends(self) -> None:
        """A backward pass is over: what some nodes have not sent will not come."""
        for written in self._written:
            written.pass_ends()
        for key in list(self._partial):
            self._complete(key)

    def _complete(self, key: tuple[int, int]) -> None:
        call, position, total, _ = self._partial.pop(key)
        self._tell(call, INPUT, position, total)

    def _in_backward(self) -> bool:
        return self._listening() and events.in_backward()

    def _tell(self, call: Call, side: str, position: int, gradient: Tensor | None) -> None:
        if gradient is not None:
            micro_step = self._pass_reached()
            for observer, guard in self._observers:
                guard.run(observer.gradient, call, side, position, gradient, micro_step)


def _in_training() -> bool:
    """Whether a forward begun here is part of training: rollouts and evaluations switch gradients off."""
    return torch.is_grad_enabled() or events.in_checkpoint()


def _wraps(outer: WatchedModule, inner: WatchedModule) -> bool:
    """Whether the one is a wrapper around the other and stands for it in the files; that of torch.compile always does."""
    wrapper = outer.reference()
    if wrapper is None or unwrap(wrapper) is not inner.reference():
        return False
    return outer.name == inner.name or type(wrapper).__name__ == "OptimizedModule"


def _edge(tensor: Tensor) -> Edge | None:
    """Where the gradient of a tensor goes; ``None`` for one that needs none."""
    if not tensor.requires_grad:
        return None
    node = tensor.grad_fn
    if node is None:
        with torch.enable_grad():
            node = tensor.view_as(tensor).grad_fn
        return node.next_functions[0] if node is not None else None  # type: ignore[return-value]  # always a node
    return node, tensor.output_nr


def _edges_of(node: Node) -> list[tuple[Node, int, Edge]]:
    """Where a node sends gradients: itself, which of them, and to which output of which node."""
    return [(node, slot, (target, nr)) for slot, (target, nr) in enumerate(node.next_functions) if target is not None]


def _accumulates(node: Node) -> bool:
    """Whether this node is where a leaf's gradient ends."""
    return node.name() == _ACCUMULATE_GRAD
