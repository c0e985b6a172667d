"""What this study says to each claim: which checkpoints are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from isoloss.report.claims import Claim, ClaimResult, read_claims
from isoloss.studies.algorithms.design import ALGORITHMS, BASELINE
from isoloss.studies.algorithms.results import Results
from isoloss.studies.comparison import compared

Judge = Callable[[Claim, Results], ClaimResult]


def judge_all(results: Results) -> tuple[ClaimResult, ...]:
    """Return the result of every claim in claims.toml, in its order."""
    claims = read_claims(Path(__file__).with_name("claims.toml"))
    return tuple(JUDGES[claim.id](claim, results) for claim in claims)


def _names(algorithm: str) -> tuple[str, str]:
    return ALGORITHMS[BASELINE], ALGORITHMS[algorithm]


def _last_kl(algorithm: str) -> Judge:
    """A judge of the KL at the last checkpoints, where the number of steps is the same."""

    def judge_last(claim: Claim, results: Results) -> ClaimResult:
        pairs = list(zip(results.last(BASELINE), results.last(algorithm), strict=True))
        return compared(claim, "kl", _names(algorithm), pairs, where="Both after the same number of steps.")

    return judge_last


def _trace(algorithm: str) -> Judge:
    """A judge of the trace at the same loss."""
    return lambda claim, results: _matched(claim, results, algorithm, "trace")


def _task(algorithm: str, which: int = 0) -> Judge:
    """A judge of the task at this place of the scale's tasks, at the same loss."""
    return lambda claim, results: _matched(claim, results, algorithm, results.scale.tasks[which])


def _matched(claim: Claim, results: Results, algorithm: str, key: str) -> ClaimResult:
    matched = results.matched(algorithm)
    return compared(claim, key, _names(algorithm), matched.pairs, where=matched.sentence(algorithm))


JUDGES: Mapping[str, Judge] = {
    "adversarial-same-loss": _last_kl("adversarial"),
    "adversarial-task": _task("adversarial"),
    "adversarial-root": _task("adversarial", 1),
    "adversarial-sharper": _trace("adversarial"),
    "regularised-same-loss": _last_kl("regularised"),
    "regularised-flatter": _trace("regularised"),
    "regularised-task": _task("regularised"),
    "sam-flatter": _trace("sam"),
    "sam-task": _task("sam"),
    "exact-sharper": _trace("exact"),
    "exact-task": _task("exact"),
    "penalty-flatter": _trace("fisher-penalty"),
    "penalty-task": _task("fisher-penalty"),
}
