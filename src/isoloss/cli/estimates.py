"""An estimate as people read it: what it rests on, and its parts by layer and parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from isoloss.cli import common, comparison
from isoloss.statistics.estimate import Estimate, rounded

_FEW = 32  # clusters, of which one may well make up much of the error
_LARGEST = 3  # parts that are printed in any case
_LEADING = 0.25  # of the squared error: more than one cluster should make up


def print_details(args: Any, estimate: Estimate) -> None:
    """Print what an estimate of one model rests on, below its value."""
    for line in _remarks(args, estimate):
        common.say_wrapped(line, indent=2)
    if not args.by_parameter:
        _print_largest(estimate)
    print_parts(args, estimate)


def print_parts(args: Any, estimate: Estimate) -> None:
    """Print the parts by layer and by parameter, where they are asked for and known."""
    if args.by_layer and estimate.by_layer:
        _print_parts("layer", estimate, estimate.by_layer, estimate.by_layer_stderr or {})
    if args.by_parameter and estimate.by_parameter:
        _print_parts("parameter", estimate, estimate.by_parameter, estimate.by_parameter_stderr or {})


def _remarks(args: Any, estimate: Estimate) -> Iterator[str]:
    """What an estimate rests on, and what is to be said of its error."""
    details = estimate.details
    if not estimate.is_exact:
        relative = f"; the error is {percent(estimate.stderr / estimate.value)} of the value" * (estimate.value > 0)
        kind = details.get("clusters", "samples")
        yield f"95 % interval {comparison.interval(estimate)}{relative}, over {estimate.samples:,} {kind}"
    if estimate.samples >= _FEW and details.get("leading_cluster", 0) > _LEADING:
        yield (
            f"one of the {details['clusters']} makes up {100 * details['leading_cluster']:.0f} % of the squared error: "
            "its kind is too rare here for the error to be right; measure more"
        )
    parameters = f"{details['num_parameters']:,} parameters"
    if "sequences" in details:
        yield (
            f"{estimate.num_inputs:,} predicted tokens in {details['sequences']:,} sequences, {parameters}, "
            f"{details['predicts']}"
        )
    else:
        yield parameters
    yield from comparison.skipped(estimate)
    yield from comparison.adjustment(estimate)
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
    if args.rtol is not None and estimate.stderr > args.rtol * estimate.value:
        yield f"the error is above --rtol {args.rtol:g}: give more --num-inputs"


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
    cells = [(name, _part(value, error), f"{100 * value / estimate.value:.1f} %") for name, value, error in lines]
    common.print_table("\nlargest parts by parameter", ("parameter", estimate.unit, "fraction"), cells)


def _print_parts(part: str, estimate: Estimate, parts: Mapping[str, float], errors: Mapping[str, float]) -> None:
    rows = sorted(parts.items(), key=lambda item: -item[1])
    cells = [(name, _part(value, errors.get(name)), f"{100 * value / estimate.value:.2f} %") for name, value in rows]
    common.print_table(f"\nby {part}", (part, estimate.unit, "fraction"), cells)


def _part(value: float, error: float | None) -> str:
    return f"{value:.4g}" if error is None else rounded(value, error)
