"""Names of a package that are loaded on first use (PEP 562), so that importing it costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from isoloss.errors import naming_extras


def exports(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of the package called so, which offers names of the modules that they map to.

    Example:
        >>> from isoloss.lazy import exports
        >>> get, _ = exports("isoloss.lazy", {"sqrt": "math"})
        >>> get("sqrt")(4.0)
        2.0
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with naming_extras():
            value = getattr(importlib.import_module(names[name]), name)
        # once it is an attribute, Python finds it by itself and does not ask here again
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(names)
