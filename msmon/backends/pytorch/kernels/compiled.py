"""The loops of :mod:`msmon.backends.pytorch.kernels.fused`: written for LLVM, compiled for this processor by llvmlite.

A block is read once and feeds every statistic, several lanes at a time. Lanes are written down, since what a compiler
makes of a plain loop decides what a pass costs. Compiling takes less time than importing a compiler for Python would,
and nothing is kept on disk.

Comparisons with NaN are false, so extremes and zeros leave NaN out; that there is one shows in the sum of squares.
"""

from __future__ import annotations

import ctypes
import platform
from typing import TYPE_CHECKING, Any, NamedTuple

from llvmlite import binding

if TYPE_CHECKING:
    from collections.abc import Mapping

_LANES = 16
"""Elements read at a time: one register of the widest processors for float32, several of others."""

_FROM_FLOAT64 = "%values = bitcast <{n} x i64> %bits to <{n} x double>"
_FROM_FLOAT32 = "%values = bitcast <{n} x i32> %bits to <{n} x float>"
_FROM_FLOAT16 = """%halves = bitcast <{n} x i16> %bits to <{n} x half>
  %values = fpext <{n} x half> %halves to <{n} x float>"""
_FROM_BFLOAT16 = """%integers = zext <{n} x i16> %bits to <{n} x i32>
  %upper_halves = shl <{n} x i32> %integers, <{sixteens}>
  %values = bitcast <{n} x i32> %upper_halves to <{n} x float>"""

_FORMATS = {
    "float64": (64, "double", _FROM_FLOAT64),
    "float32": (32, "float", _FROM_FLOAT32),
    "float16": (16, "float", _FROM_FLOAT16),
    "bfloat16": (16, "float", _FROM_BFLOAT16),
}
"""Of each dtype: the bits of an element, what it is read as, and how: without rounding."""

_STATE = """
; min, max, sum, sum of squares, number of magnitudes below the threshold
%state_{dtype} = type {{ {value}, {value}, double, double, i64 }}
"""

_SCAN = """
; Adds elements to a state, {n} at a time.
define internal %state_{dtype} @scan_{dtype}_{n}(
  ptr %elements, i64 %begin, i64 %end, {value} %threshold, %state_{dtype} %state) alwaysinline {{
entry:
  %state_0 = extractvalue %state_{dtype} %state, 0
  %state_1 = extractvalue %state_{dtype} %state, 1
  %state_2 = extractvalue %state_{dtype} %state, 2
  %state_3 = extractvalue %state_{dtype} %state, 3
  %state_4 = extractvalue %state_{dtype} %state, 4
  %low_0 = insertelement <{n} x {value}> <{infinities}>, {value} %state_0, i32 0
  %high_0 = insertelement <{n} x {value}> <{minus_infinities}>, {value} %state_1, i32 0
  %sum_0 = insertelement <{n} x double> zeroinitializer, double %state_2, i32 0
  %squares_0 = insertelement <{n} x double> zeroinitializer, double %state_3, i32 0
  %threshold_0 = insertelement <{n} x {value}> poison, {value} %threshold, i32 0
  %thresholds = shufflevector <{n} x {value}> %threshold_0, <{n} x {value}> poison, <{n} x i32> zeroinitializer
  %some = icmp slt i64 %begin, %end
  br i1 %some, label %loop, label %done

loop:
  %index = phi i64 [ %begin, %entry ], [ %next_index, %loop ]
  %low = phi <{n} x {value}> [ %low_0, %entry ], [ %next_low, %loop ]
  %high = phi <{n} x {value}> [ %high_0, %entry ], [ %next_high, %loop ]
  %sum = phi <{n} x double> [ %sum_0, %entry ], [ %next_sum, %loop ]
  %squares = phi <{n} x double> [ %squares_0, %entry ], [ %next_squares, %loop ]
  %zeros = phi i64 [ %state_4, %entry ], [ %next_zeros, %loop ]

  %place = getelementptr i{bits}, ptr %elements, i64 %index
  %bits = load <{n} x i{bits}>, ptr %place, align {bytes}
  {read}
  %is_lower = fcmp olt <{n} x {value}> %values, %low
  %next_low = select <{n} x i1> %is_lower, <{n} x {value}> %values, <{n} x {value}> %low
  %is_higher = fcmp ogt <{n} x {value}> %values, %high
  %next_high = select <{n} x i1> %is_higher, <{n} x {value}> %values, <{n} x {value}> %high
  %magnitudes = call <{n} x {value}> @llvm.fabs.v{n}{suffix}(<{n} x {value}> %values)
  %is_zero = fcmp olt <{n} x {value}> %magnitudes, %thresholds
  %zero_bits = bitcast <{n} x i1> %is_zero to i{n}
  %zero_count = call i{n} @llvm.ctpop.i{n}(i{n} %zero_bits)
  %zero_count_64 = zext i{n} %zero_count to i64
  %next_zeros = add i64 %zeros, %zero_count_64
  %numbers = {widen} <{n} x {value}> %values to <{n} x double>
  %next_sum = fadd <{n} x double> %sum, %numbers
  %next_squares = call <{n} x double> @llvm.fmuladd.v{n}f64(
    <{n} x double> %numbers, <{n} x double> %numbers, <{n} x double> %squares)

  %next_index = add i64 %index, {n}
  %again = icmp slt i64 %next_index, %end
  br i1 %again, label %loop, label %done

done:
  %all_low = phi <{n} x {value}> [ %low_0, %entry ], [ %next_low, %loop ]
  %all_high = phi <{n} x {value}> [ %high_0, %entry ], [ %next_high, %loop ]
  %all_sum = phi <{n} x double> [ %sum_0, %entry ], [ %next_sum, %loop ]
  %all_squares = phi <{n} x double> [ %squares_0, %entry ], [ %next_squares, %loop ]
  %all_zeros = phi i64 [ %state_4, %entry ], [ %next_zeros, %loop ]
  %one_low = call {value} @llvm.vector.reduce.fmin.v{n}{suffix}(<{n} x {value}> %all_low)
  %one_high = call {value} @llvm.vector.reduce.fmax.v{n}{suffix}(<{n} x {value}> %all_high)
  %one_sum = call reassoc double @llvm.vector.reduce.fadd.v{n}f64(double 0.0, <{n} x double> %all_sum)
  %one_squares = call reassoc double @llvm.vector.reduce.fadd.v{n}f64(double 0.0, <{n} x double> %all_squares)
  %end_0 = insertvalue %state_{dtype} poison, {value} %one_low, 0
  %end_1 = insertvalue %state_{dtype} %end_0, {value} %one_high, 1
  %end_2 = insertvalue %state_{dtype} %end_1, double %one_sum, 2
  %end_3 = insertvalue %state_{dtype} %end_2, double %one_squares, 3
  %end_4 = insertvalue %state_{dtype} %end_3, i64 %all_zeros, 4
  ret %state_{dtype} %end_4
}}
"""

_REDUCE = """
; Writes a line a block: min, max, norm, mean, share of zeros, and 0, or 1 where there is a NaN or where squares may have
; been lost or have overflowed. Returns how many of those there are.
define i64 @reduce_{dtype}(ptr %addresses, ptr %counts, i64 %blocks, {value} %threshold, double %scale, ptr %lines) {{
entry:
  %some = icmp sgt i64 %blocks, 0
  br i1 %some, label %block, label %exit

block:
  %number = phi i64 [ 0, %entry ], [ %next_number, %block ]
  %marks = phi i64 [ 0, %entry ], [ %next_marks, %block ]
  %address_at = getelementptr ptr, ptr %addresses, i64 %number
  %elements = load ptr, ptr %address_at
  %count_at = getelementptr i64, ptr %counts, i64 %number
  %count = load i64, ptr %count_at
  %even = and i64 %count, -{n}
  %most = call %state_{dtype} @scan_{dtype}_{n}(ptr %elements, i64 0, i64 %even, {value} %threshold,
    %state_{dtype} {{ {value} {infinity}, {value} {minus_infinity}, double 0.0, double 0.0, i64 0 }})
  %all = call %state_{dtype} @scan_{dtype}_1(ptr %elements, i64 %even, i64 %count, {value} %threshold,
    %state_{dtype} %most)
  %low = extractvalue %state_{dtype} %all, 0
  %high = extractvalue %state_{dtype} %all, 1
  %sum = extractvalue %state_{dtype} %all, 2
  %squares = extractvalue %state_{dtype} %all, 3
  %zeros = extractvalue %state_{dtype} %all, 4

  %kept = fcmp ogt double %squares, 1.0e-280
  %bounded = fcmp olt double %squares, 1.0e+300
  %safe = and i1 %kept, %bounded
  %is_number = fcmp ord double %squares, 0.0
  %low_is_0 = fcmp oeq {value} %low, 0.0
  %high_is_0 = fcmp oeq {value} %high, 0.0
  %extremes_are_0 = and i1 %low_is_0, %high_is_0
  %all_are_0 = and i1 %is_number, %extremes_are_0
  %empty = icmp eq i64 %count, 0
  %safe_or_0 = or i1 %safe, %all_are_0
  %fine = or i1 %safe_or_0, %empty
  %mark = xor i1 %fine, true

  %low_64 = {widen} {value} %low to double
  %high_64 = {widen} {value} %high to double
  %low_or_none = select i1 %empty, double 0x7FF8000000000000, double %low_64
  %high_or_none = select i1 %empty, double 0x7FF8000000000000, double %high_64
  %norm = call double @llvm.sqrt.f64(double %squares)
  %n = uitofp i64 %count to double
  %mean = fdiv double %sum, %n
  %zeros_64 = uitofp i64 %zeros to double
  %column_0 = fdiv double %low_or_none, %scale
  %column_1 = fdiv double %high_or_none, %scale
  %column_2 = fdiv double %norm, %scale
  %column_3 = fdiv double %mean, %scale
  %column_4 = fdiv double %zeros_64, %n
  %column_5 = uitofp i1 %mark to double
  %at_0 = getelementptr [6 x double], ptr %lines, i64 %number
  %at_1 = getelementptr double, ptr %at_0, i64 1
  %at_2 = getelementptr double, ptr %at_0, i64 2
  %at_3 = getelementptr double, ptr %at_0, i64 3
  %at_4 = getelementptr double, ptr %at_0, i64 4
  %at_5 = getelementptr double, ptr %at_0, i64 5
  store double %column_0, ptr %at_0
  store double %column_1, ptr %at_1
  store double %column_2, ptr %at_2
  store double %column_3, ptr %at_3
  store double %column_4, ptr %at_4
  store double %column_5, ptr %at_5

  %mark_64 = zext i1 %mark to i64
  %next_marks = add i64 %marks, %mark_64
  %next_number = add i64 %number, 1
  %again = icmp slt i64 %next_number, %blocks
  br i1 %again, label %block, label %exit

exit:
  %all_marks = phi i64 [ 0, %entry ], [ %next_marks, %block ]
  ret i64 %all_marks
}}
"""


def readable(machine: str, features: Mapping[str, bool]) -> list[str]:
    """Names of the dtypes that a processor reads by itself; a loop that needs more would end the process.

    Args:
        machine: As :func:`platform.machine` names it.
        features: As llvmlite names them.
    """
    halves = machine in {"aarch64", "arm64"} or features.get("f16c", False)
    return [dtype for dtype in _FORMATS if dtype != "float16" or halves]


def readable_here() -> list[str]:
    """Names of the dtypes that this processor reads."""
    return readable(platform.machine(), binding.get_host_cpu_features())


class Loop(NamedTuple):
    """A compiled ``@reduce``: its arguments are addresses of arrays of 64-bit integers or float64, and numbers.

    Attributes:
        with_gil: Keeps the GIL: for calls shorter than the time that getting it back may take.
        without_gil: Gives it up, so that threads run beside each other.
        owner: Owns the machine code.
    """

    with_gil: Any
    without_gil: Any
    owner: object


def compile_loop(dtype: str) -> Loop:
    """The loop of a dtype, by its name.

    Raises:
        RuntimeError: llvmlite cannot compile it for this processor.
    """
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), jit=True
    )
    module = binding.parse_assembly(_source(dtype))
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    tuning = binding.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_unrolling = tuning.loop_vectorization = tuning.slp_vectorization = False
    passes = binding.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    code = engine.get_function_address(f"reduce_{dtype}")
    word, address, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
    value = number if _FORMATS[dtype][1] == "double" else ctypes.c_float
    signature = (word, address, address, word, value, number, address)
    return Loop(ctypes.PYFUNCTYPE(*signature)(code), ctypes.CFUNCTYPE(*signature)(code), engine)


def _source(dtype: str) -> str:
    bits, value, read = _FORMATS[dtype]
    names = {
        "dtype": dtype,
        "bits": bits,
        "bytes": bits // 8,
        "value": value,
        "suffix": "f64" if value == "double" else "f32",
        "widen": "bitcast" if value == "double" else "fpext",
        "infinity": "0x7FF0000000000000",
        "minus_infinity": "0xFFF0000000000000",
    }

    def scan(lanes: int) -> str:
        names_of_lanes = {
            **names,
            "n": lanes,
            "infinities": ", ".join([f"{value} {names['infinity']}"] * lanes),
            "minus_infinities": ", ".join([f"{value} {names['minus_infinity']}"] * lanes),
            "sixteens": ", ".join(["i32 16"] * lanes),
        }
        return _SCAN.format(read=read.format_map(names_of_lanes), **names_of_lanes)

    return _STATE.format_map(names) + scan(_LANES) + scan(1) + _REDUCE.format(n=_LANES, **names)
