"""The exponential moving average of a run's weights, which follows training and changes nothing in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from isoloss.errors import IsolossError
from isoloss.lab.training import distributed

_PREFIX = "ema/"  # of its tensors' names among the trainer's


class WeightAverage:
    """a_0 = theta_0, a_t = decay a_(t-1) + (1 - decay) theta_t, with theta_t the weights after step t.

    It has the weights' dtype, float32 or wider, and is sharded as they are. At decay 0 there is no average, no memory
    is held, and every method does nothing.

    Raises:
        IsolossError: Weights narrower than float32, whose dtype loses small steps.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        >>> average = WeightAverage(model, 0.75)
        >>> _ = model.weight.add_(4.0)
        >>> average.update()
        >>> round(float(model.weight - average.state()["ema/weight"]), 5)
        3.0
    """

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._decay = decay
        self._weights = dict(model.named_parameters()) if decay else {}
        for name, parameter in self._weights.items():
            if torch.finfo(parameter.dtype).bits < 32:
                raise IsolossError(f"the weights {name} are {parameter.dtype}; their average needs float32 or wider")
        self._averages = {name: parameter.detach().clone() for name, parameter in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        if self._averages:
            # a + (1 - decay) (theta - a), in one call for all parameters; each process has the same part of both
            averages = [distributed.local_shard(average) for average in self._averages.values()]
            torch._foreach_lerp_(
                averages, [distributed.local_shard(p) for p in self._weights.values()], 1 - self._decay
            )

    def state(self) -> dict[str, torch.Tensor]:
        """Return the full average by name, each with the prefix `ema/`; all processes call this."""
        return {_PREFIX + name: distributed.full_tensor(average) for name, average in self._averages.items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `state` returned; other names in it are ignored.

        Raises:
            IsolossError: A tensor is missing or of another shape.
        """
        for name, average in self._averages.items():
            tensor = state.get(_PREFIX + name)
            if tensor is None or tensor.shape != average.shape:
                what = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise IsolossError(f"the average of the weights {name}, of shape {tuple(average.shape)}, is {what}")
            distributed.local_shard(average).copy_(distributed.local_shard(distributed.shard_like(tensor, average)))


def without_average(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the trainer's tensors that are not of the average."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_PREFIX)}


@contextlib.contextmanager
def averaged(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give `model` the average of its weights that `WeightAverage.state` returned, for a while.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        >>> with averaged(model, {"ema/weight": torch.full((1, 1), 3.0)}):
        ...     model.weight.item()
        3.0
    """
    # in the model itself, so that `save_pretrained` can write it and no second model is built
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        try:
            for name, parameter in model.named_parameters():
                parameter.copy_(state[_PREFIX + name])
            yield
        finally:
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
