"""What every kernel does, on every dtype and layout. A further kernel joins the list :data:`KERNELS`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from contract.plain_statistics import assert_same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from msmon.backends.base import UnsupportedTensorError
from msmon.backends.pytorch.devices import Arriving, in_order
from msmon.backends.pytorch.kernels import eager, fused, host
from msmon.backends.pytorch.kernels.choose import KernelByDevice, choose_kernel
from msmon.backends.pytorch.kernels.eager import EagerKernel
from msmon.backends.pytorch.kernels.fused import FusedKernel
from msmon.backends.pytorch.kernels.host import HostKernel
from msmon.stats.definitions import Statistic
from msmon.stats.oracle import reference

with pytest.MonkeyPatch.context() as interpreted:
    interpreted.setenv("TRITON_INTERPRET", "1")  # read when the kernels are defined
    from msmon.backends.pytorch.kernels import device
    from msmon.backends.pytorch.kernels.device import DeviceKernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def fused_kernel() -> FusedKernel:
    """The compiled kernel, which leaves to another one what it cannot read."""
    return FusedKernel(HostKernel())


class InterpretedKernel(DeviceKernel):
    """The Triton kernel in Triton's interpreter, on CPU tensors. The interpreter computes with NumPy, which warns of NaN."""

    def __init__(self) -> None:
        super().__init__(EagerKernel())

    def reduce(self, *arguments: Any, **keywords: Any) -> Tensor:
        with np.errstate(all="ignore"):
            return super().reduce(*arguments, **keywords)


IN_FLOAT32 = {torch.float32, torch.float16, torch.bfloat16}
"""Of these the compiled kernel adds a few elements a lane in float32, before it goes on in float64."""


def tolerance_of(kernel: Any, dtype: torch.dtype) -> float:
    """To what norm and mean must be right: each of 23 additions in a row may round, by 2**-24."""
    return 23 * 2**-24 if isinstance(kernel, FusedKernel | KernelByDevice) and dtype in IN_FLOAT32 else 1e-12


KERNELS = [EagerKernel, HostKernel, fused_kernel, InterpretedKernel, choose_kernel]
SIX = list(Statistic)
NAN, INF = math.nan, math.inf
PIECE = 1 << 11
BIG = 3 * PIECE + 17

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR):UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
]


@pytest.fixture(params=KERNELS, ids=lambda kernel: kernel.__name__)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel that reads in small pieces, so that tensors of several pieces are soon checked."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(eager, "CPU_PIECE", PIECE)
    monkeypatch.setattr(host, "PIECE", PIECE)
    monkeypatch.setattr(device, "BLOCK", PIECE)
    monkeypatch.setattr(fused, "BLOCK", PIECE)
    monkeypatch.setattr(fused, "SHARED", 2 * PIECE)
    return request.param()


def numbers_of(tensor: Tensor) -> list[complex]:
    """The elements of a tensor of any layout as Python numbers, without the code under test."""
    if tensor.is_nested:
        return [number for part in tensor.unbind() for number in numbers_of(part)]
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.detach().resolve_conj()
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).flatten().tolist()


def random_numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Numbers of both signs, exact zeros among them, in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64) * 3
    numbers[torch.rand(shape, generator=generator) < 0.1] = 0
    if dtype.is_complex:
        numbers = torch.complex(numbers, numbers.flip(0) + 1)
    elif dtype in {torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool}:
        numbers = numbers.abs()
    return numbers.to(dtype)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex64, torch.complex128, torch.complex32,
    *(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_stays_its_owners(kernel: Any, dtype: torch.dtype) -> None:
    """A tensor that was read can be resized, as FSDP does with parameters that it lets go."""
    tensor = random_numbers(BIG, dtype=dtype)
    kernel.reduce([tensor], SIX, 1e-8)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[3:], lambda t: t[::2]], ids=["whole", "part", "strided"])
@pytest.mark.parametrize("others", [0, 3])
def test_memory_that_was_given_back(kernel: Any, view: Callable[[Tensor], Tensor], others: int) -> None:
    """A tensor whose memory is gone is refused by the agreed error: reading it, torch itself dies of a signal."""
    tensor = torch.ones(1000)
    freed = view(tensor)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedTensorError, match="given back"):
        kernel.reduce([torch.ones(5) for _ in range(others)] + [freed], SIX, 1e-8)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.reshape(-1, 1).expand(-1, 2).contiguous().t(),
    "strided slice": lambda t: t[::3],
    "two-dimensional slice": lambda t: t[: len(t) // 6 * 6].reshape(-1, 6)[:, 1:4],
    "slice of rows too long for a piece": lambda t: torch.stack([t, t])[:, 1:],
    "reversed dimensions": lambda t: t[: len(t) // 8 * 8].reshape(2, 4, -1).permute(2, 0, 1)[1:],
    "expanded": lambda t: t[:7].reshape(7, 1).expand(7, len(t) // 7 + 1),
    "expanded from one element": lambda t: t[:1].expand(len(t)),
    "0-dim": lambda t: t[3],
    "empty": lambda t: t[:0],
    "empty with dimensions": lambda t: t[:0].reshape(0, 3, 2),
    "size-1 dimensions": lambda t: t.reshape(1, -1, 1)[:, ::2],
}

SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse COO": lambda t: t.reshape(1, -1).to_sparse(),
    "sparse COO without any element": lambda t: torch.sparse_coo_tensor(torch.empty(1, 0), t[:0], (len(t),), check_invariants=False),
    "sparse COO, all elements stored": lambda t: torch.sparse_coo_tensor(torch.arange(len(t)).reshape(1, -1), t, check_invariants=False),
    "sparse COO of size 0": lambda t: torch.sparse_coo_tensor(torch.empty(1, 0), t[:0], (0,), check_invariants=False),
    "sparse COO, uncoalesced": lambda t: torch.sparse_coo_tensor(torch.arange(len(t)).reshape(1, -1) // 2, t, (len(t),), check_invariants=False),
    "hybrid": lambda t: torch.sparse_coo_tensor(torch.arange(len(t) // 2).reshape(1, -1) * 2, torch.stack([t, t], 1)[: len(t) // 2], (len(t), 2), check_invariants=False),
    "sparse CSR": lambda t: t[: len(t) // 4 * 4].reshape(-1, 4).to_sparse_csr(),
    "sparse CSC": lambda t: t[: len(t) // 4 * 4].reshape(-1, 4).to_sparse_csc(),
    "sparse BSR": lambda t: t[: len(t) // 4 * 4].reshape(-1, 4).to_sparse_bsr((2, 2)),
}  # fmt: skip

OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.05, 100, torch.quint8),
    "mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([t, t[:5]]),
    "nested without parts": lambda t: torch.nested.nested_tensor([]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t[:5]], layout=torch.jagged),
    "conjugate": lambda t: torch.complex(t, t + 1).conj(),
    "imaginary part": lambda t: torch.complex(t, t + 1).conj().imag,
    "parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(kernel: Any, dtype: torch.dtype) -> None:
    """The statistics of a tensor of any dtype are those of its numbers; the oracle agrees."""
    tensor = random_numbers(1000, dtype=dtype)
    measured = kernel.reduce([tensor], SIX, 1e-8)
    assert measured.dtype is torch.float64
    assert measured.shape == (1, 6)
    assert_same(measured[0].tolist(), numbers_of(tensor), tolerance=tolerance_of(kernel, tensor.dtype))
    assert_same(reference(np.array(numbers_of(tensor)), SIX), numbers_of(tensor))


@pytest.mark.parametrize("length", [240, BIG], ids=["one piece", "several pieces"])
@pytest.mark.parametrize("layout", [*LAYOUTS, *SPARSE, *OTHER])
def test_every_layout(kernel: Any, layout: str, length: int) -> None:
    """A tensor's statistics do not depend on how it lies in memory, nor on how many pieces it is read in."""
    tensor = {**LAYOUTS, **SPARSE, **OTHER}[layout](random_numbers(length))
    assert_same(
        kernel.reduce([tensor], SIX, 1e-8)[0].tolist(), numbers_of(tensor), tolerance=tolerance_of(kernel, tensor.dtype)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("layout", ["transposed", "strided slice", "two-dimensional slice", "sparse COO"])
def test_dtype_and_layout_together(kernel: Any, layout: str, dtype: torch.dtype) -> None:
    """Dtypes whose squares may overflow and those whose squares may not are right in layouts of several pieces."""
    tensor = {**LAYOUTS, **SPARSE}[layout](random_numbers(BIG, dtype=dtype))
    assert_same(
        kernel.reduce([tensor], SIX, 1e-8)[0].tolist(), numbers_of(tensor), tolerance=tolerance_of(kernel, tensor.dtype)
    )


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([NAN, 1.0, -2.0], torch.float32),
        ([INF, 1.0], torch.float32),
        ([-INF, 1.0], torch.float32),  # B43: a mask
        ([INF, -INF], torch.float32),
        ([INF, NAN], torch.float32),
        ([5000.0] * 64, torch.float16),  # B29: squares overflow
        ([65504.0] * 64, torch.float16),
        ([6e-8] * 64, torch.float16),  # denormal
        ([1.0] * 5120, torch.bfloat16),  # B30: small steps are lost
        ([float(i) for i in range(1, 257)], torch.bfloat16),
        ([1e30, -2e30], torch.float32),
        ([3.4e38] * 10, torch.float32),
        ([1e-25, -2e-25], torch.float32),
        ([1e-42, 2e-42], torch.float32),  # denormal
        ([1e200, -3e200], torch.float64),
        ([1e-200, 3e-200], torch.float64),
        ([5e-324, 1e-320], torch.float64),
        ([-0.0, 0.0], torch.float32),
        ([-0.0], torch.float64),
        ([0.0] * 5, torch.float64),
        ([2**62, -(2**62)], torch.int64),
        ([-128, 127], torch.int8),
        ([255] * 300, torch.uint8),
        ([3 + 4j, 1j], torch.complex64),
        ([complex(3e38, 3e38)], torch.complex64),  # the magnitude is no float32
        ([complex(1e-40, 1e-40)], torch.complex64),
        ([complex(NAN, INF), 1 + 1j], torch.complex64),  # NaN beside an infinity is NaN all the same
        ([complex(0, NAN)], torch.complex128),
        ([complex(0, -INF)], torch.complex128),
        ([complex(3e200, 4e200)], torch.complex128),
    ],
    ids=str,
)  # fmt: skip
def test_extreme_numbers(kernel: Any, numbers: list[complex], dtype: torch.dtype) -> None:
    """NaN, infinities, overflow, underflow and minus zero have the statistics of exact arithmetic; the oracle agrees."""
    tensor = torch.tensor(numbers, dtype=dtype)
    assert_same(
        kernel.reduce([tensor], SIX, 1e-8)[0].tolist(), numbers_of(tensor), tolerance=tolerance_of(kernel, tensor.dtype)
    )
    spread = torch.cat([tensor, tensor[:1].expand(PIECE)])  # the first number again, in pieces of its own
    assert_same(
        kernel.reduce([spread], SIX, 1e-8)[0].tolist(), numbers_of(spread), tolerance=tolerance_of(kernel, spread.dtype)
    )
    array = tensor.float().numpy() if dtype in {torch.bfloat16, torch.float16} else tensor.numpy()
    assert_same(reference(array, SIX), numbers_of(tensor))


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.full((64,), 5000.0, dtype=torch.float16), {"norm": 40000.0}),
        (torch.ones(5120, dtype=torch.bfloat16), {"norm": 71.55417527999327, "mean": 1.0}),
        (torch.arange(1, 4097, dtype=torch.float32), {"mean": 2048.5}),
        (torch.tensor([-INF, 1.0]), {"nans": 0.0, "min": -INF, "norm": INF, "mean": -INF, "max": 1.0}),
        (torch.tensor([3 + 4j]), {"norm": 5.0, "min": 5.0, "max": 5.0, "nans": 0.0}),
        (torch.tensor([1e200], dtype=torch.float64), {"norm": 1e200}),
        (torch.tensor([]), {"norm": 0.0, "nans": 0.0, "min": NAN, "max": NAN, "mean": NAN, "zeros": NAN}),
    ],
    ids=["B29", "B30 norm", "B30 mean", "B43", "complex", "fp64", "empty"],
)
def test_values_of_reports(kernel: Any, tensor: Tensor, expected: dict[str, float]) -> None:
    """Inputs on which similar tools were wrong have the right value, written here as a number."""
    measured = dict(zip((s.value for s in SIX), kernel.reduce([tensor], SIX, 1e-8)[0].tolist(), strict=True))
    for name, value in expected.items():
        tolerance = max(tolerance_of(kernel, tensor.dtype), 1e-13)
        assert measured[name] == pytest.approx(value, rel=tolerance, nan_ok=True), name


def test_sparse_gradient(kernel: Any) -> None:
    """B9: the gradient of a sparse embedding has the statistics of the dense gradient."""
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    assert embedding.weight.grad is not None
    assert not embedding.weight.grad.is_coalesced()
    measured = kernel.reduce([embedding.weight.grad], SIX, 1e-8)[0].tolist()
    assert measured == pytest.approx([0.0, 2.0, 3.872983346207417, 0.3, 0.8, 0.0])
    assert not embedding.weight.grad.is_coalesced()


def test_order_of_statistics(kernel: Any) -> None:
    """Columns come in the order asked for, and only those asked for."""
    tensor = random_numbers(BIG)
    six = dict(zip(SIX, kernel.reduce([tensor], SIX, 1e-8)[0].tolist(), strict=True))
    for wanted in ([Statistic.NANS, Statistic.NORM, Statistic.MIN], [Statistic.MAX], list(reversed(SIX))):
        assert kernel.reduce([tensor], wanted, 1e-8)[0].tolist() == [six[statistic] for statistic in wanted]


@pytest.mark.parametrize("statistic", SIX)
def test_what_definitions_say(kernel: Any, statistic: Statistic) -> None:
    """A statistic scales with its tensor, and has a value without elements, exactly where its definition says so."""
    tensor = random_numbers(100, dtype=torch.float64).abs() + 1
    one, four, empty = kernel.reduce([tensor, 4 * tensor, tensor[:0]], [statistic], 1e-8)[:, 0].tolist()
    assert (four == pytest.approx(4 * one) and four != 0) == statistic.scales
    assert math.isnan(empty) != statistic.defined_when_empty


def test_many_tensors(kernel: Any) -> None:
    """Tensors of different dtypes, layouts and sizes are reduced together, a line each, in their order."""
    tensors = [
        random_numbers(7),
        random_numbers(5, dtype=torch.int64),
        random_numbers(0),
        random_numbers(9).to_sparse(),
        random_numbers(BIG)[::2],
    ]
    measured = kernel.reduce(tensors, SIX, 1e-8)
    assert measured.shape == (5, 6)
    for line, tensor in zip(measured.tolist(), tensors, strict=True):
        assert_same(line, numbers_of(tensor), tolerance=tolerance_of(kernel, tensor.dtype))


def test_nothing_to_reduce(kernel: Any) -> None:
    """No tensors, or no statistics, is a table without lines, or without columns."""
    assert kernel.reduce([], SIX, 1e-8).shape == (0, 6)
    assert kernel.reduce([random_numbers(3), random_numbers(4)], [], 1e-8).shape == (2, 0)


@pytest.mark.parametrize("eps", [1e-8, 0.5, 1e-30, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.complex64], ids=str)
def test_eps(kernel: Any, dtype: torch.dtype, eps: float) -> None:
    """``zeros`` is the share of elements with a magnitude strictly below eps; NaN and the bound itself are none."""
    tensor = torch.cat([random_numbers(200, dtype=dtype), torch.tensor([0.5, -0.5]).to(dtype)])
    assert_same(
        kernel.reduce([tensor], SIX, eps)[0].tolist(),
        numbers_of(tensor),
        eps,
        tolerance=tolerance_of(kernel, tensor.dtype),
    )


@pytest.mark.parametrize(
    "divisor", [torch.tensor(65536.0), torch.tensor([65536.0]), torch.tensor(0.5, dtype=torch.float64)], ids=str
)
@pytest.mark.parametrize("layout", ["contiguous", "strided slice", "sparse COO", "empty"])
def test_divisor(kernel: Any, layout: str, divisor: Tensor) -> None:
    """With a divisor the statistics are those of the tensor divided by it: gradients of a scaled loss."""
    tensor = {**LAYOUTS, **SPARSE}[layout](random_numbers(BIG) * 1e-3)
    numbers = [number / float(divisor) for number in numbers_of(tensor)]
    assert_same(
        kernel.reduce([tensor], SIX, 1e-8, divisor=divisor)[0].tolist(),
        numbers,
        tolerance=tolerance_of(kernel, tensor.dtype),
    )


def test_divisor_moves_the_threshold(kernel: Any) -> None:
    """An element that is zero only after division counts as zero."""
    scaled = torch.tensor([1e-6, 1.0])
    assert kernel.reduce([scaled], [Statistic.ZEROS], 1e-8).item() == 0.0
    assert kernel.reduce([scaled], [Statistic.ZEROS], 1e-8, divisor=torch.tensor(1e4)).item() == 0.5


@pytest.mark.parametrize("layout", [*LAYOUTS, *SPARSE])
def test_inputs_are_unchanged(kernel: Any, layout: str) -> None:
    """A tensor is only read: same bits, same version, same storage, and no random number is drawn."""
    tensor = {**LAYOUTS, **SPARSE}[layout](random_numbers(240))
    divisor = torch.tensor(4.0)
    before, version, state = tensor.clone(), tensor._version, torch.get_rng_state()
    kernel.reduce([tensor], SIX, 1e-8, divisor=divisor)
    assert tensor._version == version
    assert numbers_of(tensor) == numbers_of(before)
    assert tensor.layout is before.layout
    assert divisor.item() == 4.0
    assert torch.equal(torch.get_rng_state(), state)


def test_no_graph(kernel: Any) -> None:
    """Reading a tensor that requires gradients builds no graph and leaves no gradient."""
    leaf = random_numbers(10).requires_grad_()
    inner = leaf * 2
    measured = kernel.reduce([leaf, inner], SIX, 1e-8, divisor=torch.tensor(2.0, requires_grad=True))
    assert not measured.requires_grad
    inner.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0] * 10


def test_inference_tensors(kernel: Any) -> None:
    """Tensors of inference mode are read inside and outside of it."""
    with torch.inference_mode():
        tensor = random_numbers(BIG)[::2]
        inside = kernel.reduce([tensor], SIX, 1e-8)
        numbers = numbers_of(tensor)
    assert_same(inside[0].tolist(), numbers, tolerance=tolerance_of(kernel, tensor.dtype))
    assert_same(
        kernel.reduce([tensor], SIX, 1e-8, divisor=torch.tensor(1.0))[0].tolist(),
        numbers,
        tolerance=tolerance_of(kernel, tensor.dtype),
    )


def test_defaults_do_not_matter(kernel: Any) -> None:
    """A changed default dtype or device, or autocast, changes nothing."""
    tensors = [random_numbers(100), random_numbers(0), random_numbers(50).to_sparse(), torch.nested.nested_tensor([])]
    expected = [numbers_of(tensor) for tensor in tensors]
    for dtype, device in ((torch.float16, "cpu"), (torch.float32, "meta")):
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        try:
            with torch.autocast("cpu", torch.bfloat16):
                measured = kernel.reduce(tensors, SIX, 1e-8, divisor=torch.ones((), dtype=torch.float32, device="cpu"))
                empty = kernel.reduce(tensors, [], 1e-8)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        assert measured.dtype is torch.float64
        assert empty.device.type == "cpu"
        for line, numbers in zip(measured.tolist(), expected, strict=True):
            assert_same(line, numbers, tolerance=tolerance_of(kernel, torch.float32))


@pytest.mark.parametrize("name", ["float4_e2m1fn_x2", "int4", "uint3", "bits8", "bits16"])
def test_dtypes_that_are_no_numbers(kernel: Any, name: str) -> None:
    """A dtype that torch cannot read as numbers is refused by the agreed error, not by whatever torch raises."""
    with pytest.raises(UnsupportedTensorError, match=name):
        kernel.reduce([torch.empty(3, dtype=getattr(torch, name))], SIX, 1e-8)


def test_tensors_without_elements_to_read(kernel: Any) -> None:
    """Meta and fake tensors are refused by the agreed error."""
    with FakeTensorMode():
        fake = torch.ones(3)
    for tensor in (torch.ones(3, device="meta"), fake):
        with pytest.raises(UnsupportedTensorError, match="no elements"):
            kernel.reduce([tensor], SIX, 1e-8)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided slice", "sparse COO"])
def test_pieces_as_they_are(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pieces of a real run, a tensor of several has the right statistics."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tensor = {**LAYOUTS, **SPARSE}[layout](random_numbers(3 * eager.CPU_PIECE + 5))
    for make in KERNELS:
        kernel = make()
        assert_same(
            kernel.reduce([tensor], SIX, 1e-8)[0].tolist(),
            numbers_of(tensor),
            tolerance=tolerance_of(kernel, tensor.dtype),
        )


class _LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest storage that any operation made."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self._known = known.untyped_storage().data_ptr()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self._known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "empty" not in name])
def test_no_copy_of_a_tensor(kernel: Any, layout: str, dtype: torch.dtype) -> None:
    """Whatever the layout, nothing larger than a piece in float64 is ever made."""
    tensor = LAYOUTS[layout](random_numbers(4 * BIG, dtype=dtype))
    with _LargestTensor(tensor) as largest:
        kernel.reduce([tensor], SIX, 1e-8)
    assert largest.bytes <= PIECE * (16 if dtype.is_complex else 8)


def test_numbers_arrive_in_order() -> None:
    """Parts that were reduced one after the other arrive as one table, in their order, in float64."""
    parts = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)]
    table = Arriving(parts, 2).wait()
    assert table.dtype == np.float64
    assert table.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert Arriving([], 2).wait().shape == (0, 2)
    assert Arriving([], 0).wait().shape == (0,)
    assert Arriving([torch.tensor([7.0])], 0).wait().tolist() == [7.0]


def test_numbers_of_several_devices_arrive_in_order() -> None:
    """Rows of several devices come back in the order in which they were added, not device by device."""
    arrived = {"a": np.array([[1.0], [2.0], [5.0]]), "b": np.array([[3.0], [4.0]])}
    places = [("a", 2), ("b", 1), ("b", 1), ("a", 1)]
    assert in_order(arrived, places)[:, 0].tolist() == [1, 2, 3, 4, 5]
