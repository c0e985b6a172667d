"""How uncertain a language is: the entropy of its sentences and of one masked token, exact where a closed form exists.

All entropies are in nats. Elsewhere they are means over drawn sentences of exact probabilities, with a standard error.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.lab.languages.api import ExactLanguage, Language, Sentences
from isoloss.lab.languages.pcfg.grammar import Grammar
from isoloss.statistics.estimate import Estimate
from isoloss.text.masking import maskable

EXACT = "exact"
_CHUNK = 4096  # sentences drawn together; part of what a seed stands for
_ROUNDING = 1e-13  # a spread this much smaller than the value is that of rounding
_SENTENCE, _TOKEN = "nats per sentence", "nats per masked token"  # units

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Entropy:
    """The entropies of a language. An exact one has a standard error of 0 and the method `exact`.

    Attributes:
        sentence: H(x) = -E log Pr(x) of a sentence x with its length, which is `length` + `given_length`.
        length: `H(|x|)`, the entropy of the number of tokens; 0 where all sentences have the same. Always exact.
        given_length: `H(x | |x|)`, the entropy of the tokens once their number is known.
        masked_token: The entropy of a token given all others and the length, averaged over the positions of a sentence
            and then over sentences: what a perfect model loses where one token of each sentence is masked.
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

    Where a language has a closed form (`closed_form_entropies`), as brackets and Dyck languages do, it is exact. In
    general a grammar is ambiguous, the entropy of its derivations is more than that of its sentences, and both
    entropies are Monte-Carlo estimates; so are those of a hidden Markov model and of a teacher. They are computed in
    float64, a teacher's in its own dtype.

    Args:
        language: An exact language; another is an `IsolossError`.
        num_sentences: Sentences that a Monte-Carlo estimate is the mean over, at least 2.
        seed: Decides them.

    Example:
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
    sentence = dataclasses.replace(given_length, value=length.value + given_length.value)
    return Entropy(sentence=sentence, length=length, given_length=given_length, masked_token=masked_token)


def derivation_sums(grammar: Grammar, max_length: int) -> tuple[Floats, Floats]:
    r"""Return P and S, each (max_length + 1,): over the derivations d of each length, sum p(d) and -sum p(d) log p(d).

    By length, with r the probability of a rule and the sums over A's rules and the splits u + v = w,

        P(A, w) = sum r P(B, u) P(C, v)
        S(A, w) = sum r (S(B, u) P(C, v) + P(B, u) S(C, v)) - r log r P(B, u) P(C, v)

    and likewise for tokens; rules A -> B make both a linear system over the symbols of one length, which (I - U)^-1
    solves, U the matrix of their probabilities. Given w, a derivation of the start symbol has the entropy
    S(w) / P(w) + log P(w). It is the entropy of the sentences where each has one derivation, and else more.

    Example:
        >>> from isoloss.lab.languages.pcfg.grammar import parse_grammar
        >>> derivation_sums(parse_grammar("S A A 1\nA a 0.5\nA b 0.5"), 2)[1] / math.log(2)
        array([0., 0., 2.])
    """
    size = len(grammar.symbols)
    unary = np.zeros((size, size))
    unary[tuple(grammar.unary.T)] = grammar.unary_probs
    closure = np.linalg.inv(np.eye(size) - unary)
    unary_terms = entropy_terms(unary)
    owner, token_probs = grammar.emission[:, 0], grammar.emission_probs
    a, b, c = grammar.binary.T
    r, own_terms = grammar.binary_probs, entropy_terms(grammar.binary_probs)
    p, s = np.zeros((size, max_length + 1)), np.zeros((size, max_length + 1))
    for width in range(1, max_length + 1):
        left, right = slice(1, width), slice(width - 1, 0, -1)
        pairs = np.einsum("ru,ru->r", p[b, left], p[c, right])
        inner = np.einsum("ru,ru->r", s[b, left], p[c, right]) + np.einsum("ru,ru->r", p[b, left], s[c, right])
        own = np.bincount(a, weights=r * pairs, minlength=size)
        own_sums = np.bincount(a, weights=r * inner + own_terms * pairs, minlength=size)
        if width == 1:
            own += np.bincount(owner, weights=token_probs, minlength=size)
            own_sums += np.bincount(owner, weights=entropy_terms(token_probs), minlength=size)
        p[:, width] = closure @ own
        s[:, width] = closure @ (own_sums + unary_terms @ p[:, width])
    return p[0], s[0]


def entropy_terms(probs: Floats) -> Floats:
    """Return -p log p, 0 at 0."""
    return -probs * np.log(np.where(probs > 0, probs, 1))


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
        given_length.append(log_length_probs[counts] - log_probs)
        entropies = language.conditional_entropy(tokens, lengths).to("cpu", torch.float64)
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
    return Estimate(value=max(value, 0.0) + 0.0, stderr=0.0, samples=0, unit=unit, num_predictions=0, method=EXACT)
