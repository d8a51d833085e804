"""Weight gradients: this rank's own, as autograd accumulates them, and reduced, as the optimizer will use them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from msmon import log
from msmon.backends.pytorch.module_hook import ParameterHook
from msmon.backends.pytorch.recorder import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from msmon.backends.pytorch.adapters.plain import PlainAdapter
    from msmon.backends.pytorch.recorder import StepRecorder
    from msmon.backends.pytorch.taps.reduction import Reduction
    from msmon.backends.pytorch.watched import Inventory, WatchedParameter
    from msmon.record.table import Row
    from msmon.runtime.guard import Guard
    from msmon.runtime.ledger import Ledger

UNREDUCED = "grad_unreduced"
REDUCED = "grad_reduced"


class _Passed(NamedTuple):
    """A parameter that the backward pass under way has reached, and its ``main_grad`` before other hooks had their turn."""

    watched: WatchedParameter
    micro_step: int
    main_grad: Tensor | None
    version: int


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no public name for it


class GradientTap:
    """Reads gradients.

    The unreduced gradient is read by a hook that autograd calls right after it has accumulated into ``.grad``: each
    backward pass of a step overwrites the row of the one before, so that the row of the step holds the sum over all its
    micro-batches. With ``every_micro_batch`` each running sum keeps a row of its own.

    Args:
        reduction: Statistics.
        adapter: Where gradients are.
        micro_step: The micro-batch of the backward pass under way.
        collecting: Whether the step under way is collected; the only thing a hook asks in a step that is not.
        every_micro_batch: Keep a row a micro-batch.
    """

    part = "recording of weight gradients"

    def __init__(
        self,
        reduction: Reduction,
        adapter: PlainAdapter,
        *,
        micro_step: Callable[[], int],
        collecting: Callable[[], bool],
        every_micro_batch: bool,
    ) -> None:
        self._reduction = reduction
        self._adapter = adapter
        self._micro_step = micro_step
        self._collecting = collecting
        self._every = every_micro_batch
        self._pending: dict[tuple[int, int], tuple[Row, Tensor]] = {}
        self._settled: set[tuple[int, int]] = set()
        self._arrivals: dict[int, dict[tuple[int, int], int]] = {}  # of each parameter: its keys, and their order
        self._counter = itertools.count()
        self._passed: list[_Passed] = []
        self._taken_away: dict[
            int, bool
        ] = {}  # parameters without .grad when their pass ended: whether main_grad has it
        self._observing = False

    def observe(self, inventory: Inventory, ledger: Ledger, guard: Guard) -> None:
        """Hear of gradients that autograd does not leave on their parameters before they are reduced."""
        if self._observing:
            return
        self._observing = True
        collecting, run = self._collecting, guard.run

        def take(find: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> None:
            for parameter, gradient in find():
                watched = inventory.by_id.get(id(parameter))
                if watched is not None and watched.selected and not self._reads_each(parameter):
                    self._take_unreduced(watched, gradient)

        def tell(find: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> None:
            if collecting():
                run(take, find)

        self._adapter.tell_unreduced(ledger, tell)

    def hook(self, parameters: Iterable[WatchedParameter], ledger: Ledger, guard: Guard) -> None:
        """Put a hook on every selected parameter that can have a gradient and has none yet.

        It goes before the hooks that are there: an optimizer that steps inside the backward pass does so in one of
        those, and leaves no gradient behind.
        """
        for watched in parameters:
            parameter: Any = watched.parameter  # torch gives its hooks no types
            wanted = parameter.requires_grad and parameter.is_leaf and self._adapter.accumulates(parameter)
            if wanted and watched.hooked != parameter._cdata:  # noqa: SLF001 - see WatchedParameter.hooked
                if watched.hooked:  # the tensor was swapped: its Python hooks are listed still, and called no more
                    parameter._post_accumulate_grad_hooks = None  # noqa: SLF001 - as above
                watched.hooked = parameter._cdata  # noqa: SLF001 - as above
                if watched.handle is not None:
                    ledger.release(watched.handle)
                hook = ParameterHook(self._collecting, self._make_reader(watched, guard))
                handle = watched.handle = parameter.register_post_accumulate_grad_hook(hook)
                ledger.keep(handle)
                hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - torch registers at the end only
                ours = next(reversed(hooks))
                for key in [key for key in hooks if key != ours]:
                    hooks[key] = hooks.pop(key)

    def _make_reader(self, watched: WatchedParameter, guard: Guard) -> Callable[[Tensor], None]:
        run, read = guard.run, self._read_unreduced

        def after_accumulation(parameter: Tensor) -> None:
            run(read, watched, parameter)

        return after_accumulation

    def _read_unreduced(self, watched: WatchedParameter, parameter: Tensor) -> None:
        gradient = self._adapter.unreduced_gradient(parameter) if self._reads_each(parameter) else None
        if gradient is None:
            self._micro_step()  # the pass counts
            return
        if self._taken_away.get(id(parameter)) is False and self._holds_unsettled(id(parameter)):
            log.say(
                f"{watched.name}: something takes .grad away after each backward pass and adds it up elsewhere than in "
                "main_grad, so grad_unreduced is the gradient of the step's last micro-batch alone",
                once="gradients:taken away",
            )
        micro_step = self._take_unreduced(watched, gradient)
        if self._adapter.keeps_gradients:
            main_grad = self._adapter.main_grad(parameter)
            self._passed.append(_Passed(watched, micro_step, main_grad, _version(main_grad)))

    def _reads_each(self, parameter: Tensor) -> bool:
        """Whether the hook on a parameter reads its gradient, and not only counts the pass."""
        return self._adapter.accumulates(parameter) and (self._every or not self._adapter.told_at_the_end(parameter))

    def pass_ends(self) -> None:
        """A backward pass has ended: gradients that hooks of the script added to ``main_grad`` meanwhile are read there."""
        passed, self._passed = self._passed, []
        for watched, micro_step, before, version in passed:
            owner = id(watched.parameter)
            main_grad = self._adapter.main_grad(watched.parameter)
            added = main_grad is not None and (main_grad is not before or _version(main_grad) != version)
            if main_grad is not None and added and self._holds_unsettled(owner):  # no optimizer has used it in a hook
                self._put_unreduced(watched, main_grad, micro_step)
            if watched.parameter.grad is None:
                self._taken_away[owner] = added
            else:
                self._taken_away.pop(owner, None)

    def _holds_unsettled(self, owner: int) -> bool:
        return any(key in self._pending and key not in self._settled for key in self._arrivals.get(owner, ()))

    def _take_unreduced(self, watched: WatchedParameter, gradient: Tensor) -> int:
        micro_step = self._micro_step()
        self._put_unreduced(watched, gradient, micro_step)
        return micro_step

    def _put_unreduced(self, watched: WatchedParameter, gradient: Tensor, micro_step: int) -> None:
        row = describe(UNREDUCED, watched.name, watched.stage, gradient, micro_step if self._every else None)
        numbers = self._reduction.one(row, gradient)
        if numbers is not None:
            key = id(watched.parameter), micro_step if self._every else 0
            self._settled.discard(key)
            if key not in self._pending:
                self._arrivals.setdefault(key[0], {})[key] = next(self._counter)
            self._pending[key] = row, numbers

    def read_reduced(
        self, recorder: StepRecorder, parameters: Sequence[WatchedParameter], divisor: Tensor | None
    ) -> None:
        """Add a row a parameter that has a gradient.

        Args:
            recorder: The step under way.
            parameters: The watched parameters of the optimizer that steps.
            divisor: Loss scale that the optimizer itself will still take out of the gradients.
        """
        named = [
            (watched, gradient)
            for watched in parameters
            if watched.writes_reduced and (gradient := self._adapter.reduced_gradient(watched.parameter)) is not None
        ]
        self._reduction.add(recorder, REDUCED, named, divisor)

    def move_unreduced(self, recorder: StepRecorder, parameters: Iterable[WatchedParameter] | None = None) -> None:
        """Hand the rows that backward passes left behind to the step, in the order in which gradients arrived."""
        taken = self._keys(None if parameters is None else (id(watched.parameter) for watched in parameters))
        pairs = [self._pending.pop(key) for key in taken]
        recorder.add([row for row, _ in pairs], [numbers for _, numbers in pairs])

    def _keys(self, owners: Iterable[int] | None) -> list[tuple[int, int]]:
        """Pending rows of these parameters (of all by default), in the order of arrival; asked once an optimizer."""
        if owners is None:
            return list(self._pending)
        found = [
            (n, key) for owner in owners for key, n in self._arrivals.get(owner, {}).items() if key in self._pending
        ]
        return [key for _, key in sorted(found)]

    def settle(self) -> None:
        """What is pending now belongs to this training step or to none: an optimizer has stepped."""
        self._settled.update(self._pending)

    def forget_settled(self) -> None:
        """The training step is over: drop what no optimizer has used in it."""
        for key in self._settled:
            self._pending.pop(key, None)
        self._settled.clear()
        self._passed = []  # of a pass whose end nobody has told of

    def forget_discarded(self, parameters: Iterable[WatchedParameter]) -> bool:
        """Drop pending rows when the gradients they are about were set to None without a step.

        Returns:
            Whether they were: accumulation begins anew.
        """
        hooked = [watched for watched in parameters if watched.hooked and self._adapter.keeps_gradients]
        if not hooked or any(self._has_gradient(watched.parameter) for watched in hooked):
            return False
        self._pending.clear()
        return True

    def _has_gradient(self, parameter: Tensor) -> bool:
        """Whether what backward passes have left of a parameter is there, be it where a hook of the script has put it."""
        if parameter.grad is not None:
            return True
        in_main_grad = self._taken_away.get(id(parameter))
        if in_main_grad is None or not self._holds_unsettled(id(parameter)):
            return False
        return not in_main_grad or self._adapter.main_grad(parameter) is not None

    @property
    def idle(self) -> bool:
        """Whether no backward pass has left a row."""
        return not self._pending

    def forget(self, owners: set[int] | None = None, *, forever: bool = False) -> bool:
        """Drop pending rows of these parameters (of all by default).

        Args:
            owners: Identities of the parameters.
            forever: They are gone.

        Returns:
            Whether none is left.
        """
        self._passed = []
        for key in self._keys(owners):
            del self._pending[key]
        for owner in owners or () if forever else ():
            self._arrivals.pop(owner, None)
            self._taken_away.pop(owner, None)
        return self.idle

    def current(
        self, parameters: Sequence[WatchedParameter]
    ) -> tuple[list[tuple[Row, Tensor]], list[tuple[Row, Tensor]]]:
        """Rows as they stand now: reduced from ``.grad``, unreduced from the latest backward pass."""
        reduced = []
        with torch.no_grad():
            for watched in parameters:
                gradient = self._adapter.reduced_gradient(watched.parameter)
                if gradient is not None:
                    row = describe(REDUCED, watched.name, watched.stage, gradient)
                    numbers = self._reduction.one(row, gradient)
                    if numbers is not None:
                        reduced.append((row, numbers))
        return reduced, list(self._pending.values())
