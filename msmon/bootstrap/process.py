"""What an injected process does once it imports torch. Standard library only until an optimizer is constructed."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from msmon import env, log
from msmon.bootstrap import discovery
from msmon.bootstrap.settings import read_settings, settings_path
from msmon.runtime.interruption import from_signal_handler

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_starting = threading.RLock()
_debug: Callable[[str], None] | None = None


def framework_imported(module: ModuleType, debug: Callable[[str], None]) -> None:
    """One of the modules that ``sitecustomize`` waits for was just executed, for the first time or again.

    Args:
        module: The one that defines ``Module`` or ``Optimizer``, or one of Dynamo's.
        debug: Writes a line where ``MSMON_DEBUG`` asks for it.
    """
    global _debug  # noqa: PLW0603 - one a process
    if _debug is None:
        atexit.register(_leave_stopped_run)  # so early that it is called last
    _debug = debug
    debug(f"{module.__name__} imported")
    if hasattr(module, "Optimizer"):
        discovery.note_optimizers(module.Optimizer)
        if not discovery.on_optimizer:
            discovery.on_optimizer.append(_first_optimizer)
    elif module.__name__ == "torch.nn.modules.module":
        discovery.note_modules(module.Module)
    else:
        discovery.dynamo_imported(module)


def _leave_stopped_run() -> None:
    """A run that the user had us stop ends with exit code 0: torch may abort while it takes a process group apart."""
    if discovery.stopped:
        leave_at_once()


def leave_at_once() -> NoReturn:
    """End the process with exit code 0, without asking anybody else; what was printed is not lost."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(0)


def _first_optimizer(optimizer: Any) -> None:  # noqa: ANN401 - torch is not imported here
    """The process means to train: load the rest of msmon and hand over."""
    with _starting:
        if _first_optimizer in discovery.on_optimizer:
            _start()
            discovery.on_optimizer.remove(_first_optimizer)
    for call in list(discovery.on_optimizer):
        call(optimizer)


def _start() -> None:
    try:
        settings = read_settings(settings_path())
        if settings.dynamic:
            os.environ.setdefault(env.DYNAMIC, "True")
        from msmon.backends.pytorch import injected  # noqa: PLC0415 - only a process that trains pays for it

        injected.start(settings)
    except Exception as error:
        if from_signal_handler(error):
            raise
        log.say(f"cannot watch this process, training goes on: {type(error).__name__}: {error}", once="start")
    else:
        if _debug is not None:
            _debug("first optimizer constructed, watching")


def records() -> bool:
    """Whether this process has recorded, or will record, any training step."""
    injected = sys.modules.get("msmon.backends.pytorch.injected")
    return injected is not None and injected.recorded()


def seen() -> str:
    """What this process did with torch, for the message that nothing could be recorded."""
    if discovery.counts["optimizers"]:
        return f"{discovery.counts['optimizers']} optimizers were constructed in this process and none stepped"
    modules = discovery.counts["modules"]
    text = f"{modules} modules and no optimizer were constructed in this process"
    if modules:
        text += "; weights that the script updates by hand are not watched: let torch.optim.SGD update them"
    return text
