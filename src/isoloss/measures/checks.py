"""What every measure asks of a model before it runs: no dropout left on, somewhere to put the inputs."""

from __future__ import annotations

import torch
from torch import nn

from isoloss.errors import IsolossError


def refuse_dropout(model: nn.Module) -> None:
    """Raise where a part of the model is in training mode and would drop something at random.

    Dropout modules are found by their `p`, parts that drop by themselves (LSTM layers, the attention of Llama) by an
    attribute whose name says so.

    Raises:
        IsolossError: Such a part exists; it is named.
    """
    for name, module in model.named_modules():
        if not module.training:
            continue
        rates = [value for key, value in vars(module).items() if "drop" in key and isinstance(value, float)]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates.append(module.p)
        if any(rate > 0 for rate in rates):
            raise IsolossError(
                f"the model is in training mode and {name or type(model).__name__} has dropout {max(rates)}: "
                "call model.eval() before measuring"
            )


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter, where its inputs belong."""
    for parameter in model.parameters():
        return parameter.device
    raise IsolossError(f"{type(model).__name__} has no parameters, so there is nothing to measure")
