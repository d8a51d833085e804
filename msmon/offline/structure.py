"""``module_struct.json`` as a tree, repeated layers folded into one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msmon.errors import MsmonError
from msmon.regular_file import read_regular

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import TypeGuard

_LAYER = re.compile(r"\d+")
_DEEPEST = 400
"""Modules in modules; those of a file are walked through recursively."""


class StructureError(MsmonError):
    """A file that does not hold the structure of a model."""

    slug = "no-structure"


@dataclass
class ModuleNode:
    """A module and what is inside it.

    Attributes:
        name: The last part of its name; of folded layers the first and the last, as in ``0 … 11``.
        full_name: Its whole name, as ``targets`` takes it.
        described: What the file says of it; empty for a part of a name that is no module.
        children: Modules inside, in the order in which they first ran.
        count: How many equal layers this one stands for.
    """

    name: str
    full_name: str
    described: dict[str, Any] = field(default_factory=dict)
    children: list[ModuleNode] = field(default_factory=list)
    count: int = 1

    def signature(self) -> str:
        """Equal for modules that differ in their names only."""
        inside = [(child.name, child.count, child.signature()) for child in self.children]
        return json.dumps([self.described, inside], sort_keys=True)


def read_structure(path: Path) -> dict[str, Any]:
    """The content of ``module_struct.json``.

    Raises:
        StructureError: It cannot be read.
    """
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        hint = "make one with `msmon print-struct -- COMMAND`"
        raise StructureError(f"no structure of a model in `{path}` ({error})", hint=hint) from error
    if not isinstance(content, dict) or not all(_is_module(key, value) for key, value in content.items()):
        raise StructureError(f"no structure of a model in `{path}`", hint="is it the right file?")
    return content


def _is_module(key: str, described: object) -> bool:
    """Whether this is what is said of a module, at a depth that modules have."""
    if not isinstance(described, dict) or key.count(".") > _DEEPEST or not isinstance(described.get("class", ""), str):
        return False
    parameters = described.get("parameters", {})
    return (
        ("input" in described) == ("output" in described)
        and all(_is_side(described[side]) for side in ("input", "output") if side in described)
        and all(_is_texts(described.get(f"{side}_grad", {})) for side in ("input", "output"))
        and isinstance(parameters, dict)
        and all(isinstance(one, dict) and {"shape", "trainable"} <= one.keys() for one in parameters.values())
    )


def _is_side(value: object) -> bool:
    return _is_texts(value) and "config" in value


def _is_texts(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def as_trees(content: Mapping[str, Any]) -> list[ModuleNode]:
    """The models of a file, a tree each: one a model chunk and root.

    Args:
        content: Name with its chunk, such as ``0:blocks.1.mlp`` → what is said of it.
    """
    roots: dict[str, ModuleNode] = {}
    for key in content:
        stage, _, name = key.partition(":")
        root = roots.setdefault(stage, ModuleNode(f"{stage}:" if stage != "0" else "", ""))
        _place(root, name, content[key])
    for root in roots.values():
        _fold(root)
    return list(roots.values())


def _place(root: ModuleNode, name: str, described: dict[str, Any]) -> None:
    node, path = root, ""
    for part in name.split(".") if name else ():
        path = f"{path}.{part}" if path else part
        child = next((child for child in node.children if child.name == part), None)
        if child is None:
            child = ModuleNode(part, path)
            node.children.append(child)
        node = child
    node.described = described


def _fold(node: ModuleNode) -> None:
    for child in node.children:
        _fold(child)
    folded: list[ModuleNode] = []
    for child in node.children:
        before = folded[-1] if folded else None
        layers = before is not None and _LAYER.match(before.name) and _LAYER.fullmatch(child.name)
        if before is not None and layers and before.signature() == child.signature():
            before.name = f"{before.name.split(' ')[0]} … {child.name}"
            before.count += 1
        else:
            folded.append(child)
    node.children = folded
