"""Rows of parts into rows of whole tensors: what FSDP and tensor parallel have spread over ranks.

Each rank's ``run.json`` says which part of which parameter its rows are about. The statistics of a whole follow from those of
its parts and their sizes, so nothing is communicated while the run goes on. They are as exact as the digits in the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msmon.errors import MsmonError, OutputError
from msmon.offline.reader import CsvFile, StepIndex, Unreadable, kind_files, run_directories
from msmon.regular_file import open_regular, replacing, write_whole
from msmon.runtime.run_directory import RUN_FILE, parse_directory_name, read_run_file
from msmon.sinks.csv import STEPS_FILE, csv_text
from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from msmon.offline.reader import RecordedRow

WEIGHTS_AND_GRADIENTS = frozenset({"param_origin", "param_updated", "grad_reduced"})
_SHAPED_LIKE_WEIGHTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
_OF_A_RANK = frozenset({"grad_unreduced", "actv", "actv_grad", "cc", "linear_hook", "attention_hook", "other"})
"""Kinds that are about one rank: its own data, or a number that does not follow from those of parts."""

_PLACE = ("vpp_stage", "name", "step", "micro_step")
_STATISTICS = frozenset(statistic.value for statistic in Statistic)


class NothingToMergeError(MsmonError):
    """A directory without a run of which anything could be merged."""

    slug = "nothing-to-merge"


@dataclass(frozen=True)
class Part:
    """What one rank has of a parameter.

    Attributes:
        whole_shape: Of the parameter.
        place: Where in the whole the part begins; equal for ranks that hold the same part.
        size: Elements of the part.
    """

    whole_shape: tuple[int, ...]
    place: tuple[int, ...]
    size: int


@dataclass
class Merged:
    """What came out.

    Attributes:
        directory: A run directory like any other, of rank 0.
        ranks: Those merged.
        rows: Rows written, by kind.
        left_out: Kinds, or rows of a kind, that were not merged → why.
        faults: What could not be read, a line a file.
    """

    directory: Path
    ranks: list[int]
    rows: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def merge_statistics(parts: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    r"""Statistics of a tensor from those of parts that together hold each of its elements once.

    With :math:`n_p` elements in part :math:`p`: the least ``min``, the largest ``max``,
    :math:`\sqrt{\sum_p \mathrm{norm}_p^2}`, :math:`\sum_p n_p \mathrm{mean}_p / \sum_p n_p`, ``zeros`` likewise, and the
    sum of ``nans``. A part that has NaN makes NaN of the first four, as NaN in the tensor does. Source: own.

    Args:
        parts: Number of elements and statistics of each; parts without elements are skipped.

    Returns:
        The statistics that all parts have.
    """
    parts = [(size, values) for size, values in parts if size]
    common = set.intersection(*(set(values) for _, values in parts)) & _STATISTICS if parts else set()
    total = sum(size for size, _ in parts)
    found: dict[str, float] = {}
    for name in common:
        numbers = [values[name] for _, values in parts]
        if name == "nans":
            found[name] = sum(numbers)
        elif any(math.isnan(number) for number in numbers):
            found[name] = math.nan
        elif name == "norm":
            found[name] = math.hypot(*numbers)
        elif name in {"mean", "zeros"}:
            found[name] = sum(size / total * number for (size, _), number in zip(parts, numbers, strict=True))
        else:
            found[name] = min(numbers) if name == "min" else max(numbers)
    return found


def merge(
    directory: Path, output: Path | None = None, *, run: str = "", progress: Callable[[int, int], None] | None = None
) -> Merged:
    """Merge the rows of all ranks of a run.

    Args:
        directory: An output root.
        output: Where the merged run directory goes. Default: ``merged`` in the output root.
        run: The run's id. Default: the latest.
        progress: Called with how many files are done, and how many there are.

    Raises:
        NothingToMergeError: There is no such run, or none of its parameters is in parts.
        OutputError: The result cannot be written.
    """
    of_ranks = _directories(directory, run)
    reports = {rank: read_run_file(each) or {} for rank, each in of_ranks.items()}
    parts = {rank: _parts(report) for rank, report in reports.items()}
    if not any(parts.values()):
        hint = "merge is for parameters that FSDP or tensor parallel have spread over ranks; the rows of this run are whole"
        raise NothingToMergeError(f"no parameter of the run below `{directory}` is in parts", hint=hint)
    first = min(of_ranks)
    name = of_ranks[first].name.replace(f"-rank{first}-", "-rank0-")
    merged = Merged((output or directory / "merged") / name, sorted(of_ranks))
    unreadable = Unreadable()
    files = sorted({(kind, path.name) for each in of_ranks.values() for kind, path in kind_files(each, unreadable)})
    hint = "choose another place with --output"
    if any(_same(merged.directory, each) for each in run_directories(directory)):
        raise OutputError(f"`{merged.directory}` holds the rows of a rank", hint=hint)
    try:
        merged.directory.mkdir(parents=True, exist_ok=True)
        for number, (kind, file) in enumerate(files):
            if kind in _OF_A_RANK:
                merged.left_out[kind] = "is about one rank"
            else:
                paths = {rank: each / file for rank, each in of_ranks.items() if os.path.lexists(each / file)}
                _merge_file(merged, kind, paths, parts, unreadable)
            if progress is not None:
                progress(number + 1, len(files))
        _copy(of_ranks[first] / STEPS_FILE, merged.directory / STEPS_FILE, unreadable)
        text = json.dumps(_report(reports, parts, first, merged.ranks), indent=2, ensure_ascii=False) + "\n"
        write_whole(merged.directory / RUN_FILE, text)
    except OSError as error:
        raise OutputError(f"cannot write `{merged.directory}` ({error.strerror or error})", hint=hint) from error
    merged.faults = unreadable.lines()
    return merged


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _copy(source: Path, target: Path, unreadable: Unreadable) -> None:
    if os.path.lexists(source):
        try:
            file = open_regular(source)
        except OSError as error:
            unreadable.cannot_open(source, error)
            return
        with file, replacing(target) as copy:
            shutil.copyfileobj(file, copy)


def _directories(directory: Path, run: str) -> dict[int, Path]:
    """The latest directory of each rank of a run."""
    found = [(parsed, path) for path in run_directories(directory) if (parsed := parse_directory_name(path.name))]
    wanted = run or (found[-1][0].run if found else "")
    of_ranks = {parsed.rank: path for parsed, path in found if parsed.run == wanted}
    if not of_ranks:
        hint = "name the directory given with --output"
        raise NothingToMergeError(f"no run{f' {run}' if run else ''} below `{directory}`", hint=hint)
    return of_ranks


def _parts(report: Mapping[str, Any]) -> dict[str, Part]:
    """By name: the parts that a rank's ``run.json`` speaks of. A part without a place may be anywhere: it is left out."""
    found = {}
    for parameter in _parameters(report):
        if "whole_shape" not in parameter:
            continue
        size = math.prod(parameter["shape"])
        place = parameter.get("offset", parameter.get("flat_offset", () if size == 0 else None))
        if place is not None:
            place = (place,) if isinstance(place, int) else tuple(place)
            found[parameter["name"]] = Part(tuple(parameter["whole_shape"]), place, size)
    return found


def _parameters(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a ``run.json`` says of parameters, where it is what a run writes."""
    models = report.get("models")
    of_models = (
        [model.get("parameters") for model in models if isinstance(model, dict)] if isinstance(models, list) else []
    )
    every = [parameter for each in of_models if isinstance(each, list) for parameter in each]
    return [parameter for parameter in every if isinstance(parameter, dict) and _is_described(parameter)]


def _is_described(parameter: Mapping[str, Any]) -> bool:
    flat = parameter.get("flat_offset")
    return (
        isinstance(parameter.get("name"), str)
        and _is_shape(parameter.get("shape"))
        and all(_is_shape(parameter[key]) for key in ("whole_shape", "offset") if key in parameter)
        and (flat is None or _is_size(flat))
    )


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(_is_size(size) for size in value)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _merge_file(
    merged: Merged,
    kind: str,
    paths: Mapping[int, Path],
    parts: Mapping[int, Mapping[str, Part]],
    unreadable: Unreadable,
) -> None:
    """Merge the files of one name that the ranks have, a step at a time."""
    with contextlib.closing(StepIndex()) as index:
        ranks = sorted(paths)
        for rank in ranks:
            index.add(CsvFile(paths[rank], kind, unreadable))
        columns = list(dict.fromkeys(column for file in index.files for column in file.columns))
        micro_steps = any(file.has_micro_steps for file in index.files)
        places = [column for column in _PLACE if column != "micro_step" or micro_steps]
        file = merged.directory / paths[ranks[0]].name
        count = 0
        with contextlib.ExitStack() as stack:
            whole_file: BinaryIO | None = None
            for step, blocks in index.steps():
                together: dict[tuple[int, int, str], list[tuple[int, RecordedRow]]] = {}
                for block in blocks:
                    for row in index.rows(step, block):
                        key = (row.micro_step or 0, row.stage, row.name)
                        together.setdefault(key, []).append((ranks[block[0]], row))
                ordered = sorted(together.items(), key=lambda item: item[0][0])
                whole = [each for _, found in ordered if (each := _whole(merged, kind, found, parts)) is not None]
                if whole and whole_file is None:  # a file without a row is none
                    whole_file = stack.enter_context(replacing(file))
                    whole_file.write(csv_text([[*places, *columns]]))
                if whole_file is not None:
                    whole_file.write(csv_text(_cells(row, places, columns) for row in whole))
                    count += len(whole)
    if count:
        merged.rows[kind] = merged.rows.get(kind, 0) + count


def _cells(row: RecordedRow, places: Sequence[str], columns: Sequence[str]) -> list[object]:
    place = {"vpp_stage": row.stage, "name": row.name, "step": row.step, "micro_step": row.micro_step}
    return [
        *(place[column] for column in places),
        *(_cell(column, row.values.get(column, "")) for column in columns),
    ]


def _whole(
    merged: Merged, kind: str, found: Sequence[tuple[int, RecordedRow]], parts: Mapping[int, Mapping[str, Part]]
) -> RecordedRow | None:
    """One row of the whole tensor; that of the first rank where ranks hold it whole."""
    row = found[0][1]
    if not any(row.name in of_rank for of_rank in parts.values()):
        return row
    if not set(row.values) <= _STATISTICS | {"shape", "dtype", "id"}:
        merged.left_out[kind] = "has numbers that do not follow from those of parts"
        return None
    if kind not in WEIGHTS_AND_GRADIENTS | _SHAPED_LIKE_WEIGHTS and "shape" not in row.values:
        merged.left_out[kind] = "may have another shape than its parameter: record `shape` too"
        return None
    by_place = {part.place: (part, each) for rank, each in found if (part := parts[rank].get(row.name)) is not None}
    sizes = {place: _size(each, part) for place, (part, each) in by_place.items()}
    whole_shape = next(of_rank[row.name].whole_shape for of_rank in parts.values() if row.name in of_rank)
    if sum(sizes.values()) != math.prod(whole_shape):
        merged.left_out[kind] = f"of {row.name}, and maybe others, not all parts are on record in step {row.step}"
        return None
    numbers = [(sizes[place], each.numbers()) for place, (_, each) in by_place.items()]
    values = {**row.values, **merge_statistics(numbers)}
    if "shape" in values:
        values["shape"] = str(list(whole_shape))
    return dataclasses.replace(row, values=values)


def _size(row: RecordedRow, part: Part) -> int:
    shape = row.shape
    return part.size if shape is None else math.prod(shape)


def _cell(column: str, value: float | str) -> object:
    return int(value) if column in {"nans", "id"} and isinstance(value, float) and value.is_integer() else value


def _report(
    reports: Mapping[int, dict[str, Any]], parts: Mapping[int, Mapping[str, Part]], first: int, ranks: Sequence[int]
) -> dict[str, Any]:
    """The first rank's ``run.json``, with whole shapes."""
    report: dict[str, Any] = json.loads(json.dumps(reports[first]))
    for parameter in _parameters(report):
        part = parts[first].get(parameter["name"])
        if part is not None:
            parameter["shape"] = list(part.whole_shape)
            for key in ("whole_shape", "offset", "flat_offset", "placements"):
                parameter.pop(key, None)
    return {**report, "merged_ranks": list(ranks)}
