"""What a linear probe reads: a model's token states, one row per sentence.

Features larger than memory are written to a file in blocks, and mapped from it: a safetensors file with one tensor,
`features` (n, D), in float32 or bfloat16.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import safe_open

from isoloss import files, seeds
from isoloss.errors import IsolossError
from isoloss.model_checks import (
    architecture,
    forward_arguments,
    max_length,
    run_on_ids,
    states_before_output,
    takes_mask,
    unwrapped,
)
from isoloss.text.masking import Sentences
from isoloss.transfer.config import Pooling

_MOST_ONE_HOT_BYTES = 2**34  # of the tokens of real text, whose vocabularies are large
_MAX_LOGITS = 2**26  # in a forward pass of your own module, which runs its output layer too
_BLOCK = 2**24  # numbers of features that are read at once
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_NAME = "features"


def extract(
    model: torch.nn.Module,
    sentences: Sentences,
    *,
    types: torch.Tensor | None = None,
    pooling: Pooling = "concatenate",
    layer: int = -1,
    projection: int | None = None,
    batch_size: int = 512,
    dtype: torch.dtype = torch.float32,
    path: Path | None = None,
    memory_bytes: int = 0,
) -> torch.Tensor:
    """Return the model's representation of each unmasked sentence (paper, section 2.1 and appendix A.5).

    The sentences go through the model without its prediction head, nothing masked; the states of your own module
    are the input of its output layer (`isoloss.model_checks.states_before_output`). `"concatenate"`, as in the paper,
    puts the states of all T positions side by side, with zeros at padding.

    A `projection` multiplies each row by a (D, projection) matrix of independent normal numbers with variance
    1 / projection, which keeps the squared distances of rows in expectation; the paper's has 512 columns.

    Args:
        model: A model in eval mode; it stays where it is.
        sentences: n sentences padded to T tokens; pad the training and the test split to the same T.
        types: (n, T) token types of pairs of texts, where the model has them.
        pooling: How the (n, T, d) states become rows: `"concatenate"` puts them side by side, `"mean"` averages them
            over the tokens, `"first"` and `"last"` take the state of one token.
        layer: Index into the model's hidden states, 0 being the embeddings; -1 is the model's own last hidden state,
            after a final layer norm where it has one.
        projection: Width that the rows are projected to, by the same matrix for all of one width; None: not at all.
        batch_size: Sentences in a forward pass.
        dtype: Type of the features; bfloat16 keeps 8 significant bits in half the space.
        path: A safetensors file for features that do not fit in memory, written a batch at a time, whole or not at all.
        memory_bytes: With a path: features of at most this many bytes are returned in memory, and no file is written.

    Returns:
        (n, D) on the model's device: D is T * d for `"concatenate"`, d for the others, or `projection`. With a path,
        and features of more than `memory_bytes`, they are mapped from the file.

    Raises:
        IsolossError: The model is in training mode or has no states that can be read, an argument is out of range, a
            token is unknown to the model, a sentence is empty or too long, there are none, or the file cannot be
            written.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> from isoloss.lab.languages import Sentences
        >>> from isoloss.transfer.features import extract
        >>> model = BertForMaskedLM(BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1,
        ...                                    intermediate_size=8, max_position_embeddings=3)).eval()
        >>> sentences = Sentences(torch.tensor([[5, 6, 7], [8, 1, 0]]), torch.tensor([3, 2]))
        >>> features = extract(model, sentences)
        >>> tuple(features.shape), features[1, 8:].tolist()
        ((2, 12), [0.0, 0.0, 0.0, 0.0])
    """
    device = next(model.parameters()).device
    if any(module.training for module in model.modules()):
        raise IsolossError(
            "the model is in training mode, where dropout makes features random: call model.eval() first"
        )
    if pooling not in get_args(Pooling):
        raise IsolossError(f"no pooling {pooling!r}: choose {', '.join(get_args(Pooling))}")
    for name, count in (("batch_size", batch_size), ("projection", projection)):
        if count is not None and count < 1:
            raise IsolossError(f"{name} is {count}; it must be at least 1")
    if is_custom_module(model):
        if layer != -1:
            raise IsolossError(
                f"{type(model).__name__} is not a transformers model: only its layer -1 can be read, not {layer}"
            )
        known = check_sentences(model, sentences)
        batch_size = min(batch_size, max(1, _MAX_LOGITS // (known * sentences.tokens.shape[1])))
        read_states: Callable[..., torch.Tensor] = functools.partial(states_before_output, unwrapped(model))
    else:
        check_sentences(backbone := backbone_of(model), sentences)
        read_states = functools.partial(_states, backbone, layer)

    matrix = functools.cache(lambda width, columns: projection_matrix(width, columns, 0).to(device))

    def read(rows: slice) -> torch.Tensor:
        batch = Sentences(sentences.tokens[rows], sentences.lengths[rows])
        pooled = _pooled(read_states, batch, None if types is None else types[rows], pooling, device)
        return (pooled if projection is None else pooled @ matrix(pooled.shape[1], projection)).to(dtype)

    blocks = (read(slice(first, first + batch_size)) for first in range(0, len(sentences.lengths), batch_size))
    if path is not None:
        # a row is read to see how wide it is, which depends on the model, the layer and the pooling
        shape = (len(sentences.lengths), read(slice(0, 1)).shape[1])
        if math.prod(shape) * dtype.itemsize > memory_bytes:
            return store(path, blocks, shape=shape, dtype=dtype)
    return torch.cat(list(blocks))


@torch.no_grad()
def last_states(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Return (B, T, d): the last hidden states, of your own module the input of its output layer."""
    if is_custom_module(model):
        return states_before_output(unwrapped(model), inputs)
    backbone = backbone_of(model)
    return _states(backbone, -1, forward_arguments(backbone, inputs))


def projection_matrix(width: int, columns: int, seed: int, *draw: int) -> torch.Tensor:
    """Return a (width, columns) random projection, normal numbers with variance 1 / columns; `draw` numbers several."""
    generator = seeds.generator(seed, "projection", *draw)
    return torch.randn(width, columns, generator=generator).mul_(columns**-0.5)


@torch.no_grad()
def _pooled(
    read_states: Callable[..., torch.Tensor],
    sentences: Sentences,
    types: torch.Tensor | None,
    pooling: Pooling,
    device: torch.device,
) -> torch.Tensor:
    """Return (B, D) of the sentences of a batch, float32."""
    total = sentences.tokens.shape[1]
    lengths = sentences.lengths.to(device)
    # the model need not read columns that are padding in the whole batch
    longest = int(lengths.max())
    tokens = sentences.tokens[:, :longest].to(device)
    present = Sentences(tokens, lengths).present()
    inputs = {"input_ids": tokens, "attention_mask": present.long()}
    if types is not None:
        inputs["token_type_ids"] = types[:, :longest].to(device)
    states = read_states(inputs).float()
    if pooling == "concatenate":
        states = states.masked_fill(~present[:, :, None], 0.0)
        return torch.nn.functional.pad(states, (0, 0, 0, total - longest)).flatten(1)
    return pool(states, present, pooling)


def pool(states: torch.Tensor, present: torch.Tensor, pooling: str) -> torch.Tensor:
    """Return (B, d) of states (B, T, d): of the `first` token, the `last` or their `mean`; present (B, T) is bool."""
    if pooling == "first":
        return states[:, 0]
    lengths = present.sum(dim=1)
    if pooling == "last":
        return states[torch.arange(len(states), device=states.device), lengths - 1]
    return states.masked_fill(~present[:, :, None], 0.0).sum(dim=1) / lengths[:, None]


def _states(backbone: Any, layer: int, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return (B, T, d): the hidden states of the layer."""
    if layer == -1:
        last: torch.Tensor = backbone(**inputs).last_hidden_state
        return last
    states: tuple[torch.Tensor, ...] = backbone(**inputs, output_hidden_states=True).hidden_states
    if not -len(states) <= layer < len(states):
        raise IsolossError(f"no layer {layer}: the model has hidden states 0 to {len(states) - 1}")
    return states[layer]


def one_hot(sentences: Sentences, width: int) -> torch.Tensor:
    """Return the one-hot tokens of n sentences padded to T tokens, of ids below `width`: (n, T * width) float32.

    Raises:
        IsolossError: There are no sentences, or the features are larger than 16 GiB.
    """
    n, total = sentences.tokens.shape
    if n == 0:
        raise IsolossError("features need at least one sentence")
    if (size := 4 * n * total * width) > _MOST_ONE_HOT_BYTES:
        raise IsolossError(
            f"one-hot features of {n:,} examples of {total} tokens out of {width:,} take {size / 2**30:.0f} GiB: take "
            "fewer or shorter ones"
        )
    features = torch.zeros(n, total, width)
    present = sentences.present()
    # the id of padding may be beyond `width`: it becomes token 0 here, where a 0 is written
    features.scatter_(2, sentences.tokens.masked_fill(~present, 0)[:, :, None], present[:, :, None].float())
    return features.flatten(1)


def token_shares(sentences: Sentences, width: int) -> torch.Tensor:
    """Return the share of each id below `width` among the tokens of each sentence: (n, width) float32."""
    present = sentences.present()
    counts = torch.zeros(len(sentences.tokens), width)
    counts.scatter_add_(1, sentences.tokens.masked_fill(~present, 0), present.float())
    return counts / sentences.lengths[:, None]


def is_custom_module(model: Any) -> bool:
    """Return whether a model is your own module, which has no known body before a prediction head."""
    inner: Any = architecture(model)
    # transformers calls a model its own base where its class names none
    return not hasattr(inner, "base_model") or (inner.base_model is inner and inner.get_output_embeddings() is not None)


def backbone_of(model: Any) -> Any:
    """Return the model without its prediction head; an `IsolossError` where it has no such part."""
    if is_custom_module(model):
        raise IsolossError(f"{type(model).__name__} has no base_model: features are read from a Hugging Face model")
    if getattr(getattr(unwrapped(model), "active_peft_config", None), "is_prompt_learning", False):
        raise IsolossError(f"{type(model).__name__} puts a prompt before the text, so its features cannot be read")
    return architecture(model).base_model


def why_no_features(model: Any, *, causal: bool) -> str | None:
    """Return why no features of texts can be read from a model, as a sentence; None if they can."""
    try:
        if not is_custom_module(model):
            backbone_of(model)
            return None
        _custom_vocab_size(model)
    except IsolossError as error:
        return str(error)
    if causal or takes_mask(model):
        return None
    return f"{type(model).__name__} takes no attention_mask, so the padding after short texts would change its states"


def _custom_vocab_size(model: Any) -> int:
    """Return how many ids your own module knows; an `IsolossError` where it has no states that can be read."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    try:
        states_before_output(unwrapped(model), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        return run_on_ids(model, ids).shape[-1]
    except IsolossError:
        raise
    except Exception as error:  # whatever the module's own code does
        raise IsolossError(f"{type(model).__name__} does not run on token ids: {error}") from error


def check_sentences(model: Any, sentences: Sentences) -> int:
    """Return how many ids a model without its prediction head, or your own module, knows.

    Raises:
        IsolossError: There are no sentences, an empty one, or one that the model lacks a token or positions for.
    """
    if len(sentences.lengths) == 0 or int(sentences.lengths.min()) < 1:
        raise IsolossError("features need at least one sentence, and at least one token in each")
    if is_custom_module(model):
        known, positions = _custom_vocab_size(model), max_length(model)
    else:
        known = model.get_input_embeddings().num_embeddings
        positions = getattr(model.config, "max_position_embeddings", None)
    if int(sentences.tokens.max()) >= known:
        raise IsolossError(
            f"the sentences hold the token id {int(sentences.tokens.max())}, and the model knows 0 to {known - 1}: "
            "it is a model of another language"
        )
    longest = int(sentences.lengths.max())
    if positions is not None and longest > positions:
        raise IsolossError(
            f"the sentences have up to {longest} tokens, and the model reads {positions} at most: cut them shorter"
        )
    return int(known)


# --- in a file --------------------------------------------------------------------------------------------------------


def rows_at_once(width: int) -> int:
    """Return how many rows of features (n, width) are best read at once: not more than memory should hold."""
    return min(2048, max(64, _BLOCK // width))


def store(path: Path, blocks: Iterable[torch.Tensor], *, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Write blocks of rows, (B, D) each, one after another to `path`, whole or not at all, and map it from disk.

    Raises:
        IsolossError: A type that is neither float32 nor bfloat16, blocks that do not add up to `shape`, or a file that
            cannot be written.
    """
    if dtype not in DTYPES:
        raise IsolossError(f"features are stored in float32 or bfloat16, not in {dtype}")
    entry = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [0, math.prod(shape) * dtype.itemsize]}
    # by hand, as the library wants the whole tensor in memory before it writes the first byte
    header = json.dumps({_NAME: entry}).encode()
    # padded so that the numbers are aligned where the file is mapped
    header += b" " * (-len(header) % 8)
    rows = 0
    with files.new_file(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for block in blocks:
            if block.ndim != 2 or block.shape[1] != shape[1]:
                raise IsolossError(f"a block of features has the shape {tuple(block.shape)}, not (B, {shape[1]})")
            # as bytes: numpy has no bfloat16
            file.write(block.to("cpu", dtype).contiguous().view(torch.uint8).numpy().data)
            rows += len(block)
        if rows != shape[0]:
            raise IsolossError(f"there are {rows} rows of features, not {shape[0]}")
    with safe_open(path, framework="pt") as stored:
        features: torch.Tensor = stored.get_tensor(_NAME)
    return features
