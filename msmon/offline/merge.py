"""Rows of parts into rows of whole tensors: what FSDP and tensor parallel have spread over ranks.

Each rank's ``run.json`` says which part of which parameter its rows are about. The statistics of a whole follow from those of
its parts and their sizes, so nothing is communicated while the run goes on. They are as exact as the digits in the files.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msmon.errors import MsmonError, OutputError
from msmon.offline.reader import kind_files, read_file, run_directories
from msmon.runtime.run_directory import RUN_FILE, parse_directory_name, read_run_file
from msmon.sinks.csv import STEPS_FILE
from msmon.stats.definitions import Statistic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

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
    """

    directory: Path
    ranks: list[int]
    rows: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def merge_statistics(parts: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    r"""Statistics of a tensor from those of parts that together hold each of its elements once.

    With :math:`n_p` elements in part :math:`p`: the least ``min``, the largest ``max``,
    :math:`\sqrt{\sum_p \mathrm{norm}_p^2}`, :math:`\sum_p n_p \mathrm{mean}_p / \sum_p n_p`, ``zeros`` likewise, and the
    sum of ``nans``. A part that has NaN makes NaN of the first four, as NaN in the tensor does. Source: own.

    Args:
        parts: Number of elements and statistics of each; parts without elements are left away.

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
    files = sorted({(kind, path.name) for each in of_ranks.values() for kind, path in kind_files(each)})
    try:
        merged.directory.mkdir(parents=True, exist_ok=True)
        for number, (kind, file) in enumerate(files):
            if kind in _OF_A_RANK:
                merged.left_out[kind] = "is about one rank"
            else:
                rows = {
                    rank: list(read_file(each / file, kind))
                    for rank, each in of_ranks.items()
                    if (each / file).exists()
                }
                _merge_file(merged, kind, file, rows, parts)
            if progress is not None:
                progress(number + 1, len(files))
        steps = of_ranks[first] / STEPS_FILE
        if steps.exists():
            shutil.copyfile(steps, merged.directory / STEPS_FILE)
        text = json.dumps(_report(reports, parts, first, merged.ranks), indent=2, ensure_ascii=False) + "\n"
        (merged.directory / RUN_FILE).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"cannot write `{merged.directory}` ({error.strerror})", hint="choose another place with --output"
        ) from error
    return merged


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
    for parameter in (parameter for model in report.get("models", ()) for parameter in model["parameters"]):
        size = math.prod(parameter["shape"])
        place = parameter.get("offset", parameter.get("flat_offset", () if size == 0 else None))
        if "whole_shape" in parameter and place is not None:
            place = (place,) if isinstance(place, int) else tuple(place)
            found[parameter["name"]] = Part(tuple(parameter["whole_shape"]), place, size)
    return found


def _merge_file(
    merged: Merged,
    kind: str,
    file: str,
    rows: Mapping[int, Sequence[RecordedRow]],
    parts: Mapping[int, Mapping[str, Part]],
) -> None:
    together: dict[tuple[Any, ...], list[tuple[int, RecordedRow]]] = {}
    for rank in sorted(rows):
        for row in rows[rank]:
            together.setdefault((row.step, row.micro_step or 0, row.stage, row.name), []).append((rank, row))
    whole = [_whole(merged, kind, found, parts) for _, found in sorted(together.items(), key=lambda item: item[0][:2])]
    lines = [row for row in whole if row is not None]
    if lines:
        merged.rows[kind] = merged.rows.get(kind, 0) + len(lines)
        (merged.directory / file).write_text(_text(lines), encoding="utf-8")


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
    numbers = [
        (sizes[place], {name: value for name, value in each.values.items() if isinstance(value, float)})
        for place, (_, each) in by_place.items()
    ]
    values = {**row.values, **merge_statistics(numbers)}
    if "shape" in values:
        values["shape"] = str(list(whole_shape))
    return dataclasses.replace(row, values=values)


def _size(row: RecordedRow, part: Part) -> int:
    shape = row.values.get("shape")
    return part.size if shape is None else math.prod(json.loads(str(shape)))


def _text(rows: Sequence[RecordedRow]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row.values))
    places = [column for column in _PLACE if column != "micro_step" or rows[0].micro_step is not None]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*places, *columns])
    for row in rows:
        place = {"vpp_stage": row.stage, "name": row.name, "step": row.step, "micro_step": row.micro_step}
        cells = [_cell(column, row.values.get(column, "")) for column in columns]
        writer.writerow([*(place[column] for column in places), *cells])
    return text.getvalue()


def _cell(column: str, value: float | str) -> object:
    return int(value) if column in {"nans", "id"} and isinstance(value, float) else value


def _report(
    reports: Mapping[int, dict[str, Any]], parts: Mapping[int, Mapping[str, Part]], first: int, ranks: Sequence[int]
) -> dict[str, Any]:
    """The first rank's ``run.json``, with whole shapes."""
    report: dict[str, Any] = json.loads(json.dumps(reports[first]))
    for parameter in (parameter for model in report.get("models", ()) for parameter in model["parameters"]):
        part = parts[first].get(parameter["name"])
        if part is not None:
            parameter["shape"] = list(part.whole_shape)
            for key in ("whole_shape", "offset", "flat_offset", "placements"):
                parameter.pop(key, None)
    return {**report, "merged_ranks": list(ranks)}
