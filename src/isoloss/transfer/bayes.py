"""The Bayes-optimal accuracy of a synthetic task: the most that any classifier of its sentences can reach."""

from __future__ import annotations

import itertools
import math

import torch

from isoloss.languages.api import Sentences
from isoloss.languages.hmm.language import HMM
from isoloss.languages.pcfg.language import PCFG
from isoloss.statistics.estimate import Estimate
from isoloss.transfer.labelling import Labelled, Labelling

_MOST_STRINGS = 1 << 16  # that are enumerated for an exact value
_CHUNK = 4096  # sentences whose posteriors are computed together


def bayes_accuracy(
    language: Labelled, labelling: Labelling, sentences: Sentences, *, enumerable: bool = True
) -> Estimate:
    r"""Return `E_x max_y Pr(y | x)`, over the sentences that have a label.

    Where the label is a function of the sentence that is 1. Where it is what produced the sentence it is a sum over all
    strings of tokens if there are at most 65,536 (its standard error is then 0), and else a mean over the given
    sentences. With s_y(x) the probability that a sentence x has a label and that it is y, both are

        sum_x Pr(x) max_y s_y(x) / sum_x Pr(x) sum_y s_y(x).

    Args:
        language: What the sentences come from.
        labelling: The task.
        sentences: Sentences drawn given that they have a label.
        enumerable: Whether they follow the language's distribution, so that the sum over all strings is the same.
    """
    if labelling.scores is None:
        return _exact("exact: the label is a function of the sentence")
    strings = _strings(language) if enumerable else None
    if strings is not None:
        probabilities, scores = strings[1], labelling.scores(strings[0]).cpu()
        best, total = probabilities @ scores.amax(dim=1), probabilities @ scores.sum(dim=1)
        return _exact("exact: a sum over all strings", float(best / total))
    shares = []
    for first in range(0, len(sentences.tokens), _CHUNK):
        tokens, lengths = (part[first : first + _CHUNK] for part in sentences[:2])
        scores = labelling.scores(Sentences(tokens, lengths)).cpu()
        shares.append(scores.amax(dim=1) / scores.sum(dim=1))
    values = torch.cat(shares)
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


def _strings(language: Labelled) -> tuple[Sentences, torch.Tensor] | None:
    """Return all sentences of the language and their probabilities (n,), or None where there are too many strings."""
    if not isinstance(language, PCFG | HMM):
        return None
    longest = language.max_length
    possible = torch.nonzero(language.length_probs).flatten().tolist() if isinstance(language, PCFG) else [longest]
    if sum(language.vocab_size**length for length in possible) > _MOST_STRINGS:
        return None
    rows = [
        (*string, *[language.pad_id] * (longest - length))
        for length in possible
        for string in itertools.product(range(language.vocab_size), repeat=length)
    ]
    tokens = torch.tensor(rows)
    lengths = (tokens != language.pad_id).sum(dim=1)
    is_sentence = _is_possible(language, tokens, lengths)
    sentences = Sentences(tokens[is_sentence], lengths[is_sentence])
    exact = language.to("cpu", torch.float64)
    return sentences, exact.log_prob(sentences.tokens, sentences.lengths).exp()


def _is_possible(language: PCFG | HMM, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return (n,) bool: whether the language derives each string."""
    if isinstance(language, PCFG):
        exact = language.to("cpu", torch.float64)
        out = torch.zeros(len(tokens), dtype=torch.bool)
        for length in sorted(set(lengths.tolist())):
            rows = lengths == length
            scores = exact.inside(tokens[rows, :length], lengths[rows], stop=length)[:, 0]
            out[rows] = scores > math.log(torch.finfo(torch.float64).tiny)
        return out
    initial, transition, emission = (
        torch.from_numpy(table > 0).double() for table in (language.initial, language.transition, language.emission)
    )
    reached = initial * emission.T[tokens[:, 0]]
    for position in range(1, tokens.shape[1]):
        reached = ((reached @ transition) > 0) * emission.T[tokens[:, position]]
    return reached.any(dim=1)
