"""Compiling loops with numba. Loading this module loads numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from isoloss.errors import naming_extras

with naming_extras():
    import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def jit(**options: Any) -> Callable[[Function], Function]:
    """Return a decorator that compiles a function when it is first called, or reads it from an earlier process's cache.

    Calls from several threads run side by side if `nogil=True`; only one of them compiles. Where numba finds no folder
    that can be written, as in a read-only installation, each process compiles for itself.

    Args:
        **options: Those of `numba.njit`.
    """

    def compiled(function: Function) -> Function:
        # numba looks for a folder that can be written here, when it decorates, and raises if it finds none
        try:
            return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]
        except RuntimeError:
            return numba.njit(**options)(function)  # type: ignore[no-any-return]

    return compiled
