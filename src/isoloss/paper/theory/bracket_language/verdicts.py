"""What the paper states about the bracket language, as printed and as mended, and whether the figures bear it out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from isoloss.paper.theory.bracket_language import study
from isoloss.paper.theory.bracket_language.heads import HeadRow, binomial_stderr
from isoloss.paper.theory.bracket_language.study import Result, SolutionRow
from isoloss.paper.theory.statements import Statement

ZERO_LOSS = 1e-9  # squared answers
EXACT = 1e-9  # relative error of what holds exactly
DESCENT_ALLOWED = 0.01  # of the bound
ERRORS = 4.0  # standard errors that a frequency may be off; there are a dozen of them


def judge(result: Result) -> list[Statement]:
    """Return the statements, those on traces first, with their verdicts."""
    return [*_on_traces(result), *_on_conditions(result), *_downstream(result), *_on_width(result)]


def _on_traces(result: Result) -> list[Statement]:
    two = _rows(result, study.TWO)
    narrow = [row for row in two if row.width == 2]
    wide = [row for row in two if row.width > 2]
    constructed = [*two, *_rows(result, study.FEATURES), *_rows(result, study.BALANCED)]
    smooth = [row for row in result.solutions if row.solution != study.KINKS]
    largest = max(row.flatness.loss for row in constructed)
    gap = max(abs((row.hessian or 0.0) / row.flatness.trace - 1) for row in narrow)
    exact = max(abs(row.flatness.ratio - 1) for row in wide)
    at_two = max(abs(row.flatness.trace * math.sqrt(row.length) / 2 - 1) for row in narrow)
    below = min(row.flatness.ratio / (1 - math.sqrt(row.flatness.loss)) for row in smooth)
    lowest = min(row.flatness.trace * math.sqrt(row.length) / 2 for row in wide)
    example = wide[-1]
    factors = [
        f"{row.flatness.ratio:.1f} ({other.flatness.ratio:.1f} once balanced) at T = {row.length}"
        for row, other in zip(_rows(result, study.FEATURES), _rows(result, study.BALANCED), strict=True)
    ]
    return [
        Statement(
            text="Both solutions, two neurons and random features, have zero loss.",
            evidence=f"largest loss {largest:.1e}; {ZERO_LOSS:.0e} allowed",
            shown=largest <= ZERO_LOSS,
        ),
        Statement(
            text="Lemma G.4, mended: at zero loss the trace of the Hessian is 2 E|grad f|^2; the paper lacks the 2.",
            evidence=f"two neurons, the loss differentiated twice: relative gap {gap:.1e}; {EXACT:.0e} allowed",
            shown=gap <= EXACT,
        ),
        Statement(
            text="Lemma G.1 as printed: at zero loss the trace is at least sqrt(4/T) for every m >= 2.",
            evidence=f"m = {example.width} with two neurons has {example.flatness.trace:.4g} at T = {example.length}, "
            f"where sqrt(4/T) is {math.sqrt(4 / example.length):.4g}; the lowest has {lowest:.4g} of that",
            shown=lowest >= 1 - EXACT,
        ),
        Statement(
            text="Lemma G.1, mended: the trace is at least 4 / (m sqrt(T)), and two neurons reach it at every width.",
            evidence=f"two neurons: off by {at_two:.1e} from 2 / sqrt(T) at m = 2 and by {exact:.1e} from the bound at "
            f"m = {', '.join(map(str, sorted({row.width for row in wide})))}, {EXACT:.0e} allowed; the lowest of all "
            f"solutions, allowing for its loss, has {below:.9f} of the bound",
            shown=at_two <= EXACT and exact <= EXACT and below >= 1 - EXACT,
        ),
        Statement(
            text="Random features are sharper than two neurons of a model with as many neurons.",
            evidence=f"trace as a multiple of the bound for the same width: {', '.join(factors)}",
            shown=all(row.flatness.ratio > 1 + DESCENT_ALLOWED for row in _rows(result, study.BALANCED)),
        ),
        _on_descents([*_rows(result, study.DESCENT), *_rows(result, study.FROM_FEATURES)]),
    ]


def _on_descents(ends: Sequence[SolutionRow]) -> Statement:
    off = [f"{100 * (row.flatness.ratio - 1):+.4f} % (T = {row.length}, m = {row.width})" for row in ends]
    loss = max(row.flatness.loss for row in ends)
    off_axis = max(row.off_axis for row in ends)
    within = all(abs(row.flatness.ratio - 1) <= DESCENT_ALLOWED for row in ends)
    return Statement(
        text="Descent on the trace, from random weights and from random features, ends at the bound, with all neurons "
        "along [1; 0].",
        evidence=f"trace off the bound by {', '.join(off)}, {100 * DESCENT_ALLOWED:g} % allowed; loss {loss:.1e}, "
        f"{ZERO_LOSS:.0e} allowed; {100 * off_axis:.2g} % of the weight elsewhere, {100 * DESCENT_ALLOWED:g} % allowed",
        shown=within and loss <= ZERO_LOSS and off_axis <= DESCENT_ALLOWED,
    )


def _on_conditions(result: Result) -> list[Statement]:
    two, features, kinks = _rows(result, study.TWO), _rows(result, study.FEATURES), _rows(result, study.KINKS)
    held = max(_excess(row) for row in two)
    broken = min(min(row.flatness.balance, row.flatness.cancellation) for row in features)
    obeyed = max(_excess(row) for row in kinks)
    away = min(row.uneven for row in kinks)
    closed = min(row.closed_trace / row.flatness.bound for row in kinks)
    full = sum(rank == 2 * k + 1 for k, rank in result.ranks.items())
    ranks = [f"{row.rank} of {2 * row.length} (T = {row.length})" for row in result.widths]
    return [
        Statement(
            text="Conditions (3) to (5) hold for two neurons; random features break (3) and (4).",
            evidence=f"factors of the trace over the bound: those of two neurons are off 1 by {held:.1e}, {EXACT:.0e} "
            f"allowed; those of random features for (3) and (4) are at least {broken:.2f}",
            shown=held <= EXACT and broken > 1 + DESCENT_ALLOWED,
        ),
        Statement(
            text="Lemma G.3 as printed: conditions (3) to (5), with > 0 for an active neuron, leave only neurons whose "
            "first T coordinates are equal.",
            evidence=f"four neurons obey them, to {obeyed:.1e}, and reach the bound at zero loss with "
            f"{100 * away:.0f} % of these coordinates' weight uneven; each input lies on a kink, and counting "
            f">= 0 their trace is {closed:.3g} times the bound",
            shown=obeyed > EXACT or away <= DESCENT_ALLOWED,
        ),
        Statement(
            text="Lemma G.3, mended: where no input lies on a kink, so that the Hessian exists, all neurons lie along "
            "[1; 0].",
            evidence="each neuron is then one constant on all inputs of one answer, and these have rank "
            f"{', '.join(ranks)}, so that it has one direction",
            shown=all(row.rank == 2 * row.length for row in result.widths),
        ),
        Statement(
            text="Lemma G.5: all cyclic shifts of a row of k + 1 ones and k minus ones have full rank.",
            evidence=f"k from 1 to {max(result.ranks)}: rank 2k + 1 for {full} of {len(result.ranks)}",
            shown=full == len(result.ranks),
        ),
    ]


def _downstream(result: Result) -> list[Statement]:
    two = [row for row in result.heads if row.solution == study.TWO]
    worst = max((row.worst_covered for row in two if row.worst_covered is not None), default=math.inf)
    last = {row.length: row for row in two}
    above = [row for row in two if row.failures > row.claimed + ERRORS * binomial_stderr(row.claimed, row.trials)]
    within = all(abs(row.failures - row.expected) <= ERRORS * binomial_stderr(row.expected, row.trials) for row in two)
    clearest = max(two, key=lambda row: row.failures / row.claimed if row.failures * row.trials >= 10 else 0.0)
    pairs = [(row, _same(result, study.BALANCED, row)) for row in last.values()]
    losses = [f"{other.loss:.3g} against {row.loss:.3g} at T = {row.length}" for row, other in pairs]
    return [
        Statement(
            text="Theorem 5.1: on top of two neurons, the head of least norm is right on every string once its "
            "training set has positive and negative answers.",
            evidence=f"largest population loss after such a training set {worst:.1e}; {ZERO_LOSS:.0e} allowed",
            shown=worst <= ZERO_LOSS,
        ),
        Statement(
            text="Theorem 5.1 as printed: it fails with probability at most 2^-n.",
            evidence=f"{_percent(clearest)} fail at T = {clearest.length} and n = {clearest.samples}, where 2^-n is "
            f"{clearest.claimed:.3g}; {len(above)} of {len(two)} frequencies lie above it by more than {ERRORS:g} "
            "standard errors",
            shown=not above,
        ),
        Statement(
            text="Theorem 5.1, mended: it fails with probability 2 ((1 + p) / 2)^n - p^n, p = C(T, T/2) / 2^T the "
            "probability that an answer is 0.",
            evidence=f"all {len(two)} frequencies within {ERRORS:g} standard errors"
            if within
            else f"not all of {len(two)} frequencies lie within {ERRORS:g} standard errors",
            shown=within,
        ),
        Statement(
            text="Random features do not transfer as two neurons do.",
            evidence=f"mean population loss at n = {pairs[0][0].samples}: {', '.join(losses)}; {ERRORS:g} standard "
            "errors of the difference, paired by training set, needed",
            shown=all(other.excess > ERRORS * other.excess_stderr for _, other in pairs),
        ),
    ]


def _on_width(result: Result) -> list[Statement]:
    widths = result.widths
    counts = [f"{row.widths[-1]:g} of {row.predicted} predicted (T = {row.length})" for row in widths]
    norms = [f"{row.norm:.3g} for m = {row.features}" for row in widths]
    each = [f"{row.norm / row.features:.3g}" for row in widths]
    floor = min(row.norm * row.length**2 / row.features for row in widths)
    return [
        Statement(
            text="Theorem G.6, sharpened: random features solve the task exactly from T C(T, T/2) + 2T neurons on, and "
            "no earlier.",
            evidence=f"least width at loss {study.LOSSES[-1]:.0e}: {', '.join(counts)}",
            shown=all(row.widths[-1] == row.predicted and row.widths_stderr[-1] == 0 for row in widths),
        ),
        Statement(
            text="Theorem G.6 as printed: |u|^2 is at most a constant times T^2.",
            evidence=f"|u|^2 / T^2 is {', '.join(norms)}. As f has the factor 1 / m, |u|^2 cannot be below 2m, so that "
            f"only |u|^2 / (m T^2) stays bounded: {', '.join(each)}",
            shown=floor < 2,  # |f| = 1 and E relu(v h)^2 = 1/2 need |u|^2 >= 2m, by Cauchy and Schwarz
        ),
    ]


def _rows(result: Result, name: str) -> list[SolutionRow]:
    return [row for row in result.solutions if row.solution == name]


def _same(result: Result, name: str, row: HeadRow) -> HeadRow:
    (other,) = (
        other
        for other in result.heads
        if (other.solution, other.length, other.samples) == (name, row.length, row.samples)
    )
    return other


def _excess(row: SolutionRow) -> float:
    values = row.flatness
    return max(abs(factor - 1) for factor in (values.heads, values.balance, values.cancellation, values.evenness))


def _percent(row: HeadRow) -> str:
    return f"{100 * row.failures:.2f} ± {100 * row.failures_stderr:.2f} %"
