"""What does exact inference on a device: compiled loops of numba, or torch."""

from __future__ import annotations

import importlib.metadata
from typing import Literal

import torch

Backend = Literal["numba", "torch"]


def choose_backend(device: torch.device) -> Backend:
    """Return what computes on `device`: numba on the CPU where it can be imported, torch elsewhere."""
    if device.type != "cpu":
        return "torch"
    try:
        import numba  # noqa: F401
    except ImportError:
        return "torch"
    return "numba"


def describe_backend(device: torch.device) -> str:
    """Return what computes on `device`, with its version, in words."""
    name = choose_backend(device)
    return f"{name} {importlib.metadata.version(name)}, scaled inside-outside in linear space"
