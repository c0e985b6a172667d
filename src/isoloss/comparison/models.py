"""The result of comparing models: one table of losses, traces, robustness and tasks, answers, and a verdict.

A model's estimates have the names that `isoloss.comparison.verdict` and `isoloss.flatness.robustness.ROBUSTNESS` give
them, and `probe-TASK` for each task.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import itertools
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isoloss.checkpoints.places import series_of
from isoloss.comparison.series import MOST_UNCERTAIN, Pair, Series, counted, jumps, pairs, summary
from isoloss.comparison.verdict import (
    REASONS,
    TraceComparison,
    Verdict,
    copies_in_words,
    in_digits,
    is_rounding,
    listed,
    times_in_words,
    verdict,
)
from isoloss.statistics.comparison import times, without_sample
from isoloss.statistics.estimate import (
    Estimate,
    accuracy_bounds,
    adjustment,
    html_table,
    interval,
    leading_name,
    leading_sample,
    number,
    rare,
    rounded,
    samples_of,
)
from isoloss.statistics.significance import (
    LOSS_MARGIN,
    MIN_RATIO,
    all_within,
    equivalence,
    is_beyond,
    mcnemar,
    p_value,
)
from isoloss.statistics.tables import short_names, text_table

# what the tables call an estimate; those that are not here are shown under their own names or not at all
TITLES = {
    "loss": "loss",
    "bits-per-byte": "loss, bits per byte",
    "trace": "trace",
    "minimal-trace": "minimal trace",
    "without-embeddings": "trace without embeddings",
    "int8-rise": "rise with 8-bit weights",
    "int8-loss": "loss with 8-bit weights",
    "int4-rise": "rise with 4-bit weights",
    "int4-loss": "loss with 4-bit weights",
    "noise-rise": "rise with 10 % noise",
}
PROBE = "probe-"  # before the name of a task
_LEAST_ROUNDED = 0.9  # of the weights of linear maps; with fewer, the rise says little about the model at few bits
_LEAST_TEST = 20  # examples: the error of an accuracy over fewer is often far off, and 0 where all agree
_STATES = {
    "last": "the last token",
    "first": "the first token",
    "mean": "the mean over tokens",
    "concatenate": "all tokens",
}
_ROBUST = {"int4-rise": "More robust at 4 bits?", "noise-rise": "More robust to noise?"}
_MOST_RARE = 5  # models that are named because one input makes up much of their error
_MILLI = 1e-3  # nats, below which values are shown in thousandths
_NO_MATTER = "No difference that matters"
_OTHER_FOUR_BITS = re.compile("(nf4|int4-.+)-rise")
FARTHEST = 5 * LOSS_MARGIN  # nats, beyond which two losses are not called near
_BRIEF = ("loss", "trace", "minimal-trace", "int4-rise", "noise-rise")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of the measurements to one question.

    Attributes:
        question: Two or three words.
        answer: A few words, with the number.
        detail: The numbers behind the answer, with errors.
        holds: True: yes; False: no; None: not shown either way.
    """

    question: str
    answer: str
    detail: str
    holds: bool | None

    def __str__(self) -> str:
        return f"{self.question} {self.answer}{f' ({self.detail})' * bool(self.detail)}"


@dataclass(frozen=True, repr=False, kw_only=True)
class ModelComparison(TraceComparison):
    """The result of `isoloss.compare`: it prints as one table with the answers below it.

    All other models are compared with the first.

    Attributes:
        loss_margin: The margin in nats per predicted token within which two losses count as the same.
        min_ratio: The smallest ratio of two traces that counts.
        inputs: The inputs that the models were measured on, in words.
        num_held: How many sequences there are of these inputs; None: it is not known, or as many as are asked for.
        has_most_documents: Whether the inputs are of nearly all documents that there are, as
            `isoloss.text.inputs.Inputs` tells.
        measures: The measures that were requested beside the usual ones.
    """

    loss_margin: float = LOSS_MARGIN
    min_ratio: float = MIN_RATIO
    inputs: str = ""
    num_held: int | None = None
    has_most_documents: bool = False
    measures: tuple[str, ...] = ()

    @functools.cached_property
    def titles(self) -> dict[str, str]:
        """The title of each estimate that is shown, in the order of the table."""
        own = {name: name for name in self.names if name.partition(",")[0] in self.measures}
        titles = TITLES | own | {name: f"accuracy on {task}, %" for name, task in self.tasks.items()}
        if not any(each.details["embeddings"] for each in self.of("trace").values()):
            del titles["without-embeddings"]  # it is the trace
        if self._part:
            # beside the loss of all sequences
            of = f", {self._part:,} sequences"
            titles |= {name: title + of for name, title in titles.items() if name.endswith("-loss")}
        shown = {name: title for name, title in titles.items() if name in self.names}
        return {name: title + ", millinats" * (self._scale(name) > 1) for name, title in shown.items()}

    @property
    def _part(self) -> int:
        """How many sequences the weights are changed on; 0: all, or none."""
        first = next(iter(self.models.values()))
        sequences: int = first["int4-rise"].details["sequences"] if "int4-rise" in first else 0
        return sequences if sequences < first["trace"].details["sequences"] else 0

    def _scale(self, name: str) -> float:
        """Return what the estimates of this name are multiplied by where they are shown."""
        return self._scales[name]

    @functools.cached_property
    def _scales(self) -> dict[str, float]:
        def scale(values: Collection[Estimate]) -> float:
            in_nats = all(each.unit.startswith("nats") for each in values)
            return 1e3 if in_nats and 0 < max(abs(each.value) for each in values) < _MILLI else 1.0

        return {name: scale(self.of(name).values()) for name in self.names}

    def shown(self, name: str, estimate: Estimate) -> Estimate:
        """Return an estimate of this name, or a difference of two, in the unit of its title."""
        return times(estimate, self._scale(name))

    @property
    def tasks(self) -> dict[str, str]:
        """The task of each estimate that is an accuracy."""
        return {name: name.removeprefix(PROBE) for name in self.names if name.startswith(PROBE)}

    @functools.cached_property
    def short(self) -> dict[str, str]:
        """The models' names as they are printed, without the folders that all have in common."""
        return short_names(list(self.models))

    @functools.cached_property
    def series(self) -> dict[str, Series]:
        """The models by series and step, if there are more than two and their names have steps."""
        found = series_of(self.models)
        # a run's folder of checkpoints is called by the run
        runs = [run if (run := key.removesuffix("/checkpoints")) not in found else key for key in found]
        short = short_names(runs) if found else {}
        return {short[run]: series for run, series in zip(runs, found.values(), strict=True)}

    @functools.cached_property
    def pairs_at_same_loss(self) -> dict[str, list[Pair]]:
        """For each series but the first, by its name, the pairs with the first series."""
        if len(self.series) < 2:
            return {}
        first, *others = self.series.items()
        return {other[0]: pairs(self, first, other, self.loss_margin) for other in others}

    @functools.cached_property
    def nearest(self) -> tuple[str, str, float] | None:
        """Checkpoints of two series with near losses, and a margin in nats within which these are the same.

        Of the pairs whose losses are the same, it is the one with the lowest loss; if none are, of those whose losses
        are near; and if none are near, the one with the nearest losses. None if no two series are compared at the same
        loss, or only copies.
        """
        margins, losses = {}, {model: loss.value for model, loss in self.of("loss").items()}
        for other in (name for name, found in self.pairs_at_same_loss.items() if found):
            for two in itertools.product(next(iter(self.series.values())).values(), self.series[other].values()):
                if self.originals[two[0]] != self.originals[two[1]]:
                    margins[two] = equivalence(self.difference("loss", *two), self.loss_margin).smallest_margin
        if not margins:
            return None
        same, near = (
            [two for two, margin in margins.items() if margin <= farthest]
            for farthest in (self.loss_margin, max(FARTHEST, self.loss_margin))
        )
        near = same or near
        lowest = {two: (max(losses[model] for model in two), margins[two]) for two in near}
        first, second = min(lowest, key=lowest.__getitem__) if near else min(margins, key=margins.__getitem__)
        # the next thousandth of a nat, as a difference at the margin itself is not within it
        return first, second, max(self.loss_margin, (math.floor(1000 * margins[first, second]) + 1) / 1000)

    def verdict(
        self, *, loss_margin: float | None = None, min_ratio: float | None = None, more: str = "more inputs"
    ) -> Verdict:
        """Return which model is the flattest, or why there is no verdict.

        The arguments are those of `TraceComparison.verdict`; None: the values of the comparison.
        """
        return verdict(
            self,
            loss_margin=self.loss_margin if loss_margin is None else loss_margin,
            min_ratio=self.min_ratio if min_ratio is None else min_ratio,
            more=more,
            names=self.short,
            with_tasks=bool(self.tasks),
        )

    def answers(self) -> list[Answer]:
        """Return an answer to each question: same loss? flatter? more robust? better at each task?"""
        if len(self.models) == 1:
            return []
        if self.series:
            return self._of_series()
        if self.verdict().reasons == ("weights",):
            return [Answer(question="Same model?", answer="Yes, the weights are identical", detail="", holds=True)]
        answers, (first, *others) = [self._same_loss(), self._flatter()], self.models
        for name in (name for name in (*_ROBUST, *self.tasks) if name in self.names):
            # a rescaled copy may lose more or less at 4 bits than the original
            if all(self._is_copy(name, first, other) for other in others):
                continue
            if name in _ROBUST:
                answers.append(self._more_robust(name, _ROBUST[name]))
                continue
            task = self.tasks[name]
            best = self._best(name, f"Better at {task}?", largest=True)
            answer = f"{best.answer}, by a probe of {self._states(name)}"
            majority = next(iter(self.of(name).values())).details["majority_rate"]
            if all(accuracy.value <= majority for accuracy in self.of(name).values()):
                neither = "neither" if len(self.models) == 2 else "none"
                answer += f"; {neither} is above the majority class's {100 * majority:.2f} %"
            answers.append(dataclasses.replace(best, answer=answer))
        return answers

    def _of_series(self) -> list[Answer]:
        """Return an answer for each measure of one series; of several, an answer on each pair of them."""
        (first, series), *others = self.series.items()
        answers = []
        for name, title in self.along.items() if not others else ():
            moved, detail = self._moves(series, name)
            question = f"{title[0].upper()}{title[1:]}?"
            answers.append(Answer(question=question, answer=f"It {moved}", detail=detail, holds=None))
        for other, found in self.pairs_at_same_loss.items():
            answer, detail, flattest = "No verdict: the losses never overlap", "", None
            if found:
                last = found[-1]
                judged = last.comparison.verdict()
                flattest = judged.flattest
                of_two = listed(
                    [
                        f"{TITLES[trace]} is {times_in_words(*last.comparison.ratio(trace, *last.names))}"
                        for trace in last.comparison.traces
                    ]
                )
                at = f"at {number(last.loss)} nats"
                answer = f"{flattest}, {at}" if flattest else f"No verdict {at}: {REASONS[judged.reasons[0]]}"
                detail = f"{other}'s {of_two} {first}'s ({last.first}, {last.second})"
                if len(found) > 1:
                    detail += f"; the smallest loss of {len(found)} pairs"
                    counts = f". {counted(found, first, other)}"
                    is_judged_elsewhere = not flattest and any(each.comparison.verdict().flattest for each in found)
                    answer, detail = (answer + counts, detail) if is_judged_elsewhere else (answer, detail + counts)
                detail += self._beyond(last.loss, first, other) + self._beyond(last.loss, other, first)
            question = f"{first} or {other}: which is flatter at the same loss?"
            answers.append(Answer(question=question, answer=answer, detail=detail, holds=True if flattest else None))
        if others and "int4-loss" in self.names:
            answers.append(self._rounded_series())
        return answers

    def _beyond(self, loss: Estimate, name: str, other: str) -> str:
        """Return that a series goes on below the smallest loss at which it is compared; empty where it does not."""
        least = min((self.models[model]["loss"] for model in self.series[name].values()), key=lambda each: each.value)
        if least.value >= loss.value - self.loss_margin:
            return ""
        return f". {name} goes on to {number(least)} nats, where {other} has nothing to compare"

    def _rounded_series(self) -> Answer:
        """Return the least loss with 4-bit weights of each series, and how far rounding moves a loss."""
        least, models = [], []
        for name, series in self.series.items():
            losses = {step: self.models[model]["int4-loss"] for step, model in series.items()}
            step = min(losses, key=lambda at: losses[at].value)
            models.append(series[step])
            least.append(f"{name} {number(losses[step])} nats" + f" (step {step:,})" * (len(series) > 1))
        rises = sorted(self.of("int4-rise").values(), key=lambda rise: rise.value)
        low, high = (number(self.shown("int4-rise", rise)) for rise in (rises[0], rises[-1]))
        unit = "millinats" if self._scale("int4-rise") > 1 else "nats"
        answer, holds = "No difference shown", None
        best, *others = sorted(models, key=lambda model: self.models[model]["int4-loss"].value)
        difference = min((self.difference("int4-loss", other, best) for other in others), key=lambda each: each.ci95[0])
        if difference.ci95[0] > 0:
            answer, holds = f"{self.short[best]}, by {number(difference)} nats", True
        return Answer(
            question="Least loss with 4-bit weights?",
            answer=answer,
            detail=f"the least of each: {', '.join(least)}; rounding moves a loss by {low} to {high} {unit}",
            holds=holds,
        )

    @property
    def along(self) -> dict[str, str]:
        """The titles of the measures that are shown along the steps of a series."""
        shown = [name for name in ("loss", *self.traces, "int4-loss", *self.tasks) if name in self.paired]
        return {name: self.titles[name] for name in shown}

    def _moves(self, series: Series, name: str) -> tuple[str, str]:
        """Return how an estimate changes from the first step to the last one, in words, and by how much."""
        first, *_, last = series.values()
        values = [number(self.shown(name, self.models[model][name])) for model in (first, last)]
        of_ratio = self.log_ratio(name, last, first) if name in self.traces else None
        if of_ratio is not None and of_ratio.stderr <= MOST_UNCERTAIN:
            ratio, (low, high) = self.ratio(name, last, first)
            detail = f"{in_digits(ratio)} times, 95 % {in_digits(low)} to {in_digits(high)}"
            low, high = low - 1, high - 1
            if rare({"": of_ratio}):
                without = math.exp(without_sample(of_ratio, leading_sample(of_ratio)).value)
                detail += f"; one input makes up much of the error, without it {in_digits(without)} times"
        else:
            difference = self.shown(name, self.difference(name, last, first))
            low, high = difference.ci95
            detail = f"difference {number(difference)}, 95 % {interval(difference)}"
        word = "rises" if low > 0 else "falls" if high < 0 else "is not shown to change,"
        return f"{word} from {values[0]} to {values[1]}", detail

    def _series_texts(self, more: str) -> list[str]:
        texts = []
        for name, series in self.series.items():
            if len(series) > 1:
                steps = list(series)
                moved = (f"{title} {' ('.join(self._moves(series, each))})" for each, title in self.along.items())
                texts.append(f"{name}, from step {steps[0]:,} to {steps[-1]:,}: {'; '.join(moved)}.")
                texts += jumps(self, series, self.short)
        texts += copies_in_words(self, self.short).values()
        first = next(iter(self.series))
        for other, found in self.pairs_at_same_loss.items():
            if found:
                texts.append(summary(found, first, other, more))
                continue
            texts.append(f"The losses of {first} and {other} never overlap, so they have no pair at the same loss.")
        texts += [str(self._rounded_series())] if len(self.series) > 1 and "int4-loss" in self.names else []
        if any(self.pairs_at_same_loss.values()):
            texts.append(
                "One run with each of two settings shows how these runs differ, but says nothing about the settings: "
                "for that, train each with several seeds (isoloss study)."
            )
        if any(self.pairs_at_same_loss.values()) and len(self.titles) > len(self.traces) + 1:
            text = "Only traces are compared at the same loss; other measures are at each checkpoint's own loss."
            if self.nearest is not None:
                one, two, margin = self.nearest
                names, minus = (
                    f"{self.short[one]} and {self.short[two]}",
                    f"{self.short[two]} minus {self.short[one]}",
                )
                apart = number(self.difference("loss", two, one))
                text += (
                    " To learn which is more robust at 4 bits or to noise, or better at a task, compare two "
                    "checkpoints alone. "
                )
                if margin > max(FARTHEST, self.loss_margin):
                    text += f"None are near enough for that: the nearest are {names}, and {minus} is "
                    text += f"{apart} nats. Measure checkpoints in between."
                else:
                    near = "near losses" if margin > self.loss_margin else "the same loss"
                    text += f"Of those with {near}, {names} have the lowest: {minus} is {apart} nats, "
                    text += f"the same within {margin:g} nats."
                    text += (
                        " Is that near enough for you? If you report it, say that the losses were seen before the "
                        "margin was set."
                    ) * (margin > self.loss_margin)
                    text += " For flatness, the pairs above count: they are at one loss."
            texts.append(text)
        return texts

    def _states(self, task: str) -> str:
        """Return which token states the probe of a task reads, in words."""
        return _STATES[next(iter(self.of(task).values())).details["pooling"]]

    def _same_loss(self) -> Answer:
        # of more than two models, against the model that the verdict is about
        first = next(iter(self.models)) if len(self.models) == 2 else self.ranking("trace")[0]
        names = self.short
        differences = {other: self.difference("loss", other, first) for other in self.models if other != first}
        holds, decisive = all_within(differences, self.loss_margin)
        most = differences[decisive]
        detail = f"{names[decisive]} minus {names[first]}: {number(most)} nats/token, 95 % {interval(most)}"
        if holds and max(map(abs, most.ci95)) > self.loss_margin:
            low, high = (
                rounded(end, most.stderr).split(" ±")[0] for end in equivalence(most, self.loss_margin).interval
            )
            detail += f"; the test, one at 5 % for each side of the margin, takes the 90 % interval, {low} to {high}"
        if holds and self.loss_margin != LOSS_MARGIN:
            within = "they differ, but not by more than" if p_value(most) < 0.05 else "within"
            detail += f"; {within} the margin that was set (default {LOSS_MARGIN:g})"
        answer = {
            True: f"Yes, within ± {self.loss_margin:g} nats",
            False: f"No, {abs(most.value):.3g} nats apart",
            None: f"Not shown within ± {self.loss_margin:g} nats",
        }[holds]
        return Answer(question="Same loss?", answer=answer, detail=detail, holds=holds)

    def _flatter(self) -> Answer:
        found, names = self.verdict(), self.short
        parts = []
        for trace in self.traces:
            best, rival, *_ = self.ranking(trace)
            one, other = self.ordered(best, rival)
            ratio = times_in_words(*self.ratio(trace, one, other))
            parts.append(f"{names[one]}'s {TITLES[trace]} is {ratio} {names[other]}'s")
        if found.flattest is not None:
            rival = next(model for model in self.ranking("trace") if model != found.flattest)
            one, other = self.ordered(found.flattest, rival)
            ratio = in_digits(self.ratio("trace", one, other)[0])
            beside = f"; {names[one]} has {ratio} times its trace"
            if one == found.flattest:
                beside = f", with {ratio} times the trace of {names[other]}"
            answer = names[found.flattest] + beside
            if is_beyond(self.difference("loss", one, other), LOSS_MARGIN):
                parts.append(
                    "the losses differ, within the margin that was set, and that alone may move a trace: to be sure, "
                    "compare checkpoints whose losses are nearer"
                )
            return Answer(question="Flatter?", answer=answer, detail="; ".join(parts), holds=True)
        # at other losses, nothing else that is open matters
        reason = REASONS["loss" if "loss" in found.reasons else found.reasons[0]]
        return Answer(question="Flatter?", answer=f"No verdict: {reason}", detail="; ".join(parts), holds=None)

    def _more_robust(self, name: str, question: str) -> Answer:
        is_rounded = name == "int4-rise"
        shares = {name: n / total for name, (n, total) in self._rounded().items()} if is_rounded else {"": 1.0}
        least = min(shares, key=shares.__getitem__)
        if shares[least] < _LEAST_ROUNDED:
            share = f"{100 * shares[least]:.0f} %"
            answer = f"No answer: only {share} of the weights of {self.short[least]}'s linear maps are rounded"
            return Answer(question=question, answer=answer, detail="", holds=None)
        best, same = self._least_rise(name, question), self._same_loss().holds
        if same:
            formats = [each for each in self.paired if _OTHER_FOUR_BITS.fullmatch(each)] if is_rounded else []
            if formats:
                best = self._over_formats({each: self._least_rise(each, question) for each in (name, *formats)})
            elif best.holds and is_rounded:
                caveat = "other formats of 4 bits may order models in another way (--measures nf4-rise)"
                best = dataclasses.replace(best, detail=f"{best.detail}; {caveat}")
            if self.loss_margin > LOSS_MARGIN and is_rounded and "int4-loss" in self.names:
                # a smaller rise may be no smaller loss within a wide margin
                return dataclasses.replace(best, detail=f"{best.detail}; {self._rounded_losses()}")
            return best
        # a smaller rise is no advantage at a larger loss
        reason = "the losses differ" if same is False else "the losses are not shown to be the same"
        answer, detail = f"Not judged: {reason}", f"rises of the loss: {best.detail}"
        if is_rounded and "int4-loss" in self.names:
            detail = f"{self._rounded_losses()}; rises: {best.detail}"
        if self._none_rises(name):
            answer = f"No loss rises by more than {_MILLI:g} nats; which is more robust is not judged: {reason}"
        return dataclasses.replace(best, answer=answer, detail=detail, holds=None)

    def _none_rises(self, name: str) -> bool:
        return all(rise.ci95[1] < _MILLI for rise in self.of(name).values())

    def _least_rise(self, name: str, question: str) -> Answer:
        """Return whose loss rises less, where that matters: by more than 0.001 nats, and the other's by more, too.

        Both must be shown: with more inputs, it may turn out not to be so, and a winner must not depend on how many
        there are.
        """
        found, (best, other) = self._best(name, question, largest=False), self._closest(name, largest=False)
        others = [model for model in self.models if model != best]
        matters = ""
        if self._none_rises(name):
            matters = f": no loss rises by more than {_MILLI:g} nats"
        elif all(equivalence(self.difference(name, model, best), _MILLI).shown for model in others):
            matters = f": the rises are within {_MILLI:g} nats of each other"
        elif found.holds and self.models[other][name].ci95[0] <= _MILLI:
            matters = f" is shown: {self.short[other]}'s loss is not shown to rise by more than {_MILLI:g} nats"
        elif found.holds and not is_beyond(self.difference(name, other, best), _MILLI):
            matters = f" is shown: the rises are not shown to differ by more than {_MILLI:g} nats"
        return dataclasses.replace(found, answer=f"{_NO_MATTER}{matters}", holds=None) if matters else found

    def _over_formats(self, found: Mapping[str, Answer]) -> Answer:
        """Return one answer on several formats of 4 bits, by the name of the rise."""
        by: dict[str | None, list[str]] = {}
        for name, each in found.items():
            by.setdefault(self.short[self._closest(name, largest=False)[0]] if each.holds else None, []).append(name)
        first, *others = found
        if len(by) > 1:
            parts = [f"{best or 'no difference that matters'} by {listed(names)}" for best, names in by.items()]
            answer = f"That depends on the format: {', '.join(parts)}"
        elif None in by:
            is_shown = all(each.answer.startswith(f"{_NO_MATTER}:") for each in found.values())
            answer = f"{_NO_MATTER}{'' if is_shown else ' is shown'}, by {listed([*found])}"
        else:
            answer = f"{found[first].answer}; also by {listed(others)}"
        detail = "; ".join(f"{name}: {each.detail}" for name, each in found.items())
        return dataclasses.replace(
            found[first], answer=answer, detail=detail, holds=None if len(by) > 1 or None in by else True
        )

    def _rounded_losses(self) -> str:
        losses = [f"{self.short[model]} {number(loss)}" for model, loss in self.of("int4-loss").items()]
        return f"losses with 4-bit weights: {', '.join(losses)}"

    def _rounded(self) -> dict[str, tuple[int, int]]:
        """Return for each model how many weights of its linear maps are rounded, and how many there are."""
        details = {model: rise.details for model, rise in self.of("int4-rise").items()}
        return {model: (about["rounded_weights"], about["map_weights"]) for model, about in details.items()}

    def _closest(self, name: str, *, largest: bool) -> tuple[str, str]:
        """Return the best model and the one that it is least certain to be better than, which need not be the next."""
        ranked = self.ranking(name)
        best, *others = reversed(ranked) if largest else ranked
        rivals = [other for other in others if not self._is_copy(name, best, other)] or others
        return best, max(rivals, key=lambda other: p_value(self.difference(name, best, other)))

    def _best(self, name: str, question: str, *, largest: bool) -> Answer:
        names, (best, other) = self.short, self._closest(name, largest=largest)
        first, second = self.ordered(best, other)
        difference = self.shown(name, self.difference(name, first, second))
        low, high = difference.ci95
        nats = f"{'millinats' if self._scale(name) > 1 else 'nats'}/token"
        unit, of_difference = ("%", "points") if largest else (nats, nats)
        values = [f"{names[model]} {number(self.shown(name, self.models[model][name]))}" for model in (first, second)]
        minus = f"{names[first]} minus {names[second]} {number(difference)} {of_difference}"
        detail = f"{', '.join(values)} {unit}; {minus}, 95 % {interval(difference)}"
        is_shown = low > 0 or high < 0
        if name in self.tasks:
            # the interval is too narrow where few test examples, or no two of them, differ: this test is exact
            exact = mcnemar(*(self._correct(name, model) for model in (first, second)))
            detail += f", p {exact.p_value:.2g} by McNemar's test"
            is_shown &= exact.p_value < 0.05
        if is_shown:
            by = f", by {number(times(difference, 1 if difference.value > 0 else -1))} {of_difference}"
            answer = f"{names[best]}{'' if largest else ', whose loss rises less'}{by}"
            return Answer(question=question, answer=answer, detail=detail, holds=True)
        return Answer(question=question, answer="No difference shown", detail=detail, holds=None)

    def _is_copy(self, name: str, one: str, other: str) -> bool:
        """Whether two models are one function with the same estimate of this name."""
        return self.originals[one] == self.originals[other] and is_rounding(self.difference(name, one, other))

    def _correct(self, task: str, model: str) -> NDArray[np.bool_]:
        """Return (n,) bool: which test examples the probe of a model classifies correctly."""
        accuracy = self.models[model][task]
        assert accuracy.influence is not None
        # the influence of an example on a mean is its value minus the mean
        return accuracy.value + accuracy.influence > 0.5

    def ordered(self, best: str, rival: str) -> tuple[str, str]:
        """Return the models of a difference, the first one minus the second: as in the table, in the order given."""
        order = list(self.models)
        one, other = sorted((best, rival), key=order.index, reverse=True)
        return one, other

    def __repr__(self) -> str:
        return f"ModelComparison({len(self.models)} models; flattest: {self.verdict().flattest or 'no verdict'})"

    def __str__(self) -> str:
        tables = (self.table(), *self.pairs_tables())
        table, *of_pairs = (text_table(header, rows, left=left) for header, rows, left in tables)
        return "\n\n".join([table, *self.texts(), *of_pairs])

    def _repr_html_(self) -> str:
        table, *of_pairs = (html_table(rows, header) for header, rows, _ in (self.table(), *self.pairs_tables()))
        return "".join([table, *(f"<p>{html.escape(text)}</p>" for text in self.texts()), *of_pairs])

    def texts(self, more: str = "more inputs") -> list[str]:
        """Return the sentences below the table: units and errors, the verdict, and the other answers."""
        if len(self.models) == 1:
            texts = []
        elif self.series:
            texts = self._series_texts(more)
        else:
            # the verdict has the answers to the first two questions in it, but not that a wider margin was set
            answers = self.answers()
            widened = answers[:1] if self.loss_margin > LOSS_MARGIN and len(answers) > 1 else []
            texts = [str(self.verdict(more=more)), *map(str, [*widened, *answers[2:]])]
        return [self.caption(), *texts, *filter(None, [self.warning])]

    @property
    def warning(self) -> str:
        """That one input makes up much of the error of some traces; empty where none does, or the verdict says so."""
        verdict = None if self.series or len(self.models) == 1 else self.verdict()
        said = str(verdict) if verdict is not None and "rare" in verdict.reasons else None
        # by document, where these have names: models by trace
        found: dict[str, dict[str, list[str]]] = {}
        for trace in self.traces:
            leading = rare(estimates := self.of(trace))
            for model in sorted(leading, key=leading.__getitem__, reverse=True):
                document = leading_name(estimates[model], self.documents)
                if said is not None and document in said:
                    continue
                of_document = found.setdefault(document, {})
                of_document.setdefault(trace, []).append(f"{self.short[model]} ({100 * leading[model]:.0f} %)")
        if not found:
            return ""
        samples = next(iter(self.of("trace").values())).details["clusters"]
        parts: list[str] = []
        for name, of_document in found.items():
            traces = []
            for trace, models in of_document.items():
                more = [f"{len(models) - _MOST_RARE:,} more"] * (len(models) > _MOST_RARE)
                traces.append(f"the {TITLES[trace]} of {listed([*models[:_MOST_RARE], *more])}")
            one = f"another one{name}"
            if not parts:
                one = f"One of the {samples}{name} makes up more than a quarter of the squared error"
            parts.append(f"{one} of {', and of '.join(traces)}")
        is_judged = verdict is not None and verdict.flattest is not None
        return (
            f"{'; '.join(parts)}: with so few like {'them' if len(parts) > 1 else 'it'}, these errors are unreliable."
            + " The verdict rests on their differences, which are less uneven, or far beyond what counts." * is_judged
        )

    def caption(self) -> str:
        """Return the units of the numbers and the samples behind their errors, in words."""
        trace = next(iter(self.of("trace").values()))
        notes = [
            "In nats per predicted token unless a unit is named; ± is the standard error over "
            f"{samples_of(trace)}, not over trainings"
        ]
        if adjusted := adjustment(trace):
            # the same checkpoint behind another first model may be adjusted in another way
            is_chosen = trace.details["auxiliary_bigrams"] and len(self.models) > 1
            chosen = f", as is best for {self.short[next(iter(self.models))]}" if is_chosen else ""
            notes.append(f"Traces are {adjusted}{chosen}")
        if minima := [*self.of("minimal-trace").values()] if "minimal-trace" in self.names else []:
            part = minima[0].details.get("granularity", "tensor")
            notes.append(
                f"Minimal traces are over one factor for each {part}: other exact rescalings, such as of channels one "
                "by one, can still change them (--rescaling-granularity)"
            )
        if self._part:
            rise = next(iter(self.of("int4-rise").values()))
            clusters = "" if rise.details["clusters"] == "sequences" else f"{samples_of(rise)} in "
            notes.append(f"Rises, and losses with rounded weights, are over {clusters}{self._part:,} of the sequences")
        if "noise-rise" in self.names:
            noisy = next(iter(self.of("noise-rise").values()))
            notes.append(
                f"Errors with noise are over {samples_of(noisy)} and {noisy.details['draws']} draws, each added and "
                "subtracted"
            )
        if "int4-rise" in self.names:
            counts = {f"{n:,} of {of:,} weights of linear maps": model for model, (n, of) in self._rounded().items()}
            beside = len(counts) > 1
            notes.append(
                "Rounded: " + ", ".join(share + f" of {self.short[model]}" * beside for share, model in counts.items())
            )
        for name, task in self.tasks.items():
            details = next(iter(self.of(name).values())).details
            few = ", too few for reliable errors" * (details["num_test"] < _LEAST_TEST)
            seen = details.get("overlap", 0)
            shared = f", {100 * seen:.1f} % of which are training examples, too" if seen else ""
            notes.append(f"{task}: {accuracy_bounds(details)}, {details['num_test']:,} test examples{shared}{few}")
        if self.tasks:
            states = self._states(next(iter(self.tasks)))
            notes.append(
                f"Accuracies are of a linear probe of {states}: another pooling, or other training examples, may rank "
                "the models differently"
            )
        return "".join(f"{note}. " for note in notes).rstrip()

    def table(self, *, brief: bool = False) -> tuple[list[str], list[list[str]], int]:
        """Return the table as text: header, rows, and how many columns are text.

        Of two models, a row is a measure, with the second minus the first; of more, a row is a model, and a `brief`
        table has the measures that fit a terminal.
        """
        names = self.short
        if len(self.models) == 2:
            first, second = self.models
            rows = []
            for name, title in self.titles.items():
                row = [title, *(number(self.shown(name, each)) for each in self.of(name).values()), "", ""]
                if name in self.paired:
                    difference = self.shown(name, self.difference(name, second, first))
                    row[3:] = number(difference), interval(difference)
                rows.append(row)
            return ["", *names.values(), "second minus first", "95 % interval"], rows, 1
        shown = {name: title for name, title in self.titles.items() if not brief or name in self._brief}
        cells = {
            model: [number(self.shown(name, estimates[name])) for name in shown]
            for model, estimates in self.models.items()
        }
        ordered = [model for series in self.series.values() for model in series.values()] or list(cells)
        return ["model", *shown.values()], [[names[model], *cells[model]] for model in ordered], 1

    def pairs_tables(self) -> list[tuple[list[str], list[list[str]], int]]:
        """Return the pairs of the first series and each other one, as `table` does, and which series is flatter."""
        tables, first = [], next(iter(self.series), "")
        for other, found in self.pairs_at_same_loss.items():
            rows = []
            for pair in found:
                judged = pair.comparison.verdict()
                flatter = judged.flattest or f"no verdict: {REASONS[judged.reasons[0]]}"
                ratios = []
                for name in pair.comparison.traces:
                    ratio, interval = pair.comparison.ratio(name, *pair.names)
                    ratios.append(f"{in_digits(ratio)} ({' to '.join(map(in_digits, interval))})")
                rows.append([pair.first, pair.second, flatter, number(pair.loss), *ratios])
            if rows:
                heads = [f"{TITLES[name]}, {other} / {first} (95 %)" for name in found[0].comparison.traces]
                tables.append(([first, other, "flatter by both traces", "loss, nats", *heads], rows, 3))
        return tables

    @property
    def _brief(self) -> set[str]:
        return {*_BRIEF, *self.tasks, *(name for name in self.titles if name not in TITLES)}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        about = {"inputs": self.inputs, "loss_margin": self.loss_margin, "min_ratio": self.min_ratio}
        answers = {"answers": [dataclasses.asdict(answer) for answer in self.answers()]}
        judged = {"verdict": dataclasses.asdict(self.verdict())} if len(self.models) > 1 else {}
        at_one_loss = [
            {
                **{"first": pair.first, "second": pair.second, "loss": pair.loss.to_dict()},
                "log_ratios": {
                    name: None if ratio is None else ratio.to_dict()
                    for name in pair.comparison.traces
                    for ratio in [pair.comparison.log_ratio(name, *pair.names)]
                },
                "verdict": dataclasses.asdict(pair.comparison.verdict()),
            }
            for found in self.pairs_at_same_loss.values()
            for pair in found
        ]
        of_series = {"series": self.series, "pairs_at_same_loss": at_one_loss} if self.series else {}
        return {**about, **super().to_dict(), **judged, **answers, **of_series, "warning": self.warning}
