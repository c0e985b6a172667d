"""Step rules: what a pre-training algorithm does with one batch, and the state it carries from step to step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from isoloss.run_config import OptimizerConfig
from isoloss.text.masking import IGNORED, Batch
from isoloss.training.data_parallel import Alone
from isoloss.training.optimizers import Optimizer

Loss = Callable[[Batch], torch.Tensor]


class Outcome(NamedTuple):
    """What a step did.

    Attributes:
        loss_nats: The batch's loss before the update.
        learning_rate: The rate that the update was made with.
        grad_norm: Euclidean norm of the gradient over all parameters, or None where it was not asked for.
        details: What else the rule looked at, by name.
    """

    loss_nats: float
    learning_rate: float
    grad_norm: float | None
    details: Mapping[str, float]


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


def split(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Return parts of a batch, `sizes` sentences each.

    All tensors have a row a sentence but the exact targets, which have one a predicted token.
    """
    pieces = {name: torch.split(tensor, list(sizes)) for name, tensor in batch.items() if name != "targets"}
    if "targets" in batch:
        counts = [_num_predicted(labels) for labels in pieces["labels"]]
        pieces["targets"] = torch.split(batch["targets"], counts)
    return [{name: tensors[i] for name, tensors in pieces.items()} for i in range(len(sizes))]


def _num_predicted(labels: torch.Tensor) -> int:
    return int((labels != IGNORED).sum())


def num_sentences(batch: Batch) -> int:
    """Return the number of sentences in a batch."""
    return len(next(iter(batch.values())))


@contextlib.contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Turn dropout off for a while, and every module back to the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.backends.cudnn.flags(enabled=False):  # its LSTM has no derivatives in eval mode
            yield
    finally:
        for module in training:
            module.training = True


class GradientStep:
    """The gradient of the batch's loss, given to the optimizer; other rules are this one with another gradient.

    The gradient is the sum of those of the parts of `micro_batch` sentences, in all processes, each weighted by its
    share of the predicted tokens: that of the whole batch, up to rounding. A process is given its share of the batch.

    Args:
        model: The model that is updated in place.
        config: The optimizer.
        total: Steps of the whole run.
        micro_batch: Sentences whose gradient is computed at once in a process; 0: all.
        parallel: How the gradients of several processes come together, whose `loss` a step's loss must then be; None:
            there is one process.

    Raises:
        IsolossError: A setting is out of its range.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> rule = GradientStep(model, OptimizerConfig(warmup_steps=10), total=100)
        >>> rule.step(1, {"x": torch.ones(3, 2)}, lambda batch: model(batch["x"]).square().mean()).learning_rate
        0.0001
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: OptimizerConfig,
        *,
        total: int,
        micro_batch: int = 0,
        parallel: Alone | None = None,
    ) -> None:
        self.optimizer = Optimizer(model, config, total=total)
        self.parallel = parallel or Alone(model)
        self._micro_batch = micro_batch

    def step(self, number: int, batch: Batch, loss: Loss, *, with_norm: bool = False) -> Outcome:
        """Make step `number` on `batch`; see `StepRule`."""
        self.optimizer.zero_grad()
        loss_nats, details = self.add_gradient(number, batch, loss)
        return Outcome(loss_nats, *self.optimizer.update(number, with_norm=with_norm), details)

    def add_gradient(self, number: int, batch: Batch, loss: Loss) -> tuple[float, dict[str, float]]:
        """Add the gradient of step `number` to the parameters' own; return the loss and what else was looked at."""
        del number
        return self.add_loss_gradient(batch, loss), {}

    def add_loss_gradient(self, batch: Batch, loss: Loss, *, apart: bool = False) -> float:
        """Add the gradient of the loss of `batch` to the parameters' own, part by part; return the loss.

        With `apart`, each process has the gradient of its own share (times a constant of its own) and none of the
        others'. The loss is that of the whole batch all the same.
        """
        n, size, processes = num_sentences(batch), self._micro_batch, self.parallel.processes
        if not 0 < size < n:
            if processes.world_size == 1:
                value = loss(batch)
                value.backward()  # type: ignore[no-untyped-call]
                return value.item()
            size = n
        (total,), sum_nats = processes.sum(_num_predicted(batch["labels"])), 0.0
        parts = split(batch, [min(size, n - start) for start in range(0, n, size)])
        for number, part in enumerate(parts, 1):
            with self.parallel.apart() if apart or number < len(parts) else contextlib.nullcontext():
                weighted = loss(part) * (_num_predicted(part["labels"]) / total)
                summed = weighted * processes.world_size  # the processes' gradients are averaged
                summed.backward()  # type: ignore[no-untyped-call]
            sum_nats += weighted.item()
        return processes.sum(sum_nats)[0]

    def state(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's tensors; see `Optimizer.state`."""
        return self.optimizer.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state` returned; see `Optimizer.load_state`."""
        self.optimizer.load_state(state)
