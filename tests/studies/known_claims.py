"""Files of claims, and the checkpoints of studies with known differences, light enough to make thousands of."""

import numpy as np

from isoloss.statistics.estimate import Estimate
from isoloss.statistics.significance import equivalence
from isoloss.studies.claims import Answer, Claim, ClaimResult, ClaimsFile, Contrast, Verdict
from isoloss.studies.results import Measured
from isoloss.studies.verdicts import answer_all, in_sequence, p_value
from known_estimates import ON, estimate

INFLUENCE = {"influence": np.zeros(2, np.float32)}  # measured without error: pairs alone differ


def measured(value):
    return Measured.of(estimate(float(value), 0.0), **ON, examples=INFLUENCE)


BEFORE = dict.fromkeys(["kl", *(f"m{i}" for i in range(20))], measured(0.0))


def claims_file(*claims, **more):
    return ClaimsFile(name="claims.toml", sha256="0", claims=claims, **more)


def claim(i, direction="increase", **more):
    known = {"id": f"c{i}", "statement": "", "compares": "sgd", "measures": f"m{i}"}
    return Claim(direction=direction, **known | more)


def contrast(moves, loss=0.0, **more):
    """Pairs in which measure i moves by `moves[i]`, (measures, pairs), and the loss by `loss` (pairs,)."""
    moves = np.asarray(moves)
    losses = np.broadcast_to(loss, moves.shape[1:])
    pairs = []
    for own, kl in zip(moves.T, losses, strict=True):
        pairs.append((BEFORE, {"kl": measured(kl), **{f"m{i}": measured(move) for i, move in enumerate(own)}}))
    return Contrast(names=("before", "after"), pairs=pairs, **more)


def in_order(file, effects, stderr=1.0, samples=30, tests=None):
    """The results of claims with one case each, whose differences are these, judged in their order."""
    results = []
    for claim, value, error in zip(file.claims, effects, np.broadcast_to(stderr, len(effects)), strict=True):
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
    planned = sum(claim.role == "secondary" for claim in file.claims)
    return [result.answer() for result in in_sequence(file, results, planned if tests is None else tests)]


def answers(file, one, **more):
    """The one answer to each claim."""
    measures = {"kl": {"": "kl"}, **{name: {"": name} for name in BEFORE}}
    return [result.answer() for result in answer_all(file, {"sgd": [one]}, measures, **more)]
