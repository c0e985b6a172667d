"""Files of claims, and the checkpoints of studies with known differences, light enough to make thousands of."""

import numpy as np

from isoloss.studies.claims import Claim, ClaimsFile, Contrast
from isoloss.studies.results import Measured
from isoloss.studies.verdicts import answer_all
from known_estimates import ON, estimate

INFLUENCE = {"influence": np.zeros(2, np.float32)}  # measured without error: pairs alone differ


def measured(value):
    return Measured.of(estimate(float(value), 0.0), **ON, examples=INFLUENCE)


BEFORE = dict.fromkeys(["kl", *(f"m{i}" for i in range(20))], measured(0.0))


def claims_file(*claims, **more):
    return ClaimsFile(name="claims.toml", sha256="0", claims=claims, **more)


def claim(i, direction="increase", **more):
    return Claim(id=f"c{i}", statement="", paper="", direction=direction, compares="sgd", measures=f"m{i}", **more)


def contrast(moves, loss=0.0, **more):
    """Pairs in which measure i moves by `moves[i]`, (measures, pairs), and the loss by `loss` (pairs,)."""
    moves = np.asarray(moves)
    losses = np.broadcast_to(loss, moves.shape[1:])
    pairs = []
    for own, kl in zip(moves.T, losses, strict=True):
        pairs.append((BEFORE, {"kl": measured(kl), **{f"m{i}": measured(move) for i, move in enumerate(own)}}))
    return Contrast(names=("before", "after"), pairs=pairs, **more)


def answers(file, one, **more):
    """The one answer to each claim."""
    measures = {"kl": {"": "kl"}, **{name: {"": name} for name in BEFORE}}
    return [result.answer() for result in answer_all(file, {"sgd": [one]}, measures, **more)]
