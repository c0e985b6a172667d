"""The mean of the weights of several checkpoints."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from isoloss import files
from isoloss.checkpoints.loading import quiet, reason
from isoloss.checkpoints.places import CONFIG, check_folder, check_weights
from isoloss.checkpoints.stored import (
    StoredWeight,
    adapter_config,
    check_layers,
    check_types,
    read_config,
    stored_weights,
)
from isoloss.errors import IsolossError, warn
from isoloss.runs import Run, refuse_twice
from isoloss.same_function import check_one_function, function_of_config
from isoloss.text.tokenizer_difference import difference
from isoloss.text.tokenizers import files_key, load_tokenizer


def average_checkpoints(checkpoints: Sequence[str | Path], output: str | Path) -> Path:
    """Write the model whose weights are the mean of those of several checkpoints, as a Hugging Face folder.

    The mean of the last checkpoints of one run is LAWA (Kaddour 2022, arXiv:2209.14981); the mean of several runs that
    start from one checkpoint is a uniform soup (Wortsman et al. 2022, arXiv:2203.05482). It is taken in float64, one
    tensor at a time; config, tokenizer and the type of the weights are those of the last checkpoint.

    A mean makes sense only for weights of the same function. So the fields of config.json must agree, except those on
    names, versions, training and generation, and so must the tokenizers, where there are any.

    Args:
        checkpoints: At least two folders: of checkpoints, or of complete runs, whose last checkpoint is taken.
        output: The folder to write, new or empty; it is returned.

    Raises:
        IsolossError: A folder is named twice; weights are missing, damaged, quantized or not finite, or differ in
            names or shapes; configs or tokenizers differ; or the output is not empty.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> from isoloss import average_checkpoints
        >>> shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for name in ("first", "second"):
        ...         BertForMaskedLM(BertConfig(vocab_size=10, **shape)).save_pretrained(f"{folder}/{name}")
        ...     average_checkpoints([f"{folder}/first", f"{folder}/second"], f"{folder}/mean").name
        'mean'
    """
    if len(checkpoints) < 2:
        raise IsolossError(f"there is {'one' if checkpoints else 'no'} checkpoint to average: name at least two")
    folders = [Run(path).last_checkpoint() if Run(path).exists else path for path in map(Path, checkpoints)]
    refuse_twice(list(map(str, folders)))
    sources = [_weights(folder) for folder in folders]
    _check_configs(folders, sources)
    for folder, source in zip(folders[1:], sources[1:], strict=True):
        _check_headers(folders[0], sources[0], folder, source)
    _check_tokenizers(folders)
    with contextlib.ExitStack() as opened, files.new_output(Path(output)) as made:
        readers = {
            path: opened.enter_context(safe_open(path, framework="pt"))
            for path in {weight.path for source in sources for weight in source.values()}
        }
        means, alike = {}, set(range(1, len(folders)))
        for name in sources[0]:
            tensors = [readers[source[name].path].get_tensor(name) for source in sources]
            means[name] = _mean(name, tensors, folders)
            alike = {number for number in alike if _equal(tensors[number], tensors[0])}
        for number in alike:
            warn(f"{folders[0]} and {folders[number]} have the same weights, which count twice")
        save_file(means, made / "model.safetensors", metadata={"format": "pt"})
        for path in folders[-1].iterdir():
            if path.suffix in _COPIED and path.name not in _OF_TRAINING:
                shutil.copyfile(path, made / path.name)
        (made / "model.safetensors").chmod((made / "config.json").stat().st_mode)
    return Path(output)


_COPIED = {".json", ".txt", ".model", ".jinja", ".py"}  # config, tokenizer, and code of a model of its own
_OF_TRAINING = {"trainer.json", "trainer_state.json", "model.safetensors.index.json"}


def _weights(folder: Path) -> dict[str, StoredWeight]:
    """Return what the headers of a checkpoint say of its weights."""
    if not folder.is_dir():
        raise IsolossError(f"{folder} is not a checkpoint folder{files.nearest(folder)}")
    check_folder(folder)
    check_weights(folder)
    if adapter_config(str(folder)) is not None:
        raise IsolossError(f"{folder} is an adapter; only whole models can be averaged")
    try:
        if stored := stored_weights(str(folder)):
            return stored
        raise IsolossError(f"{folder} has no weights in safetensors, and no others can be averaged")
    except SafetensorError as error:
        raise IsolossError(f"the weights in {folder} are damaged: {error}") from error


def _check_configs(folders: Sequence[Path], sources: Sequence[Mapping[str, StoredWeight]]) -> None:
    """Refuse checkpoints that are not the same function of their weights, and quantized weights."""
    known: list[dict[str, Any]] = []
    for folder, stored in zip(folders, sources, strict=True):
        # no code runs: a config that transformers does not know is compared as it is written
        config: Any = read_config(str(folder), trust_remote_code=True)
        if config.get("quantization_config") is not None:
            raise IsolossError(f"{folder} has quantized weights (quantization_config), which have no mean")
        check_types(str(folder), stored)
        check_layers(str(folder), config, stored)
        architectures = {"architectures": config.get("architectures")}
        if config.get("model_type") in CONFIG_MAPPING:
            try:
                with quiet():
                    config = CONFIG_MAPPING[config["model_type"]].from_dict(config)
            except Exception as error:  # what a config can get wrong has no common class
                raise IsolossError(f"{folder / CONFIG} is not a model's config: {reason(error)}") from error
        known.append(function_of_config(config) | architectures)
        check_one_function(str(folders[0]), known[0], str(folder), known[-1])


def _check_headers(
    first: Path, weights: Mapping[str, StoredWeight], folder: Path, others: Mapping[str, StoredWeight]
) -> None:
    """Refuse weights of other names or shapes, and say where types differ."""
    if different := weights.keys() ^ others.keys():
        raise IsolossError(
            f"{folder} and {first} do not have the same architecture: one of them lacks {min(different)}"
        )
    for name, weight in weights.items():
        if weight.shape != others[name].shape:
            raise IsolossError(f"{name} has the shape {weight.shape} in {first} and {others[name].shape} in {folder}")
    mixed = [name for name, weight in weights.items() if weight.dtype != others[name].dtype]
    if mixed:
        types = f"{weights[mixed[0]].dtype} in {first} and {others[mixed[0]].dtype} in {folder}"
        warn(f"{mixed[0]} is {types}: the mean is stored in the type of the last checkpoint")


def _check_tokenizers(folders: Sequence[Path]) -> None:
    """Refuse checkpoints with tokenizers that use an id for different tokens; a checkpoint may have no tokenizer."""
    distinct: dict[Hashable, Path] = {}
    for folder in folders:
        if (key := files_key(folder)) is not None:
            distinct.setdefault(key, folder)
    if len(distinct) < 2:
        return
    (first, one), *others = [(str(folder), load_tokenizer(str(folder))) for folder in distinct.values()]
    for name, other in others:
        if mismatch := difference(one, other, (first, name)).reason:
            raise IsolossError(
                f"{first} and {name} have different tokenizers, so their embeddings are of different tokens: {mismatch}"
            )


def _mean(name: str, tensors: Sequence[torch.Tensor], folders: Sequence[Path]) -> torch.Tensor:
    """Return the mean of the tensors of one name, in the type of the last one."""
    first, last = tensors[0], tensors[-1]
    if not all(tensor.is_floating_point() for tensor in tensors):
        # a mask or positions, which all have
        for folder, tensor in zip(folders, tensors, strict=True):
            if not _equal(tensor, first):
                types = f"{first.dtype} in {folders[0]} and {tensor.dtype} in {folder}"
                raise IsolossError(f"{name} is {types}, and integers that differ have no mean")
        return last
    total = torch.zeros_like(first, dtype=torch.float64)
    for folder, tensor in zip(folders, tensors, strict=True):
        if not tensor.isfinite().all():
            value = tensor[~tensor.isfinite()][0].item()
            raise IsolossError(f"{name} in {folder} holds {value}, so there is no mean")
        total += tensor.double()
    mean = (total / len(tensors)).to(last.dtype)
    if not mean.isfinite().all():
        raise IsolossError(f"the mean of {name} is too large for {last.dtype}, the type of {folders[-1]}")
    return mean


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
