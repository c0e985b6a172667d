"""What a study answers: the cards of its page's first screen, and a row for each comparison."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isoloss.config import LanguageConfig
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.external import ExternalCheckpoint
from isoloss.lab.evaluation.measures.base import make_measure
from isoloss.lab.evaluation.measures.transfer import TaskMeasure
from isoloss.lab.languages.config import PRESETS
from isoloss.registry import LANGUAGES, MEASURES, TASKS
from isoloss.report.html import Card, IntervalRow, Tone
from isoloss.run_config import TrainConfig
from isoloss.statistics.comparison import independent_difference
from isoloss.statistics.estimate import Estimate, interval, number, rounded
from isoloss.statistics.significance import LOSS_MARGIN, Equivalence, all_within, p_value
from isoloss.studies.claims import CONTROL_SHOWN, GATES, Answer, Claim, ClaimResult, Verdict
from isoloss.studies.results import (
    RESCALED,
    UNITS,
    Checkpoint,
    CheckpointEstimate,
    Results,
    averaged,
    check_same_examples,
    difference,
    mean,
    over_seeds,
    replicate,
)

TONES: Mapping[Verdict, Tone] = {
    Verdict.SHOWN: "good",
    Verdict.NO_EFFECT: "bad",
    Verdict.NOT_SHOWN: "unclear",
    Verdict.CONTRADICTED: "bad",
    Verdict.NOT_TESTED: "neutral",
    Verdict.NO_VERDICT: "neutral",
}
ANSWERS: Mapping[Verdict, str] = {  # to a question that the claim affirms
    Verdict.SHOWN: "Yes",
    Verdict.NO_EFFECT: "No effect of interest",
    Verdict.NOT_SHOWN: "Not shown",
    Verdict.CONTRADICTED: "No, the opposite",
    Verdict.NOT_TESTED: "Not tested",
    Verdict.NO_VERDICT: "No verdict",
}
MOST_CARDS = 3  # of runs that are compared
MOST_CLAIMS = 6  # that have a card
_MOST_NAMED = 4  # groups, models, languages or accuracies in a sentence
_ALPHA = 0.05
_CHECKS = GATES[:-1]  # what the primary claim waits for
_TITLES = {
    **{"kl": "KL to the truth", "loss": "loss", "trace": "trace", "minimal-trace": "minimal trace"},
    **{"effective-rank": "effective rank", "effective-dimension": "participation ratio", "cka-truth": "CKA to truth"},
}


def format_difference(difference: Estimate) -> str:
    """Return a difference with its sign, its error and a short unit: `+0.500 ± 0.010 nats/token`."""
    sign = "+" if difference.value > 0 else ""
    return f"{sign}{number(difference)} {_unit(difference)}".rstrip()


def detail(difference: Estimate) -> str:
    """Return the 95 % interval of a difference; of an exact one, that it is exact."""
    return f"95 % {interval(difference)}" if difference.stderr > 0 else "exact"


def _unit(estimate: Estimate) -> str:
    return "%" if estimate.unit == "accuracy" else UNITS.get(estimate.unit, estimate.unit)


# --- claims ----------------------------------------------------------------------------------------------------------


def claim_cards(results: Sequence[ClaimResult]) -> list[Card]:
    """Return a card for each of the first claims: the primary ones, then the gate that failed, then the others."""
    checks = [each for role in _CHECKS for each in results if each.claim.role == role]
    # what comes after it is not tested because of it
    failed = next((each for each in checks if any(_is_open(answer) for answer in each.answers)), None)
    first = sorted(results, key=lambda each: (each.claim.role != "primary", each is not failed))
    return [card_of(result.claim.statement, result) for result in first[:MOST_CLAIMS]]


def _is_open(answer: Answer) -> bool:
    return answer.role in _CHECKS and answer.verdict is not Verdict.SHOWN


def card_of(label: str, result: ClaimResult) -> Card:
    """Return the card of a claim: the verdict on one case, and its difference.

    The case is the one that was tested as a gate, else the first that is shown, contradicted or tested, in this order;
    of a claim about flatness, a minimal trace before a trace, which a rescaling can change. `label` is the question
    that the claim affirms. A claim about several cases is affirmed by all of them only.
    """
    answers = [*result.answers]
    if result.claim.measures == "flatness":
        answers.sort(key=lambda answer: not answer.case.startswith("minimal-trace"))
    judged = [answer for answer in answers if answer.verdict is not Verdict.NOT_TESTED]
    shown, opposite = (
        [answer for answer in judged if answer.verdict is verdict] for verdict in (Verdict.SHOWN, Verdict.CONTRADICTED)
    )
    gate = [answer for answer in answers if answer.role != "secondary"]
    answer = (gate or shown or opposite or judged or answers)[0]
    tone = TONES[answer.verdict]
    if answer.difference is None:
        return Card(label=label, value=ANSWERS[answer.verdict], detail=answer.explanation, tone=tone)
    others, same_loss = [each for each in answers if each is not answer], _gate(answer)
    effect, mixed = format_difference(answer.difference), not gate and len({each.verdict for each in answers}) > 1
    title = _title(answer, result.claim)
    words = [f"{title}: {detail(answer.difference)}", *_levels(answer)]
    in_full = f"{title}: {effect} ({detail(answer.difference)}), {result.words(answer)}"
    if answer.verdict is Verdict.NOT_TESTED and same_loss is not None and not same_loss.shown:
        value = "Not tested: the losses may differ"
        words = [_by(same_loss)]
    elif mixed:
        value, tone = f"{len(shown)} of {len(answers)} cases shown", "unclear"
        if opposite and shown:
            value += f", the opposite in {len(opposite)}"
        elif opposite:
            value, tone = f"The opposite in {len(opposite)} of {len(answers)} cases", TONES[Verdict.CONTRADICTED]
        words = [in_full, *_levels(answer)]
    elif answer.withheld:
        value, words = f"Not tested: {answer.withheld}", [f"{effect}; {words[0]}"]
    elif answer.verdict is Verdict.NO_EFFECT:
        value = f"{result.words(answer).removesuffix(': shown').capitalize()}: {effect}"
    elif others and not gate and answer.verdict is Verdict.NOT_SHOWN:
        value = f"Not shown in any of {len(answers)} cases"
        words = [in_full, *_levels(answer), *[CONTROL_SHOWN] * (answer.positive_control == CONTROL_SHOWN)]
    else:
        value = f"{ANSWERS[answer.verdict]}: {effect}"
        # an effect may be shown and small, and beside what is not shown stands the positive control
        if (verdict := result.words(answer)) != answer.verdict.value:
            words.append(verdict)
        elif answer.positive_control:
            words.append(answer.positive_control)
    if same_loss is not None and same_loss.shown:
        words.append(f"loss: {format_difference(same_loss.difference)}, {_within(same_loss)}")
    if len(others) == 1:
        other = "" if others[0].difference is None else f"{format_difference(others[0].difference)}, "
        words.append(f"{_title(others[0], result.claim)}: {other}{result.words(others[0])}")
    elif others:
        verdicts = Counter(each.verdict.value for each in others)
        counts = ", ".join(verdicts if len(verdicts) == 1 else (f"{n} {verdict}" for verdict, n in verdicts.items()))
        words.append(f"{len(others)} more cases below: {counts}")
    if any(_is_of_trace_alone(each, answers) for each in answers) and result.claim.measures == "flatness":
        words.append("where only the trace is shown, the scale of the weights may decide it")
    return Card(label=label, value=value, detail="; ".join(words), tone=tone)


def _is_of_trace_alone(answer: Answer, answers: Sequence[Answer]) -> bool:
    """Whether a trace has a verdict that the minimal trace of the same models does not have."""
    minimal = [each for each in answers if each.case == f"minimal-{answer.case}"]
    is_judged = answer.verdict in (Verdict.SHOWN, Verdict.CONTRADICTED)
    return is_judged and any(each.verdict is not answer.verdict for each in minimal)


def _levels(answer: Answer) -> list[str]:
    """Return the two means whose difference is judged; empty: it is a slope, or not of these as they are."""
    means = list(answer.numbers.items())[:-1]
    if len(means) != 2 or "difference" not in answer.numbers:
        return []
    (first, one), (second, two) = means
    return [f"{number(two)} ({second}) against {number(one)} {_unit(one)} ({first})"]


def _gate(answer: Answer) -> Equivalence | None:
    """Return the test of equal loss that decided whether a claim was tested; None: it needed none."""
    return None if answer.verdict is Verdict.NO_VERDICT else answer.same_loss


def _within(gate: Equivalence) -> str:
    within = f"within ± {gate.margin:g}"
    return f"{within}: shown" if gate.shown else f"not shown to be {within}"


def _by(gate: Equivalence) -> str:
    """Return by how much losses may differ that are not shown to be the same."""
    return f"by {format_difference(gate.difference)}, {_within(gate)}"


def claim_rows(results: Sequence[ClaimResult]) -> list[IntervalRow]:
    """Return a row for each case of each claim, and above those that need the same loss one for the loss."""
    rows = []
    for result in results:
        above = None
        for answer in result.answers:
            gate = _gate(answer)
            # the cases of one contrast share its test
            if gate is not None and gate is not above:
                rows.append(_loss_row(result, answer, gate))
            rows.append(_row(result, answer))
            above = gate
    return rows


def _loss_row(result: ClaimResult, answer: Answer, gate: Equivalence) -> IntervalRow:
    low, high = (rounded(end, gate.difference.stderr).split(" ±")[0] for end in gate.interval)
    return IntervalRow(
        label=f"loss ({answer.contrast})" if answer.contrast else "loss",
        effect=format_difference(gate.difference),
        # not the 95 % of the other rows: two one-sided tests at 5 % ask whether this one is inside the margin
        interval=f"90 %: {low} to {high}" if gate.difference.stderr > 0 else "exact",
        group=_group(result.claim),
        verdict=_within(gate),
        tone="good" if gate.shown else "unclear",
    )


def _group(claim: Claim) -> str:
    return claim.statement if claim.role == "secondary" else f"{claim.statement} ({claim.role})"


def _row(result: ClaimResult, answer: Answer) -> IntervalRow:
    claim = result.claim
    label, difference = _title(answer, claim), answer.difference
    bare = IntervalRow(label=label, effect="") if difference is None else interval_row(label, difference)
    return dataclasses.replace(
        bare,
        claimed=None if difference is None else claimed(claim),
        # traces and minimal traces differ in size: only accuracies share an axis
        scale=claim.id if difference is not None and difference.unit == "percentage points" else "",
        group=_group(claim),
        verdict=result.words(answer),
        tone=TONES[answer.verdict],
    )


def _title(answer: Answer, claim: Claim) -> str:
    measures = claim.measures
    name = measures.get("", "") if isinstance(measures, Mapping) else measures if isinstance(measures, str) else ""
    return title_of(answer.case or name or claim.id)


def interval_row(label: str, difference: Estimate, *, group: str = "") -> IntervalRow:
    """Return the row of a difference, with its 95 % interval."""
    low, high = difference.ci95
    ends = interval(difference) if difference.stderr > 0 else "exact"
    about = format_difference(difference)
    return IntervalRow(
        label=label, effect=about, interval=ends, value=difference.value, low=low, high=high, group=group
    )


def claimed(claim: Claim) -> tuple[float | None, float | None]:
    """Return the ends of the range of differences that a claim states; None: open."""
    return {
        "increase": (claim.margin, None),
        "decrease": (None, -claim.margin),
        "no change within": (-claim.margin, claim.margin),
    }[claim.direction]


def claim_lines(result: ClaimResult) -> list[tuple[Tone, str, str]]:
    """Return for each case of a claim its tone, the case, and the verdict with its effect and 95 % interval."""
    lines = []
    for answer in result.answers:
        difference, gate, verdict = answer.difference, _gate(answer), result.words(answer)
        if answer.verdict is Verdict.NOT_TESTED and gate is not None and not gate.shown:
            verdict += f": the losses may differ {_by(gate)}"
        effect = "" if difference is None else f"; {format_difference(difference)} ({detail(difference)})"
        lines.append((TONES[answer.verdict], answer.case, f"{verdict}{effect}"))
    return lines


# --- a study without claims: its runs compared -----------------------------------------------------------------------


class Comparison:
    """The last checkpoints of a study's groups of runs, and the differences between groups.

    Runs of a group with the same language and seed, such as external checkpoints at several steps of one training, are
    averaged as one replicate. An external checkpoint without a seed is a replicate by itself. Two groups with the same
    replicates are paired; otherwise they count as independent.
    """

    def __init__(self, results: Results) -> None:
        self.results = results
        self.groups: dict[str, dict[tuple[str, int | str], list[Checkpoint]]] = {}
        kinds = set()
        for name, experiment in results.experiments.items():
            last = results.of_run(name)
            # what others need may be measured by nothing
            if not last:
                continue
            replicates = self.groups.setdefault(experiment.group or name, {})
            replicates.setdefault(replicate(name, experiment), []).append(last[max(last)])
            about = results.run(name).result()
            external = isinstance(experiment.config, ExternalCheckpoint)
            kinds.add((about.get("architecture") if external else experiment.size, about["num_parameters"]))
        # flatness depends on how a function is parametrized
        self.one_architecture = len(kinds) == 1
        self.has_one_run_each = all(len(replicates) == 1 for replicates in self.groups.values())

    @property
    def has_unknown_seeds(self) -> bool:
        """Whether a group has several checkpoints without a seed."""
        several = [replicates for replicates in self.groups.values() if len(replicates) > 1]
        return any(isinstance(name, str) for replicates in several for _, name in replicates)

    @property
    def first(self) -> str:
        """The group that the others are compared with."""
        return next(iter(self.groups))

    def value(self, key: str, group: str) -> float:
        """Return the mean of an estimate over the replicates of a group."""
        return statistics.fmean(
            statistics.fmean(each[key].value for each in of_one) for of_one in self.groups[group].values()
        )

    def difference(self, key: str, first: str, second: str) -> Estimate | None:
        """Return second - first, paired where it can be; None where the two cannot be compared, or have no error."""
        if not (self.one_architecture or self._is_of_the_function(key)):
            return None
        try:
            one, two = self._replicates(key, first), self._replicates(key, second)
            if self._are_paired(first, second):
                partners = two if one.keys() == two.keys() else dict(zip(one, two.values(), strict=True))
                return mean([difference(partners[name], each) for name, each in one.items()])
            check_same_examples(*one.values(), *two.values())
            return independent_difference(over_seeds([*two.values()]), over_seeds([*one.values()]))
        except IsolossError:  # measured on different sentences, or one run against several
            return None

    def _replicates(self, key: str, group: str) -> dict[tuple[str, int | str], CheckpointEstimate]:
        return {name: averaged([each[key] for each in of_one]) for name, of_one in self.groups[group].items()}

    def _are_paired(self, first: str, second: str) -> bool:
        one, two = self.groups[first], self.groups[second]
        return one.keys() == two.keys() or len(one) == len(two) == 1

    def over(self, first: str, second: str) -> str:
        """Return what the error of a difference is over, in words; empty: the examples that both were measured on."""
        one, two = self.groups[first], self.groups[second]
        if len(one) == len(two) == 1:
            return ""
        if self._are_paired(first, second):
            return f"over {len(one)} {self._kind(first, second)}, paired"
        return f"over {len(two)} and {len(one)} {self._kind(first, second)}, not paired"

    def _kind(self, *groups: str) -> str:
        """Return what the replicates of groups are: seeds, or checkpoints without a seed."""
        by_name = any(isinstance(name, str) for group in groups for _, name in self.groups[group])
        return "checkpoints without a seed" if by_name else "seeds"

    def _is_of_the_function(self, key: str) -> bool:
        unit = next(iter(self.results.checkpoints.values()))[key].unit
        return unit == "accuracy" or key in ("loss", "kl", "entropy")

    def rows(self) -> list[IntervalRow]:
        """Return a row for each group but the first and each measure."""
        rows = []
        for name in list(self.groups)[1:]:
            for key in self.results.keys:
                difference = self.difference(key, self.first, name)
                if difference is None:
                    continue
                over = self.over(self.first, name)
                group = f"{name} minus {self.first}" + (f", {over}" if over else "")
                rows.append(interval_row(title_of(key), difference, group=group))
        return rows

    def best(self, key: str) -> tuple[str, str, bool]:
        """Return the best group, the next, and whether it is the best for sure.

        For sure: it differs from each other group at 5 %, by Bonferroni's correction for their number.
        """
        sign = -1 if self._higher_is_better(key) else 1
        means = {name: sign * self.value(key, name) for name in self.groups}
        best, second, *_ = sorted(means, key=lambda name: means[name])
        others = [self.difference(key, best, name) for name in self.groups if name != best]
        level = _ALPHA / len(others)
        clear = all(each is not None and p_value(each) < level for each in others)
        return best, second, clear

    def _higher_is_better(self, key: str) -> bool:
        return next(iter(self.results.checkpoints.values()))[key].unit == "accuracy"

    def cards(self) -> list[Card]:
        """Return the cards: which is the flattest, whether the losses are the same, which transfers best."""
        keys, loss = self.results.keys, self.results.loss_key
        if len(self.groups) < 2:
            found = {key: mean([*self._replicates(key, self.first).values()]) for key in keys[:MOST_CARDS]}
            n = len(self.groups[self.first])
            over = f"mean over {n} {self._kind(self.first)}" if n > 1 else ""
            return [
                Card(label=title_of(key), value=f"{number(one)} {_unit(one)}", detail=over)
                for key, one in found.items()
            ]
        flatness = [key for key in RESCALED if key in keys]
        same = [self._same_loss(loss)] if loss in keys else []
        cards = [self._flattest(flatness, same[0].tone if same else "unclear")] if flatness else []
        return [*cards, *same, *(self._best(key) for key in keys if self._higher_is_better(key))][:MOST_CARDS]

    def _flattest(self, keys: Sequence[str], same_loss: Tone) -> Card:
        label = "Which is flatter?" if len(self.groups) == 2 else "Which is the flattest?"
        if not self.one_architecture:
            why = "The architectures or sizes differ, and a trace depends on the parameters that it is a sum over."
            return Card(label=label, value="Not comparable", detail=why, tone="unclear")
        found = {key: self.best(key) for key in keys}
        words = "; ".join(self._by_how_much(key, *each[:2]) for key, each in found.items())
        sure = {best for best, _, clear in found.values() if clear}
        if len(sure) == 1 and all(clear for *_, clear in found.values()):
            if same_loss != "good":
                but = "but the losses differ" if same_loss == "bad" else "but the losses may differ"
                return Card(label=label, value=f"{sure.pop()}, {but}", detail=words, tone="unclear")
            return Card(label=label, value=sure.pop(), detail=words, tone="good")
        if not sure:
            return Card(label=label, value="No difference shown", detail=words, tone="unclear")
        return Card(label=label, value="The measures disagree", detail=words, tone="unclear")

    def _by_how_much(self, key: str, best: str, second: str) -> str:
        """Return by how much the best group differs from the next, in words."""
        title = title_of(key)
        one, other = self._ordered(best, second)
        if (difference := self.difference(key, other, one)) is None:
            return f"{title}: {best} has the best value; the differences have no error"
        return f"{title}, {one} minus {other}: {format_difference(difference)} ({self._detail(difference, one, other)})"

    def _ordered(self, one: str, other: str) -> tuple[str, str]:
        """Return the groups of a difference, the first one minus the second: of two, as in the rows."""
        first, *rest = self.groups
        return (rest[0], first) if len(rest) == 1 else (one, other)

    def _detail(self, difference: Estimate, first: str, second: str) -> str:
        """Return the 95 % interval of a difference, and what its error is over."""
        return " ".join(filter(None, (detail(difference), self.over(second, first))))

    def _same_loss(self, key: str) -> Card:
        best, *_ = self.best(key)
        others = [name for name in self.groups if name != best]
        known = {name: each for name in others if (each := self.difference(key, best, name)) is not None}
        label = "The same loss?"
        if len(known) < len(others):
            return Card(label=label, value="Not known", detail="The differences have no error.", tone="unclear")
        same, decisive = all_within(known, LOSS_MARGIN)
        one, other = self._ordered(decisive, best)
        difference = self.difference(key, other, one)
        assert difference is not None
        words = f"{one} minus {other}; {self._detail(difference, one, other)}; "
        words += f"losses within ± {LOSS_MARGIN:g} nats/token count as the same"
        value, verdict = {
            True: ("Yes", Verdict.SHOWN),
            False: ("No", Verdict.CONTRADICTED),
            None: ("Not shown", Verdict.NOT_SHOWN),
        }[same]
        return Card(label=label, value=f"{value}: {format_difference(difference)}", detail=words, tone=TONES[verdict])

    def _best(self, key: str) -> Card:
        best, second, clear = self.best(key)
        label = f"Which is better on {key.partition('-')[2] or key}?"
        about = self._by_how_much(key, best, second)
        if not clear:
            return Card(label=label, value="No difference shown", detail=about, tone="unclear")
        return Card(label=label, value=best, detail=about, tone="good")


def title_of(key: str) -> str:
    """Return what an estimate is called in a sentence: `probe accuracy, root` for `probe-root`."""
    name, of, case = key.partition(" (")
    if name in _TITLES:
        return f"{_TITLES[name]}{of}{case}"
    kind, _, task = key.partition("-")
    names = {"probe": "probe accuracy", "finetune": "fine-tuned accuracy"}
    return f"{names[kind]}, {task}" if kind in names and task else key


def setup(results: Results) -> str:
    """Return what was trained and measured in a few sentences, which define the words that the page uses."""
    comparison = Comparison(results)
    on = {e.config.measured_on for e in results.experiments.values() if isinstance(e.config, ExternalCheckpoint)}
    where = f"measured on {' and '.join(sorted(on))}" if on else _end(results)
    seeds = "" if on else _seeds(comparison)
    words, keys = [f"{seeds}{_some(comparison.groups)}, {where}.", *_trained(results), *_rates(results)], results.keys
    if "kl" in keys:
        words.append("The KL to the truth is the loss above its smallest possible value.")
    if "trace" in keys:
        words.append(
            "The trace of the Fisher information says how sharply the loss rises when the weights move a little: a "
            "smaller trace is flatter."
        )
    if "minimal-trace" in keys:
        words.append(
            "The minimal trace is its minimum over all rescalings of the weights that leave every prediction unchanged."
        )
    return " ".join([*words, *_tasks(results)])


def _end(results: Results) -> str:
    """Return when training ended: at one target for all runs, or at the last step."""
    configs = [each.config for each in results.experiments.values() if isinstance(each.config, TrainConfig)]
    targets = {config.stages[-1].target if config.stages else None for config in configs}
    (target, *others) = targets or {None}
    if target is None or others:
        return "at the end of training"
    kind = "KL" if target[0] == "kl" else target[0]
    return (
        f"each trained until its {kind} on some validation sentences was at most {target[1]:g} nats (on others, as "
        "below, it is often a little higher)"
    )


def _seeds(comparison: Comparison) -> str:
    """Return how many seeds each group of runs has, or how many runs where there are several languages."""
    counts = sorted(map(len, comparison.groups.values()))
    languages = {language for replicates in comparison.groups.values() for language, _ in replicates}
    number = " to ".join(dict.fromkeys(f"{count:,}" for count in (counts[0], counts[-1])))
    kind = ("seed" if len(languages) == 1 else "run") + "s" * (counts[-1] > 1)
    return f"{number} {kind}{' each' * (len(counts) > 1)} of "


def _trained(results: Results) -> list[str]:
    """Return which models were trained on which languages, in a sentence."""
    models: dict[str, None] = {}
    languages: dict[str, set[str]] = {}
    for name, experiment in results.experiments.items():
        config = experiment.config
        if isinstance(config, TrainConfig) and results.of_run(name):
            models[f"{config.model} ({results.run(name).result()['num_parameters']:,} parameters)"] = None
            languages.setdefault(_language(config.language), set()).add(repr(config.language))
    each = [f"{len(alike)} languages, each {text}" if len(alike) > 1 else text for text, alike in languages.items()]
    return [f"The models are {_some(models)}, trained on {_some(each)}."] if models else []


def _language(config: LanguageConfig) -> str:
    """Return what `isoloss ls languages` says of a language; of one that is no preset, with its numbers."""
    if preset := next((f"{name} ({text})" for name, (one, text) in PRESETS.items() if one == config), ""):
        return preset
    numbers = [
        f"{name.replace('_', ' ')} {value:,}"
        for name, value in vars(config).items()
        # 0 and -1 leave something out
        if name != "seed" and isinstance(value, int | float) and value > 0
    ]
    return LANGUAGES.summary(config.kind).rstrip(".") + f" ({', '.join(numbers)})" * bool(numbers)


def _rates(results: Results) -> list[str]:
    """Return the learning rates of each optimizer in a sentence, where runs differ in these."""
    rates: dict[str, set[float]] = {}
    of_runs = set()
    groups: dict[str, bool] = {}  # and whether its name has its rates
    for name, experiment in results.experiments.items():
        config, group = experiment.config, experiment.group or name
        if not isinstance(config, TrainConfig):
            continue
        optimizers = [stage.optimizer or config.optimizer for stage in config.stages] or [config.optimizer]
        of_runs.add(tuple((optimizer.name, optimizer.learning_rate) for optimizer in optimizers))
        numbers = {float(number) for number in re.findall(r"\d+\.?\d*(?:e-?\d+)?", group)}
        groups[group] = groups.get(group, True) and numbers >= {each.learning_rate for each in optimizers}
        for optimizer in optimizers:
            rates.setdefault(optimizer.name, set()).add(optimizer.learning_rate)
    if len(of_runs) < 2 or sum(map(len, rates.values())) < 2:
        return []
    are_named = len(groups) <= _MOST_NAMED and all(groups.values())
    listed = "; ".join(
        f"{name} at {_listed([f'{rate:g}' for rate in sorted(of_one)])}" for name, of_one in rates.items()
    )
    if any(len(of_one) > 1 for of_one in rates.values()):
        return [] if are_named else [f"Learning rates: {listed}."]
    one = "Each optimizer has one learning rate, and at other rates the answer may differ"
    return [f"{one}." if are_named else f"{one}: {listed}."]


def _tasks(results: Results) -> list[str]:
    """Return what each task asks, in a sentence, and the accuracy of its majority class."""
    tasks: dict[str, list[str]] = {}
    for key in results.keys:
        if task := task_of(key):
            tasks.setdefault(task, []).append(key)
    words = []
    if any(not key.startswith("finetune-") for keys in tasks.values() for key in keys):
        words.append("A probe is a linear classifier on the model's features, for a downstream task.")
    languages = [e.config.language for e in results.experiments.values() if e.config.language is not None]
    words += [f"Task {task}: {asked}." for task in tasks if (asked := _asked(task, languages))]
    if rates := list(filter(None, (_majority(results, task, keys) for task, keys in tasks.items()))):
        words.append(f"The majority class alone has an accuracy of {', '.join(rates)}.")
    return words


def task_of(key: str) -> str:
    """Return the task that an estimate is an accuracy on; empty: it is none."""
    try:
        return MEASURES.match(key)[1].get("TASK", "")
    except IsolossError:  # an estimate may have a name of its own
        return ""


def _asked(task: str, languages: Sequence[LanguageConfig]) -> str:
    """Return what a task asks, as `isoloss ls tasks` says it; empty: it is known to the language alone."""
    texts = {pattern: text for language in languages for pattern, text in language.task_patterns.items()}
    texts |= {name: TASKS.summary(name) for name in TASKS if name not in texts}
    first, _, last = task.rpartition("-")
    for pattern, text in texts.items():
        stem, _, end = pattern.rpartition("-")
        about = text.partition(" (")[0]
        # NAME-latent is of all other tasks
        if task == pattern or (stem.isupper() and last == end):
            return about
        # prefix-L is the symbol over the first L tokens
        if first == stem and end.isupper():
            return re.sub(rf"\b{end}\b", last, about, flags=re.IGNORECASE)
    return ""


def definitions(results: Results) -> list[str]:
    """Return what each accuracy on a task is, in a sentence; nothing where there are many."""
    keys, first = [key for key in results.keys if task_of(key)], next(iter(results.checkpoints.values()))
    told = [f"{title_of(key)}: {definition(key, first[key].settings)}." for key in keys]
    return told if len(told) <= _MOST_NAMED else []


def definition(key: str, settings: Mapping[str, Any]) -> str:
    """Return what an accuracy on a task is, with how many training sentences and draws.

    Example:
        >>> from isoloss.studies.answer import definition
        >>> definition("one-hot-prefix-4", {"num_train": 50, "probe_solver": "convex"})
        'accuracy of the same probe on the tokens themselves, one-hot: what a model must beat (50 training sentences)'
    """
    about = MEASURES.summary(MEASURES.match(key)[0]).partition(", e.g. ")[0].rstrip(".")
    text = about[:1].lower() + about[1:]
    decisive = ("num_train", "probe_draws", "probe_solver")
    measure = make_measure(key, {name: settings[name] for name in decisive if name in settings})
    if not isinstance(measure, TaskMeasure):
        return text
    number, draws = measure.drawn()
    sentences = "all training sentences" if isinstance(number, str) else f"{number:,} training sentences"
    return f"{text} ({sentences}{f'; {draws} draws' if draws else ''})"


def _some(names: Iterable[str]) -> str:
    """Return the first few names as a list in a sentence, and how many more there are."""
    first = [*names]
    # "and 1 more" would be as long as the name
    if len(first) > _MOST_NAMED + 1:
        first[_MOST_NAMED:] = [f"{len(first) - _MOST_NAMED} more"]
    return _listed(first)


def _listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence."""
    comma = "; " if any(", " in word for word in words) else ", "
    return " and ".join(filter(None, [comma.join(words[:-1]), *words[-1:]]))


def _majority(results: Results, task: str, keys: Sequence[str]) -> str:
    """Return the accuracy of always guessing a task's most common class, with the task; empty if it is not known."""
    found = [each[key].details.get("majority_rate") for each in results.checkpoints.values() for key in keys]
    rates = sorted({f"{100 * rate:.2f}" for rate in found if rate is not None}, key=float)
    return f"{' to '.join(dict.fromkeys((rates[0], rates[-1])))} % ({task})" if rates else ""


def below_majority(results: Results) -> list[str]:
    """Return a sentence for each task in which probes are less accurate than its most common class."""
    found = []
    for key in (key for key in results.keys if key.startswith("probe-")):
        probes = [each[key] for each in results.checkpoints.values()]
        if below := sum(probe.value < probe.details.get("majority_rate", 0) for probe in probes):
            found.append(
                f"{below} of {len(probes)} probes of {key.removeprefix('probe-')} are less accurate than always "
                "guessing the most common class. Where many are, a task can show little."
            )
    return found
