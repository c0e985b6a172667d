"""What the tables, figures and cards of the paper's studies share: means over clusters, differences and factors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import polars as pl

from isoloss.paper.design import Unit, clusters_of
from isoloss.report.charts import Spec
from isoloss.report.html import Card
from isoloss.report.intervals import Interval, IntervalPanel, intervals
from isoloss.statistics.clusters import cluster_mean
from isoloss.statistics.estimate import Estimate
from isoloss.studies.answer import ANSWERS, card_of, title_of
from isoloss.studies.claims import ClaimResult, Verdict
from isoloss.studies.results import RESCALED, Checkpoint, Pair, Results, change

TRACES = tuple(RESCALED)  # the trace and the minimal trace
OVER = "mean ± standard error over grammars"


def num_languages(units: Sequence[Unit]) -> int:
    """Return how many languages the units have."""
    return len(set(clusters_of(units)))


def has_several_languages(units: Sequence[Unit]) -> bool:
    """Return whether an error over the units' languages can be given."""
    return num_languages(units) > 1


def means(ends: Sequence[Checkpoint], units: Sequence[Unit], keys: Iterable[str]) -> dict[str, Estimate]:
    """Return the mean of each estimate of the units' checkpoints, with errors over clusters."""
    clusters = clusters_of(units)
    return {key: cluster_mean([end[key].value for end in ends], clusters, unit=ends[0][key].unit) for key in keys}


def changes(
    pairs: Sequence[Pair], units: Sequence[Unit], keys: Iterable[str], *, as_factors: Iterable[str] = TRACES
) -> dict[str, Estimate]:
    """Return the mean difference over pairs, second minus first, by key; of some keys the mean factor."""
    clusters, geometric = clusters_of(units), set(as_factors)
    return {
        key: factor(pairs, key, clusters) if key in geometric else change(pairs, key, clusters=clusters) for key in keys
    }


def factor(pairs: Sequence[Pair], key: str, clusters: Sequence[str]) -> Estimate:
    """Return the geometric mean of second over first; its error is the mean logarithm's, times the value.

    Of one pair, without clusters, it is that of second - value * first, over the same examples, in units of first.
    """
    if not clusters:
        ((first, second),) = pairs
        value = second[key].value / first[key].value
        rest = change(pairs, key, factor=value)
        stderr = rest.stderr / first[key].value
        return dataclasses.replace(rest, value=value, stderr=stderr, unit="times", influence=None)
    logs = [math.log(second[key].value / first[key].value) for first, second in pairs]
    mean = cluster_mean(logs, clusters, unit="times")
    value = math.exp(mean.value)
    return dataclasses.replace(mean, value=value, stderr=value * mean.stderr, influence=None)


def num_above_target(ends: Iterable[Checkpoint], target_kl: float) -> int:
    """Return how many checkpoints have a KL more than 10 % above the target."""
    return sum(end["kl"].value > 1.1 * target_kl for end in ends)


def checkpoint_frame(results: Results, runs: Iterable[str], keys: Sequence[str]) -> pl.DataFrame:
    """Return the last checkpoint of each run, a row each, as charts take them."""
    return pl.DataFrame([results.row(run, max(results.of_run(run)), results.at(run), keys) for run in runs])


def factor_ends(estimate: Estimate) -> tuple[float, float]:
    """Return the 95 % interval of a geometric mean, which is symmetric in its logarithm."""
    low, high = estimate.ci95
    # `factor` gives the logarithm's error times the value: divided by it, the half width is the logarithm's again
    reach = (high - low) / 2 / estimate.value
    return estimate.value * math.exp(-reach), estimate.value * math.exp(reach)


def interval(row: str, series: str, estimate: Estimate) -> Interval:
    """Return a mean or, in times, a factor with its 95 % interval, as a figure takes it."""
    low, high = factor_ends(estimate) if estimate.unit == "times" else estimate.ci95
    return Interval(row=row, series=series, value=estimate.value, low=low, high=high, text=str(estimate))


def forest(rows: Mapping[str, Mapping[str, Estimate]], panels: Mapping[str, Mapping[str, str]], *, note: str) -> Spec:
    """Return a forest plot.

    Args:
        rows: The estimates of each row, by key.
        panels: For each panel, by title, the keys that it shows, by their names in the legend.
        note: Of the intervals: what they are over.
    """
    made = []
    for title, keys in panels.items():
        shown = [interval(row, name, found[key]) for row, found in rows.items() for name, key in keys.items()]
        factors = all(found[key].unit == "times" for found in rows.values() for key in keys.values())
        made.append(IntervalPanel(title=title, intervals=shown, reference=float(factors), log=factors))
    return intervals(made, list(rows), note=f"Lines: 95 % {note}")


def flatter_card(label: str, result: ClaimResult, pairs: Sequence[Pair], units: Sequence[Unit]) -> Card:
    """Return the card of a claim about both traces, with the factors that they differ by."""
    card, clusters = card_of(label, result), clusters_of(units)
    verdicts = {one.verdict for one in result.answers}
    if len(verdicts) > 1 or Verdict.NOT_TESTED in verdicts:
        return card
    factors: Mapping[str, Estimate] = changes(pairs, units, TRACES)
    ends = {key: factor_ends(each) for key, each in factors.items()}
    trace, minimal = (f"{each.value:.2f} times the {title_of(key)}" for key, each in factors.items())
    intervals = ", ".join(f"{title_of(key)} {low:.2f} to {high:.2f}" for key, (low, high) in ends.items())
    return dataclasses.replace(
        card,
        value=f"{ANSWERS[verdicts.pop()]}: {trace}, {minimal}",
        detail=f"95 % intervals: {intervals}, over {len(set(clusters))} grammars",
    )
