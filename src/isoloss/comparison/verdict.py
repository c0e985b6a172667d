"""Traces of several models, and which model is the flattest, if that can be said.

A model's estimates are `trace`, `without-embeddings` (the part of the trace that is not the embeddings') and `loss`;
where the minimal trace was measured, also `minimal-trace` and `minimal-without-embeddings`.

A model is called the flattest only where six things hold: all models have the same parameters, over which a trace is
a sum; their losses are shown to be the same within a margin; its trace is the smallest; so is its minimal trace, which
no rescaling of whole weight tensors can change (of units of an MLP or channels, with a finer granularity); both traces
of every other model are larger by a ratio that counts; and no input makes up much of the error of these differences,
unless a difference is so many of its errors beyond what counts that the error may be far off.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from isoloss.checkpoints.places import series_of
from isoloss.errors import IsolossError, warn
from isoloss.statistics.checking import at_least
from isoloss.statistics.comparison import (
    paired_difference,
    paired_log_ratio,
    probabilities_of_smallest,
    without_sample,
)
from isoloss.statistics.estimate import (
    Estimate,
    html_table,
    interval,
    leading_name,
    leading_sample,
    number,
    rare,
    rarity,
    rounded,
    samples_of,
)
from isoloss.statistics.significance import LOSS_MARGIN, MIN_RATIO, equivalence, is_beyond
from isoloss.statistics.tables import Tabular, probability, text_table

Reason = Literal[
    "weights",
    "function",
    "parameters",
    "loss",
    "loss open",
    "no minimal trace",
    "gauges",
    "open",
    "near",
    "disagree",
    "rare",
    "interpolated",
    "elsewhere",
]
REASONS: Mapping[Reason, str] = {  # why no model is called the flattest, in a few words
    "weights": "identical weights",
    "function": "one function with different weights",
    "parameters": "different architectures",
    "loss": "the losses differ",
    "loss open": "the losses are not shown to be the same",
    "no minimal trace": "there is no minimal trace",
    "gauges": "the minimal traces have different conventions",
    "open": "the errors are too large",
    "near": "the traces, or the minimal traces, are too close",
    "disagree": "trace and minimal trace disagree",
    "rare": "one input makes up much of the error",
    "interpolated": "the interpolation between two steps cannot tell",
    "elsewhere": "at other steps with this loss, the order is another",
}

# of two models: the 95 % interval of their difference then ends before 0
_SURE = 0.975  # the probability from which a model's trace is the smallest
_NEGLIGIBLE = 0.01  # of a standard error
_MOST_PAIRED = 20  # models whose differences are all in JSON
_MOST_NAMED = 3  # models whose losses are given one by one
_MOST_LEFT_OUT = 3  # samples that decide an error, to tell the verdict without them
# Standard errors beyond the smallest ratio that counts, from which an error that rests on one input may be far off: of
# log-normal inputs with a sigma of 3, two models with one trace came so far apart in 0 to 3 % of samples of 64 to 512,
# and two standard errors apart in 15 to 31 %.
_FAR, _ENOUGH = 10, 64
_SAME_NATS = 1e-5  # root mean square over samples, below which losses of two models differ by rounding


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which model is the flattest, or why that cannot be said; it prints as sentences.

    Attributes:
        flattest: The model's name; None: it cannot be said.
        reasons: Why it cannot, by the names in `REASONS`.
        text: The verdict in words, with what to do next.
    """

    flattest: str | None
    reasons: tuple[Reason, ...]
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, repr=False, kw_only=True)
class TraceComparison(Tabular):
    """The result of `isoloss.compare_traces`: it prints as tables with a verdict.

    Attributes:
        models: The estimates by model and by name; all models have the same names, on the same inputs.
        weights: The SHA-256 of each model's parameters, which identifies copies.
        architectures: The SHA-256 of each model's layers, their shapes and its activations.
        no_minimal: Why the minimal traces were not measured, though they were asked for.
        interpolated: The models that are no checkpoints but lie between two, so that they are copies of none, each with
            the estimates of these two.
        elsewhere: For a model of a series, its estimates at other steps with the same loss, by where that is.
        documents: Where each sample is and how it begins, if the samples are documents of a text.
    """

    models: Mapping[str, Mapping[str, Estimate]]
    weights: Mapping[str, str]
    architectures: Mapping[str, str]
    no_minimal: str = ""
    interpolated: Mapping[str, tuple[Mapping[str, Estimate], Mapping[str, Estimate]]] = field(default_factory=dict)
    elsewhere: Mapping[str, Mapping[str, Mapping[str, Estimate]]] = field(default_factory=dict)
    documents: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The estimates' names."""
        return tuple(next(iter(self.models.values())))

    @functools.cached_property
    def paired(self) -> tuple[str, ...]:
        """The names of the estimates that have differences, as the influence of each sample is known."""
        return tuple(name for name in self.names if all(e.influence is not None for e in self.of(name).values()))

    @property
    def traces(self) -> tuple[str, ...]:
        """Which traces were measured: `trace` and, where the rescalings of all models are known, `minimal-trace`."""
        return tuple(name for name in ("trace", "minimal-trace") if name in self.names)

    def of(self, name: str) -> dict[str, Estimate]:
        """Return the estimate called `name` of each model."""
        return {model: estimates[name] for model, estimates in self.models.items()}

    def difference(self, name: str, first: str, second: str) -> Estimate:
        """Return the paired difference of the estimates called `name`, first model minus second.

        Raises:
            IsolossError: There is no such model or estimate, or it is not known what each sample adds to it.
        """
        return paired_difference(self._estimate(first, name), self._estimate(second, name))

    def log_ratio(self, name: str, first: str, second: str) -> Estimate | None:
        """Return the logarithm of the ratio of two models' estimates, paired; None where one is not above 0."""
        one, other = self._estimate(first, name), self._estimate(second, name)
        return paired_log_ratio(one, other) if min(one.value, other.value) > 0 else None

    def ratio(self, name: str, first: str, second: str) -> tuple[float, tuple[float, float]]:
        """Return the ratio of two models' estimates and its 95 % interval, from the interval of the logarithm.

        Raises:
            IsolossError: As for `difference`, or a value is not above 0.
        """
        logarithm = paired_log_ratio(self._estimate(first, name), self._estimate(second, name))
        low, high = logarithm.ci95
        return math.exp(logarithm.value), (math.exp(low), math.exp(high))

    def ranking(self, name: str) -> tuple[str, ...]:
        """Return the models' names by value, the smallest first."""
        values = self.of(name)
        return tuple(sorted(values, key=lambda model: values[model].value))

    def ordered(self, best: str, rival: str) -> tuple[str, str]:
        """Return the models of a difference, the first one minus the second, and of a ratio, as in the table."""
        return rival, best

    def probability_of_smallest(self, name: str) -> Mapping[str, float]:
        """Return for each model the probability that its true value is the smallest."""
        if name not in self._chances:
            chances = probabilities_of_smallest(list(self.of(name).values()))
            self._chances[name] = dict(zip(self.models, chances, strict=True))
        return self._chances[name]

    @functools.cached_property
    def _chances(self) -> dict[str, Mapping[str, float]]:
        # kept, as they are drawn for three models and more; a cached property is stored in a frozen dataclass too
        return {}

    @functools.cached_property
    def originals(self) -> dict[str, str]:
        """For each model the first one that is the same function, or itself."""
        weights, architectures, losses = self.weights, self.architectures, self.of("loss")
        found: dict[str, str] = {}

        def are_one(one: str, other: str) -> bool:
            # another config makes another function of the same weights, however near the losses of small weights are
            is_other_function = weights[one] == weights[other] and architectures[one] != architectures[other]
            is_made = not {one, other}.isdisjoint(self.interpolated)
            is_near = abs(losses[one].value - losses[other].value) < _SAME_NATS  # else the difference is no rounding
            return (
                is_near and not is_made and not is_other_function and is_rounding(self.difference("loss", one, other))
            )

        for name in weights:
            found[name] = next((one for one in dict.fromkeys(found.values()) if are_one(one, name)), name)
        return found

    def _estimate(self, model: str, name: str) -> Estimate:
        for kind, wanted, known in (("model", model, self.models), ("estimate", name, self.names)):
            if wanted not in known:
                raise IsolossError(f"there is no {kind} {wanted}; the {kind}s are {', '.join(known)}")
        return self.models[model][name]

    @property
    def warning(self) -> str:
        """That one input makes up much of the error of a trace or of a difference of two; empty where none does."""
        estimates: dict[str, Estimate] = {}
        places = {model: place for place, model in enumerate(self.models)}
        for name in self.traces:
            words = name.replace("-", " ")
            estimates |= {f"the {words} of {model}": estimate for model, estimate in self.of(name).items()}
            # those that the verdict and the table are about: all pairs of a thousand models would take minutes
            best, *others = self.ranking(name)
            for other in others:
                first, second = sorted((best, other), key=places.__getitem__)
                difference = self.difference(name, first, second)
                estimates[f"the difference in {words} of {first} and {second}"] = difference
        return rarity(estimates)

    def verdict(
        self, *, loss_margin: float = LOSS_MARGIN, min_ratio: float = MIN_RATIO, more: str = "more inputs"
    ) -> Verdict:
        """Return which model is the flattest, or why that cannot be said.

        Args:
            loss_margin: Margin in nats per predicted token within which losses count as the same: by two one-sided
                tests at 5 % (`isoloss.statistics.significance`), of each model against the one with the smallest trace.
            min_ratio: The smallest ratio of two traces that counts: the flattest model's trace and minimal trace are
                smaller than any other's by this factor at least.
            more: What would make the errors smaller.

        Raises:
            IsolossError: The margin is not above 0, or the ratio is below 1.
        """
        return verdict(self, loss_margin=loss_margin, min_ratio=min_ratio, more=more)

    def __repr__(self) -> str:
        return f"TraceComparison({len(self.models)} models; flattest: {self.verdict().flattest or 'no verdict'})"

    def __str__(self) -> str:
        tables = [text_table(header, rows, left=left) for header, rows, left in self.tables()]
        trace = next(iter(self.of("trace").values()))
        over = f"{trace.unit}; ± is the standard error over {samples_of(trace)}"
        verdict = str(self.verdict()) if len(self.models) > 1 else ""
        return "\n\n".join(filter(None, [*tables, over, self.warning, verdict]))

    def _repr_html_(self) -> str:
        tables = "".join(html_table(rows, header) for header, rows, _ in self.tables())
        return f"{tables}<p>{html.escape(str(self.verdict()))}</p>" if len(self.models) > 1 else tables

    def tables(self) -> list[tuple[list[str], list[list[str]], int]]:
        """Return two tables, of the models and of the differences: header, rows, and how many columns are text."""
        split = any(trace.details["embeddings"] for trace in self.of("trace").values())
        shown = ["loss", "trace", *["without-embeddings"] * split, *self.traces[1:]]
        words = {name: name.replace("-", " ") for name in shown}
        rows = []
        for model in self.ranking("trace"):
            estimates = self.models[model]
            chances = [probability(self.probability_of_smallest(name)[model]) for name in self.traces]
            size = f"{estimates['trace'].details['num_parameters']:,}"
            rows.append([model, size, *(number(estimates[name]) for name in shown), *chances])
        header = ["model", "parameters", *words.values(), *(f"P(smallest {words[name]})" for name in self.traces)]
        models = header, rows, 1
        best, *others = self.ranking("trace")
        if not others:
            return [models]
        rows = []
        for model in others:
            title = f"{model} minus {best}"
            for name in shown:
                difference, of, ends = self.difference(name, model, best), "", ""
                if name in self.traces:
                    times, (low, high) = self.ratio(name, model, best)
                    of, ends = f"{times:#.4g}", f"{low:#.4g} to {high:#.4g}"
                rows.append([title, words[name], number(difference), interval(difference), of, ends])
                title = ""
        return [models, (["", "paired by input", "difference", "95 % interval", "ratio", "95 % interval"], rows, 2)]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each estimate of each model, and one for its difference from the first model, `minus`."""
        first = next(iter(self.models))
        rows = []
        for name in self.names:
            for model, estimates in self.models.items():
                rows.append({"measure": name, "model": model, "minus": "", **estimates[name].row()})
                if model != first and name in self.paired:
                    difference = self.difference(name, model, first)
                    rows.append({"measure": name, "model": model, "minus": first, **difference.row()})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return the models' estimates, their differences, rankings and probabilities as JSON types.

        Of more than 20 models, the differences are those from the first one.
        """
        first, *others = self.models
        pairs = itertools.combinations(self.models, 2) if len(others) < _MOST_PAIRED else ((first, o) for o in others)
        paired = list(pairs)
        return {
            "models": {model: {name: e.to_dict() for name, e in each.items()} for model, each in self.models.items()},
            "pairs": [
                {
                    **{"first": first, "second": second, "estimate": name},
                    "difference": self.difference(name, first, second).to_dict(),
                    "log_ratio": None if ratio is None else ratio.to_dict(),
                }
                for name in self.paired
                for first, second in paired
                for ratio in [self.log_ratio(name, first, second)]
            ],
            "ranking": {name: list(self.ranking(name)) for name in self.names},
            "probability_of_smallest": {name: dict(self.probability_of_smallest(name)) for name in self.traces},
            "weights": dict(self.weights),
            "architectures": dict(self.architectures),
            "no_minimal": self.no_minimal,
        }


def verdict(
    comparison: TraceComparison,
    *,
    loss_margin: float = LOSS_MARGIN,
    min_ratio: float = MIN_RATIO,
    names: Mapping[str, str] | None = None,
    more: str = "more inputs",
    with_tasks: bool = False,
) -> Verdict:
    """Return the verdict on models that were compared; for `TraceComparison.verdict`, which says more.

    `names` is what the models are called; `with_tasks`: they were compared on a task, so that this is no next step.
    """
    at_least("min_ratio", min_ratio, 1)
    names = names or {model: model for model in comparison.models}
    originals, copies = comparison.originals, copies_in_words(comparison, names)
    same = list(copies.values())
    number = len(set(originals.values()))
    if number == 1:
        return Verdict(flattest=None, reasons=tuple(copies), text=" ".join([*same, "There is nothing to compare."]))

    best = {trace: originals[comparison.ranking(trace)[0]] for trace in comparison.traces}
    # copies share a place, so that their probabilities add up
    chances = {
        trace: sum(
            chance
            for model, chance in comparison.probability_of_smallest(trace).items()
            if originals[model] == best[trace]
        )
        for trace in comparison.traces
    }
    against = dict(_reasons(comparison, best, chances, names, loss_margin, min_ratio))
    if against:
        text = [f"No verdict on which is {'flatter' if number == 2 else 'the flattest'}.", *against.values()]
        # with a smaller ratio there would be a verdict only where the traces are surely in one order
        in_order = min(chances.values()) >= _SURE and len(set(best.values())) == 1
        steps = _next(against, more, with_tasks, is_series=bool(series_of(comparison.models)), in_order=in_order)
        text += [f"Next: {', or '.join(steps)}."] if steps else []
        return Verdict(flattest=None, reasons=tuple(against), text=" ".join([*same, *text]))
    ratios = _ratios_in_words(comparison, best, names, names[best["trace"]])
    flattest, others = ("flatter", "") if number == 2 else ("the flattest", " as the others")
    sentence = (
        f"{names[best['trace']]} is {flattest}: {ratios}, at the same loss{others} within ± {loss_margin:g} nats."
    )
    return Verdict(flattest=best["trace"], reasons=(), text=" ".join([*same, sentence]))


def copies_in_words(comparison: TraceComparison, names: Mapping[str, str]) -> dict[Reason, str]:
    """Return a sentence on the models that have the weights of another one, and one on those of its function."""
    of_each: dict[tuple[Reason, str], list[str]] = {}
    for name, other in comparison.originals.items():
        if other != name:
            reason: Reason = "weights" if comparison.weights[other] == comparison.weights[name] else "function"
            of_each.setdefault((reason, other), [names[other]]).append(names[name])
    copies: dict[Reason, list[str]] = {"weights": [], "function": []}
    for (reason, _), group in of_each.items():
        copies[reason].append(listed(group))
    words = {
        "weights": "have identical weights.",
        "function": "have the same loss on every input: one function, different weights.",
    }
    return {reason: f"{listed(found)} {words[reason]}" for reason, found in copies.items() if found}


def _reasons(
    comparison: TraceComparison,
    best: Mapping[str, str],
    chances: Mapping[str, float],
    names: Mapping[str, str],
    loss_margin: float,
    min_ratio: float,
) -> Iterator[tuple[Reason, str]]:
    """Yield why the best models by measure, with these probabilities, are not called the flattest, and in words."""
    if (two := unlike(comparison.of("trace"))) is not None:
        one, other = (names[name] for name in two)
        yield "parameters", f"{one} and {other} have different parameters, and a trace is a sum over them."
        return
    first, *rest = comparison.models
    architectures = comparison.architectures
    if (another := next((model for model in rest if architectures[model] != architectures[first]), None)) is not None:
        yield (
            "parameters",
            f"{names[first]} and {names[another]} have different architectures: their layers differ in shape, "
            "activation or heads.",
        )
        return
    yield from _reasons_of_traces(comparison, best, chances, names, loss_margin, min_ratio)
    yield from _reasons_of_losses(comparison, best["trace"], names, loss_margin)


def _reasons_of_traces(
    comparison: TraceComparison,
    best: Mapping[str, str],
    chances: Mapping[str, float],
    names: Mapping[str, str],
    loss_margin: float,
    min_ratio: float,
) -> Iterator[tuple[Reason, str]]:
    """Yield why the traces alone, whatever the losses, do not make one model the flattest; at most one reason."""
    rivals = _rivals(comparison, best)
    superlative = "smaller" if len(set(comparison.originals.values())) == 2 else "smallest"
    smallest = [
        f"the {superlative} {trace.replace('-', ' ')} (probability {probability(chances[trace])})" for trace in best
    ]
    if len(set(best.values())) == 1:
        said = f"{names[best['trace']]} has {listed(smallest)}"
    else:
        said = listed([f"{names[name]} has {what}" for name, what in zip(best.values(), smallest, strict=True)])
    said = f"{said}; {_ratios_in_words(comparison, best, names)}"
    wide = [
        trace.replace("-", " ")
        for trace, (_, _, interval) in rivals.items()
        if chances[trace] >= _SURE and interval[1] >= 1
    ]
    minima = comparison.of("minimal-trace") if "minimal-trace" in comparison.traces else {}
    if not minima:
        why = comparison.no_minimal or "it was not measured"
        yield (
            "no minimal trace",
            f"{said}, but rescaling the weights, which changes no prediction, can change this order. The minimal "
            f"trace, which no rescaling of whole tensors changes, is missing: {why}.",
        )
    elif len({_conventions(least) for least in minima.values()}) > 1:
        yield "gauges", f"{said}, but their minimal traces are fixed by different conventions (gauges)."
    elif near := [
        trace.replace("-", " ") + "s"
        for trace, (_, ratio, interval) in rivals.items()
        # sure to be smaller, or sure to be no smaller than that
        if ratio * min_ratio > 1 and (chances[trace] >= _SURE or interval[0] * min_ratio > 1)
    ]:
        yield (
            "near",
            f"{said}, but the {listed(near)} differ by less than a factor of {min_ratio:g}, the smallest that counts.",
        )
    elif min(chances.values()) < _SURE or wide:
        said += ". The errors are too large to tell."
        if wide:
            said += f" The difference in {listed(wide)} excludes 0, but the interval of the ratio, which is wider with "
            said += "errors so large, does not exclude 1."
        narrow = [
            trace.replace("-", " ")
            for trace, (_, _, (low, high)) in rivals.items()
            if chances[trace] < _SURE and not low <= 1 <= high
        ]
        if narrow:
            said += f" The interval of the ratio excludes 1 in {listed(narrow)}, but that of the difference includes "
            said += "0: a verdict needs both."
        yield "open", said
    elif best["trace"] != best["minimal-trace"]:
        yield "disagree", f"{said}: the scale of the weights decides the order of the traces."
    # of the last three, each is a reason only where there would be a verdict otherwise
    elif between := _between(comparison, names):
        yield "interpolated", f"{said}, but {between}."
    elif contrary := _contrary(comparison, names):
        yield "elsewhere", f"{said}, but {contrary}."
    elif warning := rarity(_differences(comparison, best["trace"], names, min_ratio), comparison.documents):
        without = _without_rare(comparison, best["trace"], names, loss_margin, min_ratio)
        yield "rare", f"{said}, but {warning}. {without}"


def _reasons_of_losses(
    comparison: TraceComparison, flattest: str, names: Mapping[str, str], loss_margin: float
) -> Iterator[tuple[Reason, str]]:
    """Yield that a loss is not shown to be that of the model with the smallest trace; at most one reason."""
    pairs = [(name, flattest) for name, original in comparison.originals.items() if original == name != flattest]
    if len(comparison.models) == 2:  # in the direction of the table
        pairs = [comparison.ordered(flattest, name) for name, _ in pairs]
    differences = {pair: comparison.difference("loss", *pair) for pair in pairs}
    apart = {pair: each for pair, each in differences.items() if not equivalence(each, loss_margin).shown}
    if apart:
        # beyond the margin with confidence, or too uncertain to say
        differ = {pair: each for pair, each in apart.items() if is_beyond(each, loss_margin)}
        apart = differ or apart
        # of many models, the two ends
        ordered = sorted(apart.items(), key=lambda item: item[1].value)
        shown = ordered if len(ordered) <= _MOST_NAMED else [ordered[0], ordered[-1]]
        losses = [
            f"{names[name]} minus {names[other]} is {rounded(each.value, each.stderr)}" for (name, other), each in shown
        ]
        found = "The losses differ by more than" if differ else "The losses are not shown to be within ±"
        ends = f"of {len(apart)} models, at the ends " * (len(shown) < len(apart))
        widest = max(equivalence(each, loss_margin).smallest_margin for each in differences.values())
        # the next thousandth, as above the margin itself
        would = f" They are shown to be within {(math.floor(1000 * widest) + 1) / 1000:g} nats."
        would *= not differ and math.isfinite(widest)
        yield "loss" if differ else "loss open", f"{found} {loss_margin:g} nats: {ends}{listed(losses)} nats.{would}"


def _between(comparison: TraceComparison, names: Mapping[str, str]) -> str:
    """Return that a model is not shown to be beyond both neighbors of an interpolated one; empty where all are.

    Between its neighbors a trace may bend, but hardly leave their range.
    """
    for made, ends in comparison.interpolated.items():
        for name, trace in itertools.product(comparison.models.keys() - {made}, comparison.traces):
            own = comparison.models[name][trace]
            intervals = [paired_difference(own, end[trace]).ci95 for end in ends]
            if not (min(low for low, _ in intervals) > 0 or max(high for _, high in intervals) < 0):
                one, other = (number(end[trace]) for end in ends)
                return (
                    f"{names[made]}'s {trace.replace('-', ' ')} is interpolated between {one} and {other}, and "
                    f"{names[name]}'s, {number(own)}, is not shown to be beyond both"
                )
    return ""


def _contrary(comparison: TraceComparison, names: Mapping[str, str]) -> str:
    """Return where else a series has this loss and a trace on the other side of the other model's; empty: nowhere."""
    found: dict[str, float] = {}
    for name, places in comparison.elsewhere.items():
        (other,) = comparison.models.keys() - {name}
        for trace, (place, estimates) in itertools.product(comparison.traces, places.items()):
            theirs = comparison.models[other][trace].value
            ratio = estimates[trace].value / theirs
            if (ratio > 1) != (comparison.models[name][trace].value > theirs):
                words = f"{names[name]} has this loss, as far as can be told, {place} too, and its"
                words += f" {trace.replace('-', ' ')} there is {in_digits(ratio)} times {names[other]}'s"
                found[words] = abs(math.log(ratio))
    return max(found, key=found.__getitem__, default="")


def _conventions(least: Estimate) -> tuple[str, ...]:
    """Return the gauges that a minimal trace depends on: none where it is as good as its infimum, which has none."""
    details = least.details
    if details["infimum"] is not None and details["in_sample"] - details["infimum"] < _NEGLIGIBLE * least.stderr:
        return ()
    return tuple(details["gauged"])


def _rivals(comparison: TraceComparison, best: Mapping[str, str]) -> dict[str, tuple[str, float, tuple[float, float]]]:
    """Return by trace the model that comes next to the best, and the ratio of the best to it with its interval."""
    rivals = {}
    for trace, first in best.items():
        other = next(name for name in comparison.ranking(trace) if comparison.originals[name] != first)
        rivals[trace] = other, *comparison.ratio(trace, first, other)
    return rivals


def _ratios_in_words(
    comparison: TraceComparison, best: Mapping[str, str], names: Mapping[str, str], subject: str = ""
) -> str:
    """Return the ratio of the best model and the next one by each trace, in the direction of the table."""
    ratios = []
    for trace, (rival, *_) in _rivals(comparison, best).items():
        one, other = comparison.ordered(best[trace], rival)
        owner = "its" if names[one] == subject else f"{names[one]}'s"
        subject = names[one]
        ratio = times_in_words(*comparison.ratio(trace, one, other))
        ratios.append(f"{owner} {trace.replace('-', ' ')} is {ratio} {names[other]}'s")
    return listed(ratios)


def times_in_words(ratio: float, interval: tuple[float, float]) -> str:
    """Return a ratio with its 95 % interval, such as `0.457 times (95 % 0.432 to 0.483)`."""
    low, high = map(in_digits, interval)
    return f"{in_digits(ratio)} times (95 % {low} to {high})"


def in_digits(ratio: float) -> str:
    """Return a ratio in three digits, such as 1.20 or 123."""
    return f"{ratio:#.3g}".rstrip(".")


def _differences(
    comparison: TraceComparison, best: str, names: Mapping[str, str], min_ratio: float
) -> dict[str, Estimate]:
    """Return the differences that the verdict rests on, by what they are called, but those far beyond what counts.

    What an input does to both models alike is not in a difference.
    """
    found = {}
    for trace, (name, original) in itertools.product(comparison.traces, comparison.originals.items()):
        ratio = comparison.log_ratio(trace, name, best)
        is_far = (
            ratio is not None
            and ratio.samples >= _ENOUGH
            and abs(ratio.value) - math.log(min_ratio) > _FAR * ratio.stderr
        )
        if original != best and not is_far:
            what = f"the difference in {trace.replace('-', ' ')} of {names[name]} and {names[best]}"
            found[what] = comparison.difference(trace, name, best)
    return found


def _without_rare(
    comparison: TraceComparison, best: str, names: Mapping[str, str], loss_margin: float, min_ratio: float
) -> str:
    """Return what the verdict would be without the samples that make up much of the error of a difference."""
    left_out: list[str] = []
    while leading := rare(differences := _differences(comparison, best, names, min_ratio)):
        if len(left_out) == _MOST_LEFT_OUT:
            return f"Without it and {_MOST_LEFT_OUT - 1} more like it, yet another one makes up much of an error."
        decisive = differences[max(leading, key=leading.__getitem__)]
        left_out.append(leading_name(decisive, comparison.documents))
        comparison = _without(comparison, leading_sample(decisive))
        best = comparison.originals[comparison.ranking("trace")[0]]
    others = left_out[1:]
    without = f"it and {len(others)} more like it{','.join(filter(None, others))}" if others else "it"
    found = verdict(comparison, loss_margin=loss_margin, min_ratio=min_ratio, names=names)
    if found.flattest is None:
        return f"Without {without}, there is no verdict either: {REASONS[found.reasons[0]]}."
    return f"As a hint, since rare inputs may make up much of the mean: without {without}, {found}"


def _without(comparison: TraceComparison, sample: int) -> TraceComparison:
    judged = ("loss", *comparison.traces)

    def left(estimates: Mapping[str, Estimate]) -> dict[str, Estimate]:
        return {name: without_sample(each, sample) if name in judged else each for name, each in estimates.items()}

    return dataclasses.replace(
        comparison,
        models={model: left(estimates) for model, estimates in comparison.models.items()},
        interpolated={name: (left(one), left(other)) for name, (one, other) in comparison.interpolated.items()},
        elsewhere={
            name: {place: left(estimates) for place, estimates in places.items()}
            for name, places in comparison.elsewhere.items()
        },
        documents=(*comparison.documents[:sample], *comparison.documents[sample + 1 :]),
    )


def unlike(models: Mapping[str, Estimate]) -> tuple[str, str] | None:
    """Return the names of two models whose traces are sums over different parameters; None where all are alike."""
    (first, one), *others = models.items()
    for name, other in others:
        if list(one.by_parameter or ()) != list(other.by_parameter or ()):
            return first, name
        if one.details["num_parameters"] != other.details["num_parameters"]:
            return first, name
    return None


def warn_unlike(traces: Mapping[str, Estimate]) -> None:
    """Warn where traces, by model, are sums over different parameters."""
    if (two := unlike(traces)) is not None:
        warn(
            f"{two[0]} and {two[1]} have different parameters, and a trace is a sum over them, so the values are not "
            "comparable: expand both into one architecture first, as isoloss expand does for BERT, RoBERTa and OPT"
        )


def _next(reasons: Mapping[Reason, str], more: str, with_tasks: bool, *, is_series: bool, in_order: bool) -> list[str]:
    steps = []
    if "parameters" in reasons:
        steps.append("give BERT, RoBERTa or OPT models one architecture with isoloss expand")
    if "loss" in reasons and not is_series:
        steps.append(
            "compare checkpoints whose losses are nearer (isoloss compare takes all in a folder of checkpoints)"
        )
    if "loss" not in reasons and not reasons.keys().isdisjoint({"open", "rare", "loss open"}):
        steps.append(f"take {more}")
    if "interpolated" in reasons:
        steps.append("measure a checkpoint between these two steps, or train and save one")
    if "elsewhere" in reasons:
        steps.append("give only steps over which the loss falls, or only steps over which it rises")
    if "near" in reasons and in_order:
        steps.append("let a smaller ratio count (isoloss compare MODEL MODEL --min-ratio RATIO)")
    if not with_tasks:
        steps.append("ask which is better at a task (isoloss compare MODEL MODEL --task TASK)")
    return steps


def is_rounding(difference: Estimate) -> bool:
    """Whether a difference is one of rounding alone, on every input; of losses: then the models are one function."""
    # the mean square over inputs, from mean and variance: models of equal mean loss that differ on an input are no
    # copies
    return difference.value**2 + difference.samples * difference.stderr**2 < _SAME_NATS**2


def listed(parts: list[str]) -> str:
    """Return parts with commas and `and`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
