"""Measures of flatness of one or several models on the same inputs, with paired differences."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isoloss.comparison.traces import InterruptedComparison, compare_traces
from isoloss.comparison.verdict import TraceComparison, warn_unlike
from isoloss.errors import IsolossError
from isoloss.flatness import InterruptedEstimate
from isoloss.lab.evaluation.context import MeasureContext
from isoloss.lab.evaluation.measures.base import FunctionMeasure, MeasureResult
from isoloss.lab.evaluation.measures.flatness import flatness_measure
from isoloss.statistics.comparison import Comparison, Estimates
from isoloss.statistics.estimate import Estimate

Models = Mapping[str, Callable[[], Any]]  # what loads each model, by its name
Progress = Callable[[str, str, int], None]  # measure, model, and how many of its sequences are done


@dataclass(kw_only=True)
class FlatnessResults:
    """What was measured of which model, and how they compare."""

    estimates: dict[str, dict[str, Estimates]] = field(default_factory=dict)  # by model and measure
    comparisons: dict[str, Comparison] = field(default_factory=dict)  # of several models, by measure
    # the traces of several models, and their minimal traces where these were asked for
    compared: TraceComparison | None = None
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
        comparisons = self.comparisons | ({} if self.compared is None else self.compared.by_measure)
        partial = None
        if self.interrupted is not None:
            measure, model, estimate = self.interrupted
            partial = {"measure": measure, "model": model, "estimate": estimate and estimate.to_dict()}
        compared = {measure: comparison.to_dict() for measure, comparison in comparisons.items()}
        return {"models": models, "comparisons": compared, "interrupted": partial}


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
    minimal traces come from one pass (`isoloss.compare_traces`).

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
    for name, measure in made.items():
        if reason := measure.why_not_applicable(context):
            raise IsolossError(f"{name} cannot be measured: {reason}")
    results = FlatnessResults(estimates={model: {} for model in models})
    traces = {name: measure for name, measure in made.items() if len(models) > 1 and _is_compared(name, measure)}
    for name, measure in made.items():
        if name not in traces:
            _measure_each(results, models, name, measure, context, progress)
        elif results.compared is None:  # for the second of the two there is nothing left to do
            is_asked = "minimal-trace" in traces
            # None: `compare` takes the minimal traces if it can, and says why if it cannot
            minimal = None if is_asked and where_known else is_asked
            _compare_traces(results, models, traces, minimal, context, progress)
        if results.interrupted is not None:
            break
    return results


def _is_compared(name: str, measure: Any) -> bool:
    """Whether `compare_traces` takes it of several models: not by the paper's sampled labels."""
    return name in ("trace", "minimal-trace") and measure.trace_method == "ghost"


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
    granularities = [each.rescaling_granularity for name, each in traces.items() if name == "minimal-trace"]
    inputs = context.inputs(measure.num_sequences, measure.seed)
    try:
        results.compared = compare_traces(
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
    for compared_name, comparison in ({} if results.compared is None else results.compared.by_measure).items():
        for model, estimates in comparison.models.items():
            results.estimates[model][compared_name] = estimates


def _measure_each(
    results: FlatnessResults,
    models: Models,
    name: str,
    measure: FunctionMeasure,
    context: MeasureContext,
    progress: Progress | None,
) -> None:
    """Take any measure of each model."""
    # of the first model, then of the others: `rtol` and `seconds` end the first one's, and they take as much as it did
    current, current_context = measure, context
    for model, load in models.items():
        step = None if progress is None else functools.partial(progress, name, model)
        try:
            result = MeasureResult.of(name, current.run(load(), dataclasses.replace(current_context, progress=step)))
        except InterruptedEstimate as stop:
            results.interrupted = name, model, stop.partial
            break
        except KeyboardInterrupt:  # outside a measurement: while a model is loaded, or before there is an error
            if not any(results.estimates.values()):
                raise
            results.interrupted = name, model, None
            break
        results.estimates[model][name] = result.estimates
        if current_context is context:
            current, current_context = current.continued(context, next(iter(result.estimates.values())))
    done = {model: estimates[name] for model, estimates in results.estimates.items() if name in estimates}
    if len(done) > 1:
        if hasattr(measure, "trace_method"):
            warn_unlike({model: next(iter(estimates.values())) for model, estimates in done.items()})
        results.comparisons[name] = Comparison(done, name)
