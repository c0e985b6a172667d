"""Series of checkpoints: how measures change over the steps, and two series at the same loss.

A series is a mapping from step to model: the checkpoints of one training run, or of another folder or hub name with
steps in its names (`isoloss.checkpoints.places.series_of`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from isoloss.comparison.verdict import REASONS, TraceComparison, in_digits
from isoloss.statistics.comparison import linear_combination
from isoloss.statistics.estimate import Estimate, number, rare
from isoloss.statistics.jumps import JUMP, find_jumps
from isoloss.statistics.significance import equivalence

Series = Mapping[int, str]
Place = tuple[int, ...]  # a step of a series, or the two between which it is interpolated

MOST_UNCERTAIN = 0.5  # error of a logarithm, above which the delta method gives it no interval


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A checkpoint of one series and another series at the same loss.

    Attributes:
        first: The checkpoint or steps of the first series, in words.
        second: The same for the second series.
        loss: The loss at which they are compared.
        comparison: The comparison of both, by the names of their series; one is interpolated if its series has no
            checkpoint at this loss.
    """

    first: str
    second: str
    loss: Estimate
    comparison: TraceComparison

    @property
    def names(self) -> tuple[str, str]:
        """The second series and the first: differences are second minus first, ratios second over first."""
        first, second = self.comparison.models
        return second, first


def interpolated(lower: Mapping[str, Estimate], upper: Mapping[str, Estimate], loss: Estimate) -> dict[str, Estimate]:
    r"""Return the traces of a series where its loss is `loss`, linear in the loss between two neighboring checkpoints.

    With the losses $L_1$ and $L_2$ of the neighbors, $w = (L - L_1) / (L_2 - L_1)$ and $T = (1 - w) T_1 + w T_2$. The
    error is from the delta method, $\psi = (1 - w) \psi_{T_1} + w \psi_{T_2} + s (\psi_L - (1 - w) \psi_{L_1} - w
    \psi_{L_2})$ with the slope $s = (T_2 - T_1) / (L_2 - L_1)$, where all influences are over the same samples. It does
    not cover the curvature of the trace between the neighbors.

    Args:
        lower: The estimates of one neighbor: `loss`, `trace` and, where it was measured, `minimal-trace`.
        upper: The estimates of the other neighbor.
        loss: A loss between theirs.
    """
    one, two = lower["loss"], upper["loss"]
    weight = (loss.value - one.value) / (two.value - one.value)
    found = {"loss": loss}
    for name in ("trace", "minimal-trace"):
        if name in lower:
            slope = (upper[name].value - lower[name].value) / (two.value - one.value)
            terms = [(1 - weight, lower[name]), (weight, upper[name])]
            # their sum is 0, and their error is that of the weight
            terms += [(slope, loss), (-slope * (1 - weight), one), (-slope * weight, two)]
            found[name] = linear_combination(terms, method=f"{lower[name].method}, interpolated")
    return found


def pairs(
    comparison: TraceComparison, first: tuple[str, Series], second: tuple[str, Series], margin: float
) -> list[Pair]:
    """Return pairs of two series, each with its name, at the same loss, from the largest loss to the smallest.

    A checkpoint is paired with the checkpoint of the other series with the nearest loss, if both losses are shown to be
    the same within the margin. Otherwise the other series is interpolated between its last two neighbors whose losses
    enclose this one. As a trace may bend between them, such a pair has a verdict only where the checkpoint's traces are
    beyond those of both neighbors. A loss may fall to this one and rise to it again, so a pair has no verdict where the
    order of its traces is another at other steps with this loss. Nothing is extrapolated. Copies of an earlier
    checkpoint in their series have no pair.
    """
    first, second = ((name, without_copies(comparison, series)) for name, series in (first, second))
    found: list[Pair] = []
    paired: set[str] = set()
    for (name, series), (other_name, others) in ((second, first), (first, second)):
        for step, model in series.items():
            if model in paired:
                continue
            mine = f"{name} at step {step:,}" if len(series) > 1 else name
            loss = comparison.models[model]["loss"]
            near = {other: comparison.difference("loss", other, model) for other in others.values()}
            same = [other for other, each in near.items() if equivalence(each, margin).shown]
            if same:
                partner = min(same, key=lambda other: abs(near[other].value))
                place: Place = (next(step for step, other in others.items() if other == partner),)
                theirs = f"{other_name} {_in_words(place)}" if len(others) > 1 else other_name
                estimates = dict(comparison.models[partner])
                paired.add(partner)
                made = {}
            else:
                enclosing = _enclosing(comparison, others, loss.value)
                if enclosing is None:
                    continue
                place, partner = enclosing, others[enclosing[0]]
                theirs = f"{other_name} {_in_words(place)}"
                lower, upper = (comparison.models[others[at]] for at in enclosing)
                estimates = interpolated(lower, upper, loss)
                made = {other_name: (lower, upper)}
            two = {other_name: (partner, estimates), name: (model, dict(comparison.models[model]))}
            words = (theirs, mine)
            if name == first[0]:
                two, words = dict(reversed(two.items())), (mine, theirs)
            elsewhere = {
                other_name: _elsewhere(comparison, others, model, place, margin),
                name: _elsewhere(comparison, series, model, (step,), margin),
            }
            of_two = _of_two(comparison, two, made, elsewhere)
            found.append(Pair(first=words[0], second=words[1], loss=loss, comparison=of_two))
    return sorted(found, key=lambda pair: -pair.loss.value)


def _enclosing(comparison: TraceComparison, series: Series, loss: float) -> tuple[int, int] | None:
    """Return the last two neighboring steps whose losses enclose a loss."""
    for first, second in reversed(list(itertools.pairwise(series))):
        ends = sorted(comparison.models[series[step]]["loss"].value for step in (first, second))
        if ends[0] <= loss <= ends[1] and ends[0] < ends[1]:
            return first, second
    return None


def _elsewhere(
    comparison: TraceComparison, series: Series, model: str, place: Place, margin: float
) -> dict[str, Mapping[str, Estimate]]:
    """Return where else, in words, a series has a model's loss, with its estimates there.

    It has this loss at checkpoints whose losses are the same within the margin, or not shown to differ, and between
    neighbors of which one is above and one below. A row of such checkpoints is one place: that of `place` is left out.
    """
    times: list[dict[Place, Mapping[str, Estimate]]] = []
    before, side_before = 0, 0
    for step, other in series.items():
        difference, estimates = comparison.difference("loss", other, model), comparison.models[other]
        low, high = difference.ci95
        side = 0 if equivalence(difference, margin).shown else (low > 0) - (high < 0)
        if side == 0 and (side_before or not times):
            times.append({})
        if side == 0:
            times[-1][(step,)] = estimates
        elif side * side_before < 0:
            between = interpolated(comparison.models[series[before]], estimates, comparison.models[model]["loss"])
            times.append({(before, step): between})
        before, side_before = step, side
    others = [time for time in times if time.keys().isdisjoint({place, *((step,) for step in place)})]
    return {_in_words(at): estimates for time in others for at, estimates in time.items()}


def _in_words(place: Place) -> str:
    return f"at step {place[0]:,}" if len(place) == 1 else f"between steps {place[0]:,} and {place[1]:,}"


def _of_two(
    comparison: TraceComparison,
    two: Mapping[str, tuple[str, Mapping[str, Estimate]]],
    made: Mapping[str, tuple[Mapping[str, Estimate], Mapping[str, Estimate]]],
    elsewhere: Mapping[str, Mapping[str, Mapping[str, Estimate]]],
) -> TraceComparison:
    shown = ("loss", *comparison.traces)
    models = {name: {each: estimates[each] for each in shown} for name, (_, estimates) in two.items()}
    return dataclasses.replace(
        comparison,
        models=models,
        # the weights of an interpolated model are nobody's, and its neighbors have one architecture
        weights={name: "" if name in made else comparison.weights[model] for name, (model, _) in two.items()},
        architectures={name: comparison.architectures[model] for name, (model, _) in two.items()},
        interpolated=made,
        elsewhere=elsewhere,
    )


def without_copies(comparison: TraceComparison, series: Series) -> Series:
    """Return a series without the copies of its earlier checkpoints."""
    first = {comparison.originals[model]: step for step, model in reversed(list(series.items()))}
    return {step: model for step, model in series.items() if first[comparison.originals[model]] == step}


def jumps(comparison: TraceComparison, series: Series, names: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each jump of loss or trace along a series; copies of another checkpoint are left out."""
    steps, models = zip(*without_copies(comparison, series).items(), strict=True)
    lengths = [after - before for before, after in itertools.pairwise(steps)]
    for name in ("loss", "trace"):
        # a trace moves by factors
        move = comparison.difference if name == "loss" else comparison.log_ratio
        # a comparison has no trace that is not above 0
        found = list(filter(None, (move(name, after, before) for before, after in itertools.pairwise(models))))
        for place in find_jumps([each.ci95 for each in found], lengths):
            # an error that rests on one input tells no jump
            if rare({"": found[place]}) or (name == "trace" and found[place].stderr > MOST_UNCERTAIN):
                continue
            before, after = models[place : place + 2]
            size = f"by {number(comparison.difference('loss', after, before))} nats"
            if name == "trace":
                ratio, (low, high) = comparison.ratio(name, after, before)
                size = f"to {in_digits(ratio)} times (95 % {in_digits(low)} to {in_digits(high)})"
            yield (
                f"The {name} jumps between {names[before]} and {names[after]}, {size}: more than {JUMP:g} times "
                "the median move at the neighboring steps."
            )


def counted(found: list[Pair], first: str, second: str) -> str:
    """Return in how many pairs each series is flatter, or why none of them has a verdict, in words."""
    verdicts = [pair.comparison.verdict() for pair in found]
    flattest = [each.flattest for each in verdicts]
    if not any(flattest):
        why = Counter(REASONS[each.reasons[0]] for each in verdicts)
        return "None of them has a verdict: " + "; ".join(f"in {count}, {reason}" for reason, count in why.items())
    one, other = (flattest.count(name) or "none" for name in (first, second))
    open_ones = flattest.count(None)
    rest = f"; {open_ones} {'has' if open_ones == 1 else 'have'} no verdict" if open_ones else ""
    return f"By both traces, {first} is flatter in {one} of them and {second} in {other}{rest}"


def summary(found: list[Pair], first: str, second: str, more: str) -> str:
    """Return a summary of pairs at the same loss: how often each series is flatter, and the verdict on the last one."""
    last = found[-1]
    pair = f"{last.first} and {last.second}, at {number(last.loss)} nats"
    if last.comparison.interpolated:
        pair += " (interpolated in the loss: the errors do not cover how a trace bends between the two steps)"
    judged = last.comparison.verdict(more=more)
    pair += f". {judged}"
    if judged.flattest and any(last.comparison.elsewhere.values()):
        pair += " The order of the traces is the same at the other steps with this loss."
    if len(found) == 1:
        return f"There is one pair at the same loss: {pair}"
    counts = counted(found, first, second)
    if any(not {"rare", "open", "loss open"}.isdisjoint(each.comparison.verdict().reasons) for each in found[:-1]):
        counts += f". For a verdict on others, take {more}"
    return f"There are {len(found)} pairs at the same loss. {counts}. The pair with the smallest loss is {pair}"
