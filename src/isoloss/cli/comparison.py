"""Several models' flatness as people read it: tables and a verdict."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from isoloss.cli import common
from isoloss.statistics.estimate import rounded

if TYPE_CHECKING:
    from isoloss.flatness.differences import Comparison, Pair
    from isoloss.statistics.estimate import Estimate

_SURE = 0.975  # the probability from which the verdict names a model


def print_tables(comparison: Comparison) -> None:
    """Print the models, their differences where there are several, what they rest on, and a verdict."""
    short = short_names([model.name for model in comparison.models])
    split = any(model.trace.details["embeddings"] for model in comparison.models)
    rows = [
        (
            short[model.name],
            f"{model.trace.details['num_parameters']:,}",
            rounded(model.loss.value, model.loss.stderr),
            rounded(model.trace.value, model.trace.stderr),
            *([rounded(model.without_embeddings.value, model.without_embeddings.stderr)] if split else []),
            _probability(model.flattest),
        )
        for model in comparison.models
    ]
    rest = ["without embeddings"] if split else []
    trace = comparison.models[0].trace
    common.print_table(
        "loss and trace of the Fisher, nats per predicted token",
        ("model", "parameters", "loss", "trace", *rest, "probability of being the flattest"),
        rows,
    )
    if comparison.pairs:
        differences = [
            (
                f"{short[pair.first]} less {short[pair.second]}",
                rounded(pair.loss.value, pair.loss.stderr),
                rounded(pair.trace.value, pair.trace.stderr),
                interval(pair.trace),
                f"{pair.ratio:.3f}",
                "{:.3f} to {:.3f}".format(*pair.ratio_ci95),
                *([rounded(pair.without_embeddings.value, pair.without_embeddings.stderr)] if split else []),
            )
            for pair in comparison.pairs
        ]
        common.print_table(
            "\ndifferences, paired by input",
            ("", "loss", "trace", "95 % interval", "ratio of traces", "95 % interval", *rest),
            differences,
        )
    common.say("")
    common.say_wrapped(
        f"{trace.num_inputs:,} predicted tokens in {trace.details['sequences']:,} sequences; ± is the standard error "
        f"over {trace.samples:,} {trace.details['clusters']}"
    )
    for line in (*skipped(trace), *adjustment(trace)):
        common.say_wrapped(line)
    if comparison.pairs:
        for sentence in _verdict(comparison, short):
            common.say_wrapped(sentence)


def _verdict(comparison: Comparison, short: dict[str, str]) -> list[str]:
    """Say in one sentence which model is the flattest, and in another what the losses do to this."""
    best, second = comparison.ranking[:2]
    pair = comparison.pair(best, second)
    chance = next(model.flattest for model in comparison.models if model.name == best)
    if chance >= _SURE:
        sentences = [
            f"{short[best]} is the flattest, with probability {_probability(chance)}: the next, {short[second]}, has "
            f"{_ratio_of(pair, second)} times its trace."
        ]
    else:
        sentences = [
            f"Which one is the flattest is open: {short[best]} has the smallest trace with probability "
            f"{_probability(chance)}, and more inputs would tell."
        ]
    low, high = pair.loss.ci95
    if low > 0 or high < 0:
        sentences.append("The two also differ in loss, so they are not compared at the same loss.")
    return sentences


def _probability(fraction: float) -> str:
    if 0.001 <= fraction <= 0.999:
        return f"{fraction:.3f}"
    return "above 0.999" if fraction > 0.5 else "below 0.001"


def _ratio_of(pair: Pair, name: str) -> str:
    return f"{pair.ratio if pair.first == name else 1 / pair.ratio:.3f}"


def short_names(names: list[str]) -> dict[str, str]:
    """Return each name without the folders above it that all have in common."""
    parts = {name: Path(name).parts for name in names}
    shared = len(Path(os.path.commonpath(names)).parts) if len({Path(name).is_absolute() for name in names}) == 1 else 0
    shared = max(0, min(shared, *(len(own) - 1 for own in parts.values())))  # one may lie in another
    return {name: str(Path(*own[shared:])) for name, own in parts.items()}


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


def interval(estimate: Estimate) -> str:
    """Return the two ends of the 95 % interval, with as many digits as the error has."""
    low, high = (rounded(end, estimate.stderr).split(" ±")[0] for end in estimate.ci95)
    return f"{low} to {high}"
