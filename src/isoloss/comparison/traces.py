"""Several models on the same inputs with the same random signs: paired differences of their flatness and loss.

Shapes: m predicted positions, V vocabulary, N clusters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isoloss import files
from isoloss.checkpoints.loading import load_model
from isoloss.comparison.kept import Kept
from isoloss.comparison.verdict import TraceComparison, warn_unlike
from isoloss.errors import IsolossError, naming, require
from isoloss.flatness._batches import CheckedBatch, as_tensors
from isoloss.flatness._ghost.auxiliary import AuxiliarySample
from isoloss.flatness._ghost.engine import Predictions
from isoloss.flatness._measurement import (
    UNIT,
    BatchSums,
    InterruptedEstimate,
    Measurement,
    StopCriteria,
)
from isoloss.flatness._rescaling.symmetries import Granularity
from isoloss.flatness.fisher import ExactLabels
from isoloss.flatness.minimal_trace import MinimalTraceEstimator, minimal_trace
from isoloss.model_checks import is_causal, text_config, unwrapped
from isoloss.statistics.estimate import Estimate, samples_of
from isoloss.statistics.ratio import ClusteredRatioEstimator, Weighted
from isoloss.text.clusters import Blocks

Model = nn.Module | Callable[[], nn.Module]

_SMALLEST = 1e-18  # square root of a probability that is taken for exact
_MINIMAL = ("minimal-trace", "minimal-without-embeddings")


class Incomplete(BaseException):
    """A comparison that ended before all of its models were measured.

    Attributes:
        complete: The comparison of the models that were done; None where none was.
        name: The model that was being measured.
        partial: After Ctrl-C, its trace so far; None where there was no error bar yet.
    """

    def __init__(
        self, problem: str, *, complete: TraceComparison | None, name: str, partial: Estimate | None = None
    ) -> None:
        super().__init__(problem)
        self.complete, self.name, self.partial = complete, name, partial


class InterruptedComparison(Incomplete, KeyboardInterrupt):
    """Ctrl-C during a comparison that already has a result."""


class ComparisonError(Incomplete, IsolossError):
    """A model could not be measured after others were."""


@dataclass(frozen=True)
class Outline:
    """The properties that models must share for their losses and traces per token to be comparable."""

    name: str  # what the model is called
    causal: bool  # whether it predicts next tokens, not masked ones
    vocabulary: int | None  # how many ids it knows; None where its config does not say

    @classmethod
    def of(cls, name: str, model: nn.Module, causal: bool | None = None) -> Outline:
        """Return a model's outline; `causal` None: by its class."""
        vocabulary = getattr(text_config(model), "vocab_size", None)
        return cls(name, is_causal(model) if causal is None else causal, vocabulary)

    def check(self, other: Outline) -> None:
        """Refuse another model that cannot be compared with this one."""
        if self.causal != other.causal:
            next_tokens, masked = (self, other) if self.causal else (other, self)
            raise IsolossError(
                f"{next_tokens.name} predicts next tokens and {masked.name} predicts masked tokens, so they have no "
                "inputs in common: compare models of one kind"
            )
        if self.vocabulary != other.vocabulary:
            raise IsolossError(
                f"{self.name} has a vocabulary of {self.vocabulary} tokens and {other.name} of {other.vocabulary}, so "
                "a token is not the same thing to both: compare models of one tokenizer (if only padding was added, "
                "model.resize_token_embeddings removes it)"
            )


def compare_traces(
    models: Mapping[str, Model | str] | Sequence[str],
    batches: Iterable[Mapping[str, Any]],
    *,
    seed: int = 0,
    num_probes: int | None = None,
    num_sequences: int | None = None,
    rtol: float | None = None,
    seconds: float | None = None,
    causal: bool | None = None,
    auxiliary_sample: Iterable[Mapping[str, Any]] | None = None,
    one_estimator: bool = False,
    minimal: bool | None = None,
    granularity: Granularity = "tensor",
    extra_estimates: Callable[[nn.Module], Mapping[str, Estimate]] | None = None,
    kept: Kept | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> TraceComparison:
    """Compare the flatness of models, each measured on the same inputs with the same random probes.

    The trace can be changed by rescaling the weights, which changes no function; the minimal trace cannot. So both are
    measured, in one pass, and `TraceComparison.verdict` calls a model the flattest only if they agree.

    An input that is hard for one model, or a draw of probes that is too large, is much the same for a similar model, so
    the difference of two traces is known far better than either trace. The errors are errors of paired differences
    (`isoloss.statistics.comparison`), and so is the probability of being the flattest.

    Args:
        models: By name, language models, functions that load them, or checkpoints; or checkpoints alone. What is loaded
            here is dropped before the next one is. Sizes and families may differ, with a warning, as traces are sums
            over the parameters; vocabularies may not.
        batches: As for `isoloss.flatness.fisher_trace`. The values of the labels count for the loss.
        seed: Decides the probes.
        num_probes: Rademacher probes per position (default 1).
        num_sequences: Stop after this many sequences; None: at the end of the batches.
        rtol: Stop measuring the first model as soon as its standard error is at most this fraction of its trace; the
            others get as many sequences.
        seconds: Stop measuring the first model after this time; the others get as many sequences.
        causal: Whether position t predicts token t + 1; None: by the model's class, then its config.
        auxiliary_sample: As for `fisher_trace`. All models share what was chosen for the first one: its embeddings
            describe the sequences, and its error decides how much is used.
        one_estimator: Whether every estimate is the same linear function of the squared norms of the sequences'
            gradients: all models are given the first one's control variates, and no norm is taken position by position
            because of where its parameter stands. Two parameters whose squared norms have one ratio on every sequence
            then have estimates of that ratio: made for a model and the same in a larger one, without the warning that
            they differ. False: what has the smallest error for each model and parameter.
        minimal: Whether to measure the minimal traces too (`fisher_trace` with a `rescaling`); `rtol` is then about
            these. None: where the rescalings of all models are known, and the result's `no_minimal` says why not.
        granularity: Of the rescalings, as for `fisher_trace`.
        extra_estimates: Called with each model, while it is loaded, for more estimates of it.
        kept: Where the estimates of each model are kept once it is done, and read where it was before (the `output` of
            `isoloss.compare`).
        progress: Called with a model's name and the number of its sequences done.

    Raises:
        IsolossError: No models, two of one name, models that predict different things or have different vocabularies,
            a trace that is not above 0, or whatever `fisher_trace` refuses; the model is named.
        ComparisonError: One of these after the first model was measured; it carries what is complete.
        InterruptedComparison: Ctrl-C; it carries what is complete, and the trace of the model in work so far.

    Example:
        >>> import math
        >>> import torch
        >>> from isoloss import compare_traces
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> models = {}
        >>> for name, seed in (("a", 0), ("b", 1)):
        ...     _ = torch.manual_seed(seed)
        ...     models[name] = BertForMaskedLM(config).eval()
        >>> input_ids = torch.randint(0, 8, (64, 4))
        >>> labels = torch.tensor([3, -100, -100, -100]).expand(64, 4)
        >>> comparison = compare_traces(models, [{"input_ids": input_ids, "labels": labels}])
        >>> sum(comparison.probability_of_smallest("trace").values())
        1.0
        >>> a, b = (comparison.models[name]["trace"] for name in "ab")
        >>> difference = comparison.difference("trace", "a", "b")
        >>> round(difference.value - (a.value - b.value), 9), difference.stderr < math.hypot(a.stderr, b.stderr)
        (0.0, True)
        >>> print(str(comparison).splitlines()[0].split()[:5])
        ['model', 'parameters', 'loss', 'trace', 'without']
        >>> comparison.verdict().flattest
    """
    loaders = {
        name: functools.partial(_load, given) if isinstance(given, str | Path) else given
        for name, given in named_models(models).items()
    }
    if not isinstance(batches, Mapping):  # that one is refused by the measurement
        # the first model would use up a stream
        batches = list(as_tensors(batches))
    shared = _Shared(
        batches=batches,
        stopping=StopCriteria(num_sequences=num_sequences, rtol=rtol, seconds=seconds),
        seed=seed,
        num_probes=1 if num_probes is None else num_probes,
        causal=causal,
        auxiliary_sample=auxiliary_sample,
        one_estimator=one_estimator,
        minimal=minimal,
        granularity=granularity,
    )
    done: dict[str, dict[str, Estimate]] = {}
    weights, architectures, first = dict[str, str](), dict[str, str](), dict[str, str]()

    def so_far() -> TraceComparison | None:
        if not done:
            return None
        left_out = () if shared.has_minimal else _MINIMAL
        models = {model: {n: e for n, e in each.items() if n not in left_out} for model, each in done.items()}
        return TraceComparison(
            models=models,
            weights={model: weights[model] for model in done},
            architectures={model: architectures[model] for model in done},
            no_minimal=shared.no_minimal,
        )

    for name, given in loaders.items():
        try:
            # parameters that are loaded in a caller's inference mode would have no gradients
            with torch.inference_mode(False):
                model = given if isinstance(given, nn.Module) else given()
            weights[name] = files.tensors_sha256(model.named_parameters())
            architectures[name] = _architecture(model)
            function = {"weights": weights[name], "architecture": architectures[name], "others": _beside_weights(model)}
            # the first model decides what the traces of all of them have in common
            first = first or function
            identity = function | {f"first {what}": value for what, value in first.items()}
            known = None if kept is None else kept.read(name, identity)
            if known is not None and shared.restores(name, model, *known):
                estimates = known[0]
            else:
                before = shared.no_minimal
                estimates = shared.measure(name, model, None if progress is None else functools.partial(progress, name))
                if kept is not None:
                    # of a model before it, the reason may be gone the next time
                    kept.write(name, identity, estimates, "" if before else shared.no_minimal)
            if extra_estimates is not None:
                # these are the same behind any first model
                known = None if kept is None else kept.read(name, function)
                if known is None:
                    with naming(name):
                        known = dict(extra_estimates(model)), ""
                    if kept is not None:
                        kept.write(name, function, *known)
                estimates |= known[0]
        except KeyboardInterrupt as stop:
            partial = stop.partial if isinstance(stop, InterruptedEstimate) else None
            if not done and not isinstance(stop, InterruptedEstimate):
                raise
            problem = f"interrupted while {name} was measured"
            raise InterruptedComparison(problem, complete=so_far(), name=name, partial=partial) from stop
        except IsolossError as error:
            if not done:
                raise
            raise ComparisonError(str(error), complete=so_far(), name=name) from error
        done[name] = estimates
        del model  # so that two models are never held
    if not one_estimator:
        warn_unlike({name: estimates["trace"] for name, estimates in done.items()})
    compared = so_far()
    assert compared is not None
    return compared


@dataclass(kw_only=True)
class _Shared:
    """What all models of a comparison have in common, so that their differences are paired.

    The first model decides how many sequences there are, which control variates are used, and how many.
    """

    batches: Any
    stopping: StopCriteria
    seed: int
    num_probes: int
    causal: bool | None
    auxiliary_sample: Iterable[Mapping[str, Any]] | None
    one_estimator: bool
    minimal: bool | None
    granularity: Granularity
    no_minimal: str = ""  # why the minimal traces are left out, though they were asked for
    first: Outline | None = None
    sample: AuxiliarySample | None = None
    controls: torch.Tensor | None = None
    traces: dict[str, Estimate] = field(default_factory=dict)  # of the models so far

    @property
    def has_minimal(self) -> bool:
        return self.minimal is not False and not self.no_minimal

    def measure(self, name: str, model: nn.Module, progress: Callable[[int], None] | None) -> dict[str, Estimate]:
        """Return the estimates of a model by their names."""
        outline = self._enter(name, model)
        # 1. the minimal trace says by which blocks of parameters the squared norms are kept
        minimizing: MinimalTraceEstimator | None = None
        if self.has_minimal:
            with self._optional(), naming(name):
                sequences = self.stopping.num_sequences
                minimizing = minimal_trace(model, "minimal", self.granularity, None, self.batches, sequences)
        with naming(name):
            source = WithLoss(
                model,
                num_probes=self.num_probes,
                seed=self.seed,
                causal=outline.causal,
                parameter_blocks=None if minimizing is None else minimizing.parameter_blocks,
            )
            source.controls, source.separate = self.controls, not self.one_estimator
        # 2. one pass over the inputs
        measurement = Measurement(source, auxiliary_sample=self.sample)
        with naming(name):
            trace = _above_zero(measurement.measure(self.batches, self.stopping, progress=progress))
            _check_paired(trace, self.traces)
            result = measurement.result()
            # 3. the loss over the same blocks as the trace, so that influences of the two belong to the same samples
            loss = source.loss(measurement.blocks(), trace.num_predictions)
            estimates = {"trace": trace, "without-embeddings": _without_embeddings(trace, result.part), "loss": loss}
        if minimizing is not None:
            with self._optional(), naming(name):
                least = minimizing.finish(trace, measurement.columns())
                least = _above_zero(minimizing.checked(least, next(iter(self.batches))))
                rest = _without_embeddings(least, minimizing.without_embeddings)
                estimates |= {"minimal-trace": least, "minimal-without-embeddings": rest}
        if not self.traces and self.one_estimator:
            self.controls = torch.cat(source.own_controls)
        self._leave(name, trace)
        return estimates

    def restores(self, name: str, model: nn.Module, estimates: Mapping[str, Estimate], no_minimal: str) -> bool:
        """Go on as if the model had been measured now with these estimates; false where one of them is missing."""
        if self.has_minimal and not no_minimal and "minimal-trace" not in estimates:
            return False
        self._enter(name, model)
        _check_paired(estimates["trace"], self.traces)
        self.no_minimal = self.no_minimal or no_minimal
        self._leave(name, estimates["trace"])
        return True

    def _enter(self, name: str, model: nn.Module) -> Outline:
        outline = Outline.of(name, model, self.causal)
        self.first = self.first or outline
        self.first.check(outline)
        if self.auxiliary_sample is not None and self.sample is None:
            self.sample = AuxiliarySample.read(model, self.auxiliary_sample)
        return outline

    def _leave(self, name: str, trace: Estimate) -> None:
        if not self.traces:
            if self.sample is not None:
                # the others use as many of its controls: what these take from one model's noise they take from all,
                # and it cancels
                number = int(trace.details["auxiliary_bigrams"]) + trace.details["auxiliary_directions"]
                self.sample = dataclasses.replace(self.sample, number=number)
            if self.stopping.rtol is not None or self.stopping.seconds is not None:
                self.stopping = StopCriteria(num_sequences=trace.details["sequences"])
        self.traces[name] = trace

    @contextlib.contextmanager
    def _optional(self) -> Iterator[None]:
        """Leave the minimal traces out where one has none, unless they were asked for."""
        try:
            yield
        except IsolossError as error:
            if self.minimal:
                raise
            self.no_minimal = str(error)


def _above_zero(trace: Estimate) -> Estimate:
    if trace.value <= 0:
        # as of weights that are all 0, or of a model that is certain of every token
        helps = "take more inputs" if trace.value else "all gradients are 0"
        raise IsolossError(f"the trace is {trace.value:.3g}, which has no ratio to another: {helps}")
    return trace


def _check_paired(trace: Estimate, others: Mapping[str, Estimate]) -> None:
    """Refuse a trace whose error counts other samples as independent than the other models' do."""
    for name, other in others.items():
        if trace.samples != other.samples:
            raise IsolossError(
                f"its error is over {samples_of(trace)} and the error of {name} over {samples_of(other)}, because "
                "their configs have different tokens for the start or end of a text: give `documents` with the "
                "batches, or text"
            )


def _architecture(model: nn.Module) -> str:
    """Return the SHA-256 of what makes two models one architecture, over which traces are comparable.

    It is what torch prints of the layers, without dropout and the eps of norms, the shapes of the parameters, and the
    number of heads, which no layer prints.
    """
    plain: Any = unwrapped(model)
    # dropout is off and eps changes no size: a checkpoint that was saved with others is of the same architecture
    layers = re.sub(r"Dropout\([^)]*\)|eps=[^,)]*", "", repr(plain))
    shapes = [(name, tuple(parameter.shape)) for name, parameter in plain.named_parameters()]
    config = getattr(plain, "config", None)
    heads = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    return hashlib.sha256(repr((layers, shapes, heads)).encode()).hexdigest()


def _beside_weights(model: nn.Module) -> str:
    """Return the SHA-256 of what decides a model's predictions beside its parameters: its config and buffers."""
    config: Any = getattr(unwrapped(model), "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    settings = {key: value for key, value in settings.items() if key not in ("_name_or_path", "transformers_version")}
    return hashlib.sha256(f"{settings} {files.tensors_sha256(model.named_buffers())}".encode()).hexdigest()


def _without_embeddings(trace: Estimate, rest: Weighted) -> Estimate:
    """Return the part `rest` of a trace, which is not the embeddings', as an estimate."""
    return Estimate(
        value=rest.value,
        stderr=rest.stderr,
        samples=trace.samples,
        effective_samples=trace.effective_samples,
        unit=trace.unit,
        num_predictions=trace.num_predictions,
        num_probes=trace.num_probes,
        method=f"{trace.method}, without embeddings",
        influence=rest.influence.numpy(),
    )


class WithLoss(ExactLabels):
    """The exact expectation over labels, keeping the loss at the given labels of every sequence."""

    controls: torch.Tensor | None = None  # (N, C) control variates to use instead of the model's own

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.own_controls: list[torch.Tensor] = []  # (B, C) of each batch, whether they were used or not
        self._nats = torch.zeros(0)  # (B,) of the batch
        self._losses = ClusteredRatioEstimator(num_parameters=1, num_controls=0)

    def measure(self, batch: CheckedBatch) -> BatchSums:
        """Measure a batch, with the given control variates where there are any."""
        number = len(batch.clusters)
        self._nats = torch.zeros(number, dtype=torch.float64)  # of a batch that predicts nothing, too
        terms = super().measure(batch)
        self.own_controls.append(terms.controls)
        self._losses.add(self._nats[:, None], terms.positions, terms.controls[:, :0], batch.clusters)
        if self.controls is None:
            return terms
        return terms._replace(controls=self.controls[batch.first : batch.first + number])

    def loss(self, blocks: Blocks | None, num_predictions: int) -> Estimate:
        """Return the loss of the measured inputs, over the same clusters."""
        result = self._losses.result(None if blocks is None else blocks.labels)
        return Estimate(
            value=result.value,
            stderr=result.stderr,
            samples=result.samples,
            effective_samples=result.effective_samples,
            unit=UNIT,
            num_predictions=num_predictions,
            method="cross-entropy",
            influence=result.influence.numpy(),
        )

    def _root_probabilities(self, predictions: Predictions, probe: int) -> torch.Tensor:
        root_p = super()._root_probabilities(predictions, probe)
        # all probes have the same logits
        if probe == 0:
            self._nats.index_add_(0, predictions.rows.cpu(), _surprisal(root_p, predictions).cpu())
        return root_p


def _surprisal(root_p: torch.Tensor, predictions: Predictions) -> torch.Tensor:
    """Return (m,) float64: the cross-entropy of each position in nats, from the square roots of the probabilities."""
    given = root_p[torch.arange(len(root_p), device=root_p.device), predictions.targets].double()
    nats = -2 * given.log()
    # float32 holds a probability near 0 with few digits, or not at all
    if len(rows := (given < _SMALLEST).nonzero()[:, 0]):
        logits = predictions.logits.detach()[rows].to(root_p.dtype)
        nats[rows] = nn.functional.cross_entropy(logits, predictions.targets[rows], reduction="none").double()
    return nats


def named_models(models: Mapping[str, Model | str] | Sequence[str]) -> dict[str, Model | str]:
    """Return models by name, checkpoints by their own.

    Raises:
        IsolossError: There is none, one is no model, or a checkpoint is named twice.
    """
    if isinstance(models, str) or not models:
        raise IsolossError(f"models is {models!r}; it is a mapping of names to models, or several names of checkpoints")
    if isinstance(models, Mapping):
        for name, model in models.items():
            require("the name of a model", name, str, "a string")
            require(f"model {name}", model, (str, Path, nn.Module, Callable), "a model, or the name of a checkpoint")  # type: ignore[arg-type]
        return dict(models)
    for place, name in enumerate(models):
        require(f"model {place}", name, (str, Path), "the name of a checkpoint; in a mapping, models have names")
    if twice := next((name for i, name in enumerate(models) if name in models[:i]), None):
        raise IsolossError(f"{twice} is named twice; a model is compared with others")
    return {str(name): name for name in models}


def _load(name: str | Path) -> nn.Module:
    model: nn.Module = load_model(name).model
    return model
