"""Users' own rules: from ``--rule module:function``, and from the entry points of installed packages.

Never from the configuration: a file that is handed around must not be able to name code.
"""

from __future__ import annotations

import functools
import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from msmon import log
from msmon.alerts.evaluate import AppliedRule, custom_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

GROUP = "msmon.rules"
"""Entry points of this group are rules; the name of an entry point names its anomalies."""


def load_custom_rules(named: Iterable[str]) -> list[AppliedRule]:
    """The rules of installed packages, then those named; one that cannot be imported is said and left out.

    Args:
        named: ``module:function``, each.
    """
    rules = []
    for point in entry_points(group=GROUP):
        package = f" of {point.dist.name}" if point.dist else ""
        rules.append(_load(point.name, f"{point.value}{package}", point.load))
    rules += [_load(text, text, functools.partial(_import, text)) for text in named]
    return [rule for rule in rules if rule is not None]


def _load(name: str, where: str, load: Callable[[], Any]) -> AppliedRule | None:
    try:
        function = load()
        if not callable(function):
            raise TypeError("it is not callable")  # noqa: TRY301 - one place says what is wrong
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything; training goes on without the rule
        log.say(f"rule {where} left out: {type(error).__name__}: {error}", once=f"rule:{where}")
        return None
    return custom_rule(name, function)


def _import(text: str) -> object:
    module, _, path = text.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
