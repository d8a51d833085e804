"""From an optimizer's parameters to the models that own them.

Upward from the parameters: modules that hold one, their parents, up to those without a parent. This is linear in the
number of modules. Modules that no constructor told us of are looked for among the garbage collector's objects, once.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from msmon.backends.pytorch.adapters import deepspeed, megatron
from msmon.backends.pytorch.adapters.registered import registered_parameters
from msmon.bootstrap import discovery

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

_scanned = False


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The model's parameters that an optimizer trains now: those that it holds, or those that its tensors stand for."""
    for trained_by in (deepspeed.trained_by, megatron.trained_by):
        behind = trained_by(optimizer)
        if behind is not None:
            return behind
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def find_roots(parameters: Sequence[Tensor]) -> tuple[list[Module], list[Tensor]]:
    """The outermost modules that own these parameters, and the parameters that no module owns.

    A scripted model next to its source is left out, and so is the source of a scripted part: both hold the same parameters.
    """
    wanted = {id(parameter) for parameter in parameters}
    roots, covered = _climb(_known_modules(), wanted)
    if not wanted <= covered and _scan_once():
        roots, covered = _climb(_known_modules(), wanted)
    return _without_twins(roots, wanted), [parameter for parameter in parameters if id(parameter) not in covered]


def _known_modules() -> list[Module]:
    return [module for reference in list(discovery.modules.values()) if (module := reference()) is not None]


def _climb(modules: Iterable[Module], wanted: set[int]) -> tuple[list[Module], set[int]]:
    registered = registered_parameters()
    parents: dict[int, list[Module]] = {}
    level: list[Module] = []
    covered: set[int] = set()
    for module in modules:
        for child in _children(module):
            parents.setdefault(id(child), []).append(module)
        held = wanted.intersection(map(id, registered(module).values()))
        if held:
            covered |= held
            level.append(module)
    seen: set[int] = set()
    roots: list[Module] = []
    while level:
        module = level.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        above = [parent for parent in parents.get(id(module), ()) if parent is not module]
        if above:
            level.extend(above)
        else:
            roots.append(module)
    roots.reverse()
    order = {id(module): position for position, module in enumerate(modules)}
    return sorted(roots, key=lambda root: order[id(root)]), covered


def _children(module: Module) -> list[Module]:
    """Its submodules, read without running any code of the module's class."""
    values = module.__dict__.get("_modules")
    if values is None:  # a module whose constructor has not run to its end
        return []
    return [value for value in values.values() if value is not None]


def _without_twins(roots: list[Module], wanted: set[int]) -> list[Module]:
    roots = [root for root in roots if not isinstance(root, torch.jit.ScriptModule)] or roots
    if len(roots) == 1:
        return roots
    parts = {id(root): [m for m in root.modules() if isinstance(m, torch.jit.ScriptModule)] for root in roots}
    scripted = {id(parameter) for found in parts.values() for part in found for parameter in part.parameters()}
    return [
        root
        for root in roots
        if parts[id(root)] or not wanted.intersection(id(parameter) for parameter in root.parameters()) <= scripted
    ]


def _scan_once() -> bool:
    """Add modules that came to life in a way we did not see. Types are looked at, never ``isinstance``: that runs code."""
    global _scanned  # noqa: PLW0603 - a scan takes a tenth of a second, so it happens once a process
    if _scanned and discovery.notes_modules:
        return False
    _scanned = True
    for candidate in gc.get_objects():
        if torch.nn.Module in type(candidate).__mro__:
            discovery.note_module(candidate)
    return True
