"""The study brackets: the checkpoints that its claims compare, its tables and its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from isoloss.paper.bracket_study.design import (
    BASE,
    GROUPS,
    MISSED_KL,
    SCALES,
    SHAM,
    TASKS,
    Model,
    Replicate,
    StudySize,
)
from isoloss.report.html import Card
from isoloss.statistics.clusters import cluster_mean
from isoloss.statistics.estimate import Estimate
from isoloss.studies.answer import card_of
from isoloss.studies.claims import ClaimResult, Contrast
from isoloss.studies.results import Checkpoint, Results
from isoloss.studies.spec import Study
from isoloss.studies.summary import SummaryTable

OVER = "mean ± standard error over seeds"
# what the names of a model's contrasts end with
ENDINGS: Mapping[Model, str] = {"attention": "", "transformer": ", transformer"}
FLATNESS: Mapping[Model, Mapping[str, str]] = {
    "attention": {"trace": "parts-trace", "minimal-trace": "parts-minimal-trace"},
    "transformer": {"trace": "trace", "minimal-trace": "minimal-trace"},
}
PARTS = ("attention-trace", "neurons-trace", "neurons-minimal-trace", "cancellation", "bound-ratio")


# --- what is compared ------------------------------------------------------------------------------------------------


def arms_of(scale: StudySize, model: Model) -> Mapping[str, tuple[str, str]]:
    """Return the arms that claims compare, the control first, by what claims.toml calls them."""
    strongest = f"{scale.penalties[-1]:g}"
    first = scale.dosed(model).get(scale.doses[0], "") if scale.doses else ""
    return {
        "label noise": ("no-noise", "label-noise"),
        "first phase": ("no-noise", first),
        "penalty": (SHAM, f"penalty-{strongest}"),
        "reward": (SHAM, f"reward-{strongest}"),
        "sham": (BASE, SHAM),
        "adamw": ("no-noise", "adamw"),
        "sam": ("no-noise", "sam"),
    }


def contrasts(results: Results) -> Mapping[str, Sequence[Contrast]]:
    """Return the pairs of checkpoints that are compared, by what claims.toml calls them; each case is a T."""
    scale: StudySize = results.scale
    made: dict[str, list[Contrast]] = {}
    for model, ending in ENDINGS.items():
        for name, arms in arms_of(scale, model).items():
            made[name + ending] = []
            for length in scale.lengths.get(model, ()):
                units = [
                    u for u in scale.units(model, length) if all(u.run(arm) in results.experiments for arm in arms)
                ]
                if units:
                    made[name + ending].append(_contrast(results, units, arms, f"T = {length}"))
    return made


def _contrast(results: Results, units: Sequence[Replicate], arms: tuple[str, str], case: str) -> Contrast:
    """Return the pairs of two arms, without those of which one missed the target: they are not at one loss."""
    pairs = {unit: (results.at(unit.run(arms[0])), results.at(unit.run(arms[1]))) for unit in units}
    kept = {unit: pair for unit, pair in pairs.items() if not any(missed(one) for one in pair)}
    left_out = f"Left out at {case}: {len(pairs) - len(kept)} of {len(pairs)} pairs, as a run missed the target."
    return Contrast(
        names=(title_of(arms[0]), title_of(arms[1])),
        pairs=list(kept.values()),
        clusters=clusters_of(list(kept)),
        clusters_are="seeds",
        case=case,
        where=left_out if len(kept) < len(pairs) else "",
        not_tested=left_out if 2 * len(kept) < len(pairs) or len(kept) < 2 else "",
    )


def missed(end: Checkpoint) -> bool:
    """Return whether the run of a last checkpoint missed the target."""
    return end["kl"].value > MISSED_KL


def contrast_cases(scale: StudySize) -> Mapping[str, Sequence[str]]:
    """Return the lengths of the sentences, by contrast."""
    return {
        name + ending: [f"T = {length}" for length in scale.lengths.get(model, ())]
        for model, ending in ENDINGS.items()
        for name in arms_of(scale, model)
    }


def measures(scale: StudySize) -> Mapping[str, Mapping[str, str]]:
    """Return what is measured of two models, by what claims.toml calls it."""
    return {
        "flatness": FLATNESS["attention"],
        "transformer's flatness": FLATNESS["transformer"],
        "|g|": {f"|g|, {shots} strings": f"r2-abs-g-{shots}" for shots in (8, 16)},
        "g": {"g, 16 strings": "r2-g-16"},
        "kl": {"": "kl"},
    }


def clusters_of(units: Sequence[Replicate]) -> list[str]:
    """Return the seed of each unit, as the clusters that errors are over."""
    return [f"seed {unit.seed}" for unit in units]


def title_of(arm: str) -> str:
    """Return what an arm is called, with its dose.

    Example:
        >>> title_of("label-noise-500"), title_of("penalty-0.003"), title_of("sham")
        ('SGD (sampled labels), 500 steps', 'Flatness penalty, 0.003', 'Sham penalty')
    """
    if arm in GROUPS:
        return GROUPS[arm]
    group, _, dose = arm.rpartition("-")
    return f"{GROUPS[group]}, {dose}{' steps' if group == 'label-noise' else ''}"


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(results: Results) -> tuple[SummaryTable, ...]:
    """Return a table of all arms and one of the baselines for each model and T."""
    scale: StudySize = results.scale
    return tuple(
        table
        for model, lengths in scale.lengths.items()
        for length in lengths
        for table in (_arms(results, model, length), _baselines(results, model, length))
    )


def _arms(results: Results, model: Model, length: int) -> SummaryTable:
    flatness = (*FLATNESS[model].values(), *(PARTS if model == "attention" else ()))
    keys = ("kl", *flatness, "effective-rank", *(f"r2-{task}-{shots}" for task in ("g", "abs-g") for shots in (8, 16)))
    rows = [
        (
            (title_of(arm), len(_all_ends(results, model, length, arm)) - len(ends)),
            {key: mean(ends, key) for key in keys},
        )
        for arm in _names(results.scale, model)
        if len(ends := ends_of(results, model, length, arm)) > 1
    ]
    caption = (
        "Every arm ends in the same cooldown, AdamW on exact labels until the KL is at most 1e-5 nats. Runs that "
        f"missed this target, with a KL above {MISSED_KL:g}, are left out. r2-g-8 is R² of a ridge "
        "regression for g, fitted on the features of 8 strings; r2-abs-g-8 is of |g|. "
    )
    if model == "attention":
        caption += (
            "The attention's part of the trace is of Q and K, the neurons' of u and V. The cancellation ratio "
            "is 1 where no two active neurons disagree; the bound ratio is the trace over the lower bound in the proof "
            "of Theorem 5.1."
        )
    title = f"{_called(model, length)}, all arms after the cooldown, {OVER}"
    return SummaryTable(f"arms-{model}-{length}", title, ("arm", "left out"), rows, caption)


def _baselines(results: Results, model: Model, length: int) -> SummaryTable:
    scale: StudySize = results.scale
    units = scale.units(model, length)
    untrained = {unit: results.at(unit.run(BASE), 0) for unit in units if unit.run(BASE) in results.experiments}
    of_arms = {title_of(arm): ends_of(results, model, length, arm) for arm in (BASE, "no-noise", "label-noise")}
    kinds = {"Tokens": ("tokens-", untrained), "Untrained model": ("", untrained)}
    kinds |= {title: ("", ends) for title, ends in of_arms.items()}
    shots = [n for n in (4, 8, 16, 32, 64) if n < 2**length]
    rows = []
    for kind, task in TASKS.items():
        for title, (prefix, ends) in kinds.items():
            if len(ends) > 1:
                cells = {f"{n} strings": mean(ends, f"{prefix}{kind}-{n}") for n in shots}
                rows.append(((task, title), cells))
    caption = (
        f"R² of ridge regressions on few of all {2**length} strings of {length} brackets, tested on the others. The "
        "Bayes-optimal R² is 1, as every task is a function of g."
    )
    title = f"{_called(model, length)}, probes beside the tokens and the untrained model, {OVER}"
    return SummaryTable(f"probes-{model}-{length}", title, ("task", "features"), rows, caption)


def _names(scale: StudySize, model: Model) -> list[str]:
    """Return the arms that a model has, in the order of the table."""
    unit = scale.units(model, scale.lengths[model][0])[0]
    names = [BASE, "no-noise", *list(scale.dosed(model).values())[1:], "adamw", "sam", *scale.weighted(model).values()]
    return [name for name in names if unit.run(name) in scale.experiments]


def _called(model: Model, length: int) -> str:
    return f"{'the model of section 5' if model == 'attention' else 'a transformer'}, T = {length}"


def ends_of(results: Results, model: Model, length: int, arm: str) -> dict[Replicate, Checkpoint]:
    """Return the last checkpoint of an arm where it reached the target, by unit."""
    return {unit: end for unit, end in _all_ends(results, model, length, arm).items() if not missed(end)}


def _all_ends(results: Results, model: Model, length: int, arm: str) -> dict[Replicate, Checkpoint]:
    scale: StudySize = results.scale
    units = scale.units(model, length)
    return {unit: results.at(unit.run(arm)) for unit in units if unit.run(arm) in results.experiments}


def mean(ends: Mapping[Replicate, Checkpoint], key: str) -> Estimate:
    """Return the mean of an estimate over seeds."""
    found = [end[key] for end in ends.values()]
    return cluster_mean([each.value for each in found], clusters_of(list(ends)), unit=found[0].unit)


# --- the answer ------------------------------------------------------------------------------------------------------


def answer(claims: Sequence[ClaimResult], results: Results) -> list[Card]:
    """Return whether flattening helps transfer: by label noise, by a penalty, by SAM, which the demo does not have."""
    by_id = {result.claim.id: result for result in claims}
    made = contrasts(results)

    def card(label: str, result: ClaimResult) -> Card:
        found = card_of(label, result)
        left_out = [each.where for each in made[result.claim.compares] if each.where]
        return dataclasses.replace(found, detail=". ".join([found.detail, *left_out]))

    return [
        card("Does label noise help transfer?", by_id["noise-imbalance"]),
        card("Does a penalty on the trace help?", by_id["penalty-imbalance"]),
        card("Does SAM, which flattens too?", by_id["sam-imbalance"])
        if made["sam"]
        else card("Does label noise flatten?", by_id["noise-flatter"]),
    ]


STUDY = Study(
    name="brackets",
    scales=SCALES,
    title="In the paper's bracket model, does a flatter model transfer better?",
    lead=(
        "The attention model of the paper's section 5 is trained to tell a hidden bracket: with SGD on sampled labels, "
        "whose noise should flatten it, with SGD on exact labels, or with a penalty on the trace. Flatness: trace of "
        "the Fisher information, smaller is flatter; the minimal trace is its minimum over rescalings that change no "
        "prediction. Transfer: R² of a ridge regression on the model's features for |g|, the imbalance of a string, "
        "fitted on eight strings.",
        "The hidden bracket is flipped with probability 0.1, so that the smallest possible loss is above 0 and the "
        "noise of sampled labels lasts. Exact labels are the true conditional distribution. g is the number of > minus "
        "the number of <: a probe on the raw tokens learns g, but not |g|. Features are the activations of the 64 "
        "neurons; a transformer's are the last hidden state of the last token. All inputs are enumerated: loss and "
        "traces have no sampling error.",
        "Every arm goes on from one base and ends in the same cooldown, on exact labels, until its KL to the truth "
        "is at most 1e-5 nats on drawn sentences. A pair is left out if one of its runs ends above "
        f"{MISSED_KL:g} nats, as after a collapse under label noise: what is found holds for runs that come back to "
        "the loss. A penalty on the trace of the neurons flattens directly; with a negative weight it is a reward that "
        "sharpens; the sham has weight 0. A one-layer transformer goes through the main arms too. Standard errors are "
        "over seeds, which decide initial weights, sentences, labels and the strings of the probes.",
    ),
    claims=Path(__file__).with_name("claims.toml"),
    contrasts=contrasts,
    contrast_cases=contrast_cases,
    measures=measures,
    tables=tables,
    answer=answer,
    page="isoloss.paper.bracket_study.page:parts",
    first_page_blocks=4,
    block_name="seeds",
)
