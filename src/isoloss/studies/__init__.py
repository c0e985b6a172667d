"""Studies: plans of many runs and measures, the engines that carry them out, and what they conclude."""

from __future__ import annotations

import importlib
from types import ModuleType

from isoloss.errors import IsolossError

STUDIES = {
    "same-loss": "models of the same pre-training loss: longer training, another step rule, other sizes",
}


def find(name: str) -> ModuleType:
    """Return the module of the study called `name`; an unknown name is an error that lists the studies."""
    if name not in STUDIES:
        raise IsolossError(f"no study {name!r}; the studies are {', '.join(STUDIES)}")
    return importlib.import_module(f"isoloss.studies.{name.replace('-', '_')}.study")
