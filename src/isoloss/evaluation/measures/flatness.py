"""Measures of flatness: what `isoloss.flatness` exports, each as a dataclass of its settings.

A setting that is None stands for the default of the function that is called.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from isoloss.config import setting
from isoloss.evaluation.measures.base import Measure, MeasureResult, SeededMeasure, digest_batches, influences

if TYPE_CHECKING:
    from isoloss.evaluation.context import MeasureContext
    from isoloss.statistics.estimate import Estimate
    from isoloss.text.masking import Batch

Matrix = Literal["gauss-newton", "hessian"]

_ARGUMENTS = {  # of the functions, by setting
    "num_probes": "num_probes",
    "trace_method": "method",
    "hessian_method": "method",
    "hessian_group_size": "group_size",
    "sharpness_rho": "rho",
    "sharpness_steps": "num_steps",
    "noise_relative_std": "relative_std",
    "curvature_matrix": "matrix",
    "num_eigenvalues": "k",
    "spectrum_steps": "num_steps",
}


@dataclass(frozen=True, kw_only=True)
class FlatnessMeasure(Measure):
    """A measure of flatness, which every language model has; `isoloss flatness` takes it too."""

    name: ClassVar[str]  # what its estimate is called
    # the function of `isoloss.flatness` that measures; a measure of one's own overrides `function` instead
    calls: ClassVar[str]

    def function(self) -> Callable[..., Any]:
        """Return what measures: a function of a model, batches, and keyword arguments."""
        import isoloss.flatness

        measuring: Callable[..., Any] = getattr(isoloss.flatness, self.calls)
        return measuring

    def options(self) -> dict[str, Any]:
        """Return the arguments that are settings of this measure alone; None stands for the function's default."""
        return {argument: getattr(self, name) for name, argument in _ARGUMENTS.items() if hasattr(self, name)}

    def estimates(self, result: Any) -> dict[str, Estimate]:
        """Return the estimates in what the function returned."""
        return {self.name: result}

    def amount(self, num_sequences: int) -> tuple[int, str]:
        """Return what `progress` counts to at most, given the number of sequences, and what it counts."""
        return num_sequences, "sequences"

    def applies_to(self, context: MeasureContext) -> str | None:
        """Return which of `rtol`, `seconds` and `resume` are set although the function has no use for them."""
        given = [name for name in ("rtol", "seconds", "resume") if getattr(context, name) is not None]
        unused = [name for name in given if name not in inspect.signature(self.function()).parameters]
        return f"it takes no {' and no '.join(unused)}" if unused else None


@dataclass(frozen=True, kw_only=True)
class SquaredNorm(FlatnessMeasure):
    """Sum of the squared parameters: exact."""

    name: ClassVar[str] = "squared-norm"
    calls: ClassVar[str] = "squared_parameter_norm"

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return the norm; it needs no inputs."""
        return MeasureResult(estimates=self.estimates(self.function()(model)))


@dataclass(frozen=True, kw_only=True)
class SampledFlatness(FlatnessMeasure, SeededMeasure):
    """A measure of flatness on inputs.

    Its function takes `options` and those of `seed`, `causal`, `num_sequences`, `rtol`, `seconds`, `resume`, `progress`
    and `auxiliary_sample` that are among its parameters.
    """

    trace_sentences: int = setting(2048, minimum=2)
    """Sequences for the trace and the other measures of flatness."""

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Measure on the inputs of the context."""
        inputs = context.inputs(self.trace_sentences, self.seed)
        estimates = self.estimates(self._call(model, inputs, context))
        return MeasureResult(estimates=estimates, arrays=influences(estimates), inputs=digest_batches(inputs.batches))

    def _call(self, model: Any, inputs: Any, context: MeasureContext) -> Any:
        function = self.function()
        arguments = {
            "seed": self.seed,
            "causal": context.is_causal,
            "num_sequences": context.num_sequences,
            "rtol": context.rtol,
            "seconds": context.seconds,
            "resume": context.resume,
            "progress": context.progress,
            "auxiliary_sample": inputs.pool if context.has_embeddings else None,
        }
        taken = inspect.signature(function).parameters
        given = {**{name: value for name, value in arguments.items() if name in taken}, **self.options()}
        return function(model, inputs.batches, **{name: value for name, value in given.items() if value is not None})

    def continued(self, context: MeasureContext, first: Estimate) -> tuple[Self, MeasureContext]:
        """Return how other models are measured after a first one whose measurement `rtol` or `seconds` ended.

        They are measured on as much as the first was, so that their differences are paired.
        """
        if context.rtol is None and context.seconds is None:
            return self, context
        sequences = first.details["sequences"]
        return self, dataclasses.replace(context, rtol=None, seconds=None, num_sequences=sequences)


@dataclass(frozen=True, kw_only=True)
class _Probed(SampledFlatness):
    num_probes: int | None = setting(None, minimum=1, omit_default=True)
    """Random vectors, or sampled labels; default: 1 for each predicted token (trace, weighted-trace, hessian-trace), 50
    sampled labels (--trace-method paper), 16 pairs of noise (noise-sharpness), 8 (spectral-density)."""


@dataclass(frozen=True, kw_only=True)
class Trace(_Probed):
    """Trace of the Fisher, which equals that of the Hessian where the model's conditionals are the true ones."""

    trace_method: Literal["ghost", "paper"] = setting("ghost", omit_default=True)
    """One backward pass a batch with the exact expectation over labels (ghost), or the paper's estimator: one backward
    pass for each of 50 sampled labels."""
    name: ClassVar[str] = "trace"
    calls: ClassVar[str] = "fisher_trace"


@dataclass(frozen=True, kw_only=True)
class TraceIn(Trace):
    """The same trace after expanding the model to a larger size."""

    size: str
    scale: str

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return the trace of the same function in the larger model; its details say how far the logits differ."""
        from isoloss.models.expansion import expand
        from isoloss.models.sizes import shape

        scale: Any = self.scale  # embed refuses one that it does not know
        large = expand(model, shape(self.size), scale=scale).model
        result = super().run(large, context)
        trace = result.estimates["trace"]
        batches = context.inputs(self.trace_sentences, self.seed).batches
        differ = _logits_differ(model, large, batches, causal=context.is_causal)
        details = {**trace.details, "expanded_into": self.size, "scale": self.scale, "logits_differ_by": differ}
        return dataclasses.replace(result, estimates={"trace": dataclasses.replace(trace, details=details)})


@dataclass(frozen=True, kw_only=True)
class EmpiricalFisher(SampledFlatness):
    """Trace of the empirical Fisher: squared gradients at the given labels."""

    name: ClassVar[str] = "empirical-fisher"
    calls: ClassVar[str] = "empirical_fisher_trace"


@dataclass(frozen=True, kw_only=True)
class WeightedTrace(_Probed):
    """Trace of the Fisher, each parameter counted by its square: rescaling a unit does not change it."""

    name: ClassVar[str] = "weighted-trace"
    calls: ClassVar[str] = "weighted_fisher_trace"


@dataclass(frozen=True, kw_only=True)
class HessianTrace(_Probed):
    """Trace of the Hessian at the given labels: the Fisher's part and the rest."""

    hessian_method: Literal["residual", "authors"] = "residual"
    """The Fisher's trace plus the rest of the Hessian's, or what the paper's published code does."""
    hessian_group_size: int = setting(8, minimum=1)
    """Sequences that share a random vector for the rest."""
    name: ClassVar[str] = "hessian-trace"
    calls: ClassVar[str] = "hessian_trace"


@dataclass(frozen=True, kw_only=True)
class FisherRao(SampledFlatness):
    """Squared Fisher-Rao norm of the parameters: rescaling a unit does not change it."""

    name: ClassVar[str] = "fisher-rao"
    calls: ClassVar[str] = "fisher_rao_norm"


@dataclass(frozen=True, kw_only=True)
class SAMSharpness(SampledFlatness):
    """Rise of a batch's loss in its worst direction within a small ball around the weights."""

    sharpness_rho: float = setting(0.05, above=0)
    """Radius of the ball, in the Euclidean norm over all parameters."""
    sharpness_steps: int = setting(1, minimum=1)
    """Steps of ascent."""
    sharpness_batch_size: int = setting(16, minimum=1)
    """Sequences in a batch, each of which has its own worst direction; the value depends on it."""
    name: ClassVar[str] = "sam-sharpness"
    calls: ClassVar[str] = "sam_sharpness"

    def _call(self, model: Any, inputs: Any, context: MeasureContext) -> Any:
        return super()._call(model, inputs.cut(self.sharpness_batch_size), context)


@dataclass(frozen=True, kw_only=True)
class _OverProbes(_Probed):
    """A measure whose samples are probes, taken one after another on all sequences."""

    default_probes: ClassVar[int]

    def amount(self, num_sequences: int) -> tuple[int, str]:
        """Return the number of probes."""
        return self.num_probes or self.default_probes, "probes"

    def continued(self, context: MeasureContext, first: Estimate) -> tuple[Self, MeasureContext]:
        """Return the measure with as many probes as the first model took."""
        return dataclasses.replace(self, num_probes=first.num_probes), super().continued(context, first)[1]


@dataclass(frozen=True, kw_only=True)
class NoiseSharpness(_OverProbes):
    """Expected rise of the loss under Gaussian noise on the weights."""

    noise_relative_std: float = setting(0.01, above=0)
    """Standard deviation of the noise on a parameter tensor, relative to the tensor's root mean square."""
    name: ClassVar[str] = "noise-sharpness"
    default_probes: ClassVar[int] = 16
    calls: ClassVar[str] = "noise_sharpness"


@dataclass(frozen=True, kw_only=True)
class _Spectral(SampledFlatness):
    curvature_matrix: Matrix = "gauss-newton"
    """Whose eigenvalues: the Gauss-Newton matrix's (the Fisher) or, at the given labels, the Hessian's."""


@dataclass(frozen=True, kw_only=True)
class LargestEigenvalue(_Spectral):
    """Largest eigenvalues of the Gauss-Newton matrix or the Hessian, by Lanczos' method."""

    num_eigenvalues: int = setting(1, minimum=1)
    """How many, the largest first."""
    name: ClassVar[str] = "largest-eigenvalue"
    calls: ClassVar[str] = "largest_eigenvalues"

    def amount(self, num_sequences: int) -> tuple[int, str]:
        """Return the most products with the matrix that are taken."""
        return 100, "products"

    def continued(self, context: MeasureContext, first: Estimate) -> tuple[Self, MeasureContext]:
        """Return the same tolerance for all: `rtol` is of the residual, and all sequences are taken anyway."""
        return self, dataclasses.replace(context, seconds=None)

    def estimates(self, result: Any) -> dict[str, Estimate]:
        """Return the eigenvalues by their rank."""
        return {self.name if i == 0 else f"eigenvalue-{i + 1}": estimate for i, estimate in enumerate(result)}


@dataclass(frozen=True, kw_only=True)
class SpectralDensity(_Spectral, _OverProbes):
    """Distribution of the eigenvalues, and the trace and squared Frobenius norm that it gives."""

    spectrum_steps: int = setting(30, minimum=2)
    """Steps of Lanczos' method for each probe."""
    name: ClassVar[str] = "spectral-density"
    default_probes: ClassVar[int] = 8
    calls: ClassVar[str] = "spectral_density"

    def estimates(self, result: Any) -> dict[str, Estimate]:
        """Return the first two moments; the details of the first hold nodes and weights of each probe's quadrature."""
        first, second = result.moment(1), result.moment(2)
        quadrature = {"nodes": result.nodes.tolist(), "weights": result.weights.tolist()}
        return {
            "spectrum-trace": dataclasses.replace(first, details={**first.details, **quadrature}),
            "spectrum-squares": second,
        }


def _logits_differ(small: Any, large: Any, batches: Sequence[Batch], *, causal: bool) -> float:
    """Return the largest difference of two logits over the largest logit, at the predicted positions."""
    import torch

    from isoloss.models.make import predicted_logits

    gap = largest = 0.0
    with torch.no_grad():
        for batch in batches:
            given = {name: value.to(small.device) for name, value in batch.items() if name != "documents"}
            few, many = (predicted_logits(model, given, causal=causal) for model in (small, large))
            gap, largest = max(gap, float((few - many).abs().max())), max(largest, float(few.abs().max()))
    return gap / largest
