"""Runs scripts in forks of one process, which has imported torch for all of them: ``forked.py A.py 1 -- B.py 2``.

One after the other, each as a rank of its own.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch._dynamo  # what an optimizer imports; half of the time that a short training takes

_ = torch._dynamo


def run(commands: list[list[str]]) -> None:
    for rank, command in enumerate(commands):
        child = os.fork()
        if child == 0:
            os.environ.update(SLURM_PROCID=str(rank), SLURM_NTASKS=str(len(commands)))  # no RANK: for torch to ignore
            sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
            runpy.run_path(command[0], run_name="__main__")
            sys.exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            sys.exit(f"{command} ended with {status}")


if __name__ == "__main__":
    run([part.split("\n") for part in "\n".join(sys.argv[1:]).split("\n--\n")])
