"""``torch.distributed.pipelining``: which micro-batch a stage works on, which counting backward passes cannot tell.

A stage runs several forwards before the first backward pass. At its first step, it also runs its module once to learn the
shapes that its neighbours will send: that forward is no part of the training.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

from msmon.backends.pytorch.module_hook import without_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from msmon.runtime.ledger import Ledger

_STAGES = "torch.distributed.pipelining.stage"
_LEARNS_SHAPES = ("_forward_metadata_inference", "_shape_inference")  # its name from torch 2.13 on, and before
_current: int | None = None


def current_micro_batch() -> int | None:
    """The micro-batch that a stage of this process works on now; ``None`` outside a pipeline."""
    return _current


def follow_stages(ledger: Ledger) -> bool:
    """Patch the stages of this process, if it has imported them.

    Returns:
        Whether it has.
    """
    stages = sys.modules.get(_STAGES)
    base = getattr(stages, "_PipelineStageBase", None)
    if stages is None or base is None:
        return False
    for name, number in (("forward_one_chunk", "fwd_chunk_id"), ("backward_one_chunk", "bwd_chunk_id")):
        ledger.patch(base, name, functools.partial(_wrap_chunk, number=number))
    for name in _LEARNS_SHAPES:
        if hasattr(stages.PipelineStage, name):
            ledger.patch(stages.PipelineStage, name, _wrap_inference)
    return True


@contextlib.contextmanager
def working_on(micro_batch: int | None) -> Iterator[None]:
    """What runs in this context is about a micro-batch."""
    global _current  # noqa: PLW0603 - one pipeline a process; autograd's threads must see it too
    before, _current = _current, micro_batch
    try:
        yield
    finally:
        _current = before


def _wrap_chunk(original: Callable[..., Any], number: str) -> Callable[..., Any]:
    def one_chunk(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's own
        with working_on(args[0] if args else kwargs[number]):
            return original(self, *args, **kwargs)

    return one_chunk


def _wrap_inference(original: Callable[..., Any]) -> Callable[..., Any]:
    def inference(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's own
        with without_hooks(*self.submod.modules()):
            return original(self, *args, **kwargs)

    return inference
