"""Claims, and the checkpoints of studies with known differences, light enough to make thousands of."""

import dataclasses
from types import SimpleNamespace

import numpy as np

from isoloss.statistics.estimate import Estimate
from isoloss.statistics.significance import equivalence
from isoloss.studies.claims import Answer, Claim, ClaimResult, Contrast, Verdict, in_sequence, judge_claims, p_value
from isoloss.studies.results import CheckpointEstimate
from known_estimates import ON, estimate

INFLUENCE = {"influence": np.zeros(2, np.float32)}  # measured without error: pairs alone differ


def measured(value):
    return CheckpointEstimate.of(estimate(float(value), 0.0), **ON, examples=INFLUENCE)


BEFORE = dict.fromkeys(["kl", *(f"m{i}" for i in range(20))], measured(0.0))


def claim(i, direction="increase", **more):
    known = {"id": f"c{i}", "statement": "", "of": contrast, "measures": {"": f"m{i}"}}
    return Claim(direction=direction, **known | more)


def contrast(moves, loss=0.0, **more):
    """Pairs in which measure i moves by `moves[i]`, (measures, pairs), and the loss by `loss` (pairs,)."""
    moves = np.asarray(moves)
    losses = np.broadcast_to(loss, moves.shape[1:])
    pairs = []
    for own, kl in zip(moves.T, losses, strict=True):
        pairs.append((BEFORE, {"kl": measured(kl), **{f"m{i}": measured(move) for i, move in enumerate(own)}}))
    return Contrast(names=("before", "after"), pairs=pairs, **more)


def in_order(claims, effects, stderr=1.0, samples=30, tests=None):
    """The results of claims with one case each, whose differences are these, judged in their order."""
    results = []
    for claim, value, error in zip(claims, effects, np.broadcast_to(stderr, len(effects)), strict=True):
        known = {"samples": samples, "unit": "points", "num_predictions": 9, "method": "known"}
        difference = Estimate(value=float(value), stderr=float(error), **known)
        within = claim.no_effect_within
        answer = Answer(
            case="",
            numbers={},
            verdict=Verdict.NOT_TESTED,
            explanation="",
            role=claim.role,
            difference=difference,
            p_value=p_value(difference, claim.direction, claim.margin),
            p_no_effect=None if within is None else equivalence(difference, within).p_value,
        )
        results.append(ClaimResult(claim=claim, answers=(answer,)))
    planned = sum(claim.role == "secondary" for claim in claims)
    return [result.answer() for result in in_sequence(results, planned if tests is None else tests)]


def results_of(claims, *contrasts, **more):
    """The result of each claim about these contrasts."""
    asked = [dataclasses.replace(each, of=lambda _: contrasts) for each in claims]
    return judge_claims(asked, SimpleNamespace(scale=None, replicates={}), **more)


def answers(claims, one, **more):
    """The one answer to each claim."""
    return [result.answer() for result in results_of(claims, one, **more)]
