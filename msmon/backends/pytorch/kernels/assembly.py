"""The text of the compiled loops, LLVM's assembly, for :mod:`msmon.backends.pytorch.kernels.compiled` to fill in."""

from __future__ import annotations

FROM_FLOAT64 = "%values = bitcast <{n} x i64> %bits to <{n} x double>"
FROM_FLOAT32 = "%values = bitcast <{n} x i32> %bits to <{n} x float>"
FROM_FLOAT16 = """%halves = bitcast <{n} x i16> %bits to <{n} x half>
  %values = fpext <{n} x half> %halves to <{n} x float>"""
FROM_BFLOAT16 = """%integers = zext <{n} x i16> %bits to <{n} x i32>
  %upper_halves = shl <{n} x i32> %integers, <{sixteens}>
  %values = bitcast <{n} x i32> %upper_halves to <{n} x float>"""

BEGIN = """
; min, max, sum, sum of squares, number of magnitudes below the threshold
%state = type {{ {value}, {value}, double, double, i64 }}
"""

SCAN = """
; Adds elements to a state, {n} at a time, {stride} times before lanes are added up.
define internal %state @scan_{name}(
  ptr %elements, i64 %begin, i64 %end, {value} %threshold, i{width} %magnitude, %state %state) alwaysinline {{
entry:
  %state_0 = extractvalue %state %state, 0
  %state_1 = extractvalue %state %state, 1
  %state_2 = extractvalue %state %state, 2
  %state_3 = extractvalue %state %state, 3
  %state_4 = extractvalue %state %state, 4
  %low_at_0 = insertelement <{n} x {value}> poison, {value} %state_0, i32 0
  %low_0 = shufflevector <{n} x {value}> %low_at_0, <{n} x {value}> poison, <{n} x i32> zeroinitializer
  %high_at_0 = insertelement <{n} x {value}> poison, {value} %state_1, i32 0
  %high_0 = shufflevector <{n} x {value}> %high_at_0, <{n} x {value}> poison, <{n} x i32> zeroinitializer
  %threshold_at_0 = insertelement <{n} x {value}> poison, {value} %threshold, i32 0
  %thresholds = shufflevector <{n} x {value}> %threshold_at_0, <{n} x {value}> poison, <{n} x i32> zeroinitializer
  %magnitude_at_0 = insertelement <{n} x i{width}> poison, i{width} %magnitude, i32 0
  %no_signs = shufflevector <{n} x i{width}> %magnitude_at_0, <{n} x i{width}> poison, <{n} x i32> zeroinitializer
  %some = icmp slt i64 %begin, %end
  br i1 %some, label %stride, label %done

stride:
  %stride_begin = phi i64 [ %begin, %entry ], [ %stride_end, %add_up ]
  %stride_low = phi <{n} x {value}> [ %low_0, %entry ], [ %next_low, %add_up ]
  %stride_high = phi <{n} x {value}> [ %high_0, %entry ], [ %next_high, %add_up ]
  %stride_sum = phi double [ %state_2, %entry ], [ %next_stride_sum, %add_up ]
  %stride_squares = phi double [ %state_3, %entry ], [ %next_stride_squares, %add_up ]
  %stride_zeros = phi i64 [ %state_4, %entry ], [ %next_zeros, %add_up ]
  %stride_limit = add i64 %stride_begin, {stride_elements}
  %stride_end = call i64 @llvm.smin.i64(i64 %stride_limit, i64 %end)
  br label %loop

loop:
  %index = phi i64 [ %stride_begin, %stride ], [ %next_index, %loop ]
  %low = phi <{n} x {value}> [ %stride_low, %stride ], [ %next_low, %loop ]
  %high = phi <{n} x {value}> [ %stride_high, %stride ], [ %next_high, %loop ]
  %sum = phi <{n} x {sum}> [ zeroinitializer, %stride ], [ %next_sum, %loop ]
  %squares = phi <{n} x {sum}> [ zeroinitializer, %stride ], [ %next_squares, %loop ]
  %zeros = phi i64 [ %stride_zeros, %stride ], [ %next_zeros, %loop ]

  %place = getelementptr i{bits}, ptr %elements, i64 %index
  %bits = load <{n} x i{bits}>, ptr %place, align {bytes}
  {read}
  %is_lower = fcmp olt <{n} x {value}> %values, %low
  %next_low = select <{n} x i1> %is_lower, <{n} x {value}> %values, <{n} x {value}> %low
  %is_higher = fcmp ogt <{n} x {value}> %values, %high
  %next_high = select <{n} x i1> %is_higher, <{n} x {value}> %values, <{n} x {value}> %high
  %value_bits = bitcast <{n} x {value}> %values to <{n} x i{width}>
  %magnitude_bits = and <{n} x i{width}> %value_bits, %no_signs
  %magnitudes = bitcast <{n} x i{width}> %magnitude_bits to <{n} x {value}>
  %is_zero = fcmp olt <{n} x {value}> %magnitudes, %thresholds
  %zero_bits = bitcast <{n} x i1> %is_zero to i{n}
  %zero_count = call i{n} @llvm.ctpop.i{n}(i{n} %zero_bits)
  %zero_count_64 = {zext_n} i{n} %zero_count to i64
  %next_zeros = add i64 %zeros, %zero_count_64
  %numbers = {widen} <{n} x {value}> %values to <{n} x {sum}>
  %next_sum = fadd <{n} x {sum}> %sum, %numbers
  %next_squares = call <{n} x {sum}> @llvm.fmuladd.v{n}{sum_suffix}(
    <{n} x {sum}> %numbers, <{n} x {sum}> %numbers, <{n} x {sum}> %squares)

  %next_index = add i64 %index, {n}
  %again = icmp slt i64 %next_index, %stride_end
  br i1 %again, label %loop, label %add_up

add_up:
  %one_sum = call reassoc {sum} @llvm.vector.reduce.fadd.v{n}{sum_suffix}({sum} 0.0, <{n} x {sum}> %next_sum)
  %one_squares = call reassoc {sum} @llvm.vector.reduce.fadd.v{n}{sum_suffix}({sum} 0.0, <{n} x {sum}> %next_squares)
  %one_sum_64 = {sum_to_double} {sum} %one_sum to double
  %one_squares_64 = {sum_to_double} {sum} %one_squares to double
  %next_stride_sum = fadd double %stride_sum, %one_sum_64
  %next_stride_squares = fadd double %stride_squares, %one_squares_64
  %another = icmp slt i64 %stride_end, %end
  br i1 %another, label %stride, label %done

done:
  %all_low = phi <{n} x {value}> [ %low_0, %entry ], [ %next_low, %add_up ]
  %all_high = phi <{n} x {value}> [ %high_0, %entry ], [ %next_high, %add_up ]
  %all_sum = phi double [ %state_2, %entry ], [ %next_stride_sum, %add_up ]
  %all_squares = phi double [ %state_3, %entry ], [ %next_stride_squares, %add_up ]
  %all_zeros = phi i64 [ %state_4, %entry ], [ %next_zeros, %add_up ]
  %one_low = call nnan {value} @llvm.vector.reduce.fmin.v{n}{suffix}(<{n} x {value}> %all_low)
  %one_high = call nnan {value} @llvm.vector.reduce.fmax.v{n}{suffix}(<{n} x {value}> %all_high)
  %end_0 = insertvalue %state poison, {value} %one_low, 0
  %end_1 = insertvalue %state %end_0, {value} %one_high, 1
  %end_2 = insertvalue %state %end_1, double %all_sum, 2
  %end_3 = insertvalue %state %end_2, double %all_squares, 3
  %end_4 = insertvalue %state %end_3, i64 %all_zeros, 4
  ret %state %end_4
}}
"""

SCAN_BFLOAT16 = """
; The same for bfloat16, {n} at a time as {half} pairs: extremes and zeros on the bits, since bits ^ ((bits >> 15) & 0x7FFF)
; is ordered like the numbers, sums on the two numbers of a pair, each moved to the upper half.
define internal %state @scan_{name}(
  ptr %elements, i64 %begin, i64 %end, float %threshold, i32 %magnitude, %state %state) alwaysinline {{
entry:
  %state_0 = extractvalue %state %state, 0
  %state_1 = extractvalue %state %state, 1
  %state_2 = extractvalue %state %state, 2
  %state_3 = extractvalue %state %state, 3
  %state_4 = extractvalue %state %state, 4
  %upper = xor i32 %magnitude, -2147418113
  %upper_at_0 = insertelement <{half} x i32> poison, i32 %upper, i32 0
  %uppers = shufflevector <{half} x i32> %upper_at_0, <{half} x i32> poison, <{half} x i32> zeroinitializer
  %narrow_magnitude_32 = lshr i32 %magnitude, 16
  %narrow_magnitude = trunc i32 %narrow_magnitude_32 to i16
  %magnitude_at_0 = insertelement <{n} x i16> poison, i16 %narrow_magnitude, i32 0
  %no_signs = shufflevector <{n} x i16> %magnitude_at_0, <{n} x i16> poison, <{n} x i32> zeroinitializer
  %threshold_bits = bitcast float %threshold to i32
  %threshold_up = add i32 %threshold_bits, 65535
  %threshold_32 = lshr i32 %threshold_up, 16
  %threshold_16 = trunc i32 %threshold_32 to i16
  %threshold_at_0 = insertelement <{n} x i16> poison, i16 %threshold_16, i32 0
  %thresholds = shufflevector <{n} x i16> %threshold_at_0, <{n} x i16> poison, <{n} x i32> zeroinitializer
  %low_bits = bitcast float %state_0 to i32
  %low_32 = lshr i32 %low_bits, 16
  %low_16 = trunc i32 %low_32 to i16
  %low_at_0 = insertelement <{n} x i16> poison, i16 %low_16, i32 0
  %low_bits_0 = shufflevector <{n} x i16> %low_at_0, <{n} x i16> poison, <{n} x i32> zeroinitializer
  %low_signs = ashr <{n} x i16> %low_bits_0, <{fifteens}>
  %low_flips = and <{n} x i16> %low_signs, %no_signs
  %low_0 = xor <{n} x i16> %low_bits_0, %low_flips
  %high_bits = bitcast float %state_1 to i32
  %high_32 = lshr i32 %high_bits, 16
  %high_16 = trunc i32 %high_32 to i16
  %high_at_0 = insertelement <{n} x i16> poison, i16 %high_16, i32 0
  %high_bits_0 = shufflevector <{n} x i16> %high_at_0, <{n} x i16> poison, <{n} x i32> zeroinitializer
  %high_signs = ashr <{n} x i16> %high_bits_0, <{fifteens}>
  %high_flips = and <{n} x i16> %high_signs, %no_signs
  %high_0 = xor <{n} x i16> %high_bits_0, %high_flips
  %some = icmp slt i64 %begin, %end
  br i1 %some, label %stride, label %done

stride:
  %stride_begin = phi i64 [ %begin, %entry ], [ %stride_end, %add_up ]
  %stride_low = phi <{n} x i16> [ %low_0, %entry ], [ %next_low, %add_up ]
  %stride_high = phi <{n} x i16> [ %high_0, %entry ], [ %next_high, %add_up ]
  %stride_sum = phi double [ %state_2, %entry ], [ %next_stride_sum, %add_up ]
  %stride_squares = phi double [ %state_3, %entry ], [ %next_stride_squares, %add_up ]
  %stride_zeros = phi i64 [ %state_4, %entry ], [ %next_zeros, %add_up ]
  %stride_limit = add i64 %stride_begin, {stride_elements}
  %stride_end = call i64 @llvm.smin.i64(i64 %stride_limit, i64 %end)
  br label %loop

loop:
  %index = phi i64 [ %stride_begin, %stride ], [ %next_index, %loop ]
  %low = phi <{n} x i16> [ %stride_low, %stride ], [ %next_low, %loop ]
  %high = phi <{n} x i16> [ %stride_high, %stride ], [ %next_high, %loop ]
  %sum_0 = phi <{half} x float> [ zeroinitializer, %stride ], [ %next_sum_0, %loop ]
  %sum_1 = phi <{half} x float> [ zeroinitializer, %stride ], [ %next_sum_1, %loop ]
  %squares_0 = phi <{half} x float> [ zeroinitializer, %stride ], [ %next_squares_0, %loop ]
  %squares_1 = phi <{half} x float> [ zeroinitializer, %stride ], [ %next_squares_1, %loop ]
  %zeros = phi i64 [ %stride_zeros, %stride ], [ %next_zeros, %loop ]

  %place = getelementptr i16, ptr %elements, i64 %index
  %bits = load <{n} x i16>, ptr %place, align 2
  %signs = ashr <{n} x i16> %bits, <{fifteens}>
  %flips = and <{n} x i16> %signs, %no_signs
  %keys = xor <{n} x i16> %bits, %flips
  %next_low = call <{n} x i16> @llvm.smin.v{n}i16(<{n} x i16> %keys, <{n} x i16> %low)
  %next_high = call <{n} x i16> @llvm.smax.v{n}i16(<{n} x i16> %keys, <{n} x i16> %high)
  %magnitudes = and <{n} x i16> %bits, %no_signs
  %is_zero = icmp ult <{n} x i16> %magnitudes, %thresholds
  %zero_bits = bitcast <{n} x i1> %is_zero to i{n}
  %zero_count = call i{n} @llvm.ctpop.i{n}(i{n} %zero_bits)
  %zero_count_64 = {zext_n} i{n} %zero_count to i64
  %next_zeros = add i64 %zeros, %zero_count_64
  %pairs = bitcast <{n} x i16> %bits to <{half} x i32>
  %bits_0 = shl <{half} x i32> %pairs, <{sixteens}>
  %bits_1 = and <{half} x i32> %pairs, %uppers
  %numbers_0 = bitcast <{half} x i32> %bits_0 to <{half} x float>
  %numbers_1 = bitcast <{half} x i32> %bits_1 to <{half} x float>
  %next_sum_0 = fadd <{half} x float> %sum_0, %numbers_0
  %next_sum_1 = fadd <{half} x float> %sum_1, %numbers_1
  %next_squares_0 = call <{half} x float> @llvm.fmuladd.v{half}f32(
    <{half} x float> %numbers_0, <{half} x float> %numbers_0, <{half} x float> %squares_0)
  %next_squares_1 = call <{half} x float> @llvm.fmuladd.v{half}f32(
    <{half} x float> %numbers_1, <{half} x float> %numbers_1, <{half} x float> %squares_1)

  %next_index = add i64 %index, {n}
  %again = icmp slt i64 %next_index, %stride_end
  br i1 %again, label %loop, label %add_up

add_up:
  %sums = fadd <{half} x float> %next_sum_0, %next_sum_1
  %squares = fadd <{half} x float> %next_squares_0, %next_squares_1
  %one_sum = call reassoc float @llvm.vector.reduce.fadd.v{half}f32(float 0.0, <{half} x float> %sums)
  %one_squares = call reassoc float @llvm.vector.reduce.fadd.v{half}f32(float 0.0, <{half} x float> %squares)
  %one_sum_64 = fpext float %one_sum to double
  %one_squares_64 = fpext float %one_squares to double
  %next_stride_sum = fadd double %stride_sum, %one_sum_64
  %next_stride_squares = fadd double %stride_squares, %one_squares_64
  %another = icmp slt i64 %stride_end, %end
  br i1 %another, label %stride, label %done

done:
  %all_low = phi <{n} x i16> [ %low_0, %entry ], [ %next_low, %add_up ]
  %all_high = phi <{n} x i16> [ %high_0, %entry ], [ %next_high, %add_up ]
  %all_sum = phi double [ %state_2, %entry ], [ %next_stride_sum, %add_up ]
  %all_squares = phi double [ %state_3, %entry ], [ %next_stride_squares, %add_up ]
  %all_zeros = phi i64 [ %state_4, %entry ], [ %next_zeros, %add_up ]
  %all_low_signs = ashr <{n} x i16> %all_low, <{fifteens}>
  %all_low_flips = and <{n} x i16> %all_low_signs, %no_signs
  %all_low_bits = xor <{n} x i16> %all_low, %all_low_flips
  %all_low_halves = bitcast <{n} x i16> %all_low_bits to <{n} x bfloat>
  %all_low_values = fpext <{n} x bfloat> %all_low_halves to <{n} x float>
  %one_low = call nnan float @llvm.vector.reduce.fmin.v{n}f32(<{n} x float> %all_low_values)
  %all_high_signs = ashr <{n} x i16> %all_high, <{fifteens}>
  %all_high_flips = and <{n} x i16> %all_high_signs, %no_signs
  %all_high_bits = xor <{n} x i16> %all_high, %all_high_flips
  %all_high_halves = bitcast <{n} x i16> %all_high_bits to <{n} x bfloat>
  %all_high_values = fpext <{n} x bfloat> %all_high_halves to <{n} x float>
  %one_high = call nnan float @llvm.vector.reduce.fmax.v{n}f32(<{n} x float> %all_high_values)
  %end_0 = insertvalue %state poison, float %one_low, 0
  %end_1 = insertvalue %state %end_0, float %one_high, 1
  %end_2 = insertvalue %state %end_1, double %all_sum, 2
  %end_3 = insertvalue %state %end_2, double %all_squares, 3
  %end_4 = insertvalue %state %end_3, i64 %all_zeros, 4
  ret %state %end_4
}}
"""

WORK = """
; Takes blocks as they come free and writes the totals of each: min, max, sum, sum of squares, number of zeros.
; A job: addresses, counts, totals, number of blocks, next block, blocks to take at a time; as bits of {value}: the
; threshold, infinity, minus infinity; all bits but the sign.
define void @{name}(ptr %job) {{
entry:
  %addresses = load ptr, ptr %job
  %counts_at = getelementptr i64, ptr %job, i64 1
  %counts = load ptr, ptr %counts_at
  %totals_at = getelementptr i64, ptr %job, i64 2
  %totals = load ptr, ptr %totals_at
  %blocks_at = getelementptr i64, ptr %job, i64 3
  %blocks = load i64, ptr %blocks_at
  %next_at = getelementptr i64, ptr %job, i64 4
  %take_at = getelementptr i64, ptr %job, i64 5
  %take = load i64, ptr %take_at
  %threshold_at = getelementptr i64, ptr %job, i64 6
  %threshold = load {value}, ptr %threshold_at
  %infinity_at = getelementptr i64, ptr %job, i64 7
  %infinity = load {value}, ptr %infinity_at
  %minus_infinity_at = getelementptr i64, ptr %job, i64 8
  %minus_infinity = load {value}, ptr %minus_infinity_at
  %magnitude_at = getelementptr i64, ptr %job, i64 9
  %magnitude = load i{width}, ptr %magnitude_at
  %nothing_0 = insertvalue %state zeroinitializer, {value} %infinity, 0
  %nothing = insertvalue %state %nothing_0, {value} %minus_infinity, 1
  br label %turn

turn:
  %taken = atomicrmw add ptr %next_at, i64 %take monotonic
  %limit = add i64 %taken, %take
  %last = call i64 @llvm.smin.i64(i64 %limit, i64 %blocks)
  %some = icmp slt i64 %taken, %blocks
  br i1 %some, label %block, label %exit

block:
  %number = phi i64 [ %taken, %turn ], [ %next_number, %block ]
  %address_at = getelementptr ptr, ptr %addresses, i64 %number
  %elements = load ptr, ptr %address_at
  %count_at = getelementptr i64, ptr %counts, i64 %number
  %count = load i64, ptr %count_at
{scans}
  %low = extractvalue %state %all, 0
  %high = extractvalue %state %all, 1
  %sum = extractvalue %state %all, 2
  %squares = extractvalue %state %all, 3
  %zeros = extractvalue %state %all, 4
  %low_64 = {value_to_double} {value} %low to double
  %high_64 = {value_to_double} {value} %high to double
  %zeros_64 = sitofp i64 %zeros to double
  %at_0 = getelementptr [5 x double], ptr %totals, i64 %number
  %at_1 = getelementptr double, ptr %at_0, i64 1
  %at_2 = getelementptr double, ptr %at_0, i64 2
  %at_3 = getelementptr double, ptr %at_0, i64 3
  %at_4 = getelementptr double, ptr %at_0, i64 4
  store double %low_64, ptr %at_0
  store double %high_64, ptr %at_1
  store double %sum, ptr %at_2
  store double %squares, ptr %at_3
  store double %zeros_64, ptr %at_4
  %next_number = add i64 %number, 1
  %again = icmp slt i64 %next_number, %last
  br i1 %again, label %block, label %turn

exit:
  ret void
}}
"""

FINISH = """
; Puts the blocks of each tensor together, in their order, and writes its line: min, max, norm, mean, share of zeros, and 0,
; or NaN where there is a NaN or where squares may have been lost or have overflowed. Returns how many of those there are.
; Constants: scale, least mean square, least and largest sum of squares, infinity, NaN.
define i64 @finish(ptr %totals, ptr %pieces, ptr %counts, i64 %tensors, ptr %constants, ptr %lines) {
entry:
  %scale = load double, ptr %constants
  %least_square_at = getelementptr double, ptr %constants, i64 1
  %least_square = load double, ptr %least_square_at
  %least_at = getelementptr double, ptr %constants, i64 2
  %least = load double, ptr %least_at
  %largest_at = getelementptr double, ptr %constants, i64 3
  %largest = load double, ptr %largest_at
  %infinity_at = getelementptr double, ptr %constants, i64 4
  %infinity = load double, ptr %infinity_at
  %minus_infinity = fsub double 0.0, %infinity
  %nan_at = getelementptr double, ptr %constants, i64 5
  %nan = load double, ptr %nan_at
  %some = icmp sgt i64 %tensors, 0
  br i1 %some, label %tensor, label %exit

tensor:
  %number = phi i64 [ 0, %entry ], [ %next_number, %line ]
  %first = phi i64 [ 0, %entry ], [ %next_piece, %line ]
  %marks = phi i64 [ 0, %entry ], [ %next_marks, %line ]
  %pieces_at = getelementptr i64, ptr %pieces, i64 %number
  %piece_count = load i64, ptr %pieces_at
  %last = add i64 %first, %piece_count
  br label %piece

piece:
  %piece_number = phi i64 [ %first, %tensor ], [ %next_piece, %piece ]
  %low = phi double [ %infinity, %tensor ], [ %next_low, %piece ]
  %high = phi double [ %minus_infinity, %tensor ], [ %next_high, %piece ]
  %sum = phi double [ 0.0, %tensor ], [ %next_sum, %piece ]
  %squares = phi double [ 0.0, %tensor ], [ %next_squares, %piece ]
  %zeros = phi double [ 0.0, %tensor ], [ %next_zeros, %piece ]
  %total_0 = getelementptr [5 x double], ptr %totals, i64 %piece_number
  %total_1 = getelementptr double, ptr %total_0, i64 1
  %total_2 = getelementptr double, ptr %total_0, i64 2
  %total_3 = getelementptr double, ptr %total_0, i64 3
  %total_4 = getelementptr double, ptr %total_0, i64 4
  %piece_low = load double, ptr %total_0
  %piece_high = load double, ptr %total_1
  %piece_sum = load double, ptr %total_2
  %piece_squares = load double, ptr %total_3
  %piece_zeros = load double, ptr %total_4
  %is_lower = fcmp olt double %piece_low, %low
  %next_low = select i1 %is_lower, double %piece_low, double %low
  %is_higher = fcmp ogt double %piece_high, %high
  %next_high = select i1 %is_higher, double %piece_high, double %high
  %next_sum = fadd double %sum, %piece_sum
  %next_squares = fadd double %squares, %piece_squares
  %next_zeros = fadd double %zeros, %piece_zeros
  %next_piece = add i64 %piece_number, 1
  %more = icmp slt i64 %next_piece, %last
  br i1 %more, label %piece, label %line

line:
  %count_at = getelementptr i64, ptr %counts, i64 %number
  %count = load i64, ptr %count_at
  %n = sitofp i64 %count to double
  %least_of_all = fmul double %n, %least_square
  %kept_each = fcmp ogt double %next_squares, %least_of_all
  %kept_all = fcmp ogt double %next_squares, %least
  %kept = and i1 %kept_each, %kept_all
  %bounded = fcmp olt double %next_squares, %largest
  %safe = and i1 %kept, %bounded
  %is_number = fcmp ord double %next_squares, 0.0
  %low_is_0 = fcmp oeq double %next_low, 0.0
  %high_is_0 = fcmp oeq double %next_high, 0.0
  %extremes_are_0 = and i1 %low_is_0, %high_is_0
  %all_are_0 = and i1 %is_number, %extremes_are_0
  %empty = icmp eq i64 %count, 0
  %safe_or_0 = or i1 %safe, %all_are_0
  %fine = or i1 %safe_or_0, %empty
  %mark = xor i1 %fine, true
  %low_or_none = select i1 %empty, double %nan, double %next_low
  %high_or_none = select i1 %empty, double %nan, double %next_high
  %norm = call double @llvm.sqrt.f64(double %next_squares)
  %mean = fdiv double %next_sum, %n
  %column_0 = fdiv double %low_or_none, %scale
  %column_1 = fdiv double %high_or_none, %scale
  %column_2 = fdiv double %norm, %scale
  %column_3 = fdiv double %mean, %scale
  %column_4 = fdiv double %next_zeros, %n
  %mark_64 = zext i1 %mark to i64
  %column_5 = select i1 %mark, double %nan, double 0.0
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
  %next_marks = add i64 %marks, %mark_64
  %next_number = add i64 %number, 1
  %again = icmp slt i64 %next_number, %tensors
  br i1 %again, label %tensor, label %exit

exit:
  %all_marks = phi i64 [ 0, %entry ], [ %next_marks, %line ]
  ret i64 %all_marks
}
"""
