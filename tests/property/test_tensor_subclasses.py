"""Whatever class a tensor has, its statistics are those of its elements, or it is refused: no other memory is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract.plain_statistics import assert_same
from contract.test_kernels import KERNELS, SIX, numbers_of, tolerance_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from msmon.backends.base import UnsupportedTensorError

ATEN = torch.ops.aten
OPERATIONS = [ATEN.detach.default, ATEN.clone.default, ATEN.view.default, ATEN._to_copy.default, ATEN.alias.default,
              ATEN.amin.default, ATEN.sum.default, ATEN.abs.default, ATEN.permute.default, ATEN.split.Tensor]  # fmt: skip


def wrapper_class(implemented: set[Any], reader: str, lies: set[str]) -> Any:
    """A class whose tensors have no memory, and some operations; with a method that hands out the elements, or without.

    Args:
        implemented: Operations that give a tensor of the class again.
        reader: Name of that method; empty for none.
        lies: What else it says wrongly of itself.
    """

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls: Any, inner: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner: torch.Tensor) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function not in implemented:
                raise NotImplementedError(str(function))
            inner = [value.inner if isinstance(value, Wrapper) else value for value in args]
            result = function(*inner, **(kwargs or {}))
            return [cls(part) for part in result] if isinstance(result, list | tuple) else cls(result)

        if "address" in lies:

            def data_ptr(self) -> int:
                return 4096

        if "flatten" in lies:

            def __tensor_flatten__(self) -> Any:
                return ["inner"], None

    if reader:
        setattr(Wrapper, reader, lambda self: self.inner.clone())
    return Wrapper


def overriding_class(blind: set[str]) -> Any:
    """A class whose elements lie as usual, with ``__torch_function__``, which refuses some functions."""

    class Overriding(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(function, "__name__", "") in blind:
                raise RuntimeError(f"{function} is not for you")
            return super().__torch_function__(function, types, args, kwargs or {})

    return Overriding


def shrunk(values: torch.Tensor) -> torch.Tensor:
    """A view that reaches past the end of its storage."""
    view = values.clone()
    view.untyped_storage().resize_(max(view.untyped_storage().nbytes() - 4, 0))
    return view


def fake(values: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(values)


@st.composite
def odd(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A tensor, and its elements; ``None`` where nobody but its class could tell them."""
    size = draw(st.integers(1, 40))
    values = torch.randn(size, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    kind = draw(st.sampled_from(["wrapper", "overriding", "parameter", "shrunk", "zero", "fake", "meta", "functional",
                                 "negative", "expanded", "quantised", "nested wrapper"]))  # fmt: skip
    implemented = set(draw(st.lists(st.sampled_from(OPERATIONS))))
    lies = set(draw(st.lists(st.sampled_from(["address", "flatten"]))))
    if kind == "wrapper":
        reader = draw(st.sampled_from(["", "dequantize", "to_dense"]))
        return wrapper_class(implemented, reader, lies)(values), values if reader else None
    if kind == "nested wrapper":
        inner = wrapper_class(implemented, "", lies)(values)
        return wrapper_class(implemented, "dequantize", set())(inner), None
    if kind == "overriding":
        blind = set(draw(st.lists(st.sampled_from(["data_ptr", "numel", "is_contiguous", "detach", "view", "abs"]))))
        return values.as_subclass(overriding_class(blind)), values
    if kind == "parameter":
        cls = type("Packed", (torch.nn.Parameter,), {})
        packed = draw(st.booleans())
        if packed:
            return cls(values.to(torch.uint8), requires_grad=False), None
        return cls(values), values
    expected: dict[str, tuple[Any, torch.Tensor | None]] = {
        "shrunk": (shrunk, None),
        "zero": (lambda t: torch._efficientzerotensor(t.shape), torch.zeros(size)),
        "fake": (fake, None),
        "meta": (lambda t: t.to("meta"), None),
        "functional": (torch._to_functional_tensor, None),
        "negative": (lambda t: torch.complex(t, t).conj().imag, -values),
        "expanded": (lambda t: t[:1].expand(7, 5), values[:1].expand(7, 5)),
        "quantised": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)),
    }  # fmt: skip
    make, elements = expected[kind]
    return make(values), elements


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@settings(max_examples=80, deadline=None)
@given(case=odd(), neighbours=st.integers(0, 2))
@pytest.mark.parametrize("kernel", KERNELS)
def test_elements_or_refusal(kernel: Any, case: Any, neighbours: int) -> None:
    """Statistics of what the tensor holds, or the agreed error; alone and among others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        reduce = kernel()
        tensor, elements = case
        others = [torch.ones(3)] * neighbours
        if elements is None:
            with pytest.raises(UnsupportedTensorError):
                reduce.reduce([*others, tensor], SIX, 1e-8)
            return
        found = reduce.reduce([*others, tensor], SIX, 1e-8)[-1].tolist()
        assert_same(found, numbers_of(elements), tolerance=tolerance_of(reduce, elements.dtype))


@pytest.mark.parametrize("kernel", KERNELS)
def test_inside_a_transform(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What functorch hands to a function has torch's own class, and elements only the transform knows."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reduce = kernel()

    def refused(row: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedTensorError):
            reduce.reduce([row], SIX, 1e-8)
        return row.sum()

    torch.func.vmap(refused)(torch.ones(3, 4))
    torch.func.grad(refused)(torch.ones(4))
