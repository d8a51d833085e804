"""CSV output as TensorBoard event files, under the original's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msmon import log
from msmon.errors import ArgumentError
from msmon.offline.csv2tb import convert

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

__all__ = ["csv2tensorboard_by_step"]


def csv2tensorboard_by_step(  # noqa: PLR0917 - the original's signature
    monitor_path: str | os.PathLike[str],
    time_start: str | None = None,
    time_end: str | None = None,
    process_num: int = 1,
    data_type_list: Sequence[str] | None = None,
    output_dirpath: str | os.PathLike[str] | None = None,
) -> None:
    """Convert the CSV files of runs into TensorBoard event files: ``<output>/rank{R}/{kind}/``.

    Args:
        monitor_path: Output root of the runs, or one run directory.
        time_start: Only directories of this timestamp and later, such as ``Dec03_21-34-40``.
        time_end: Only directories of this timestamp and earlier.
        process_num: How many processes convert.
        data_type_list: Kinds of data, such as ``["grad_reduced"]``; by default all that are there.
        output_dirpath: By default ``{now}-csv2tensorboard_by_step`` in ``monitor_path``.

    Raises:
        ArgumentError: An argument of the wrong type or value.
        NoRecordingError: There is nothing to convert.
        MissingExtraError: TensorBoard is not installed.
        OutputError: The event files cannot be written.
    """
    if isinstance(data_type_list, str) or not isinstance(data_type_list, (list, tuple, type(None))):
        raise ArgumentError(
            f"data_type_list is not a list: {data_type_list!r}", hint='write `data_type_list=["grad_reduced"]`'
        )
    done = convert(
        monitor_path,
        first=time_start,
        last=time_end,
        processes=process_num,
        kinds=data_type_list,
        output=output_dirpath,
    )
    for note in done.notes():
        log.say(note)
    log.say(f"output has been saved to {done.output}; next: {done.next_command()}")
