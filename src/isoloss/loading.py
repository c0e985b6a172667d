"""Loading a Hugging Face checkpoint as a masked or causal language model: safetensors only, no remote code unasked."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils import logging

import isoloss.lstm  # noqa: F401  (makes its checkpoints known to transformers)
from isoloss import files
from isoloss.errors import IsolossError, require
from isoloss.model_checks import is_causal_class, run_on_ids
from isoloss.runs import check_weights, refuse_run

Kind = Literal["masked", "causal"]
Attention = Literal["auto", "sdpa", "eager"]

_AUTO: dict[Kind, tuple[Any, Any]] = {
    "masked": (MODEL_FOR_MASKED_LM_MAPPING, AutoModelForMaskedLM),
    "causal": (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_STEP = re.compile(r"step-\d+|ema")  # the checkpoints of a run
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


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


def resolve_device(name: str) -> torch.device:
    """Return the device called `name`.

    Args:
        name: `auto` (the current CUDA device if there is one, otherwise the CPU), `cpu`, `cuda`, `cuda:N` or `mps`.
            Apple's `mps` is never chosen by itself, as it has no float64.

    Raises:
        IsolossError: No such name, or this machine or this torch has no such device.

    Example:
        >>> resolve_device("cpu")
        device(type='cpu')
    """
    kind, _, index = name.partition(":")
    if name not in ("auto", "cpu", "cuda", "mps") and not (kind == "cuda" and index.isdecimal()):
        raise IsolossError(f"the device is {name!r}; it must be auto, cpu, cuda, cuda:N or mps")
    if kind == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise IsolossError(f"the device is {name!r}, but torch finds no CUDA device here; use cpu or auto")
        if index and int(index) >= count:
            raise IsolossError(f"the device is {name!r}, but the CUDA devices here are cuda:0 to cuda:{count - 1}")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise IsolossError("the device is 'mps', but torch finds no Apple GPU here; use cpu or auto")
    return torch.device(name)


def load_model(
    checkpoint: str | Path,
    *,
    revision: str | None = None,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    attention: Attention = "auto",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a checkpoint that has a language-modeling head.

    Args:
        checkpoint: A folder as `save_pretrained` writes it, or the name of a model on the Hugging Face hub, `NAME` or
            `NAME@REVISION`.
        revision: A branch, tag or commit of a model on the hub; None: what `checkpoint` says, else the main branch.
        device: Where the model goes; a name as for `resolve_device`.
        dtype: Type of the weights; None: float32.
        attention: Attention kernel; `auto`: `sdpa` where the architecture has it, else `eager`. The model's
            `config._attn_implementation` says which it got.
        trust_remote_code: Whether code that comes with the checkpoint may run.

    Returns:
        A `LoadedModel`: `model` in evaluation mode, with every weight from the checkpoint, its `kind`, `name` and
        `architecture`.

    Raises:
        IsolossError: No checkpoint there, weights only as a pickle, no language-modeling head, weights missing or of
            another shape, a revision of a folder, code of its own that was not trusted, or a kernel or device that is
            not available.

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
    name = str(checkpoint)
    target = device if isinstance(device, torch.device) else resolve_device(device)
    folder = Path(checkpoint).expanduser()
    is_online = False
    if folder.is_dir():
        name = str(folder)
        if revision is not None:
            raise IsolossError(f"the revision is {revision!r}, and {name} is a folder: only models on the hub have one")
        _check_folder(folder, trust_remote_code=trust_remote_code)
        check_weights(folder)
    else:
        on_hub, _, named = name.partition("@")
        if isinstance(checkpoint, Path) or not may_be_hub_name(on_hub):
            raise IsolossError(f"there is no checkpoint {name}: it is not a folder{files.nearest(folder)}")
        if named and revision not in (None, named):
            raise IsolossError(f"the revision is {revision!r}, and {name} names another one")
        name, revision = on_hub, revision or named or None
        is_online = hub_answers(name, revision=revision)
    with quiet(), _clear_errors(name, revision, is_online=is_online):
        options = {
            "trust_remote_code": trust_remote_code,
            "local_files_only": not is_online,
            "revision": revision or "main",
        }
        config = AutoConfig.from_pretrained(name, **options)
        kind, architecture = _kind(config, name)
        known, cls = _AUTO[kind]
        if type(config) not in known and not hasattr(config, "auto_map"):  # the text part of a multimodal model, or all
            cls = getattr(transformers, architecture, cls)
        model, info = cls.from_pretrained(
            name,
            config=config,
            dtype=dtype or torch.float32,
            attn_implementation=None if attention == "auto" else attention,
            # grouped products, which transformers would choose for experts, are not for float64
            experts_implementation="eager" if dtype == torch.float64 else None,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # told below, by name
            output_loading_info=True,
            **options,
        )
    mismatched = {key for key, *_ in info["mismatched_keys"]}
    if mismatched:
        raise IsolossError(f"{name} holds weights of another shape than its config.json says: {_some(mismatched)}")
    if info["missing_keys"]:
        raise IsolossError(f"{name} lacks weights of {type(model).__name__}: {_some(info['missing_keys'])}")
    numbered = {_without_numbers(key) for key in model.state_dict()}
    dropped = {key for key in info["unexpected_keys"] if _without_numbers(key) in numbered}
    if dropped:  # other keys, such as those of a pooler, belong to parts that this task does not have
        raise IsolossError(f"{name} holds more layers than its config.json says: {_some(dropped)}")
    model = model.to(target).eval()
    if kind == "causal":
        _check_causal(model, name)
    full_name = name if revision is None else f"{name}@{revision}"
    return LoadedModel(model=model, kind=kind, name=full_name, architecture=architecture)


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


def may_be_hub_name(name: str) -> bool:
    """Return whether `name` may be `model` or `owner/model` on the Hugging Face hub; otherwise it is a path.

    A path is what lies in a folder that exists, or is called as a checkpoint of a run is.

    Example:
        >>> may_be_hub_name("google-bert/bert-base-uncased"), may_be_hub_name("runs/first/checkpoints/step-100")
        (True, False)
    """
    folder, _, last = name.rpartition("/")
    is_path = (bool(folder) and Path(folder).is_dir()) or _STEP.fullmatch(last) is not None
    return _HUB_NAME.fullmatch(name) is not None and not is_path


def hub_answers(name: str, *, what: str = "checkpoint", revision: str | None = None) -> bool:
    """Ask the Hugging Face hub once, as transformers and datasets would repeat the question for half a minute.

    Args:
        name: The name of its repository.
        what: What is wanted, for the message: `dataset`, or something of a model.
        revision: Of the repository; None: the main branch.

    Returns:
        Whether the hub can be reached.

    Raises:
        IsolossError: It can, and has nothing of this name, or not this revision.
    """
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        ask = huggingface_hub.dataset_info if what == "dataset" else huggingface_hub.model_info
        ask(name, revision=revision, timeout=20)
    except RevisionNotFoundError as error:
        raise IsolossError(f"there is no revision {revision} of {name} on the Hugging Face hub") from error
    except RepositoryNotFoundError as error:
        raise IsolossError(
            f"there is no {what} {name}, neither a folder here nor on the Hugging Face hub{files.nearest(name)}"
        ) from error
    except Exception:  # whatever the network or its library can raise
        return False
    return True


@contextlib.contextmanager
def _clear_errors(name: str, revision: str | None, *, is_online: bool) -> Iterator[None]:
    """Turn what transformers raises about a checkpoint into one sentence."""
    try:
        yield
    except IsolossError:
        raise
    except SafetensorError as error:
        raise IsolossError(f"the weights in {name} are damaged: {error}") from error
    except Exception as error:  # what a config can get wrong has no common class, some of it is the hub's own
        reason = _reason(error)
        if isinstance(error, KeyError):
            reason = f"transformers does not know {reason}, which its config.json names"
        unanswered = not is_online and not Path(name).is_dir()
        if unanswered and not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            raise IsolossError(
                f"there is no checkpoint {name} on this machine, and the Hugging Face hub does not answer"
                f"{files.nearest(name)}"
            ) from error
        taken_as = " from what was downloaded before, and the Hugging Face hub does not answer" if unanswered else ""
        raise IsolossError(f"{name} cannot be loaded{taken_as}: {reason}") from error


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join(lines[:2]) if lines and lines[0].endswith(":") else (lines or [type(error).__name__])[0]


def _without_numbers(key: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", key)


def _check_folder(folder: Path, *, trust_remote_code: bool) -> None:
    if not (folder / "config.json").is_file():
        refuse_run(folder, "not a checkpoint")
        raise IsolossError(f"{folder} is not a checkpoint: it has no config.json")
    document = files.read_json(folder / "config.json")
    if not isinstance(document, dict):
        raise IsolossError(f"{folder / 'config.json'} is not a model's config: it holds no JSON object")
    model_type = document.get("model_type")
    if model_type not in CONFIG_MAPPING and not trust_remote_code:
        if "auto_map" in document:
            raise IsolossError(
                f"{folder} brings its own code for its model type {model_type!r}: "
                "read that code, and allow it with trust_remote_code if you trust it"
            )
        raise IsolossError(
            f"{folder} has the model type {model_type!r}, which this version of transformers does not know"
        )
    if not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        pickles = [path.name for pattern in _PICKLES for path in folder.glob(pattern)]
        if pickles:
            raise IsolossError(
                f"{folder} has its weights only as a pickle ({', '.join(sorted(pickles))}), and loading a pickle can "
                "run any code: convert it to safetensors where you trust it, with transformers' save_pretrained"
            )
        raise IsolossError(f"{folder} has no weights: there is no model.safetensors in it")


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
    ids = torch.tensor([[0, 1, 0, 1], [0, 1, 0, 0]])
    try:
        first, second = run_on_ids(model, ids)[:, :-1].float()
    except Exception as error:
        raise IsolossError(
            f"{name} is a {type(model).__name__} that does not run on token ids alone: {_reason(error)}"
        ) from error
    rounding = 100 * max(torch.finfo(dtype).eps for dtype in (model.dtype, torch.float32))
    if (first - second).abs().max() > rounding * first.abs().max():
        decoder = " without is_decoder in its config.json" if not getattr(model.config, "is_decoder", True) else ""
        raise IsolossError(f"{name} is a {type(model).__name__}{decoder}: it sees the tokens that it would predict")


def _some(names: set[str], most: int = 3) -> str:
    ordered = sorted(names)
    rest = len(ordered) - most
    return ", ".join(ordered[:most]) + (f" and {rest} more" if rest > 0 else "")
