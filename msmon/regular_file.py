"""Files in folders that others may write to: none is waited for, read without an end, or written through a link.

Standard library only: this module is imported in processes that may never train.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO
    from typing import BinaryIO

LARGEST_DOCUMENT = 64 * 2**20
"""Bytes of a file that is read whole; ``run.json`` of 100,000 parameters has 20 MiB."""

_FLAGS = (
    os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
)  # opening a pipe would wait for a writer


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read bytes.

    Raises:
        OSError: It cannot be opened, or is a directory, a pipe, a socket or a device.
    """
    descriptor = os.open(path, _FLAGS)
    try:
        refused = _refusal(os.fstat(descriptor).st_mode)
        if not refused:
            return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    raise OSError(errno.EINVAL, refused, os.fspath(path))


def _refusal(mode: int) -> str:
    if stat.S_ISREG(mode):
        return ""
    return "Is a directory" if stat.S_ISDIR(mode) else "Not a regular file"


def read_regular(path: str | os.PathLike[str], limit: int = LARGEST_DOCUMENT) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: It cannot be read, or has more bytes than the limit.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"Larger than {limit >> 20} MiB", os.fspath(path))
        return file.read(size)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, mode: int = 0o666, exact: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of another one once it is whole.

    Readers find the old one or the new one, and a link in its place is replaced, not followed.

    Args:
        path: The file.
        mode: Its permissions, less the umask.
        exact: Not less the umask.

    Raises:
        OSError: It cannot be written; the old one is unharmed.
    """
    where = os.fspath(path)
    beside = f"{where}.{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(beside, flags, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if exact and hasattr(os, "fchmod"):
                os.fchmod(descriptor, mode)
            yield file
        os.replace(beside, where)  # noqa: PTH105 - pathlib costs start-up time
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)  # noqa: PTH108 - as above
        raise


def write_whole(path: str | os.PathLike[str], content: str | bytes, *, mode: int = 0o666, exact: bool = False) -> None:
    """Write a file whole: see :func:`replacing`. A lone surrogate in text becomes JSON's escape.

    Raises:
        OSError: It cannot be written; the old one is unharmed.
    """
    with replacing(path, mode=mode, exact=exact) as file:
        file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)


def write_all(file: FileIO, content: bytes) -> None:
    """Write to a file without a buffer, of which one call may write a part only.

    Raises:
        OSError: Not everything could be written.
    """
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]
