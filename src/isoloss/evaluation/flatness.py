"""Measures of flatness of one or several models on the same inputs, with paired differences."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isoloss.errors import IsolossError
from isoloss.evaluation.context import MeasureContext
from isoloss.evaluation.measures.base import MeasureResult
from isoloss.evaluation.measures.flatness import (
    FlatnessMeasure,
    MinimalTrace,
    SampledFlatness,
    Trace,
    flatness_measure,
)
from isoloss.flatness import InterruptedEstimate
from isoloss.flatness.comparing import InterruptedComparison, compare
from isoloss.flatness.differences import Comparison, as_json_types, warn_unlike
from isoloss.statistics.estimate import Estimate, interval, number, samples_of
from isoloss.statistics.paired import paired_difference, paired_log_ratio, probabilities_of_smallest
from isoloss.statistics.tables import probability, short_names, text_table

Models = Mapping[str, Callable[[], Any]]  # what loads each model, by its name
Estimates = Mapping[str, Estimate]
Progress = Callable[[str, str, int], None]  # measure, model, and how many of its sequences are done


@dataclass(frozen=True, kw_only=True)
class EstimatePair:
    """The difference of an estimate between two models, paired by sample."""

    first: str  # a model's name
    second: str  # the other's
    estimate: str  # which estimate of the measure
    difference: Estimate  # the first minus the second
    log_ratio: Estimate | None  # the logarithm of their ratio; None where one is not above 0

    @classmethod
    def of(cls, name: str, first: tuple[str, Estimate], second: tuple[str, Estimate]) -> EstimatePair:
        """Return the difference of two estimates with influences on the same samples."""
        (a, one), (b, two) = first, second
        ratio = paired_log_ratio(one, two) if min(one.value, two.value) > 0 else None
        return cls(first=a, second=b, estimate=name, difference=paired_difference(one, two), log_ratio=ratio)


@dataclass(frozen=True, kw_only=True, repr=False)
class MeasureComparison:
    """One measure of several models on the same inputs; it prints as a table."""

    measure: str  # the measure
    models: Mapping[str, Estimates]  # the estimates of each model, by their names
    pairs: tuple[EstimatePair, ...]  # each two models, for each estimate that can be paired; none of an exact one
    # of each estimate that can be paired, the probability of each model to have the smallest
    probability_of_smallest: Mapping[str, Mapping[str, float]]

    @property
    def ranking(self) -> dict[str, tuple[str, ...]]:
        """By estimate, the models' names, that of the smallest value first."""
        first = next(iter(self.models.values()))
        return {name: tuple(sorted(self.models, key=lambda model: self.models[model][name].value)) for name in first}

    @classmethod
    def of(cls, measure: str, models: Mapping[str, Estimates]) -> MeasureComparison:
        """Return the comparison of models that were measured on the same inputs."""
        first = next(iter(models.values()))
        paired = [name for name in first if all(estimates[name].influence is not None for estimates in models.values())]
        return cls(
            measure=measure,
            models=models,
            pairs=tuple(
                EstimatePair.of(name, (a, models[a][name]), (b, models[b][name]))
                for name in paired
                for a, b in itertools.combinations(models, 2)
            ),
            probability_of_smallest={name: _chances(name, models) for name in paired},
        )

    def __repr__(self) -> str:
        return f"MeasureComparison({self.measure} of {', '.join(self.models)})"

    def __str__(self) -> str:
        blocks = []
        short = short_names(list(self.models))
        first = next(iter(self.models.values()))
        for name, estimate in first.items():
            chances = self.probability_of_smallest.get(name, {})
            rows = [
                [short[model], number(estimates[name]), *([probability(chances[model])] if chances else [])]
                for model, estimates in self.models.items()
            ]
            header = [label(self.measure, name, first), "value", *(["probability of smallest"] if chances else [])]
            blocks.append(f"in {estimate.unit}\n{text_table(header, rows)}")
            pairs = [
                [f"{short[pair.first]} minus {short[pair.second]}", number(pair.difference), interval(pair.difference)]
                for pair in self.pairs
                if pair.estimate == name
            ]
            if pairs:
                blocks.append(
                    text_table([f"difference, paired over {samples_of(estimate)}", "value", "95 % interval"], pairs)
                )
        return "\n\n".join(blocks)

    def to_dict(self) -> dict[str, Any]:
        """Return pairs, rankings and probabilities as JSON types."""
        return {
            "pairs": [as_json_types(pair) for pair in self.pairs],
            "ranking": {name: list(models) for name, models in self.ranking.items()},
            "probability_of_smallest": {name: dict(each) for name, each in self.probability_of_smallest.items()},
        }


def label(measure: str, name: str, estimates: Estimates) -> str:
    """Return what an estimate is called beside those of other measures.

    Example:
        >>> label("spectral-density", "trace", {"trace": 9.1, "squared-frobenius-norm": 3.5})
        'spectral-density, trace'
        >>> label("trace-in-d64-paper", "trace", {"trace": 9.1})
        'trace-in-d64-paper'
    """
    return measure if name == measure or len(estimates) == 1 else f"{measure}, {name}"


def _chances(name: str, models: Mapping[str, Estimates]) -> dict[str, float]:
    """Return for each model the probability that it has the smallest of its estimates of this name."""
    chances = probabilities_of_smallest([estimates[name] for estimates in models.values()])
    return dict(zip(models, chances, strict=True))


@dataclass(kw_only=True)
class FlatnessResults:
    """What was measured of which model, and how they compare."""

    estimates: dict[str, dict[str, Estimates]] = field(default_factory=dict)  # by model and measure
    comparisons: dict[str, MeasureComparison] = field(default_factory=dict)  # of several models, by measure
    compared: Comparison | None = (
        None  # the traces of several models, and their minimal traces where these were asked for
    )
    # after Ctrl-C, the measure and the model that were in work, and the estimate so far, if there is one with an error;
    # None: nothing was interrupted
    interrupted: tuple[str, str, Estimate | None] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return models, comparisons and whether it was interrupted as JSON types."""
        models = [
            {
                "model": model,
                "estimates": {
                    measure: {name: estimate.to_dict() for name, estimate in estimates.items()}
                    for measure, estimates in measures.items()
                },
            }
            for model, measures in self.estimates.items()
            if measures
        ]
        comparisons = {measure: comparison.to_dict() for measure, comparison in self.comparisons.items()}
        for measure, compared in ({} if self.compared is None else self.compared.by_measure).items():
            comparisons[measure.replace(" ", "-")] = {  # the models' estimates are above
                "pairs": [as_json_types(pair) for pair in compared.pairs],
                "ranking": list(compared.ranking),
                "probability_of_smallest": {model.name: model.probability_of_smallest for model in compared.models},
            }
        partial = None
        if self.interrupted is not None:
            measure, model, estimate = self.interrupted
            partial = {"measure": measure, "model": model, "estimate": estimate and estimate.to_dict()}
        return {"models": models, "comparisons": comparisons, "interrupted": partial}


def measure_flatness(
    models: Models,
    measures: Sequence[str],
    context: MeasureContext,
    *,
    settings: Mapping[str, Any] | None = None,
    where_known: bool = False,
    progress: Progress | None = None,
) -> FlatnessResults:
    """Measure the flatness of models on the same inputs; of several, also the paired differences.

    The models are loaded one after another, for each measure anew. Of several models, the first decides where `rtol`
    or `seconds` of the context end a measurement, and the others are measured on as many sequences. Their traces and
    minimal traces come from one pass (`isoloss.flatness.compare`).

    Args:
        models: What loads each, by name.
        measures: The measures' names.
        context: What they are measured on.
        settings: Of the measures.
        where_known: Whether the comparison of several models goes on without minimal-trace, and says why, where the
            rescalings of a model are not known.
        progress: Called with a measure, a model and the number of its sequences done.
    """
    made = {name: flatness_measure(name, settings) for name in measures}
    if context.resume is not None and (len(made) > 1 or len(models) > 1):
        raise IsolossError("a measurement can be resumed where one measure of one model is taken")
    for name, measure in made.items():
        if reason := measure.why_not_applicable(context):
            raise IsolossError(f"{name} cannot be measured: {reason}")
    results = FlatnessResults(estimates={model: {} for model in models})
    traces = {name: measure for name, measure in made.items() if len(models) > 1 and measure.is_compared}
    for name, measure in made.items():
        if name not in traces:
            _measure_each(results, models, name, measure, context, progress)
        elif results.compared is None:
            is_asked = any(isinstance(each, MinimalTrace) for each in traces.values())
            minimal = None if is_asked and where_known else is_asked
            _compare_traces(results, models, traces, minimal, context, progress)
        if results.interrupted is not None:
            break
    return results


def _compare_traces(
    results: FlatnessResults,
    models: Models,
    traces: Mapping[str, Any],
    minimal: bool | None,
    context: MeasureContext,
    progress: Progress | None,
) -> None:
    """Take the traces of several models, with their losses and the control variates that they share."""
    name, measure = next(iter(traces.items()))
    granularities = [each.rescaling_granularity for each in traces.values() if isinstance(each, MinimalTrace)]
    inputs = context.inputs(measure.num_sequences, measure.seed)
    try:
        results.compared = compare(
            models,
            inputs.batches,
            seed=measure.seed,
            num_probes=measure.num_probes,
            rtol=context.rtol,
            seconds=context.seconds,
            causal=context.is_causal,
            auxiliary_sample=inputs.auxiliary_sample if context.has_embeddings else None,
            minimal=minimal,
            progress=None if progress is None else functools.partial(progress, name),
            granularity=(granularities or ["tensor"])[0],
        )
    except InterruptedComparison as stop:
        results.compared, results.interrupted = stop.complete, ("trace", stop.name, stop.partial)
    for label, comparison in ({} if results.compared is None else results.compared.by_measure).items():
        own = label.replace(" ", "-")  # the measure's name
        for model in comparison.models:
            rest, loss = model.without_embeddings, model.loss
            results.estimates[model.name][own] = {own: model.trace, "without_embeddings": rest, "loss": loss}


def _measure_each(
    results: FlatnessResults,
    models: Models,
    name: str,
    measure: FlatnessMeasure,
    context: MeasureContext,
    progress: Progress | None,
) -> None:
    """Take any measure of each model."""
    own, own_context = measure, context
    for model, load in models.items():
        step = None if progress is None else functools.partial(progress, name, model)
        try:
            result = MeasureResult.of(own.run(load(), dataclasses.replace(own_context, progress=step)), name)
        except InterruptedEstimate as stop:
            results.interrupted = name, model, stop.partial
            break
        except KeyboardInterrupt:
            if not any(results.estimates.values()):
                raise
            results.interrupted = name, model, None
            break
        results.estimates[model][name] = result.estimates
        if isinstance(own, SampledFlatness) and own_context is context:
            own, own_context = own.continued(context, next(iter(result.estimates.values())))
    done = {model: estimates[name] for model, estimates in results.estimates.items() if name in estimates}
    if len(done) > 1:
        if isinstance(measure, Trace):
            warn_unlike({model: next(iter(estimates.values())) for model, estimates in done.items()})
        results.comparisons[name] = MeasureComparison.of(name, done)
