"""The minimal trace: the trace of the Fisher where exact rescalings of the model make it smallest.

Shapes: K measured parts of parameters, L other parts, R generators, F folds of clusters.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import scipy.sparse
import torch
from torch import nn

from isoloss.errors import IsolossError, warn
from isoloss.flatness._batches import as_tensors
from isoloss.flatness._measurement import layer_of
from isoloss.flatness._parameters import ParameterBlocks, ParameterColumns, counted_parameters, embeddings
from isoloss.flatness._rescaling.apply import (
    block_sizes,
    check_rescaling,
)
from isoloss.flatness._rescaling.solve import CrossFit, cross_fit, minimize, responses
from isoloss.flatness._rescaling.symmetries import Granularity, rescalings_of
from isoloss.machine import physical_memory
from isoloss.model_checks import device_of
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import FOLDS, ColumnRatios, Weighted

Rescaling = Literal["minimal"]

_ROUNDING = 1e-6  # nats: what changes a log-probability by more is a rule that is not exact for this model
_ROUNDING_OF_FLOAT32 = 1e-3  # the same on a device without float64
_CHECKED = 2  # sequences whose logits are compared
_LARGEST_CHECKED = 5e8  # parameters: the check takes 16 bytes for each
_BYTES_OF_A_PART = 4000  # sums by fold and control variate, and what is computed from them
_BEYOND = 1.5  # of the trace: a minimum that comes out larger by more than its noise is no minimum
_SLOW = 2000  # factors: the minimization takes minutes from here

# kinds of maps by the names that models of transformers give their parameters; the first that is found counts
_KINDS = {
    "norms": r"(norm|ln_)\w*\.\w+$",
    "output": r"^(cls|lm_head|head|decoder|embed_out)\.|project_out",
    "embeddings": r"embed|wte|wpe|project_in",
    "attention-qkv": r"c_attn|query_key_value|qkv",
    "attention-q": r"q_proj|query\.",
    "attention-k": r"k_proj|key\.",
    "attention-v": r"v_proj|value\.",
    "attention-o": r"attn\.(c_proj|wo)|(self_attn\.|attention\.)(o_proj|out_proj|output|dense)",
    "mlp-gate-up": r"gate_up_proj|mlp\.wi\.",
    "mlp-gate": r"gate_proj",
    "mlp-up": r"up_proj|c_fc|fc1|intermediate\.|dense_h_to_4h",
    "mlp-down": r"down_proj|mlp\.(c_proj|wo)|fc2|output\.dense|dense_4h_to_h",
    "recurrent": r"_[ih]h_l\d",
    "other": "",
}
# details of the minimal trace that its parts have too
_SHARED = ("device", "dtype", "predicts", "sequences", "clusters", "seed", "ended", "granularity")


class MinimalTraceEstimator:
    """Makes the minimal trace of one model from a measurement of its parts.

    Attributes:
        parameter_blocks: The parts that are to be measured, by parameter.
        without_embeddings: Once it is finished, the part of the minimal trace that is not the embeddings'.
    """

    without_embeddings: Weighted

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

    def finish(self, plain: Estimate, columns: ColumnRatios) -> Estimate:
        """Return the minimal trace, given the plain one and the clusters' sums of every part.

        Raises:
            IsolossError: It comes out below 0 or far above the plain one, from factors that were fitted to noise.
        """
        columns = columns.positive()  # there is no factor that makes a negative part smallest
        fit = self._fit(columns)
        # with a gauge, it is not the trace at some of the weights that compute the same function
        if fit.value < 0 or (fit.value > _BEYOND * plain.value and not fit.minimum.gauged):
            raise IsolossError(
                f"the minimal trace comes out as {fit.value:.3g}, {'below 0' if fit.value < 0 else 'above the trace'}, "
                f"{plain.value:.3g}: a few inputs decide it. Take more inputs, or measure the plain trace"
            )
        has_features = self._rescalings.features.shape[0] > 0
        with_features = self._fit(columns, keep_features=True) if has_features else fit
        minimum, number = fit.minimum, len(self._parameter_ids)
        # the parts follow from the weights in sample; the value is the mean with the cross-fitted one
        scale = fit.value / fit.in_sample if fit.in_sample else 1.0  # parts add up to the value
        terms = torch.from_numpy(scale * minimum.weights[:number]) * columns.ratios
        parts = torch.zeros(len(self._names), dtype=torch.float64).index_add_(0, self._parameter_ids, terms)
        influences = self._influence_by_parameter = self._influences(fit, columns)
        stderrs = _stderr(influences, plain.samples)
        layers = list(dict.fromkeys(map(layer_of, self._names)))
        of_layers = torch.tensor([layers.index(layer_of(name)) for name in self._names])
        by_layer = influences.new_zeros(len(influences), len(layers)).index_add_(1, of_layers, influences)
        layer_parts = parts.new_zeros(len(layers)).index_add_(0, of_layers, parts)
        vanishing = self._parameter_ids[torch.from_numpy(minimum.vanishing[:number])]
        rest, influence = influences @ self._is_other, influences.sum(dim=1)
        value, stderr = float(parts @ self._is_other), float(_stderr(rest, plain.samples))
        self.without_embeddings = Weighted(value, stderr, rest)
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
                "without_embeddings": value,
                "without_embeddings_stderr": stderr,
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
            },
        )

    def by_kind(self, whole: Estimate) -> dict[str, Estimate]:
        """Return the parts of the minimal trace that it finished, by kind of map; they add up to it."""
        values, stderrs = whole.by_parameter or {}, whole.by_parameter_stderr or {}
        parts = {}
        for kind, names in kinds_of(self._names).items():
            influence = self._influence_by_parameter[:, [self._names.index(name) for name in names]].sum(dim=1)
            parts[kind] = replace(
                whole,
                value=sum(values[name] for name in names),
                stderr=float(_stderr(influence, whole.samples)),
                influence=influence.numpy(),
                method=f"{kind}: {whole.method}",
                by_parameter={name: values[name] for name in names},
                by_parameter_stderr={name: stderrs[name] for name in names},
                by_layer=None,
                by_layer_stderr=None,
                details={name: whole.details[name] for name in _SHARED},
            )
        return parts

    def checked(self, estimate: Estimate, batch: Mapping[str, Any]) -> Estimate:
        """Return the minimal trace with how far the rescaling changes the model's log-probabilities on a batch.

        Norms have no eps there. Both models then compute the same function, as they would with rescaled eps, and only
        rounding is left where the rules are right.

        Raises:
            IsolossError: The log-probabilities differ by more than rounding: the rules of the family are not this
                model's.
        """
        z = np.array(list(estimate.details["log_factors"].values()))
        is_large = sum(parameter.numel() for parameter in self._model.parameters()) > _LARGEST_CHECKED
        if not len(z) or is_large:
            return replace(estimate, details={**estimate.details, "log_probabilities_change_without_eps": None})
        off = check_rescaling(self._model, self._rescalings, _head(batch, _CHECKED), z)
        if not off <= (_ROUNDING if device_of(self._model).type != "mps" else _ROUNDING_OF_FLOAT32):  # NaN too
            raise IsolossError(
                f"rescaling {type(self._model).__name__} changes log-probabilities by {off:.1g} nats: the "
                "rescalings of its family are not exact for this model. Measure the plain trace, or register "
                "rescalings for it"
            )
        return replace(estimate, details={**estimate.details, "log_probabilities_change_without_eps": off})

    def _fit(self, columns: ColumnRatios, *, keep_features: bool = False) -> CrossFit:
        """Return the minimum over all rescalings, or over those that keep the features."""
        convex_program: Any = self._convex_program
        if keep_features:
            convex_program = functools.partial(convex_program, equalities=self._rescalings.features)
        without = np.stack([columns.shares_without(fold).numpy() for fold in range(FOLDS)])
        # parts that are not measured have no share, but the rescalings act on them and their gauges count them
        others = ((0, 0), (0, self._others))
        return cross_fit(
            convex_program, np.pad(columns.fitted.sums.numpy(), others), np.pad(without, others), columns.fit.total
        )

    def _influences(self, fit: CrossFit, columns: ColumnRatios) -> torch.Tensor:
        """Return (N + r, P) the influences of the parameters' parts of the minimum, which add up to its own."""
        number, rows = len(self._parameter_ids), np.arange(len(self._parameter_ids))
        terms = fit.minimum.weights[:number] * columns.ratios.numpy()
        shape = number + self._others, len(self._names)
        by_parameter = scipy.sparse.csr_array((terms, (rows, self._parameter_ids.numpy())), shape)
        # the total is stationary in the log-factors, so to first order its error is the one at fixed weights; the sums
        # by parameter are not, and move along with the fit
        moved = responses(fit.minimum, self._rescalings.actions, by_parameter)
        weights = torch.from_numpy(fit.weights[:, :number])
        along = 2.0 * self._rescalings.exponents, torch.from_numpy(moved)
        return columns.influences(weights, self._parameter_ids, len(self._names), along)


def kinds_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of parameters by their kind of map; a bias is of the kind of its map.

    Example:
        >>> from isoloss.flatness.minimal_trace import kinds_of
        >>> kinds_of(["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias"]).keys()
        dict_keys(['attention-q'])
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(next(kind for kind in _KINDS if re.search(_KINDS[kind], name.lower())), []).append(name)
    return kinds


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
