"""Frames of the script, without those of the packages that are between it and whoever asks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msmon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, ModuleType


def folder_of(package: ModuleType) -> str:
    """Where the files of a package lie, as file names begin."""
    return str(Path(str(package.__file__)).parent) + os.sep


MSMON = folder_of(msmon)


def frames_from(frame: FrameType | None, *, without: tuple[str, ...] = (MSMON,)) -> Iterator[FrameType]:
    """A frame and those that led to it, innermost first.

    Args:
        frame: The innermost one.
        without: Folders whose files' frames are left out.
    """
    while frame is not None:
        if not frame.f_code.co_filename.startswith(without):
            yield frame
        frame = frame.f_back
