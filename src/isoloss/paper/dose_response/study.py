"""The study dose-response: the checkpoints that its claims compare, its tables and its answer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from isoloss.paper.dose_response.design import (
    ARMS,
    BASE,
    CONTROL,
    DOSES,
    HELPER,
    NOISES,
    SAM,
    SCALES,
    SHAM,
    StudySize,
)
from isoloss.paper.same_loss import pilot
from isoloss.paper.same_loss.design import Replicate, grammars_of
from isoloss.paper.same_loss.study import factor, flatter_card
from isoloss.report.html import Card
from isoloss.statistics.clusters import cluster_mean, slope_within
from isoloss.statistics.estimate import Estimate
from isoloss.studies.answer import card_of
from isoloss.studies.claims import ClaimResult, Contrast
from isoloss.studies.results import Pair, Results, change
from isoloss.studies.spec import Study
from isoloss.studies.summary import SummaryTable

PILOT = Path(__file__).with_name("pilot.toml")
TRACES = ("trace", "minimal-trace")
FEATURES = ("effective-rank", "effective-dimension", "cka-truth")
OVER = "mean ± standard error over grammars"


def contrasts(results: Results) -> Mapping[str, Sequence[Contrast]]:
    """Return the pairs of checkpoints that are compared, by what claims.toml calls them: each arm with its control.

    The pair of a grammar and seed has the same base.
    """
    scale: StudySize = results.scale
    units = replicates(results)
    return {
        arm: [
            Contrast(
                names=(scale.titles[control_of(arm)], scale.titles[arm]),
                pairs=pairs_of(results, units, arm),
                clusters=grammars_of(units),
                where=f"Both where the cooldown reached a KL of {scale.target_kl:g}.",
                slopes=pilot.slopes(scale.size, path=PILOT),
            )
        ]
        for arm in (*DOSES, *NOISES, SAM, HELPER)
    }


def control_of(arm: str) -> str:
    """Return what an arm is compared with: the sham, whose sentences are the same, or for the sham AdamW alone."""
    return CONTROL if arm == SHAM else SHAM


def replicates(results: Results) -> list[Replicate]:
    """Return the units that have results for all arms."""
    scale: StudySize = results.scale
    return [unit for unit in scale.units if all(unit.run(arm) in results.experiments for arm in (BASE, *ARMS))]


def pairs_of(results: Results, units: Sequence[Replicate], arm: str) -> list[Pair]:
    """Return the last checkpoints of an arm's control and of the arm, by unit."""
    return [(results.at(unit.run(control_of(arm))), results.at(unit.run(arm))) for unit in units]


def measures(scale: StudySize) -> Mapping[str, Mapping[str, str]]:
    """Return what can be measured of two models, by what claims.toml calls it."""
    prefixes = {name: key for name, key in scale.probes.items() if not name.startswith(scale.pair)}
    fewest = dict(itertools.islice(prefixes.items(), len(scale.tasks)))
    return {
        "kl": {"": "kl"},
        "flatness": {key: key for key in TRACES},
        "transfer": prefixes,
        "transfer from fewest examples": fewest,
        "transfer to the helper's task": dict(itertools.islice(fewest.items(), 1)),
        **{task: {name: key for name, key in scale.probes.items() if name.startswith(task)} for task in scale.pair},
        **{key: {"": key} for key in FEATURES},
    }


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(results: Results) -> Sequence[SummaryTable]:
    """Return the tables: all arms, and their differences from their controls."""
    scale: StudySize = results.scale
    units = replicates(results)
    if len({unit.grammar for unit in units}) < 2:
        return ()
    clusters = grammars_of(units)
    keys = ("kl", *TRACES, *FEATURES, *scale.probes.values())
    arms, differences = [], []
    for arm in ARMS:
        ends = [results.at(unit.run(arm)) for unit in units]
        label = (scale.titles[arm], sum(end["kl"].value > 1.1 * scale.target_kl for end in ends))
        arms.append((label, {key: _mean([end[key].value for end in ends], clusters, ends[0][key]) for key in keys}))
    untrained = [results.at(unit.run(BASE), 0) for unit in units]
    for arm in (*DOSES, *NOISES, SAM, HELPER):
        pairs = pairs_of(results, units, arm)
        names = (scale.titles[arm], scale.titles[control_of(arm)])
        differences.append((names, {key: _change(pairs, key, clusters) for key in keys}))
    probes = {
        key: _mean([end[key].value for end in untrained], clusters, untrained[0][key]) for key in scale.probes.values()
    }
    return (
        SummaryTable(
            "arms",
            f"all arms, {OVER}",
            ("arm", "above the target"),
            arms,
            f"Every arm ends where its cooldown reaches a KL of {scale.target_kl:g} on validation sentences, or after "
            f"{scale.cooldown_steps:,} steps; those whose exact KL is higher by more than a tenth are counted. "
            f"Probes are tested on every sentence of the language.",
        ),
        SummaryTable(
            "differences",
            f"arms vs. controls, {OVER}",
            ("arm", "control"),
            differences,
            "Paired by grammar and seed: arm minus control; traces: arm over control, as geometric means.",
        ),
        SummaryTable(
            "slopes",
            "slopes of accuracies on the KL, mean ± standard error over grammars",
            ("accuracy",),
            [((key,), {"slope": _slope(results, units, key)}) for key in scale.probes.values()],
            f"From the base, at a KL of {scale.base_kl:g}, to the sham. Differences "
            "are adjusted to the same loss by the slopes of the scale pilot (pilot.toml).",
        ),
        SummaryTable("untrained", f"the untrained model, {OVER}", ("model",), [(("Untrained",), probes)]),
    )


def _slope(results: Results, units: Sequence[Replicate], key: str) -> Estimate:
    ends = [(unit, results.at(unit.run(arm))) for unit in units for arm in (BASE, SHAM)]
    accuracies, losses = [100 * end[key].value for _, end in ends], [end["kl"].value for _, end in ends]
    return slope_within(accuracies, losses, grammars_of([unit for unit, _ in ends]), unit=pilot.UNIT)


def _mean(values: Sequence[float], clusters: Sequence[str], like: Estimate) -> Estimate:
    return cluster_mean(values, clusters, unit=like.unit)


def _change(pairs: Sequence[Pair], key: str, clusters: Sequence[str]) -> Estimate:
    return factor(pairs, key, clusters) if key in TRACES else change(pairs, key, clusters=clusters)


# --- the answer ------------------------------------------------------------------------------------------------------


def answer(claims: Sequence[ClaimResult], results: Results) -> list[Card]:
    """Return whether the penalty flattens, whether few-shot accuracy responds, and whether the features' rank does."""
    by_id = {result.claim.id: result for result in claims}
    units = replicates(results)
    pairs = pairs_of(results, units, by_id["flatter"].claim.compares)
    return [
        flatter_card("Does the penalty flatten?", by_id["flatter"], pairs, grammars_of(units)),
        card_of("Does the flatter model transfer better?", by_id["transfer"]),
        card_of("Is the effective rank of its features lower?", by_id["rank"]),
    ]


STUDY = Study(
    name="dose-response",
    scales=SCALES,
    title="At one loss, does a flatter model transfer better, and a sharper one worse?",
    lead=(
        "Small masked language models that fit their grammar almost perfectly are made flatter, or sharper, by a "
        "penalty on the trace of the Fisher information, and are then trained to one KL to the truth. Transfer: "
        "accuracy of a linear probe on 30 or 100 examples, tested on every sentence. The task prefix-2 is the most "
        "likely symbol of the grammar above the first two tokens, prefix-4 the one above all four.",
        "Every arm goes on from one base. The sham has a penalty of weight 0; SGD on sampled labels (label noise) and "
        "SAM flatten in other ways; the helper is trained with a downstream task and shows that the probe can see a "
        "difference. The minimal trace is the trace's minimum over rescalings of the weights that change no "
        "prediction. Effective rank (RankMe) and effective dimension (participation ratio) count the directions of the "
        "features; CKA compares them with the true conditionals.",
        "Two tasks have a known relation to pre-training. What follows the first two tokens depends on them only "
        "through its distribution. needed-2 divides the beginnings by this distribution; spare-2 divides pairs of "
        "beginnings whose distributions are nearly equal.",
    ),
    claims=Path(__file__).with_name("claims.toml"),
    contrasts=contrasts,
    measures=measures,
    tables=tables,
    answer=answer,
    page="isoloss.paper.dose_response.page:parts",
    first_page_blocks=3,
    block_name="grammars",
)
