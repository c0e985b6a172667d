"""Estimates compared: differences of two checkpoints, means over pre-training seeds, and what they say to a claim."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isoloss.errors import IsolossError
from isoloss.estimate import Estimate
from isoloss.models.sizes import configured_shape, num_parameters
from isoloss.report.claims import Claim, ClaimResult, Verdict, judge, judged, not_tested
from isoloss.runs import Run
from isoloss.studies.design import Experiment

SAME_LOSS_NATS = 0.01  # two models whose KL differs by less, with 95 % confidence, count as of the same loss

Found = Mapping[str, Estimate]  # of one checkpoint: entropy, kl, loss, trace, and each task's accuracy by its name
Pair = tuple[Found, Found]  # what is compared: control and treated, or earlier and later


def read(run: Run, experiment: Experiment, tasks: Sequence[str]) -> dict[int, Found]:
    """Return what was found at each checkpoint of a run, by step; an evaluation that is missing is named.

    Keys are `entropy`, `kl`, `loss` (nats per masked token), `trace`, and the accuracy of each task by its name.
    """
    found: dict[int, Found] = {}
    for step in experiment.measurements[0].steps:
        estimates = dict(evaluation(run, "loss", step))
        estimates["trace"] = evaluation(run, "trace", step)["trace"]
        estimates |= {task: evaluation(run, f"probe-{task}", step)["accuracy"] for task in tasks}
        found[step] = estimates
    return found


def evaluation(run: Run, measure: str, step: int) -> Found:
    """Return an evaluation's estimates by name; one that is missing is an error that names it."""
    found = run.evaluation(measure, step)
    if found is None:
        raise IsolossError(f"{run.path} has no evaluation {measure} at step {step}: run the study first")
    return found.estimates


def row(run: str, group: str, experiment: Experiment, step: int, found: Found, tasks: Sequence[str]) -> dict[str, Any]:
    """Return a checkpoint's row of the table that `isoloss.report.data` takes."""
    config = experiment.config
    assert config.language.kind == "pcfg"
    parameters = num_parameters(
        configured_shape(config.model), config.language.vocab_size + 2, 2**config.language.levels
    )
    cells: dict[str, Any] = {
        "run": run,
        "group": group,
        "size": config.model.size,
        "parameters": parameters,
        "step": step,
        "path": str(Path("..") / "runs" / run / "run.json"),
    }
    for column, key in {"kl_nats": "kl", "trace": "trace", **{f"acc_{task}": task for task in tasks}}.items():
        cells |= {column: found[key].value, f"{column}_stderr": found[key].stderr}
    return cells


def difference(later: Estimate, earlier: Estimate, *, factor: float = 1.0) -> Estimate:
    """Return later - factor * earlier, of accuracies in percentage points, the errors added as if independent.

    Both are measured on the same sentences with the same probes, so their errors are positively correlated and this
    overstates the error of the difference.
    """
    points = later.unit == "accuracy"
    scale = 100 if points else 1
    return Estimate(
        value=scale * (later.value - factor * earlier.value),
        stderr=scale * math.hypot(later.stderr, factor * earlier.stderr),
        samples=min(later.samples, earlier.samples),
        unit="percentage points" if points else later.unit,
        num_inputs=later.num_inputs,
        num_probes=later.num_probes,
        method="difference of two estimates",
    )


def over_seeds(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean over runs of different seeds, with the standard error that their spread shows.

    Each run's own error of measurement is part of the spread where each is measured on sentences of its own.

    Raises:
        IsolossError: Fewer than two runs show no spread.

    Example:
        >>> runs = [Estimate(value=v, stderr=0.1, samples=9, unit="nats", num_inputs=9, method="m") for v in (1, 2, 3)]
        >>> print(over_seeds(runs))
        2.00 ± 0.58 nats
    """
    if len(estimates) < 2:
        raise IsolossError("a mean over seeds needs at least two runs")
    values = [estimate.value for estimate in estimates]
    return Estimate(
        value=statistics.fmean(values),
        stderr=statistics.stdev(values) / math.sqrt(len(values)),
        samples=len(values),
        unit=estimates[0].unit,
        num_inputs=sum(estimate.num_inputs for estimate in estimates),
        num_probes=estimates[0].num_probes,
        method="mean over pre-training seeds",
    )


def mean(estimates: Sequence[Estimate]) -> Estimate:
    """Return the mean over seeds, or the only estimate."""
    return estimates[0] if len(estimates) == 1 else over_seeds(estimates)


def change(pairs: Sequence[Pair], key: str, *, factor: float = 1.0) -> Estimate:
    """Return second - factor * first of the estimate `key`: of one pair, or the mean over pairs of different seeds."""
    return mean([difference(second[key], first[key], factor=factor) for first, second in pairs])


def same_loss(pairs: Sequence[Pair]) -> bool:
    """Whether the two models of every pair have the same loss: their KL differs by less than 0.01 nats, at 95 %."""
    moved = [difference(second["kl"], first["kl"]) for first, second in pairs]
    return all(judge(kl, "no change within", SAME_LOSS_NATS) is Verdict.SHOWN for kl in moved)


def compared(
    claim: Claim, key: str, names: tuple[str, str], pairs: Sequence[Pair], *, factor: float = 1.0, where: str = ""
) -> ClaimResult:
    """Judge a claim by second - factor * first of the estimate `key`; one about other things needs the same loss.

    Args:
        claim: The claim.
        key: Which estimate.
        names: What first and second are called.
        pairs: One pair, or a pair for each seed.
        factor: Of the first.
        where: A sentence on which checkpoints these are, for the explanation.
    """
    first, second = names
    if key != "kl" and not same_loss(pairs):
        moves = ", ".join(str(difference(b["kl"], a["kl"])) for a, b in pairs)
        return not_tested(
            claim,
            f"The two models are not shown to have the same loss, to within {SAME_LOSS_NATS} nats: the KL of {second} "
            f"minus that of {first} is {moves}{' for each seed' if len(pairs) > 1 else ''}. {where}".rstrip(),
        )
    moved = change(pairs, key, factor=factor)
    what = "difference" if factor == 1 else f"{second} minus {factor:g} times {first}"
    explanation = f"{title(key)} of {second} against {first}{_spread(moved, pairs)}. {where}".rstrip()
    ours = {name: mean([pair[i][key] for pair in pairs]) for i, name in enumerate(names)}
    ours[what] = moved
    return judged(claim, moved, explanation, ours=ours)


def _spread(moved: Estimate, pairs: Sequence[Pair]) -> str:
    """How many standard errors a mean over few seeds is from zero: its 95 % interval is much wider than two."""
    if len(pairs) == 1:
        return ""
    far = f": {abs(moved.value) / moved.stderr:.1f} standard errors" if moved.stderr > 0 else ""
    return f", paired over {len(pairs)} seeds{far}"


def title(key: str) -> str:
    """What an estimate is called in a sentence."""
    return {"kl": "KL to the truth", "trace": "Trace of the Fisher"}.get(key, f"Probe accuracy, {key},")
