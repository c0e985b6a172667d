"""The figure of a comparison: the trace of each model against its loss. It needs polars, and the page does not."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from isoloss.comparison.models import ModelComparison
from isoloss.comparison.verdict import TraceComparison
from isoloss.report.charts import BARS, Spec
from isoloss.report.data import COLORS, MARKERS, TRACE
from isoloss.report.panels import Axis, Panel, Series, draw
from isoloss.statistics.estimate import Estimate

_COLORS = COLORS[:7]  # that everybody tells apart; further models have other markers
_NAME = 50  # letters of a name on a line, such as fit the figure
_WIDE = 4.0  # ratio of the largest trace to the smallest, from which the axis is logarithmic


def trace_against_loss(comparison: TraceComparison, names: Mapping[str, str] | None = None) -> Spec:
    """Draw each model as a point: its loss to the right, its trace upwards; bars are 95 % intervals.

    The models of a series have one color.

    Where the traces lie far apart their axis is logarithmic. `isoloss.report.save.save` writes the chart to a file.
    """
    labels = {model: model for model in comparison.models} | dict(names or {})
    traces = [trace.value for trace in comparison.of("trace").values()]
    # the checkpoints of a series are joined along the loss
    found = comparison.series if isinstance(comparison, ModelComparison) else {}
    groups = {name: list(steps.values()) for name, steps in found.items()} or {labels[m]: [m] for m in labels}
    series = []
    for index, (name, models) in enumerate(groups.items()):
        of = [comparison.models[model] for model in models]
        points = [(estimates["loss"].value, estimates["trace"].value) for estimates in of]
        series.append(
            Series(
                name=textwrap.fill(name, _NAME),
                color=_COLORS[index % len(_COLORS)],
                marker=MARKERS[index // len(_COLORS) % len(MARKERS)],
                points=points,
                errors=[_half(estimates["trace"]) for estimates in of],
                x_errors=[_half(estimates["loss"]) for estimates in of],
                curve=points if len(points) > 1 else (),
            )
        )
    x = Axis(title="Loss (nats per token)")
    y = Axis(title=TRACE.axis_title, log=max(traces) > _WIDE * min(traces))
    return draw([Panel(x=x, y=y, series=series)], note=BARS)


def _half(estimate: Estimate) -> float:
    return estimate.ci95[1] - estimate.value
