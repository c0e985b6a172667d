"""Whether two models are the same function of their weights, so that these can be averaged or interpolated."""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from isoloss.errors import IsolossError, warn
from isoloss.model_checks import architecture

# config fields that do not change the function of token ids: names, versions and types; training; generation; classes
_IGNORED = re.compile(
    r"_?name_or_path|transformers_version|(torch_)?dtype|torchscript|auto_map|_?attn_implementation\w*|pretraining_tp"
    r"|(?!token_)\w*dropout\w*|\w+_pdrop|\w*layerdrop|\w*drop_path\w*|(\w+_)?init(ializer)?_\w+|\w*_loss(_\w+)?"
    r"|\w*jitter\w*|gradient_checkpointing|use_cache|return_dict\w*|output_(attentions|hidden_states|router_logits|past)"
    r"|chunk_size_feed_forward|(bos|eos|decoder_start)_token_id|forced_\w+|tokenizer_class"
    r"|id2label|label2id|num_labels|problem_type|finetuning_task|task_specific_params|architectures"
)
# most models compute the same with another padding or a longer limit; a table of positions has a shape of its own
_RARELY_MATTERS = {"pad_token_id", "max_position_embeddings"}
_WITHOUT_FUNCTION = (nn.modules.dropout._DropoutNd, nn.Identity)


def function_of_config(config: Any) -> dict[str, Any]:
    """Return the fields of a config that may decide what a model computes, as JSON types.

    Fields that the config's class does not know are left out: other tools have added them.
    """
    fields = config
    if isinstance(config, PretrainedConfig):
        known = {"model_type", "per_layer_config", *inspect.signature(type(config)).parameters}
        stored = config.to_dict()
        # the type first, which the other fields depend on
        fields = {key: stored[key] for key in ("model_type", *stored) if key in known}
        fields |= {key: getattr(config, key) for key in config.sub_configs if key in fields}
    return {
        key: function_of_config(value) if isinstance(value, PretrainedConfig | dict) else value
        for key, value in fields.items()
        if not _IGNORED.fullmatch(str(key))
    }


def function_of_model(model: nn.Module) -> dict[str, Any]:
    """Return the settings that decide a model's function of its weights: its config, else those of each part."""
    model = architecture(model)
    config = getattr(model, "config", None)
    if isinstance(config, PretrainedConfig):
        return {"class": type(model).__name__, **function_of_config(config)}
    return {
        name: {"class": type(part).__name__, **_settings(part)}
        for name, part in model.named_modules()
        if not isinstance(part, _WITHOUT_FUNCTION)
    }


def _settings(part: nn.Module) -> dict[str, Any]:
    """Return the numbers, strings and functions among a module's attributes."""
    kept = {key: value for key, value in vars(part).items() if key[0] != "_" and key not in ("training", "name")}
    kept = {key: getattr(value, "__name__", value) for key, value in kept.items() if not _IGNORED.fullmatch(key)}
    return {key: value for key, value in kept.items() if isinstance(value, int | float | str | None)}


def differences(one: Any, other: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield where two documents of JSON types differ, such as a.b.1, and the value in each; None where one has none."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one | other:
            yield from differences(one.get(key), other.get(key), f"{place}.{key}" if place else str(key))
    elif one != other:
        yield place, one, other


def check_one_function(one: str, functions: Mapping[str, Any], other: str, other_functions: Mapping[str, Any]) -> None:
    """Refuse two models, by name and function, that compute different things with the same weights."""
    for place, value, other_value in differences(functions, other_functions):
        values = f"{place} is {reprlib.repr(value)} in {one} and {reprlib.repr(other_value)} in {other}"
        if place.rpartition(".")[2] in _RARELY_MATTERS:
            warn(f"{values}, which matters for few models")
        else:
            raise IsolossError(f"{values}, so they are different functions of their weights")
