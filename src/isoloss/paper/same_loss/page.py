"""The page of the study same-loss: figures, correlations, and how it was made."""

from __future__ import annotations

import math
from collections.abc import Collection

import polars as pl
from markupsafe import Markup

from isoloss.errors import IsolossError
from isoloss.lab.training.algorithms.config import AdversarialConfig
from isoloss.paper.same_loss.design import CONTRASTS, GROUPS, UNTOUCHED, WEIGHT_DECAY, Replicate, StudySize, grammars_of
from isoloss.paper.same_loss.study import factor, factor_ends, last, pairs_of, replicates_with, sizes_expanded
from isoloss.report import charts
from isoloss.report.data import KL, MINIMAL_TRACE, TRACE, Column, Style, accuracy
from isoloss.report.html import IntervalRow, Section, interval_rows
from isoloss.report.intervals import Interval, IntervalPanel, intervals
from isoloss.report.study_page import Figure
from isoloss.statistics.correlation import correlation
from isoloss.statistics.estimate import Estimate
from isoloss.studies.page import PageParts
from isoloss.studies.results import RESCALED, Checkpoint, Results, change

# nats: in correlations, models this close in KL to the untouched arm count as having the same loss. At the steeper end
# of the pilot's slope, this much KL changes the accuracy by 0.5 percentage points
BAND = 2.8e-4
TRAINED_WITH_TASK = ("adversary", "helper")


def parts(results: Results) -> PageParts:
    """Return what the page shows besides tables and claims."""
    return PageParts(figures=_figures(results), sections=[_correlations(results)], settings=_settings(results.scale))


# --- figures ---------------------------------------------------------------------------------------------------------


def _figures(results: Results) -> list[Figure]:
    scale: StudySize = results.scale
    tasks = [accuracy(task) for task in scale.tasks]
    ends = _ends(results)
    figures = []
    if panels := _panels(results):
        figures.append(
            Figure(
                name="arms",
                title="Every arm vs. its control",
                chart=intervals(
                    panels,
                    [_contrast_title(*arms) for arms in CONTRASTS.values()],
                    note="Lines: 95 % confidence intervals over grammars, not adjusted for the number of arms",
                ),
                caption="After the same cooldown, paired by grammar and seed: the difference in KL, the factor by "
                "which each trace changes, and the difference in probe accuracy. If flatness predicted transfer at the "
                "same loss, arms with a smaller trace would transfer better.",
            )
        )
    style = Style.of(ends)
    axes = [(across, task) for task in tasks for across in (KL, TRACE, MINIMAL_TRACE)]
    for task in tasks:
        figures.append(
            Figure(
                name=f"flatness-{task.name}",
                title=f"Loss, flatness and transfer: {task.title.split(', ')[-1]}",
                chart=charts.scatter(ends, [pair for pair in axes if pair[1] is task], style=style),
                caption="The last checkpoint of every arm and grammar: probe accuracy against the KL to the truth, the "
                "trace of the Fisher information and the minimal trace. Compare models of one size only. "
                "Corresponds to the paper's figure 1.",
            )
        )
    by_size = _by_size(results)
    figures.append(
        Figure(
            name="sizes",
            title="Model sizes",
            chart=charts.sizes(by_size, _size_columns(scale), style=Style.of(by_size)),
            caption="Untouched models of every grammar by number of parameters. Raw traces of different widths are not "
            f"comparable; the minimal trace is measured in the architecture of {scale.sizes[-1]}, and projected probes "
            "use the same number of features for every size. Corresponds to the paper's figures 3 and 5.",
        )
    )
    return figures


def _panels(results: Results) -> list[IntervalPanel]:
    """Return the differences between arms and their controls; none where there are too few grammars."""
    scale: StudySize = results.scale
    loss, traces, probes = [], [], []
    for control, arm in CONTRASTS.values():
        units, title = replicates_with(results, control, arm), _contrast_title(control, arm)
        if len(set(clusters := grammars_of(units))) < 2:
            continue
        pairs = pairs_of(results, units, (control, arm))
        loss.append(_interval(title, "KL", change(pairs, "kl", clusters=clusters)))
        for key, column in (("trace", TRACE), ("minimal-trace", MINIMAL_TRACE)):
            traces.append(_factor_interval(title, column.title, factor(pairs, key, clusters)))
        for task, key in scale.probes.items():
            probes.append(_interval(title, task, change(pairs, key, clusters=clusters)))
    # of one grammar there is no error, and so no interval
    if not loss:
        return []
    return [
        IntervalPanel(title="KL, difference (nats per token)", intervals=loss),
        IntervalPanel(title="Trace, factor", intervals=traces, reference=1.0, log=True),
        IntervalPanel(title="Probe accuracy, difference (points)", intervals=probes),
    ]


def _contrast_title(control: str, arm: str) -> str:
    return f"{GROUPS[arm]} − {GROUPS[control]}"


def _interval(row: str, series: str, estimate: Estimate) -> Interval:
    low, high = estimate.ci95
    return Interval(row=row, series=series, value=estimate.value, low=low, high=high, text=str(estimate))


def _factor_interval(row: str, series: str, estimate: Estimate) -> Interval:
    low, high = factor_ends(estimate)
    return Interval(row=row, series=series, value=estimate.value, low=low, high=high, text=str(estimate))


def _ends(results: Results) -> pl.DataFrame:
    scale: StudySize = results.scale
    keys = ["kl", *RESCALED, *scale.probes.values()]
    arms = [*GROUPS, *(size for size in scale.sizes if size != scale.main_size)]
    rows = []
    for arm in arms:
        for unit in replicates_with(results, arm):
            run = unit.run(arm)
            rows.append(results.row(run, results.experiments[run].last_step, last(results, unit, arm), keys))
    return pl.DataFrame(rows)


def _size_columns(scale: StudySize) -> list[Column]:
    raw = Column("trace-own", "Raw trace, not comparable", "nats/token", log=True)
    minimum = Column(scale.expanded_minimum, f"Minimal trace in {scale.sizes[-1]}", "nats/token", log=True)
    task, projected = next(iter(scale.projected_probes.items()))
    return [KL, raw, minimum, Column(projected, f"Projected probe, {task}", "%", percent=True)]


def _by_size(results: Results) -> pl.DataFrame:
    scale: StudySize = results.scale
    keys = [column.name for column in _size_columns(scale)]
    rows = []
    for size in scale.sizes:
        arm = scale.arm_of_size(size)
        for unit in replicates_with(results, arm):
            run, checkpoint = unit.run(arm), sizes_expanded(scale, size, last(results, unit, arm))
            checkpoint = {**checkpoint, "trace-own": checkpoint["trace"]}
            rows.append(results.row(run, results.experiments[run].last_step, checkpoint, keys))
    return pl.DataFrame(rows)


# --- correlations ----------------------------------------------------------------------------------------------------


def _correlations(results: Results) -> Section:
    rows = [
        _correlation(results, column, task, which, left_out)
        for which, left_out in (("all arms", ()), ("without adversary and helper", TRAINED_WITH_TASK))
        for column in (TRACE, MINIMAL_TRACE)
        for task in results.scale.probes
    ]
    note = Markup("<p class=note>{}</p>").format(
        "If flatter models transferred better, it would be negative. Partial correlation of the log trace with probe "
        "accuracy, given the KL, within grammars; intervals by the jackknife over grammars. Models: the last "
        f"checkpoints of the main size whose KL is within {BAND:g} nats of the untouched arm's."
    )
    body = interval_rows(rows, effect="correlation") + note
    return Section(title="Correlation of flatness with transfer", body=body, folded=True)


def _correlation(results: Results, trace: Column, task: str, which: str, left_out: Collection[str]) -> IntervalRow:
    columns: dict[str, list[float]] = {"trace": [], "probe": [], "kl": []}
    clusters: list[str] = []
    within: list[str] = []  # grammars differ more than arms do: without this, the correlation would be between grammars
    for unit in results.scale.units:
        arms = [arm for arm in GROUPS if arm not in left_out and unit.run(arm) in results.experiments]
        ends = [end for end in (last(results, unit, arm) for arm in arms) if _in_band(results, unit, end)]
        of_unit = {
            "trace": [math.log(end[trace.name].value) for end in ends],
            "probe": [end[results.scale.probes[task]].value for end in ends],
            "kl": [end["kl"].value for end in ends],
        }
        for name, values in of_unit.items():
            columns[name] += values
        within += [unit.prefix] * len(ends)
        clusters += [f"grammar {unit.grammar}"] * len(ends)
    label = f"{trace.title} and {task}"
    try:
        found = correlation(columns["trace"], columns["probe"], clusters, given={"KL": columns["kl"]}, within=within)
    except IsolossError as error:
        return IntervalRow(label=label, effect=f"not known ({error})", group=which)
    low, high = found.interval95
    return IntervalRow(
        label=f"{label}, {found.observations} models",
        effect=f"{found.value:+.2f}",
        interval=f"{low:+.2f} to {high:+.2f}",
        value=found.value,
        low=low,
        high=high,
        scale="correlation",
        group=which,
    )


def _in_band(results: Results, unit: Replicate, end: Checkpoint) -> bool:
    untouched = last(results, unit, UNTOUCHED)["kl"].value
    return abs(end["kl"].value - untouched) <= BAND


# --- how it was made -------------------------------------------------------------------------------------------------


def _settings(scale: StudySize) -> dict[str, str]:
    weight = AdversarialConfig.weight
    return {
        "Grammars": f"{len(scale.grammars)}; pre-training seeds per grammar: {scale.seeds_per_grammar}",
        "Model": f"BERT {scale.main_size} with {scale.layers} layers, no dropout; {scale.batch_size} sentences "
        "per step, one masked token each",
        "Base": f"{scale.steps:,} steps of AdamW on exact labels, learning rate {scale.learning_rate:g} with cosine "
        "decay to 0, no weight decay",
        "Cooldown": f"{scale.cooldown_steps:,} steps, settings as for the base",
        "SGD": f"{scale.sgd_steps:,} steps, learning rate {scale.sgd_learning_rate:g} after a warm-up of 12 %, on "
        "sampled or exact labels",
        "AdamW for longer": f"{scale.longer_steps:,} more steps, settings as for the base",
        "Adversary, helper": f"{scale.adversary_steps:,} and {scale.helper_steps:,} more steps with the loss of a head "
        f"for {scale.tasks[0]}, weighted {weight:g} and {-weight:g}",
        "Weight decay": f"{WEIGHT_DECAY:g} in the base, none in the cooldown",
        "Errors": "over grammars, with Student's t; losses and accuracies have no measurement error",
    }
