"""What is recorded of the modules of one watched model: activations, structure, call stacks."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from msmon import log
from msmon.backends.pytorch.module_calls import ModuleCalls, WatchedModule
from msmon.backends.pytorch.naming import innermost, walk_modules, wrapped_attribute
from msmon.backends.pytorch.taps.activations import ActivationTap
from msmon.backends.pytorch.taps.features import FeatureTap
from msmon.backends.pytorch.taps.stacks import StackTap
from msmon.backends.pytorch.taps.structure import StructureTap
from msmon.plan.names import squash_all
from msmon.plan.selection import ModuleSelection
from msmon.runtime.guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.nn import Module

    from msmon.backends.pytorch.module_calls import Observer
    from msmon.backends.pytorch.recorder import StepRecorder
    from msmon.backends.pytorch.taps.reduction import Reduction
    from msmon.backends.pytorch.watched import Naming
    from msmon.config.schema import MonitorConfig
    from msmon.record.table import Row


def wants_modules(config: MonitorConfig) -> bool:
    """Whether anything of this configuration needs hooks on modules."""
    return _wants_activations(config) or config.print_struct or config.stack_info or config.recording_l2_features


def _wants_activations(config: MonitorConfig) -> bool:
    return config.xy_distribution and not (config.forward_only and config.backward_only)


class ModuleTaps:
    """Looks at the modules of one watched model.

    Args:
        config: What to record.
        reduction: Statistics.
        listening: Whether the step under way is collected.
        micro_step: The micro-batch that a forward belongs to.
        pass_reached: Told when a backward pass comes to this model; returns its micro-batch.
        trains: Whether any parameter of the model needs a gradient now.
    """

    part = "looking at modules"

    def __init__(
        self,
        config: MonitorConfig,
        reduction: Reduction,
        *,
        listening: Callable[[], bool],
        micro_step: Callable[[], int],
        pass_reached: Callable[[], int],
        trains: Callable[[], bool],
    ) -> None:
        self._told: dict[str, Callable[[], Any]] = {
            "listening": listening,
            "micro_step": micro_step,
            "pass_reached": pass_reached,
            "trains": trains,
            "changed": self.look_again,
        }
        self._selection = ModuleSelection(
            {name: target.model_dump() for name, target in config.targets.items()},
            everything=config.all_xy or config.print_struct,
        )
        self.activations: ActivationTap | None = None
        if _wants_activations(config):
            self.activations = ActivationTap(
                reduction, self._selection, forward=not config.backward_only, backward=not config.forward_only
            )
        self.structure = StructureTap() if config.print_struct else None
        self.stacks = StackTap() if config.stack_info else None
        self.features = FeatureTap(config.l2_targets, config.sa_order) if config.recording_l2_features else None
        taps = (self.activations, self.structure, self.stacks, self.features)
        self._observers: list[tuple[Observer, Guard]] = [(tap, Guard(tap.part)) for tap in taps if tap is not None]
        self._roots: list[tuple[ModuleCalls, Naming]] = []
        self._modules: list[WatchedModule] = []
        self._before: dict[int, WatchedModule] = {}
        self._collected = False
        self._looked_at = False

    def add_root(self, root: Module, naming: Naming, calls: ModuleCalls | None = None) -> ModuleCalls:
        """Look at the modules of this root too.

        Args:
            root: A module.
            naming: How its rows are named.
            calls: Hooks that are on it already.
        """
        if calls is None:
            calls = ModuleCalls(root)
        else:
            calls.hook()
        self._roots.append((calls, naming))
        self._take(calls, root, naming)
        return calls

    def look_again(self) -> None:
        """Modules were added or wrapped: hook what is new."""
        self._looked_at = False
        self._before = {id(module): known for known in self._modules if (module := known.reference()) is not None}
        self._modules = []
        for calls, naming in self._roots:
            root = calls.root()
            if root is not None:
                calls.hook()
                self._take(calls, root, naming)

    def _take(self, calls: ModuleCalls, root: Module, naming: Naming) -> None:
        known = {id(watched.reference()) for watched in self._modules}
        self._modules += [
            self._before.get(id(watched.reference()), watched).named_as(watched)
            for watched in named_modules(root, naming)
            if self._selects(watched) and id(watched.reference()) not in known
        ]
        calls.observe(self._modules, self._observers, **self._told)

    def _selects(self, watched: WatchedModule) -> bool:
        if self.features is not None and self.features.selects(watched):
            return True
        others = self.activations or self.structure or self.stacks
        return others is not None and self._selection.selects(watched.names)

    def move(self, recorder: StepRecorder) -> None:
        """Hand what was read to the step under way, which is collected."""
        self._collected = True
        for tap in (self.activations, self.features):
            if tap is not None:
                tap.move(recorder)

    def settle(self) -> None:
        """An optimizer has stepped: forwards from now on may belong to the next training step."""
        for calls, _ in self._roots:
            calls.settle()

    def step_is_over(self, *, repeated: bool = False) -> None:
        """The next forward is the first of its step.

        Args:
            repeated: Forwards since the last optimizer stepped are the first of the next step.
        """
        for calls, _ in self._roots:
            calls.step_is_over(repeated=repeated)
        if self.features is not None:
            self.features.step_is_over()

    def backward_begins(self) -> None:
        """A backward pass is about to begin."""
        for calls, _ in self._roots:
            calls.backward_begins()

    def backward_ends(self) -> None:
        """A backward pass has ended."""
        for calls, _ in self._roots:
            calls.backward_ends()

    def pass_begins(self) -> None:
        """A backward pass has come to this model."""
        for calls, _ in self._roots:
            calls.pass_begins()

    def gradients_discarded(self) -> None:
        """What backward passes have left so far belongs to no step."""
        for calls, _ in self._roots:
            calls.passes_discarded()
        if self.activations is not None:
            self.activations.forget()
        if self.features is not None:
            self.features.forget()

    def forget(self) -> None:
        """Drop everything read and not handed on."""
        if self.activations is not None:
            self.activations.forget_all()
        if self.features is not None:
            self.features.forget()

    @property
    def idle(self) -> bool:
        """Whether nothing was read since the last step."""
        return self.activations is None or self.activations.idle

    def current(self) -> tuple[list[tuple[Row, Tensor]], list[tuple[Row, Tensor]]]:
        """Activations and their gradients, read since the last step."""
        return ([], []) if self.activations is None else self.activations.current()

    def describe(self) -> dict[str, Any]:
        """The content of ``module_struct.json``."""
        return {} if self.structure is None else self.structure.document(self._modules)

    def say_what_is_compiled(self) -> None:
        """After the first collected step, and after one with other modules: say once what cannot be seen."""
        if self.activations is None or self._looked_at or not self._collected or not self._roots:
            return
        self._looked_at = True
        for watched in self._modules:
            module = watched.reference()
            if module is None:
                continue
            if wrapped_attribute(module) == "_orig_mod":
                name = watched.name or type(innermost(module)).__name__
                text = "of what it computes inside, activations cannot be seen; its input and output are recorded"
                log.say(f"{name} is compiled: {text}", once=f"compiled:{name}")
            elif getattr(module, "_compiled_call_impl", None) is not None and not type(module).__module__.startswith(
                "torch.nn."  # of those torch compiles nothing
            ):
                name = watched.name or type(module).__name__
                text = "of what it computes inside, activations cannot be seen"
                log.say(f"{name} was compiled in place: {text}", once=f"compiled:{name}")
                return
        if not self.activations.seen:
            name = type(self._roots[0][0].root()).__name__
            log.say(
                f"no forward of {name} in training was seen: no activations are recorded of what runs inside a compiled "
                "function, of scripted models, and of models in evaluation mode",
                once=f"unseen:{name}",
            )

    def undo(self) -> None:
        """Take every hook out."""
        for calls, _ in self._roots:
            calls.undo()
        self._modules.clear()


def named_modules(root: Module, naming: Naming) -> Iterator[WatchedModule]:
    """All modules of a root, each with every form of its name that a target may have."""
    found = list(walk_modules(root, wrappers=naming.raw))
    own_names = [raw if naming.raw else name for _, name, raw in found]
    short = squash_all(own_names) if naming.squash else {}
    for (module, name, raw), own in zip(found, own_names, strict=True):
        whole = (naming.prefix + own).rstrip(".")
        forms = (whole, *({name, raw} - {whole}))
        shown = (naming.prefix + short.get(own, own)).rstrip(".")
        yield WatchedModule(weakref.ref(module), shown, forms, naming.stage)
