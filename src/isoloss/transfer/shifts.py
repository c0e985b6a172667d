"""Languages near another one, for transfer out of distribution: its rules, some of their probabilities drawn anew."""

from __future__ import annotations

import dataclasses
import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.languages.hmm.language import HMM
from isoloss.languages.pcfg.language import PCFG

AnyLanguage = TypeVar("AnyLanguage", PCFG, HMM)
Floats = npt.NDArray[np.float64]


def redraw(language: AnyLanguage, *, share: float, seed: int) -> AnyLanguage:
    r"""Return a language with the rules of `language`, of which some symbols or states have other probabilities.

    What is possible stays possible and nothing else becomes so. Of a share of the symbols that have a choice, drawn
    without replacement, the probabilities are drawn anew from the flat Dirichlet distribution, those of binary rules,
    rules to one symbol and tokens each for themselves, so that a symbol stops as often as before and a random levelled
    grammar keeps its lengths. Of a hidden Markov model the rows of `transition` and of `emission` of a share of the
    states, each over what has a probability above 0.

    Args:
        language: A grammar or a hidden Markov model.
        share: Share of the symbols or states, above 0 and at most 1, rounded up to whole ones.
        seed: Decides which, and the probabilities; the stream is `"redraw"`.

    Raises:
        IsolossError: The share is out of range, the language is another, or nothing has a choice.

    Example:
        >>> language = PCFG.from_text("S A A 1\nA a 0.5\nA b 0.5")
        >>> redraw(language, share=1.0, seed=0).grammar.emission_probs.round(3)
        array([0.836, 0.164])
    """
    if not 0 < share <= 1:
        raise IsolossError(f"the share is {share}; it must be above 0 and at most 1")
    if not isinstance(language, PCFG | HMM):
        raise IsolossError(f"a grammar or a hidden Markov model has rules to draw anew, and {language!r} is neither")
    rng = np.random.default_rng(seeds.derive(seed, "redraw"))
    if isinstance(language, PCFG):
        grammar = language.grammar
        tables = {kind: getattr(grammar, kind)[:, 0] for kind in ("binary", "unary", "emission")}
        counts = {kind: np.bincount(owner, minlength=len(grammar.symbols)) for kind, owner in tables.items()}
        chosen = _chosen(np.flatnonzero(np.any([count > 1 for count in counts.values()], axis=0)), share, rng)
        drawn = {}
        for kind, owner in tables.items():
            probs = getattr(grammar, f"{kind}_probs").copy()
            for symbol in chosen:
                own = owner == symbol
                probs[own] = _drawn(probs[own], rng)
            probs.flags.writeable = False
            drawn[f"{kind}_probs"] = probs
        return PCFG(dataclasses.replace(grammar, **drawn), max_length=language.max_length)
    transition, emission = language.transition.copy(), language.emission.copy()
    has_choice = np.any([(table > 0).sum(axis=1) > 1 for table in (transition, emission)], axis=0)
    for state in _chosen(np.flatnonzero(has_choice), share, rng):
        for table in (transition, emission):
            own = table[state] > 0
            table[state, own] = _drawn(table[state, own], rng)
    return HMM(language.initial, transition, emission, language.max_length, vocabulary=language.vocabulary)


def _chosen(candidates: npt.NDArray[np.int64], share: float, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    if not len(candidates):
        raise IsolossError("no symbol or state of this language has a choice, so there is nothing to draw anew")
    return np.sort(rng.permutation(candidates)[: math.ceil(share * len(candidates))])


def _drawn(probs: Floats, rng: np.random.Generator) -> Floats:
    """Return other probabilities of the same sum; one alone stays."""
    if len(probs) < 2:
        return probs
    drawn: Floats = probs.sum() * rng.dirichlet(np.ones(len(probs)))
    return drawn
