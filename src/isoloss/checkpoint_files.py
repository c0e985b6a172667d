"""The files of a checkpoint, in a folder or on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from safetensors import safe_open
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import cached_file

from isoloss import files
from isoloss.early_checks import ADAPTER, CONFIG, INDEX, WEIGHTS
from isoloss.errors import IsolossError

ADAPTER_WEIGHTS = "adapter_model.safetensors"

_FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them


class Place(TypedDict):
    """Where on the hub the files of a checkpoint are; of a folder it means nothing."""

    revision: str
    local_files_only: bool


def checkpoint_file(name: str, file: str, place: Place) -> Path | None:
    """Return the path of a file of a checkpoint, which is downloaded if need be, or None where it has no such file."""
    found = cached_file(name, file, **place, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def adapter_config(name: str, place: Place) -> Path | None:
    """Return the path of the config of an adapter, or None where the checkpoint is a model.

    Raises:
        IsolossError: It is both: transformers would add the adapter to the model if PEFT is installed, and only then.
    """
    config = checkpoint_file(name, ADAPTER, place)
    if config is not None and any(checkpoint_file(name, file, place) for file in (WEIGHTS, INDEX)):
        raise IsolossError(f"{name} holds a whole model and an adapter ({ADAPTER}): move one of them to another folder")
    return config


def stored_weights(name: str, place: Place) -> dict[str, Path]:
    """Return the file of each weight, by the weight's name there; an empty one where there is no safetensors file.

    Raises:
        IsolossError: The index names a file that is not there, is elsewhere or is no safetensors file.
    """
    paths = [checkpoint_file(name, WEIGHTS, place)]
    if paths == [None] and (index := checkpoint_file(name, INDEX, place)) is not None:
        document = files.read_json(index)
        weight_map = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(weight_map, dict):
            raise IsolossError(f"{index} has no weight_map, which says what file each weight is in")
        for shard in sorted(set(map(str, weight_map.values()))):
            if not re.fullmatch(r"[^/\\]+\.safetensors", shard):
                raise IsolossError(f"{index} names the file {shard!r}: it must be a *.safetensors file beside it")
            paths.append(path := checkpoint_file(name, shard, place))
            if path is None:
                raise IsolossError(f"{name} lacks {shard}, which its {INDEX} names: copy or download it too")
    found: dict[str, Path] = {}
    for path in paths:
        if path is not None:
            with safe_open(path, framework="pt") as file:
                found |= dict.fromkeys(file.keys(), path)
    return found


def check_types(name: str, stored: Mapping[str, Path]) -> None:
    """Refuse weights that are stored as integers or in 8 bits: without a quantization's scales they are mere codes."""
    for path in set(stored.values()):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118, as a file is no dictionary
                kind = file.get_slice(key).get_dtype()
                if key.endswith((".weight", ".bias")) and kind not in _FLOATS:
                    raise IsolossError(
                        f"{name} holds {key} in {kind}, and its {CONFIG} has no quantization_config that says which "
                        "numbers these codes stand for: save the weights as floating-point numbers"
                    )


def check_config(name: str, place: Place, *, trust_remote_code: bool) -> None:
    """Refuse a config.json that names no model that transformers, or trusted code, can make."""
    path = checkpoint_file(name, CONFIG, place)
    if path is None:
        return  # transformers says so of a name on the hub
    document = files.read_json(path)
    if not isinstance(document, dict):
        raise IsolossError(f"{path} is not a model's config: it holds no JSON object")
    model_type: Any = document.get("model_type")
    if not isinstance(model_type, str | None):
        raise IsolossError(f"{path} is not a model's config: its model_type is {model_type!r}, not a name")
    architectures = document.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(each, str) for each in architectures):
        raise IsolossError(
            f"{path} is not a model's config: its architectures are {architectures!r}, not a list of names"
        )
    if model_type not in CONFIG_MAPPING and not trust_remote_code:
        if "auto_map" in document:
            raise IsolossError(
                f"{name} brings its own code for its model type {model_type!r}: "
                "read that code, and allow it with trust_remote_code if you trust it"
            )
        raise IsolossError(
            f"{name} has the model type {model_type!r}, which this version of transformers does not know"
        )
    if document.get("transformers_weights") not in (None, WEIGHTS):
        raise IsolossError(f"{path} names weights other than {WEIGHTS} (transformers_weights), which are not read")
