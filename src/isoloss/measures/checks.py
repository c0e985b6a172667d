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


def measured_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, tied ones once.

    Raises:
        IsolossError: There is none.
    """
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not parameters:
        raise IsolossError(f"{type(model).__name__} has no trainable parameter: set requires_grad on what should count")
    return parameters


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter, where its inputs belong."""
    for parameter in model.parameters():
        return parameter.device
    raise IsolossError(f"{type(model).__name__} has no parameters, so there is nothing to measure")


_UNSHIFTED = ("XLNetLMHeadModel", "XLMWithLMHeadModel")  # named like causal models, but transformers shifts no labels


def is_causal(model: nn.Module) -> bool:
    """Decide by the class name, then by the config, whether position t predicts token t + 1.

    Raises:
        IsolossError: Neither says.
    """
    name = type(model).__name__
    if "ForMaskedLM" in name:
        return False
    if "ForCausalLM" in name or (name.endswith("LMHeadModel") and name not in _UNSHIFTED):
        return True
    if getattr(getattr(model, "config", None), "is_decoder", False) is True:
        return True
    raise IsolossError(
        f"{name} does not say whether it predicts masked or next tokens: pass causal=False or causal=True"
    )
