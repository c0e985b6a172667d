"""A multi-layer perceptron inside a wider one with the same function: the base case of appendix B.4.1."""

from __future__ import annotations

import copy
import math

from torch import nn

from isoloss.errors import IsolossError
from isoloss.models.expansion import Expanded, Part

_HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU)


def expand_mlp(mlp: nn.Sequential, factor: int) -> Expanded:
    """Return a perceptron whose hidden layers are `factor` times as wide, with the same outputs.

    Every parameter is copied n times and divided by sqrt(n): the first layer's weight and the hidden biases with
    n = factor, the weights between hidden layers with n = factor^2, the last layer's weight with n = factor; its bias
    stays. So hidden layers are `factor` copies divided by sqrt(factor), which rectifiers let through, and every
    parameter keeps its part of the Fisher's trace (`Part.trace_factor` is 1).

    Args:
        mlp: Linear layers with `nn.ReLU` or `nn.LeakyReLU` between them, at least one hidden layer.
        factor: How many times as wide, at least 1.

    Raises:
        IsolossError: Other layers, or a factor below 1.

    Example:
        >>> import torch
        >>> small = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
        >>> large = expand_mlp(small, 2).model
        >>> large[2].weight.shape
        torch.Size([8, 8])
        >>> x = torch.ones(5, 3, dtype=torch.float64)
        >>> bool((large(x) - small(x)).abs().max() < 1e-12)
        True
    """
    if factor < 1:
        raise IsolossError(f"the factor is {factor}; it must be at least 1")
    layers = list(mlp)
    linear, between = layers[::2], layers[1::2]
    if (
        len(linear) < 2
        or len(linear) != len(between) + 1
        or not all(isinstance(layer, nn.Linear) for layer in linear)
        or not all(isinstance(layer, _HOMOGENEOUS) for layer in between)
    ):
        found = ", ".join(type(layer).__name__ for layer in layers) or "nothing"
        raise IsolossError(
            f"the layers are {found}; they must be Linear layers with ReLU or LeakyReLU between them, at least two "
            "Linear, as other activations do not let a factor through"
        )
    shapes = [(layer.out_features, layer.in_features) for layer in linear if isinstance(layer, nn.Linear)]
    parts: dict[str, Part] = {}
    wide = copy.deepcopy(mlp)
    for number, (rows, columns) in enumerate(shapes):
        layer = wide[2 * number]
        assert isinstance(layer, nn.Linear)
        high = factor if number < len(shapes) - 1 else 1
        across = factor if number > 0 else 1
        layer.out_features, layer.in_features = rows * high, columns * across
        for name, parameter in list(layer.named_parameters()):
            blocks = (high, across)[: parameter.ndim]
            part = Part(name=f"{2 * number}.{name}", blocks=blocks, divisor=math.sqrt(math.prod(blocks)))
            parts[part.name] = part
            setattr(layer, name, nn.Parameter(part.of(parameter)))
    return Expanded(model=wide.eval(), parts=parts, added=())
