"""Ends a run at the same training step on all its ranks, so that none is left waiting in a collective.

A rank that wants the end says so in the store of the process group. Each rank has a thread that looks there; when it
sees the wish it says which step its training can end at the latest before it asks again, and the training then waits
until all ranks have said theirs. The largest is the last step of all: no rank has passed it, and a rank that waits is
not needed by another that has to come to the same step. No collective is issued, and nothing waits until the end is
asked for.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from msmon import log

if TYPE_CHECKING:
    from msmon.runtime.process import Place

LOOK_EVERY = 0.2
AGREE_LIMIT = 60.0
"""Seconds that a rank waits for the others' answers before it ends by itself."""

CLOSE_LIMIT = 5.0
"""Seconds that the end of the process waits for an answer of the store."""


class CommonStop:
    """The end of a run, agreed on by its ranks.

    Args:
        place: This rank of how many.
        prefix: Keeps apart the keys of several monitors in one store.
    """

    def __init__(self, place: Place, prefix: str) -> None:
        self._place = place
        self._prefix = prefix
        self._finished = 0
        self._wanted = False
        self._asked = False
        self._closing = threading.Event()
        self._last_step: int | None = None
        self._agreed = threading.Event()
        alone = place.world_size == 1 or not (dist.is_available() and dist.is_initialized())
        self._store: Any = None if alone else _store()  # torch has no type for stores of every kind
        self._thread = (
            None if self._store is None else threading.Thread(target=self._look, name="msmon-stop", daemon=True)
        )
        if self._thread is not None:
            self._thread.start()

    def ask(self) -> None:
        """This rank wants the end. Called on any thread."""
        self._wanted = True
        if self._store is None:
            self._asked, self._last_step = True, 0
            self._agreed.set()

    def due(self, finished: int) -> bool:
        """Whether this was the last step. Called on the training thread; waits only when the end has been asked for.

        Args:
            finished: How many training steps this rank has made.
        """
        self._finished = finished
        if not self._asked:
            return False
        if not self._agreed.wait(AGREE_LIMIT):
            log.say(f"the other ranks did not agree to stop within {AGREE_LIMIT:.0f} s: this one stops alone")
            self._last_step = 0
            self._agreed.set()
        return self._last_step is not None and finished >= self._last_step

    def close(self) -> None:
        """The run ends by itself: look for no wish any more, and leave no thread behind."""
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=CLOSE_LIMIT)

    def _look(self) -> None:
        store = self._store
        try:
            while not self._asked:
                if self._wanted:
                    store.set(f"{self._prefix}/stop", "1")
                self._asked = bool(store.check([f"{self._prefix}/stop"]))
                if self._closing.wait(0 if self._asked else LOOK_EVERY):
                    return
            store.set(f"{self._prefix}/step/{self._place.rank}", str(self._finished + 1))
            keys = [f"{self._prefix}/step/{rank}" for rank in range(self._place.world_size)]
            while not store.check(keys):
                if self._closing.wait(LOOK_EVERY / 10):
                    return
            self._last_step = max(int(store.get(key)) for key in keys)
            self._agreed.set()
        except Exception as error:  # noqa: BLE001 - the store goes away with the process that holds it
            if self._wanted:
                log.say(f"the other ranks cannot be asked to stop ({type(error).__name__}): this one stops alone")
                self._asked, self._last_step = True, 0
                self._agreed.set()


def _store() -> Any:  # noqa: ANN401 - as above
    try:
        return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch offers no other way to the store
    except Exception:  # noqa: BLE001 - a group without a store (MPI)
        return None
