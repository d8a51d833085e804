"""What is noted of objects that live elsewhere; and that no Python code of ours runs when one of them dies."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import pytest

import msmon
from msmon.bootstrap import discovery
from msmon.runtime.references import IdentitySet, IdentityTable

FORBIDDEN = {"WeakSet", "WeakKeyDictionary", "WeakValueDictionary", "WeakMethod", "finalize"}
SOURCES = sorted(
    path for path in Path(msmon.__file__).parent.rglob("*.py") if path.name not in {"roots.py", "discovery.py"}
)


class Thing:
    """Equal to every other one, and not hashable."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def callbacks(source: str) -> list[str]:
    """Python code that would run while an object dies, where exceptions are printed and lost."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN and ast.unparse(node.value) == "weakref":
            found.append(ast.unparse(node))
        elif isinstance(node, ast.FunctionDef) and node.name == "__del__":
            found.append(node.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "gc.callbacks":
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "weakref.ref":
            written_in_c = ast.unparse(node).endswith(".put)")  # of a SimpleQueue
            found += [ast.unparse(node)] if len(node.args) > 1 and not written_in_c else []
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_code_of_ours_runs_while_an_object_dies(path: Path) -> None:
    """A handler of the script may raise there (Ctrl-C, a time limit), and Python discards what is raised."""
    assert callbacks(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    ["weakref.WeakSet()", "weakref.finalize(a, b)", "weakref.ref(a, self._gone)", "class A:\n def __del__(self): pass"],
)
def test_such_code_is_found(source: str) -> None:
    """The test above can fail."""
    assert callbacks(source) != []


def test_values_by_identity() -> None:
    """Equal objects that cannot be hashed have values of their own, and lose them with their lives."""
    table: IdentityTable[Thing, int] = IdentityTable()
    first, second = Thing(), Thing()
    table[first], table[second] = 1, 2
    assert (table.get(first), table.get(second), table.get(Thing()), table.get(Thing(), 7)) == (1, 2, None, 7)
    assert table.pop(first, 0) == 1
    assert first not in table
    del second
    gc.collect()
    assert list(table) == []


def test_what_is_gone_does_not_pile_up() -> None:
    """A thousand objects that come and go leave a bounded number of entries; those that stay, stay."""
    noted: IdentitySet[Thing] = IdentitySet()
    kept = [Thing() for _ in range(5)]
    for thing in kept:
        noted.add(thing)
    for _ in range(1000):
        noted.add(Thing())
    assert len(noted._entries) < 100
    assert all(thing is other for thing, other in zip(kept, noted, strict=False))
    noted.discard(kept[0])
    assert kept[0] not in noted


@pytest.mark.parametrize("kind", ["set", "modules"])
def test_the_order_is_that_in_which_objects_were_added(kind: str) -> None:
    """Also where one has the id of another that is gone: it does not get its place."""
    reused = 0
    for _ in range(200):
        noted: IdentitySet[Thing] = IdentitySet()
        discovery.modules.clear()
        add = noted.add if kind == "set" else discovery.note_module
        gone, second = Thing(), Thing()
        number = id(gone)
        add(gone)
        add(second)
        del gone
        third = Thing()
        reused += id(third) == number
        add(third)
        alive = [reference() for reference in discovery.modules.values()]
        order = list(noted) if kind == "set" else [thing for thing in alive if thing is not None]
        assert [id(thing) for thing in order] == [id(second), id(third)]
    discovery.modules.clear()
    assert reused, "no id was ever used again: this test says nothing"
