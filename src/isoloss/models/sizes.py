"""Architectures, their shapes by name or free, and their numbers of parameters. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from isoloss.errors import IsolossError
from isoloss.run_config import ModelConfig

TOKEN_TYPES = 2  # rows of the token-type embedding, as BERT's tokenizers expect when they pair two sentences


@dataclass(frozen=True)
class Architecture:
    """What an architecture is for.

    Attributes:
        objective: The objective it is trained with, as `isoloss.run_config.ObjectiveConfig.kind` names it.
        text: One line about it.
    """

    objective: Literal["masked", "causal"]
    text: str


ARCHITECTURES: dict[str, Architecture] = {
    "bert": Architecture("masked", "BERT: post-layer-norm blocks, GELU, a transform before the tied decoder"),
    "bert-pre-ln": Architecture("masked", "BERT with pre-layer-norm blocks and a layer norm after the last one"),
    "lstm": Architecture("masked", "LSTM layers that read both ways, or one; a decoder tied to the token embedding"),
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
    """The shape of an LSTM.

    Attributes:
        hidden: Width of the states of each direction; tokens are embedded in `directions` times as many dimensions.
        num_layers: Layers, each of all directions.
        directions: 2: from left to right and from right to left; 1: from left to right only.
    """

    hidden: int
    num_layers: int
    directions: int = 2


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


def default_size(architecture: str) -> str:
    """Return the name of the size that an architecture has where none is named.

    Raises:
        IsolossError: There is no such architecture.

    Example:
        >>> default_size("bert"), default_size("lstm")
        ('d64', 'h64')
    """
    return ModelConfig.size if sizes_of(architecture) is SIZES else "h64"


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


def configured_shape(config: ModelConfig) -> Shape | LSTMShape:
    """Return the shape that a config describes: that of its size, but for what it sets itself.

    Raises:
        IsolossError: There is no such architecture or size, a number is below 1, the heads do not divide the width, or
            the architecture has nothing of that name.

    Example:
        >>> configured_shape(ModelConfig(size="d64", heads=4))
        Shape(d_model=64, num_heads=4, num_layers=1, intermediate=256)
        >>> configured_shape(ModelConfig(architecture="lstm", size="h1024", layers=8, directions=1))
        LSTMShape(hidden=1024, num_layers=8, directions=1)
    """
    check_size(config.architecture, config.size)
    if config.architecture != "lstm":
        if config.directions != 2:
            raise IsolossError(
                f"directions is {config.directions}, but {config.architecture} is not an LSTM: leave it out"
            )
        return reshaped(
            SIZES[config.size], layers=config.layers, width=config.width, heads=config.heads, ffn=config.ffn
        )
    if config.heads is not None or config.ffn is not None:
        given = " and ".join(name for name in ("heads", "ffn") if getattr(config, name) is not None)
        raise IsolossError(f"an LSTM has no attention heads and no feed-forward blocks: leave out {given}")
    if config.directions not in (1, 2):
        raise IsolossError(f"directions is {config.directions}; it must be 1 or 2")
    _check_positive(layers=config.layers, width=config.width)
    named = LSTM_SIZES[config.size]
    return LSTMShape(config.width or named.hidden, config.layers or named.num_layers, config.directions)


def reshaped(
    named: Shape,
    *,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    ffn: int | None = None,
) -> Shape:
    """Return a transformer's shape with other numbers; None leaves what is there.

    Args:
        named: What is changed.
        layers: Layers.
        width: Width of the hidden states.
        heads: Attention heads of each layer, a divisor of the width.
        ffn: Width inside the feed-forward blocks; None with a width: 4 times that.

    Raises:
        IsolossError: A number is below 1, or the heads do not divide the width.

    Example:
        >>> reshaped(shape("d64"), width=96, heads=6)
        Shape(d_model=96, num_heads=6, num_layers=1, intermediate=384)
    """
    _check_positive(layers=layers, width=width, heads=heads, ffn=ffn)
    d_model, num_heads = width or named.d_model, heads or named.num_heads
    if d_model % num_heads:
        divisors = ", ".join(str(n) for n in range(1, d_model + 1) if d_model % n == 0)
        raise IsolossError(
            f"{num_heads} heads cannot share the width {d_model} evenly; the number of heads (--heads) can be "
            f"{divisors}"
        )
    inner = ffn or (named.intermediate if width is None else 4 * width)
    return Shape(d_model, num_heads, layers or named.num_layers, inner)


def _check_positive(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise IsolossError(f"{name} is {number}; it must be at least 1")


def described(config: ModelConfig) -> str:
    """Return a config's architecture, size and what it sets beside the size, in a few words.

    Example:
        >>> described(ModelConfig(size="d64", heads=4)), described(ModelConfig())
        ('bert d64, heads 4', 'bert d64')
    """
    own = [f"{name} {value}" for name in ("layers", "width", "heads", "ffn") if (value := getattr(config, name))]
    own += [f"directions {config.directions}"] * (config.directions != 2)
    return ", ".join([f"{config.architecture} {config.size}", *own])


def num_parameters(
    shape: Shape | LSTMShape, vocab_size: int, max_length: int, architecture: str = "bert", *, pad_id: int = 0
) -> int:
    """Return how many parameters `isoloss.models.make.make_model` gives a model, the tied ones counted once.

    With width d, inner width i, L layers, V token ids and T positions, each layer of a transformer has
    4 (d^2 + d) + 2 d i + i + d + 4 d and the decoder is the token embedding. The rest of BERT is (V + T + 2 + 2) d in
    the embeddings and their layer norm and d^2 + d + 2 d + V in the head. With pre-layer-norm blocks it also has 2 d in
    the last layer norm and (P + 1) d in rows of the position embedding that no token uses, P the id of the padding. The
    rest of OPT is (V + T + 2) d in the embeddings and 2 d in the last layer norm. An LSTM of width h in each of k
    directions has k h V in the embedding, k (4 (k + 1) h^2 + 8 h) in each layer and V in the decoder's bias.

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
        >>> num_parameters(LSTM_SIZES["h64"], vocab_size=34, max_length=8, architecture="lstm")
        203042
    """
    find_architecture(architecture)
    if isinstance(shape, LSTMShape) != (architecture == "lstm"):
        raise IsolossError(f"a {type(shape).__name__} is not a shape of the architecture {architecture}")
    if isinstance(shape, LSTMShape):
        h, k = shape.hidden, shape.directions
        return k * h * vocab_size + shape.num_layers * k * (4 * (k + 1) * h * h + 8 * h) + vocab_size
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
