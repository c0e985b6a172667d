"""Files of tensors: reading one, and checking that it holds what it should."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.languages.config import FileConfig


def file_config(path: Path) -> FileConfig:
    """Return the config of the language in `path`: where the file is, and its content."""
    return FileConfig(path=str(path.resolve()), content=files.sha256(path))


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, npt.NDArray[Any]]]:
    """Return the metadata and the tensors of a safetensors file.

    Raises:
        IsolossError: There is no such file, or it is not in that format.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise IsolossError(
            f"{path} does not exist{files.nearest(path)}" if not path.exists() else f"{path} is not a file"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    except (OSError, SafetensorError, TypeError) as error:
        raise IsolossError(f"{path} is not a readable safetensors file: {error}") from error


def check_names(tables: Mapping[str, Any], names: Iterable[str], path: Path) -> None:
    """Check that a file holds tensors of exactly these names.

    Raises:
        IsolossError: It does not.
    """
    wanted = list(names)
    if set(tables) != set(wanted):
        raise IsolossError(
            f"{path} must hold the tensors {', '.join(wanted) or '(none)'}, and holds {', '.join(tables) or 'none'}"
        )
