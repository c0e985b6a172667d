"""The page of the study dose-response: its figure, and how it was made."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from isoloss.paper.dose_response.design import DOSES, NOISES, SAM, SHAM, StudySize
from isoloss.paper.dose_response.study import replicates
from isoloss.paper.same_loss.design import Replicate, grammars_of
from isoloss.paper.same_loss.study import factor, factor_ends
from isoloss.report import charts, data
from isoloss.report.charts import Spec, layer, nominal
from isoloss.report.study_page import Figure
from isoloss.studies.page import PageParts
from isoloss.studies.results import Results, change, difference

SERIES: Mapping[str, Sequence[str]] = {"Penalty": DOSES, "Label noise": NOISES, "SAM": (SAM,)}
Row = dict[str, Any]


def parts(results: Results) -> PageParts:
    """Return what the page shows besides tables and claims."""
    return PageParts(figures=_figures(results), settings=_settings(results.scale))


def _figures(results: Results) -> list[Figure]:
    scale: StudySize = results.scale
    first, *others = scale.probes.items()
    shown = [(f"Accuracy, {first[0]}: change (points)", first[1]), ("Effective rank: change", "effective-rank")]
    figure = Figure(
        name="dose-response",
        title="Few-shot accuracy and effective rank by flatness",
        chart=dose_response(results, shown),
        caption="Changes from the sham, whose penalty has the weight 0, at the same KL. Thin: the penalty's arms of "
        "each grammar. Thick: means over grammars.",
    )
    rest = Figure(
        name="dose-response-others",
        title="The other tasks",
        chart=dose_response(results, [(f"Accuracy, {title}: change (points)", key) for title, key in others]),
        caption="As above. What later tokens need of the first two tokens decides needed-2, and does not decide "
        "spare-2.",
    )
    return [figure, rest]


def dose_response(results: Results, shown: Sequence[tuple[str, str]]) -> Spec:
    """Return a panel for each measure: its difference from the sham against the minimal trace over the sham's.

    Args:
        results: The results.
        shown: The measures, each by the title of its axis and its key.
    """
    units = replicates(results)
    grammars = {name: [unit for unit in units if grammars_of([unit]) == [name]] for name in grammars_of(units)}
    color = nominal(
        "series",
        title=None,
        scale={"domain": list(SERIES), "range": list(data.COLORS[: len(SERIES)])},
    )
    panels = []
    for title, key in shown:
        thin = [row for some in grammars.values() for row in _curve(results, some, "Penalty", key)]
        means = [row for series in SERIES for row in _curve(results, units, series, key)]
        across = [row[name] for row in (*thin, *means) for name in ("trace", "trace_low", "trace_high") if name in row]
        up = [row[name] for row in (*thin, *means) for name in ("value", "low", "high") if name in row]
        x = charts.axis("trace", "Minimal trace over the sham's (left: flatter)", data.ends(across, log=True), log=True)
        y = charts.axis("value", title, data.ends([0.0, *up], log=False))
        order = {"field": "dose", "type": "quantitative"}
        line = {"x": x, "y": y, "color": color, "order": order}
        rule = {"type": "rule", "strokeWidth": charts.RULE}
        zero = {"type": "rule", "color": charts.INK, "strokeDash": [4, 4], "opacity": 0.5}
        panels.append(
            {
                "layer": [
                    layer([{"value": 0.0}], zero, y=y),
                    layer(thin, {"type": "line", "strokeWidth": 1, "opacity": 0.35}, **line, detail=nominal("of")),
                    layer(means, {"type": "line", "strokeWidth": charts.LINE}, **line),
                    layer(means, rule, x=x, y={**y, "field": "low"}, y2={"field": "high"}, color=color),
                    layer(means, rule, y=y, x={**x, "field": "trace_low"}, x2={"field": "trace_high"}, color=color),
                    layer(
                        means,
                        {"type": "point", "filled": True, "size": charts.POINT, "opacity": 1},
                        **{"x": x, "y": y, "color": color},
                        tooltip=[nominal(name) for name in ("arm", "minimal trace", "difference")],
                    ),
                ]
            }
        )
    return charts.concat(panels, "Bars: 95 % confidence intervals over grammars")


def _curve(results: Results, units: Sequence[Replicate], series: str, key: str) -> list[Row]:
    """Return the points of a series: differences from the sham, with intervals where there are several grammars."""
    scale: StudySize = results.scale
    clusters = grammars_of(units)
    rows = []
    for dose, arm in enumerate(SERIES[series]):
        row: Row = {"series": series, "of": clusters[0], "dose": dose, "arm": scale.titles[arm]}
        pairs = [(results.at(unit.run(SHAM)), results.at(unit.run(arm))) for unit in units]
        if arm == SHAM:
            row |= {"trace": 1.0, "value": 0.0}
        elif len(set(clusters)) > 2:  # the intervals of two would leave no room for the points
            trace, value = factor(pairs, "minimal-trace", clusters), change(pairs, key, clusters=clusters)
            row |= {"trace": trace.value, "value": value.value, "minimal trace": f"x {trace}", "difference": str(value)}
            row |= dict(
                zip(("trace_low", "trace_high", "low", "high"), (*factor_ends(trace), *value.ci95), strict=True)
            )
        else:
            logs = [math.log(second["minimal-trace"].value / first["minimal-trace"].value) for first, second in pairs]
            values = [difference(second[key], first[key]).value for first, second in pairs]
            row |= {"trace": math.exp(statistics.fmean(logs)), "value": statistics.fmean(values)}
        rows.append(row)
    return rows


def _settings(scale: StudySize) -> dict[str, str]:
    def listed(weights: Sequence[float]) -> str:
        return ", ".join(f"{weight:g}" for weight in weights)

    return {
        "Grammars": f"{len(scale.grammars)}; pre-training seeds per grammar: {scale.seeds_per_grammar}",
        "Model": f"BERT {scale.size} with {scale.layers} layers, no dropout; {scale.batch_size} sentences a step, one "
        "masked token each",
        "Base": f"AdamW on exact labels, learning rate {scale.learning_rate:g} with cosine decay to 0, until the KL is "
        f"{scale.base_kl:g} nats or {scale.base_steps:,} steps are done",
        "Cooldown": f"the same with learning rate {scale.cooldown_rate:g}, until the KL is {scale.target_kl:g} nats or "
        f"{scale.cooldown_steps:,} steps are done",
        "Penalty": f"{scale.steps:,} steps of AdamW on exact labels, learning rate {scale.learning_rate:g}; weights "
        f"{listed(scale.weights)}, and below 0 {listed(scale.sharp_weights)}; the trace from {scale.sentences} "
        "sentences a step. Sham, AdamW alone and SAM: as many steps",
        "Label noise": f"SGD on sampled labels, learning rate {scale.noise_rate:g} after a warm-up of 12 %",
        "Helper": f"{scale.helper_steps:,} steps with the loss of a head for {scale.tasks[0]}",
        "Errors": "over grammars, with Student's t; losses and accuracies are sums over all sentences",
    }
