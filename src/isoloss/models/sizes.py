"""Transformer sizes by name: the paper's Table 3 and two for a laptop. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass

from isoloss.errors import IsolossError

TOKEN_TYPES = 2  # rows of the token-type embedding, as BERT's tokenizers expect when they pair two sentences


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


SIZES: dict[str, Shape] = {
    "d16": Shape(16, 1, 1, 64),
    "d32": Shape(32, 1, 1, 128),
    # Table 3 of the paper
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


def num_parameters(shape: Shape, vocab_size: int, max_length: int) -> int:
    """Return how many parameters `isoloss.models.bert.build` gives a model, the tied ones counted once.

    With width d, inner width i, L layers, V token ids and T positions: (V + T + 2 + 2) d in the embeddings and their
    layer norm, 4 (d^2 + d) + 2 d i + i + d + 4 d in each layer, and d^2 + d + 2 d + V in the head, whose decoder is the
    token embedding.

    Args:
        shape: Shape of the transformer.
        vocab_size: Token ids that the model knows, V.
        max_length: Positions that the model knows, T.

    Example:
        >>> num_parameters(shape("d64"), vocab_size=34, max_length=8)
        57250
    """
    d, inner = shape.d_model, shape.intermediate
    embeddings = (vocab_size + max_length + TOKEN_TYPES + 2) * d
    layer = 4 * (d * d + d) + 2 * d * inner + inner + d + 4 * d
    head = d * d + d + 2 * d + vocab_size
    return embeddings + shape.num_layers * layer + head
