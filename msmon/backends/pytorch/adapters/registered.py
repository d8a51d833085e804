"""The parameters that belong to a module, wherever a framework has put them for the moment."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from msmon.bootstrap import discovery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.nn import Module, Parameter

    Registered = Callable[[Module], dict[str, Parameter | None]]


def registered_parameters() -> Registered:
    """What gives the parameters of a module by name, as an optimizer has them.

    Read without running any code of the module's class. It holds what frameworks keep now: ask for it anew at each walk.
    """
    elsewhere = _of_fsdp1()
    for key, parameters in _of_fsdp2().items():
        elsewhere.setdefault(key, {}).update(parameters)

    def of(module: Module) -> dict[str, Parameter | None]:
        own = module.__dict__.get("_parameters") or {}  # none yet: its constructor has not run to its end
        return {**own, **elsewhere[id(module)]} if id(module) in elsewhere else own

    return of


def _of_fsdp1() -> dict[int, dict[str, Parameter]]:
    """Original parameters under the modules that own them: while a unit is whole, some are not registered there."""
    found: dict[int, dict[str, Parameter]] = {}
    for flat in flat_parameters():
        owners = [*flat._param_infos, *flat._shared_param_infos]  # noqa: SLF001 - FSDP has no public place for them
        originals = [*(flat._params or ()), *(flat._shared_params or ())]  # noqa: SLF001 - as above
        for owner, parameter in zip(owners, originals, strict=False):
            found.setdefault(id(owner.module), {})[owner.param_name] = parameter
    return found


def flat_parameters() -> list[Any]:
    """The flat parameters of all ``FullyShardedDataParallel`` units of this process."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if kind is None:
        return []
    known = (reference() for reference in list(discovery.modules.values()))
    units: Iterator[Any] = (unit for unit in known if kind in type(unit).__mro__)
    handles = (unit._handle for unit in units)  # noqa: SLF001 - as above
    return [handle.flat_param for handle in handles if handle is not None]


def _of_fsdp2() -> dict[int, dict[str, Parameter]]:
    """Sharded parameters under the modules that own them: while a group is whole, others are registered there."""
    found: dict[int, dict[str, Parameter]] = {}
    for parameter in fsdp2_parameters(reference() for reference in list(discovery.modules.values())):
        owner = parameter._module_info  # noqa: SLF001 - FSDP has no public place for it
        names = [owner.param_name, *owner.shared_param_names]
        for module, name in zip([owner.module, *owner.shared_modules], names, strict=True):
            found.setdefault(id(module), {})[name] = parameter.sharded_param
    return found


def fsdp2_parameters(modules: Iterable[Module | None]) -> Iterator[Any]:
    """FSDP's own objects about the parameters of the units among these modules."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    for unit in modules if kind is not None else ():
        if unit is not None and kind in type(unit).__mro__:
            state: Any = unit._get_fsdp_state()  # type: ignore[operator]  # noqa: SLF001 - as above
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # noqa: SLF001 - as above
            yield from (parameter for group in groups if group is not None for parameter in group.fsdp_params)
