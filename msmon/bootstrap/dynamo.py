"""Keeps torch.compile away from msmon's code, from the first import of torch on. Standard library only.

Dynamo looks at every Python frame below a compiled function: at those that it inlines into a graph, and at those that are
called between two graphs, which it would compile as well. :func:`run_as_it_is` and :func:`with_all_it_calls` are about the
second; they only mark code objects, in torch's C extension, and cost nothing when the code runs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

FunctionT = TypeVar("FunctionT", bound="Callable[..., Any]")


def run_as_it_is(function: FunctionT) -> FunctionT:
    """Mark a function that calls code of the user: Dynamo shall not compile it, and go on below it as without it."""
    mark(function.__code__, below=False)
    return function


def with_all_it_calls(function: FunctionT) -> FunctionT:
    """Mark a function that calls no code of the user: Dynamo shall compile neither it nor anything below it."""
    mark(function.__code__, below=True)
    return function


def mark(code: CodeType, *, below: bool, undo: bool = False) -> None:
    """Mark code, or take the mark off; does nothing where this torch has no such marks."""
    frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    names = ("set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy")
    if all(hasattr(frames, name) for name in names):
        action = frames._FrameAction  # noqa: SLF001 - torch has no public name for it
        strategy = frames._FrameExecStrategy(  # noqa: SLF001 - as above
            action.DEFAULT if undo else action.SKIP, action.SKIP if below and not undo else action.DEFAULT
        )
        frames.set_code_exec_strategy(code, strategy)
    elif hasattr(frames, "skip_code") and not undo:  # torch before 2.6
        frames.skip_code(code)
