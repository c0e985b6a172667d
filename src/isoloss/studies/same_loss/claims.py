"""What this study says to each claim: which two checkpoints are compared, and when a comparison would mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from isoloss.report.claims import Claim, ClaimResult, judged, not_tested, read_claims
from isoloss.studies.comparison import compared, difference, title
from isoloss.studies.same_loss.design import main_run, sgd_run
from isoloss.studies.same_loss.results import Results

Judge = Callable[[Claim, Results], ClaimResult]


def judge_all(results: Results) -> tuple[ClaimResult, ...]:
    """Return the result of every claim in claims.toml, in its order."""
    claims = read_claims(Path(__file__).with_name("claims.toml"))
    return tuple(JUDGES[claim.id](claim, results) for claim in claims)


def _sgd(key: str, *, factor: float = 1.0) -> Judge:
    def judge_sgd(claim: Claim, results: Results) -> ClaimResult:
        pair = results.at(main_run(results.scale)), results.at(sgd_run(results.scale))
        return compared(claim, key, ("AdamW's last", "SGD's last"), [pair], factor=factor)

    return judge_sgd


def _task(which: int, make: Callable[[str], Judge]) -> Judge:
    """A judge of the task at this place of the scale's tasks: 0 is the root, 1 the prefix."""
    return lambda claim, results: make(results.scale.tasks[which])(claim, results)


def _longer(key: str) -> Judge:
    def judge_longer(claim: Claim, results: Results) -> ClaimResult:
        scale, run = results.scale, main_run(results.scale)
        earlier = scale.watched[-1]
        names = (f"step {earlier:,}", f"step {scale.steps:,}")
        return compared(claim, key, names, [(results.at(run, earlier), results.at(run))])

    return judge_longer


def _larger(key: str) -> Judge:
    def judge_larger(claim: Claim, results: Results) -> ClaimResult:
        small, large = results.scale.sizes[-2:]
        pair = results.at(f"adamw-{small}"), results.at(f"adamw-{large}")
        return compared(claim, key, (small, large), [pair])

    return judge_larger


def _lookup(task: str) -> Judge:
    def judge_lookup(claim: Claim, results: Results) -> ClaimResult:
        table, model = results.lookups[task], results.at(main_run(results.scale))
        change = difference(model[task], table)
        explanation = (
            f"{title(task)} of AdamW's last checkpoint against the look-up table. The model's own KL is "
            f"{model['kl']}, the table's is 0."
        )
        ours = {"look-up table": table, "AdamW's last": model[task], "difference": change}
        return judged(claim, change, explanation, ours=ours)

    return judge_lookup


def _out_of_scale(why: str) -> Judge:
    return lambda claim, _: not_tested(claim, why)


JUDGES: Mapping[str, Judge] = {
    "sgd-same-loss": _sgd("kl"),
    "sgd-flatter": _sgd("trace", factor=0.5),
    "sgd-transfer-prefix": _task(1, _sgd),
    "sgd-transfer-root": _task(0, _sgd),
    "longer-transfer-prefix": _task(1, _longer),
    "larger-flatter": _larger("trace"),
    "larger-transfer": _task(1, _larger),
    "lookup-transfer-prefix": _task(1, _lookup),
    "lookup-transfer-root": _task(0, _lookup),
    "adversarial": _out_of_scale("The study algorithms has adversarial runs; this one has none."),
    "regularisation": _out_of_scale(
        "The study algorithms has them, on a grammar; this one has neither, nor BookCorpus."
    ),
}
