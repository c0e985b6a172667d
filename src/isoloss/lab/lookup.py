"""The look-up table: a model of the true conditionals, its features, and linear probes without a model.

Features are (n, T * V) float32 for n sentences padded to T tokens of a vocabulary of V, with zeros at padding. With
`causal` they are those of the look-up table of a causal model, which knows the tokens before a position alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isoloss.errors import IsolossError
from isoloss.lab.languages.base import Language, Sentences
from isoloss.transfer.config import ClassifierConfig
from isoloss.transfer.features import one_hot, token_shares
from isoloss.transfer.probe import fit_on_task
from isoloss.transfer.results import TransferResult
from isoloss.transfer.tasks import TaskData

LEAST_PROBABILITY = 1e-4  # the logarithms of the look-up table are clipped here
_LOOKUP_CHUNK = 4096  # sentences whose conditionals are computed at once


def lookup_features(language: Language, sentences: Sentences, causal: bool = False) -> torch.Tensor:
    """Return the look-up table's representation: all true conditionals of a sentence, side by side (appendix A.5).

    The look-up table is the model whose token states are the true conditional probabilities `Pr(x_t = c | x_-t)`. Its
    pre-training loss is the best possible, and a probe on it tells how much the probabilities alone give away. With
    `causal` they are the next-token conditionals (`Language.log_next`).

    Raises:
        IsolossError: There are no sentences, or one that the language cannot produce.

    Example:
        >>> import torch
        >>> from isoloss.lab.languages import Sentences
        >>> from isoloss.lab.languages.brackets import Brackets
        >>> from isoloss.lab.lookup import lookup_features
        >>> sentences = Sentences(torch.tensor([[0, 1]]), torch.tensor([2]))
        >>> lookup_features(Brackets(2), sentences).tolist()
        [[1.0, 0.0, 0.0, 1.0]]
        >>> lookup_features(Brackets(2), sentences, causal=True).tolist()
        [[0.5, 0.5, 0.0, 1.0]]
    """
    if len(sentences.lengths) == 0:
        raise IsolossError("features need at least one sentence")
    conditionals = language.log_next if causal else language.log_conditionals
    rows = []
    for first in range(0, len(sentences.tokens), _LOOKUP_CHUNK):
        tokens, lengths = (part[first : first + _LOOKUP_CHUNK] for part in sentences[:2])
        # an impossible token has the log of a tiny number, whose exponential is 0 for every purpose here
        probs = conditionals(tokens, lengths).exp().float()
        present = Sentences(tokens, lengths).present().to(probs.device)
        rows.append(probs.masked_fill(~present[:, :, None], 0.0).flatten(1))
    return torch.cat(rows)


def log_lookup_features(language: Language, sentences: Sentences, causal: bool = False) -> torch.Tensor:
    r"""Return the logarithms of the true conditionals, side by side: `log max(Pr(x_t = c | x_-t), LEAST_PROBABILITY)`.

    Probabilities are clipped at `LEAST_PROBABILITY`, 1e-4, from below. An impossible token has the logarithm minus
    infinity. A much lower floor would be no better: all features are divided by one number, so a few huge ones would
    make the others vanish. (With 4,096 + 4,096 sentences of the language `pcfg-laptop` and task
    `prefix-4` the convex probe reaches 61.2 %; with a floor of 1e-3 62.0 %, of 1e-6 60.5 %, of 1e-9 59.0 %, with the
    smallest normal number of float64 29.2 %, each ± 0.8 %. On the probabilities themselves it reaches 50.1 %.)

    Example:
        >>> import torch
        >>> from isoloss.lab.languages import Sentences
        >>> from isoloss.lab.languages.brackets import Brackets
        >>> from isoloss.lab.lookup import log_lookup_features
        >>> features = log_lookup_features(Brackets(2), Sentences(torch.tensor([[0, 1]]), torch.tensor([2])))
        >>> [round(nats, 2) for nats in features[0].tolist()]
        [0.0, -9.21, -9.21, 0.0]
    """
    floored = lookup_features(language, sentences, causal).clamp(min=LEAST_PROBABILITY).log()
    # the zeros at padding have become the logarithm of the floor
    by_token = floored.view(*sentences.tokens.shape, -1)
    return by_token.masked_fill(~sentences.present().to(floored.device)[:, :, None], 0.0).flatten(1)


def one_hot_features(language: Language, sentences: Sentences, causal: bool = False) -> torch.Tensor:
    """Return the one-hot tokens, position by position, with or without `causal`: the features of a probe on no model.

    Example:
        >>> import torch
        >>> from isoloss.lab.languages import Sentences
        >>> from isoloss.lab.languages.brackets import Brackets
        >>> from isoloss.lab.lookup import one_hot_features
        >>> one_hot_features(Brackets(2), Sentences(torch.tensor([[1, 0], [1, 2]]), torch.tensor([2, 1]))).tolist()
        [[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    """
    return one_hot(sentences, language.vocab_size)


def token_share_features(language: Language, sentences: Sentences, causal: bool = False) -> torch.Tensor:
    """Return the share of each token in each sentence, with or without `causal`: the mean of the one-hot tokens."""
    return token_shares(sentences, language.vocab_size)


def lookup_probe(
    language: Language,
    task: TaskData,
    config: ClassifierConfig | None = None,
    *,
    features: Callable[[Language, Sentences], torch.Tensor] = lookup_features,
    **settings: Any,
) -> TransferResult:
    r"""Return the test accuracy of a linear probe on the true conditionals (paper, section 2.3 and appendix A.5).

    A model of the best pre-training loss has these probabilities as its outputs, whatever its token states are.

    Args:
        language: The language of the task's sentences.
        task: Labeled sentences, from `make_task`.
        config: The settings; None: those of `ClassifierConfig`.
        features: What the probe reads of the sentences.
        settings: Fields of `ClassifierConfig` that replace those of `config`.

    Raises:
        IsolossError: As `fit_linear_probe`; or a sentence is not one of the language.

    Example:
        >>> from isoloss.lab.languages.pcfg import PCFG
        >>> from isoloss.lab.lookup import lookup_probe
        >>> from isoloss.lab.tasks import make_task
        >>> language = PCFG.from_text("S A 1\nS B 1\nA C D 1\nB D C 1\nC c 1\nD d 1")
        >>> task = make_task(language, "root", num_train=100, num_test=50)
        >>> print(lookup_probe(language, task, solver="convex").accuracy)
        100 %
    """
    try:
        train_x, test_x = (features(language, sentences) for sentences in (task.train, task.test))
    except IsolossError as error:
        raise IsolossError(f"task {task.name} cannot be probed without a model: {error}") from error
    return fit_on_task(task, train_x, test_x, config, **settings)
