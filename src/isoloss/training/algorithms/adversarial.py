"""The adversarial algorithm (the paper, appendix A.5): keep the pre-training loss, spoil a downstream task.

Shapes: n1 and n2 examples of the two subsets, D features, C classes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from isoloss.errors import IsolossError
from isoloss.languages.api import Language, Sentences
from isoloss.run_config import OptimizerConfig
from isoloss.seeds import generator
from isoloss.text.causal import with_start
from isoloss.text.masking import Batch
from isoloss.training.algorithms.config import AdversarialConfig
from isoloss.training.data_parallel import Alone
from isoloss.training.steps import GradientStep, Loss, without_dropout


class Examples(NamedTuple):
    """The training set of a downstream task.

    Attributes:
        sentences: n sentences padded to one length.
        labels: (n,) int64, from 0 to `num_classes` - 1.
        num_classes: C.
    """

    sentences: Sentences
    labels: torch.Tensor
    num_classes: int


def ridge_predictions(
    train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor, *, ridge: float
) -> torch.Tensor:
    """Return (n2, C): what the ridge regression of `train_y` on `train_x` predicts at `test_x`, differentiable in both.

    The head minimises the mean over the training rows of ||W z + b - y||^2, plus `ridge` ||W||^2, where z are the
    features centred by the training rows' mean and divided by the root of their mean squared norm: a model cannot
    escape the head by the scale of its features. With Z, Y the centred rows and K = Z Z^T, the prediction at z is
    mean(y) + z Z^T (K + n1 ridge I)^-1 Y, an n1 by n1 system whatever the number of features.

    Args:
        train_x: (n1, D).
        train_y: (n1, C).
        test_x: (n2, D).
        ridge: Above 0.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
        >>> [round(float(y), 3) for y in ridge_predictions(x, 2 * x, torch.tensor([[4.0]]), ridge=1e-6)]
        [8.0]
    """
    centre, mean = train_x.mean(dim=0), train_y.mean(dim=0)
    train, test = train_x - centre, test_x - centre
    kernel, cross = train @ train.T, test @ train.T
    mean_square = kernel.diagonal().mean()
    identity = torch.eye(len(train), dtype=train.dtype, device=train.device)
    # multiplied through by the mean squared norm
    weights = torch.linalg.solve(kernel + len(train) * ridge * mean_square * identity, train_y - mean)
    predicted: torch.Tensor = mean + cross @ weights
    return predicted


def token_states(model: Any, sentences: Sentences, language: Language, *, causal: bool) -> torch.Tensor:
    """Return (n, T d): the last states of each unmasked sentence's tokens side by side, zeros at padding.

    What the linear probe reads (`isoloss.transfer.features.extract`), as a function that can be differentiated. A
    causal model reads the start before the sentence, whose own state is left out.
    """
    width = sentences.tokens.shape[1]
    read = with_start(sentences, language) if causal else sentences
    present = read.present()
    states = model.base_model(input_ids=read.tokens, attention_mask=present.long()).last_hidden_state
    states = states.masked_fill(~present[:, :, None], 0.0)
    rows: torch.Tensor = states[:, read.tokens.shape[1] - width :].flatten(1)
    return rows


class AdversarialStep(GradientStep):
    """The gradient of L - weight * (squared loss on D2 of the head fitted on D1), given to the optimizer.

    At each step D1 and D2 are drawn from the task's training set without overlap, as a function of seed and step. The
    head is the closed form of `ridge_predictions` on one-hot labels, and its loss on D2 is the mean over examples of
    ||prediction - label||^2. The gradient flows through both sets' features, through the closed form. The features are
    those that the linear probe reads: concatenated token states, without dropout.

    On several processes, all of them compute the same head (`ascent="reduced"`), or each draws D1 and D2 of its own and
    the heads' gradients are averaged (`"per-rank"`).

    `adversary_loss` and `adversary_accuracy` are of that head on D2, or the means over the heads.

    Args:
        model: As for `GradientStep`; a transformers language model.
        config: As for `GradientStep`.
        adversary: The weight, the ridge and the sizes.
        examples: The training set of the task.
        language: Whose sentences they are.
        causal: Whether the model predicts next tokens.
        seed: The run's seed; the stream is `("adversary", step)`, and per rank `("adversary", step, rank)`.
        total: As for `GradientStep`.
        micro_batch: As for `GradientStep`; the examples always go together.
        parallel: As for `GradientStep`.

    Raises:
        IsolossError: There are fewer examples than a step takes.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: OptimizerConfig,
        adversary: AdversarialConfig,
        *,
        examples: Examples,
        language: Language,
        causal: bool,
        seed: int,
        total: int,
        micro_batch: int = 0,
        parallel: Alone | None = None,
    ) -> None:
        super().__init__(model, config, total=total, micro_batch=micro_batch, parallel=parallel)
        wanted = adversary.head_examples + adversary.loss_examples
        if len(examples.labels) < wanted:
            raise IsolossError(
                f"the adversary draws {wanted} examples a step, and the task has {len(examples.labels)}: "
                "give it more task_examples"
            )
        self._model, self._adversary, self._examples = model, adversary, examples
        self._language, self._causal, self._seed = language, causal, seed

    def add_gradient(self, number: int, batch: Batch, loss: Loss) -> tuple[float, dict[str, float]]:
        """Add the gradient of the objective; see `GradientStep.add_gradient`."""
        head_loss, accuracy = self.head_loss(number)
        (-self._adversary.weight * head_loss).backward()  # type: ignore[no-untyped-call]
        processes = self.parallel.processes
        sums = processes.sum(head_loss.item(), accuracy)
        mean_loss, mean_accuracy = (value / processes.world_size for value in sums)
        loss_nats = self.add_loss_gradient(batch, loss)
        return loss_nats, {"adversary_loss": mean_loss, "adversary_accuracy": mean_accuracy}

    def head_loss(self, number: int) -> tuple[torch.Tensor, float]:
        """Return step `number`'s loss of the head on D2, which can be differentiated, and its accuracy there."""
        settings, (sentences, labels, num_classes) = self._adversary, self._examples
        stream = self.parallel.processes.stream if settings.ascent == "per-rank" else ()
        order = torch.randperm(len(labels), generator=generator(self._seed, "adversary", number, *stream))
        rows = order[: settings.head_examples + settings.loss_examples]
        device = next(self._model.parameters()).device
        drawn = Sentences(sentences.tokens[rows].to(device), sentences.lengths[rows].to(device))
        own = labels[rows].to(device)
        with without_dropout(self._model):
            states = self.parallel.aside(partial(token_states, causal=self._causal), drawn, self._language)
        targets = torch.nn.functional.one_hot(own, num_classes).to(states.dtype)
        n1 = settings.head_examples
        predicted = ridge_predictions(states[:n1], targets[:n1], states[n1:], ridge=settings.ridge)
        head_loss = (predicted - targets[n1:]).square().sum(dim=1).mean()
        return head_loss, float((predicted.argmax(dim=1) == own[n1:]).double().mean())
