"""The content of ``run.json``: what was recorded, of what, with which versions, by which rank."""

from __future__ import annotations

import platform
import socket
import sys
from typing import TYPE_CHECKING, Any

import torch

from msmon import __version__, env
from msmon.backends.pytorch.naming import class_name
from msmon.runtime.run_directory import utc_now

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msmon.backends.pytorch.watch import Watch
    from msmon.config.schema import MonitorConfig
    from msmon.runtime.process import Place

SCHEMA_VERSION = 1
_started = utc_now()


def run_report(
    config: MonitorConfig, place: Place, models: Sequence[dict[str, Any]], injected: dict[str, Any]
) -> dict[str, Any]:
    """Everything about a run that is not a row."""
    return {
        "schema_version": SCHEMA_VERSION,
        "started": _started,
        "rank": place.rank,
        "world_size": place.world_size,
        "host": socket.gethostname(),
        "command": env.shown(sys.orig_argv),
        "msmon": injected,
        "versions": {
            "msmon": __version__,
            "python": platform.python_version(),
            "framework": "torch",
            "torch": torch.__version__,
        },
        "config": config.model_dump(mode="json"),
        "models": list(models),
    }


def _describe_optimizers(watch: Watch) -> dict[str, Any]:
    """Its optimizers; when all are gone, what was said of them stays."""
    classes = [type(optimizer).__name__ for optimizer in watch.optimizers]
    loaded = [None if loaded is None else "loaded" if loaded else "fresh" for loaded in watch.states_were_loaded]
    return {"optimizers": classes, "optimizer_state": loaded} if classes or not watch.report else {}


def describe_model(watch: Watch) -> dict[str, Any]:
    """One watched model, with every parameter."""
    roots = [root for reference in watch.roots if (root := reference()) is not None]
    return {
        "label": watch.label,
        "classes": [class_name(root) for root in roots],
        "adapter": watch.adapter.name,
        **(watch.adapter.describe(roots[0]) if roots else {}),
        **_describe_optimizers(watch),
        "first_step": watch.first_step._asdict(),
        **({"renamed": watch.renamed} if watch.renamed else {}),
        "parameters": [
            {
                "name": watched.name,
                "shape": list(watched.parameter.shape),
                "dtype": str(watched.parameter.dtype),
                "trainable": watched.parameter.requires_grad,
                "watched": watched.selected,
                **watch.adapter.place(watched.parameter),
                **({"aliases": watched.aliases} if watched.aliases else {}),
            }
            for watched in watch.inventory.by_id.values()
        ],
    }
