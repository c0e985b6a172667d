"""The config of a checkpoint and the headers of its weight files, which are read before a model is made."""

from __future__ import annotations

import importlib
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import cached_file

from isoloss import files
from isoloss.builtin_components import MODEL_TYPES
from isoloss.checkpoints.places import ADAPTER, CONFIG, INDEX, WEIGHTS
from isoloss.errors import IsolossError, warn

_FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them
_LAYERS = re.compile(r".*layers?")  # a field of a config.json that counts layers
_MAX_SHARED_LAYERS = 200  # for a model with layers that share weights, such as ALBERT


class StoredWeight(NamedTuple):
    """A weight, as the header of a safetensors file describes it."""

    path: Path
    dtype: str  # as safetensors calls it, such as BF16
    shape: tuple[int, ...]


def checkpoint_file(where: str, file: str, revision: str = "main") -> Path | None:
    """Return the path of a file in a folder or, downloaded if need be, of a model on the hub; None: no such file."""
    found = cached_file(where, file, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def adapter_config(where: str, revision: str = "main") -> Path | None:
    """Return the path of the config of an adapter, or None where the checkpoint is a model.

    Raises:
        IsolossError: It is both: transformers would add the adapter to the model if PEFT is installed, and only then.
    """
    config = checkpoint_file(where, ADAPTER, revision)
    if config is not None and any(checkpoint_file(where, file, revision) for file in (WEIGHTS, INDEX)):
        raise IsolossError(
            f"{where} holds a whole model and an adapter ({ADAPTER}): move one of them to another folder"
        )
    return config


def stored_weights(where: str, revision: str = "main") -> dict[str, StoredWeight]:
    """Return each stored weight by name, as the headers describe it; empty where there is no safetensors file.

    A weight that an index gives to one shard, and another shard holds too, is the first shard's.
    """
    paths = [checkpoint_file(where, WEIGHTS, revision)]
    places: Mapping[str, Any] = {}
    index = checkpoint_file(where, INDEX, revision)
    if paths == [None] and index is not None:
        document = files.read_json(index)
        weight_map = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(weight_map, dict):
            raise IsolossError(f"{index} has no weight_map, which says what file each weight is in")
        # an index comes with the checkpoint: a name such as ../x must not make us read another file
        for shard in sorted(set(map(str, weight_map.values()))):
            if not re.fullmatch(r"[^/\\]+\.safetensors", shard):
                raise IsolossError(f"{index} names the file {shard!r}: it must be a *.safetensors file beside it")
            paths.append(path := checkpoint_file(where, shard, revision))
            if path is None:
                raise IsolossError(f"{where} lacks {shard}, which its {INDEX} names: copy or download it too")
        places = weight_map
    elif index is not None and f'"{WEIGHTS}"' not in index.read_text():
        warn(f"{where} holds {WEIGHTS} and an {INDEX} of other files: as in transformers, {WEIGHTS} is read")
    return {
        name: weight
        for path in paths
        if path is not None
        for name, weight in header(path)
        if places.get(name, path.name) == path.name
    }


def header(path: Path) -> Iterator[tuple[str, StoredWeight]]:
    """Yield each weight in a safetensors file, as the header describes it."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118, as a file is no dictionary
            part = file.get_slice(name)
            yield name, StoredWeight(path, part.get_dtype(), tuple(part.get_shape()))


def check_types(where: str, stored: Mapping[str, StoredWeight]) -> None:
    """Refuse weights stored as integers or in 8 bits, which mean nothing without the scales of a quantization."""
    for name, weight in stored.items():
        # buffers may be integers, but no float of 8 bits
        is_weight = name.endswith((".weight", ".bias")) or weight.dtype.startswith("F")
        if is_weight and weight.dtype not in _FLOATS:
            raise IsolossError(
                f"{where} holds {name} in {weight.dtype}, and its {CONFIG} has no quantization_config that "
                "transformers knows and that says which numbers the codes stand for: "
                "save the weights as floating-point numbers"
            )


def read_config(where: str, revision: str = "main", *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return the config.json of a checkpoint; empty where there is none, which transformers reports.

    Raises:
        IsolossError: It names no model that transformers, or trusted code, can make.
    """
    path = checkpoint_file(where, CONFIG, revision)
    if path is None:
        return {}
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
    if model_type in MODEL_TYPES:
        importlib.import_module(MODEL_TYPES[model_type])
    if model_type not in CONFIG_MAPPING and not trust_remote_code:
        if "auto_map" in document:
            raise IsolossError(
                f"{where} brings its own code for its model type {model_type!r}: "
                "read that code, and allow it with trust_remote_code if you trust it"
            )
        raise IsolossError(
            f"{where} has the model type {model_type!r}, which this version of transformers does not know"
        )
    if document.get("transformers_weights") not in (None, WEIGHTS):
        raise IsolossError(f"{path} names weights other than {WEIGHTS} (transformers_weights), which are not read")
    return document


def check_layers(where: str, config: Mapping[str, Any], stored: Mapping[str, StoredWeight]) -> None:
    """Refuse a config.json with more layers than weights: transformers makes all layers before it misses weights."""
    for field, value in config.items():
        if isinstance(value, dict):
            check_layers(where, value, stored)
        elif _LAYERS.fullmatch(field) and isinstance(value, int) and value > max(len(stored), _MAX_SHARED_LAYERS):
            raise IsolossError(
                f"{where} holds {len(stored):,} weights, and its {CONFIG} says that {field} is {value:,}: one of the "
                "two is damaged"
            )


def check_archive(path: Path) -> None:
    """Refuse a zip file that claims more bytes than it has: torch.save does not compress, but a zip bomb does."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        claimed, size = sum(entry.file_size for entry in archive.infolist()), path.stat().st_size
    if claimed > size:
        raise IsolossError(
            f"{path} is not a file of torch.save, which does not compress: it claims {claimed:,} bytes and has {size:,}"
        )
