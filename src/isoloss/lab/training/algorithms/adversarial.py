"""The adversarial algorithm (the paper, appendix A.5): keep the pre-training loss, spoil a downstream task, or help it.

Shapes: n1 and n2 examples of the two subsets, D features, C classes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from isoloss.errors import IsolossError
from isoloss.lab.languages.base import Language, Sentences
from isoloss.lab.training.algorithms.base import Loss, TrainingAlgorithm, TrainingContext, without_dropout
from isoloss.lab.training.algorithms.config import AdversarialConfig
from isoloss.seeds import generator
from isoloss.text.masking import Batch, with_start


def ridge_predictions(
    train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor, *, ridge: float
) -> torch.Tensor:
    """Return the predictions (n2, C) at `test_x` (n2, D) of the ridge regression of `train_y` (n1, C) on `train_x`.

    The head minimizes the mean over the training rows of ||W z + b - y||^2, plus `ridge` ||W||^2, where z are the
    features centered by the training rows' mean and divided by the root of their mean squared norm: a model cannot
    escape the head by the scale of its features. With Z, Y the centered rows and K = Z Z^T, the prediction at z is
    mean(y) + z Z^T (K + n1 ridge I)^-1 Y, an n1 by n1 system whatever the number of features.
    """
    center, mean = train_x.mean(dim=0), train_y.mean(dim=0)
    train, test = train_x - center, test_x - center
    kernel, cross = train @ train.T, test @ train.T
    mean_square = kernel.diagonal().mean()
    identity = torch.eye(len(train), dtype=train.dtype, device=train.device)
    # with x = sqrt(mean_square) z, the factor 1 / mean_square of both K and z Z^T is multiplied through to the ridge
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


class Adversarial(TrainingAlgorithm):
    """The gradient of L - weight * (squared loss on D2 of the head fitted on D1), given to the optimizer.

    A weight above 0 spoils the task; one below 0 helps it, as the objective then has the head's loss to be minimized.

    At each step D1 and D2 are drawn from the task's training set without overlap, as a function of seed and step. The
    head is the closed form of `ridge_predictions` on one-hot labels, and its loss on D2 is the mean over examples of
    ||prediction - label||^2. The gradient flows through both sets' features, through the closed form. The features are
    those that the linear probe reads: concatenated token states, without dropout.

    On several processes, all of them compute the same head (`head="shared"`), or each draws D1 and D2 of its own and
    the heads' gradients are averaged (`"per-process"`).

    `adversary_loss` and `adversary_accuracy` are of that head on D2, or the means over the heads.

    The task's examples always go together whatever the `micro_batch_size`. The stream of a step is
    `("adversary", step)`, and per process `("adversary", step, rank)`.
    """

    config: AdversarialConfig

    def __init__(self, model: Any, context: TrainingContext, config: AdversarialConfig) -> None:
        super().__init__(model, context, config)
        self._examples = context.task_examples(config.task, config.task_examples)
        per_step, num_examples = config.head_examples + config.loss_examples, len(self._examples.labels)
        if num_examples < per_step:
            raise IsolossError(
                f"the adversarial algorithm draws {per_step} examples per step, and the task has {num_examples}: "
                "give it more task_examples"
            )

    def add_gradient(self, number: int, batch: Batch, loss: Loss) -> tuple[float, dict[str, float]]:
        """Add the gradient of the objective; see `TrainingAlgorithm.add_gradient`."""
        head_loss, accuracy = self.head_loss(number)
        # before the loss: with DDP, its backward pass is the one that averages these gradients over the processes too
        (-self.config.weight * head_loss).backward()  # type: ignore[no-untyped-call]
        group = self.parallel.group
        sums = group.sum(head_loss.item(), accuracy)
        mean_loss, mean_accuracy = (value / group.world_size for value in sums)
        loss_nats = self.add_loss_gradient(batch, loss)
        return loss_nats, {"adversary_loss": mean_loss, "adversary_accuracy": mean_accuracy}

    def head_loss(self, number: int) -> tuple[torch.Tensor, float]:
        """Return step `number`'s loss of the head on D2, which can be differentiated, and its accuracy there."""
        config, context, (sentences, labels, num_classes) = self.config, self.context, self._examples
        assert context.language is not None
        stream = self.parallel.group.stream if config.head == "per-process" else ()
        # D1 and D2 are disjoint, as parts of one permutation, and go through the model together
        order = torch.randperm(len(labels), generator=generator(context.seed, "adversary", number, *stream))
        rows = order[: config.head_examples + config.loss_examples]
        device = next(self.model.parameters()).device
        drawn = Sentences(sentences.tokens[rows].to(device), sentences.lengths[rows].to(device))
        drawn_labels = labels[rows].to(device)
        with without_dropout(self.model):
            states = self.parallel.auxiliary(partial(token_states, causal=context.causal), drawn, context.language)
        targets = torch.nn.functional.one_hot(drawn_labels, num_classes).to(states.dtype)
        n1 = config.head_examples
        predicted = ridge_predictions(states[:n1], targets[:n1], states[n1:], ridge=config.ridge)
        head_loss = (predicted - targets[n1:]).square().sum(dim=1).mean()
        return head_loss, float((predicted.argmax(dim=1) == drawn_labels[n1:]).double().mean())
