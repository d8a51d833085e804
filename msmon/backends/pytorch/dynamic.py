"""Start and stop while the training runs, at the same step on every rank.

Rank 0 alone watches the file. What it reads it publishes through the job's store, on a connection of its own, with the step
from which it counts: far enough ahead that every rank has heard by then. No thread that trains ever waits; a rank that
hears too late changes at its next step, and says so.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from msmon import env, log
from msmon.config.edit import set_dynamic
from msmon.config.load import parse_config, read_document
from msmon.config.watch import ConfigWatcher
from msmon.errors import MsmonError
from msmon.plan.dynamic import DynamicGate
from msmon.runtime.interruption import from_signal_handler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from msmon.config.schema import MonitorConfig
    from msmon.runtime.process import Place

POLL_SECONDS = 0.2
AHEAD_SECONDS = 2.0
"""How long before it counts a change is published: ten looks of every other rank."""

_PREFIX = "msmon/dynamic"


class DynamicRun:
    """Follows a configuration file for all watched models of a process.

    Args:
        path: The file.
        config: What to go by if it cannot be used now.
        session: Number of the monitor in this process.
        options: Keys from the command line, which go over those of the file.

    Attributes:
        config: What the file says, now or when this process began: it may have changed since the run was started.
    """

    def __init__(
        self, path: str, config: MonitorConfig, session: int, options: Mapping[str, Any] | None = None
    ) -> None:
        self._path = path
        self._options = dict(options or {})
        self._content: bytes | None = None
        self.config = config
        try:
            content = Path(path).read_bytes()
            self.config = parse_config({**read_document(path), **self._options}, source=path)
            self._content = content
        except (OSError, MsmonError) as error:  # if that lasts, the watcher says it
            if from_signal_handler(error):
                raise
        self._key = f"{_PREFIX}/{os.environ.get(env.RESTARTS, '0')}/{session}"
        self._gates: list[DynamicGate] = []
        self._watcher: ConfigWatcher | None = None
        self._store: Any = None  # torch gives its stores no common type that has clone()
        self._rank = 0
        self._silent = False
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._clock = _Clock()
        self._version = 0

    def gate(self, first_step: int) -> DynamicGate:
        """The gate of a further model."""
        gate = DynamicGate(self.config, first_step)
        self._gates.append(gate)
        return gate

    def start(self, place: Place) -> None:
        """Begin to follow the file; called once, when training begins."""
        self._rank = place.rank
        self._silence(self.config)
        self._store = _connection() if place.world_size > 1 else None
        if place.world_size > 1 and self._store is None:
            log.say("the ranks share no store: each follows the configuration file by itself", once="dynamic:store")
        if self._rank == 0 or self._store is None:
            self._watcher = ConfigWatcher(self._path, self._changed, content=self._content, options=self._options)
            self._watcher.start()
        else:
            self._start_thread(self._follow, "msmon-dynamic")

    def stop(self) -> None:
        """Leave no thread behind."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)

    def step_ends(self) -> None:
        """A training step is over: keeps the time that steps take."""
        self._clock.tick()

    def finished(self) -> None:
        """A model has been collected as often as the file asks: when all have, the file is set to off, by rank 0."""
        if all(gate.finished for gate in self._gates) and (self._rank == 0 or self._store is None):
            self._start_thread(self._write_back, "msmon-write-back")

    def _write_back(self) -> None:
        try:
            set_dynamic(self._path, on=False)
        except MsmonError as error:
            log.say(f"dynamic_on could not be set to false: {error.message}", once="write-back")

    def _changed(self, config: MonitorConfig) -> None:
        """On the watcher's thread: the file holds another valid configuration."""
        if self._store is None:
            self._take(config, 0)
            return
        step = max((gate.step for gate in self._gates), default=0) + self._clock.steps_in(AHEAD_SECONDS)
        self._version += 1
        document = {"step": step, "config": config.model_dump(mode="json", exclude_unset=True)}
        try:
            self._store.set(f"{self._key}/{self._version}", json.dumps(document))
        except Exception as error:  # noqa: BLE001 - a store that is gone must not keep this rank from training
            log.say(f"the other ranks cannot be told of the changed configuration ({error})", once="dynamic:publish")
            return
        self._take(config, step)

    def _follow(self) -> None:
        """On a thread of its own: hear what rank 0 publishes."""
        try:
            while not self._stopping.wait(POLL_SECONDS):
                while self._store.check([f"{self._key}/{self._version + 1}"]):
                    self._version += 1
                    document = json.loads(self._store.get(f"{self._key}/{self._version}"))
                    self._take(parse_config(document["config"], source=self._path), document["step"])
        except Exception as error:  # noqa: BLE001 - a job that ends takes its store along
            if not self._stopping.is_set() and not sys.is_finalizing():
                log.say(f"changes of the configuration are heard no more ({error})", once="dynamic:follow")

    def _take(self, config: MonitorConfig, step: int) -> None:
        self.config = config
        self._silence(config)
        late = [gate.schedule(config, step) for gate in self._gates]
        if any(late):
            log.say(f"heard of the changed configuration {max(late)} steps late: recorded steps differ between ranks")

    def _silence(self, config: MonitorConfig) -> None:
        for gate in self._gates:
            gate.silent = bool(config.module_ranks) and self._rank not in config.module_ranks

    def _start_thread(self, target: Any, name: str) -> None:  # noqa: ANN401 - any callable without arguments
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads = [other for other in self._threads if other.is_alive()]
        self._threads.append(thread)
        thread.start()


class _Clock:
    """How long training steps take, lately."""

    def __init__(self) -> None:
        self._latest = 0.0
        self._seconds = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        if self._latest:
            taken = now - self._latest
            self._seconds = taken if not self._seconds else 0.8 * self._seconds + 0.2 * taken
        self._latest = now

    def steps_in(self, seconds: float) -> int:
        """How many steps begin within so many seconds, two at least."""
        return max(2, math.ceil(seconds / self._seconds)) if self._seconds else 2


def _connection() -> Any:  # noqa: ANN401 - see DynamicRun
    """A connection of our own to the job's store; ``None`` where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch offers no other way to the store
        return store.clone()
    except Exception:  # noqa: BLE001 - a group without a store (MPI), or a torch whose stores cannot be cloned
        return None
