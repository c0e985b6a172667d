"""What a training algorithm is: one update of a model from one batch, and the state it carries from step to step.

An algorithm of one's own is a subclass of `TrainingAlgorithm` with another `add_gradient`, and a config, a subclass of
`isoloss.config.AlgorithmConfig` whose `build` returns it, registered in `isoloss.registry.ALGORITHMS`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from isoloss.errors import IsolossError
from isoloss.lab.languages.base import Language, Sentences
from isoloss.lab.training.distributed import SingleProcess
from isoloss.lab.training.optimizers import Optimizer
from isoloss.run_config import OptimizerConfig
from isoloss.text.masking import IGNORED, Batch

if TYPE_CHECKING:
    from isoloss.lab.models.compiled_bert import CompiledLoss

Loss = Callable[[Batch], torch.Tensor]


class Examples(NamedTuple):
    """The training set of a downstream task."""

    sentences: Sentences  # n sentences padded to one length
    labels: torch.Tensor  # (n,) int64, from 0 to `num_classes` - 1
    num_classes: int


TaskExamples = Callable[[str, int], Examples]  # of a task's name and the number of examples


def no_task_examples(name: str, n: int) -> Examples:
    """Refuse to draw examples of a task, for a run that was not given any."""
    raise IsolossError(
        f"the training algorithm needs {n} examples of the task {name}: isoloss.pretrain draws them, "
        "isoloss.lab.training.train.train takes a function that does"
    )


@dataclass(frozen=True, kw_only=True)
class TrainingContext:
    """What an algorithm may use of a run besides the model."""

    optimizer: OptimizerConfig
    total_steps: int  # of the run, or of the stage whose algorithm it is; a step's number counts from 1 in it
    micro_batch_size: int = 0  # sentences whose gradient is computed at once in a process; 0: all
    causal: bool = False  # whether the labels are next tokens
    seed: int = 0  # of its random draws: the run's seed, or one that is derived from it for a later stage
    language: Language | None = None  # whose sentences the model learns; None where an algorithm needs none
    parallel: SingleProcess | None = None  # its `loss` must be a step's loss; None: there is one process
    task_examples: TaskExamples = no_task_examples
    compiled: CompiledLoss | None = None  # where it is there, it must be a step's loss


class StepResult(NamedTuple):
    """What a step did."""

    loss_nats: float  # of the batch before the update
    learning_rate: float  # of the update
    grad_norm: float | None  # Euclidean, over all parameters; None where it was not asked for
    details: Mapping[str, float]  # what else the algorithm computed, by name


class TrainingAlgorithm:
    """The gradient of the batch's loss, given to the optimizer; other algorithms give it another gradient.

    A process is given its part of the batch, and cuts it into parts of `micro_batch_size` sentences. Each part's
    gradient is weighted by its fraction of the predicted tokens of all processes, so that the sum is the gradient of
    the whole batch, up to rounding.

    Example:
        >>> import torch
        >>> from isoloss.lab.training.algorithms.base import TrainingAlgorithm, TrainingContext
        >>> from isoloss.run_config import OptimizerConfig
        >>> model = torch.nn.Linear(2, 1)
        >>> context = TrainingContext(optimizer=OptimizerConfig(warmup_steps=10), total_steps=100)
        >>> algorithm = TrainingAlgorithm(model, context)
        >>> algorithm.step(1, {"x": torch.ones(3, 2)}, lambda batch: model(batch["x"]).square().mean()).learning_rate
        0.0001
    """

    def __init__(self, model: Any, context: TrainingContext, config: Any = None) -> None:
        self.model, self.context, self.config = model, context, config
        self.optimizer = Optimizer(model, context.optimizer, total=context.total_steps, compiled=context.compiled)
        self.parallel = context.parallel or SingleProcess(model)

    def step(self, number: int, batch: Batch, loss: Loss, *, with_norm: bool = False) -> StepResult:
        """Update the model with `batch`; `number` counts the steps from 1, `loss` gives a batch's loss in nats."""
        self.optimizer.zero_grad()
        loss_nats, details = self.add_gradient(number, batch, loss)
        return StepResult(loss_nats, *self.optimizer.update(number, with_norm=with_norm), details)

    def add_gradient(self, number: int, batch: Batch, loss: Loss) -> tuple[float, dict[str, float]]:
        """Add the gradient of step `number` to the parameters' own; return the loss and what else was computed."""
        del number
        return self.add_loss_gradient(batch, loss), {}

    def add_loss_gradient(self, batch: Batch, loss: Loss, *, sync: bool = True) -> float:
        """Add the gradient of the loss of `batch` to the parameters' own, part by part; return the loss.

        Without `sync`, each process has the gradient of its own part alone, times a constant that differs by process.
        The loss is the whole batch's all the same.
        """
        n, size, group = num_sentences(batch), self.context.micro_batch_size, self.parallel.group
        if not 0 < size < n:
            # the usual case: the mean over the batch needs no weights
            if group.world_size == 1:
                value = loss(batch)
                value.backward()  # type: ignore[no-untyped-call]
                return value.item()
            # a single part has a weight, too, as other processes may have more tokens to predict
            size = n
        (total,), sum_nats = group.sum(_num_predicted(batch["labels"])), 0.0
        parts = split(batch, [min(size, n - start) for start in range(0, n, size)])
        for number, part in enumerate(parts, 1):
            # DDP sends what has been summed up so far, so that one exchange is enough for all parts
            is_synced = sync and number == len(parts)
            with contextlib.nullcontext() if is_synced else self.parallel.no_sync():
                weighted = loss(part) * (_num_predicted(part["labels"]) / total)
                # the processes' gradients are averaged
                summed = weighted * group.world_size
                summed.backward()  # type: ignore[no-untyped-call]
            sum_nats += weighted.item()
        return group.sum(sum_nats)[0]

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything that the next step depends on, besides the model's parameters: tensors by name, all flat.

        One of your own adds to these under names that are no optimizer's, and takes them out in `load_state`.
        """
        return self.optimizer.state()

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `state` returned; it is not called where a run begins, nor where that was empty."""
        self.optimizer.load_state(state)


def split(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Return parts of a batch, `sizes` sentences each.

    All tensors have a row per sentence but the exact targets, which have one per predicted token.
    """
    parts = {name: torch.split(tensor, list(sizes)) for name, tensor in batch.items() if name != "targets"}
    if "targets" in batch:
        counts = [_num_predicted(labels) for labels in parts["labels"]]
        parts["targets"] = torch.split(batch["targets"], counts)
    return [{name: tensors[i] for name, tensors in parts.items()} for i in range(len(sizes))]


def _num_predicted(labels: torch.Tensor) -> int:
    return int((labels != IGNORED).sum())


def num_sentences(batch: Batch) -> int:
    """Return the number of sentences in a batch."""
    return len(next(iter(batch.values())))


@contextlib.contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Turn dropout off for a while, and every module back to the mode it was in."""
    # not `model.train()` at the end: some modules may have been in eval mode before
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        # cuDNN's LSTM refuses a backward pass in eval mode
        with torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        for module in training:
            module.training = True
