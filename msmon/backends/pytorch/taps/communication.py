"""Communication: what this rank sends and receives through torch.distributed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from msmon import log
from msmon.backends.pytorch import communication
from msmon.backends.pytorch.recorder import describe
from msmon.runtime.guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType, FrameType

    from torch import Tensor

    from msmon.backends.pytorch.communication import Call
    from msmon.backends.pytorch.recorder import StepRecorder
    from msmon.backends.pytorch.taps.reduction import Reduction
    from msmon.config.schema import CommunicationConfig
    from msmon.record.table import Row

KIND = "cc"


@dataclass(frozen=True)
class CallSite:
    """Calls of one operator from one place of the script.

    Attributes:
        operator: Its name.
        group: The process group: its description or name.
        ranks: How many ranks it has.
        dtypes: Those of the tensors sent and received.
        stack: ``file.py[line]`` of each frame, innermost first.
    """

    operator: str
    group: str
    ranks: int
    dtypes: tuple[str, ...]
    stack: tuple[str, ...]


@dataclass(eq=False)
class _Seen:
    """A call of the step under way whose outputs are not there yet."""

    operator: str
    count: int
    number: int
    outputs: int

    @property
    def name(self) -> str:
        """Its operator and how many calls of that the step has seen before."""
        return f"{self.operator}_{self.count}"


@dataclass
class _Step:
    """What the step under way has left so far."""

    finished: list[tuple[_Seen, Row, Tensor]] = field(default_factory=list)
    open: set[_Seen] = field(default_factory=set)
    calls: int = 0
    calls_by_name: dict[str, int] = field(default_factory=dict)
    settled: int = 0
    settled_by_name: dict[str, int] = field(default_factory=dict)

    def split(self) -> _Step:
        """Take out what was called since the last optimizer stepped, as the beginning of a step of its own."""
        rest = _Step(calls=self.calls - self.settled)
        rest.finished = [entry for entry in self.finished if entry[0].number > self.settled]
        rest.open = {seen for seen in self.open if seen.number > self.settled}
        self.finished = [entry for entry in self.finished if entry[0].number <= self.settled]
        self.open -= rest.open
        for seen in {entry[0] for entry in rest.finished} | rest.open:
            seen.count -= self.settled_by_name.get(seen.operator, -1) + 1
            seen.number -= self.settled
        for name, count in self.calls_by_name.items():
            if count > self.settled_by_name.get(name, -1):
                rest.calls_by_name[name] = count - self.settled_by_name.get(name, -1) - 1
        return rest


class CommunicationTap:
    """Reads outputs of communication operators, and with ``cc_pre_hook`` their inputs.

    A call belongs to the step in which it is made. Outputs that are not there when that step's table goes are left out
    and counted in :attr:`left_out`.

    Args:
        reduction: Statistics.
        config: Which calls, and whether their inputs.
        collecting: Whether the step under way is collected.
    """

    part = "recording of communication"

    def __init__(self, reduction: Reduction, config: CommunicationConfig, collecting: Callable[[], bool]) -> None:
        self.reduction = reduction
        self.left_out = 0
        self._config = config
        self._collecting = collecting
        self._lines = CodeLines(config.cc_codeline)
        self._guard = Guard(self.part)
        self._step = _Step()
        self._sites: dict[CallSite, int] = {}
        self._handed_on: dict[str, int] = {}

    def attach(self) -> None:
        """See calls from now on; a torch that cannot show them is told of once."""
        communication.subscribe(self)

    def detach(self) -> None:
        """See calls no more, and take everything out of torch again."""
        communication.unsubscribe(self)
        if self.left_out:
            log.say(f"{self.left_out} outputs of communication came after their step had been written: not recorded")
            self.left_out = 0

    @property
    def log_only(self) -> bool:
        """Whether calls are only noted, to be listed."""
        return self._config.cc_log_only

    # communication.Listener

    def collecting(self) -> bool:
        """See :class:`msmon.backends.pytorch.communication.Listener`."""
        return not self._guard.broken and (self._config.cc_log_only or self._collecting())

    def begins(self, call: Call) -> object | None:
        """See :class:`msmon.backends.pytorch.communication.Listener`."""
        return self._guard.run(self._begins, call)

    def ends(self, call: Call, said: object) -> None:
        """See :class:`msmon.backends.pytorch.communication.Listener`."""
        self._guard.run(self._ends, call, said)

    def _begins(self, call: Call) -> _Seen | None:
        if self._config.cc_log_only:
            site = _site(call)
            self._sites[site] = self._sites.get(site, 0) + 1
            return None
        step = self._step
        name = call.operator if call.group is dist.group.WORLD else f"{call.operator}[{_label(call.group)}]"
        count = step.calls_by_name[name] = step.calls_by_name.get(name, -1) + 1
        step.calls += 1
        if not self._lines.match(call.caller):
            return None
        seen = _Seen(name, count, step.calls, len(call.outputs))
        if self._config.cc_pre_hook:
            self._read(seen, "input", call.inputs)
        if not call.outputs:
            return None
        step.open.add(seen)
        return seen

    def _ends(self, call: Call, seen: Any) -> None:  # noqa: ANN401 - what _begins returned
        if seen in self._step.open:
            self._step.open.discard(seen)
            self._read(seen, "output", call.outputs)

    def _read(self, seen: _Seen, which: str, tensors: Sequence[Tensor]) -> None:
        for number, tensor in enumerate(tensors):
            suffix = f"_{number}" if len(tensors) > 1 else ""
            row = describe(KIND, f"{which}{suffix}", 0, tensor)
            numbers = self.reduction.one(row, tensor)
            if numbers is not None:
                self._step.finished.append((seen, row, numbers))

    # Steps

    def settle(self) -> None:
        """An optimizer has stepped: what was called until now belongs to this training step."""
        self._step.settled, self._step.settled_by_name = self._step.calls, dict(self._step.calls_by_name)

    def move(self, recorder: StepRecorder, *, settled_only: bool = False, continued: bool = False) -> None:
        """The step is over: hand its rows on, in the order of the calls.

        Args:
            recorder: The step.
            settled_only: What was called since the last optimizer stepped belongs to the next step.
            continued: This belongs to the step whose rows were handed on last.
        """
        with communication.settled():
            step, self._step = self._step, self._step.split() if settled_only else _Step()
        late = sum(seen.outputs for seen in step.open)
        if late and not self.left_out:
            name = next(iter(step.open)).name
            log.say(
                f"{name} is not complete when its step ends: its outputs are not recorded", once="communication:late"
            )
        self.left_out += late
        if continued:
            for seen in {entry[0] for entry in step.finished}:
                seen.count += self._handed_on.get(seen.operator, -1) + 1
        before = self._handed_on if continued else {}
        self._handed_on = before | {name: before.get(name, -1) + 1 + n for name, n in step.calls_by_name.items()}
        step.finished.sort(key=lambda entry: entry[0].number)
        rows = [row._replace(name=f"{seen.name}.{row.name}") for seen, row, _ in step.finished]
        recorder.add(rows, [numbers for _, _, numbers in step.finished])

    @property
    def idle(self) -> bool:
        """Whether the step under way has left no row."""
        return not self._step.finished and not self._step.open

    def drop(self) -> None:
        """Calls so far belong to a step that is not collected."""
        self._step = _Step()

    def forget(self) -> None:
        """After a fork: what the parent saw is the parent's."""
        communication.start_anew()
        self._step = _Step()

    # cc_log_only

    def describe_calls(self) -> dict[CallSite, int]:
        """Where calls came from under ``cc_log_only``, in the order of their first, and how many came from there."""
        return dict(self._sites)

    def log_lines(self) -> list[str]:
        """The same in words."""
        return [
            f"{site.operator} of {', '.join(site.dtypes)} in group {site.group} ({site.ranks} ranks), "
            f"{count} {'call' if count == 1 else 'calls'}: {' < '.join(site.stack) or 'no Python frame'}"
            for site, count in self._sites.items()
        ] or ["no communication was seen"]


class CodeLines:
    """Whether a call comes from one of the places named in ``cc_codeline``.

    A line of code is compared with the patterns once.

    Args:
        patterns: Regular expressions searched in ``file.py[line]``, the path being whole. None: every place is named.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._known: dict[tuple[CodeType, int], bool] = {}

    def match(self, caller: FrameType | None) -> bool:
        """Whether any frame that led to the call does."""
        return not self._patterns or any(map(self._named, communication.call_stack(caller)))

    def _named(self, frame: FrameType) -> bool:
        place = frame.f_code, frame.f_lineno
        known = self._known.get(place)
        if known is None:
            text = _place(frame)
            known = self._known[place] = any(pattern.search(text) for pattern in self._patterns)
        return known


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}[{frame.f_lineno}]"


def _site(call: Call) -> CallSite:
    dtypes = dict.fromkeys(str(tensor.dtype) for tensor in (*call.inputs, *call.outputs))
    stack = tuple(map(_place, communication.call_stack(call.caller)))
    return CallSite(call.operator, _label(call.group), call.group.size(), tuple(dtypes), stack)


def _label(group: Any) -> str:  # noqa: ANN401 - torch gives groups no types
    """What the script calls a group, else torch's name for it."""
    description = getattr(group, "group_desc", "")
    return str(group.group_name if description in {"", "undefined"} else description)
