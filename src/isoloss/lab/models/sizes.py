"""Named and free shapes of models. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass

from isoloss.errors import IsolossError


@dataclass(frozen=True)
class Shape:
    """The shape of a transformer."""

    d_model: int  # width of the hidden states
    num_heads: int  # attention heads of each layer; they divide the width
    num_layers: int
    intermediate: int  # width inside the feed-forward blocks


@dataclass(frozen=True)
class LSTMShape:
    """The shape of an LSTM."""

    hidden: int  # width of each direction; tokens are embedded in `directions` times as many dimensions
    num_layers: int  # each of all directions
    directions: int = 2  # from left to right and from right to left; 1: from left to right only


@dataclass(frozen=True)
class BracketShape:
    """The shape of the paper's model of brackets."""

    key_width: int  # of queries and keys
    neurons: int


# Two for a laptop, and the rows of the paper's Tables 3 and 4, whose first two are the same. The feed-forward width is
# 4 d_model, as appendix B.4.2 states it and as its expansion of a small model into a large one needs it; Table 4 prints
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

BRACKET_SIZES: dict[str, BracketShape] = {f"m{neurons}": BracketShape(2, neurons) for neurons in (16, 64, 256)}


def shape(name: str) -> Shape:
    """Return the shape of a transformer by the name of its size.

    Raises:
        IsolossError: There is none of that name.

    Example:
        >>> from isoloss.lab.models.sizes import shape
        >>> shape("d128")
        Shape(d_model=128, num_heads=2, num_layers=4, intermediate=512)
    """
    if name not in SIZES:
        raise IsolossError(f"there is no model size {name!r}; the sizes are {', '.join(SIZES)}")
    return SIZES[name]


def reshaped(
    named: Shape,
    *,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    ffn: int | None = None,
) -> Shape:
    """Return a shape with other numbers; None leaves what is there, but with a width, `ffn` is 4 times that.

    Raises:
        IsolossError: A number is below 1, or the heads do not divide the width.

    Example:
        >>> from isoloss.lab.models.sizes import reshaped, shape
        >>> reshaped(shape("d64"), width=96, heads=6)
        Shape(d_model=96, num_heads=6, num_layers=1, intermediate=384)
    """
    for name, number in {"layers": layers, "width": width, "heads": heads, "ffn": ffn}.items():
        if number is not None and number < 1:
            raise IsolossError(f"{name} is {number}; it must be at least 1")
    d_model, num_heads = width or named.d_model, heads or named.num_heads
    if d_model % num_heads:
        divisors = ", ".join(str(n) for n in range(1, d_model + 1) if d_model % n == 0)
        raise IsolossError(
            f"{num_heads} heads cannot divide the width {d_model} evenly; the number of heads (--heads) can be "
            f"{divisors}"
        )
    inner = ffn or (named.intermediate if width is None else 4 * width)
    return Shape(d_model, num_heads, layers or named.num_layers, inner)
