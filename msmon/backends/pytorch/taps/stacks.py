"""Where in the user's code each module is called."""

from __future__ import annotations

import csv
import io
import linecache
import sys
from typing import TYPE_CHECKING, Any

import torch

from msmon.backends.pytorch.module_calls import Observer
from msmon.runtime.frames import MSMON, folder_of, frames_from

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

    from torch import Tensor

    from msmon.backends.pytorch.module_calls import Call

FILE = "stack_info.csv"
_PACKAGES = (MSMON, folder_of(torch))


class StackTap(Observer):
    """Looks at the first call of each module."""

    part = "recording of call stacks"

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[str, int, str]]] = {}

    def ends(self, call: Call, output: Any, tensors: Sequence[Tensor]) -> None:  # noqa: ANN401 - whatever a module returns
        """Note where the call came from."""
        del output, tensors
        name = f"{call.module.stage}:{call.module.name}"
        if name not in self.found:
            self.found[name] = user_stack(sys._getframe())  # noqa: SLF001 - the public way formats every line at once


def content(taps: Iterable[StackTap]) -> str:
    """The file: a line a module, in the order of return, each with its frames, innermost first."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["module_name", "stack_info"])
    for tap in taps:
        for name, frames in tap.found.items():
            writer.writerow([name, "".join(_line(*frame) for frame in frames)])
    return buffer.getvalue()


def user_stack(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """File, line and function of every frame that belongs to neither torch nor msmon, innermost first."""
    return [
        (found.f_code.co_filename, found.f_lineno, found.f_code.co_name)
        for found in frames_from(frame, without=_PACKAGES)
    ]


def _line(file: str, line: int, function: str) -> str:
    return f"File {file}, line {line}, in {function}, \n {linecache.getline(file, line).strip()} \n"
