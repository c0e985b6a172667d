"""The Bayes-optimal accuracy of a synthetic task: the most that any classifier of its sentences can reach."""

from __future__ import annotations

import itertools
import math

import torch

from isoloss.languages.api import Labeling, Language, Sentences
from isoloss.statistics.estimate import Estimate

_MOST_STRINGS = 1 << 16  # that are enumerated for an exact value
_CHUNK = 4096  # sentences whose posteriors are computed together


def bayes_accuracy(
    language: Language, labeling: Labeling, sentences: Sentences, *, enumerable: bool = True
) -> Estimate:
    r"""Return `E_x max_y Pr(y | x)`, over the sentences that have a label.

    Where the label is a function of the sentence that is 1. Where it is what produced the sentence it is a sum over all
    strings of tokens if there are at most 65,536 (its standard error is then 0), and else a mean over the given
    sentences. With s_y(x) the probability that a sentence x has a label and that it is y, both are

        sum_x Pr(x) max_y s_y(x) / sum_x Pr(x) sum_y s_y(x).

    Args:
        language: What the sentences come from.
        labeling: The task.
        sentences: Sentences drawn given that they have a label.
        enumerable: Whether they follow the language's distribution, so that the sum over all strings is the same.
    """
    if labeling.scores is None:
        return _exact("exact: the label is a function of the sentence")
    strings = _strings(language) if enumerable else None
    if strings is not None:
        probabilities, scores = strings[1], labeling.scores(strings[0]).cpu()
        best, total = probabilities @ scores.amax(dim=1), probabilities @ scores.sum(dim=1)
        return _exact("exact: a sum over all strings", float(best / total))
    best_scores = []
    for first in range(0, len(sentences.tokens), _CHUNK):
        tokens, lengths = (part[first : first + _CHUNK] for part in sentences[:2])
        scores = labeling.scores(Sentences(tokens, lengths)).cpu()
        best_scores.append(scores.amax(dim=1) / scores.sum(dim=1))
    values = torch.cat(best_scores)
    deviation = float(values.std()) if len(values) > 1 else 0.5  # numbers from 0 to 1 cannot deviate more
    return Estimate(
        value=float(values.mean()),
        stderr=deviation / math.sqrt(len(values)),
        samples=len(values),
        unit="accuracy",
        num_inputs=len(values),
        method="Monte Carlo: mean over the test sentences",
    )


def _exact(method: str, value: float = 1.0) -> Estimate:
    return Estimate(value=value, stderr=0.0, samples=0, unit="accuracy", num_inputs=0, method=method)


def _strings(language: Language) -> tuple[Sentences, torch.Tensor] | None:
    """Return all sentences of the language and their probabilities (n,), or None where there are too many strings."""
    if not language.is_exact:
        return None
    exact = language.exact().to("cpu", torch.float64)
    longest, possible = exact.max_length, torch.nonzero(exact.length_probs).flatten().tolist()
    if sum(exact.vocab_size**length for length in possible) > _MOST_STRINGS:
        return None
    rows = [
        (*string, *[exact.pad_id] * (longest - length))
        for length in possible
        for string in itertools.product(range(exact.vocab_size), repeat=length)
    ]
    tokens = torch.tensor(rows)
    lengths = (tokens != exact.pad_id).sum(dim=1)
    is_sentence = exact.is_possible(tokens, lengths)
    sentences = Sentences(tokens[is_sentence], lengths[is_sentence])
    return sentences, exact.log_prob(sentences.tokens, sentences.lengths).exp()
