"""Names of parameters as the user's own model has them, whatever wraps it.

A wrapper is known by its class (by name along the method resolution order, so that no framework is imported) and gives
its child no name of its own: a user's attribute that happens to be called ``module`` keeps its part of the name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parameter import Parameter, is_lazy

from msmon.backends.base import NamedParameter
from msmon.bootstrap import discovery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.nn import Module

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "_FabricModule": "_original_module",
    "AveragedModel": "module",
    "DeepSpeedEngine": "module",
    "Float16Module": "module",
}


def wrapped_attribute(module: Module) -> str:
    """The attribute under which a wrapper keeps what it wraps; empty for a module that is no wrapper."""
    for cls in type(module).__mro__:
        attribute = _WRAPPERS.get(cls.__name__, "")
        if attribute and attribute in module.__dict__.get("_modules", {}):
            return attribute
    return ""


def class_name(module: Module) -> str:
    """The user's own class, also where ``fully_shard`` has put a class of its own in its place."""
    bases = type(module).__bases__
    own = bases[1] if [base.__name__ for base in bases[:1]] == ["FSDPModule"] and len(bases) > 1 else type(module)
    return own.__name__


def unwrap(module: Module) -> Module | None:
    """What a wrapper wraps, ``None`` for a module that is no wrapper."""
    attribute = wrapped_attribute(module)
    return module.__dict__["_modules"][attribute] if attribute else None


def innermost(module: Module) -> Module:
    """The user's own model inside any number of wrappers."""
    while (inner := unwrap(module)) is not None:
        module = inner
    return module


def walk_parameters(
    root: Module, registered: Callable[[Module], dict[str, Parameter | None]]
) -> Iterator[NamedParameter[Parameter]]:
    """Every parameter under every name it has, in the order of ``named_parameters(remove_duplicate=False)``.

    Those of lazy layers are left out until they have a shape.

    Args:
        root: The model.
        registered: Gives the parameters of one module by name.
    """
    for module, name, raw_name in _walk(root, "", "", frozenset()):
        for key, parameter in registered(module).items():
            if isinstance(parameter, Parameter) and not is_lazy(
                parameter
            ):  # else it stands in for one (functional_call)
                yield NamedParameter(name + key, raw_name + key, parameter)


def walk_modules(root: Module, *, wrappers: bool) -> Iterator[tuple[Module, str, str]]:
    """Every module once, with its name without and with what wrappers add; the root's is empty.

    Args:
        root: The model.
        wrappers: Wrappers too. Otherwise only the wrappers that torch.compile makes, and around the root as well: inside
            them nothing can be seen, so that they stand for what they wrap.
    """
    seen: set[int] = set()
    around = [wrapper for wrapper in _around(root) if wrapped_attribute(wrapper) == "_orig_mod"]
    found = [*((wrapper, "", "") for wrapper in around), *_walk(root, "", "", frozenset())]
    for module, name, raw_name in found:
        if id(module) not in seen and (wrappers or wrapped_attribute(module) in {"", "_orig_mod"}):
            seen.add(id(module))
            yield module, name.removesuffix("."), raw_name.removesuffix(".")


def _walk(module: Module, name: str, raw_name: str, above: frozenset[int]) -> Iterator[tuple[Module, str, str]]:
    """Modules with the prefixes of their parameters' names; a module that contains itself is not entered again."""
    if id(module) in above:
        return
    attribute = wrapped_attribute(module)
    yield module, name, raw_name
    for key, child in module.__dict__["_modules"].items():
        if child is not None:
            own_name = name if key == attribute else f"{name}{key}."
            yield from _walk(child, own_name, f"{raw_name}{key}.", above | {id(module)})


def wrappers_around(module: Module) -> list[str]:
    """Classes of the wrappers inside a module and of those put around it, outermost first."""
    inside = []
    inner: Module | None = module
    while inner is not None and (below := unwrap(inner)) is not None:
        inside.append(type(inner).__name__)
        inner = below
    return [*(type(wrapper).__name__ for wrapper in _around(module)), *inside]


def _around(module: Module) -> list[Module]:
    """The wrappers that were put around a module, outermost first."""
    found: list[Module] = []
    current: Module | None = module
    while current is not None:
        wrapped = current
        known = (reference() for reference in list(discovery.modules.values()))
        current = next((m for m in known if m is not None and unwrap(m) is wrapped), None)
        if current is not None:
            found.insert(0, current)
    return found
