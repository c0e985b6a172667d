"""Measures of flatness: the functions of `isoloss.flatness`, each with its settings as a dataclass that is called.

The functions are imported when a measure is taken, because settings and their help must not load torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from isoloss.config import setting
from isoloss.errors import IsolossError, did_you_mean
from isoloss.lab.evaluation.measures.base import (
    Measure,
    MeasureResult,
    SequenceMeasure,
    digest_batches,
    make_measure,
)
from isoloss.registry import MEASURES

if TYPE_CHECKING:
    from isoloss.lab.evaluation.context import MeasureContext
    from isoloss.statistics.estimate import Estimate
    from isoloss.text.inputs import Inputs
    from isoloss.text.masking import Batch

Matrix = Literal["gauss-newton", "hessian"]


@dataclass(frozen=True, kw_only=True)
class FlatnessMeasure(Measure):
    """A measure of flatness, which every language model has; `isoloss compare` takes it too."""

    name: ClassVar[str]  # what its estimate is called

    def __call__(self, model: Any, batches: Any, **options: Any) -> Mapping[str, Estimate]:
        """Return the estimates, by name, of a model on batches; `options` as the functions of `isoloss.flatness`."""
        return {self.name: self._estimate(model, batches, **options)}

    def _estimate(self, model: Any, batches: Any, **options: Any) -> Estimate:
        raise NotImplementedError

    @property
    def is_compared(self) -> bool:
        """Whether `isoloss.compare_traces` takes it of several models."""
        return False

    def amount(self, num_sequences: int, context: MeasureContext) -> tuple[int, str]:
        """Return what `progress` counts to at most, given the number of sequences, and what it counts."""
        return num_sequences, "sequences"


def flatness_measure(name: str, settings: Mapping[str, Any] | None = None) -> FlatnessMeasure:
    """Return the measure of flatness called `name`; arguments as for `make_measure`."""
    known = [other for other, cls in MEASURES.loaded().items() if issubclass(cls, FlatnessMeasure)]
    try:
        MEASURES.match(name)
    except IsolossError:
        guess = did_you_mean(name, known) or ";"
        raise IsolossError(f"no measure {name!r}{guess} the measures of flatness are {', '.join(known)}") from None
    measure = make_measure(name, settings)
    if not isinstance(measure, FlatnessMeasure):
        raise IsolossError(f"{name} is no measure of flatness, and isoloss measure takes it: choose {', '.join(known)}")
    return measure


@dataclass(frozen=True, kw_only=True)
class SquaredNorm(FlatnessMeasure):
    """Sum of the squared parameters: exact."""

    name: ClassVar[str] = "squared-norm"

    def _estimate(self, model: Any, batches: Any, **options: Any) -> Estimate:
        from isoloss.flatness import squared_parameter_norm

        return squared_parameter_norm(model)

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return which of `rtol`, `seconds` and `resume` are set, although an exact value has no use for them."""
        return _without_limits(context)

    def run(self, model: Any, context: MeasureContext) -> Mapping[str, Estimate]:
        """Return the norm, which needs no inputs."""
        return self(model, ())


def _without_limits(context: MeasureContext) -> str | None:
    unused = [name for name in ("rtol", "seconds", "resume") if getattr(context, name) is not None]
    return f"it takes no {' and no '.join(unused)}" if unused else None


@dataclass(frozen=True, kw_only=True)
class SampledFlatness(FlatnessMeasure, SequenceMeasure):
    """A measure of flatness on inputs."""

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Measure on the inputs of the context."""
        inputs = context.inputs(self.num_sequences, self.seed)
        estimates = self(
            model,
            self.cut(inputs).batches,
            causal=context.is_causal,
            num_sequences=context.num_sequences,
            rtol=context.rtol,
            seconds=context.seconds,
            resume=context.resume,
            progress=context.progress,
            **self.further_options(inputs, context),
        )
        return MeasureResult(estimates=estimates, inputs=digest_batches(inputs.batches))

    def further_options(self, inputs: Inputs, context: MeasureContext) -> dict[str, Any]:
        """Return what `__call__` is given besides the options that all measures on inputs take."""
        return {}

    def cut(self, inputs: Inputs) -> Inputs:
        """Return the inputs in batches of the size that the value depends on; as they are where it depends on none."""
        return inputs

    def continued(self, context: MeasureContext, first: Estimate) -> tuple[Self, MeasureContext]:
        """Return how other models are measured after a first one whose measurement `rtol` or `seconds` ended.

        They are measured on as much as the first was, so that their differences are paired.
        """
        if context.rtol is None and context.seconds is None:
            return self, context
        # by their number: the same time, or the same `rtol`, would end others elsewhere
        sequences = first.details["sequences"]
        return self, dataclasses.replace(context, rtol=None, seconds=None, num_sequences=sequences)


@dataclass(frozen=True, kw_only=True)
class _Probed(SampledFlatness):
    num_probes: int | None = setting(None, minimum=1, maximum=1_000_000, omit_default=True)
    """Random vectors, or sampled labels; default: 1 for each predicted token (trace, weighted-trace, hessian-trace), 50
    sampled labels (--trace-method paper), 16 pairs of noise (noise-sharpness), 8 (spectral-density)."""


@dataclass(frozen=True, kw_only=True)
class Trace(_Probed):
    """Trace of the Fisher, which equals that of the Hessian where the model's conditionals are the true ones."""

    trace_method: Literal["ghost", "paper"] = setting("ghost", omit_default=True)
    """One backward pass per batch with the exact expectation over labels (ghost), or the paper's estimator: one
    backward pass for each of 50 sampled labels."""
    name: ClassVar[str] = "trace"

    @property
    def is_compared(self) -> bool:
        """Whether `isoloss.compare_traces` takes it of several models: not by the paper's sampled labels."""
        return self.trace_method == "ghost"

    def _estimate(self, model: Any, batches: Any, **options: Any) -> Estimate:
        from isoloss.flatness import fisher_trace

        return fisher_trace(
            model, batches, method=self.trace_method, num_probes=self.num_probes, seed=self.seed, **options
        )

    def further_options(self, inputs: Inputs, context: MeasureContext) -> dict[str, Any]:
        """Return the auxiliary sample, which only models with input embeddings can read."""
        return {"auxiliary_sample": inputs.auxiliary_sample if context.has_embeddings else None}


@dataclass(frozen=True, kw_only=True)
class MinimalTrace(Trace):
    """Minimum of the trace over the model's exact rescalings, which leave its function as it is."""

    rescaling_granularity: Literal["tensor", "head", "channel", "neuron"] = setting("tensor", omit_default=True)
    """minimal-trace, rescaling-control: what has a factor of its own: whole tensors, heads, heads and channels, or
    hidden units (ReLU or gated)."""
    name: ClassVar[str] = "minimal-trace"

    def _estimate(self, model: Any, batches: Any, **options: Any) -> Estimate:
        rescaling: dict[str, Any] = {"rescaling": "minimal", "granularity": self.rescaling_granularity}
        return super()._estimate(model, batches, **rescaling, **options)


@dataclass(frozen=True, kw_only=True)
class RescalingControl(MinimalTrace):
    """Trace and minimal trace after a random exact rescaling: only the plain one should change."""

    name: ClassVar[str] = "rescaling-control"

    @property
    def is_compared(self) -> bool:
        """False: what is compared are the models as they are."""
        return False

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return both traces of a random rescaling of the model."""
        from isoloss.flatness import rescaled_at_random

        other = rescaled_at_random(model, granularity=self.rescaling_granularity, seed=self.seed)
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(Trace)}
        # each of the two measurements resumes from a file of its own
        of_plain = context
        if context.resume is not None:
            of_plain = dataclasses.replace(context, resume=context.resume.with_name(f"{context.resume.name}.plain"))
        plain, minimal = Trace(**settings).run(other, of_plain), super().run(other, context)
        estimates = {
            "trace-rescaled-at-random": plain.estimates["trace"],
            "minimal-trace-rescaled-at-random": minimal.estimates[self.name],
        }
        return dataclasses.replace(minimal, estimates=estimates)


@dataclass(frozen=True, kw_only=True)
class _Expanded(Trace):
    """A trace after the model is expanded into an architecture."""

    size: str
    expanded_layers: int | None = setting(None, minimum=1, omit_default=True)
    """Of trace-in-SIZE and minimal-trace-in-SIZE: layers of the larger architecture; default: as many as SIZE has."""
    expanded_heads: int | None = setting(None, minimum=1, omit_default=True)
    """Of the same: heads per layer of the larger architecture; default: as many as SIZE has."""

    @property
    def is_compared(self) -> bool:
        """False: each model is made larger first."""
        return False

    @property
    def _scale(self) -> Any:
        return "exact"

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return the trace of the same function in the larger model; its details say how far the logits differ."""
        from isoloss.lab.models.expansion import expand
        from isoloss.lab.models.sizes import reshaped, shape

        into = reshaped(shape(self.size), layers=self.expanded_layers, heads=self.expanded_heads)
        large = expand(model, into, embedding_scale=self._scale).model  # refuses an unknown scale
        # `Trace.run`, or `MinimalTrace.run` in `MinimalTraceIn`, where that class comes next
        result = super().run(large, context)
        batches = context.inputs(self.num_sequences, self.seed).batches
        trace = result.estimates[self.name]
        details = {
            **trace.details,
            "expanded_into": self.size,
            "embedding_scale": self._scale,
            "logits_differ_by": _logits_differ(model, large, batches, causal=context.is_causal),
        }
        return dataclasses.replace(result, estimates={self.name: dataclasses.replace(trace, details=details)})


@dataclass(frozen=True, kw_only=True)
class TraceIn(_Expanded):
    """The trace after expanding the model to a size, e.g. trace-in-d64-paper (isoloss expand --embedding-scale)."""

    embedding_scale: str

    @property
    def _scale(self) -> str:
        return self.embedding_scale


@dataclass(frozen=True, kw_only=True)
class MinimalTraceIn(_Expanded, MinimalTrace):
    """Minimum of the trace after expanding the model to a size; it does not depend on the embedding scale."""


def _logits_differ(small: Any, large: Any, batches: Sequence[Batch], *, causal: bool) -> float:
    """Return the largest difference of two logits over the largest logit, at the predicted positions."""
    import torch

    from isoloss.lab.models.make import predicted_logits

    gap = largest = 0.0
    with torch.no_grad():
        for batch in batches:
            inputs = {name: value.to(small.device) for name, value in batch.items() if name != "documents"}
            few, many = (predicted_logits(model, inputs, causal=causal) for model in (small, large))
            gap, largest = max(gap, float((few - many).abs().max())), max(largest, float(few.abs().max()))
    return gap / largest


@dataclass(frozen=True, kw_only=True)
class EmpiricalFisher(SampledFlatness):
    """Trace of the empirical Fisher: mean squared gradient norm at the given labels."""

    name: ClassVar[str] = "empirical-fisher"

    def _estimate(self, model: Any, batches: Any, **options: Any) -> Estimate:
        from isoloss.flatness import empirical_fisher_trace

        return empirical_fisher_trace(model, batches, seed=self.seed, **options)


@dataclass(frozen=True, kw_only=True)
class WeightedTrace(_Probed):
    """Trace of the Fisher, each parameter counted by its square: invariant to rescaling."""

    name: ClassVar[str] = "weighted-trace"

    def _estimate(self, model: Any, batches: Any, **options: Any) -> Estimate:
        from isoloss.flatness import weighted_fisher_trace

        num_probes = self.num_probes or 1
        return weighted_fisher_trace(model, batches, num_probes=num_probes, seed=self.seed, **options)


@dataclass(frozen=True, kw_only=True)
class HessianTrace(_Probed):
    """Trace of the Hessian at the given labels: the Fisher's part and the residual."""

    hessian_method: Literal["residual", "published-code"] = "residual"
    """hessian-trace: the Fisher's trace plus the residual, or the paper's published code, which differs from its
    appendix B.1."""
    hessian_group_size: int = setting(8, minimum=1)
    """hessian-trace: sequences that share a random vector for the residual; of the published code, a batch."""
    name: ClassVar[str] = "hessian-trace"

    def _estimate(self, model: Any, batches: Any, **options: Any) -> Estimate:
        from isoloss.flatness import hessian_trace

        return hessian_trace(
            model,
            batches,
            method=self.hessian_method,
            num_probes=self.num_probes or 1,
            seed=self.seed,
            group_size=self.hessian_group_size,
            **options,
        )

    def cut(self, inputs: Inputs) -> Inputs:
        """Return the inputs; for the published code, whose probes and error are those of batches, in batches."""
        return inputs.cut(self.hessian_group_size) if self.hessian_method == "published-code" else inputs


@dataclass(frozen=True, kw_only=True)
class FisherRao(SampledFlatness):
    """Squared Fisher-Rao norm of the parameters: invariant to rescaling."""

    name: ClassVar[str] = "fisher-rao"

    def _estimate(self, model: Any, batches: Any, **options: Any) -> Estimate:
        from isoloss.flatness import fisher_rao_norm

        return fisher_rao_norm(model, batches, **options)


@dataclass(frozen=True, kw_only=True)
class RelativeFlatness(SampledFlatness):
    """Relative flatness of the last linear map: invariant to rescaling whole tensors."""

    name: ClassVar[str] = "relative-flatness"

    def _estimate(self, model: Any, batches: Any, **options: Any) -> Estimate:
        from isoloss.flatness import relative_flatness

        return relative_flatness(model, batches, **options)


@dataclass(frozen=True, kw_only=True)
class SAMSharpness(SampledFlatness):
    """Rise of a batch's loss in its worst direction within a small ball around the weights."""

    sharpness_rho: float = setting(0.05, above=0)
    """sam-sharpness, adaptive-sharpness: radius of the ball, in the Euclidean norm over all parameters."""
    sharpness_steps: int = setting(1, minimum=1)
    """sam-sharpness, adaptive-sharpness: ascent steps."""
    sharpness_batch_size: int = setting(16, minimum=1)
    """sam-sharpness, adaptive-sharpness: sequences in a batch, each of which has its own worst direction; the value
    depends on it."""
    adaptive: ClassVar[bool] = False
    name: ClassVar[str] = "sam-sharpness"

    def _estimate(self, model: Any, batches: Any, **options: Any) -> Estimate:
        from isoloss.flatness import sam_sharpness

        return sam_sharpness(
            model,
            batches,
            rho=self.sharpness_rho,
            num_steps=self.sharpness_steps,
            adaptive=self.adaptive,
            **options,
        )

    def cut(self, inputs: Inputs) -> Inputs:
        """Return the inputs in batches, each of which has its own worst direction."""
        return inputs.cut(self.sharpness_batch_size)


@dataclass(frozen=True, kw_only=True)
class AdaptiveSharpness(SAMSharpness):
    """The same rise, the ball measured in units of each weight: invariant to rescaling."""

    adaptive: ClassVar[bool] = True
    name: ClassVar[str] = "adaptive-sharpness"


@dataclass(frozen=True, kw_only=True)
class _OverProbes(_Probed):
    """A measure whose samples are probes, taken one after another on all sequences."""

    default_probes: ClassVar[int]

    def amount(self, num_sequences: int, context: MeasureContext) -> tuple[int, str]:
        """Return the number of probes."""
        from isoloss.flatness._measurement import StopCriteria

        stopping = StopCriteria(rtol=context.rtol, seconds=context.seconds)
        return stopping.number_of_probes(self.num_probes, self.default_probes), "probes"

    def continued(self, context: MeasureContext, first: Estimate) -> tuple[Self, MeasureContext]:
        """Return the measure with as many probes as the first model took."""
        return dataclasses.replace(self, num_probes=first.num_probes), super().continued(context, first)[1]


@dataclass(frozen=True, kw_only=True)
class NoiseSharpness(_OverProbes):
    """Expected rise of the loss under Gaussian noise on the weights."""

    noise_relative_std: float = setting(0.01, above=0)
    """noise-sharpness: standard deviation of the noise on a parameter tensor, relative to its root mean square."""
    name: ClassVar[str] = "noise-sharpness"
    default_probes: ClassVar[int] = 16

    def _estimate(self, model: Any, batches: Any, **options: Any) -> Estimate:
        from isoloss.flatness import noise_sharpness

        return noise_sharpness(
            model,
            batches,
            relative_std=self.noise_relative_std,
            num_probes=self.num_probes,
            seed=self.seed,
            **options,
        )


@dataclass(frozen=True, kw_only=True)
class Int8Rise(SampledFlatness):
    """Rise of the loss when the weights of linear maps are rounded to 8 bits, with one scale for each output."""

    name: ClassVar[str] = "int8-rise"

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return which of `rtol`, `seconds` and `resume` are set: the rise takes two passes over the inputs."""
        return _without_limits(context)

    def _estimate(self, model: Any, batches: Any, **options: Any) -> Estimate:
        from isoloss.flatness.robustness import ROBUSTNESS, loss_rises

        taken = {name: options.get(name) for name in ("causal", "num_sequences", "progress")}
        name = self.name.replace("-", "_")
        return loss_rises(model, batches, {name: ROBUSTNESS[name]}, **taken)[name]

    def amount(self, num_sequences: int, context: MeasureContext) -> tuple[int, str]:
        """Return the number of losses, before and after."""
        return 2, "losses"


@dataclass(frozen=True, kw_only=True)
class Int4Rise(Int8Rise):
    """Rise of the loss when the weights of linear maps are rounded to 4 bits, with one scale for each 128 weights."""

    name: ClassVar[str] = "int4-rise"


@dataclass(frozen=True, kw_only=True)
class Barrier(Int8Rise):
    """Largest rise of the loss on the line to the weights of another checkpoint, above the line between the losses."""

    barrier_with: str = setting("")
    """The other checkpoint: its folder, a run for its last one, or a name on the Hugging Face hub."""
    name: ClassVar[str] = "barrier"

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return what is missing or set."""
        return super().why_not_applicable(context) if self.barrier_with else "barrier_with names no other checkpoint"

    def _estimate(self, model: Any, batches: Any, **options: Any) -> Estimate:
        from isoloss.checkpoints.loading import load_model
        from isoloss.flatness import interpolation_barrier
        from isoloss.runs import Run

        run = Run(Path(self.barrier_with))
        path = str(run.last_checkpoint()) if run.exists else self.barrier_with
        other = load_model(path, device=str(model.device), dtype=model.dtype).model
        taken: dict[str, Any] = {name: options.get(name) for name in ("causal", "num_sequences", "progress")}
        return interpolation_barrier(model, other, batches, **taken)

    def amount(self, num_sequences: int, context: MeasureContext) -> tuple[int, str]:
        """Return the number of losses: at both ends and at nine points between them."""
        return 11, "losses"


@dataclass(frozen=True, kw_only=True)
class DirectionalSharpness(SequenceMeasure):
    """Curvature of the loss along the next update of the run's optimizer, a unit vector u: u'Fu."""

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return why there is no next update."""
        if context.checkpoint is None:
            return (
                "only a run that is measured on its own language has an optimizer to go on with: leave out --language"
            )
        run, step = context.checkpoint
        if step != (last := run.last_step()):
            return f"the optimizer's state is kept at the last step, {last}, and not at {step}: add --steps last"
        return None if step else "no step was made, so that the optimizer has no state"

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return `directional-sharpness`; its details have the `length` of the update."""
        from isoloss.flatness import directional_sharpness
        from isoloss.lab.evaluation.pretraining import next_update

        if (reason := self.why_not_applicable(context)) or context.checkpoint is None:
            raise IsolossError(reason)
        update = next_update(context.checkpoint[0], context.language)
        batches = context.inputs(self.num_sequences, self.seed).batches
        estimate = directional_sharpness(model, update, batches, causal=context.is_causal)
        return MeasureResult(estimates={"directional-sharpness": estimate}, inputs=digest_batches(batches))


@dataclass(frozen=True, kw_only=True)
class _Spectral(SampledFlatness):
    curvature_matrix: Matrix = "gauss-newton"
    """largest-eigenvalue, spectral-density: the Gauss-Newton matrix (the Fisher), or the Hessian at the given
    labels."""


@dataclass(frozen=True, kw_only=True)
class LargestEigenvalue(_Spectral):
    """Largest eigenvalues of the Gauss-Newton matrix or the Hessian, by Lanczos' method."""

    num_eigenvalues: int = setting(1, minimum=1)
    """largest-eigenvalue: number of eigenvalues."""
    name: ClassVar[str] = "largest-eigenvalue"

    def __call__(self, model: Any, batches: Any, **options: Any) -> dict[str, Estimate]:
        """Return the eigenvalues by their rank."""
        from isoloss.flatness import largest_eigenvalues

        wanted: dict[str, Any] = {
            "matrix": self.curvature_matrix,
            "num_eigenvalues": self.num_eigenvalues,
            "seed": self.seed,
        }
        eigenvalues = largest_eigenvalues(model, batches, **wanted, **options)
        return {self.name if i == 0 else f"{self.name}-{i + 1}": estimate for i, estimate in enumerate(eigenvalues)}

    def amount(self, num_sequences: int, context: MeasureContext) -> tuple[int, str]:
        """Return the most products with the matrix that are taken."""
        return 100, "products"

    def continued(self, context: MeasureContext, first: Estimate) -> tuple[Self, MeasureContext]:
        """Return the same tolerance and time for all: `rtol` is of the residual, and all sequences are taken anyway."""
        return self, context


@dataclass(frozen=True, kw_only=True)
class SpectralDensity(_Spectral, _OverProbes):
    """Distribution of the eigenvalues, and the trace and squared Frobenius norm that it gives."""

    spectrum_steps: int = setting(30, minimum=2)
    """spectral-density: steps of Lanczos' method for each probe."""
    name: ClassVar[str] = "spectral-density"
    default_probes: ClassVar[int] = 8

    def __call__(self, model: Any, batches: Any, **options: Any) -> dict[str, Estimate]:
        """Return the first two moments; the details of the first hold nodes and weights of each probe's quadrature."""
        from isoloss.flatness import spectral_density

        wanted: dict[str, Any] = {"matrix": self.curvature_matrix, "num_steps": self.spectrum_steps, "seed": self.seed}
        result = spectral_density(model, batches, num_probes=self.num_probes, **wanted, **options)
        first, second = result.moment(1), result.moment(2)
        quadrature = {"nodes": result.nodes.tolist(), "weights": result.weights.tolist()}
        return {
            "trace": dataclasses.replace(first, details={**first.details, **quadrature}),
            "squared-frobenius-norm": second,
        }
