"""Checkpoints compared: paired differences, means over pre-training seeds, and what they say to a claim."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError
from isoloss.models.sizes import configured_shape, num_parameters
from isoloss.report.claims import Answer, Claim, ClaimResult, Verdict, judge, judged, not_tested, read_claims
from isoloss.runs import Run
from isoloss.statistics.estimate import Estimate
from isoloss.studies.design import Experiment
from isoloss.transfer.compare import mcnemar, paired_difference

SAME_LOSS_NATS = 0.01  # two models whose KL differs by less, with 95 % confidence, count as of the same loss


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An estimate of one checkpoint, and what each example adds to it.

    Attributes:
        estimate: The estimate.
        on: What it was measured on: the inputs' SHA-256 and the settings. Two that agree in this are paired.
        examples: `influence`, or `predictions` and `labels`; see `isoloss.runs.Run.examples`.
    """

    estimate: Estimate
    on: str
    examples: Mapping[str, np.ndarray[Any, Any]] = field(compare=False)

    @property
    def correct(self) -> torch.Tensor:
        """(S, n) bool: whether each probe classifies each test example correctly."""
        return torch.from_numpy(self.examples["predictions"] == self.examples["labels"])

    @property
    def votes(self) -> torch.Tensor:
        """(n,) bool: whether the class that most probes give to an example is the right one."""
        predictions = torch.from_numpy(self.examples["predictions"].astype(np.int64))
        return predictions.mode(dim=0).values == torch.from_numpy(self.examples["labels"].astype(np.int64))


Found = Mapping[str, Measured]  # of one checkpoint: entropy, kl, loss, trace, and each task's accuracy by its name
Pair = tuple[Found, Found]  # what is compared: control and treated, or earlier and later


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """Two models that claims compare.

    Attributes:
        names: What the first and the second are called.
        pairs: One pair of checkpoints, or a pair for each seed.
        where: A sentence on which checkpoints these are, for the explanation.
        case: Which of several contrasts of the same kind.
        at_same_loss: Whether a claim about anything but the loss needs the two to have the same.
    """

    names: tuple[str, str]
    pairs: Sequence[Pair]
    where: str = ""
    case: str = ""
    at_same_loss: bool = True


def read(run: Run, experiment: Experiment, tasks: Sequence[str]) -> dict[int, Found]:
    """Return what was found at each checkpoint of a run, by step; an evaluation that is missing is named.

    Keys are `entropy`, `kl`, `loss` (nats per masked token), `trace`, and the accuracy of each task by its name.
    """
    found: dict[int, Found] = {}
    for step in experiment.measurements[0].steps:
        at = {**measured(run, "loss", step), **measured(run, "trace", step)}
        found[step] = at | {task: measured(run, f"probe-{task}", step)["accuracy"] for task in tasks}
    return found


def measured(run: Run, measure: str, step: int) -> dict[str, Measured]:
    """Return what an evaluation found, by name; one that is missing is an error that names it."""
    found = run.evaluation(measure, step)
    if found is None:
        raise IsolossError(f"{run.path} has no evaluation {measure} at step {step}: run the study first")
    arrays = run.examples(found)
    on = f"{found.inputs} {json.dumps(dict(found.settings), sort_keys=True)}"
    return {
        name: Measured(
            estimate=estimate,
            on=on,
            examples={k.removeprefix(f"{name}."): v for k, v in arrays.items() if k.startswith(f"{name}.")},
        )
        for name, estimate in found.estimates.items()
    }


def row(run: str, group: str, experiment: Experiment, step: int, found: Found, tasks: Sequence[str]) -> dict[str, Any]:
    """Return a checkpoint's row of the table that `isoloss.report.data` takes."""
    config = experiment.config
    parameters = num_parameters(configured_shape(config.model), *_model_sizes(config.language))
    cells: dict[str, Any] = {
        "run": run,
        "group": group,
        "size": config.model.size,
        "parameters": parameters,
        "step": step,
        "path": str(Path("..") / "runs" / run / "run.json"),
    }
    for column, key in {"kl_nats": "kl", "trace": "trace", **{f"acc_{task}": task for task in tasks}}.items():
        cells |= {column: found[key].estimate.value, f"{column}_stderr": found[key].estimate.stderr}
    return cells


@functools.cache
def _model_sizes(language: LanguageConfig) -> tuple[int, int]:
    """Return how many ids a model of the language knows, and its longest sentence."""
    made = language.build()
    return made.model_vocab_size, made.max_length


# --- differences -----------------------------------------------------------------------------------------------------


def difference(later: Measured, earlier: Measured, *, factor: float = 1.0) -> Estimate:
    """Return later - factor * earlier, with the error of the difference on the same examples.

    Accuracies become percentage points, with the error of `isoloss.transfer.compare.paired_difference` over test
    examples and probes. For all else the squared error is the sum of (psi_i - factor psi'_i)^2 over n (n - 1), with
    psi_i what example i adds to the first and psi'_i what it adds to the second.

    Raises:
        IsolossError: The two were not measured on the same examples under the same settings.
    """
    if later.on != earlier.on or later.examples.keys() != earlier.examples.keys() or not later.examples:
        raise IsolossError(
            "two evaluations were not made on the same examples under the same settings, so that their difference has "
            "no paired error: measure both checkpoints again with one version of isoloss"
        )
    if "predictions" in later.examples:
        if factor != 1:
            raise IsolossError(f"an accuracy is compared as it is, not with a factor of {factor:g}")
        moved = paired_difference(later.correct, earlier.correct)
        return dataclasses.replace(moved, value=100 * moved.value, stderr=100 * moved.stderr, unit="percentage points")
    psi, other = (one.examples["influence"].astype(np.float64) for one in (later, earlier))
    return _paired(later.estimate.value - factor * earlier.estimate.value, psi - factor * other, later.estimate)


def ratio(later: Measured, earlier: Measured) -> Estimate:
    """Return later over earlier, both above 0 and of the same examples, with the paired error by the delta method.

    The error is that of psi_i / b - (a / b) psi'_i / b, for the ratio a / b.

    Raises:
        IsolossError: As for `difference`.
    """
    difference(later, earlier)  # refuses what is not paired
    a, b = later.estimate.value, earlier.estimate.value
    psi, other = (one.examples["influence"].astype(np.float64) for one in (later, earlier))
    return dataclasses.replace(_paired(a / b, (psi - a / b * other) / b, later.estimate), unit="times")


def _paired(value: float, influence: np.ndarray[Any, Any], like: Estimate) -> Estimate:
    n = len(influence)
    return Estimate(
        value=value,
        stderr=math.sqrt(float(np.square(influence).sum()) / (n * (n - 1))),
        samples=n,
        unit=like.unit,
        num_inputs=like.num_inputs,
        num_probes=like.num_probes,
        method="paired difference",
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
    """Return second - factor * first of the estimate `key`: of one pair, or the mean over pairs of different seeds.

    The error of one pair is that of the difference on the same examples; over several seeds it is that of the mean of
    the differences, which are paired by seed.
    """
    return mean([difference(second[key], first[key], factor=factor) for first, second in pairs])


def same_loss(pairs: Sequence[Pair]) -> bool:
    """Whether the two models of every pair have the same loss: their KL differs by less than 0.01 nats, at 95 %."""
    moved = [difference(second["kl"], first["kl"]) for first, second in pairs]
    return all(judge(kl, "no change within", SAME_LOSS_NATS) is Verdict.SHOWN for kl in moved)


# --- claims ----------------------------------------------------------------------------------------------------------


def answer_all(
    path: Path, contrasts: Mapping[str, Sequence[Contrast]], measures: Mapping[str, Mapping[str, str]]
) -> tuple[ClaimResult, ...]:
    """Return the result of every claim of a file, in its order: each tested on every contrast and every measure.

    Args:
        path: The claims.
        contrasts: The pairs of models, by what claims call them in `compares`.
        measures: The keys of the estimates to compare, by case (a task, say; empty where there is one), by what claims
            call them in `measures`.
    """
    return tuple(
        ClaimResult(
            claim=claim,
            answers=(not_tested(claim.not_tested),)
            if claim.not_tested
            else tuple(
                answer
                for contrast in contrasts[claim.compares]
                for answer in answers(claim, contrast, measures[claim.measures])
            ),
        )
        for claim in read_claims(path)
    )


def common_measures(tasks: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the measures that every study has, for `answer_all`; `transfer` is all of the tasks."""
    return {"kl": {"": "kl"}, "trace": {"": "trace"}, "transfer": {task: task for task in tasks}}


def answers(claim: Claim, contrast: Contrast, keys: Mapping[str, str]) -> list[Answer]:
    """Return the answers to a claim for one contrast: by second - factor * first of each estimate.

    A claim that is not about the loss needs two models of the same loss, unless the contrast says otherwise.

    Args:
        claim: The claim.
        contrast: What is compared.
        keys: Which estimates, by case.
    """
    (first, second), pairs = contrast.names, contrast.pairs
    if contrast.at_same_loss and "kl" not in keys.values() and not same_loss(pairs):
        moves = ", ".join(str(difference(b["kl"], a["kl"])) for a, b in pairs)
        why = (
            f"The two models are not shown to have the same loss, to within {SAME_LOSS_NATS} nats: the KL of {second} "
            f"minus that of {first} is {moves}{' for each seed' if len(pairs) > 1 else ''}. {contrast.where}"
        )
        return [not_tested(why.rstrip(), case=contrast.case)]
    return [_answer(claim, contrast, key, case) for case, key in keys.items()]


def _answer(claim: Claim, contrast: Contrast, key: str, case: str) -> Answer:
    (first, second), pairs, factor = contrast.names, contrast.pairs, claim.factor
    moved = change(pairs, key, factor=factor)
    explanation = f"{title(key)}: {second} against {first}, {_paired_over(moved, pairs, key)}. {contrast.where}"
    ours = {name: mean([pair[i][key].estimate for pair in pairs]) for i, name in enumerate(contrast.names)}
    ours["difference" if factor == 1 else f"{second} minus {factor:g} times {first}"] = moved
    named = f"{case} ({contrast.case})" if case and contrast.case else case or contrast.case
    return judged(claim, moved, explanation.rstrip(), ours=ours, case=named)


def _paired_over(moved: Estimate, pairs: Sequence[Pair], key: str) -> str:
    """What the error of a difference is over, and how far that is from zero.

    Over seeds it says how many standard errors, as the 95 % interval of a mean over few seeds is much wider than two;
    of one pair of probes it gives McNemar's test.
    """
    if len(pairs) > 1:
        far = f", {abs(moved.value) / moved.stderr:.1f} standard errors" if moved.stderr > 0 else ""
        return f"paired over {len(pairs)} seeds{far}"
    first, second = (found[key] for found in pairs[0])
    if "predictions" not in first.examples:
        return f"paired over {len(first.examples['influence']):,} sentences"
    probes, examples = first.examples["predictions"].shape
    test = mcnemar(second.votes, first.votes)
    return (
        f"paired over {examples:,} test sentences and {probes} probes; McNemar's test on the probes' plurality "
        f"votes: {test.only_first} sentences gained, {test.only_second} lost, p = {test.p_value:.2g}"
    )


def title(key: str) -> str:
    """What an estimate is called in a sentence."""
    if key.startswith("trace-in-"):
        return "Trace of the Fisher in one architecture"
    return {"kl": "KL to the truth", "trace": "Trace of the Fisher"}.get(key, f"Probe accuracy, {key}")
