"""Exact sums over a language: every sentence of a small one with its probability, and the entropies of any.

Entropies are in nats. They are exact where a closed form exists; elsewhere they are means over drawn sentences of exact
probabilities, with a standard error.

Shapes: n sentences padded to T tokens.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.lab.languages.base import ExactLanguage, Language, Sentences
from isoloss.lab.languages.special_tokens import WithSpecialTokens
from isoloss.statistics.estimate import Estimate
from isoloss.text.masking import maskable

MOST_STRINGS = 1 << 16  # of tokens, sentences or not: the most that are enumerated
_BATCH = 8192  # strings whose probabilities are computed at once


def why_not_enumerable(language: Language) -> str | None:
    """Return why the sentences of a language cannot be enumerated, or None if they can."""
    name = type(language).__name__
    if isinstance(language, WithSpecialTokens):
        return why_not_enumerable(language.inner)
    if not language.is_exact:
        return f"{name} has no exact probabilities to sum over"
    if language.exact().listed() is not None:
        return None
    count = sum(language.vocab_size**length for length in _possible_lengths(language))
    if count > MOST_STRINGS:
        told = f"{count:,}" if count < 10**9 else f"about 10^{math.log10(count):.0f}"
        return f"{name} has {told} strings of tokens, more than the {MOST_STRINGS:,} that can be enumerated"
    return None


def all_sentences(language: Language) -> tuple[Sentences, torch.Tensor]:
    """Return all n sentences with a probability above 0, and (n,) float64 their probabilities, which sum to 1.

    They are on the CPU, sorted by length and then by tokens. The language's `log_prob` may include the probability of
    the length or not: probabilities are normalized within each length, then multiplied by `length_probs`.
    """
    if reason := why_not_enumerable(language):
        raise IsolossError(reason)
    exact = language.exact().to("cpu", torch.float64)
    if isinstance(exact, WithSpecialTokens):
        inside, inner_probabilities = all_sentences(exact.inner)
        return exact.frame(inside), inner_probabilities
    if (strings := exact.listed()) is not None:
        lengths = torch.full((len(strings),), exact.max_length)
        return Sentences(strings, lengths), exact.log_prob(strings, lengths).softmax(dim=0)
    possible, length_probs = _possible_lengths(exact), exact.length_probs
    all_tokens, all_lengths, probabilities = [], [], []
    for length in possible:
        tokens, logs = [], []
        places = exact.vocab_size ** torch.arange(length - 1, -1, -1)
        for codes in torch.split(torch.arange(exact.vocab_size**length), _BATCH):
            # Digits in base V: ascending codes are sorted strings, on which `masked_sentences` relies.
            strings = codes[:, None] // places % exact.vocab_size
            strings = strings[exact.is_possible(strings, torch.full_like(codes, length))]
            if len(strings):
                tokens.append(strings)
                logs.append(exact.log_prob(strings, torch.full((len(strings),), length)))
        of_length = torch.cat(tokens)
        all_tokens.append(torch.nn.functional.pad(of_length, (0, possible[-1] - length), value=exact.pad_id))
        all_lengths.append(torch.full((len(of_length),), length))
        # The softmax divides by Pr(length), whether `log_prob` has it as a factor (a grammar's) or not (other
        # languages').
        probabilities.append(length_probs[length] * torch.cat(logs).softmax(dim=0))
    return Sentences(torch.cat(all_tokens), torch.cat(all_lengths)), torch.cat(probabilities)


def masked_sentences(language: Language) -> tuple[Sentences, torch.Tensor, torch.Tensor]:
    """Return every distinct sentence with one masked token, with the probability of drawing it under `masking="one"`.

    A sentence x is drawn, then one of its k(x) non-special tokens, uniformly. So a masked sentence has the probability
    sum_x Pr(x) / k(x), over the sentences x that agree with it everywhere but at the masked token.

    Returns:
        The sentences, with the lowest possible token at the masked position; (n,) int64 masked positions; (n,) float64
        probabilities, which sum to 1.
    """
    if isinstance(language, WithSpecialTokens):
        inside, inner_positions, inner_probabilities = masked_sentences(language.inner)
        return language.frame(inside), inner_positions + 1, inner_probabilities
    sentences, probabilities = all_sentences(language)
    candidates = maskable(sentences, language)
    rows, positions = candidates.nonzero(as_tuple=True)
    width = sentences.tokens.shape[1]
    # A number for each string without its masked token, then one for each (length, position, string). They fit into 64
    # bits, as there are at most `MOST_STRINGS` strings.
    values = sentences.tokens.masked_fill(~sentences.present(), 0)
    values *= language.vocab_size ** torch.arange(width - 1, -1, -1)
    others = values.sum(dim=1)[rows] - values[rows, positions]
    keys = (sentences.lengths[rows] * width + positions) * language.vocab_size**width + others
    # `return_index` gives the first of equal keys: as sentences are sorted, the one with the lowest token in the gap.
    _, first, group = np.unique(keys.numpy(), return_index=True, return_inverse=True)
    weights = torch.zeros(len(first), dtype=torch.float64)
    weights.index_add_(0, torch.from_numpy(group), (probabilities / candidates.sum(dim=1))[rows])
    chosen = rows[first]
    return Sentences(sentences.tokens[chosen], sentences.lengths[chosen]), positions[first], weights


def _possible_lengths(language: Language) -> list[int]:
    lengths: list[int] = language.exact().length_probs.nonzero().flatten().tolist()
    return lengths


EXACT = "exact"
_CHUNK = 4096  # sentences drawn together; part of what a seed stands for
_ROUNDING = 1e-13  # of the value: a smaller spread is rounding error, where all sentences have the same probability
_SENTENCE, _TOKEN = "nats per sentence", "nats per masked token"  # units


@dataclass(frozen=True, kw_only=True)
class Entropy:
    """The entropies of a language. An exact one has a standard error of 0 and the method `exact`.

    Attributes:
        sentence: H(x) = -E log Pr(x) of a sentence x with its length, which is `length` + `given_length`.
        length: `H(|x|)`, the entropy of the number of tokens; 0 where all sentences have the same. Always exact.
        given_length: `H(x | |x|)`, the entropy of the tokens once their number is known.
        masked_token: The entropy of a token given all others and the length, averaged over the positions of a sentence
            and then over sentences: the loss of a perfect model where one token of each sentence is masked.
    """

    sentence: Estimate
    length: Estimate
    given_length: Estimate
    masked_token: Estimate

    def to_dict(self) -> dict[str, Any]:
        """Return the estimates by name, as JSON types."""
        return dataclasses.asdict(self)


def entropy(language: Language, *, num_sentences: int = 4096, seed: int = 0) -> Entropy:
    r"""Return the entropies of a language whose probabilities are known.

    Where a language has a closed form (`closed_form_entropies`), as brackets and Dyck languages do, it is exact. Most
    grammars are ambiguous, so that their derivations have more entropy than their sentences; for them, for hidden
    Markov models and for teachers, both entropies are Monte-Carlo estimates. They are computed in float64, a teacher's
    in its own dtype.

    Args:
        language: An exact language; another is an `IsolossError`.
        num_sentences: Sentences that a Monte-Carlo estimate is the mean over, at least 2.
        seed: Decides them.

    Example:
        >>> from isoloss.lab.languages import entropy
        >>> from isoloss.lab.languages.brackets import Brackets
        >>> entropies = entropy(Brackets(4))  # one of 6 sentences
        >>> print(entropies.sentence, entropies.sentence.method, entropies.masked_token.value)
        1.7918 nats per sentence (exact) exact 0.0
    """
    exact = language.exact()
    if num_sentences < 2:
        raise IsolossError(f"num_sentences is {num_sentences}; an estimate with an error needs at least 2")
    if not exact.costs_forward_passes:
        exact = exact.to(dtype=torch.float64)
    probs = exact.length_probs
    length = _exact(-float(torch.special.xlogy(probs, probs).sum()), _SENTENCE)
    closed = exact.closed_form_entropies()
    if closed is not None:
        given_length, masked_token = _exact(closed[0], _SENTENCE), _exact(closed[1], _TOKEN)
    else:
        given_length, masked_token = _monte_carlo(exact, probs.log().to("cpu"), num_sentences, seed)
    # H(x) = H(|x|) + H(x | |x|), and the first term is exact: the error is the second one's.
    sentence = dataclasses.replace(given_length, value=length.value + given_length.value)
    return Entropy(sentence=sentence, length=length, given_length=given_length, masked_token=masked_token)


def _monte_carlo(
    language: ExactLanguage, log_length_probs: torch.Tensor, num_sentences: int, seed: int
) -> tuple[Estimate, Estimate]:
    """Return estimates of H(x | length) and of the entropy of a masked token."""
    generator = seeds.generator(seed, "entropy")
    given_length, masked = [], []
    for first in range(0, num_sentences, _CHUNK):
        tokens, lengths, _ = language.sample(min(_CHUNK, num_sentences - first), generator=generator)
        counts = lengths.to("cpu")
        log_probs = language.log_prob(tokens, lengths).to("cpu", torch.float64)
        # -log Pr(x | length). A grammar's `log_prob` includes the length; the other languages have one, of
        # log-probability 0. No probability is above 1, but where a length has one sentence, rounding may put it there.
        given_length.append((log_length_probs[counts] - log_probs).clamp(min=0))
        entropies = language.conditional_entropy(tokens, lengths).to("cpu", torch.float64)
        # The mean over the positions that may be masked: at all others the entropy is 0.
        masked.append(entropies.sum(dim=1) / maskable(Sentences(tokens, lengths), language).sum(dim=1).cpu())
    return _mean(torch.cat(given_length), _SENTENCE), _mean(torch.cat(masked), _TOKEN)


def _mean(values: torch.Tensor, unit: str) -> Estimate:
    n, mean = len(values), float(values.mean())
    stderr = float(values.std()) / math.sqrt(n)
    return Estimate(
        value=mean,
        stderr=stderr if stderr > _ROUNDING * abs(mean) else 0.0,
        samples=n,
        unit=unit,
        num_predictions=n,
        method="Monte Carlo: mean over drawn sentences",
    )


def _exact(value: float, unit: str) -> Estimate:
    # A rounded entropy may be just below 0; adding 0.0 turns -0.0 into 0.0.
    return Estimate(value=max(value, 0.0) + 0.0, stderr=0.0, samples=0, unit=unit, num_predictions=0, method=EXACT)
