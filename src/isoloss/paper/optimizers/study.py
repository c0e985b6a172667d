"""The study optimizers: what its claims compare, its tables, and which measure predicts which outcome."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from isoloss.errors import IsolossError
from isoloss.paper.optimizers.design import ADAMW, ARMS, BRANCHES, OPTIMIZERS, SCALES, STABLE, StudySize
from isoloss.paper.same_loss.design import Replicate, grammars_of
from isoloss.paper.same_loss.study import factor
from isoloss.report.html import Card
from isoloss.statistics.clusters import cluster_mean
from isoloss.statistics.correlation import Correlation, correlation
from isoloss.statistics.estimate import Estimate, number
from isoloss.statistics.significance import holm
from isoloss.studies.claims import Claim, ClaimResult, Contrast
from isoloss.studies.results import Pair, Results, change
from isoloss.studies.spec import Study
from isoloss.studies.summary import SummaryTable

# what may predict, as logarithms, and what it may predict
FLATNESS: Mapping[str, str] = {
    "trace": "trace",
    "minimal-trace": "minimal trace",
    "directional-sharpness": "directional sharpness",
}
MATRIX_OPTIMIZERS = ("muon", "soap")  # which the correlations may rest on
OVER = "mean ± standard error over grammars"


def outcomes(scale: StudySize) -> Mapping[str, str]:
    """Return what the measures of flatness may predict: what each outcome is called, by its key."""
    return {
        **{key: f"accuracy on {task}" for task, key in zip(scale.tasks, scale.probes.values(), strict=True)},
        scale.last_layer: "accuracy at spans",
        "int4-rise": "rise at 4 bits",
        "noise-sharpness": "rise under noise",
        "effective-rank": "effective rank",
    }


def against_adamw(results: Results, *, arm: str) -> Contrast:
    """Return an arm against AdamW."""
    scale: StudySize = results.scale
    units = complete(results)
    return Contrast(
        names=(ARMS[ADAMW], ARMS[arm]),
        pairs=pairs_of(results, units, arm),
        clusters=grammars_of(units),
        where=f"Both where the KL has come down to {scale.target_kl:g}.",
    )


def complete(results: Results) -> list[Replicate]:
    """Return the grammars that have results for all arms."""
    scale: StudySize = results.scale
    return [unit for unit in scale.units if all(unit.run(arm) in results.experiments for arm in ARMS)]


def pairs_of(results: Results, units: Sequence[Replicate], arm: str) -> list[Pair]:
    """Return the last checkpoints of AdamW and of an arm, by grammar."""
    return [(results.at(unit.run(ADAMW)), results.at(unit.run(arm))) for unit in units]


def transfer(scale: StudySize) -> Mapping[str, str]:
    """Return the probes of both tasks."""
    return scale.probes


def trained_task(scale: StudySize) -> Mapping[str, str]:
    """Return the probe of the task that helper and adversary are trained with."""
    return dict(itertools.islice(scale.probes.items(), 1))


# What the study asks of each optimizer, stated before it runs. Directions are of the difference arm - AdamW. Which
# measure predicts which outcome is asked in `associations`, of every pair in the same way; its rule is stated there.
#
# The paper says that of models of one loss the flatter one transfers better, and that SGD and regularizers such as SAM
# find flatter ones. So each optimizer is asked both, in the same words, and the absence of an effect is tested too. The
# smallest effect of interest is 1 percentage point.
#
# Whether the target is reached is checked on a sample of sentences, every ten steps; losses count as the same within
# 0.002 nats, a tenth of the target. In a pilot on grammar 9001, few-shot accuracy changed by 1.9 points while AdamW's
# KL came down by 0.009 nats: so by 0.4 points within the margin. Helper and adversary move the accuracy by 5 points and
# more, and have a margin of 0.006 nats.
#
# A first draw, grammars 1400 to 1407, was abandoned after training, before any outcome was looked at: with half as many
# steps, a decay of 600 and schedule-free AdamW at the others' learning rate, 15 of 80 runs did not reach the target.
_WORDS = {  # what is flatter than AdamW's model, and what transfers better
    "sgd": ("SGD after AdamW makes a flatter model than AdamW", "SGD's model transfers better than AdamW's"),
    "muon": ("Muon makes a flatter model than AdamW", "Muon's model transfers better than AdamW's"),
    "soap": ("SOAP makes a flatter model than AdamW", "SOAP's model transfers better than AdamW's"),
    "schedule-free": (
        "schedule-free AdamW makes a flatter model than AdamW",
        "the model of schedule-free AdamW transfers better than AdamW's",
    ),
    "sam": ("SAM makes a flatter model than AdamW", "SAM's model transfers better than AdamW's"),
    "wsd": (
        "AdamW with a decaying rate makes a flatter model than AdamW at a constant rate",
        "the model of a decaying rate transfers better than that of a constant rate",
    ),
    "lawa": (
        "averaging weights (LAWA) makes a flatter model than AdamW",
        "the model of averaged weights (LAWA) transfers better than AdamW's",
    ),
}
CLAIMS = (
    Claim(
        id="helper",
        statement="At the same loss, a model that was trained with the task transfers better to it",
        role="positive control",
        of=functools.partial(against_adamw, arm="helper"),
        measures=trained_task,
        direction="increase",
        loss_margin=0.006,
    ),
    Claim(
        id="adversary",
        statement="At the same loss, a model that was trained against the task transfers worse to it",
        of=functools.partial(against_adamw, arm="adversary"),
        measures=trained_task,
        direction="decrease",
        loss_margin=0.006,
    ),
    *(
        claim
        for arm, (flatter, better) in _WORDS.items()
        for of in [functools.partial(against_adamw, arm=arm)]
        for claim in (
            Claim(
                id=f"{arm}-flatter",
                statement=f"At the same loss, {flatter}",
                of=of,
                measures="flatness",
                direction="decrease",
            ),
            Claim(
                id=f"{arm}-transfer",
                statement=f"At the same loss, {better}",
                of=of,
                measures=transfer,
                direction="increase",
                no_effect_within=1.0,
            ),
        )
    ),
)


# --- what predicts what ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Association:
    """The correlation of a measure of flatness with an outcome, over optimizers."""

    measure: str  # its key
    outcome: str  # its key
    correlation: Correlation
    p_adjusted: float  # for the number of pairs of measure and outcome

    @property
    def verdict(self) -> str:
        """Whether it is shown."""
        return "shown" if self.p_adjusted < 0.05 else "not shown"


def associations(results: Results, without: Collection[str] = ()) -> list[Association]:
    """Return the partial correlations of all measures with all outcomes given the KL, within grammars.

    The models are those of all optimizers but `without`; helper and adversary are left out. An undefined correlation is
    left out, but still counts as a test in Holm's method.
    """
    scale: StudySize = results.scale
    units = complete(results)
    ends = [(unit, results.at(unit.run(arm))) for unit in units for arm in OPTIMIZERS if arm not in without]
    clusters = grammars_of([unit for unit, _ in ends])
    kl = [end["kl"].value for _, end in ends]
    found: dict[tuple[str, str], Correlation] = {}
    for measure, outcome in (pairs := list(itertools.product(FLATNESS, outcomes(scale)))):
        # too few grammars, or a value that is not above 0
        try:
            x, y = [math.log(end[measure].value) for _, end in ends], [end[outcome].value for _, end in ends]
            found[measure, outcome] = correlation(x, y, clusters, given={"KL": kl}, within=clusters, resamples=100)
        except (IsolossError, ValueError):
            continue
    if not found:
        return []
    by_name = {f"{measure}/{outcome}": each.p_value for (measure, outcome), each in found.items()}
    adjusted = holm(by_name, tests=len(pairs))
    return [Association(*pair, each, adjusted["/".join(pair)]) for pair, each in found.items()]


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(results: Results) -> Sequence[SummaryTable]:
    """Return the tables: all arms, their differences from AdamW, the layers, and what predicts what."""
    scale: StudySize = results.scale
    units = complete(results)
    if len(units) < 2:
        return ()
    clusters = grammars_of(units)
    keys = ("kl", *FLATNESS, *outcomes(scale))
    ends = {arm: [results.at(unit.run(arm)) for unit in units] for arm in ARMS}
    steps = {arm: [max(results.of_run(unit.run(arm))) for unit in units] for arm in (STABLE, *ARMS)}
    layers = [f"layer-{layer}" for layer in range(scale.layers + 1)]

    def means(arm: str, wanted: Iterable[str]) -> dict[str, Estimate]:
        return {
            key: cluster_mean([end[key].value for end in ends[arm]], clusters, unit=ends[arm][0][key].unit)
            for key in wanted
        }

    arms = []
    for arm, title in ARMS.items():
        # a branch has the steps of the run that it begins from, too
        begun = steps[STABLE] if arm in BRANCHES else [0] * len(units)
        all_steps = [a + b for a, b in zip(begun, steps[arm], strict=True)]
        above = sum(end["kl"].value > 1.1 * scale.target_kl for end in ends[arm])
        arms.append(((title, f"{min(all_steps):,} to {max(all_steps):,}", above), means(arm, keys)))
    differences = [((title,), _differences(results, units, arm, keys)) for arm, title in ARMS.items() if arm != ADAMW]
    spans = [((title,), means(arm, [*layers, "bayes", "majority"])) for arm, title in ARMS.items()]
    return (
        *_association_tables(results),
        SummaryTable(
            "arms",
            f"all arms, {OVER}",
            ("arm", "steps", "above the target"),
            arms,
            f"Every arm ends where its KL on validation sentences is at most {scale.target_kl:g}, or after "
            f"{scale.max_steps:,} steps ({scale.wsd_steps:,} of the decaying rate). The last label counts runs whose "
            "KL on the evaluation's sentences is more than 10 % above the target.",
        ),
        SummaryTable(
            "differences",
            f"arms vs. AdamW, {OVER}",
            ("arm",),
            differences,
            "Paired by grammar: arm minus AdamW; for traces and sharpness the geometric mean of arm / AdamW.",
        ),
        SummaryTable(
            "spans",
            f"probes of the symbols of level {scale.span_level} at their spans, {OVER}",
            ("arm",),
            spans,
            "From the state of the span's last token; layer-0 are the embeddings. bayes is the Bayes-optimal "
            "accuracy given the sentence up to there, majority that of the most common symbol.",
        ),
    )


def _association_tables(results: Results) -> list[SummaryTable]:
    """Return the table of what predicts what; none where there are too few grammars."""
    scale: StudySize = results.scale
    others = {(each.measure, each.outcome): each.correlation for each in associations(results, MATRIX_OPTIMIZERS)}
    rows = [
        (
            (FLATNESS[each.measure], outcomes(scale)[each.outcome], f"{each.p_adjusted:.2g}", each.verdict),
            {
                "correlation": each.correlation.estimate(),
                "found with 80 % power": _exact(each.correlation.detectable()),
                "without Muon and SOAP": others[each.measure, each.outcome].estimate(),
            },
        )
        for each in associations(results)
        if (each.measure, each.outcome) in others
    ]
    caption = (
        f"Partial correlation of the logarithm of each measure with each outcome given the KL, within grammars, across "
        f"{len(OPTIMIZERS)} optimizers (without helper and adversary). Errors by the jackknife over grammars. p is "
        "adjusted by Holm's method for all pairs. Found with 80 % power: the smallest true correlation at p < 0.05, "
        "unadjusted. Without Muon and SOAP, whose traces and ranks are the largest: asked after the first draw was "
        "seen, and not judged."
    )
    labels = ("measure", "outcome", "p", "verdict")
    return [SummaryTable("associations", "which measure predicts which outcome", labels, rows, caption)] if rows else []


def _differences(results: Results, units: Sequence[Replicate], arm: str, keys: Sequence[str]) -> dict[str, Estimate]:
    pairs, clusters = pairs_of(results, units, arm), grammars_of(units)
    return {
        key: factor(pairs, key, clusters) if key in FLATNESS else change(pairs, key, clusters=clusters) for key in keys
    }


def _exact(value: float) -> Estimate:
    return Estimate(value=value, stderr=0.0, samples=1, unit="correlation", num_predictions=0, method="power")


# --- the answer ------------------------------------------------------------------------------------------------------


def answer(claims: Sequence[ClaimResult], results: Results) -> list[Card]:
    """Return what predicts transfer, what predicts robustness, and what the effective rank."""
    scale: StudySize = results.scale
    found = associations(results)
    names = outcomes(scale)
    questions = {
        "What predicts transfer?": scale.accuracies,
        "What predicts robustness?": ("int4-rise", "noise-sharpness"),
        "What predicts the effective rank?": ("effective-rank",),
    }
    others = associations(results, MATRIX_OPTIMIZERS)
    return [_card(question, keys, found, others, names) for question, keys in questions.items()]


def _card(
    question: str,
    keys: Collection[str],
    every: Sequence[Association],
    others: Sequence[Association],
    names: Mapping[str, str],
) -> Card:
    """Return the answer to what predicts some outcomes, with the largest correlation beside that of `others`."""
    found = [one for one in every if one.outcome in keys]
    if not found:
        return Card(label=question, value="Not tested", detail="too few grammars")
    shown = [one for one in found if one.verdict == "shown"]
    if not shown:
        return Card(label=question, value=f"Nothing is shown, of {len(found)} pairs", tone="unclear")
    best = max(shown, key=lambda one: abs(one.correlation.value))
    way = "higher" if best.correlation.value > 0 else "lower"
    estimates = "; ".join(
        f"{FLATNESS[one.measure]} and {names[one.outcome]} {number(one.correlation.estimate())}" for one in shown
    )
    without = [
        f". Without Muon and SOAP the largest is {number(one.correlation.estimate())}"
        for one in others
        if (one.measure, one.outcome) == (best.measure, best.outcome)
    ]
    return Card(
        label=question,
        value=f"{FLATNESS[best.measure].capitalize()}: the sharper, the {way} the {names[best.outcome]}",
        detail=f"correlations shown, {len(shown)} of {len(found)}: {estimates}{''.join(without)}",
        tone="good",
    )


STUDY = Study(
    name="optimizers",
    scales=SCALES,
    title="At one loss, which measure of flatness predicts which outcome?",
    lead=(
        "Small causal language models (Llama) on grammars with roughly Zipfian token frequencies, trained by eight "
        "optimizers until the KL to the true conditionals is the same. Measures: the trace of the Fisher information, "
        "its minimum over rescalings of the weights that change no prediction, and the curvature along the optimizer's "
        "own next update (directional sharpness).",
        "Outcomes: few-shot probes of two tasks, probes of the grammar's symbols at their spans, the rise of the loss "
        "when weights are rounded to 4 bits or get Gaussian noise, and the effective rank of the features. Helper and "
        "adversary are trained with the first task and show that its probe can see a difference.",
        "The question is asked of every pair of measure and outcome in the same way: does their correlation across "
        "optimizers, adjusted for the remaining differences in KL, differ from 0?",
    ),
    claims=CLAIMS,
    loss_margin=0.002,
    verdicts_at=("laptop",),
    tables=tables,
    answer=answer,
    page="isoloss.paper.optimizers.page:parts",
    first_page_blocks=3,
    block_name="grammars",
)
