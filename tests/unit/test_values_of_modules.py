"""Tensors inside what modules take and return, and the endings of their names."""

from __future__ import annotations

from typing import Any

import torch

from msmon.backends.pytorch.structure import MOST_TENSORS, elements, suffixes, tensors_of


def test_containers_that_share_parts_or_contain_themselves() -> None:
    """Each container is looked into once: no row comes again and again, and the number of paths does not matter."""
    tensor, other = torch.ones(1), torch.ones(2)
    first: list[Any] = [tensor]
    second = [other, first]
    first.append(second)
    assert [id(found) for _, found in tensors_of([first])] == [id(tensor), id(other)]
    doubled: Any = [tensor]
    for _ in range(14):
        doubled = [doubled, doubled]
    assert len(tensors_of([doubled, doubled])) == 1


def test_a_tensor_that_is_given_twice_counts_twice() -> None:
    """Positions of a plain tuple stay what they are."""
    tensor = torch.ones(1)
    assert [position for position, _ in tensors_of([tensor, tensor, (tensor,)])] == [0, 1, 2]


def test_bound_on_the_tensors_of_a_side() -> None:
    """However many there are, no more than a bounded number is looked at."""
    assert len(tensors_of([[torch.ones(1)] * 5000, torch.ones(1)])) == MOST_TENSORS


def test_endings() -> None:
    """One positional tensor has none, several have numbers, keywords have their names."""

    def of(*args: Any, **kwargs: Any) -> list[str]:
        return suffixes(tensors_of(elements(args, kwargs)), len(args), list(kwargs))

    x = torch.ones(1)
    assert of(x) == [""]
    assert of(x, [x, 1]) == ["_0", "_1"]
    assert of(x, mask=x) == ["", ".mask"]
    assert of(mask=x, scale=[x, x]) == [".mask", ".scale_0", ".scale_1"]
    assert of(None, x, mask=None, scale={"by": x}) == ["", ".scale"]
