"""No kernel reads memory that is not the tensor's: classes and kinds of tensors that hypothesis makes up."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from contract.plain_statistics import assert_same
from contract.test_kernels import KERNELS, SIX, numbers_of, tolerance_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import return_and_correct_aliasing

from msmon.backends.base import UnsupportedTensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

aten = torch.ops.aten
GARBAGE = 4096
"""An address at which no process has memory."""


class Case(NamedTuple):
    """A tensor, and the numbers that it stands for; ``None`` of one that cannot say."""

    told: object
    tensor: Tensor
    numbers: list[complex] | None

    def __repr__(self) -> str:
        """Without the tensor, which may be one that cannot be printed."""
        return f"{self.told}: {self.numbers}"


class Answers(NamedTuple):
    """What a wrapper class does, each honestly or as one that has something else in mind."""

    method: str
    says: str
    cast: str
    others: bool
    flattens: bool
    address: bool
    function: bool


answers = st.builds(
    Answers,
    method=st.sampled_from(["", "dequantize", "to_dense"]),
    says=st.sampled_from(
        ["values", "simple", "own class", "wrapped again", "other shape", "codes", "nothing", "raises"]
    ),
    cast=st.sampled_from(["none", "values", "own class", "other shape", "codes", "nothing", "meta"]),
    others=st.booleans(),
    flattens=st.booleans(),
    address=st.booleans(),
    function=st.booleans(),
)


class Simple(torch.Tensor):
    """Adds nothing to a tensor."""


def packed_class(does: Answers) -> type[Tensor]:
    """A class of tensors that hold 8-bit codes and a scale, as optimizers of 8 bits keep their state."""

    class Packed(torch.Tensor):
        codes: Tensor
        touched: bool

        @staticmethod
        def __new__(cls: Any, codes: Tensor, dtype: torch.dtype) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)

        def __init__(self, codes: Tensor, dtype: torch.dtype) -> None:
            del dtype
            self.codes, self.touched = codes, False

        def answer(self, how: str, dtype: torch.dtype) -> Any:
            values = (self.codes.double() / 8).to(dtype)
            return {
                "values": lambda: values,
                "simple": lambda: values.as_subclass(Simple),
                "own class": lambda: type(self)(self.codes, dtype),
                "wrapped again": lambda: packed_class(does._replace(says="nothing", cast="none"))(self.codes, dtype),  # type: ignore[call-arg]
                "other shape": lambda: values.reshape(-1)[: values.numel() // 2],
                "codes": lambda: self.codes,
                "nothing": lambda: None,
                "meta": lambda: values.to("meta"),
            }[how]()

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is aten._to_copy.default and does.cast != "none":
                return args[0].answer(does.cast, kwargs.get("dtype", args[0].dtype))
            if func is aten.copy_.default and isinstance(args[0], cls):
                args[0].touched = True
            if does.others and func in {aten.detach.default, aten.clone.default, aten.alias.default, aten.view.default}:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    view = cls(func(args[0].codes, *args[1:]), args[0].dtype)
                    return return_and_correct_aliasing(func, args, kwargs, view)
            raise NotImplementedError(f"{func} of {cls.__name__}")

    def answer(self: Any) -> Any:
        if does.says == "raises":
            raise RuntimeError("no kernel for this device")
        return self.answer(does.says, torch.float32)

    if does.method:
        setattr(Packed, does.method, answer)
    if does.flattens:
        Packed.__tensor_flatten__ = lambda self: (["codes"], self.dtype)  # type: ignore[attr-defined]
        Packed.__tensor_unflatten__ = staticmethod(lambda inner, dtype, *_: Packed(inner["codes"], dtype))  # type: ignore[attr-defined]
    if does.address:
        Packed.data_ptr = lambda self: GARBAGE  # type: ignore[method-assign]
    if does.function:
        Packed.__torch_function__ = classmethod(  # type: ignore[assignment]
            lambda cls, func, types, args=(), kwargs=None: torch.Tensor.__torch_function__.__func__(  # type: ignore[attr-defined]
                cls, func, types, args, kwargs or {}
            )
        )
    return Packed


@st.composite
def packed(draw: st.DrawFn) -> Case:
    """A wrapper of a random class."""
    does = draw(answers)
    shape = draw(st.sampled_from([(4, 3), (7,), (2, 2, 2)]))
    codes = draw(st.lists(st.integers(-128, 127), min_size=16, max_size=16))
    inner = torch.tensor(codes, dtype=torch.int8)[: torch.Size(shape).numel()].reshape(shape)
    tensor = packed_class(does)(inner, draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])))  # type: ignore[call-arg]
    readable = does.method and does.says in {"values", "simple"}
    readable = readable or (does.cast == "values" and tensor.dtype is not torch.float64)  # which a cast leaves as it is
    return Case(does, tensor, numbers_of(inner.double() / 8) if readable else None)


class Doubling(torch.Tensor):
    """Says of itself, by ``__torch_function__``, that it holds twice what is in its memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func in {torch.Tensor.to, torch.Tensor.float, torch.Tensor.double}:
            return result.as_subclass(torch.Tensor) * 2
        return result


class Lying(torch.nn.Parameter):
    """Says something else about where its elements are, and how many."""

    def data_ptr(self) -> int:
        return GARBAGE

    def numel(self) -> int:
        return 1 << 40

    def is_contiguous(self, memory_format: Any = None) -> bool:
        return True


class Held(torch.Tensor):
    """Codes in torch's own memory, which a method of the class makes numbers of."""

    def dequantize(self) -> Tensor:
        return torch.Tensor.float(self.as_subclass(torch.Tensor)) / 8


class Packing(torch.nn.Parameter):
    """As bitsandbytes' 4-bit weight: two numbers a byte, and what they mean is known beside it."""


class Refusing(torch.Tensor):
    """Lets nobody do anything with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in {"to", "detach", "dequantize", "copy_"}:
            raise PermissionError(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def resized(tensor: Tensor, share: float) -> Tensor:
    """A tensor some or all of whose memory is gone."""
    tensor = tensor.clone() if tensor.is_contiguous() else tensor
    storage = tensor.untyped_storage()
    storage.resize_(int(storage.nbytes() * share) // 8 * 8)
    return tensor


def sparse_given_back(tensor: Tensor) -> Tensor:
    """A sparse tensor whose elements are gone."""
    elements = tensor.flatten() + 1
    sparse = torch.sparse_coo_tensor(torch.arange(len(elements)).unsqueeze(0), elements, is_coalesced=True)
    elements.untyped_storage().resize_(0)
    return sparse


def inside(transform: Callable[..., Any], tensor: Tensor) -> Tensor:
    """The wrapper that a transform hands to its function, kept for longer than it lives."""
    found: list[Tensor] = []
    transform(lambda x: (found.append(x), x.sum())[1])(tensor)
    return found[0]


def fake(tensor: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


def inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


READABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "parameter": torch.nn.Parameter,
    "of a simple class": lambda t: t.as_subclass(Simple),
    "a strided part of a simple class": lambda t: t[1:].as_subclass(Simple),
    "expanded": lambda t: t[:1].expand(9, *t.shape[1:]),
    "expanded from nothing": lambda t: t[:0].unsqueeze(0).expand(3, *t[:0].shape),
    "a part of more memory": lambda t: t.flatten()[2:7],
    "inference": inference,
    "conjugated": lambda t: torch.complex(t, t + 1).conj(),
    "negated": lambda t: torch.complex(t, t + 1).conj().imag,
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 3, torch.qint8),
    "quantized by rows": lambda t: torch.quantize_per_channel(
        t, torch.full((len(t),), 0.1), torch.zeros(len(t)), 0, torch.qint8
    ),
    "quantized to four bits": lambda t: torch.quantize_per_channel(
        t, torch.full((len(t),), 0.5), torch.zeros(len(t)), 0, torch.quint4x2
    ),
    "sparse": lambda t: t.to_sparse(),
    "sparse rows": lambda t: t.reshape(len(t), -1).to_sparse_csr(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor([t.flatten(), t.flatten()[:2]]),
    "jagged": lambda t: torch.nested.nested_tensor([t.flatten(), t.flatten()[:2]], layout=torch.jagged),
}
SAID: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "zeros without memory": lambda t: (torch._efficientzerotensor(t.shape), torch.zeros(t.shape)),
    "doubling": lambda t: (t.as_subclass(Doubling), 2 * t),
    "lying about its memory": lambda t: (Lying(t), t),
    "codes of a class": lambda t: (t.to(torch.int8).as_subclass(Held), t.to(torch.int8).double() / 8),
}
UNREADABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "meta": lambda t: t.to("meta"),
    "fake": fake,
    "functional": torch._to_functional_tensor,
    "given back": lambda t: resized(t, 0),
    "half given back": lambda t: resized(t, 0.5),
    "a part of half given back": lambda t: resized(t.clone()[::2], 0.25),
    "a simple class, half given back": lambda t: resized(t, 0.5).as_subclass(Simple),
    "quantized, given back": lambda t: resized(torch.quantize_per_tensor(t, 0.1, 3, torch.qint8), 0),
    "inside vmap": lambda t: inside(torch.vmap, t),
    "inside grad": lambda t: inside(torch.func.grad, t),
    "without a shape": lambda t: torch.nn.UninitializedParameter(),
    "packed parameter": lambda t: Packing(t.to(torch.uint8), requires_grad=False),
    "sparse, given back": sparse_given_back,
    "refusing": lambda t: t.as_subclass(Refusing),
}


@st.composite
def kinds(draw: st.DrawFn) -> Case:
    """A tensor of one of torch's own kinds, or of a class that changes what is said about memory."""
    shape = draw(st.sampled_from([(4, 3), (7,), (3, 2, 2)]))
    count = torch.Size(shape).numel()
    numbers = draw(st.lists(st.floats(-6, 6, width=16) | st.just(0.0), min_size=count, max_size=count))
    tensor = torch.tensor(numbers, dtype=torch.float32).reshape(shape)
    if draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    kind = draw(st.sampled_from([*READABLE, *SAID, *UNREADABLE]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind in SAID:
            made, values = SAID[kind](tensor)
            return Case(kind, made, numbers_of(values))
        if kind in UNREADABLE:
            return Case(kind, UNREADABLE[kind](tensor.contiguous()), None)
        made = READABLE[kind](tensor)
        return Case(kind, made, numbers_of(made.as_subclass(torch.Tensor) if type(made) is Simple else made))


def check(kernels: list[Any], case: Case, among: int) -> None:
    """Each kernel tells the statistics of a tensor, or each refuses it, alone and among others, and leaves it as it is."""
    others = [torch.ones(3), torch.arange(4.0)]
    tensors = [*others[:among], case.tensor, *others[among:]] if among < len(others) else [case.tensor]
    place = next(place for place, tensor in enumerate(tensors) if tensor is case.tensor)
    random_state = torch.get_rng_state()
    codes = getattr(case.tensor, "codes", None)
    version = 0 if codes is None else codes._version
    for kernel in kernels:
        if case.numbers is None:
            with pytest.raises(UnsupportedTensorError):
                kernel.reduce(tensors, SIX, 1e-8)
        else:
            line = kernel.reduce(tensors, SIX, 1e-8)[place].tolist()
            assert_same(line, case.numbers, tolerance=max(tolerance_of(kernel, torch.float32), 1e-7))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert codes is None or (codes._version == version and not case.tensor.touched)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def kernels() -> Iterator[list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield [make() for make in KERNELS]


@settings(max_examples=200, deadline=None)
@given(case=packed(), among=st.integers(0, 2))
@pytest.mark.filterwarnings("ignore")
def test_wrapper_classes(kernels: list[Any], case: Case, among: int) -> None:
    """The values of a wrapper are what its class says they are; one that says nothing to be believed is refused."""
    check(kernels, case, among)


@settings(max_examples=300, deadline=None)
@given(case=kinds(), among=st.integers(0, 2))
@pytest.mark.filterwarnings("ignore")
def test_kinds_of_tensors(kernels: list[Any], case: Case, among: int) -> None:
    """The statistics of a tensor are those of the numbers that it stands for, wherever these are; or it is refused."""
    check(kernels, case, among)
