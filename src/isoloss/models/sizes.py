"""Architectures and transformer sizes by name, with their numbers of parameters. Nothing here needs torch."""

from __future__ import annotations

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


# the paper's Table 3 and two for a laptop
SIZES: dict[str, Shape] = {
    "d16": Shape(16, 1, 1, 64),
    "d32": Shape(32, 1, 1, 128),
    "d64": Shape(64, 1, 1, 256),
    "d128": Shape(128, 2, 4, 512),
    "d192": Shape(192, 3, 5, 768),
    "d256": Shape(256, 4, 6, 1024),
    "d512": Shape(512, 8, 8, 2048),
    "d768": Shape(768, 12, 12, 3072),
    "d1024": Shape(1024, 16, 16, 4096),
    "d1280": Shape(1280, 20, 20, 5120),
    "d1536": Shape(1536, 24, 24, 6144),
}


def shape(name: str) -> Shape:
    """Return the shape called `name`.

    Raises:
        IsolossError: There is none of that name.

    Example:
        >>> shape("d128")
        Shape(d_model=128, num_heads=2, num_layers=4, intermediate=512)
    """
    if name not in SIZES:
        raise IsolossError(f"there is no model size {name!r}; the sizes are {', '.join(SIZES)}")
    return SIZES[name]


def num_parameters(shape: Shape, vocab_size: int, max_length: int, architecture: str = "bert") -> int:
    """Return how many parameters `isoloss.models.make.make_model` gives a model, the tied ones counted once.

    With width d, inner width i, L layers, V token ids and T positions, each layer has 4 (d^2 + d) + 2 d i + i + d + 4 d
    and the decoder is the token embedding. The rest of BERT is (V + T + 2 + 2) d in the embeddings and their layer norm
    and d^2 + d + 2 d + V in the head; that of OPT is (V + T + 2) d in the embeddings and 2 d in the last layer norm.

    Args:
        shape: Shape of the transformer.
        vocab_size: Token ids that the model knows, V.
        max_length: Positions that the model knows, T.
        architecture: One of `ARCHITECTURES`.

    Raises:
        IsolossError: There is no such architecture.

    Example:
        >>> num_parameters(shape("d64"), vocab_size=34, max_length=8)
        57250
    """
    d, inner = shape.d_model, shape.intermediate
    layers = shape.num_layers * (4 * (d * d + d) + 2 * d * inner + inner + d + 4 * d)
    if find_architecture(architecture) is ARCHITECTURES["opt"]:
        unused_positions = 2  # OPT's positions count from 2
        return (vocab_size + max_length + unused_positions) * d + layers + 2 * d
    embeddings = (vocab_size + max_length + TOKEN_TYPES + 2) * d
    head = d * d + d + 2 * d + vocab_size
    return embeddings + layers + head
