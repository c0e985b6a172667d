"""The minimal trace: the trace of the Fisher where exact rescalings of the model make it smallest.

Shapes: K measured parts of parameters, L other parts, R generators, F folds of clusters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import nn

from isoloss.errors import IsolossError, warn
from isoloss.flatness._batches import as_tensors
from isoloss.flatness._measurement import layer_of
from isoloss.flatness._parameters import ParameterBlocks, ParameterColumns, counted_parameters, embeddings
from isoloss.flatness._rescaling.apply import (
    block_sizes,
    check_rescaling,
    logits_of,
    model_inputs,
    rescaled_values,
    widened,
)
from isoloss.flatness._rescaling.solve import Bounds, CrossFit, cross_fit, minimize, responses
from isoloss.flatness._rescaling.symmetries import Granularity, rescalings_of
from isoloss.memory import physical_memory
from isoloss.model_checks import device_of
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import FOLDS, ColumnRatios, Weighted

Rescaling = Literal["minimal"]

NEGLIGIBLE = 1e-4  # nats per predicted token: what the eps of norms may change of the loss
_ROUNDING = 1e-6  # nats: what changes a log-probability by more is a rule that is not exact for this model
_ROUNDING_OF_FLOAT32 = 1e-3  # the same on a device without float64
_CHECKED = 2  # sequences whose logits are compared
_LOSS_OF = 8  # sequences on which the change of the loss is measured
_LARGEST_CHECKED = 5e8  # parameters: the check takes 16 bytes for each
_BYTES_OF_A_PART = 4000  # sums by fold and control variate, and what is computed from them
_BISECTIONS = 12  # of the bound on log-factors
_SLOW = 2000  # factors: the minimization takes minutes from here
_IGNORED = -100
_NARROW = (torch.float16, torch.bfloat16)  # types whose rounding changes the loss by more than eps may


class MinimalTraceEstimator:
    """Makes the minimal trace of one model from a measurement of its parts.

    Attributes:
        parameter_blocks: The parts that are to be measured, by parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        granularity: Granularity,
        parameters: Mapping[str, nn.Parameter] | None = None,
        sequences: int = 0,
    ) -> None:
        self._model, self._granularity = model, granularity
        self._rescalings = rescalings_of(model, granularity=granularity, parameters=parameters)
        self.parameter_blocks: dict[str, ParameterBlocks] = self._rescalings.measured_blocks
        measured = counted_parameters(model, parameters)
        self._names = list(measured)
        self._parameter_ids = ParameterColumns(measured, self.parameter_blocks).parameter_ids
        _check_memory(len(self._parameter_ids), sequences, granularity)
        if len(self._rescalings.names) > _SLOW:
            warn(
                f"granularity {granularity!r} gives {type(model).__name__} {len(self._rescalings.names):,} factors: "
                "the minimization may take many minutes"
            )
        embedded = embeddings(model, measured)
        self._is_other = torch.tensor([float(name not in embedded) for name in measured], dtype=torch.float64)
        sizes, log_rms = block_sizes(model, self._rescalings)
        self._convex_program = functools.partial(
            minimize,
            exponents=self._rescalings.actions,
            log_rms=log_rms,
            sizes=sizes,
            writers=self._rescalings.writers,
        )
        self._others = len(sizes) - len(self._parameter_ids)  # L
        if self._others:
            warn(
                f"rescalings also multiply parameters of {type(model).__name__} that are not measured, frozen ones for "
                "example, and these can take up any factor: the minimal trace of the rest then rests on gauges"
            )
        self._measured: tuple[Estimate, ColumnRatios] | None = None
        self._rest: torch.Tensor | None = None  # the influence of what is not the embeddings'

    def finish(self, plain: Estimate, columns: ColumnRatios) -> Estimate:
        """Return the minimal trace, given the plain one and the clusters' sums of every part."""
        self._measured = plain, columns
        return self._estimate(plain, columns)

    def checked(self, estimate: Estimate, batch: Mapping[str, Any]) -> Estimate:
        """Return the minimal trace with what the rescaling changes of the model's loss on a batch.

        Norms add a small eps to what they divide by, so that a rescaling is exact only up to it. Where that changes the
        loss by more than 1e-4 nats, the log-factors are bounded, by half as much each time.

        Raises:
            IsolossError: The logits differ without eps too: the rules of the family are not this model's.
        """
        assert self._measured is not None
        z = _log_factors(estimate)
        off, is_large = None, sum(parameter.numel() for parameter in self._model.parameters()) > _LARGEST_CHECKED
        if len(z) and not is_large:
            # without eps, where a rule that is right leaves nothing but rounding; what eps itself changes is measured
            # below
            off = check_rescaling(self._model, self._rescalings, _head(batch, _CHECKED), z)
            if not off <= (_ROUNDING if device_of(self._model).type != "mps" else _ROUNDING_OF_FLOAT32):  # NaN too
                raise IsolossError(
                    f"rescaling {type(self._model).__name__} changes log-probabilities by {off:.1g} nats: the "
                    "rescalings of its family are not exact for this model. Measure the plain trace, or register "
                    "rescalings for it"
                )
        # of a model in half precision, rounding of the rescaled weights changes the loss by more than eps does
        change = None
        if not (is_large and any(parameter.dtype in _NARROW for parameter in self._model.parameters())):
            estimate, change = self._bounded(estimate, batch)
        details = {**estimate.details, "loss_change_by_eps": change, "log_probabilities_change_without_eps": off}
        return replace(estimate, details=details)

    def _bounded(self, estimate: Estimate, batch: Mapping[str, Any]) -> tuple[Estimate, float]:
        """Return the minimal trace, with bounds where it takes them, and by how much it changes the loss."""
        assert self._measured is not None
        before = self._loss(batch, None)

        def change_of(estimate: Estimate) -> float:
            return self._loss(batch, _log_factors(estimate)) - before

        change = change_of(estimate)
        if abs(change) <= NEGLIGIBLE:
            return estimate, change
        # the change of the loss grows with the bound, so that the largest one is found by halving
        # only what norms read is inexact, so only these factors are bounded
        found, low, high = None, 0.0, float(np.abs(_log_factors(estimate)[self._rescalings.normed]).max(initial=0))
        for _ in range(_BISECTIONS):  # for the largest bound
            bound = (low + high) / 2
            try:
                bounded = self._estimate(*self._measured, bound=bound)
            except IsolossError:  # parts that are all zero are all that a gauge could be about
                break
            if abs(change_of(bounded)) <= NEGLIGIBLE:
                found, low = bounded, bound
            else:
                high = bound
        if found is None:
            warn(
                f"because of the eps of norms, the rescaling changes the loss by {change:.1g} nats, more than "
                f"{NEGLIGIBLE:g}: the minimal trace is not exact"
            )
            return estimate, change
        warn(
            f"because of the eps of norms, the factors of {type(self._model).__name__}'s rescalings are at most "
            f"{math.exp(low):.4g}: its minimal trace is not the full minimum, and depends on the scale of its weights"
        )
        return found, change_of(found)

    @property
    def plain(self) -> Estimate:
        """The trace at the given weights, from the same passes."""
        assert self._measured is not None
        return self._measured[0]

    def without_embeddings(self, estimate: Estimate) -> Weighted:
        """Return the part of the minimal trace that is not the embeddings'."""
        assert self._rest is not None
        details = estimate.details
        return Weighted(details["without_embeddings"], details["without_embeddings_stderr"], self._rest)

    def _fit(self, columns: ColumnRatios, *, keep_features: bool = False, bound: float | None = None) -> CrossFit:
        """Return the minimum over all rescalings, or over those that keep the features."""
        convex_program: Any = self._convex_program
        if keep_features:
            convex_program = functools.partial(convex_program, equalities=self._rescalings.features)
        convex_program = functools.partial(convex_program, bounds=self._bounds(bound))
        without = np.stack([columns.shares_without(fold).numpy() for fold in range(FOLDS)])
        # parts that are not measured have no share, but the rescalings act on them and their gauges count them
        others = ((0, 0), (0, self._others))
        return cross_fit(
            convex_program, np.pad(columns.fold_sums().numpy(), others), np.pad(without, others), columns.total
        )

    def _bounds(self, bound: float | None) -> Bounds | None:
        if bound is None:
            return None
        limit = np.where(self._rescalings.normed, bound, np.inf)
        return -limit, limit

    def _influences(self, fit: CrossFit, columns: ColumnRatios, bound: float | None) -> torch.Tensor:
        """Return (N + r, P) the influences of the parameters' parts of the minimum, which add up to its own."""
        number, rows = len(self._parameter_ids), np.arange(len(self._parameter_ids))
        terms = fit.minimum.weights[:number] * columns.ratios.numpy()
        shape = number + self._others, len(self._names)
        by_parameter = scipy.sparse.csr_array((terms, (rows, self._parameter_ids.numpy())), shape)
        # the total is stationary in the log-factors, so to first order its error is the one at fixed weights; the sums
        # by parameter are not, and move along with the fit
        moved = responses(fit.minimum, self._rescalings.actions, by_parameter, self._bounds(bound))
        weights = torch.from_numpy(fit.weights[:, :number])
        along = 2.0 * self._rescalings.exponents, torch.from_numpy(moved)
        return columns.influences(weights, self._parameter_ids, len(self._names), along)

    def _estimate(self, plain: Estimate, columns: ColumnRatios, *, bound: float | None = None) -> Estimate:
        fit = self._fit(columns, bound=bound)
        has_features = self._rescalings.features.shape[0] > 0
        with_features = self._fit(columns, keep_features=True, bound=bound) if has_features else fit
        minimum, number = fit.minimum, len(self._parameter_ids)
        # the parts follow from the weights in sample; the value is the mean with the cross-fitted one
        scale = fit.value / fit.in_sample if fit.in_sample else 1.0  # parts add up to the value
        terms = torch.from_numpy(scale * minimum.weights[:number]) * columns.ratios
        parts = torch.zeros(len(self._names), dtype=torch.float64).index_add_(0, self._parameter_ids, terms)
        influences = self._influences(fit, columns, bound)
        stderrs = _stderr(influences, plain.samples)
        layers = list(dict.fromkeys(map(layer_of, self._names)))
        of_layers = torch.tensor([layers.index(layer_of(name)) for name in self._names])
        by_layer = influences.new_zeros(len(influences), len(layers)).index_add_(1, of_layers, influences)
        layer_parts = parts.new_zeros(len(layers)).index_add_(0, of_layers, parts)
        vanishing = self._parameter_ids[torch.from_numpy(minimum.vanishing[:number])]
        self._rest, influence = influences @ self._is_other, influences.sum(dim=1)
        return replace(
            plain,
            value=fit.value,
            stderr=float(_stderr(influence, plain.samples)),
            influence=influence.numpy(),
            method=f"minimal over rescalings by {self._granularity}; {plain.method}",
            by_parameter=dict(zip(self._names, parts.tolist(), strict=True)),
            by_parameter_stderr=dict(zip(self._names, stderrs.tolist(), strict=True)),
            by_layer=dict(zip(layers, layer_parts.tolist(), strict=True)),
            by_layer_stderr=dict(zip(layers, _stderr(by_layer, plain.samples).tolist(), strict=True)),
            details={
                **plain.details,
                "leading_cluster": float(
                    (influence[: plain.samples].square().max() / influence.square().sum()).nan_to_num()
                ),
                "without_embeddings": float(parts @ self._is_other),
                "without_embeddings_stderr": float(_stderr(self._rest, plain.samples)),
                "trace": plain.value,
                "trace_stderr": plain.stderr,
                "granularity": self._granularity,
                "in_sample": fit.in_sample,
                "cross_fitted": fit.cross_fitted,
                "infimum": minimum.infimum,
                "keeping_features": with_features.value,
                "keeping_features_stderr": columns.weighted(torch.from_numpy(with_features.weights[:, :number])).stderr,
                "log_factors": dict(zip(self._rescalings.names, minimum.z.tolist(), strict=True)),
                "gauged": [self._rescalings.names[generator] for generator in minimum.gauged],
                "vanishing": [self._names[number] for number in sorted(set(vanishing.tolist()))],
                "log_factor_bound": bound,
            },
        )

    @torch.no_grad()
    def _loss(self, batch: Mapping[str, Any], z: NDArray[np.float64] | None) -> float:
        """Return the loss of the first sequences of a batch in nats, after a rescaling by z, in float32 or wider."""
        assert self._measured is not None
        rows = _head(batch, _LOSS_OF)
        inputs, labels = model_inputs(self._model, rows), rows["labels"]
        dtype = functools.reduce(
            torch.promote_types, (parameter.dtype for parameter in self._model.parameters()), torch.float32
        )
        with widened(self._model, dtype) as (network, values):
            changed = {} if z is None else rescaled_values(network, values, self._rescalings, z)
            logits = logits_of(network, {**values, **changed}, inputs)
        if self._measured[0].details["predicts"] == "next token":
            # labels of causal models are unshifted
            logits, labels = logits[:, :-1], labels[:, 1:]
        wanted = labels != _IGNORED
        if not bool(wanted.any()):
            return 0.0
        wanted, labels = wanted.to(logits.device), labels.to(logits.device, torch.int64)
        return float(nn.functional.cross_entropy(logits[wanted].double(), labels[wanted]))


def minimal_trace(
    model: nn.Module,
    rescaling: Rescaling,
    granularity: Granularity,
    parameters: Mapping[str, nn.Parameter] | None,
    batches: Iterable[Mapping[str, Any]],
    num_sequences: int | None,
) -> MinimalTraceEstimator:
    """Return the estimator of a model's minimal trace on the first sequences of batches.

    Raises:
        IsolossError: `rescaling` is not one, the model has no known rescalings, or the sums over each sequence by part
            take more memory than there is.
    """
    if rescaling != "minimal":
        raise IsolossError(f"rescaling is {rescaling!r}; it is 'minimal' or None")
    sequences = num_sequences or 0  # 0: not known
    if isinstance(batches, Sequence):
        known = sum(len(batch.get("labels", ())) for batch in as_tensors(batches))
        sequences = min(known, num_sequences or known)
    return MinimalTraceEstimator(model, granularity=granularity, parameters=parameters, sequences=sequences)


def _check_memory(parts: int, sequences: int, granularity: str) -> None:
    needed, there_is = parts * (_BYTES_OF_A_PART + 8 * sequences), physical_memory()
    if needed > there_is:
        raise IsolossError(
            f"granularity {granularity!r} makes {parts:,} parts of this model, whose sums over "
            f"{f'{sequences:,}' if sequences else 'the'} sequences take at least {needed / 2**30:,.1f} GiB, and this "
            f"machine has {there_is / 2**30:,.1f} GiB of memory: choose a coarser granularity, 'tensor' or 'head', or "
            "measure fewer sequences"
        )


def _head(batch: Mapping[str, Any], number: int) -> dict[str, Any]:
    size = len(batch["labels"])
    return {
        name: value[:number] if isinstance(value, torch.Tensor) and len(value) == size else value
        for name, value in batch.items()
    }


def _stderr(influence: torch.Tensor, samples: int) -> torch.Tensor:
    return (influence.square().sum(dim=0) / (samples * (samples - 1))).sqrt()


def _log_factors(estimate: Estimate) -> NDArray[np.float64]:
    return np.array(list(estimate.details["log_factors"].values()))
