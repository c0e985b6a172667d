"""What this study says to each claim: which checkpoints are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from isoloss.paper.algorithms.design import ALGORITHMS, BASELINE
from isoloss.paper.algorithms.results import Results
from isoloss.report.claims import ClaimResult
from isoloss.studies.comparison import Contrast, answer_all, common_measures


def judge_all(results: Results) -> tuple[ClaimResult, ...]:
    """Return the result of every claim in claims.toml, in its order."""
    measures = common_measures(results.scale.tasks)
    return answer_all(Path(__file__).with_name("claims.toml"), contrasts(results), measures)


def contrasts(results: Results) -> Mapping[str, Sequence[Contrast]]:
    """Return the pairs of checkpoints that are compared, by what claims.toml calls them.

    Each algorithm is compared with the baseline where their losses are nearest, and, as `<algorithm>, last step`, after
    the same number of steps.
    """
    found = {}
    spoiled = f" The adversary's own task is {results.scale.tasks[0]}."
    for algorithm in ALGORITHMS:
        names = ALGORITHMS[BASELINE], ALGORITHMS[algorithm]
        matched = results.matched(algorithm)
        where = matched.sentence(algorithm) + (spoiled if algorithm == "adversarial" else "")
        last = list(zip(results.last(BASELINE), results.last(algorithm), strict=True))
        found[algorithm] = [Contrast(names=names, pairs=matched.pairs, where=where)]
        found[f"{algorithm}, last step"] = [
            Contrast(names=names, pairs=last, where="Both after the same number of steps.")
        ]
    return found
