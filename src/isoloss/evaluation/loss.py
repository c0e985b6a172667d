"""The loss of a language model: entropy plus KL where the true conditionals are known, cross-entropy of text elsewhere.

Shapes: n sentences, T positions, m predicted positions, V tokens of the language, M ids of the model (M >= V: the
special tokens come last).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.evaluation.exact_targets import ROWS, SUBSETS, ExactTargets, by_sentence, probabilities
from isoloss.languages.api import Language
from isoloss.model_checks import device_of, refuse_dropout
from isoloss.models.make import predicted_logits
from isoloss.run_config import ObjectiveConfig
from isoloss.statistics import ratio
from isoloss.statistics.estimate import Estimate
from isoloss.text.clusters import SequenceClusters
from isoloss.text.masking import IGNORED, Batch, objective_batch

UNIT = "nats per predicted token"


# --- exact languages -------------------------------------------------------------------------------------------------


def kl_values(
    model: nn.Module, targets: ExactTargets, *, batch_size: int = 256, progress: Callable[[int], None] | None = None
) -> torch.Tensor:
    """Return (n,) float64: KL(p || q) = sum_c p_c (log p_c - log q_c) in nats, summed over a sentence's masked tokens.

    p is the true conditional over the V tokens, q the model's softmax over all its M ids. Mass that q gives to special
    tokens is therefore part of the KL, as it is part of the cross-entropy that training minimizes.

    Raises:
        IsolossError: Dropout is on, the model knows fewer ids than the language, or its logits are not finite.
    """
    ends = targets.counts.cumsum(dim=0)
    values = torch.empty(int(ends[-1]), dtype=torch.float64)
    done, upto = 0, 0
    held = values[:0]  # conditionals of the masked positions up to `upto`
    at_once = targets.held_at_once(max(1, batch_size))
    for log_q in _log_predictions(model, targets.batch, batch_size=batch_size):
        if done == upto:
            first = int(torch.searchsorted(ends, done, right=True))
            held = targets.log_conditionals(first, first + at_once)
            upto += len(held)
        log_p = held[len(held) - (upto - done) :][: len(log_q)]
        if log_q.shape[1] < log_p.shape[1]:
            raise IsolossError(f"the model knows {log_q.shape[1]} ids and the language has {log_p.shape[1]} tokens")
        difference = log_p - log_q[:, : log_p.shape[1]].cpu()
        values[done : done + len(log_q)] = (probabilities(log_p) * difference).sum(dim=1)
        done += len(log_q)
        if progress is not None:
            progress(int(torch.searchsorted(ends, done, right=True)))
    return by_sentence(values, targets.batch["labels"] != IGNORED)


def pretraining_loss(
    model: nn.Module, targets: ExactTargets, *, batch_size: int = 256, progress: Callable[[int], None] | None = None
) -> dict[str, Estimate]:
    """Return `entropy`, `kl` and `loss` = entropy + KL: the model's cross-entropy against the truth (paper, A.5, A.7).

    In nats per predicted token; all predicted tokens weigh the same, and errors are over sentences. `details` holds
    `subset_std`, the standard deviation over five subsets as the paper prints it, and their `subset_size`. `kl` and
    `loss` have influences (`entropy` says nothing of the model), for the paired difference of two models on the same
    targets (`isoloss.statistics.comparison.paired_difference`), whose error is far smaller than these errors combined.

    If the targets are all masked sentences, the three are exact sums: their error is 0, and they have no subsets and no
    influences.

    Arguments and errors are those of `kl_values`.
    """
    started = time.perf_counter()
    kl = kl_values(model, targets, batch_size=batch_size, progress=progress)
    details = {**_details(model), **_predicted(targets.objective)}
    sums = {"entropy": targets.entropy, "kl": kl, "loss": targets.entropy + kl}
    seconds = time.perf_counter() - started
    if targets.weights is not None:
        return {
            name: Estimate(
                value=float(targets.weights @ values),
                stderr=0.0,
                samples=0,
                unit=UNIT,
                num_predictions=len(targets),
                method=f"exact conditionals, {name}: a sum over all {len(targets):,} masked sentences",
                seconds=seconds,
                details=details,
            )
            for name, values in sums.items()
        }
    details["seed"] = targets.seed
    estimates = {
        name: _estimate(values, targets.counts, method=f"exact conditionals, {name}", details=details, seconds=seconds)
        for name, values in sums.items()
    }
    return {**estimates, "entropy": dataclasses.replace(estimates["entropy"], influence=None)}


# --- text ------------------------------------------------------------------------------------------------------------


def held_out_batch(language: Language, *, num_sequences: int, objective: ObjectiveConfig, seed: int) -> Batch:
    """Return held-out sequences of a language and what is predicted in them."""
    sentences = language.held_out(num_sequences)
    return objective_batch(sentences, language, objective, generator=seeds.generator(seed, "evaluation masks"))


def held_out_loss(
    model: nn.Module,
    language: Language,
    *,
    num_sequences: int,
    objective: ObjectiveConfig,
    seed: int,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Estimate]:
    """Return `loss`: the cross-entropy of a language's held-out text, as `text_loss` gives it."""
    batch = held_out_batch(language, num_sequences=num_sequences, objective=objective, seed=seed)
    return text_loss(model, [batch], objective=objective, seed=seed, batch_size=batch_size, progress=progress)


def text_loss(
    model: nn.Module,
    batches: Iterable[Mapping[str, torch.Tensor]],
    *,
    objective: ObjectiveConfig,
    seed: int,
    batch_size: int = 32,
    method: str = "held-out text",
    progress: Callable[[int], None] | None = None,
) -> dict[str, Estimate]:
    """Return `loss`: the cross-entropy of sequences in nats per predicted token.

    All predicted tokens weigh the same. The error is clustered: it counts sequences, not tokens, as independent, where
    batches have `documents` it counts these, and where sequences are pieces of longer texts, blocks of them
    (`isoloss.text.clusters.SequenceClusters`). `details` holds `subset_std` and `subset_size` as for
    `pretraining_loss`.

    Raises:
        IsolossError: Dropout is on, the model does not know a label, its logits are not finite, or there are fewer
            than ten independent sequences or documents.
    """
    started = time.perf_counter()
    batches = list(batches)
    batch = {name: torch.cat([part[name] for part in batches]) for name in batches[0]}
    nats, counts = _cross_entropy(
        model, batch, batch_size=batch_size, is_causal=objective.kind == "causal", progress=progress
    )
    clusters = SequenceClusters(getattr(model, "config", None))
    numbers = clusters.add(batch)
    nats, counts = (x.new_zeros(len(clusters)).index_add_(0, numbers, x) for x in (nats, counts))
    if len(nats) < 2 * SUBSETS:
        raise IsolossError(f"there are {len(nats)} {clusters.name}; an error bar needs at least {2 * SUBSETS}")
    details = {**_details(model), **_predicted(objective), "clusters": clusters.name, "seed": seed}
    seconds = time.perf_counter() - started
    loss = _estimate(nats, counts, method=method, details=details, seconds=seconds)
    if (blocks := clusters.blocks()) is not None:
        nats, counts = (
            x.new_zeros(int(blocks.labels.max()) + 1).index_add_(0, blocks.labels, x) for x in (nats, counts)
        )
        by_block = ratio.ratio_estimate(nats, counts, unit=UNIT, method=method)
        # the larger one of two errors: by chance that over the blocks, which are few, may be too small
        loss = dataclasses.replace(
            loss,
            stderr=max(loss.stderr, by_block.stderr),
            samples=by_block.samples,
            effective_samples=by_block.effective_samples,
            influence=by_block.influence,
            details={**loss.details, "clusters": blocks.name},
        )
    return {"loss": loss}


def _cross_entropy(
    model: nn.Module,
    batch: Batch,
    *,
    batch_size: int,
    is_causal: bool,
    progress: Callable[[int], None] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n,) float64 nats of each sequence, summed over its predicted tokens, and (n,) their number."""
    chosen = batch["labels"] != IGNORED
    if is_causal:
        chosen[:, 0] = False  # nothing comes before it
    counts = chosen.sum(dim=1)
    row_of = chosen.nonzero()[:, 0]
    labels = batch["labels"][chosen]
    ends = counts.cumsum(dim=0)
    nats = torch.zeros(len(counts), dtype=torch.float64)
    done = 0
    for log_q in _log_predictions(model, batch, batch_size=batch_size, is_causal=is_causal):
        part = slice(done, done + len(log_q))
        if int(labels[part].max()) >= log_q.shape[1]:
            raise IsolossError(f"token {int(labels[part].max())} is not among the {log_q.shape[1]} ids of the model")
        surprise = -log_q.gather(1, labels[part, None].to(log_q.device))[:, 0]
        nats.index_add_(0, row_of[part], surprise.cpu())
        done += len(log_q)
        if progress is not None:
            progress(int((ends <= done).sum()))
    return nats, counts


# --- both: the forward passes and the result -------------------------------------------------------------------------


def _log_predictions(
    model: nn.Module, batch: Batch, *, batch_size: int, is_causal: bool = False
) -> Iterator[torch.Tensor]:
    """Yield (rows, M) float64 log-probabilities of the predicted tokens, in order, a bounded number at a time."""
    if batch_size < 1:
        raise IsolossError(f"batch_size is {batch_size}; it must be at least 1")
    refuse_dropout(model)
    device = device_of(model)
    wide = torch.device("cpu") if device.type == "mps" else device  # MPS has no float64
    inputs = {name: value for name, value in batch.items() if name != "documents"}
    for start in range(0, len(batch["labels"]), batch_size):
        part = {name: value[start : start + batch_size].to(device) for name, value in inputs.items()}
        with torch.no_grad():
            logits = predicted_logits(model, part, causal=is_causal)
        if not bool(logits.isfinite().all()):
            raise IsolossError(
                f"the model's logits are NaN or infinite in sentences {start} to {start + len(part['labels']) - 1}"
            )
        for first in range(0, len(logits), ROWS):
            yield logits[first : first + ROWS].to(wide).double().log_softmax(dim=1)


def _estimate(
    sums: torch.Tensor, counts: torch.Tensor, *, method: str, details: dict[str, Any], seconds: float
) -> Estimate:
    """Return a ratio of sums over independent clusters."""
    subset_std, subset_size = ratio.subset_deviation(sums, counts, subsets=SUBSETS)
    return dataclasses.replace(
        ratio.ratio_estimate(sums, counts, unit=UNIT, method=method),
        seconds=seconds,
        details={"subset_std": subset_std, "subset_size": subset_size, **details},
    )


def _predicted(objective: ObjectiveConfig) -> dict[str, Any]:
    """Return which tokens are predicted, as details of an estimate."""
    if objective.kind == "causal":
        return {"predicts": "next token"}
    fraction = {"fraction": objective.fraction} if objective.masking == "fraction" else {}
    return {"masking": objective.masking, **fraction}


def _details(model: nn.Module) -> dict[str, Any]:
    parameter = next(model.parameters())
    return {"device": str(parameter.device), "dtype": str(parameter.dtype).removeprefix("torch.")}
