"""The page of the study optimizers: figures, and how it was made."""

from __future__ import annotations

import polars as pl

from isoloss.lab.training.algorithms.config import AdversarialConfig
from isoloss.paper.optimizers.design import ADAMW, ARMS, OPTIMIZERS, StudySize
from isoloss.paper.optimizers.study import FLATNESS, associations, complete, outcomes, pairs_of
from isoloss.paper.same_loss.design import grammars_of
from isoloss.paper.same_loss.study import factor, factor_ends
from isoloss.report import charts
from isoloss.report.data import MINIMAL_TRACE, Column, Style
from isoloss.report.intervals import Interval, IntervalPanel, intervals
from isoloss.report.study_page import Figure
from isoloss.studies.page import PageParts
from isoloss.studies.results import Results, change


def parts(results: Results) -> PageParts:
    """Return what the page shows besides tables and claims."""
    return PageParts(figures=_figures(results), settings=_settings(results.scale))


def _figures(results: Results) -> list[Figure]:
    if not (found := associations(results)):
        return []
    names = outcomes(results.scale)
    correlations = [
        Interval(
            row=names[each.outcome],
            series=FLATNESS[each.measure],
            value=each.correlation.value,
            low=each.correlation.interval95[0],
            high=each.correlation.interval95[1],
            text=f"{each.correlation.value:+.2f}, {each.verdict}",
        )
        for each in found
    ]
    ends = _ends(results)
    return [
        Figure(
            name="associations",
            title="Which measure predicts which outcome",
            chart=intervals(
                [IntervalPanel(title="Correlation across optimizers, given the KL", intervals=correlations)],
                list(names.values()),
                note="Lines: 95 % confidence intervals over grammars, not adjusted for the number of pairs",
            ),
            caption="Within grammars, without helper and adversary. Right of 0: the sharper, the higher the outcome; "
            "for accuracies, that is against what the paper finds. The table has the verdicts, and the correlations "
            "without Muon and SOAP.",
        ),
        Figure(
            name="arms",
            title="Every optimizer vs. AdamW, at one loss",
            chart=intervals(
                _panels(results),
                [title for arm, title in OPTIMIZERS.items() if arm != ADAMW],
                note="Lines: 95 % confidence intervals over grammars, not adjusted for the number of optimizers",
            ),
            caption="Paired by grammar: the factors by which the measures of flatness differ from AdamW's, and the "
            "differences of accuracies. Helper and adversary are in the tables.",
        ),
        Figure(
            name="outcomes",
            title="Outcomes by minimal trace",
            chart=charts.scatter(
                ends, [(MINIMAL_TRACE, _column(results.scale, key)) for key in names], style=Style.of(ends)
            ),
            caption="The last checkpoint of every arm and grammar. Grammars differ more than optimizers do, so the "
            "correlations are taken within grammars.",
        ),
    ]


def _column(scale: StudySize, key: str) -> Column:
    name = outcomes(scale)[key]
    title = name[0].upper() + name[1:]
    if key in scale.accuracies:
        return Column(key, title, "%", percent=True)
    return Column(key, title, "directions" if key == "effective-rank" else "nats per token")


def _panels(results: Results) -> list[IntervalPanel]:
    units, names = complete(results), outcomes(results.scale)
    clusters = grammars_of(units)
    flatness, transfer = [], []
    for arm, title in OPTIMIZERS.items():
        if arm == ADAMW:
            continue
        pairs = pairs_of(results, units, arm)
        for key, name in FLATNESS.items():
            ratio = factor(pairs, key, clusters)
            low, high = factor_ends(ratio)
            flatness.append(Interval(row=title, series=name, value=ratio.value, low=low, high=high, text=str(ratio)))
        for key in results.scale.accuracies:
            points = change(pairs, key, clusters=clusters)
            low, high = points.ci95
            each = Interval(row=title, series=names[key], value=points.value, low=low, high=high, text=str(points))
            transfer.append(each)
    return [
        IntervalPanel(title="Flatness, factor (left: flatter)", intervals=flatness, reference=1.0, log=True),
        IntervalPanel(title="Accuracy, difference (points)", intervals=transfer),
    ]


def _ends(results: Results) -> pl.DataFrame:
    keys = ["kl", *FLATNESS, *outcomes(results.scale)]
    runs = [unit.run(arm) for unit in complete(results) for arm in ARMS]
    return pl.DataFrame([results.row(run, max(results.of_run(run)), results.at(run), keys) for run in runs])


def _settings(scale: StudySize) -> dict[str, str]:
    weight = AdversarialConfig.weight
    return {
        "Grammars": f"{len(scale.grammars)}, one pre-training seed each; roughly Zipfian token frequencies",
        "Model": f"Llama {scale.size} with {scale.layers} layers, causal; {scale.batch_size} sentences a step",
        "Optimizers": ", ".join(OPTIMIZERS.values()),
        "Learning rate": f"{scale.learning_rate:g}, constant after 50 steps of warm-up, no weight decay; "
        f"{scale.sgd_learning_rate:g} for SGD and {scale.schedule_free_learning_rate:g} for schedule-free AdamW",
        "Branches": f"AdamW runs to a KL of {scale.stable_kl:g} nats. From there AdamW and the decaying rate go on "
        f"with its optimizer's state, SGD with a fresh one. Decay: 1-sqrt planned over {scale.wsd_steps:,} steps",
        "SAM": f"rho {scale.rho:g}; the perturbation is computed on one half of the batch, the gradient on the other",
        "LAWA": "a copy of the weights is kept every 20 steps; the mean of the latest 6 is compared with the target "
        "and measured",
        "Helper, adversary": f"the loss minus λ times the loss of a head for {scale.tasks[0]}, λ = {-weight:g} and "
        f"{weight:g}",
        "End": f"at the first multiple of {scale.validate_every} steps with a KL of at most {scale.target_kl:g} nats "
        f"on 1,024 validation sentences, or after {scale.max_steps:,} steps",
        "Errors": "over grammars, with Student's t",
    }
