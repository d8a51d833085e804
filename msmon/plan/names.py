"""Names of rows: shortened on request, unique always."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_LANDMARKS = tuple(re.compile(pattern) for pattern in (r"layers?", r"embeddings?", r"final.*", r"output.*", r"norm.*"))


def squash(name: str) -> str:
    """Shorten a dotted name to its part from the last landmark on; without a landmark it stays as it is.

    Landmarks are tried in the order layer(s), embedding(s), final…, output…, norm….
    """
    parts = name.split(".")
    for landmark in _LANDMARKS:
        for index in reversed(range(len(parts))):
            if landmark.fullmatch(parts[index]):
                return ".".join(parts[index:])
    return name


def squash_all(names: Iterable[str]) -> dict[str, str]:
    """Shorten names; those that would become equal keep their whole name.

    Returns:
        The whole name of each → its short name, one to one.
    """
    short = {name: squash(name) for name in names}
    counts: dict[str, int] = {}
    for value in short.values():
        counts[value] = counts.get(value, 0) + 1
    return {name: value if counts[value] == 1 else name for name, value in short.items()}


def unique_label(label: str, taken: Iterable[str]) -> str:
    """``label``, or ``label_1``, ``label_2``, … when it is taken."""
    used = set(taken)
    candidate, number = label, 0
    while candidate in used:
        number += 1
        candidate = f"{label}_{number}"
    return candidate
