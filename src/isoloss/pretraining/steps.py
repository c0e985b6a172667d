"""Step rules: what a pre-training algorithm does with one batch, and the state it carries from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from isoloss.config import OptimizerConfig
from isoloss.errors import IsolossError
from isoloss.languages.masking import Batch

Loss = Callable[[Batch], torch.Tensor]


class Outcome(NamedTuple):
    """What a step did.

    Attributes:
        loss_nats: The batch's loss before the update.
        learning_rate: The rate that the update was made with.
        grad_norm: Euclidean norm of the gradient over all parameters, or None where it was not asked for.
    """

    loss_nats: float
    learning_rate: float
    grad_norm: float | None


class StepRule(Protocol):
    """An algorithm: one update of the model's parameters from one batch."""

    def step(self, number: int, batch: Batch, loss: Loss, *, with_norm: bool = False) -> Outcome:
        """Update the model with `batch`; `number` counts the steps from 1, `loss` gives a batch's loss in nats."""
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything that the next step depends on, besides the model's parameters, by name."""
        ...

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `state` returned; an `IsolossError` where it is not this rule's."""
        ...


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the rate of step `step`, counted from 1: a linear warm-up from 0, then constant (appendix A.5).

    Example:
        >>> config = OptimizerConfig(learning_rate=0.1, warmup_steps=4)
        >>> [learning_rate(config, step) for step in (1, 2, 4, 5)]
        [0.025, 0.05, 0.1, 0.1]
    """
    if step >= config.warmup_steps:
        return config.learning_rate
    return config.learning_rate * step / config.warmup_steps


def validate(config: OptimizerConfig) -> None:
    """Raise an `IsolossError` that names the first setting out of its range."""
    in_range = {
        "learning_rate": (0 < config.learning_rate < math.inf, "above 0 and finite"),
        "warmup_steps": (config.warmup_steps >= 0, "at least 0"),
        "weight_decay": (0 <= config.weight_decay < math.inf, "at least 0 and finite"),
        "betas": (all(0 <= beta < 1 for beta in config.betas), "two numbers, each at least 0 and below 1"),
        "momentum": (0 <= config.momentum < 1, "at least 0 and below 1"),
        "name": (config.name in ("adamw", "sgd"), "adamw or sgd"),
    }
    for name, (holds, condition) in in_range.items():
        if not holds:
            raise IsolossError(f"the optimizer's {name} is {getattr(config, name)!r}; it must be {condition}")


class GradientStep:
    """AdamW or SGD on the batch's loss, with a linear warm-up.

    With gradient g, rate eta and weight decay w, AdamW is m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2,
    theta <- (1 - eta w) theta - eta m' / (sqrt(v') + 1e-8) with m' = m / (1 - b1^t), v' = v / (1 - b2^t); SGD is
    b <- momentum b + g + w theta, theta <- theta - eta b, with b starting at the first step's g + w theta.

    Weights and embeddings decay, biases and layer norms do not (every parameter of one dimension), as in BERT's
    training and in Izsak et al. (2021), whose code the paper trains with.

    Args:
        model: The model that is updated in place.
        config: Which of the two, and its settings.

    Raises:
        IsolossError: A setting is out of its range.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> rule = GradientStep(model, OptimizerConfig(warmup_steps=10))
        >>> rule.step(1, {"x": torch.ones(3, 2)}, lambda batch: model(batch["x"]).square().mean()).learning_rate
        0.0001
    """

    def __init__(self, model: torch.nn.Module, config: OptimizerConfig) -> None:
        validate(config)
        self._config = config
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        decaying = [(name, p) for name, p in trainable if p.ndim > 1]
        others = [(name, p) for name, p in trainable if p.ndim <= 1]
        self._named = decaying + others  # in the order in which the optimizer numbers them
        groups = [
            {"params": [p for _, p in decaying], "weight_decay": config.weight_decay},
            {"params": [p for _, p in others], "weight_decay": 0.0},
        ]
        self._optimizer: torch.optim.Optimizer
        if config.name == "adamw":
            self._optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)
        else:
            self._optimizer = torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=True)

    def step(self, number: int, batch: Batch, loss: Loss, *, with_norm: bool = False) -> Outcome:
        """Make step `number` on `batch`; see `StepRule`."""
        rate = learning_rate(self._config, number)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        value = loss(batch)
        value.backward()  # type: ignore[no-untyped-call]
        norm = None
        if with_norm:
            gradients = [p.grad for _, p in self._named if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
        self._optimizer.step()
        return Outcome(loss_nats=value.item(), learning_rate=rate, grad_norm=norm)

    def state(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's tensors, named `<what>/<parameter>`; none before the first step."""
        by_index = self._optimizer.state_dict()["state"]
        return {
            f"{what}/{self._named[index][0]}": tensor
            for index, entries in by_index.items()
            for what, tensor in entries.items()
            if tensor is not None
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` returned.

        Raises:
            IsolossError: A name that is no parameter of the model, or a tensor of another shape.
        """
        places = {name: (index, p.shape) for index, (name, p) in enumerate(self._named)}
        by_index: dict[int, dict[str, torch.Tensor]] = {}
        for key, tensor in state.items():
            what, _, name = key.partition("/")
            index, shape = places.get(name, (-1, None))
            if shape is None or (tensor.ndim > 0 and tensor.shape != shape):
                raise IsolossError(
                    f"the optimizer's {key}, of shape {tuple(tensor.shape)}, fits no parameter of the model"
                )
            by_index.setdefault(index, {})[what] = tensor.clone()
        self._optimizer.load_state_dict(
            {"state": by_index, "param_groups": self._optimizer.state_dict()["param_groups"]}
        )
