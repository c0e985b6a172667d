"""Small transformers inside large ones (section 4, appendix B.4): are the function and the trace the same?"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isoloss.comparison.traces import compare_traces
from isoloss.lab.models.expansion import Expanded, Part
from isoloss.model_checks import device_of
from isoloss.paper.theory.statements import Statement
from isoloss.statistics.estimate import Estimate
from isoloss.text.masking import Batch

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}  # of the largest logit or hidden state
# of the root of the trace; in float64 it is the eps of the layer norms that decides, and OPT's softmax in float32
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
ADDED = "added"  # what the large model's other parameters are called in the table


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How far two models are from having the same function."""

    logits: float  # the largest difference of two logits over the largest absolute logit of the small model
    # the same of the states before each of the small model's layers and after the last one, each of the large model's
    # copies against the small model's; the largest of these
    hidden: float


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """What a kind of parameter adds to the trace, all layers together, in nats per predicted token."""

    name: str  # the parameter's name in the small model, without the number of its layer; or `ADDED`
    parameters: int  # how many numbers it has in the small model; of `ADDED`, in the large one
    before: float  # in the small model; of `ADDED`, 0
    after: float  # in the large model
    factor: float | None  # what `after` over `before` should be, by `Part.trace_factor`; of `ADDED`, None


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of `judge_expansion`."""

    differences: Differences
    before: Estimate  # the trace of the small model's Fisher
    after: Estimate  # the trace of the large model's
    change: Estimate  # `after` minus `before`, with the error of a difference on the same inputs
    contributions: tuple[Contribution, ...]  # in the order of the small model's parameters; the last is `ADDED`
    statements: tuple[Statement, ...]


@torch.no_grad()
def differences(
    small: nn.Module, expanded: Expanded, batches: Iterable[Batch], *, progress: Callable[[int], None] | None = None
) -> Differences:
    """Return how far a small model and the one that `isoloss.lab.models.expansion.expand` makes of it differ on inputs.

    `progress` is called with the number of sequences done.
    """
    gaps: dict[int, float] = {}
    sizes: dict[int, float] = {}
    done = 0
    for batch in batches:
        of_small, of_large = (_logits_and_states(model, batch) for model in (small, expanded.model))
        # besides the logits there is a state before the first layer and one after each
        depth = len(of_small) - 2
        # the layers that the large model has beyond these do nothing, so its last states are compared with the last
        compared = [*of_large[: depth + 1], of_large[-1] * expanded.last_divisor]
        for index, (one, copies) in enumerate(zip(of_small, compared, strict=True)):
            # (..., c d) against (..., d): c whole copies, one after the other; of the logits c is 1
            gap = copies.reshape(*one.shape[:-1], -1, one.shape[-1]) - one.unsqueeze(-2)
            gaps[index] = max(gaps.get(index, 0.0), float(gap.abs().max()))
            sizes[index] = max(sizes.get(index, 0.0), float(one.abs().max()))
        done += len(batch["input_ids"])
        if progress is not None:
            progress(done)
    # over the largest of all batches: a batch with small values would make its rounding look large
    relative = [gaps[index] / sizes[index] for index in gaps]
    return Differences(logits=relative[0], hidden=max(relative[1:]))


def judge_expansion(
    small: nn.Module,
    expanded: Expanded,
    batches: Sequence[Batch],
    *,
    causal: bool,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Compare a small model, dropout off, with its expansion: function, trace, and what each parameter adds to it.

    Both traces are measured on the same inputs with the same Rademacher probes, by one estimator. The logits are the
    same, so the probes meet the same gradients and, by the rule of `Part.trace_factor`, the squared norms of a
    parameter's gradients have one ratio on every sequence. So the ratios have no sampling error, and the rule is judged
    by what rounding may leave (`GRADIENT_TOLERANCE`). `progress` is called with the number of sequences done, of three
    times as many as the batches have: one pass for the differences, one for each trace.
    """
    # the pass for the differences comes first
    passes = {"small": 1, "large": 2}
    total = sum(len(batch["labels"]) for batch in batches)
    differ = differences(small, expanded, batches, progress=progress)
    traces = compare_traces(
        {"small": small, "large": expanded.model},
        batches,
        seed=seed,
        causal=causal,
        # control variates of its own would give the large model's parts other ratios
        one_estimator=True,
        minimal=False,
        progress=None if progress is None else lambda name, done: progress(passes[name] * total + done),
    )
    before, after = (traces.models[name]["trace"] for name in ("small", "large"))
    rows = contributions(small, expanded, before.by_parameter or {}, after.by_parameter or {})
    decrease = traces.difference("trace", "small", "large")
    dtype = next(small.parameters()).dtype
    return Result(
        differences=differ,
        before=before,
        after=after,
        change=dataclasses.replace(decrease, value=-decrease.value),
        contributions=rows,
        statements=(_same_function(differ, dtype), _factors(rows, before.value, dtype), _most(rows, before.value)),
    )


def contributions(
    small: nn.Module, expanded: Expanded, before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[Contribution, ...]:
    """Return the traces of the small and of the large model, which are given by parameter, by kind of parameter."""
    sizes = {name: parameter.numel() for name, parameter in small.named_parameters()}
    kinds: dict[str, list[tuple[str, Part]]] = {}
    # encoder.layer.0.output and encoder.layer.1.output are of one kind
    for name, part in expanded.parts.items():
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append((name, part))
    rows = [
        Contribution(
            name=kind,
            parameters=sum(sizes[name] for name, _ in members),
            before=sum(before[name] for name, _ in members),
            after=sum(after[part.name] for _, part in members),
            factor=members[0][1].trace_factor,
        )
        for kind, members in kinds.items()
    ]
    large = dict(expanded.model.named_parameters())
    rest = Contribution(
        name=ADDED,
        parameters=sum(large[name].numel() for name in expanded.added),
        before=0.0,
        after=sum(after[name] for name in expanded.added),
        factor=None,
    )
    return (*rows, rest)


def _logits_and_states(model: Any, batch: Batch) -> list[torch.Tensor]:
    device = device_of(model)
    inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask") if name in batch}
    output = model(**inputs, output_hidden_states=True)
    return [output.logits, *output.hidden_states]


def _same_function(differ: Differences, dtype: torch.dtype) -> Statement:
    return Statement(
        text="The large model has the function of the small one, and copies of its hidden states.",
        evidence=f"largest difference of logits {differ.logits:.1e}, of hidden states {differ.hidden:.1e}, as "
        f"fractions of the largest of these; at most {_allowed(TOLERANCE, dtype)}",
        shown=max(differ.logits, differ.hidden) <= TOLERANCE[dtype],
    )


def _allowed(tolerance: Mapping[torch.dtype, float], dtype: torch.dtype) -> str:
    return f"{tolerance[dtype]:.0e} allowed in {str(dtype).removeprefix('torch.')}"


def _root(part: float) -> float:
    # control variates leave a part of 0 a little above or below it
    return math.sqrt(max(0.0, part))


def _factors(rows: Sequence[Contribution], trace: float, dtype: torch.dtype) -> Statement:
    """Judge the rule by square roots: rounding moves a gradient by a part of the whole one, large or small."""
    gaps = {
        row.name: abs(_root(row.after) - _root(row.factor * row.before)) / math.sqrt(trace)
        for row in rows
        if row.factor is not None
    }
    worst = max(gaps, key=lambda name: gaps[name])
    return Statement(
        text="A parameter that becomes n copies divided by c has c^2 / n times its part of the trace.",
        evidence=f"square roots of the parts differ by at most {gaps[worst]:.1e} of the root of the trace ({worst}); "
        "both models are measured with the same probes, so there is no sampling error; at most "
        f"{_allowed(GRADIENT_TOLERANCE, dtype)}",
        shown=gaps[worst] <= GRADIENT_TOLERANCE[dtype],
    )


def _most(rows: Sequence[Contribution], trace: float) -> Statement:
    by_factor: dict[float, list[Contribution]] = {}
    for row in rows:
        if row.factor is not None:
            # c^2 / n may be off 1 by rounding
            by_factor.setdefault(round(row.factor, 9), []).append(row)
    counts = {factor: sum(row.parameters for row in some) for factor, some in by_factor.items()}
    total, evidence = sum(counts.values()), []
    for factor, count in sorted(counts.items(), key=lambda item: -item[1]):
        fraction = sum(row.before for row in by_factor[factor]) / trace
        verb = "keep it" if factor == 1 else f"have {factor:.3g} times it"
        evidence.append(f"{count:,} ({100 * count / total:.1f} %, {100 * fraction:.1f} % of the trace) {verb}")
    return Statement(
        text="Most of the small model's parameters keep their part of the trace.",
        evidence=f"of {total:,} parameters " + ", ".join(evidence),
        shown=2 * counts.get(1.0, 0) > total,
    )
