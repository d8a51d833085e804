"""The kernel and the oracle against plain Python, on tensors that hypothesis makes up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from contract.plain_statistics import assert_same, plain_statistics
from contract.test_kernels import KERNELS, SIX, numbers_of, tolerance_of
from hypothesis import given, settings
from hypothesis import strategies as st

from msmon.backends.pytorch.kernels import layouts
from msmon.stats.oracle import reference

FLOATS = {torch.float64: 64, torch.float32: 32, torch.float16: 16}
INTEGERS = {torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype; any numbers, NaN and infinities among them; transposed, sliced, expanded or sparse."""
    dtype = draw(st.sampled_from([*FLOATS, *INTEGERS, torch.bool, torch.bfloat16, torch.complex64, torch.complex128]))
    rows, columns = draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))
    if dtype in FLOATS:
        numbers: st.SearchStrategy[Any] = st.floats(width=FLOATS[dtype])
        if dtype is torch.float64:
            numbers = numbers.filter(lambda x: not math.isfinite(x) or abs(x) < 1e300)  # so that a sum is finite
    elif dtype in INTEGERS:
        limit = 2 ** (INTEGERS[dtype] - 1)
        numbers = st.integers(-limit, limit - 1)
    elif dtype is torch.bool:
        numbers = st.booleans()
    elif dtype is torch.bfloat16:
        numbers = st.floats(width=16)
    else:
        numbers = st.builds(complex, st.floats(width=32), st.floats(width=32))
    flat = draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
    tensor = torch.tensor(flat, dtype=dtype).reshape(rows, columns)
    return draw(st.sampled_from([
        lambda: tensor,
        lambda: tensor.t(),
        lambda: tensor[::2, 1:],
        lambda: tensor[:1].expand(5 if rows else 0, columns),
        lambda: tensor.unsqueeze(1).expand(rows, 3, columns).permute(2, 0, 1),
        tensor.to_sparse if not tensor.is_complex() or tensor.isfinite().all() else lambda: tensor,  # 0+infj becomes NaN in to_dense
    ]))()  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(tensor=tensors(), eps=st.sampled_from([1e-8, 1e-300, 0.5, 3.0]), piece=st.integers(1, 40))
@pytest.mark.parametrize("kernel", KERNELS)
def test_statistics(kernel: Any, tensor: torch.Tensor, eps: float, piece: int) -> None:
    """Whatever the tensor and the size of the pieces it is read in, its statistics are those of its numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr("msmon.backends.pytorch.kernels.eager.CPU_PIECE", piece)
        patch.setattr("msmon.backends.pytorch.kernels.host.PIECE", piece)
        patch.setattr("msmon.backends.pytorch.kernels.fused.BLOCK", piece)
        patch.setattr("msmon.backends.pytorch.kernels.fused.SHARED", 2 * piece)
        used = kernel()
        measured = used.reduce([tensor], SIX, eps)[0].tolist()
    assert_same(measured, numbers_of(tensor), eps, tolerance=tolerance_of(used, tensor.dtype))


@settings(max_examples=300, deadline=None)
@given(tensor=tensors(), limit=st.integers(1, 40))
def test_pieces(tensor: torch.Tensor, limit: int) -> None:
    """The pieces of a tensor are flat, no larger than the limit, and hold each of its elements once."""
    values, hidden = layouts.dense_values(tensor)
    pieces = list(layouts.flat_pieces(values, limit))
    assert all(piece.dim() == 1 and 0 < len(piece) <= limit for piece in pieces)
    found = [repr(number) for piece in pieces for number in piece.tolist()]
    assert sorted(found) == sorted(repr(number) for number in values.flatten().tolist())
    assert len(found) + hidden == tensor.numel()


@settings(max_examples=300, deadline=None)
@given(
    numbers=st.lists(st.floats(max_value=1e300, min_value=-1e300) | st.sampled_from([math.nan, math.inf, -math.inf])),
    eps=st.sampled_from([1e-8, 1.0]),
)
def test_oracle(numbers: list[float], eps: float) -> None:
    """The NumPy oracle agrees with plain Python."""
    assert_same(reference(np.array(numbers), SIX, eps), numbers, eps)


@given(numbers=st.lists(st.floats(min_value=1e-100, max_value=1e100), min_size=1))
def test_norm_of_parts(numbers: list[float]) -> None:
    """The norm of a whole is that of the norms of its parts: what lets a tensor be read in pieces."""
    parts = [plain_statistics(numbers[:3])["norm"], plain_statistics(numbers[3:])["norm"]]
    assert plain_statistics(parts)["norm"] == pytest.approx(plain_statistics(numbers)["norm"], rel=1e-12)
