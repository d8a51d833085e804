"""Which process of the run this is, and the id that all of them share."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from typing import NamedTuple

from msmon import env


class Place(NamedTuple):
    """Where in the run this process stands."""

    rank: int
    world_size: int


def place_from_environment() -> Place:
    """Rank and number of ranks as the launcher says them; 0 of 1 without a launcher."""
    return Place(env.first_number(env.RANK_VARIABLES, 0), env.first_number(env.WORLD_SIZE_VARIABLES, 1))


def run_id() -> str:
    """Eight hexadecimal digits, the same in every process of a run.

    ``msmon run`` hands its id on in the environment. Where several hosts start their own ``msmon run``, the scheduler's
    job names the run; where nothing does, the id is random.
    """
    given = env.run_id()
    if re.fullmatch(r"[0-9a-f]{8}", given):
        return given
    job = ":".join(os.environ.get(name, "") for name in env.JOB_VARIABLES)
    if job.strip(":"):
        return hashlib.sha256(job.encode()).hexdigest()[:8]
    return secrets.token_hex(4)
