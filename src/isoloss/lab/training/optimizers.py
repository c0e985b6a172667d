"""From a gradient to an update: AdamW or SGD, the schedule of the learning rate, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from isoloss.errors import IsolossError
from isoloss.lab.training import distributed
from isoloss.run_config import OptimizerConfig, OptimizerName

if TYPE_CHECKING:
    from isoloss.lab.models.compiled_bert import CompiledLoss


def learning_rate(config: OptimizerConfig, step: int, *, total: int) -> float:
    """Return the rate of step `step`, counted from 1, of a run of `total` steps.

    A linear warm-up from 0 reaches the highest rate at its last step, or at step 1 where there is none. After that it
    is constant (the paper, appendix A.5) or, with r the fraction of the way from there to step `total` + 1, the highest
    rate times 1 - r (linear) or (1 + cos(pi r)) / 2 (cosine).

    Example:
        >>> config = OptimizerConfig(learning_rate=0.1, warmup_steps=4, schedule="linear")
        >>> [round(learning_rate(config, step, total=8), 3) for step in range(1, 9)]
        [0.025, 0.05, 0.075, 0.1, 0.08, 0.06, 0.04, 0.02]
    """
    warmup = config.num_warmup_steps(total)
    if step < warmup:
        return config.learning_rate * step / warmup
    if config.schedule == "constant":
        return config.learning_rate
    highest = max(warmup, 1)
    done = (step - highest) / (total + 1 - highest)
    remaining = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate * remaining


Groups = list[dict[str, Any]]  # of parameters: those with weight decay, and those without


def _adamw(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def _sgd(groups: Groups, config: OptimizerConfig) -> torch.optim.Optimizer:
    # torch fuses AdamW on shards of parameters, too, but not SGD
    fused = not any(distributed.is_sharded(p) for group in groups for p in group["params"])
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, fused=fused)


# An optimizer of your own: its function here, and its name in `OptimizerName` of `isoloss.run_config`.
OPTIMIZERS: dict[OptimizerName, Callable[[Groups, OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
}


class Optimizer:
    """AdamW or SGD on the gradients that the parameters hold, with schedule and clipping.

    With gradient g, rate eta and weight decay w, AdamW is m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2,
    theta <- (1 - eta w) theta - eta m' / (sqrt(v') + 1e-8) with m' = m / (1 - b1^t), v' = v / (1 - b2^t); SGD is
    b <- momentum b + g + w theta, theta <- theta - eta b, with b starting at the first step's g + w theta.

    A gradient over all parameters whose norm is above `max_grad_norm` is first scaled down to it.

    Weights and embeddings decay, biases and layer norms do not (every parameter of one dimension), as in BERT's
    training and in Izsak et al. (2021), whose code the paper trains with.

    The model is updated in place, in `total` steps of a whole run. With a compiled loss, the tensors that are updated,
    `parameters`, are its two parts; the state has the names of the model's own parameters all the same.
    """

    def __init__(
        self, model: torch.nn.Module, config: OptimizerConfig, *, total: int, compiled: CompiledLoss | None = None
    ) -> None:
        self._config, self._total, self._compiled = config, total, compiled
        self._trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # the matrices first, as in the two groups below: the optimizer's state has numbers in this order, no names
        self._names = sorted(self._trainable, key=lambda name: self._trainable[name].ndim <= 1)
        if compiled is None:
            self.parameters = [self._trainable[name] for name in self._names]
            num_decaying = sum(p.ndim > 1 for p in self.parameters)
        else:
            self.parameters, num_decaying = compiled.parts, 1
        groups: Groups = [
            {"params": self.parameters[:num_decaying], "weight_decay": config.weight_decay},
            {"params": self.parameters[num_decaying:], "weight_decay": 0.0},
        ]
        self._optimizer = OPTIMIZERS[config.name](groups, config)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        if self._compiled is None:
            self._optimizer.zero_grad()
        else:
            self._compiled.zero_gradient()

    def grad_norm(self) -> torch.Tensor:
        """Return the Euclidean norm of the gradient over all parameters: a scalar."""
        return distributed.total_norm([p.grad for p in self.parameters if p.grad is not None])

    def update(self, number: int, *, with_norm: bool) -> tuple[float, float | None]:
        """Make the update of step `number` from the gradients.

        Returns:
            The learning rate, and the norm of the gradient before clipping; None where it was not asked for.
        """
        if self._compiled is not None:
            self._compiled.collect_gradients()
        rate = learning_rate(self._config, number, total=self._total)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        limit = self._config.max_grad_norm
        norm = self.grad_norm() if with_norm or limit is not None else None
        if norm is not None and limit is not None:
            scale = (limit / norm).clamp(max=1.0)  # of a norm of 0: inf, then 1
            torch._foreach_mul_([distributed.local_shard(p.grad) for p in self.parameters if p.grad is not None], scale)
        self._optimizer.step()
        return rate, float(norm) if with_norm and norm is not None else None

    def state(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's full tensors, named `<what>/<parameter>`; none before the first step."""
        entries = [
            (what, index, tensor)
            for index, named in self._optimizer.state_dict()["state"].items()
            for what, tensor in named.items()
            if tensor is not None
        ]
        if self._compiled is None:
            return {f"{what}/{self._names[index]}": distributed.full_tensor(t) for what, index, t in entries}
        return {
            f"{what}/{name}": of_parameter
            for what, part, tensor in entries
            for name, of_parameter in self._compiled.by_name(part, tensor).items()
        }

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` returned.

        Raises:
            IsolossError: A name that is no parameter of the model, or a tensor of another shape.
        """
        by_kind: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in state.items():
            what, _, name = key.partition("/")
            parameter = self._trainable.get(name)
            if parameter is None or (tensor.ndim > 0 and tensor.shape != parameter.shape):
                raise IsolossError(
                    f"the optimizer's {key}, of shape {tuple(tensor.shape)}, fits no parameter of the model"
                )
            # a copy: the optimizer updates its state in place, and the caller's tensors are to stay as they are
            shard = distributed.shard_like(tensor, parameter) if tensor.ndim > 0 else tensor
            by_kind.setdefault(what, {})[name] = shard.clone()
        by_index: dict[int, dict[str, torch.Tensor]] = {}
        for what, tensors in by_kind.items():
            if self._compiled is None:
                for name, tensor in tensors.items():
                    by_index.setdefault(self._names.index(name), {})[what] = tensor
            else:
                for part in range(len(self._compiled.parts)):
                    by_index.setdefault(part, {})[what] = self._compiled.joined(part, tensors)
        # settings such as betas stay those of the config
        self._optimizer.load_state_dict(
            {"state": by_index, "param_groups": self._optimizer.state_dict()["param_groups"]}
        )
