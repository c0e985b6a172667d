"""Flatness as people read it: an estimate with what it rests on and its parts, and several models with a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from isoloss.cli import common
from isoloss.statistics.estimate import Estimate, interval, rarity, rounded, samples_of
from isoloss.statistics.tables import short_names

if TYPE_CHECKING:
    from isoloss.flatness.comparison import TraceComparison
    from isoloss.text.inputs import Inputs

_LARGEST = 3  # parts that are printed in any case


def print_details(args: Any, estimate: Estimate, inputs: Inputs) -> None:
    """Print what an estimate of one model rests on, below its value."""
    for line in _remarks(args, estimate, inputs):
        common.say_wrapped(line, indent=2)
    if not args.by_parameter:
        _print_largest(estimate)
    print_parts(args, estimate)


def print_parts(args: Any, estimate: Estimate) -> None:
    """Print the parts by layer and by parameter, where they are asked for and known."""
    for part, asked in (("layer", args.by_layer), ("parameter", args.by_parameter)):
        parts: Mapping[str, float] = getattr(estimate, f"by_{part}") or {}
        errors: Mapping[str, float] = getattr(estimate, f"by_{part}_stderr") or {}
        rows = [(name, parts[name], errors.get(name)) for name in sorted(parts, key=lambda name: -parts[name])]
        if asked and rows:
            _print_rows(f"\nby {part}", part, estimate, rows, digits=2)


def _remarks(args: Any, estimate: Estimate, inputs: Inputs) -> Iterator[str]:
    """What an estimate rests on, and what is to be said of its error."""
    details = estimate.details
    if not estimate.is_exact:
        relative = f"; the error is {percent(estimate.stderr / estimate.value)} of the value" * (estimate.value > 0)
        yield f"95 % interval {interval(estimate)}{relative}, over {samples_of(estimate)}"
    if "leading_cluster" in details and (warning := rarity({"": estimate})):
        yield f"{warning}; it takes {what_helps(args, inputs, estimate)}"
    parameters = f"{details['num_parameters']:,} parameters"
    if "sequences" in details:
        yield (
            f"{estimate.num_predictions:,} predicted tokens in {details['sequences']:,} sequences, {parameters}, "
            f"{details['predicts']}"
        )
    else:
        yield parameters
    yield from skipped(estimate)
    yield from adjustment(estimate)
    if "log_factors" in details:
        yield from _of_minimum(estimate)
    method = estimate.method
    if estimate.num_probes:
        drawn = "label" if "sampled labels" in method else "probe"
        each = " per token" if "clusters" in details else ""
        method += f", {estimate.num_probes} {drawn}{'s' * (estimate.num_probes > 1)}{each}"
    if "device" in details:
        method += f"; {details['device']}, {details['dtype']}, attention {details['attention']}"
    yield method + (f"; {estimate.seconds:.1f} s" if estimate.seconds is not None else "")
    if "error_covers" in details and not estimate.is_exact:
        yield f"the error covers {details['error_covers']}"
    if details.get("parameters_by_autograd"):
        yield f"by automatic differentiation, a sequence at a time: {', '.join(details['parameters_by_autograd'])}"
    if details.get("quantized_weights"):
        yield f"{details['quantized_weights']:,} quantized weights were not measured: they are not parameters"
    if details.get("parameters_without_gradient"):
        yield f"parameters without gradient: {', '.join(details['parameters_without_gradient'])}"
    if args.rtol is not None and estimate.stderr > args.rtol * abs(estimate.value):
        yield f"the error is above --rtol {args.rtol:g}: it takes {what_helps(args, inputs, estimate)}"


def what_helps(args: Any, inputs: Inputs, estimate: Estimate) -> str:
    """Return what would make the error of an estimate smaller, and is to be had."""
    sequences = "more sequences, with --num-sequences"
    if args.seconds is not None and estimate.details["ended"] == "seconds":
        sequences = "more time, with --seconds"
    elif inputs.num_held is not None and inputs.num_held <= inputs.num_sequences:
        sequences = f"more {'documents' if 'documents' in inputs.batches[0] else 'sequences'} in --data"
    if "clusters" in estimate.details:
        return sequences
    covers_inputs = estimate.details["error_covers"].startswith("inputs")
    return f"more probes, with --num-probes{f', and {sequences} for the part of the inputs' * covers_inputs}"


def _of_minimum(estimate: Estimate) -> Iterator[str]:
    """What a minimal trace is beside the plain one, what bounds it, and what fixes it where there is no minimum."""
    details = estimate.details
    plain, kept = (rounded(details[name], details[f"{name}_stderr"]) for name in ("trace", "keeping_features"))
    low, high = (rounded(details[name], estimate.stderr).split(" ±")[0] for name in ("in_sample", "cross_fitted"))
    yield f"trace at the given weights {plain}; minimum over rescalings that keep the last hidden state {kept}"
    yield (
        f"minimum over all rescalings: in sample {low} (too small on average), cross-fitted {high} (too large); the "
        "value is their mean"
    )
    yield from conventions(estimate)


def conventions(estimate: Estimate) -> Iterator[str]:
    """Return what else decides a minimal trace: gauges where it has no minimum, and what the eps of norms does."""
    details = estimate.details
    if details["gauged"]:
        infimum = rounded(details["infimum"], estimate.stderr).split(" ±")[0]
        yield (
            f"the trace has no minimum over rescalings (infimum {infimum}: the contributions of "
            f"{len(details['vanishing'])} parameters vanish, such as {details['vanishing'][0]}), so the scale of "
            f"{' and '.join(details['gauged'])} is fixed by convention: the geometric mean of the root mean squares of "
            "what it multiplies is 1"
        )
    if details["loss_change_by_eps"] is None:
        return
    bound = details["log_factor_bound"]
    limit = "" if bound is None else f"; the factors are at most {math.exp(bound):.3g}, so this is not the full minimum"
    change = details["loss_change_by_eps"]
    yield f"by the eps of norms, the rescaling changes the loss of the first sequences by {change:.1g} nats{limit}"


def control(measured: Mapping[str, Mapping[str, Estimate]]) -> str:
    """Return by how much a random rescaling changes both traces of a model, given its estimates by measure."""
    trace, minimum = (
        measured["rescaling-control"][f"{name}-rescaled-at-random"].value / measured[name][name].value
        for name in ("trace", "minimal-trace")
    )
    return (
        f"a random exact rescaling multiplies the trace by {trace:.4g}, and changes the minimal trace by "
        f"{abs(minimum - 1):.1g} of its value"
    )


def percent(fraction: float) -> str:
    """Return a fraction in percent with one decimal, or one significant digit where that would be 0.

    Example:
        >>> percent(0.0371), percent(0.00512), percent(0.00038)
        ('3.7 %', '0.5 %', '0.04 %')
    """
    return f"{100 * fraction:{'.1f' if fraction >= 0.001 else '.1g'}} %"


def _print_largest(estimate: Estimate) -> None:
    """Print the parameters with the largest parts, and what is left without embeddings."""
    parts, errors, details = estimate.by_parameter or {}, estimate.by_parameter_stderr or {}, estimate.details
    if len(parts) < 2 or estimate.value <= 0:
        return
    largest = sorted(parts, key=lambda name: -parts[name])[:_LARGEST]
    lines = [(name, parts[name], errors.get(name)) for name in largest]
    if details.get("embeddings"):
        lines.append(("without embeddings", details["without_embeddings"], details["without_embeddings_stderr"]))
    _print_rows("\nlargest parts by parameter", "parameter", estimate, lines, digits=1)


def _print_rows(
    title: str, part: str, estimate: Estimate, rows: list[tuple[str, float, float | None]], *, digits: int
) -> None:
    cells = [(name, _part(value, error), f"{100 * value / estimate.value:.{digits}f} %") for name, value, error in rows]
    common.print_table(title, (part, estimate.unit, "fraction"), cells)


def _part(value: float, error: float | None) -> str:
    return f"{value:.4g}" if error is None else rounded(value, error)


# --- several models --------------------------------------------------------------------------------------------------


def print_comparison(args: Any, comparison: TraceComparison, inputs: Inputs) -> None:
    """Print the models, their differences where there are several, and what they rest on."""
    trace = next(iter(comparison.of("trace").values()))
    names = short_names(list(comparison.models))
    title = f"Fisher, {trace.unit}; P: the probability of being the smallest"
    for header, rows, left in comparison.tables(names):
        common.print_table(title, header, rows, left=left)
        title = ""
    common.say("")
    common.say_wrapped(
        f"{trace.num_predictions:,} predicted tokens in {trace.details['sequences']:,} sequences; ± is the standard "
        f"error over {samples_of(trace)}"
    )
    if comparison.warning:
        common.say_wrapped(f"{comparison.warning}; it takes {what_helps(args, inputs, trace)}")
    for line in (*skipped(trace), *adjustment(trace)):
        common.say_wrapped(line)
    for model, least in comparison.of("minimal-trace").items() if "minimal-trace" in comparison.traces else ():
        details = least.details
        for line in conventions(least) if details["gauged"] or details["log_factor_bound"] is not None else ():
            common.say_wrapped(f"{names[model]}: {line}")


def skipped(trace: Estimate) -> Iterator[str]:
    """Say how many batches had nothing to predict; nothing where none had."""
    if number := trace.details.get("skipped_batches"):
        yield f"{number:,} batch{'es' if number > 1 else ''} skipped: every label is -100"


def adjustment(trace: Estimate) -> Iterator[str]:
    """Say how the auxiliary sample was used, or that it differs from what was measured; nothing where there is none."""
    details = trace.details
    number = details.get("auxiliary_directions", 0)
    used = ["how probable each is after the one before"] if details.get("auxiliary_bigrams") else []
    used += [f"{number} direction{'s' if number > 1 else ''} of their mean embedding"] if number else []
    if used:
        yield f"adjusted to all {details['auxiliary_sequences']:,} sequences by their tokens: {' and '.join(used)}"
    elif details.get("auxiliary_differs"):
        yield "not adjusted to the rest of the data by its tokens: those that were measured differ from them"
