"""What this study says to each claim: which two checkpoints are compared, and when a comparison would mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from isoloss.estimate import Estimate
from isoloss.report.claims import Claim, ClaimResult, Verdict, judge, judged, not_tested, read_claims
from isoloss.studies.same_loss.design import main_run, sgd_run
from isoloss.studies.same_loss.results import SAME_LOSS_NATS, Results, difference

Judge = Callable[[Claim, Results], ClaimResult]
Found = Mapping[str, Estimate]


def judge_all(results: Results) -> tuple[ClaimResult, ...]:
    """Return the result of every claim in claims.toml, in its order."""
    claims = read_claims(Path(__file__).with_name("claims.toml"))
    return tuple(JUDGES[claim.id](claim, results) for claim in claims)


def _compared(
    claim: Claim, key: str, names: tuple[str, str], pair: tuple[Found, Found], *, factor: float = 1.0
) -> ClaimResult:
    """Judge by later - factor * earlier of the estimate `key`; a claim about other things needs the same loss."""
    (first, second), (earlier, later) = names, pair
    if key != "kl":
        moved = difference(later["kl"], earlier["kl"])
        if judge(moved, "no change within", SAME_LOSS_NATS) is not Verdict.SHOWN:
            return not_tested(
                claim, f"The two models do not have the same loss: the KL of {second} minus that of {first} is {moved}."
            )
    change = difference(later[key], earlier[key], factor=factor)
    ours = {first: earlier[key], second: later[key]}
    what = "difference" if factor == 1 else f"{second} minus {factor:g} times {first}"
    return judged(claim, change, f"{_title(key)} of {second} against {first}; {what} {change}.", ours=ours)


def _title(key: str) -> str:
    return {"kl": "KL to the truth", "trace": "Trace of the Fisher"}.get(key, f"Probe accuracy, {key},")


def _sgd(key: str, *, factor: float = 1.0) -> Judge:
    def judge_sgd(claim: Claim, results: Results) -> ClaimResult:
        pair = results.at(main_run(results.scale)), results.at(sgd_run(results.scale))
        return _compared(claim, key, ("AdamW's last", "SGD's last"), pair, factor=factor)

    return judge_sgd


def _task(which: int, make: Callable[[str], Judge]) -> Judge:
    """A judge of the task at this place of the scale's tasks: 0 is the root, 1 the prefix."""
    return lambda claim, results: make(results.scale.tasks[which])(claim, results)


def _longer(key: str) -> Judge:
    def judge_longer(claim: Claim, results: Results) -> ClaimResult:
        scale, run = results.scale, main_run(results.scale)
        earlier = scale.watched[-1]
        names = (f"step {earlier:,}", f"step {scale.steps:,}")
        return _compared(claim, key, names, (results.at(run, earlier), results.at(run)))

    return judge_longer


def _larger(key: str) -> Judge:
    def judge_larger(claim: Claim, results: Results) -> ClaimResult:
        small, large = results.scale.sizes[-2:]
        return _compared(claim, key, (small, large), (results.at(f"adamw-{small}"), results.at(f"adamw-{large}")))

    return judge_larger


def _lookup(task: str) -> Judge:
    def judge_lookup(claim: Claim, results: Results) -> ClaimResult:
        table, model = results.lookups[task], results.at(main_run(results.scale))
        change = difference(model[task], table)
        explanation = (
            f"Probe accuracy, {task}, of AdamW's last checkpoint against the look-up table; difference {change}. "
            f"The model's own KL is {model['kl']}, the table's is 0."
        )
        return judged(claim, change, explanation, ours={"look-up table": table, "AdamW's last": model[task]})

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
    "adversarial": _out_of_scale("This study has no adversarial run."),
    "regularisation": _out_of_scale("This study pre-trains on a grammar without regularisation, not on BookCorpus."),
}
