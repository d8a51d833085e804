"""One attach period: which models are watched, what happens to them, where it is written.

A session opens nothing before training shows itself: the first backward pass of a watched model installs the end-of-
process handling, the first training step makes the directory and starts the writer. So launchers, data loader workers
and processes that only construct a model leave no trace.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import os
import queue
import shlex
import sys
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from msmon import env, log
from msmon.alerts.setup import make_alerts
from msmon.alerts.stage import JudgedSink
from msmon.backends.pytorch import events
from msmon.backends.pytorch.adapters import choose_adapter, deepspeed, step_counts
from msmon.backends.pytorch.devices import capturing
from msmon.backends.pytorch.dynamic import DynamicRun
from msmon.backends.pytorch.first_step import UNKNOWN, FirstStep, learn_first_step
from msmon.backends.pytorch.internals import step_code
from msmon.backends.pytorch.kernels.choose import choose_kernel
from msmon.backends.pytorch.place import current_place, leave_process_group, shared_run_id
from msmon.backends.pytorch.run_report import describe_model, run_report
from msmon.backends.pytorch.stop import CommonStop
from msmon.backends.pytorch.taps import stacks
from msmon.backends.pytorch.taps.communication import CommunicationTap
from msmon.backends.pytorch.taps.reduction import Reduction
from msmon.backends.pytorch.watch import Watch
from msmon.backends.pytorch.watched import Naming
from msmon.bootstrap import discovery, unreached
from msmon.bootstrap.process import leave_at_once
from msmon.bootstrap.settings import marks_path
from msmon.config.explain import without_effect
from msmon.plan.selection import Selection
from msmon.regular_file import write_whole
from msmon.runtime.guard import Guard
from msmon.runtime.interruption import from_signal_handler
from msmon.runtime.references import IdentitySet
from msmon.runtime.run_directory import make_run_directory
from msmon.runtime.termination import Termination
from msmon.runtime.writer import STALL_LIMIT, Writer
from msmon.sinks import tensorboard
from msmon.sinks.base import RestoringSink, SeveralSinks
from msmon.sinks.csv import CsvSink
from msmon.sinks.tensorboard import TensorBoardSink
from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import FrameType

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from msmon.alerts.options import AlertOptions
    from msmon.alerts.stage import Alerts
    from msmon.backends.base import NamedParameter
    from msmon.backends.pytorch.adapters.steps import StepUnderWay
    from msmon.backends.pytorch.events import Arguments
    from msmon.backends.pytorch.module_calls import ModuleCalls
    from msmon.config.schema import MonitorConfig
    from msmon.record.table import StepTable
    from msmon.runtime.process import Place
    from msmon.runtime.run_directory import RunDirectory
    from msmon.sinks.base import Sink

LOCK_LIMIT = 5.0
"""Seconds that the end of the process waits for a thread that is inside msmon."""

_numbers = itertools.count()
_sessions: IdentitySet[Session] = IdentitySet()


@dataclass
class _Output:
    """Where a session writes, once it does."""

    directory: RunDirectory
    rank: int
    config: MonitorConfig
    writer: Writer
    alerts: Alerts | None
    make_alerts: Callable[[MonitorConfig], Alerts | None]

    @classmethod
    def into(
        cls,
        directory: RunDirectory,
        rank: int,
        config: MonitorConfig,
        make_alerts: Callable[[MonitorConfig], Alerts | None],
        make_writer: Callable[[Sink], Writer],
    ) -> _Output:
        alerts = make_alerts(config)
        sink = _make_sink(directory, rank, config, alerts, resumed=directory.resumed)
        return cls(directory, rank, config, make_writer(sink), alerts, make_alerts)

    def submit(self, table: StepTable, config: MonitorConfig) -> None:
        if config is not self.config:
            before, self.config = self.config, config
            self.drain()
            self.writer.sink.close()
            if config.alert != before.alert:
                self._change_rules()
            self.writer.sink = _make_sink(self.directory, self.rank, config, self.alerts)
        self.writer.submit(table)

    def _change_rules(self) -> None:
        before = self.alerts
        if before is not None:
            before.release()
        self.alerts = self.make_alerts(self.config)
        if before is not None and self.alerts is not None:
            self.alerts.found, self.alerts.first = before.found, before.first

    def drain(self) -> None:
        if self.writer.drain() and self.alerts is not None:
            self.alerts.flush()

    def end(self) -> None:
        """Everything is written, by no thread any more."""
        if self.writer.end() and self.alerts is not None:
            self.alerts.flush()

    def close(self) -> None:
        """After :meth:`end`: a disk that hangs is not waited for once more than need be."""
        self.writer.close()
        self.release()

    def release(self) -> None:
        """Other processes may have the files: this one is done with them, or is a child of the one that has them."""
        self.directory.release()
        if self.alerts is not None:
            self.alerts.release()


def _make_sink(
    directory: RunDirectory, rank: int, config: MonitorConfig, alerts: Alerts | None, *, resumed: bool = False
) -> Sink:
    sink: Sink
    if config.format == "tensorboard":
        sink = TensorBoardSink(directory.path, rank, config.columns, resumed=resumed)
    else:
        sink = CsvSink(directory.path, config.columns, config.ndigits, config.step_count_per_record)
        if config.ur_distribution and tensorboard.installed():
            sink = SeveralSinks(sink, TensorBoardSink(directory.path, rank, config.columns, histograms_only=True))
    sink = RestoringSink(sink, directory.restore)
    return sink if alerts is None else JudgedSink(sink, config.statistics, alerts)


@dataclass
class _EngineStep:
    """A training step that an engine makes of any number of steps of an optimizer.

    Attributes:
        optimizer: The optimizer.
        watch: The model that it trains.
        taken: Whether it has stepped.
    """

    optimizer: Optimizer
    watch: Watch
    taken: bool = False


class Session:
    """Watches models and writes what it sees.

    Args:
        config: What to record.
        output_root: Where run directories go.
        injected: The settings of ``msmon run`` when it started this process, for ``run.json``.
        on_training: Called when a backward pass begins and, with the optimizer, when one steps that is not watched:
            may add models.
        config_path: Where the configuration was read from. With ``DYNAMIC_MONITOR`` the file is followed.
        alert_options: What the command line says of alerts.
        pipeline: Place of this rank in its pipeline, and the ranks of that.
        options: Keys from the command line, which go over those of the file.
        temporary: The output is removed when the command has ended: it is not named in what is said at the end.
    """

    def __init__(
        self,
        config: MonitorConfig,
        output_root: str | None = None,
        *,
        injected: dict[str, Any] | None = None,
        on_training: Callable[[Optimizer | None], None] | None = None,
        config_path: str = "",
        alert_options: AlertOptions | None = None,
        pipeline: Callable[[], tuple[int, Sequence[int]]] | None = None,
        options: Mapping[str, Any] | None = None,
        temporary: bool = False,
    ) -> None:
        self._number = next(_numbers)
        self._dynamic: DynamicRun | None = None
        if config_path and env.dynamic_requested():
            self._dynamic = DynamicRun(config_path, config, self._number, options)
            config = self._dynamic.config
        self.config = config
        self.watches: list[Watch] = []
        self.place: Place | None = None
        self._kernel = choose_kernel()
        self.guard = Guard("monitoring")
        self._output_guard = Guard("writing")
        self._first_step_guard = Guard("learning the number of the first step")
        self.output: _Output | None = None
        self.steps_seen = 0
        self.steps_collected = 0
        self.steps_cut_short = 0
        self._models: list[dict[str, Any]] = []
        self._report: dict[str, Any] | None = None  # what run.json shall say, until it does
        self._unwritten: deque[tuple[Path, str, RunDirectory | None]] = deque()  # other documents, likewise
        self._late: list[tuple[StepTable, MonitorConfig]] = []
        self._unmatched: list[str] = []
        self._opening: threading.Thread | None = None
        self._opening_hangs = False
        self._opening_lock = threading.RLock()
        self._output_root = Path(output_root or env.output_root())
        self._injected = injected or {}
        self._on_training = on_training
        self._alert_options = alert_options
        self._pipeline = pipeline
        self._temporary = temporary
        self._common_stop: CommonStop | None = None
        self._termination: Termination | None = None
        self._under_way: dict[int, list[tuple[Optimizer, Watch | None]]] = {}
        self._scales: dict[int, Tensor | None] = {}
        self._engine_step: _EngineStep | None = None
        self._unwritable = False
        self._stopping = False
        # A dying model is told of by code in C: what a signal handler raises while Python code runs there is lost.
        self._gone: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._owners: list[weakref.ref[Any]] = []
        self._lock = threading.RLock()  # of the output, which threads share; a signal handler may come back in
        self._stopped = False
        self._summarized = False
        _sessions.add(self)
        events.subscribe(self)
        self._log_calls_until = 1
        self.communication = self._make_communication_tap(config) if self._dynamic is None else None

    def _make_communication_tap(self, config: MonitorConfig) -> CommunicationTap | None:
        """Communication belongs to the process; its rows go with the steps of one model.

        The tap is there before any model is watched, since the first step communicates before its backward pass.
        """
        if not config.cc_distribution.enable:
            return None
        reduction = Reduction(self._kernel, [Statistic(op) for op in config.statistics], config.eps)
        tap = CommunicationTap(reduction, config.cc_distribution, self._collecting_communication)
        tap.attach()
        return tap

    def _follow(self, watch: Watch) -> None:
        """A model of a dynamic run has begun, changed or ended recording; communication follows if it goes with that."""
        records = not watch.gate.finished
        if watch is self._leading:
            if self.communication is not None:
                self.communication.detach()
            self.communication = self._make_communication_tap(watch.config) if records else None
            watch.communication = self.communication
            self._log_calls_until = self.steps_seen + 2  # the step that has just ended is not counted yet
        if records:
            self._warn(watch.config)

    def _collecting_communication(self) -> bool:
        first = self.config.start_step == 0
        leading = self._leading
        collecting = leading.collecting if leading is not None else first and not self.watches
        return collecting and not capturing()

    @property
    def _leading(self) -> Watch | None:
        """The model whose steps communication goes with: the first, unless that was switched off."""
        return next((watch for watch in self.watches if not watch.guard.broken), None)

    def _lend_communication(self) -> None:
        leading = self._leading
        if leading is not None:
            leading.communication = self.communication

    # What is watched

    def watch(
        self,
        models: Sequence[Module],
        optimizers: Sequence[Optimizer],
        *,
        label: str | None = "",
        prefixes: Sequence[str] = (),
        calls: Sequence[ModuleCalls | None] = (),
        earlier: Sequence[Sequence[NamedParameter[Any]]] = (),
        raw_names: bool = False,
        first_step: FirstStep | None = None,
        grad_acc_steps: int | None = None,
        main_grad: bool = True,
    ) -> Watch:
        """Watch a model (or the chunks of one) with the optimizers that train it.

        Args:
            models: The model, its chunks, or several models that one optimizer trains.
            optimizers: What trains them.
            label: The model's name in ``steps.csv``; ``None`` for the name of its first parameter.
            prefixes: Put before the names of each model's parameters.
            calls: Hooks that are on each model's modules already.
            earlier: Parameters that each model had when its optimizer was constructed.
            raw_names: Names with the prefixes of wrappers, each model being a chunk with its own ``vpp_stage``.
            first_step: Number of the first training step, and who said it; ``None`` learns it.
            grad_acc_steps: Micro-batches a step; ``None`` counts backward passes.
            main_grad: Read ``main_grad`` where a parameter has one.
        """
        for part in (part for model in models for part in model.modules()):
            discovery.note_module(part)  # in a script that calls us, nobody has noted them
        events.follow_frameworks()
        start = first_step or self._first_step_guard.run(learn_first_step, models, optimizers) or FirstStep()
        self._say_first_step(start)
        watch = Watch(
            self.config,
            self._kernel,
            choose_adapter(models, optimizers, main_grad=main_grad),
            self._emit,
            label=label or "",
            first_step=start,
            grad_acc_steps=grad_acc_steps,
            gate=self._dynamic.gate(start.value) if self._dynamic else None,
        )
        watch.on_step = self._count_step
        if self._dynamic is not None:
            watch.finished = self._dynamic.finished
            watch.follows = lambda followed: self.guard.run(self._follow, followed)
        for number, model in enumerate(models):
            prefix = prefixes[number] if prefixes else ""
            naming = Naming(prefix, number if raw_names else 0, raw_names, self.config.squash_name)
            watch.add_root(model, naming, calls[number] if calls else None, earlier[number] if earlier else ())
        for optimizer in optimizers:
            watch.add_optimizer(optimizer)
        if label is None:
            watch.label = next(iter(watch.inventory.all_names), "")
        self._owners = [owner for owner in self._owners if owner() is not None]
        self._owners += [weakref.ref(owner, self._gone.put) for owner in models or optimizers]
        self.watches.append(watch)
        leading = self._leading
        if self.communication is not None and leading is not None and not leading.collecting:
            self.communication.drop()  # until now nobody knew the number of the step under way
        self._lend_communication()
        self._describe_run()
        return watch

    @staticmethod
    def _say_first_step(start: FirstStep) -> None:
        if current_place().rank != 0:
            return
        if start.source == UNKNOWN:
            log.say(
                "an optimizer has loaded its state, which does not say after how many steps: they are numbered from 0; "
                "--first-step N sets another number",
                once="first step unknown",
            )
        elif start.value:
            log.say(f"training continues at step {start.value} ({start.source})", once=f"first step {start.value}")

    def reconfigure(self, config: MonitorConfig) -> None:
        """Go on with other ``ops`` from each model's next training step on, in the same directory."""
        self.config = config
        for watch in self.watches:
            watch.reconfigure(config)

    def find(self, optimizer: Optimizer) -> Watch | None:
        """The watched model that an optimizer trains."""
        return next((watch for watch in self.watches if watch.owns(optimizer)), None)

    def _drop_dead(self) -> None:
        """A module is gone; models that are gone altogether let go of their parameters.

        Called on the writer thread as soon as it is free, and when a backward pass begins: a last table waits for the next one.
        """
        for watch in [watch for watch in self.watches if not watch.alive]:
            try:
                self.watches.remove(watch)
            except ValueError:  # another thread is at it
                continue
            watch.emit = lambda *table: self._late.append(table)
            watch.cut_short(normally=True)
            _let_go(watch)
        self._lend_communication()

    # What happens (events.Listener)

    def backward_begins(self) -> None:
        """See :class:`msmon.backends.pytorch.events.Listener`."""
        self.guard.run(self._backward_begins)

    def _backward_begins(self) -> None:
        self._drop_dead()
        self._leave_abandoned_steps()
        self._leave_abandoned_engine_step()
        if self._on_training is not None:
            self._on_training(None)
        if self.watches and self.place is None:
            self._arrive()
        for watch in list(self.watches):
            watch.backward_begins()

    def backward_ends(self) -> None:
        """See :class:`msmon.backends.pytorch.events.Listener`."""
        for watch in list(self.watches):
            watch.backward_ends()

    def gradients_zeroed(self, owner: Optimizer | Module) -> None:
        """See :class:`msmon.backends.pytorch.events.Listener`."""
        for watch in list(self.watches):
            watch.gradients_zeroed(owner)

    def step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """See :class:`msmon.backends.pytorch.events.Listener`."""
        return self.guard.run(self._step_begins, optimizer, args, kwargs)

    def _step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        self._leave_abandoned_steps(starting=optimizer)
        watch = self._find_new(optimizer)
        if watch is None:
            return None
        if self._engine_step is not None and self._engine_step.watch is watch:
            self._engine_step.taken = True
            self._take_gradients(optimizer, watch)
            return None
        if any(outer is watch for _, outer in self._stepping):
            self._stepping.append((optimizer, None))  # inside another step of the same model: the outer one counts
            return None
        self._training_step_begins()
        inner = watch.wrapped_by(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._stepping.append((optimizer, watch))
        watch.step_begins(optimizer, inner, backward_done=not callable(closure))
        take = functools.partial(self._take_gradients, optimizer, watch)
        if not callable(closure):
            take()
            return None
        observed = _Observed(closure, functools.partial(self.guard.run, take))
        if "closure" in kwargs:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def _find_new(self, optimizer: Optimizer) -> Watch | None:
        """The watched model that an optimizer trains, which may become one only now."""
        if step_counts.makes_state_only(optimizer):
            return None
        if capturing():
            log.say("a graph of the device is being captured: steps inside it are not recorded", once="capturing")
            return None
        watch = self.find(optimizer)
        if watch is None and self._on_training is not None and not deepspeed.in_construction():
            self._on_training(optimizer)
            watch = self.find(optimizer)
        return watch

    def _training_step_begins(self) -> None:
        if self.place is None:
            self._arrive()
        tap = self.communication
        if tap is not None and tap.log_only and self.steps_seen >= self._log_calls_until:
            self._show_calls_and_stop(tap)

    def engine_steps(self, find: Callable[[], StepUnderWay | None]) -> Callable[[bool], None]:
        """See :class:`msmon.backends.pytorch.events.Listener`."""
        self.guard.run(self._engine_step_begins, find)
        return self._engine_stepped

    def _engine_step_begins(self, find: Callable[[], StepUnderWay | None]) -> None:
        found = find()
        self._leave_abandoned_steps()
        self._leave_abandoned_engine_step()
        watch = None if found is None else self._find_new(found.optimizer)
        if found is None or watch is None:
            return
        self._training_step_begins()
        self._engine_step = _EngineStep(found.optimizer, watch)
        watch.step_begins(found.optimizer, watch.wrapped_by(found.optimizer), backward_done=True)
        scale = found.loss_scale
        if isinstance(scale, torch.Tensor):
            watch.note("grad_scale", scale)
        elif scale != 1:
            watch.note("grad_scale", torch.tensor(scale))

    def _engine_stepped(self, complete: bool) -> None:  # noqa: FBT001 - see Listener
        if complete:
            self.guard.run(self._engine_step_ends)
        self.guard.run(self._leave_abandoned_engine_step)
        if complete:
            self._stop_if_asked()

    def _engine_step_ends(self) -> None:
        step, self._engine_step = self._engine_step, None
        if step is not None:  # without a step of its optimizer, gradients were not finite
            self._step_ends(step.watch, step.optimizer, skipped=not step.taken)

    def _leave_abandoned_engine_step(self) -> None:
        step, self._engine_step = self._engine_step, None
        if step is not None:
            step.watch.abandon()

    def _show_calls_and_stop(self, tap: CommunicationTap) -> None:
        """What ``cc_log_only`` asks for: one training step, then where its communication came from, and no more."""
        for line in tap.log_lines():
            log.say(line)
        log.say("cc_log_only: the run stops before its second optimizer step")
        self._stop()

    def _take_gradients(self, optimizer: Optimizer, watch: Watch) -> None:
        watch.take_gradients(optimizer, self._scales.pop(id(optimizer), None))

    def step_ends(self, optimizer: Optimizer) -> None:
        """See :class:`msmon.backends.pytorch.events.Listener`."""
        if self._stepping and self._stepping[-1][0] is optimizer:
            _, watch = self._stepping[-1]
            if watch is not None:
                self._scales.pop(id(optimizer), None)
                self.guard.run(self._step_ends, watch, optimizer)
            self._stepping.pop()
        if self._engine_step is None:
            self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self._stopping or (self._common_stop is not None and self._common_stop.due(self.steps_seen)):
            self._stop()

    def _step_ends(self, watch: Watch, optimizer: Optimizer, *, skipped: bool = False) -> None:
        if self._dynamic is None:
            self.open()
        before = watch.rounds.step
        watch.step_ends(optimizer, skipped=skipped)
        if not watch.described:
            self._describe_run()
        for other in self.watches:
            other.left_over |= other is not watch
        if watch.modules is not None and watch.rounds.step > before:
            watch.reports.run(self._report_modules, watch)

    def _report_modules(self, watch: Watch) -> None:
        """After a training step of this model: what is said of its modules once, not step by step."""
        if watch.modules is None:
            return
        watch.modules.say_what_is_compiled()
        if watch.modules.stacks is not None and self.output is not None and watch.gate.collected == 1:
            found = [other.modules.stacks for other in self.watches if other.modules and other.modules.stacks]
            directory = self.output.directory
            self._unwritten.append((directory.path / stacks.FILE, stacks.content(found), directory))
            self._gone.put(self)
        if self.config.print_struct and self.place is not None:
            stepped = [other for other in self.watches if other.rounds.step > other.first_step.value]
            if len(stepped) == len(self.watches) or watch.rounds.step > watch.first_step.value + 1:
                document = {
                    key: value for other in stepped if other.modules for key, value in other.modules.describe().items()
                }
                path = self._output_root / "module_struct" / f"rank{self.place.rank}" / "module_struct.json"
                self._unwritten.append((path, json.dumps(document, indent=2, ensure_ascii=False) + "\n", None))
                log.say(f"the structure of the model is in {path}; stopping after the first step, as print_struct asks")
                self._stopping = True

    @staticmethod
    def _write_document(path: Path, text: str, directory: RunDirectory | None) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if directory is None:
                write_whole(path, text)
            else:
                directory.add(path.name, text)
        except OSError as error:
            log.say(f"{path} could not be written ({error.strerror}), training goes on")

    def _stop(self) -> None:
        """End the run, as the user asked: everything is written, and the process ends with exit code 0.

        Raises:
            SystemExit: The first time, on the main thread; it runs the script's own ``finally`` blocks.
        """
        if not self._stopped and threading.current_thread() is threading.main_thread():
            self._stopped = discovery.stopped = True
            self.finish()
            atexit.register(leave_process_group)
            raise SystemExit(0)
        self.finish()  # an exception would end this thread only, or somebody has caught the first one
        leave_at_once()

    def _count_step(self) -> None:
        self.steps_seen += 1
        if self._dynamic is not None:
            self._dynamic.step_ends()

    def scaler_steps(self, optimizer: Optimizer, scale: Tensor | None) -> Callable[[], None]:
        """See :class:`msmon.backends.pytorch.events.Listener`."""
        return self.guard.run(self._scaler_steps, optimizer, scale) or _nothing

    def _scaler_steps(self, optimizer: Optimizer, scale: Tensor | None) -> Callable[[], None]:
        watch = self.find(optimizer)
        if self._engine_step is not None and self._engine_step.watch is watch:
            return _nothing  # the engine's step is what counts
        collecting = watch is not None and watch.collecting
        self._scales[id(optimizer)] = scale.clone() if scale is not None and collecting else None
        return functools.partial(self.guard.run, self._scaler_stepped, optimizer)

    def _scaler_stepped(self, optimizer: Optimizer) -> None:
        if id(optimizer) not in self._scales:
            return  # it stepped
        watch = self.find(optimizer)
        if watch is None:
            del self._scales[id(optimizer)]
            return
        self._stepping.append((optimizer, watch))
        watch.step_begins(optimizer, [], backward_done=True)
        self._take_gradients(optimizer, watch)
        self._step_ends(watch, optimizer, skipped=True)
        self._stepping.pop()

    @property
    def _stepping(self) -> list[tuple[Optimizer, Watch | None]]:
        """Steps under way on this thread, outermost first; inside another of the same model without that model."""
        return self._under_way.setdefault(threading.get_ident(), [])

    def _leave_abandoned_steps(self, starting: Optimizer | None = None) -> None:
        """Steps that an exception has left: they are under way no longer, though nobody told us that they ended.

        Ctrl-C may have left msmon itself at any point of a step; the watch knows how far it came.
        """
        while self._stepping:
            optimizer, watch = self._stepping[-1]
            under_way = _steps_under_way(optimizer) - (optimizer is starting)
            if under_way >= sum(other is optimizer for other, _ in self._stepping):
                return
            self._stepping.pop()
            if watch is not None:
                watch.abandon()

    # Output

    def _arrive(self) -> None:
        """Training has begun: see who we are, and make sure that the end of the process loses nothing."""
        self.place = current_place()
        log.set_rank(*self.place)
        chosen = self.config.module_ranks
        absent = [str(rank) for rank in chosen if rank >= self.place.world_size]
        if absent and self.place.rank == 0:
            log.say(
                f"module_ranks: this run has no rank {', '.join(absent)}; its ranks are below {self.place.world_size}"
            )
        if self._dynamic is not None:
            self._dynamic.start(self.place)
        elif chosen and self.place.rank not in chosen and not self.config.print_struct:  # which stops every rank
            self._leave()
            return
        self._termination = Termination(self.finish)
        self._warn(self.config)

    def open(self) -> None:
        """Make the directory and start the writer, once. A place that cannot be written is said once."""
        if self.output is not None or self._unwritable:
            return
        opening = self._opening
        if opening is None:
            opening = threading.Thread(target=self._open_guarded, name="msmon-opening", daemon=True)
            try:
                opening.start()
            except RuntimeError:  # the interpreter is shutting down and starts no more threads
                self._open_guarded()
                return
            self._opening = opening
        left = 0.0 if self._opening_hangs else STALL_LIMIT
        while opening.is_alive() and left > 0:
            opening.join(min(left, 0.1))
            left -= 0.1
        if not opening.is_alive():
            self._opening, self._opening_hangs = None, False
        elif not self._opening_hangs:
            self._opening_hangs = True
            log.say(f"{self._output_root} has not answered for {STALL_LIMIT:.0f} s: nothing is recorded until it does")

    def _open_guarded(self) -> None:
        with self._opening_lock:
            self._output_guard.run(self._open)

    def _open(self) -> None:
        if self.output is not None or self._unwritable or self.place is None or self.config.format == "api":
            return
        try:
            identity = shared_run_id(self._number)
            directory = make_run_directory(
                self._output_root, self.place.rank, identity, resume=self.config.append_output
            )
        except Exception as error:
            if from_signal_handler(error):
                raise
            self._unwritable = True
            log.say(f"{error}: nothing is recorded, training goes on")
            return
        make_alerts = functools.partial(self._make_alerts, directory.path, identity)
        make_writer = functools.partial(Writer, wake=self._gone, otherwise=self._clear_up)
        self.output = _Output.into(directory, self.place.rank, self.config, make_alerts, make_writer)
        self._describe_run()
        self._write_documents()  # before the first row

    def _make_alerts(self, directory: Path, run: str, config: MonitorConfig) -> Alerts | None:
        """What judges the steps, ``None`` without rules."""
        place = self.place
        if place is None:
            return None
        partly = bool(config.module_ranks) and place.world_size > 1
        pp_stage, group_mates = self.guard.run(self._pipeline) or (0, ()) if self._pipeline else (0, ())
        alerts = Guard("alerts").run(
            make_alerts,
            config.alert,
            self._alert_options,
            rank=place.rank,
            pp_stage=pp_stage,
            group_mates=group_mates,
            root=self._output_root,
            run=run,
            directory=directory.name,
            stop=self._stop_at_alert,
        )
        if alerts is not None and alerts.stops and partly:
            log.say("--on-alert stop needs all ranks, and module_ranks leaves some out: nothing will be stopped")
        elif alerts is not None and alerts.stops and self._common_stop is None:
            self._common_stop = CommonStop(place, f"msmon/{run}/{self._number}")
        return alerts

    def _stop_at_alert(self, message: str) -> None:
        log.say(f"stopping, as --on-alert stop asks: {message}", once="stop")
        if self._common_stop is not None:
            self._common_stop.ask()

    def _emit(self, table: StepTable, config: MonitorConfig) -> None:
        self._late.append((table, config))
        self._output_guard.run(self._submit)

    def _submit(self) -> None:
        if self._late:
            self.open()
            with self._lock:
                self._submit_late()

    def _submit_late(self) -> None:
        while self._late:
            table, config = self._late.pop(0)
            if self.output is not None:
                self.steps_collected += table.complete and not table.supplement
                self.steps_cut_short += not table.complete
                self.output.submit(table, config)

    def _clear_up(self) -> None:
        """On the writer thread: what is to be done when it is awake anyway."""
        self.guard.run(self._drop_dead)
        self._output_guard.run(self._write_documents)

    def _describe_run(self) -> None:
        """Have ``run.json`` written: by the writer thread, since a disk that hangs must not keep the training."""
        with self._lock:
            self._describe()
        if self._report is not None:
            self._gone.put(self)

    def _describe(self) -> None:
        if self.output is not None and self.place is not None:
            for watch in self.watches:
                watch.described = True
                if not watch.report:
                    self._models.append(watch.report)  # it stays there when the model is gone
                watch.report.update(watch.reports.run(describe_model, watch) or {})
            self._report = run_report(self.config, self.place, self._models, self._injected)

    def _write_documents(self) -> None:
        while self._unwritten:
            self._write_document(*self._unwritten.popleft())
        report, self._report = self._report, None
        if report is not None and self.output is not None:
            try:
                self.output.directory.describe(report)
            except OSError as error:
                if from_signal_handler(error):
                    raise
                log.say(f"run.json could not be written ({error.strerror})", once="run.json")

    def _warn(self, config: MonitorConfig) -> None:
        """What in the configuration selects nothing."""
        Guard("looking for what is not there").run(self._warn_of, config)

    def _warn_of(self, config: MonitorConfig) -> None:
        if config.forward_only and config.backward_only and not self._injected:  # `msmon run` has said it
            log.say("forward_only and backward_only are both on: no activations are recorded", once="forward_only")
        for note in () if self._injected else without_effect(config):
            log.say(note, once=note)
        modules = self._module_names()
        unmatched = self._match(config.targets)
        self._unmatched = list(unmatched)
        for target, close in unmatched.items():
            log.say(f"target `{target}` matches no module or parameter{_hint(close)}", once=f"target:{target}")
        features = next((watch.modules.features for watch in self.watches if watch.modules), None)
        for target, close in features.unmatched(modules).items() if features else ():
            log.say(f"l2_targets: `{target}` is no module{_hint(close)}", once=f"l2_target:{target}")

    def _module_names(self) -> list[str]:
        """Names of modules that targets may have; a file that is followed may ask for modules later."""
        watches = [watch for watch in self.watches if watch.modules or self._dynamic is not None]
        return [name for watch in watches for name in watch.module_names]

    def _match(self, targets: Iterable[str]) -> dict[str, list[str]]:
        """Targets that nothing has the name of, with names that are close."""
        names = [name for watch in self.watches for name in watch.inventory.all_names]
        names += self._module_names()
        selection = Selection(targets)
        for name in names:
            selection.selects(name)
        return selection.unmatched(names)

    # The end

    def finish(self) -> None:
        """The process ends: write the step under way as far as it came, and everything before it."""
        crashed = getattr(sys, "last_type", None) is not None or sys.exc_info()[0] is not None
        signalled = self._termination is not None and self._termination.signalled
        self._owners.clear()  # models that die from now on wake no writer thread
        for watch in list(self.watches):
            self._cut_short(watch, normally=not (crashed or signalled))
        self._output_guard.run(self._submit)
        # A thread inside torch when the interpreter ends would abort the process.
        if self.output is not None:
            self.output.end()
        self._output_guard.run(self._write_documents)
        if self._common_stop is not None:
            self._common_stop.close()
        if self._dynamic is not None:
            self._dynamic.stop()
        if self._injected and self.place is not None:
            self.guard.run(unreached.leave_mark, marks_path(os.environ), unreached.TRAINED)
        Guard("summary").run(self._summarize)

    @staticmethod
    def _cut_short(watch: Watch, *, normally: bool) -> None:
        if watch.lock.acquire(timeout=LOCK_LIMIT):
            try:
                watch.cut_short(normally=normally)
            finally:
                watch.lock.release()
        else:
            log.say("the step under way is not recorded: the thread that trains does not come back from it")

    def _summarize(self) -> None:
        if self.place is None or self.place.rank != 0 or self.output is None or self._summarized:
            return
        self._summarized = True
        writer = self.output.writer
        lost = f", {writer.dropped} could not be written" if writer.dropped else ""
        cut = f", {self.steps_cut_short} more cut short" if self.steps_cut_short else ""
        log.say(f"{self.steps_seen} training steps seen, {self.steps_collected} collected{cut}{lost}")
        self._say_where(f"output: {self.output.directory.path}")
        alerts = self.output.alerts
        if alerts is not None and alerts.first is not None:
            log.say(f"anomalies on this rank: {alerts.found:,}, the first: {alerts.first.message}")
            self._say_where(f"next:   msmon analyse {shlex.quote(str(self._output_root))}")
            return
        unreached = [text for watch in self.watches for text in watch.unreached.values()]
        for text in unreached:
            log.say(text)
        unmatched = self._match(self._unmatched) if self._unmatched else {}  # a model made later may have the name
        if unmatched:
            missing = ", ".join(f"`{target}`" for target in unmatched)
            log.say(f"nothing was recorded of {missing}: no such module or parameter")
        if alerts is not None and not unreached and not unmatched:
            log.say("no anomaly on this rank")
        example = _example_file(self.output.directory.path)
        if self.output.config.format == "tensorboard":
            self._say_where(f"next:   tensorboard --logdir {shlex.quote(str(self._output_root))}")
        elif example is not None:
            self._say_where(f"next:   head {shlex.quote(str(example))}")

    def _say_where(self, text: str) -> None:
        if not self._temporary:
            log.say(text)

    def close(self) -> None:
        """Write the step under way as far as it came, and take everything back: hooks, patches, handlers, the thread."""
        for watch in list(self.watches):
            watch.cut_short()
        self._output_guard.run(self._submit)
        self._leave()

    def _leave(self) -> None:
        self._summarized = True  # who closes it wants no summary at the end of the process
        for watch in self.watches:
            _let_go(watch)
        self.watches.clear()
        if self.communication is not None:
            self.communication.detach()
        events.unsubscribe(self)
        if self._dynamic is not None:
            self._dynamic.stop()
        if self._termination is not None:
            self._termination.undo()
        if self.output is not None:
            self.output.end()
        self._output_guard.run(self._write_documents)
        if self.output is not None:
            self.output.close()
        if self._common_stop is not None:
            self._common_stop.close()
        _sessions.discard(self)

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's output is ours; a step made here opens its own."""
        if self._termination is not None:
            self._termination.after_fork()
            self._termination = None
        self._lock = threading.RLock()
        self._opening, self._opening_hangs, self._opening_lock = None, False, threading.RLock()
        self._gone = queue.SimpleQueue()  # the parent's writer may have been at the old one
        if self.output is not None:
            self.output.release()  # the locks are the parent's, for as long as that lives
        self.output = self._common_stop = None
        self.place = None
        self._under_way.clear()
        self._models.clear()
        self._late.clear()
        self._unwritten.clear()
        self._report = None
        self.steps_seen = self.steps_collected = self.steps_cut_short = 0
        self._summarized = False
        for watch in self.watches:
            watch.start_anew()


def _let_go(watch: Watch) -> None:
    """Take the hooks of a model out: if that fails, those of the others are taken out all the same."""
    Guard("removal of hooks").run(watch.detach)


def _nothing() -> None:
    """What there is to do after something that is not looked at."""


def _hint(close: Sequence[str]) -> str:
    return f"; close: {', '.join(close)}" if close else ""


class _Observed:
    """A closure that tells when its first evaluation has returned.

    It stands in for the user's closure and has its attributes; later evaluations (of a line search, say) pass through.
    """

    def __init__(self, closure: Callable[..., Any], then: Callable[[], None]) -> None:
        functools.update_wrapper(self, closure)
        self._closure = closure
        self._then: Callable[[], None] | None = then

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on whatever the closure takes and returns
        result = self._closure(*args, **kwargs)
        then, self._then = self._then, None
        if then is not None:
            then()
        return result


def _steps_under_way(optimizer: Optimizer) -> int:
    """How many calls of ``optimizer.step`` are being executed further up this thread's stack."""
    if not step_code:
        return sys.maxsize  # nobody can tell: none was left
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the only way to see whether a step was left by an exception
    count = 0
    while frame is not None:
        if frame.f_code in step_code and frame.f_locals.get("self") is optimizer:
            count += 1
        frame = frame.f_back
    return count


def _example_file(directory: Path) -> Path | None:
    """A file worth looking at first: the latest reduced gradients, else the latest of any kind."""
    files = sorted(
        directory.glob("*_*-*.csv"), key=lambda path: (path.name.startswith("grad_reduced"), path.stat().st_mtime)
    )
    return files[-1] if files else None


def _after_fork() -> None:
    for session in list(_sessions):
        session.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
