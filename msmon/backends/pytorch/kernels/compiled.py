"""The loops of :mod:`msmon.backends.pytorch.kernels.fused`: written for LLVM, compiled for this processor by llvmlite.

A block is read once and feeds every statistic, several lanes at a time. Lanes are written down, since what a compiler
makes of a plain loop decides what a pass costs. Of each dtype there are two loops. The *fast* one adds up to
:data:`STRIDE` elements a lane in float32, then goes on in float64; of what it cannot tell (NaN, infinities, squares that
float32 does not hold) it leaves a mark. The *precise* one has float64 throughout. Of float64 only that one exists.

Comparisons with NaN are false, so extremes and zeros leave NaN out; that there is one shows in the sum of squares.

The machine code refers to nothing outside itself, not even to constants, which come as arguments: so it can be kept on
disk and used again as it is (:mod:`msmon.backends.pytorch.kernels.code_cache`), and no compiler is loaded.
"""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from typing import TYPE_CHECKING, NamedTuple

from msmon.backends.pytorch.kernels import assembly, code_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STRIDE = 16
"""Elements that a lane of the fast loop adds in float32: an error of a few units of float32's last place at the most."""

TOTALS = 5
"""Numbers a block: min, max, sum, sum of squares, number of zeros."""

_WORD_BITS = 64

NEXT = 4
"""Where in a job the number of the next block stands; a job that is done can be done again from 0."""

_BOUNDS_KEPT = 16
"""Thresholds that are kept; the loss scale of a fused optimizer moves them."""

_LEAST_SQUARE = 1e-30
"""Of the fast loop, the mean square that float32 holds with all its neighbours; below, some may have vanished."""

_FORMATS = {
    "float64": (64, "double", assembly.FROM_FLOAT64),
    "float32": (32, "float", assembly.FROM_FLOAT32),
    "float16": (16, "float", assembly.FROM_FLOAT16),
    "bfloat16": (16, "float", assembly.FROM_BFLOAT16),
}
"""Of each dtype: the bits of an element, what it is read as, and how: without rounding."""


def readable_here() -> list[str]:
    """Names of the dtypes that this processor reads by itself; a loop that needs more would end the process."""
    here = code_cache.processor()
    halves = here.has("f16c") or here.name.startswith(("aarch64", "arm64"))
    return [dtype for dtype in _FORMATS if dtype != "float16" or halves]


class Loop(NamedTuple):
    """A loop over blocks: a C function of the address of a :func:`job`.

    Attributes:
        address: Of the function.
        with_gil: Calls it and keeps the GIL: for less time than getting that back may take.
        without_gil: Calls it without the GIL.
    """

    address: int
    with_gil: Callable[[int], None]
    without_gil: Callable[[int], None]


class Loops:
    """The machine code of a dtype.

    Args:
        dtype: Its name.

    Attributes:
        fast: See above.
        precise: See above.
        finish: Writes the lines of tensors.

    Raises:
        ModuleNotFoundError: llvmlite is not installed.
        RuntimeError: llvmlite cannot compile them for this processor.
    """

    def __init__(self, dtype: str) -> None:
        names = ["fast", "precise", "finish"]
        addresses, self._owner = code_cache.load(_source(dtype), names)
        self._value = "d" if _FORMATS[dtype][1] == "double" else "f"
        self._bounds: dict[float, list[int]] = {}
        address, word = ctypes.c_void_p, ctypes.c_int64
        self.fast, self.precise = (
            Loop(
                addresses[name],
                ctypes.PYFUNCTYPE(None, address)(addresses[name]),
                ctypes.CFUNCTYPE(None, address)(addresses[name]),
            )
            for name in names[:2]
        )
        self.finish = ctypes.PYFUNCTYPE(word, address, address, address, word, address, address)(addresses["finish"])

    def job(
        self, blocks: tuple[array[int], array[int]], totals: array[float], take: int, threshold: float
    ) -> array[int]:
        """What a loop needs.

        Args:
            blocks: Addresses and counts of the blocks. All arrays must outlive the call of the loop.
            totals: Takes :data:`TOTALS` numbers a block.
            take: Blocks that a thread takes at a time.
            threshold: Magnitudes below are zeros.
        """
        bounds = self._bounds.get(threshold)
        if bounds is None:
            size = struct.calcsize(self._value)
            values = b"".join(struct.pack(self._value, x).ljust(8, b"\0") for x in (threshold, math.inf, -math.inf))
            bounds = [*struct.unpack("qqq", values), (1 << (8 * size - 1)) - 1]
            if len(self._bounds) < _BOUNDS_KEPT:
                self._bounds[threshold] = bounds
        addresses, counts = blocks
        places = [numbers.buffer_info()[0] for numbers in (addresses, counts, totals)]
        return array("q", [*places, len(addresses), 0, take, *bounds])


def constants(scale: float, *, fast: bool) -> array[float]:
    """What ``finish`` needs, for numbers of the fast or the precise loop."""
    return array("d", (scale, _LEAST_SQUARE if fast else 0.0, 1e-280, 1e300, math.inf, math.nan))


def _source(dtype: str) -> str:
    bits, value, read = _FORMATS[dtype]
    wide = code_cache.processor().has("avx512f")  # 32 registers that hold 64 lanes with their totals
    names = {
        "bits": bits,
        "bytes": bits // 8,
        "value": value,
        "suffix": "f64" if value == "double" else "f32",
        "width": 64 if value == "double" else 32,
        "value_to_double": "bitcast" if value == "double" else "fpext",
    }

    def scan(name: str, lanes: int, total: str, stride: int) -> str:
        names_of_lanes = {
            **names,
            "name": name,
            "n": lanes,
            "sum": total,
            "sum_suffix": "f64" if total == "double" else "f32",
            "sum_to_double": "bitcast" if total == "double" else "fpext",
            "widen": "bitcast" if value == total else "fpext",
            "zext_n": "bitcast" if lanes == _WORD_BITS else "zext",
            "stride": stride,
            "stride_elements": stride * lanes,
            "half": lanes // 2,
            "fifteens": ", ".join(["i16 15"] * lanes),
        }
        if total == "float" and dtype == "bfloat16":
            return assembly.SCAN_BFLOAT16.format(sixteens=_sixteens(lanes // 2), **names_of_lanes)
        return assembly.SCAN.format(read=read.format(n=lanes, sixteens=_sixteens(lanes)), **names_of_lanes)

    def work(name: str, scans: Sequence[tuple[str, int]]) -> str:
        lines, state, begin = [], "%nothing", "0"
        for scan_name, lanes in scans:
            end = "%count" if lanes == 1 else f"%end_{lanes}"
            if lanes > 1:
                lines.append(f"  {end} = and i64 %count, -{lanes}")
            result = "%all" if lanes == 1 else f"%after_{lanes}"
            lines.append(
                f"  {result} = call %state @scan_{scan_name}(ptr %elements, i64 {begin}, i64 {end}, "
                f"{value} %threshold, i{names['width']} %magnitude, %state {state})"
            )
            state, begin = result, end
        return assembly.WORK.format(name=name, scans="\n".join(lines), **names)

    precise = [("sixteen", 16), ("one", 1)]
    fast = precise if value == "double" else [("many", 64), *precise] if wide else [("many", 16), ("one", 1)]
    parts = [assembly.BEGIN.format_map(names)]
    if value != "double":
        parts.append(scan("many", fast[0][1], "float", STRIDE))
    parts += [scan("sixteen", 16, "double", 1 << 20), scan("one", 1, "double", 1 << 20)]
    parts += [work("fast", fast), work("precise", precise), assembly.FINISH]
    return "".join(parts)


def _sixteens(count: int) -> str:
    return ", ".join(["i32 16"] * count)
