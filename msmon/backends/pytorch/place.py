"""Where this process stands, as torch.distributed and the launcher say it."""

from __future__ import annotations

import contextlib
import os
import secrets

import torch.distributed as dist

from msmon import env
from msmon.runtime.interruption import from_signal_handler
from msmon.runtime.process import Place, place_from_environment, run_id


def current_place() -> Place:
    """Rank and number of ranks: of the initialised process group, else as the launcher says."""
    if dist.is_available() and dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size())
    return place_from_environment()


def shared_run_id(session: int) -> str:
    """The id of this run, the same on every rank.

    Without ``msmon run`` and without a scheduler's job the ranks agree through the store of the process group: the
    first to ask sets it. That is one round trip, no collective, and needs no other rank to take part.

    Args:
        session: Number of the monitor in this process, so that several in one process differ.
    """
    named = env.run_id() or any(os.environ.get(name) for name in env.JOB_VARIABLES)
    if named or not (dist.is_available() and dist.is_initialized()):
        return run_id()
    proposal = secrets.token_hex(4)
    try:
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch offers no other way to the store
        answer: bytes = store.compare_set(f"msmon/run_id/{session}", "", proposal)
    except Exception as error:
        if from_signal_handler(error):
            raise
        return proposal  # a group without a store (MPI), or one that is gone: each rank has its own id
    return answer.decode() or proposal


def leave_process_group() -> None:
    """Give the process group back, at the end of a run that was stopped before its script could: some backends abort otherwise."""
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):  # the process ends either way
            dist.destroy_process_group()
