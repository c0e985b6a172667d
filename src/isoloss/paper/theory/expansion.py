"""Small transformers inside large ones (section 4, appendix B.4): is the function the same, and what of the trace?"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isoloss.flatness.compare import compare
from isoloss.model_checks import device_of
from isoloss.models.expansion import Expanded, Part
from isoloss.paper.theory.statements import Statement
from isoloss.statistics.estimate import Estimate
from isoloss.text.masking import Batch

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}  # of the largest logit or hidden state
# of the root of the trace; in float64 it is the eps of the layer norms that decides, and OPT's softmax in float32
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}
ADDED = "added"  # what the large model's other parameters are called in the table


@dataclass(frozen=True, kw_only=True)
class Differences:
    """How far two models are from having the same function.

    Attributes:
        logits: The largest difference of two logits over the largest absolute logit of the small model.
        hidden: The same of the states before each of the small model's layers and after the last one, each of the
            large model's copies held against the small model's; the largest of these.
    """

    logits: float
    hidden: float


@dataclass(frozen=True, kw_only=True)
class Share:
    """A kind of parameter's share of the trace, all layers together, in nats per predicted token.

    Attributes:
        name: The parameter's name in the small model, the number of its layer left out; or `ADDED`.
        parameters: Its numbers in the small model; of `ADDED`, in the large one.
        before: Its share in the small model; of `ADDED`, 0.
        after: Its share in the large model.
        factor: What `after` over `before` is to be, by `Part.trace_factor`; of `ADDED`, None.
    """

    name: str
    parameters: int
    before: float
    after: float
    factor: float | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `study` found.

    Attributes:
        differences: Of the two functions.
        before: The trace of the small model's Fisher.
        after: That of the large model's.
        change: `after` less `before`; the error is that of the difference on the same inputs.
        shares: By kind of parameter, in the order of the small model's parameters; the last is `ADDED`.
        statements: What is claimed, with verdicts.
    """

    differences: Differences
    before: Estimate
    after: Estimate
    change: Estimate
    shares: tuple[Share, ...]
    statements: tuple[Statement, ...]


@torch.no_grad()
def differences(
    small: nn.Module, embedded: Expanded, batches: Iterable[Batch], *, progress: Callable[[int], None] | None = None
) -> Differences:
    """Return how far a small model and the large one that it is embedded in differ on inputs.

    Args:
        small: A transformers language model.
        embedded: What `isoloss.models.expansion.expand` returns for it.
        batches: Mappings with `input_ids` and, where something is padded, `attention_mask`, each (n, T).
        progress: Called with the number of sequences done.
    """
    gaps: dict[int, float] = {}
    sizes: dict[int, float] = {}
    done = 0
    for batch in batches:
        few, many = (_logits_and_states(model, batch) for model in (small, embedded.model))
        depth = len(few) - 2  # layers of the small model
        last = many[-1] * embedded.last_divisor
        for place, (own, other) in enumerate(zip(few, [*many[: depth + 1], last], strict=True)):
            gap = other.reshape(*own.shape[:-1], -1, own.shape[-1]) - own.unsqueeze(-2)
            gaps[place] = max(gaps.get(place, 0.0), float(gap.abs().max()))
            sizes[place] = max(sizes.get(place, 0.0), float(own.abs().max()))
        done += len(batch["input_ids"])
        if progress is not None:
            progress(done)
    relative = [gaps[place] / sizes[place] for place in gaps]
    return Differences(logits=relative[0], hidden=max(relative[1:]))


def study(
    small: nn.Module,
    embedded: Expanded,
    batches: Sequence[Batch],
    *,
    causal: bool,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Compare a small model with itself inside a large one: function, trace, and the share of each kind of parameter.

    Both traces are measured on the same inputs with the same random signs, by one estimator. The logits are the same,
    so the signs fall on the same gradients and, by the rule of `Part.trace_factor`, the squared norms of a parameter's
    gradients have one ratio on every sequence. The ratios of shares therefore have no sampling error, and the rule is
    judged by what rounding may leave (`GRADIENT_TOLERANCE`).

    Args:
        small: A transformers language model, with dropout off.
        embedded: What `isoloss.models.expansion.expand` returns for it.
        batches: As `isoloss.flatness.fisher_trace` takes them.
        causal: Whether position t predicts token t + 1.
        seed: Decides the signs.
        progress: Called with the number of sequences done, of three times as many as the batches have: one pass for the
            differences, one for each trace.

    Raises:
        IsolossError: What `fisher_trace` refuses.
    """
    passes = {"small": 1, "large": 2}
    total = sum(len(batch["labels"]) for batch in batches)
    found = differences(small, embedded, batches, progress=progress)
    traces = compare(
        {"small": small, "large": embedded.model},
        batches,
        seed=seed,
        causal=causal,
        one_estimator=True,
        progress=None if progress is None else lambda name, done: progress(passes[name] * total + done),
    )
    before, after = (model.trace for model in traces.models)
    rows = shares(small, embedded, before.by_parameter or {}, after.by_parameter or {})
    dtype = next(small.parameters()).dtype
    return Result(
        differences=found,
        before=before,
        after=after,
        change=_negated(traces.pair("small", "large").trace),
        shares=rows,
        statements=(_same_function(found, dtype), _factors(rows, before.value, dtype), _most(rows, before.value)),
    )


def shares(
    small: nn.Module, embedded: Expanded, before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[Share, ...]:
    """Return the shares of the trace by kind of parameter, before and after.

    Args:
        small: The small model.
        embedded: What it is embedded in.
        before: Its shares by parameter.
        after: Those of the large model.
    """
    sizes = {name: parameter.numel() for name, parameter in small.named_parameters()}
    kinds: dict[str, list[tuple[str, Part]]] = {}
    for name, part in embedded.parts.items():
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append((name, part))
    rows = [
        Share(
            name=kind,
            parameters=sum(sizes[name] for name, _ in members),
            before=sum(before[name] for name, _ in members),
            after=sum(after[part.name] for _, part in members),
            factor=members[0][1].trace_factor,
        )
        for kind, members in kinds.items()
    ]
    large = dict(embedded.model.named_parameters())
    rest = Share(
        name=ADDED,
        parameters=sum(large[name].numel() for name in embedded.added),
        before=0.0,
        after=sum(after[name] for name in embedded.added),
        factor=None,
    )
    return (*rows, rest)


def _logits_and_states(model: Any, batch: Batch) -> list[torch.Tensor]:
    """Return the logits, the states before each layer and those after the last one."""
    device = device_of(model)
    inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask") if name in batch}
    output = model(**inputs, output_hidden_states=True)
    return [output.logits, *output.hidden_states]


def _negated(estimate: Estimate) -> Estimate:
    return dataclasses.replace(estimate, value=-estimate.value)


def _same_function(found: Differences, dtype: torch.dtype) -> Statement:
    allowed = TOLERANCE[dtype]
    return Statement(
        text="The large model has the function of the small one, and copies of its hidden states.",
        evidence=f"largest difference of logits {found.logits:.1e}, of hidden states {found.hidden:.1e}, as shares of "
        f"the largest of these; at most {allowed:.0e} allowed in {_name(dtype)}",
        shown=max(found.logits, found.hidden) <= allowed,
    )


def _root(share: float) -> float:
    return math.sqrt(max(0.0, share))  # control variates leave a share of 0 a little above or below it


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _factors(rows: Sequence[Share], trace: float, dtype: torch.dtype) -> Statement:
    """Judge the rule by the roots of shares: rounding moves a gradient by a part of the whole one, large or small."""
    allowed = GRADIENT_TOLERANCE[dtype]
    gaps = {
        row.name: abs(_root(row.after) - _root(row.factor * row.before)) / math.sqrt(trace)
        for row in rows
        if row.factor is not None
    }
    worst = max(gaps, key=lambda name: gaps[name])
    return Statement(
        text="A parameter that becomes n copies divided by c has c^2 / n times its share of the trace.",
        evidence=f"square roots of the shares differ by at most {gaps[worst]:.1e} of the root of the trace ({worst}); "
        "both models are measured with the same signs, so there is no sampling error; at most "
        f"{allowed:.0e} allowed in {_name(dtype)}",
        shown=gaps[worst] <= allowed,
    )


def _most(rows: Sequence[Share], trace: float) -> Statement:
    parameters = sum(row.parameters for row in rows if row.factor is not None)
    by_factor: dict[float, list[Share]] = {}
    for row in rows:
        if row.factor is not None:
            by_factor.setdefault(round(row.factor, 9), []).append(row)
    found = []
    for factor, some in sorted(by_factor.items(), key=lambda item: -sum(row.parameters for row in item[1])):
        count, held = sum(row.parameters for row in some), sum(row.before for row in some)
        verb = "keep it" if factor == 1 else f"have {factor:.3g} times it"
        found.append(f"{count:,} ({100 * count / parameters:.1f} %, {100 * held / trace:.1f} % of the trace) {verb}")
    kept = sum(row.parameters for row in by_factor.get(1.0, []))
    return Statement(
        text="Most of the small model's parameters keep their share of the trace.",
        evidence=f"of {parameters:,} parameters " + ", ".join(found),
        shown=2 * kept > parameters,
    )
