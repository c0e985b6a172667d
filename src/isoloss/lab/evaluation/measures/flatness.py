"""Measures of flatness: the functions of `isoloss.flatness` with the settings that an evaluation records.

The functions are loaded when a measure is taken, because settings and their help must not load torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from isoloss import flatness
from isoloss.config import setting
from isoloss.errors import IsolossError, did_you_mean
from isoloss.lab.evaluation.measures.base import (
    FunctionMeasure,
    MeasureResult,
    SequenceMeasure,
    counting,
    digest_batches,
    make_measure,
    measure_class,
    requires,
)
from isoloss.lab.languages.config import PCFGConfig, WithSpecialTokensConfig
from isoloss.registry import MEASURES
from isoloss.seeds import derive

if TYPE_CHECKING:
    from isoloss.lab.evaluation.context import MeasureContext
    from isoloss.statistics.estimate import Estimate
    from isoloss.text.masking import Batch

NumProbes = Annotated[
    int | None,
    setting(minimum=1, maximum=1_000_000, omit_default=True),
    "Random vectors, or sampled labels; default: 1 for each predicted token (trace, weighted-trace, hessian-trace, "
    "diagonal-fisher), 50 sampled labels (--trace-method paper), 16 pairs of noise (noise-sharpness), 8 "
    "(spectral-density).",
]
TraceMethod = Annotated[
    Literal["ghost", "paper"],
    setting(omit_default=True),
    "One backward pass per batch with the exact expectation over labels (ghost), or the paper's estimator: one "
    "backward pass for each of 50 sampled labels.",
]
Granularity = Annotated[
    Literal["tensor", "head", "channel", "neuron"],
    setting(omit_default=True),
    "minimal-trace, rescaling-control: what gets its own factor: whole tensors, heads, heads and channels, or "
    "hidden units (ReLU or gated).",
]
ExpandedLayers = Annotated[
    int | None,
    setting(minimum=1, omit_default=True),
    "trace-in-SIZE, minimal-trace-in-SIZE: layers of the larger architecture; default: as many as SIZE has.",
]
ExpandedHeads = Annotated[
    int | None,
    setting(minimum=1, omit_default=True),
    "trace-in-SIZE, minimal-trace-in-SIZE: heads per layer of the larger architecture; default: as many as SIZE has.",
]
Rho = Annotated[
    float,
    setting(above=0),
    "sam-sharpness, adaptive-sharpness: radius of the ball, in the Euclidean norm over all parameters.",
]
AscentSteps = Annotated[int, setting(minimum=1), "sam-sharpness, adaptive-sharpness: ascent steps."]
SharpnessBatch = Annotated[
    int,
    setting(minimum=1),
    "sam-sharpness, adaptive-sharpness: sequences in a batch. Each batch has its own worst direction, so the value "
    "depends on this.",
]
Matrix = Annotated[
    Literal["gauss-newton", "hessian"],
    setting(),
    "largest-eigenvalue, spectral-density: the Gauss-Newton matrix (the Fisher), or the Hessian at the given labels.",
]

_RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
_FRONTIER_BATCH = 8  # sequences in a step of fine-tuning


def flatness_measures() -> dict[str, type[FunctionMeasure]]:
    """Return the measures that need only a model and sequences, by name; `isoloss compare` takes them, too."""
    classes = MEASURES.loaded(measure_class).items()
    return {name: cls for name, cls in classes if issubclass(cls, FunctionMeasure) and cls.is_of_flatness}


def flatness_measure(name: str, settings: Mapping[str, Any] | None = None) -> FunctionMeasure:
    """Return the measure of flatness called `name`; arguments as for `make_measure`."""
    known = flatness_measures()
    try:
        MEASURES.match(name)
    except IsolossError:
        guess = did_you_mean(name, known) or ";"
        raise IsolossError(f"no measure {name!r}{guess} the measures of flatness are {', '.join(known)}") from None
    measure = make_measure(name, settings)
    if not isinstance(measure, FunctionMeasure) or not measure.is_of_flatness:
        raise IsolossError(f"{name} is not a measure of flatness: choose {', '.join(known)}, or use isoloss measure")
    return measure


# --- traces ----------------------------------------------------------------------------------------------------------


def trace(
    model: Any,
    batches: Any,
    *,
    num_probes: NumProbes = None,
    trace_method: TraceMethod = "ghost",
    seed: int = 0,
    auxiliary_sample: Any = None,
    **options: Any,
) -> Estimate:
    """Trace of the Fisher; equals the Hessian's trace if the model's conditionals are the true ones."""
    given: dict[str, Any] = {"num_probes": num_probes, "seed": seed, "auxiliary_sample": auxiliary_sample}
    return flatness.fisher_trace(model, batches, method=trace_method, **given, **options)


def minimal_trace(
    model: Any,
    batches: Any,
    *,
    num_probes: NumProbes = None,
    trace_method: TraceMethod = "ghost",
    rescaling_granularity: Granularity = "tensor",
    seed: int = 0,
    auxiliary_sample: Any = None,
    **options: Any,
) -> Estimate:
    """Minimum of the trace over the model's exact rescalings, which do not change its function."""
    options |= {"rescaling": "minimal", "granularity": rescaling_granularity, "auxiliary_sample": auxiliary_sample}
    return trace(model, batches, num_probes=num_probes, trace_method=trace_method, seed=seed, **options)


def minimal_trace_by_kind(
    model: Any,
    batches: Any,
    *,
    num_probes: NumProbes = None,
    rescaling_granularity: Granularity = "tensor",
    seed: int = 0,
    auxiliary_sample: Any = None,
    **options: Any,
) -> dict[str, Estimate]:
    """Parts of the minimal trace by kind of map: attention, MLP, norms, embeddings; they add up to it."""
    from isoloss.flatness._ghost.auxiliary import AuxiliarySample
    from isoloss.flatness.fisher import ExactLabels, minimized
    from isoloss.flatness.minimal_trace import MinimalTraceEstimator

    minimal = MinimalTraceEstimator(model, granularity=rescaling_granularity)
    if auxiliary_sample is not None:
        auxiliary_sample = AuxiliarySample.read(model, auxiliary_sample)
    options = {"options": options, "num_probes": num_probes or 1, "seed": seed, "auxiliary_sample": auxiliary_sample}
    return minimal.by_kind(minimized(minimal, ExactLabels, model, batches, **options))


def rescaling_control(
    model: Any,
    batches: Any,
    *,
    num_probes: NumProbes = None,
    trace_method: TraceMethod = "ghost",
    rescaling_granularity: Granularity = "tensor",
    seed: int = 0,
    auxiliary_sample: Any = None,
    **options: Any,
) -> dict[str, Estimate]:
    """Trace and minimal trace after a random exact rescaling: only the plain one should change."""
    other = flatness.rescaled_at_random(model, granularity=rescaling_granularity, seed=seed)
    options |= {"num_probes": num_probes, "trace_method": trace_method, "seed": seed}
    options |= {"auxiliary_sample": auxiliary_sample}
    minimum = minimal_trace(other, batches, rescaling_granularity=rescaling_granularity, **options)
    return {"trace-rescaled-at-random": trace(other, batches, **options), "minimal-trace-rescaled-at-random": minimum}


def trace_in(
    model: Any,
    batches: Any,
    *,
    num_probes: NumProbes = None,
    trace_method: TraceMethod = "ghost",
    size: str,
    expanded_layers: ExpandedLayers = None,
    expanded_heads: ExpandedHeads = None,
    embedding_scale: str,
    seed: int = 0,
    auxiliary_sample: Any = None,
    **options: Any,
) -> dict[str, Estimate]:
    """The trace after expanding the model to a size, e.g. trace-in-d64-paper (isoloss expand --embedding-scale)."""
    options |= {"num_probes": num_probes, "trace_method": trace_method, "seed": seed}
    large, details = _expanded(model, batches, size, expanded_layers, expanded_heads, embedding_scale, options)
    found = trace(large, batches, auxiliary_sample=auxiliary_sample, **options)
    return {"trace": dataclasses.replace(found, details={**found.details, **details})}


def minimal_trace_in(
    model: Any,
    batches: Any,
    *,
    num_probes: NumProbes = None,
    trace_method: TraceMethod = "ghost",
    rescaling_granularity: Granularity = "tensor",
    size: str,
    expanded_layers: ExpandedLayers = None,
    expanded_heads: ExpandedHeads = None,
    seed: int = 0,
    auxiliary_sample: Any = None,
    **options: Any,
) -> dict[str, Estimate]:
    """Minimum of the trace after expanding the model to a size; it does not depend on the embedding scale."""
    options |= {"num_probes": num_probes, "trace_method": trace_method, "seed": seed}
    large, details = _expanded(model, batches, size, expanded_layers, expanded_heads, "exact", options)
    granularity: dict[str, Any] = {"rescaling_granularity": rescaling_granularity}
    found = minimal_trace(large, batches, auxiliary_sample=auxiliary_sample, **granularity, **options)
    return {"minimal-trace": dataclasses.replace(found, details={**found.details, **details})}


def _expanded(
    model: Any, batches: Any, size: str, layers: int | None, heads: int | None, scale: Any, options: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the same function in a larger model, and details; these say how far the logits differ."""
    from isoloss.lab.models.architectures import reshaped, shape
    from isoloss.lab.models.expansion import expand
    from isoloss.model_checks import is_causal

    into = reshaped(shape(size), layers=layers, heads=heads)
    large = expand(model, into, embedding_scale=scale).model  # refuses an unknown scale
    causal = options.get("causal")
    differ = _logits_differ(model, large, batches, causal=is_causal(model) if causal is None else causal)
    return large, {"expanded_into": size, "embedding_scale": scale, "logits_differ_by": differ}


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


def empirical_fisher(model: Any, batches: Any, *, seed: int = 0, **options: Any) -> Estimate:
    """Trace of the empirical Fisher: mean squared gradient norm at the given labels."""
    return flatness.empirical_fisher_trace(model, batches, seed=seed, **options)


def diagonal_fisher(
    model: Any, batches: Any, *, num_probes: NumProbes = None, seed: int = 0, **options: Any
) -> MeasureResult:
    """Diagonal of the Fisher, one entry per weight; with --output as safetensors by parameter name."""
    entries, trace = flatness.diagonal_fisher(model, batches, num_probes=num_probes or 1, seed=seed, **options)
    more = {name: values.cpu().numpy() for name, values in entries.items()}
    return MeasureResult(estimates={"diagonal-fisher": trace}, more=more)


def hessian_trace(
    model: Any,
    batches: Any,
    *,
    num_probes: NumProbes = None,
    hessian_method: Annotated[
        Literal["residual", "published-code"],
        setting(),
        "hessian-trace: the Fisher's trace plus the residual, or the paper's published code, which differs from its "
        "appendix B.1.",
    ] = "residual",
    hessian_group_size: Annotated[
        int,
        setting(minimum=1),
        "hessian-trace: sequences that share a random vector for the residual; for the published code, a batch.",
    ] = 8,
    seed: int = 0,
    **options: Any,
) -> Estimate:
    """Trace of the Hessian at the given labels: the Fisher's part and the residual."""
    if hessian_method == "published-code":  # its probes and its error are those of batches
        batches = _in_batches(batches, hessian_group_size)
    return flatness.hessian_trace(
        model,
        batches,
        method=hessian_method,
        num_probes=num_probes or 1,
        seed=seed,
        group_size=hessian_group_size,
        **options,
    )


def _in_batches(batches: Sequence[Batch], size: int) -> list[Batch]:
    """Return the same sequences in batches of a size that the value depends on."""
    import torch

    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    parts = range(0, len(whole["input_ids"]), size)
    return [{name: value[first : first + size] for name, value in whole.items()} for first in parts]


# --- norms -----------------------------------------------------------------------------------------------------------


def squared_norm(model: Any) -> Estimate:
    """Sum of the squared parameters: exact."""
    return flatness.squared_parameter_norm(model)


def weighted_trace(
    model: Any, batches: Any, *, num_probes: NumProbes = None, seed: int = 0, **options: Any
) -> Estimate:
    """Trace of the Fisher, each entry weighted by its squared parameter: invariant to rescaling."""
    return flatness.weighted_fisher_trace(model, batches, num_probes=num_probes or 1, seed=seed, **options)


def fisher_rao(model: Any, batches: Any, **options: Any) -> Estimate:
    """Squared Fisher-Rao norm of the parameters: invariant to rescaling."""
    return flatness.fisher_rao_norm(model, batches, **options)


def relative_flatness(model: Any, batches: Any, **options: Any) -> Estimate:
    """Relative flatness of the last linear map: invariant to rescaling whole tensors."""
    return flatness.relative_flatness(model, batches, **options)


# --- rises of the loss -----------------------------------------------------------------------------------------------


def sam_sharpness(
    model: Any,
    batches: Any,
    *,
    sharpness_rho: Rho = 0.05,
    sharpness_steps: AscentSteps = 1,
    sharpness_batch_size: SharpnessBatch = 16,
    **options: Any,
) -> Estimate:
    """Rise of a batch's loss in its worst direction within a small ball around the weights."""
    batches = _in_batches(batches, sharpness_batch_size)
    return flatness.sam_sharpness(model, batches, rho=sharpness_rho, num_steps=sharpness_steps, **options)


def adaptive_sharpness(
    model: Any,
    batches: Any,
    *,
    sharpness_rho: Rho = 0.05,
    sharpness_steps: AscentSteps = 1,
    sharpness_batch_size: SharpnessBatch = 16,
    **options: Any,
) -> Estimate:
    """Rise as in sam-sharpness, with the ball in units of each weight: invariant to rescaling."""
    ball: dict[str, Any] = {"sharpness_rho": sharpness_rho, "sharpness_steps": sharpness_steps, "adaptive": True}
    return sam_sharpness(model, batches, sharpness_batch_size=sharpness_batch_size, **ball, **options)


@counting("pairs of noise")
def noise_sharpness(
    model: Any,
    batches: Any,
    *,
    num_probes: NumProbes = None,
    noise_relative_std: Annotated[
        float,
        setting(above=0),
        "noise-sharpness: standard deviation of the noise on a parameter tensor, relative to its root mean square.",
    ] = 0.01,
    seed: int = 0,
    **options: Any,
) -> Estimate:
    """Expected rise of the loss under Gaussian noise on the weights, of 1 % of each tensor's root mean square."""
    given: dict[str, Any] = {"relative_std": noise_relative_std, "num_probes": num_probes, "seed": seed}
    return flatness.noise_sharpness(model, batches, **given, **options)


def _rise_of(name: str, values: str) -> Callable[..., Estimate]:
    """Return the measure of the rise under one of `isoloss.flatness.formats.FORMATS`."""

    @counting("passes over the inputs")
    def rise(model: Any, batches: Any, *, causal: bool | None = None, progress: Any = None) -> Estimate:
        from isoloss.flatness.formats import FORMATS

        return flatness.loss_rises(model, batches, {name: FORMATS[name]}, causal=causal, progress=progress)[name]

    rise.__doc__ = f"Rise of the loss when the weights of linear maps are rounded to {values}."
    return rise


int8_rise = _rise_of("int8", "8 bits, with one scale for each output")
int4_rise = _rise_of("int4", "4 bits, with one scale for each 128 weights")
int3_rise = _rise_of("int3", "3 bits, with one scale for each 128 weights")
int2_rise = _rise_of("int2", "2 bits, with one scale for each 128 weights")
int4_asymmetric_128_rise = _rise_of(
    "int4-asymmetric-128", "4 bits, with a scale and a zero for each 128 (torchao, AWQ)"
)
int4_asymmetric_32_rise = _rise_of("int4-asymmetric-32", "4 bits, with a scale and a zero for each 32 (torchao, AWQ)")
int4_gptq_rise = _rise_of("int4-gptq", "the symmetric grid of GPTQ: 4 bits, 128 weights a scale, no calibration")
nf4_rise = _rise_of("nf4", "NF4 in blocks of 64 (bitsandbytes, without double quantization)")


@counting("passes over the inputs")
def noise_rise(
    model: Any, batches: Any, *, seed: int = 0, causal: bool | None = None, progress: Any = None
) -> Estimate:
    """Rise of the loss under noise of 10 % of each tensor's root mean square, in pairs of opposite sign."""
    change = flatness.Noise(relative_std=0.1, seed=seed)
    return flatness.loss_rises(model, batches, {"noise": change}, causal=causal, progress=progress)["noise"]


@counting("chains")
def llc(
    model: Any,
    batches: Any,
    *,
    llc_localization: Annotated[
        float, setting(above=0), "llc: strength of the pull back to the checkpoint's weights."
    ] = 300.0,
    llc_step_size: Annotated[float, setting(above=0), "llc: step size of the sampler."] = 3e-4,
    llc_chains: Annotated[int, setting(minimum=2), "llc: chains of the sampler."] = 4,
    llc_draws: Annotated[int, setting(minimum=4), "llc: draws of each chain."] = 350,
    llc_burn_in: Annotated[int, setting(minimum=0), "llc: steps of each chain before its draws."] = 100,
    llc_batch_size: Annotated[int, setting(minimum=1), "llc: sequences in a step of the sampler."] = 32,
    seed: int = 0,
    causal: bool | None = None,
    progress: Any = None,
) -> Estimate:
    """Local learning coefficient by Langevin dynamics; refused if the chains have not converged."""
    return flatness.local_learning_coefficient(
        model,
        _in_batches(batches, llc_batch_size),
        localization=llc_localization,
        step_size=llc_step_size,
        num_chains=llc_chains,
        num_draws=llc_draws,
        burn_in=llc_burn_in,
        seed=seed,
        causal=causal,
        progress=progress,
    )


def _why_no_barrier(measure: FunctionMeasure, context: MeasureContext) -> str | None:
    named = getattr(measure, "barrier_with")  # noqa: B009 - a setting
    return None if named else "barrier_with names no other checkpoint"


@requires(_why_no_barrier)
@counting("passes over the inputs")
def barrier(
    model: Any,
    batches: Any,
    *,
    barrier_with: Annotated[
        str, setting(), "The other checkpoint: its folder, a run for its last one, or a name on the Hugging Face hub."
    ] = "",
    causal: bool | None = None,
    progress: Any = None,
) -> Estimate:
    """Largest rise of the loss on the line to the weights of another checkpoint, above the line between the losses."""
    from isoloss.checkpoints.loading import load_model
    from isoloss.runs import last_checkpoint

    other = load_model(last_checkpoint(barrier_with), device=str(model.device), dtype=model.dtype).model
    return flatness.interpolation_barrier(model, other, batches, causal=causal, progress=progress)


def _names_text(setting: str) -> Callable[[FunctionMeasure, MeasureContext], str | None]:
    """Return the check of a measure with another text that this setting names."""

    def why_not(measure: FunctionMeasure, context: MeasureContext) -> str | None:
        from isoloss.text.hub_datasets import check_data

        if not (named := getattr(measure, setting)):
            return f"{setting} names no other text (--{setting.replace('_', '-')})"
        if context.read_text is None:
            return "it takes two texts, and the model is measured on a language: add --data"
        try:
            check_data(named)
        except IsolossError as error:
            return f"{setting}: {error}"
        return None

    return why_not


def _why_no_frontier(measure: FunctionMeasure, context: MeasureContext) -> str | None:
    other, level = (getattr(measure, each) for each in ("frontier_with", "frontier_level"))
    if context.language is None:
        if level >= 0:
            return f"frontier_level is {level}, but the model is measured on a text, which has no levels: leave it out"
        return _names_text("frontier_with")(measure, context)
    if other:
        return f"frontier_with is {other}, but the model is measured on a language: leave it out, or add --data"
    grammar = context.language.config
    if isinstance(grammar, WithSpecialTokensConfig):
        grammar = grammar.language
    if not isinstance(grammar, PCFGConfig):
        return "it takes two texts, or a random grammar (pcfg) that is partly changed: add --data"
    if not 0 <= level <= grammar.levels:
        named = "names no level" if level < 0 else f"is {level}"
        return (
            f"frontier_level {named}: give one of the grammar, 0 to {grammar.levels}, whose rules change "
            "(--frontier-level)"
        )
    if grammar.redrawn_level >= 0:
        return f"the grammar itself has level {grammar.redrawn_level} drawn anew, and a grammar has only one such level"
    return None


def _redrawn(grammar: Any, level: int) -> Any:
    """Return the config of a grammar, perhaps between [CLS] and [SEP], with the rules of one level drawn anew."""
    if isinstance(grammar, WithSpecialTokensConfig):
        return dataclasses.replace(grammar, language=_redrawn(grammar.language, level))
    return dataclasses.replace(grammar, redrawn_level=level)


@requires(_why_no_frontier)
@counting("learning rates")
def frontier(
    model: Any,
    batches: Any,
    *,
    frontier_with: Annotated[
        str,
        setting(),
        "frontier: the other text, half of it for training: a file, a folder or a dataset, as for --data.",
    ] = "",
    frontier_level: Annotated[
        int,
        setting(minimum=-1, omit_default=True),
        "frontier, of a model on a random grammar: the level whose rules the other grammar has drawn anew; -1: none, "
        "use --frontier-with.",
    ] = -1,
    frontier_gain: Annotated[
        float, setting(above=0), "frontier: the gain on the other text at which the forgetting is given, in nats."
    ] = 0.1,
    frontier_rates: Annotated[tuple[float, ...], setting(), "frontier: learning rates, in ascending order."] = _RATES,
    frontier_steps: Annotated[
        int, setting(minimum=1), "frontier: steps of AdamW, each on 8 sequences of the other text."
    ] = 32,
    seed: int = 0,
    context: Any,
    causal: bool | None = None,
    progress: Any = None,
) -> dict[str, Estimate]:
    """Forgetting at one gain in a short fine-tuning on another text or grammar; both at each learning rate."""
    # half is trained on, each sequence once if the text is long enough
    num_sequences = 2 * _FRONTIER_BATCH * frontier_steps
    if context.language is None:
        new = context.read_text(Path(frontier_with), num_sequences, seed)
    else:
        from isoloss.lab.evaluation.context import language_inputs

        changed = _redrawn(context.language.config, frontier_level).build()
        # from one stream, many tokens of old and new sentences would be the same
        stream = derive(seed, "frontier")
        new = language_inputs(changed, context.objective, num_sequences=num_sequences, seed=stream)
    found = flatness.forgetting_frontier(
        model,
        batches,
        new.cut(_FRONTIER_BATCH).batches,
        gain=frontier_gain,
        learning_rates=frontier_rates,
        num_steps=frontier_steps,
        causal=causal,
        progress=progress,
    )
    about = {"new": new.description, "new_sha256": digest_batches(new.batches)}
    return {name: dataclasses.replace(each, details={**each.details, **about}) for name, each in found.items()}


# --- curvature -------------------------------------------------------------------------------------------------------


def _why_no_update(measure: FunctionMeasure, context: MeasureContext) -> str | None:
    if context.checkpoint is None:
        return "only a run that is measured on its own language has an optimizer to continue with: leave out --language"
    run, step = context.checkpoint
    if step != (last := run.last_step()):
        return f"the optimizer's state is kept only at the last step, {last}, not at {step}: add --steps last"
    return None if step else "the run has made no step, so its optimizer has no state"


@requires(_why_no_update)
def directional_sharpness(
    model: Any, batches: Any, *, checkpoint: Any, language: Any, causal: bool | None = None
) -> Estimate:
    """Curvature of the loss along the next update of the run's optimizer, a unit vector u: u'Fu."""
    from isoloss.lab.evaluation.pretraining import next_update

    run, _ = checkpoint
    return flatness.directional_sharpness(model, next_update(run, language), batches, causal=causal)


def critical_sharpness(model: Any, batches: Any, *, causal: bool | None = None) -> Estimate:
    """2 / s for the smallest step s along the negative gradient at which the loss is back at its initial value."""
    return flatness.critical_sharpness(model, batches, causal=causal)


@counting("Lanczos steps")
def largest_eigenvalue(
    model: Any,
    batches: Any,
    *,
    curvature_matrix: Matrix = "gauss-newton",
    num_eigenvalues: Annotated[int, setting(minimum=1), "largest-eigenvalue: number of eigenvalues."] = 1,
    seed: int = 0,
    **options: Any,
) -> dict[str, Estimate]:
    """Largest eigenvalues of the Gauss-Newton matrix or the Hessian, by Lanczos' method."""
    wanted: dict[str, Any] = {"matrix": curvature_matrix, "num_eigenvalues": num_eigenvalues, "seed": seed}
    eigenvalues = flatness.largest_eigenvalues(model, batches, **wanted, **options)
    return {f"largest-eigenvalue{f'-{i}' * (i > 1)}": estimate for i, estimate in enumerate(eigenvalues, start=1)}


@counting("probes")
def spectral_density(
    model: Any,
    batches: Any,
    *,
    num_probes: NumProbes = None,
    curvature_matrix: Matrix = "gauss-newton",
    spectrum_steps: Annotated[
        int, setting(minimum=2), "spectral-density: steps of Lanczos' method for each probe."
    ] = 30,
    seed: int = 0,
    **options: Any,
) -> dict[str, Estimate]:
    """Distribution of the eigenvalues, and the trace and squared Frobenius norm that it gives."""
    wanted: dict[str, Any] = {"matrix": curvature_matrix, "num_steps": spectrum_steps, "seed": seed}
    result = flatness.spectral_density(model, batches, num_probes=num_probes, **wanted, **options)
    # the details of the first hold nodes and weights of each probe's quadrature
    quadrature = {"nodes": result.nodes.tolist(), "weights": result.weights.tolist()}
    first = result.moment(1)
    return {
        "trace": dataclasses.replace(first, details={**first.details, **quadrature}),
        "squared-frobenius-norm": result.moment(2),
    }


# --- gradients -------------------------------------------------------------------------------------------------------


def gradient_noise_scale(model: Any, batches: Any, *, causal: bool | None = None) -> Estimate:
    """Number of documents, or sequences, at which the gradient is as much noise as signal."""
    return flatness.gradient_noise_scale(model, batches, causal=causal)


@requires(_names_text("agreement_with"))
def gradient_agreement(
    model: Any,
    batches: Any,
    *,
    agreement_with: Annotated[
        str, setting(), "gradient-agreement: the other text, as for --data; no document may be in both."
    ] = "",
    num_sequences: int = SequenceMeasure.num_sequences,
    seed: int = 0,
    read_text: Any,
    causal: bool | None = None,
) -> Estimate:
    """Cosine of the angle between the gradients of two texts, without the bias of their noise."""
    others = read_text(Path(agreement_with), num_sequences, seed).batches
    return flatness.gradient_agreement(model, batches, others, causal=causal)
