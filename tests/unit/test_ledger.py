"""Patches and hooks that leave no trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msmon.runtime.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable


class Base:
    def method(self) -> str:
        """The original."""
        return "base"


class Descriptor:
    """Answers a class with a function that takes the instance, and an instance with a bound one."""

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        return (lambda instance: "compiled") if instance is None else lambda: "compiled"


class Compiled:
    method = Descriptor()


class Child(Base):
    pass


def around(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> str:
            return f"{text}({original(*args, **kwargs)})"

        return wrapper

    return wrap


def test_patch_and_undo() -> None:
    """A patched method keeps its name and text; undone, the very same object is back."""
    ledger, before = Ledger(), vars(Base)["method"]
    ledger.patch(Base, "method", around("a"))
    assert Base().method() == "a(base)"
    assert Base.method.__doc__ == "The original."
    assert len(ledger) == 1
    ledger.undo()
    assert vars(Base)["method"] is before
    assert len(ledger) == 0
    ledger.undo()
    assert vars(Base)["method"] is before


def test_descriptors_are_put_back() -> None:
    """What a class keeps is put back, not what it answers: some extension classes keep a method in a descriptor."""
    ledger, before = Ledger(), vars(Compiled)["method"]
    ledger.patch(Compiled, "method", around("a"))
    assert Compiled().method() == "a(compiled)"
    ledger.undo()
    assert vars(Compiled)["method"] is before
    assert Compiled().method() == "compiled"


def test_undo_in_reverse() -> None:
    """Patches over each other are taken off last first; hook handles in their place between them."""
    order: list[str] = []

    class Handle:
        def remove(self) -> None:
            order.append(Base().method())

    ledger, before = Ledger(), vars(Base)["method"]
    ledger.patch(Base, "method", around("a"))
    ledger.keep(Handle())
    ledger.patch(Base, "method", around("b"))
    ledger.keep(Handle())
    assert Base().method() == "b(a(base))"
    ledger.undo()
    assert order == ["b(a(base))", "a(base)"]
    assert vars(Base)["method"] is before


def test_patched_over_by_others() -> None:
    """Somebody else's patch over ours stays when ours is undone."""
    ledger, before = Ledger(), vars(Base)["method"]
    ledger.patch(Base, "method", around("ours"))
    theirs = around("theirs")(Base.method)
    Base.method = theirs  # type: ignore[method-assign, assignment]
    try:
        ledger.undo()
        assert vars(Base)["method"] is theirs
        assert Base().method() == "theirs(ours(base))"
    finally:
        Base.method = before  # type: ignore[method-assign]


def test_inherited_attribute() -> None:
    """Patching what a class inherits leaves nothing behind in the class."""
    ledger = Ledger()
    ledger.patch(Child, "method", around("a"))
    assert Child().method() == "a(base)"
    assert Base().method() == "base"
    ledger.undo()
    assert "method" not in vars(Child)
    assert Child().method() == "base"


def test_instance_attribute() -> None:
    """A method patched on an object comes back as the class's own."""
    instance, ledger = Base(), Ledger()
    ledger.patch(instance, "method", around("a"))
    assert instance.method() == "a(base)"
    ledger.undo()
    assert vars(instance) == {}
