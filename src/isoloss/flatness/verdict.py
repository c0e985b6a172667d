"""Which of several models is the flattest, if that can be said: one verdict from the trace and the minimal trace.

A model is called the flattest only where four things hold: all models have the same parameters, over which a trace is
a sum; their losses are shown to be the same within a margin; its trace is the smallest; and so is its minimal trace,
which no rescaling of whole weight tensors can change (of units of an MLP or channels, with a finer granularity).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from isoloss.statistics.comparison import probability_above_zero
from isoloss.statistics.estimate import Estimate, rarity, rounded
from isoloss.statistics.significance import SAME_LOSS_NATS, equivalence
from isoloss.statistics.tables import probability

if TYPE_CHECKING:
    from isoloss.flatness.comparison import TraceComparison

Reason = Literal[
    "weights",
    "function",
    "parameters",
    "loss",
    "no minimal trace",
    "bounded",
    "gauges",
    "open",
    "near",
    "disagree",
    "rare",
]

# of two models: the 95 % interval of their difference then ends before 0
_SURE = 0.975  # the probability from which a model's trace is the smallest
_SAME_MINIMUM = 1e-3  # of a minimal trace: what the eps of norms leaves of a rescaling is below
_MOST_NAMED = 3  # models whose losses are told one by one
_SAME_NATS = 1e-5  # root mean square over samples, below which losses of two models differ by rounding


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which model is the flattest, or why that cannot be said; it prints as sentences.

    Attributes:
        flattest: The model's name; None: it cannot be said.
        reasons: Why it cannot: the models have the same `weights` or compute the same `function`, they have different
            `parameters` or architectures, their `loss` is not shown to be the same, there is `no minimal trace`, it is
            `bounded` by the eps of norms and so depends on the scale of the weights, the models' minimal traces have
            different `gauges`, an input is so `rare` that it makes up much of an error, a measure leaves `open` which
            is the smallest, two minimal traces are so `near` that the models may be one function, or the two measures
            `disagree`.
        text: The verdict in words, with what to do next.
    """

    flattest: str | None
    reasons: tuple[Reason, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def verdict(
    comparison: TraceComparison,
    *,
    same_loss: float = SAME_LOSS_NATS,
    names: Mapping[str, str] | None = None,
    more: str = "more inputs",
) -> Verdict:
    """Return the verdict on models that were compared.

    Args:
        comparison: What `isoloss.flatness.compare_traces` returned for them.
        same_loss: Margin in nats per predicted token within which losses count as the same: by two one-sided tests at
            5 % (`isoloss.statistics.significance`), of each model against the one with the smallest trace.
        names: What the models are called; None: their names.
        more: What would make the errors smaller.

    Raises:
        IsolossError: The margin is not above 0.

    Example:
        >>> import torch
        >>> from isoloss.flatness import compare_traces
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, n_positions=8)
        >>> model = GPT2LMHeadModel(config).eval()
        >>> ids = torch.randint(0, 8, (16, 4))
        >>> print(compare_traces({"a": model, "b": model}, [{"input_ids": ids, "labels": ids}]).verdict())
        a and b have identical weights. There is nothing to compare.
    """
    names = names or {model: model for model in comparison.models}
    weights = comparison.weights
    originals: dict[str, str] = {}  # the first model that is the same as a model, or itself
    told: dict[Reason, list[str]] = {"weights": [], "function": []}
    for name in weights:
        other = next(
            (one for one in originals.values() if _is_rounding(comparison.difference("loss", one, name))), name
        )
        originals[name] = other
        # not by the same weights alone: another config makes another function of them
        if other != name:
            reason: Reason = "weights" if weights[other] == weights[name] else "function"
            told[reason].append(f"{names[other]} and {names[name]}")
    same = []
    if told["weights"]:
        same.append(f"{_listed(told['weights'])} have identical weights.")
    if told["function"]:
        same.append(f"{_listed(told['function'])} have the same loss on every input: one function, different weights.")
    number = len(set(originals.values()))
    if number == 1:
        reasons = tuple(reason for reason, pairs in told.items() if pairs)
        return Verdict(flattest=None, reasons=reasons, text=" ".join([*same, "There is nothing to compare."]))

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
    against = dict(_reasons(comparison, originals, best, chances, names, same_loss, more))
    if against:
        text = ["No verdict on which is the flattest.", *against.values(), _next(against)]
        return Verdict(flattest=None, reasons=tuple(against), text=" ".join([*same, *text]))
    sentence = (
        f"{names[best['trace']]} is the flattest: it has the smallest trace (probability "
        f"{probability(chances['trace'])}) and the smallest minimal trace ({probability(chances['minimal-trace'])}), "
        f"at the same loss as the other{'s' * (number > 2)} within ± {same_loss:g} nats."
    )
    return Verdict(flattest=best["trace"], reasons=(), text=" ".join([*same, sentence]))


def _reasons(
    comparison: TraceComparison,
    originals: Mapping[str, str],
    best: Mapping[str, str],
    chances: Mapping[str, float],
    names: Mapping[str, str],
    same_loss: float,
    more: str,
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
    smallest = [
        f"the smallest {trace.replace('-', ' ')} (probability {probability(chance)})"
        for trace, chance in chances.items()
    ]
    if len(set(best.values())) == 1:
        said = f"{names[best['trace']]} has {_listed(smallest)}"
    else:
        said = _listed([f"{names[name]} has {what}" for name, what in zip(best.values(), smallest, strict=True)])
    minima = comparison.of("minimal-trace") if "minimal-trace" in comparison.traces else {}
    bounded = [names[model] for model, least in minima.items() if least.details["log_factor_bound"] is not None]
    if not minima:
        why = comparison.no_minimal or "it was not measured"
        yield (
            "no minimal trace",
            f"{said}, but rescaling the weights, which changes no prediction, can change this order. The minimal "
            f"trace, which no rescaling of whole tensors changes, is missing: {why}.",
        )
    elif bounded:
        yield (
            "bounded",
            f"{said}, but for {_listed(bounded)} the eps of norms limits the rescaling, so the minimal trace still "
            "depends on the scale of the weights.",
        )
    elif len({tuple(least.details["gauged"]) for least in minima.values()}) > 1:
        yield "gauges", f"{said}, but their minimal traces are fixed by different conventions (gauges)."
    elif min(chances.values()) < _SURE:
        yield "open", f"{said}: it takes {more} to tell."
    elif alike := _of_one_function(comparison, originals, best["minimal-trace"]):
        yield (
            "near",
            f"{said}, but the minimal traces of {names[best['minimal-trace']]} and {names[alike]} differ by less than "
            f"{100 * _SAME_MINIMUM:g} %, as they may for rescaled weights by the eps of norms.",
        )
    elif best["trace"] != best["minimal-trace"]:
        yield "disagree", f"{said}: the scale of the weights decides the order of the traces."
    # last: a rare input is a reason only where there would be a verdict otherwise
    elif warning := _rarity(comparison, originals, best["trace"], names):
        yield "rare", f"{said}, but {warning}."
    others = [name for name in originals if originals[name] == name != best["trace"]]
    differences = {name: comparison.difference("loss", name, best["trace"]) for name in others}
    apart = {name: each for name, each in differences.items() if not equivalence(each, same_loss).shown}
    if apart:
        # of many models, the two ends
        ordered = sorted(apart.items(), key=lambda item: item[1].value)
        shown = ordered if len(ordered) <= _MOST_NAMED else [ordered[0], ordered[-1]]
        losses = [f"{names[name]} {rounded(each.value, each.stderr)}" for name, each in shown]
        yield (
            "loss",
            f"Not all losses are shown to be within ± {same_loss:g} nats of the loss of {names[best['trace']]}. "
            f"Differences{f' of {len(apart)} models' * (len(shown) < len(apart))}: "
            f"{' to '.join(losses) if len(shown) < len(apart) else _listed(losses)}.",
        )


def _of_one_function(comparison: TraceComparison, originals: Mapping[str, str], best: str) -> str | None:
    """Return a model whose minimal trace is so near to the smallest that the two may be one function."""
    minima = comparison.of("minimal-trace")
    near = (1 + _SAME_MINIMUM) * minima[best].value
    return next((name for name in originals if originals[name] != best and minima[name].value < near), None)


def _rarity(comparison: TraceComparison, originals: Mapping[str, str], best: str, names: Mapping[str, str]) -> str:
    """Return a warning where one input makes up much of the error of a difference, and the verdict rests on it.

    With s_i the part of input i in the squared error, that error is worth 1 / sum s_i^2 equal inputs (Satterthwaite,
    1946). A difference that is sure with so few is no matter of one input, and what an input does to both models alike
    is not in the difference.
    """
    differences = {}
    for trace in comparison.traces:
        for name in (name for name in originals if originals[name] != best):
            difference = comparison.difference(trace, name, best)
            assert difference.influence is not None
            squares = np.square(difference.influence)
            if not squares.any():
                continue
            worth = dataclasses.replace(
                difference, effective_samples=max(2.0, float(squares.sum() ** 2 / np.square(squares).sum()))
            )
            if probability_above_zero(worth) < _SURE:
                title = f"the difference in {trace.replace('-', ' ')} of {names[name]} and {names[best]}"
                differences[title] = difference
    return rarity(differences)


def unlike(models: Mapping[str, Estimate]) -> tuple[str, str] | None:
    """Return the names of two models whose traces are sums over different parameters; None where all are alike."""
    (first, one), *others = models.items()
    for name, other in others:
        if list(one.by_parameter or ()) != list(other.by_parameter or ()):
            return first, name
        if one.details["num_parameters"] != other.details["num_parameters"]:
            return first, name
    return None


def _next(reasons: Mapping[Reason, str]) -> str:
    steps = []
    if "parameters" in reasons:
        steps.append("give BERT, RoBERTa or OPT models one architecture with isoloss expand")
    if "loss" in reasons:
        steps.append(
            "compare checkpoints whose losses are nearer (isoloss compare takes all in a folder of checkpoints)"
        )
    steps.append("ask which is better at a task (isoloss compare MODEL MODEL --task TASK)")
    return f"Next: {', or '.join(steps)}."


def _is_rounding(loss: Estimate) -> bool:
    """Whether a difference in loss is one of rounding alone, on every input: then the models are one function."""
    # the mean square over inputs, from mean and variance: models of equal mean loss that differ on an input are no
    # copies
    return loss.value**2 + loss.samples * loss.stderr**2 < _SAME_NATS**2


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
