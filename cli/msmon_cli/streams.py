"""stdout and stderr of the command: a reader that goes away, as ``head`` does, is no error; names in any encoding are shown."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TextIO

    from typing_extensions import Buffer


class PrintingError(OSError):
    """What was to be printed could not be, and somebody wants to read it."""


class _Output(io.FileIO):
    """A descriptor, to which writing goes on in vain when nobody reads any more: the exit code stays what it would be."""

    _given_up = False

    def write(self, data: Buffer, /) -> int:
        """Write, or act as if. Of other failures, a full disk say, the first one is told."""
        if not self._given_up:
            try:
                return super().write(data)
            except OSError as error:
                self._given_up = True
                if not isinstance(error, BrokenPipeError):
                    raise PrintingError(*error.args) from error
        return memoryview(data).nbytes


def prepare() -> None:
    """Put such streams in the place of ``sys.stdout`` and ``sys.stderr``."""
    sys.stdout = _patient(sys.stdout)
    sys.stderr = _patient(sys.stderr)


def _patient(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or none at all
        return stream
    stream.flush()
    buffered = io.BufferedWriter(_Output(descriptor, "w", closefd=False))
    return io.TextIOWrapper(
        buffered, stream.encoding, "backslashreplace", line_buffering=stream.isatty() or stream is sys.stderr
    )
