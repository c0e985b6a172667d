"""A folder that keeps the measurements of a comparison, so that the same command resumes after a kill."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import numpy as arrays

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.statistics.estimate import Estimate

_ABOUT = "comparison.json"
_REMEDY = "delete it, and its numbers are measured again"


class Kept:
    """The measured models of a comparison: JSON files with the estimates of each, and the influences beside them.

    Args:
        folder: New, empty, or that of the same comparison.
        about: The inputs and settings that decide the estimates of all models, as JSON types.

    Raises:
        IsolossError: The folder belongs to another comparison, or to something else.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._folder, given = folder, json.loads(json.dumps(about))
        if not (folder / _ABOUT).is_file():
            # a kill may have left the beginning of that file
            if not (folder.is_dir() and all(path.name.startswith(files.TEMPORARY) for path in folder.iterdir())):
                files.check_new(folder)
            files.write_sealed(folder / _ABOUT, given)
        known = files.read_sealed(folder / _ABOUT, _REMEDY)
        if other := [name for name, value in given.items() if known.get(name) != value]:
            raise IsolossError(f"{folder} has a comparison with different {' and '.join(other)}: choose another folder")

    def read(self, model: str, identity: Mapping[str, str]) -> tuple[dict[str, Estimate], str] | None:
        """Return the estimates and the reason that `write` was given with this identity; None: there are none."""
        path = self._path(model, identity)
        influences = path.with_suffix(".safetensors")
        if not (path.is_file() and influences.is_file()):
            return None
        document = files.read_sealed(path, _REMEDY)
        if files.sha256(influences) != document.get("influences"):
            return None
        found = arrays.load(influences.read_bytes())
        estimates = {
            name: dataclasses.replace(Estimate.from_dict(each), influence=found.get(name))
            for name, each in document["estimates"].items()
        }
        return estimates, document["no_minimal"]

    def write(
        self, model: str, identity: Mapping[str, str], estimates: Mapping[str, Estimate], no_minimal: str
    ) -> None:
        """Keep estimates of a model with this identity, and why it has no minimal trace of its own."""
        path = self._path(model, identity)
        influences = {name: each.influence for name, each in estimates.items() if each.influence is not None}
        data = arrays.save(influences)
        # first, as only the other file says that the model is done
        files.write_bytes(path.with_suffix(".safetensors"), data)
        document = {
            **{"model": model, "identity": dict(identity), "influences": hashlib.sha256(data).hexdigest()},
            **{"no_minimal": no_minimal, "estimates": {name: each.to_dict() for name, each in estimates.items()}},
        }
        files.write_sealed(path, document)

    def _path(self, model: str, identity: Mapping[str, str]) -> Path:
        # a model's name may hold any character
        return self._folder / f"{hashlib.sha256(json.dumps([model, identity]).encode()).hexdigest()[:16]}.json"
