"""Tensors inside whatever a module takes or returns, and how that is built, in words."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_DEPTH = 16
"""How deep values are looked into."""

MOST_TENSORS = 1024
"""Tensors of one side of a module that are looked at."""


def elements(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The inputs of a module in one list, keyword arguments last: what ``tuple[N]:i`` counts."""
    return [*args, *kwargs.values()]


def parts(value: Any) -> list[Any]:  # noqa: ANN401 - whatever a module returns
    """The outputs of a module: the items of a tuple, list, dict or dataclass, else the one value."""
    inside = _items(value)
    return [value] if inside is None else inside


def tensors_of(values: Sequence[Any]) -> list[tuple[int, Tensor]]:
    """Every tensor inside these values, each with the position of the value that holds it, in order.

    Containers may share parts or contain themselves: each of them is looked into once, and not more than
    :data:`MOST_TENSORS` tensors are found.
    """
    found: list[tuple[int, Tensor]] = []
    seen: set[int] = set()
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            found.append((position, value))
        elif value is not None:
            left = max(MOST_TENSORS - len(found), 0)
            found.extend((position, tensor) for tensor in itertools.islice(_tensors(value, 0, seen), left))
    return found[:MOST_TENSORS]


def _tensors(value: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:  # noqa: ANN401 - as above
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEPTH and id(value) not in seen:
        inside = _items(value)
        if inside:
            seen.add(id(value))
            for item in inside:
                yield from _tensors(item, depth + 1, seen)


def suffixes(found: Sequence[tuple[int, Tensor]], positional: int, keywords: Sequence[str] = ()) -> list[str]:
    """What the names of rows end in: ``_0``, ``_1`` of several tensors, ``.mask`` of a keyword argument.

    Args:
        found: What :func:`tensors_of` gave.
        positional: How many of the values are no keyword arguments.
        keywords: The names of those that are.
    """
    owners = ["" if position < positional else f".{keywords[position - positional]}" for position, _ in found]
    if len(owners) == 1:
        return owners
    counts = collections.Counter(owners)
    numbers: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)
    return [f"{owner}_{next(numbers[owner])}" if counts[owner] > 1 else owner for owner in owners]


def _items(value: Any) -> list[Any] | None:  # noqa: ANN401 - as above
    """What a container holds; ``None`` for a value that is no container."""
    if isinstance(value, (tuple, list)):
        return list(value)
    if isinstance(value, Mapping):  # transformers' ModelOutput too
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if type(value) in pytree.SUPPORTED_NODES:  # what the user has registered
        return pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0]
    return None


def describe_inputs(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """The inputs of a module as ``module_struct.json`` shows them."""
    return _describe_sequence("list", elements(args, kwargs))


def describe_output(value: Any) -> dict[str, str]:  # noqa: ANN401 - whatever a module returns
    """The output of a module as ``module_struct.json`` shows it."""
    if isinstance(value, torch.Tensor):
        return {"config": "tensor", "tensor": describe_value(value)}
    if isinstance(value, (tuple, list)):
        return _describe_sequence("tuple" if isinstance(value, tuple) else "list", value)
    if isinstance(value, Mapping):
        return {"config": f"dict[{len(value)}]", **{str(key): describe_value(item) for key, item in value.items()}}
    return {"config": describe_value(value)}


def describe_gradients(gradients: Sequence[Tensor | None]) -> dict[str, str]:
    """The gradients of a module's inputs or outputs as ``module_struct.json`` shows them."""
    return _describe_sequence("tuple", gradients)


def describe_value(value: object) -> str:
    """Size and dtype of a tensor, the class of anything else."""
    if isinstance(value, torch.Tensor):
        size = "nested" if value.is_nested else tuple(value.shape)
        return f"size={size}, dtype={value.dtype}"
    return str(type(value))


def _describe_sequence(kind: str, values: Sequence[Any]) -> dict[str, str]:
    described = {str(position): describe_value(value) for position, value in enumerate(values)}
    return {"config": f"{kind}[{len(values)}]", **described}
