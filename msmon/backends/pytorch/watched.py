"""The parameters of one watched model: which, under which names, at which place in the files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from msmon.plan.names import squash_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor
    from torch.nn import Module

    from msmon.backends.base import NamedParameter
    from msmon.backends.pytorch.adapters.plain import PlainAdapter
    from msmon.plan.selection import Selection
    from msmon.runtime.ledger import Removable


@dataclass
class WatchedParameter:
    """One parameter.

    Attributes:
        parameter: The tensor itself. It is held only while its model lives.
        name: Its name in the files.
        stage: Index of its model chunk.
        selected: Whether ``targets`` selects it.
        writes_reduced: False when another rank of its group writes the same reduced gradient.
        aliases: Other names of the same (tied) parameter.
        hooked: Identity of the tensor that the gradient hook is on, 0 without one. ``torch.utils.swap_tensors`` gives a
            parameter another tensor, without its hooks.
        handle: That hook.
    """

    parameter: Tensor
    name: str
    stage: int
    selected: bool = True
    writes_reduced: bool = True
    aliases: list[str] = field(default_factory=list)
    hooked: int = 0
    handle: Removable | None = None


REMOVED = "@removed"
"""Marks the name of a parameter that its model no longer has, though an optimizer does, and whose name another one has."""


class Naming(NamedTuple):
    """How the parameters of one module are named.

    Attributes:
        prefix: Put before each name, such as ``Generator.`` when there are several models.
        stage: Index of the module among the chunks of its model.
        raw: Names as the given module has them, wrapper prefixes included (``set_monitor``).
        squash: Shorten them.
    """

    prefix: str = ""
    stage: int = 0
    raw: bool = False
    squash: bool = False


class Inventory:
    """All parameters of the roots of one model, by identity, in the order of the framework's own walk."""

    def __init__(self) -> None:
        self.by_id: dict[int, WatchedParameter] = {}
        self.all_names: list[str] = []

    def take(
        self,
        root: Module,
        adapter: PlainAdapter,
        naming: Naming,
        selection: Selection,
        earlier: Sequence[NamedParameter[Any]] = (),
    ) -> None:
        """Add the parameters of a root that are not known yet; a further name of a known one becomes its alias.

        Args:
            root: The model.
            adapter: Knows its parameters.
            naming: How they are named.
            selection: Which of them are watched.
            earlier: Parameters that it had, of which some may be swapped out for a call now: ``functional_call``.
        """
        new: dict[int, WatchedParameter] = {}
        forms: dict[int, list[str]] = {}
        held = list(adapter.parameters(root))
        present = {id(found.parameter) for found in held}
        swapped_out = {found.name: found for found in earlier if id(found.parameter) not in present}
        for found in (*swapped_out.values(), *(found for found in held if found.name not in swapped_out)):
            name = found.raw_name if naming.raw else found.name
            whole = naming.prefix + name
            key = id(found.parameter)
            known = new.get(key) or self.by_id.get(key)
            if known is None:
                new[key] = WatchedParameter(found.parameter, name, naming.stage)
            elif known.name not in {name, whole} and whole not in known.aliases:
                known.aliases.append(whole)
            forms.setdefault(key, []).extend({whole, found.name, found.raw_name})
        for key, names in forms.items():
            self.all_names.extend(names)
            if key in new:
                new[key].selected = selection.selects(*names)
        short = squash_all(watched.name for watched in new.values()) if naming.squash else {}
        for watched in new.values():
            watched.name = naming.prefix + short.get(watched.name, watched.name)
        self.by_id.update(new)

    def take_bare(self, parameters: Sequence[Tensor], names: Iterator[str], selection: Selection) -> None:
        """Add parameters that belong to no module, under made-up names."""
        for parameter in parameters:
            if id(parameter) not in self.by_id:
                name = next(names)
                self.by_id[id(parameter)] = WatchedParameter(parameter, name, 0, selection.selects(name))
                self.all_names.append(name)

    def rename(self, now: Inventory) -> dict[str, str]:
        """Give parameters the names that they have now, and add those that are new.

        One that the models no longer have keeps its name, marked where another has it now.

        Returns:
            The names that have changed: before and after.
        """
        changed: dict[str, str] = {}
        names = {watched.name for watched in now.by_id.values()}
        for key, old in self.by_id.items():
            new = now.by_id.get(key)
            name = new.name if new is not None else old.name
            if new is None and name in names:
                name += REMOVED
            if name != old.name:
                changed[old.name] = name
                old.name = name
            if new is not None:
                old.aliases, old.selected = new.aliases, new.selected
        self.by_id.update({key: new for key, new in now.by_id.items() if key not in self.by_id})
        self.all_names += [name for name in now.all_names if name not in set(self.all_names)]
        return changed

    def take_over(self, before: Inventory, selection: Selection) -> None:
        """Go on from an inventory of the same model: bare parameters keep their names, duplicates stay duplicates."""
        for key, old in before.by_id.items():
            if key in self.by_id:
                self.by_id[key].writes_reduced = old.writes_reduced
            else:
                self.by_id[key] = WatchedParameter(old.parameter, old.name, old.stage, selection.selects(old.name))
                self.all_names.append(old.name)

    def keep_only(self, wanted: set[int]) -> list[WatchedParameter]:
        """Let go of parameters that the model no longer has, such as those of a head that was replaced.

        Returns:
            Those.
        """
        gone = [watched for key, watched in self.by_id.items() if key not in wanted]
        self.by_id = {key: watched for key, watched in self.by_id.items() if key in wanted}
        return gone

    def selected(self, parameters: Iterable[Tensor] | None = None) -> list[WatchedParameter]:
        """The watched ones among these parameters (all by default), in the order of the model."""
        if parameters is None:
            return [watched for watched in self.by_id.values() if watched.selected]
        wanted = {id(parameter) for parameter in parameters}
        return [watched for key, watched in self.by_id.items() if watched.selected and key in wanted]

    def mark_duplicates(self, is_duplicate: Callable[[Tensor], bool]) -> None:
        """Leave the reduced gradient of these parameters to another rank."""
        for watched in self.by_id.values():
            watched.writes_reduced = not is_duplicate(watched.parameter)
