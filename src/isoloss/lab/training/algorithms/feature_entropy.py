"""Features that spread over more directions, or fewer: the entropy of their spectrum as a term of the objective."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from isoloss.lab.training.algorithms.adversarial import token_states
from isoloss.lab.training.algorithms.base import Loss, TrainingAlgorithm, without_dropout
from isoloss.lab.training.algorithms.config import FeatureEntropyConfig
from isoloss.seeds import generator
from isoloss.text.masking import Batch, Sentences


def spectral_entropy(features: torch.Tensor) -> torch.Tensor:
    """Return the entropy, in nats, of the singular values s_i of centered features (n, D), as shares of their sum.

    Its exponential is the effective rank, RankMe (`isoloss.transfer.similarity.effective_rank`). It does not depend on
    the features' scale, so a model cannot change it by that alone.
    """
    values = torch.linalg.svdvals(features - features.mean(dim=0))
    p = values / values.sum()
    # a share of 0 adds nothing, and its logarithm would have no gradient
    entropy: torch.Tensor = -(p * p.clamp_min(torch.finfo(p.dtype).eps).log()).sum()
    return entropy


class FeatureEntropy(TrainingAlgorithm):
    """The gradient of L - weight * (spectral entropy of the features), given to the optimizer.

    A weight above 0 raises the effective rank, one below 0 lowers it. The features are those that the linear probe
    reads, `isoloss.lab.training.algorithms.adversarial.token_states`, of sentences drawn from the language anew at each
    step, without dropout. All processes draw the same. The stream of a step is `("feature entropy", step)`.
    """

    config: FeatureEntropyConfig

    def add_gradient(self, number: int, batch: Batch, loss: Loss) -> tuple[float, dict[str, float]]:
        """Add the gradient of the objective; see `TrainingAlgorithm.add_gradient`."""
        context = self.context
        language: Any = context.language
        stream = generator(context.seed, "feature entropy", number)
        device = next(self.model.parameters()).device
        sentences = language.sample(self.config.sentences, generator=stream)
        drawn = Sentences(sentences.tokens.to(device), sentences.lengths.to(device))
        with without_dropout(self.model):
            states = self.parallel.auxiliary(partial(token_states, causal=context.causal), drawn, language)
        entropy = spectral_entropy(states)
        # before the loss: with DDP, its backward pass is the one that averages these gradients over the processes too
        (-self.config.weight * entropy).backward()  # type: ignore[no-untyped-call]
        return self.add_loss_gradient(batch, loss), {"feature_entropy": entropy.item()}
