"""Architectures and their sizes by name, with their numbers of parameters. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from isoloss.errors import IsolossError

TOKEN_TYPES = 2  # rows of the token-type embedding, as BERT's tokenizers expect when they pair two sentences


@dataclass(frozen=True)
class Architecture:
    """What an architecture is for.

    Attributes:
        objective: The objective it is trained with, as `isoloss.config.ObjectiveConfig.kind` names it.
        text: One line about it.
    """

    objective: Literal["masked", "causal"]
    text: str


ARCHITECTURES: dict[str, Architecture] = {
    "bert": Architecture("masked", "BERT: post-layer-norm blocks, GELU, a transform before the tied decoder"),
    "bert-pre-ln": Architecture("masked", "BERT with pre-layer-norm blocks and a layer norm after the last one"),
    "lstm": Architecture("masked", "LSTM layers that read both ways, a decoder tied to the token embedding"),
    "opt": Architecture("causal", "OPT: pre-layer-norm blocks, ReLU, a tied decoder without bias"),
}


def find_architecture(name: str) -> Architecture:
    """Return what the architecture called `name` is for.

    Raises:
        IsolossError: There is none of that name.

    Example:
        >>> find_architecture("opt").objective
        'causal'
    """
    if name not in ARCHITECTURES:
        raise IsolossError(f"there is no architecture {name!r}; the architectures are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


@dataclass(frozen=True)
class Shape:
    """The shape of a transformer.

    Attributes:
        d_model: Width of the hidden states.
        num_heads: Attention heads of each layer; they share the width.
        num_layers: Layers.
        intermediate: Width inside the feed-forward blocks.
    """

    d_model: int
    num_heads: int
    num_layers: int
    intermediate: int


@dataclass(frozen=True)
class LSTMShape:
    """The shape of a bidirectional LSTM.

    Attributes:
        hidden: Width of the states of each direction; tokens are embedded in twice as many dimensions.
        num_layers: Layers, each of both directions.
    """

    hidden: int
    num_layers: int


# Two for a laptop, and the rows of the paper's Tables 3 and 4, whose first two are the same. The feed-forward width is
# 4 d_model, as appendix B.4.2 states it and as its embedding of a small model into a large one needs it; Table 4 prints
# the column of Table 3 there, which is not 4 d_model from d320 on, nor that of the 950 million parameters in the text.
SIZES: dict[str, Shape] = {
    "d16": Shape(16, 1, 1, 64),
    "d32": Shape(32, 1, 1, 128),
    "d64": Shape(64, 1, 1, 256),
    "d128": Shape(128, 2, 4, 512),
    "d192": Shape(192, 3, 5, 768),
    "d256": Shape(256, 4, 6, 1024),
    "d320": Shape(320, 5, 6, 1280),
    "d384": Shape(384, 6, 7, 1536),
    "d512": Shape(512, 8, 8, 2048),
    "d640": Shape(640, 10, 12, 2560),
    "d768": Shape(768, 12, 12, 3072),
    "d960": Shape(960, 15, 16, 3840),
    "d1024": Shape(1024, 16, 16, 4096),
    "d1280": Shape(1280, 20, 20, 5120),
    "d1536": Shape(1536, 24, 24, 6144),
    "d1920": Shape(1920, 30, 20, 7680),
}

# three for a laptop, and the paper's (appendix A.4): the i-th width with the i-th number of layers
LSTM_SIZES: dict[str, LSTMShape] = {
    "h16": LSTMShape(16, 1),
    "h32": LSTMShape(32, 1),
    "h64": LSTMShape(64, 2),
    "h128": LSTMShape(128, 4),
    "h256": LSTMShape(256, 6),
    "h512": LSTMShape(512, 8),
    "h768": LSTMShape(768, 12),
    "h1024": LSTMShape(1024, 16),
}


def sizes_of(architecture: str) -> Mapping[str, Shape | LSTMShape]:
    """Return the sizes that an architecture comes in, by name.

    Raises:
        IsolossError: There is no such architecture.
    """
    find_architecture(architecture)
    return LSTM_SIZES if architecture == "lstm" else SIZES


def check_size(architecture: str, size: str) -> None:
    """Refuse a size that the architecture does not come in.

    Raises:
        IsolossError: There is no such architecture, or it has no size of that name.

    Example:
        >>> check_size("lstm", "h64")
    """
    sizes = sizes_of(architecture)
    if size not in sizes:
        raise IsolossError(f"{architecture} has no model size {size!r}; its sizes are {', '.join(sizes)}")


def shape(name: str) -> Shape:
    """Return the shape of a transformer by the name of its size.

    Raises:
        IsolossError: There is none of that name.

    Example:
        >>> shape("d128")
        Shape(d_model=128, num_heads=2, num_layers=4, intermediate=512)
    """
    if name not in SIZES:
        raise IsolossError(f"there is no model size {name!r}; the sizes are {', '.join(SIZES)}")
    return SIZES[name]


def lstm_shape(name: str) -> LSTMShape:
    """Return the shape of an LSTM by the name of its size.

    Raises:
        IsolossError: There is none of that name.

    Example:
        >>> lstm_shape("h128")
        LSTMShape(hidden=128, num_layers=4)
    """
    check_size("lstm", name)
    return LSTM_SIZES[name]


def num_parameters(
    shape: Shape | LSTMShape, vocab_size: int, max_length: int, architecture: str = "bert", *, pad_id: int = 0
) -> int:
    """Return how many parameters `isoloss.models.make.make_model` gives a model, the tied ones counted once.

    With width d, inner width i, L layers, V token ids and T positions, each layer of a transformer has
    4 (d^2 + d) + 2 d i + i + d + 4 d and the decoder is the token embedding. The rest of BERT is (V + T + 2 + 2) d in
    the embeddings and their layer norm and d^2 + d + 2 d + V in the head. With pre-layer-norm blocks it also has 2 d in
    the last layer norm and (P + 1) d in rows of the position embedding that no token uses, P the id of the padding. The
    rest of OPT is (V + T + 2) d in the embeddings and 2 d in the last layer norm. An LSTM of width h in each direction
    has 2 h V in the embedding, 24 h^2 + 16 h in each layer and V in the decoder's bias.

    Args:
        shape: A shape that the architecture comes in.
        vocab_size: Token ids that the model knows, V.
        max_length: Positions that the model knows, T; an LSTM knows any number.
        architecture: One of `ARCHITECTURES`.
        pad_id: Id of the padding, P; it matters to `bert-pre-ln` alone.

    Raises:
        IsolossError: There is no such architecture, or the shape is not of its kind.

    Example:
        >>> num_parameters(shape("d64"), vocab_size=34, max_length=8)
        57250
        >>> num_parameters(lstm_shape("h64"), vocab_size=34, max_length=8, architecture="lstm")
        203042
    """
    find_architecture(architecture)
    if isinstance(shape, LSTMShape) != (architecture == "lstm"):
        raise IsolossError(f"a {type(shape).__name__} is not a shape of the architecture {architecture}")
    if isinstance(shape, LSTMShape):
        h = shape.hidden
        return 2 * h * vocab_size + shape.num_layers * (24 * h * h + 16 * h) + vocab_size
    d, inner = shape.d_model, shape.intermediate
    layers = shape.num_layers * (4 * (d * d + d) + 2 * d * inner + inner + d + 4 * d)
    if architecture == "opt":
        unused_positions = 2  # OPT's positions count from 2
        return (vocab_size + max_length + unused_positions) * d + layers + 2 * d
    embeddings = (vocab_size + max_length + TOKEN_TYPES + 2) * d
    head = d * d + d + 2 * d + vocab_size
    if architecture == "bert-pre-ln":
        return embeddings + layers + head + 2 * d + (pad_id + 1) * d
    return embeddings + layers + head
