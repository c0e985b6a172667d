"""Loading a Hugging Face checkpoint as a masked or causal language model: safetensors only, no remote code unasked."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import math
import pickle
import re
import sys
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import logging

from isoloss import files
from isoloss.checkpoints.places import (
    ACADEMIC,
    FROM_CACHE,
    PICKLE,
    check_folder,
    check_weights,
    check_weights_file,
    downloaded,
    hub_answers,
    may_be_hub_name,
    split_module,
)
from isoloss.checkpoints.stored import (
    StoredWeight,
    adapter_config,
    check_archive,
    check_layers,
    check_types,
    checkpoint_file,
    header,
    read_config,
    stored_weights,
)
from isoloss.errors import IsolossError, require, warn
from isoloss.machine import resolve_device
from isoloss.model_checks import input_embeddings, is_causal_class, run_on_ids
from isoloss.registry import run_python

Kind = Literal["masked", "causal"]
Attention = Literal["auto", "sdpa", "eager"]

_AUTO: dict[Kind, tuple[Any, Any]] = {
    "masked": (MODEL_FOR_MASKED_LM_MAPPING, AutoModelForMaskedLM),
    "causal": (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
}
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_MAX_SIZE_RATIO = 10  # of the parameters of a config.json to the stored ones
_SMALL_MODEL = 100_000_000  # up to this many parameters, the ratio may be larger
_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WRAPPERS = (r"\b_orig_mod\.(module\.)*", r"^(module\.)+")  # what DataParallel and torch.compile add to names
# masks and positions that older versions of transformers stored, and present ones make themselves
_CONSTANTS = re.compile(
    r"(^|\.)((attn|attention)\.(attention\.)?bias|masked_bias|causal_mask|inv_freq|position_ids|token_type_ids"
    r"|embed_positions\.weights)$"
)


@dataclass(frozen=True, kw_only=True, repr=False)
class LoadedModel:
    """A language model ready to be measured.

    Attributes:
        model: The transformers model, in evaluation mode.
        kind: `masked`: it predicts masked tokens from both sides; `causal`: each token from those before it.
        name: What it was loaded by.
        architecture: The class that the checkpoint names, e.g. LlamaForCausalLM.
    """

    model: Any
    kind: Kind
    name: str
    architecture: str

    def __repr__(self) -> str:
        number = sum(parameter.numel() for parameter in self.model.parameters())
        return f"LoadedModel({self.name}: {self.architecture}, {self.kind}, {number:,} parameters)"


def load_model(
    checkpoint: str | Path,
    *,
    revision: str | None = None,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    attention: Attention = "auto",
    trust_remote_code: bool = False,
    ignore_unexpected_weights: bool = False,
    module: str | None = None,
    words: Sequence[str] = (),
) -> LoadedModel:
    """Load a checkpoint that has a language-modeling head.

    Args:
        checkpoint: A folder as `save_pretrained` writes it, or the name of a model on the Hugging Face hub, `NAME` or
            `NAME@REVISION`. An adapter of PEFT is merged into its base model.
        revision: A branch, tag or commit of a model on the hub; None: what `checkpoint` says, else the main branch.
        device: Where the model goes; a name as for `resolve_device`.
        dtype: Type of the weights; None: float32.
        attention: Attention kernel; `auto`: `sdpa` where the architecture has it, else `eager`. The model's
            `config._attn_implementation` says which it got.
        trust_remote_code: Whether code that comes with the checkpoint may run.
        ignore_unexpected_weights: Whether to leave out weights that the checkpoint has for a part of the model and the
            model made from its config.json does not, such as biases. Without them the model is another function. Parts
            that only other tasks use, such as a pooler, are always left out, with a warning.
        module: `FILE.py:NAME`: the file is run, and its function NAME, called without arguments, returns an `nn.Module`
            that predicts next tokens. `checkpoint` is then a file with its weights: safetensors, or what `torch.save`
            wrote of a state dict, as it is or below `model` or `state_dict`. Nothing in that file runs.
        words: Of a checkpoint of Academic Budget BERT with a vocab.txt: the tokens that get the ids 0, 1, ...; padding
            and mask follow, then all other tokens. Another checkpoint keeps its ids.

    Returns:
        A `LoadedModel`: `model` in evaluation mode, with every weight from the checkpoint, its `kind`, `name` and
        `architecture`.

    Raises:
        IsolossError: No checkpoint there, weights only as a pickle, no language-modeling head, weights missing,
            unexpected or of another shape, a revision of a folder, code of its own that was not trusted, an adapter
            without PEFT, or a kernel or device that is not available.

    Example:
        >>> from isoloss import load_model
        >>> import tempfile
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     BertForMaskedLM(config).save_pretrained(folder)
        ...     loaded = load_model(folder, device="cpu")
        >>> loaded.architecture, loaded.kind
        ('BertForMaskedLM', 'masked')
    """
    require("checkpoint", checkpoint, (str, Path), "a folder or a name on the Hugging Face hub")
    require("dtype", dtype, (torch.dtype, type(None)), "a type of torch, such as torch.float32")
    if module is not None:
        if attention != "auto" or revision is not None or trust_remote_code:
            raise IsolossError("a module has no revision, no remote code and no attention kernel to choose")
        return _load_module(module, Path(checkpoint), device=device, dtype=dtype, leave_out=ignore_unexpected_weights)
    target = device if isinstance(device, torch.device) else resolve_device(device)
    source = _find(checkpoint, revision)
    name, place = source.name, source.place
    with quiet(), _clear_errors(source):
        if (adapter := adapter_config(**place)) is not None:
            return _load_adapter(
                adapter,
                name,
                device=target,
                dtype=dtype,
                attention=attention,
                trust_remote_code=trust_remote_code,
                ignore_unexpected_weights=ignore_unexpected_weights,
            )
        document, stored = read_config(**place, trust_remote_code=trust_remote_code), stored_weights(**place)
        check_layers(name, document, stored)
        if ACADEMIC in document:
            from isoloss.checkpoints import academic_bert

            paths: set[Path | None] = {w.path for w in stored.values()} or {checkpoint_file(file=PICKLE, **place)}
            state = {key: value for path in paths if path for key, value in _read_state(path).items()}
            state = _without_wrappers(name, state)
            vocabulary = checkpoint_file(file="vocab.txt", **place) if words else None
            # a line ends at \n alone: a word may be another character that ends lines, such as U+2028
            lines = [] if vocabulary is None else vocabulary.read_text(encoding="utf-8").split("\n")
            ids = {word: number for number, word in enumerate(lines)}
            wanted = (*words, "[PAD]", "[MASK]") if ids else ()
            if unknown := set(wanted) - ids.keys():
                raise IsolossError(f"{vocabulary} lacks words of the language: {_some(unknown)}")
            first = [ids[word] for word in wanted]
            how = {"dtype": dtype or torch.float32, "attn_implementation": None if attention == "auto" else attention}
            model = academic_bert.make_model(name, document, state, first, **how).to(target).eval()
            return LoadedModel(model=model, kind="masked", name=name, architecture=type(model).__name__)
        options = {"trust_remote_code": trust_remote_code, "revision": source.revision}
        config = AutoConfig.from_pretrained(source.where, **options)
        for part in (config, config.get_text_config()):
            part.return_dict = True  # without it, models of transformers do not read the tuples of their own parts
            if hasattr(part, "rescale_every"):
                part.rescale_every = 0  # RWKV would divide weights of its later layers, for the range of float16
        kind, architecture = _kind(config, name)
        # only prefixes that occur: transformers keeps a mapping, and applies it backwards when the model is saved
        wrappers = {pattern: "" for pattern in _WRAPPERS if any(re.search(pattern, key) for key in stored)}
        known, cls = _AUTO[kind]
        # the Auto class knows no multimodal model, whole or its text part; the class that the config names does
        if type(config) not in known and not hasattr(config, "auto_map"):
            cls = getattr(transformers, architecture, cls)
        kernel = None if attention == "auto" else attention
        quantization = getattr(config, "quantization_config", None)
        # of a method that it does not know, transformers takes the codes for weights
        is_quantized = bool(quantization) and AutoHfQuantizer.supports_quant_method(quantization)
        if not is_quantized:
            check_types(name, stored)
            if not trust_remote_code:
                _check_size(name, cls, config, stored, kernel)
        model, info = cls.from_pretrained(
            source.where,
            config=config,
            # transformers 5 would keep the type in which the weights are stored, often bfloat16
            dtype=dtype or torch.float32,
            attn_implementation=kernel,
            # grouped products, which transformers would choose for experts, are not for float64
            experts_implementation="eager" if dtype == torch.float64 else None,
            use_safetensors=True,
            key_mapping=wrappers or None,
            ignore_mismatched_sizes=True,  # told below, by name
            output_loading_info=True,
            **options,
        )
    mismatched = {key for key, *_ in info["mismatched_keys"]}
    if mismatched:
        raise IsolossError(f"{name} holds weights of another shape than its config.json says: {_some(mismatched)}")
    if info["missing_keys"]:
        instead = f", and holds others, {_some(info['unexpected_keys'])}" if info["unexpected_keys"] else ""
        raise IsolossError(f"{name} lacks weights of {type(model).__name__}: {_some(info['missing_keys'])}{instead}")
    _check_unexpected(model, info["unexpected_keys"], name, are_ignored=ignore_unexpected_weights)
    if wrappers:
        # by these, save_pretrained would put the prefixes back
        del model._weight_conversions
        warn(f"the weights of {name} have prefixes of torch.compile or DataParallel in their names: they are left out")
    if not is_quantized:
        _restore_weights(model, stored, wrappers)
    if not type(model).__module__.startswith("transformers."):
        _restore_constants(model)
    model = model.to(target).eval()
    if kind == "causal":
        _check_causal(model, name)
    return LoadedModel(model=model, kind=kind, name=name, architecture=architecture)


def header_of(checkpoint: str | Path, *, trust_remote_code: bool = False, module: str | None = None) -> Hashable | None:
    """Return a key that two checkpoints share if `load_model` makes the same model of both, up to values of weights.

    It is made of the config, and of the names, types and shapes of the weights. No weight is read. The key
    is None for an adapter and for a checkpoint with its own code: their files do not decide the model.
    """
    if module is not None:
        path = Path(checkpoint).expanduser()
        check_weights_file(path)
        return tuple(sorted(_module_header(path)))
    source = _find(checkpoint, None)
    with quiet(), _clear_errors(source):
        if adapter_config(**source.place) is not None:
            return None
        document = read_config(**source.place, trust_remote_code=trust_remote_code)
        stored = stored_weights(**source.place)
        check_layers(source.name, document, stored)
    if trust_remote_code and "auto_map" in document:
        return None
    # neither changes what is loaded
    config = {key: value for key, value in document.items() if key not in ("_name_or_path", "transformers_version")}
    return json.dumps(config, sort_keys=True), tuple(sorted((key, *weight[1:]) for key, weight in stored.items()))


class _Source(NamedTuple):
    """Where a checkpoint is."""

    name: str  # a folder, NAME or NAME@REVISION, for messages
    where: str  # a folder, or its name on the hub
    revision: str  # on the hub
    is_from_cache: bool  # whether it is a folder in the hub's cache, because the hub does not answer

    @property
    def place(self) -> dict[str, Any]:
        """The place and the revision, as `isoloss.checkpoints.stored` takes them."""
        return {"where": self.where, "revision": self.revision}


def _find(checkpoint: str | Path, revision: str | None) -> _Source:
    name, folder = str(checkpoint), Path(checkpoint).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise IsolossError(
                f"the revision is {revision!r}, and {folder} is a folder: only models on the hub have revisions"
            )
        check_folder(folder)
        check_weights(folder)
        return _Source(str(folder), str(folder), "main", False)
    on_hub, _, named = name.partition("@")
    if isinstance(checkpoint, Path) or not may_be_hub_name(on_hub):
        raise IsolossError(f"there is no checkpoint {name}: it is not a folder{files.nearest(folder)}")
    if named and revision not in (None, named):
        raise IsolossError(f"the revision is {revision!r}, and {name} names another one")
    revision = revision or named or None
    full_name = on_hub if revision is None else f"{on_hub}@{revision}"
    if hub_answers(on_hub, revision=revision):
        return _Source(full_name, on_hub, revision or "main", False)
    # from its folder: by its name, transformers would ask the hub for an adapter again and again
    return _Source(full_name, str(downloaded(on_hub, revision)), "main", True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from writing load reports, advice and progress bars to the terminal."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


# --- modules of one's own --------------------------------------------------------------------------------------------


def _load_module(
    module: str, weights: Path, *, device: str | torch.device, dtype: torch.dtype | None, leave_out: bool
) -> LoadedModel:
    """Return the module that `FILE.py:NAME` builds, with weights from a file."""
    target = device if isinstance(device, torch.device) else resolve_device(device)
    path, attribute = split_module(module)
    weights = weights.expanduser()
    check_weights_file(weights)
    # as in `python FILE.py`, the file may import its neighbors
    if (folder := str(path.parent.resolve())) not in sys.path:
        sys.path.insert(0, folder)
    build = getattr(run_python(path, "isoloss_module"), attribute, None)
    if not callable(build):
        raise IsolossError(f"{path} has no function {attribute}")
    try:
        model = build()
    except Exception as error:  # whatever the user's code does
        raise IsolossError(f"{module} fails: {type(error).__name__}: {reason(error)}") from error
    if not isinstance(model, nn.Module):
        raise IsolossError(f"{module} returns an object of type {type(model).__name__}; it must return an nn.Module")
    # parameters alone: a buffer may be complex, or of a type that the forward pass asks for
    for parameter in filter(torch.is_floating_point, model.parameters()):
        parameter.data = parameter.data.to(dtype or torch.float32)
    _copy_weights(model, weights, leave_out=leave_out)
    model = model.to(target).eval()
    _check_causal(model, module)
    return LoadedModel(model=model, kind="causal", name=str(weights), architecture=type(model).__name__)


def _copy_weights(model: nn.Module, path: Path, *, leave_out: bool) -> None:
    """Copy the weights in a file into a module, which must have all of them and no others."""
    state, needed = _read_state(path), model.state_dict(keep_vars=True)
    if not state.keys() <= needed.keys():
        state = _without_wrappers(path, state)
    name = type(model).__name__
    shared = state.keys() & needed.keys()
    if codes := {key for key in shared if needed[key].is_floating_point() and state[key].dtype not in _TYPES}:
        raise IsolossError(f"{path} holds {_some(codes)} in {state[min(codes)].dtype}, not as floating-point numbers")
    if other := {key for key in shared if state[key].shape != needed[key].shape}:
        raise IsolossError(f"{path} holds weights of another shape than {name} has: {_some(other)}")
    unexpected = {key for key in state.keys() - needed.keys() if not _CONSTANTS.search(key)}
    # a tied weight may be stored once
    known = {id(needed[key]) for key in shared}
    if missing := {key for key, value in needed.items() if id(value) not in known and not _CONSTANTS.search(key)}:
        instead = f", and holds others, {_some(unexpected)}" if unexpected else ""
        raise IsolossError(f"{path} lacks weights of {name}: {_some(missing)}{instead}")
    if unexpected:
        told = f"{path} has weights that {name} does not have: {_some(unexpected)}"
        if not leave_out:
            raise IsolossError(f"{told}; correct the module, or leave them out with --ignore-unexpected-weights")
        warn(f"{told}; they are left out, and without them it is another function")
    _untie(model, {key: state[key] for key in shared}, path)
    model.load_state_dict({key: state[key] for key in shared}, strict=False)


def _untie(model: nn.Module, state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Untie weights that a module ties if a file has different tensors for them, as transformers does."""
    tied: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if key in state:
            tied.setdefault(id(value), []).append((key, value))
    for (first, shared), *others in tied.values():
        apart = {first: shared}
        for key, _ in others:
            like = next((known for known in apart if torch.equal(state[known], state[key])), None)
            if like == first:
                continue
            apart[key] = apart[like] if like is not None else copy.deepcopy(shared)
            holder, _, attribute = key.rpartition(".")
            setattr(model.get_submodule(holder), attribute, apart[key])
        if model.state_dict(keep_vars=True)[first] is not shared:
            raise IsolossError(
                f"{path} has different tensors for {' and '.join(apart)}, which are one part of {type(model).__name__}"
            )
        if len(apart) > 1:
            warn(
                f"{path} has different tensors for {' and '.join(apart)}, which {type(model).__name__} ties: they are "
                "loaded as separate weights"
            )


def _module_header(path: Path) -> Iterator[tuple[Hashable, ...]]:
    """Yield name, type and shape of each tensor in a file of a module's weights."""
    if path.suffix != ".safetensors":
        # on this device no value is read
        yield from ((key, str(w.dtype), tuple(w.shape)) for key, w in _read_state(path, "meta").items())
        return
    try:
        yield from ((key, *weight[1:]) for key, weight in header(path))
    except SafetensorError as error:
        raise IsolossError(f"{path} cannot be read: {reason(error)}") from error


def _read_state(path: Path, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return the tensors in a file, by name; nothing in it runs."""
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            check_archive(path)
            found = torch.load(path, device, weights_only=True)
    except IsolossError:
        raise
    except pickle.UnpicklingError as error:
        raise IsolossError(
            f"{path} holds more than tensors and plain values, which could run any code: save model.state_dict() alone"
        ) from error
    except Exception as error:  # what a damaged file raises has no common class
        raise IsolossError(f"{path} cannot be read: {reason(error)}") from error
    for key in ("model", "state_dict"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise IsolossError(f"{path} holds no state dict, neither as it is nor below `model` or `state_dict`")
    return dict(found)


def _without_wrappers(name: str | Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights by their names without prefixes of torch.compile and DataParallel."""
    named = {re.sub("|".join(_WRAPPERS), "", key): value for key, value in state.items()}
    if named.keys() != state.keys():
        warn(f"the weights of {name} have prefixes of torch.compile or DataParallel in their names: they are left out")
    return named


# --- what the loaded model is checked for ----------------------------------------------------------------------------


@contextlib.contextmanager
def _clear_errors(source: _Source) -> Iterator[None]:
    """Turn what transformers raises about a checkpoint into one sentence."""
    try:
        yield
    except IsolossError:
        raise
    except SafetensorError as error:
        raise IsolossError(f"the weights in {source.name} are damaged: {error}") from error
    # what a config can get wrong raises errors without a common class, some of them the hub's own
    except Exception as error:
        message = reason(error)
        if isinstance(error, KeyError):
            message = f"transformers does not know {message}, which its config.json names"
        cannot = FROM_CACHE if source.is_from_cache else "cannot be loaded"
        raise IsolossError(f"{source.name} {cannot}: {message}") from error


def _check_size(name: str, cls: Any, config: Any, stored: Mapping[str, StoredWeight], kernel: str | None) -> None:
    """Refuse a config of a model many times larger than its weights: transformers would draw the rest at random."""
    make = cls.from_config if hasattr(cls, "from_config") else cls._from_config  # of an Auto class, or of a model's
    with torch.device("meta"):  # no memory is taken
        model = make(config, attn_implementation=kernel)
    size = sum(tensor.numel() for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
    held = sum(math.prod(weight.shape) for weight in stored.values())
    if size > max(_MAX_SIZE_RATIO * held, _SMALL_MODEL):
        raise IsolossError(
            f"{name} has {held:,} numbers, but its config.json is of a model with {size:,}: one of the two is damaged"
        )


def reason(error: Exception) -> str:
    """Return the message of another library's error, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines or [type(error).__name__])[0]


def _check_unexpected(model: PreTrainedModel, keys: set[str], name: str, *, are_ignored: bool) -> None:
    """Refuse weights that belong inside a module that the model has, and say which whole parts are left out."""
    modules = dict(model.named_modules())

    def owner(key: str) -> str:  # the innermost module that the weight is in; the model itself is ""
        while key not in modules:
            key = key.rpartition(".")[0]
        return key

    inside, parts = set(), set()
    for key in keys:
        if _CONSTANTS.search(key):
            continue
        # in a file that was saved without a head, names lack their first part
        full = key if owner(key) else f"{model.base_model_prefix}.{key}"
        inner = modules[owner(full)]
        # a head is a container at the top of the model: it has modules and no parameters of its own
        is_head = "." not in owner(full) and not isinstance(inner, nn.ModuleList) and not [*inner.parameters(False)]
        # the module that the weight was in is missing as a whole: another task's part, such as a pooler
        if full.rpartition(".")[0] not in modules and (isinstance(inner, PreTrainedModel) or is_head):
            parts.add(key.rpartition(".")[0])
        else:
            inside.add(key)
    if parts:
        warn(f"{name} has parts that a {type(model).__name__} does not have, and they are left out: {_some(parts)}")
    if inside:
        told = f"{name} has weights that a {type(model).__name__} with its config.json does not have: {_some(inside)}"
        if not are_ignored:
            raise IsolossError(
                f"{told}; without them it is another function: correct config.json, or leave them out with "
                "ignore_unexpected_weights (--ignore-unexpected-weights)"
            )
        warn(f"{told}; they are left out, and without them it is another function")


def _restore_weights(model: PreTrainedModel, stored: Mapping[str, StoredWeight], wrappers: Mapping[str, str]) -> None:
    """Restore the weights that transformers changes as it loads them.

    It sets the embedding of the padding token to zero in some models (Youtu, Funnel), and if two shards hold a weight,
    it may read another shard than the index names.
    """
    # a file that was saved without a head lacks the first part of each name
    prefix = f"{model.base_model_prefix}."
    keys = {re.sub("|".join(wrappers) or "$", "", key).removeprefix(prefix): key for key in stored}
    # what transformers converts on purpose has other values under the same name
    converted = [
        pattern
        for conversion in getattr(model, "_weight_conversions", None) or ()
        if getattr(conversion, "operations", None)
        for pattern in conversion.source_patterns
    ]
    with contextlib.ExitStack() as stack:
        opened = {
            path: stack.enter_context(safe_open(path, "pt")) for path in {weight.path for weight in stored.values()}
        }
        # all others are as they were read: comparing them too would take four times as long as loading
        number_of = Counter(key for file in opened.values() for key in file.keys())  # noqa: SIM118
        padded = {
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and module.padding_idx is not None
        }
        for name, value in model.state_dict().items():
            key = keys.get(name.removeprefix(prefix))
            if key is None or (number_of[key] == 1 and name not in padded):
                continue
            if stored[key].shape != value.shape or any(re.search(each, key) for each in converted):
                continue
            right = opened[stored[key].path].get_tensor(key).to(value)
            if not torch.allclose(value, right, rtol=0, atol=0, equal_nan=True):
                value.copy_(right)
                warn(f"transformers loads {name} with other values than are stored; it is as in the checkpoint again")


def _restore_constants(model: PreTrainedModel) -> None:
    """Compute the buffers that no file holds: for remote code, transformers leaves them uninitialized."""
    if not any(module._non_persistent_buffers_set for module in model.modules()):
        return
    with torch.random.fork_rng(devices=[]):
        made = type(model)(model.config)
    kept = made.state_dict().keys()
    for name, value in made.named_buffers():
        if name not in kept:
            model.get_buffer(name).copy_(value)


def _load_adapter(config: Path, name: str, **options: Any) -> LoadedModel:
    """Return the base model of an adapter with the adapter's weights merged into its own."""
    document = files.read_json(config)
    base = document.get("base_model_name_or_path") if isinstance(document, dict) else None
    if not isinstance(base, str) or not base:
        raise IsolossError(f"{name} is an adapter, and its {config.name} names no base_model_name_or_path")
    if importlib.util.find_spec("peft") is None:
        raise IsolossError(f"{name} is an adapter of {base}, which PEFT merges into it: pip install peft")
    weights = config.parent / _ADAPTER_WEIGHTS
    if not weights.is_file():
        raise IsolossError(f"{name} is an adapter of {base} without {weights.name}")
    try:
        revision = None if Path(base).expanduser().is_dir() else document.get("revision")
        loaded = load_model(base, revision=revision, **options)
    except IsolossError as error:
        raise IsolossError(f"{name} is an adapter of {base}: {error}") from error
    if "niter" in str(init := document.get("init_lora_weights")):
        raise IsolossError(
            f"{name} is an adapter of weights that were drawn at random from those of {base} (init_lora_weights is "
            f"{init!r}): convert it, by save_pretrained with path_initial_model_for_weight_conversion"
        )
    from peft import PeftModel, get_peft_model_state_dict

    with safe_open(weights, framework="pt") as file:
        held = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    _resize(loaded.model, held)
    ids = torch.arange(8, device=loaded.model.device)[None] % loaded.model.get_input_embeddings().num_embeddings
    with warnings.catch_warnings():
        # PEFT warns of missing weights, which are an error below, and of names that merging removes
        warnings.simplefilter("ignore")
        adapted: Any = PeftModel.from_pretrained(loaded.model, str(config.parent))
        # prompts are put before the input: no change of weights gives the same function
        if not hasattr(adapted, "merge_and_unload"):
            raise IsolossError(f"{name} is an adapter ({adapted.peft_type.value}) that cannot be merged into {base}")
        # an adapter's file may hold the embeddings or leave them out
        needed = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
        known = set(get_peft_model_state_dict(adapted, save_embedding_layers=True))
        if wrong := (needed - held.keys()) | (held.keys() - known):
            raise IsolossError(f"the weights in {weights} are not those of its {config.name}: {_some(wrong)}")
        with torch.no_grad():
            apart = adapted.eval()(input_ids=ids).logits
            model = adapted.merge_and_unload().requires_grad_(True).eval()  # PEFT froze the base
            change = (model(input_ids=ids).logits - apart).abs().max() / apart.abs().max()
        # more than rounding; written so that NaN is refused too
        if not change < torch.finfo(apart.dtype).eps ** 0.5:
            raise IsolossError(
                f"{name} is an adapter that cannot be merged into {base}: merged, the model predicts otherwise (logits "
                f"change by up to {100 * change:.2g} %), as where an adapter changes one of two tied weights"
            )
    return replace(loaded, model=model, name=name)


def _resize(model: PreTrainedModel, held: Mapping[str, tuple[int, ...]]) -> None:
    """Give a model as many tokens as an adapter was trained with, where it holds the tables that grew."""
    names = {module: name for name, module in model.named_modules()}
    tables = {id(table.weight): table for table in (model.get_input_embeddings(), model.get_output_embeddings())}
    sizes = set()
    for table in tables.values():
        stored = re.compile(rf"(^|\.){re.escape(names[table])}\.(.*\.)?weight")
        sizes.add(next((shape[0] for key, shape in held.items() if stored.search(key) and "lora_" not in key), None))
    if len(sizes) == 1 and (size := sizes.pop()) not in (None, model.get_input_embeddings().num_embeddings):
        model.resize_token_embeddings(size, mean_resizing=False)


def _kind(config: Any, name: str) -> tuple[Kind, str]:
    architectures = list(config.architectures or ())
    for architecture in architectures:
        causal = is_causal_class(architecture, config)
        if causal is not None:
            return "causal" if causal else "masked", architecture
    what = f"is a {', '.join(architectures)}" if architectures else "names no architecture in its config.json"
    raise IsolossError(
        f"{name} {what}: a model with a language-modeling head is needed and no encoder-decoder, one whose "
        "architecture ends in ForMaskedLM, ForCausalLM or LMHeadModel, or one of text and images around such a model"
    )


def _check_causal(model: Any, name: str) -> None:
    """Refuse a model whose logits change with a later token: it sees what it would be scored on."""
    # the two rows differ in their last token alone, so the logits before it must be the same
    ids = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0]])
    try:
        first, second = run_on_ids(model, ids)[:, :-1].float()
    except Exception as error:
        if (table := input_embeddings(model)) is not None and len(table) <= int(ids.max()):
            raise IsolossError(
                f"{name} has a vocabulary of {len(table)} token, so the ids of any tokenizer are beyond it: was its "
                "config made with the size of its tokenizer?"
            ) from error
        raise IsolossError(
            f"{name} is a {type(model).__name__} that does not run on token ids alone: {reason(error)}"
        ) from error
    rounding = 100 * max(torch.finfo(dtype).eps for dtype in (next(model.parameters()).dtype, torch.float32))
    if (first - second).abs().max() > rounding * first.abs().max():
        config = getattr(model, "config", None)
        decoder = " without is_decoder in its config.json" if not getattr(config, "is_decoder", True) else ""
        raise IsolossError(f"{name} is a {type(model).__name__}{decoder}: it sees the tokens that it would predict")


def _some(names: set[str], most: int = 3) -> str:
    ordered = sorted(names)
    rest = len(ordered) - most
    return ", ".join(ordered[:most]) + (f" and {rest} more" if rest > 0 else "")
