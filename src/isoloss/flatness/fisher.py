"""Trace of the Fisher matrix of a language model's loss with an error bar: the paper's flatness (section 4, B.1).

Shapes: B sequences of a batch, T positions, m predicted positions, V vocabulary, K trainable parameter tensors.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Self, Unpack

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness._batches import CheckedBatch, as_tensors
from isoloss.flatness._curvature import predicted_logits
from isoloss.flatness._ghost import controls
from isoloss.flatness._ghost.auxiliary import AuxiliarySample
from isoloss.flatness._ghost.engine import GhostNorms, Predictions, intermediates_of, tail_cotangents
from isoloss.flatness._measurement import BatchSums, Estimator, MeasureOptions, measure
from isoloss.flatness._rescaling.symmetries import Granularity
from isoloss.flatness.minimal_trace import MinimalTraceEstimator, Rescaling, minimal_trace
from isoloss.model_checks import eager_with_grad
from isoloss.statistics.estimate import Estimate

_PAPER_LABELS = 50  # appendix B.1
# further probes of the tail: of fewer the mean is too noisy, and more are not needed
_FEWEST_TAIL_PROBES, _MOST_TAIL_PROBES = 4, 8
_TAIL_COST = 0.1  # all of them, of a forward pass


def fisher_trace(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    method: Literal["ghost", "paper"] = "ghost",
    num_probes: int | None = None,
    seed: int = 0,
    auxiliary_sample: AuxiliarySample | Iterable[Mapping[str, Any]] | None = None,
    distributed: bool = False,
    rescaling: Rescaling | None = None,
    granularity: Granularity = "tensor",
    **options: Unpack[MeasureOptions],
) -> Estimate:
    """Estimate the trace of the Fisher matrix of the mean loss per predicted token.

    The value is `E_x E_{y~f(x)} ||grad_theta log f(x)_y||^2` (paper, section 4), the mean over predicted positions x
    with the label y drawn from the model's own prediction f(x). It is the trace of the Gauss-Newton matrix of the
    cross-entropy at any parameters, and the trace of its Hessian where the prediction is the true conditional. The sum
    runs over all trainable parameters, tied ones once.

    `method="ghost"` takes the exact expectation over labels, by ghost norms: per-sequence gradient norms without
    gradients. With p = f(x), `S = diag(sqrt p) - p sqrt(p)^T` and a Rademacher probe v, V independent random signs, the
    cotangent u = S v has `E[u u^T] = diag(p) - p p^T`, so that `E||J^T u||^2 = Tr(J^T (diag(p) - p p^T) J)` is the sum
    over labels exactly. One backward pass, to activations only, serves a batch: the squared norm of each sequence's
    gradient follows from the inputs and output cotangents of the layers
    (`isoloss.flatness._ghost.engine`), and no gradient is formed. Several predicted positions of a
    sequence have independent v, so that their cross terms vanish on average. Control variates with known means take
    much of the probes' noise away, the noise of the cross terms included
    (`isoloss.flatness._ghost.controls.Controls`), with cross-fitted coefficients
    (`isoloss.statistics.ratio.ClusteredRatioEstimator`). Only first derivatives are taken, so every attention
    kernel does.

    The error is the error of a ratio over independent clusters, so it covers the data and the probes together. A
    cluster is a document, where batches have `documents`, else a sequence with its copies. Where these turn out to be
    consecutive pieces of longer texts, the error is over blocks of them, if it is the larger
    (`isoloss.text.clusters.SequenceClusters`); the details' `clusters` says what was counted.

    Some parameters of a transformer can be multiplied by a factor and others divided by it without changing the
    function, and the trace changes. `rescaling="minimal"` minimizes it over these exact rescalings (see
    `isoloss.flatness.rescalings_of`): with t_p the contribution of part p and E the integer exponents,
    `min_z sum_p t_p exp(-2 (E z)_p)`. The value is the mean of the in-sample minimum, too small on average, and a
    cross-fitted one, too large. The details have both, the plain `trace`, the minimum over the rescalings that keep
    the model's features, and the log-factors.

    The probes of a sequence depend on `seed` and on its index in the stream of sequences alone, not on how the stream
    is cut into batches.

    Args:
        model: A Hugging Face language model, or a module whose output has `logits` (B, T, V). It is left as found. One
            that is sharded by `fully_shard` takes the same batches in each process, and `method="ghost"`.
        batches: Mappings of `labels` (B, T), -100 where nothing is predicted, and the model's inputs, B rows each, as
            tensors, arrays or lists; optionally `documents` (B,), the id of the text that each sequence is from: pass
            it where several sequences come from one text, or the error may be too small. The values of the other
            labels are not used. A causal model's labels are unshifted: label t + 1 is predicted at position t.
        method: `"ghost"`, or `"paper"`: the reference implementation of appendix B.1, which samples labels at each
            predicted position and averages the squared norms of their gradients, one backward pass per label.
        num_probes: Rademacher probes per position, sharing one forward pass (default 1), or labels per position for
            `"paper"` (default 50).
        seed: Decides the probes or labels.
        auxiliary_sample: Many more sequences from the same distribution, to make the error smaller: batches of
            `input_ids` and, where the measured batches have them, `labels`, `attention_mask` and `documents`. The
            measured sequences may be among them. Only their tokens are read; for the part that tokens explain, the
            error is then as small as over the auxiliary sample (`isoloss.flatness._ghost.auxiliary.AuxiliarySample`).
            Give at least twice as many sequences as are measured; each control takes 16 measured clusters. The details'
            `auxiliary_bigrams` and `auxiliary_directions` say what was used: nothing where the error is smaller
            without. None: there is none.
        distributed: Whether each process of the torch.distributed group measures batches of its own, with probes of its
            own; every process gets the estimate over all of them.
        rescaling: `"minimal"`: the minimum over exact rescalings; None: the trace at the given weights.
        granularity: What has a factor of its own in a rescaling: `"tensor"`, `"head"`, `"channel"` or `"neuron"`, see
            `isoloss.flatness.rescalings_of`. Each of the K parts takes 8 bytes for each cluster and about
            4,000 more; `rescalings_of(...).exponents.shape[0]` is K.
        options: See `MeasureOptions`.

    Returns:
        The estimate in nats per predicted token, `by_parameter` adding up to `value`, with `samples` the number of
        clusters, `num_predictions` the number of predicted positions and the `influence` of each cluster. Among the
        details are the names of the `embeddings` and, with its error, the trace `without_embeddings`.

    Raises:
        IsolossError: Dropout is on, no parameter is trainable, one that is given is not the model's, no prediction
            depends on a measured parameter, there are no batches or none predicts anything, a batch does not fit the
            model, a logit or gradient is not finite, fewer than two clusters predict something, the auxiliary sample
            cannot be read, or `distributed` is set without a process group or with
            `rtol` or `seconds`.
        InterruptedEstimate: Ctrl-C after at least two clusters; it carries the estimate so far.

    Example:
        >>> import torch
        >>> from isoloss import fisher_trace
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> _ = torch.manual_seed(0)
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> model = BertForMaskedLM(config).eval()
        >>> input_ids = torch.randint(0, 8, (64, 4))
        >>> labels = torch.tensor([3, -100, -100, -100]).expand(64, 4)
        >>> batches = [{"input_ids": input_ids, "labels": labels}]
        >>> trace = fisher_trace(model, batches)
        >>> trace.num_predictions, trace.samples, trace.value > 0, trace.stderr < 0.1 * trace.value
        (64, 64, True, True)
        >>> more = [{"input_ids": torch.randint(0, 8, (640, 4))}]
        >>> trace = fisher_trace(model, batches, auxiliary_sample=more)
        >>> trace.details["auxiliary_sequences"]
        640
    """
    if method not in _METHODS:
        raise IsolossError(f"method is {method!r}; it is one of {', '.join(_METHODS)}")
    kind, default = _METHODS[method]
    if auxiliary_sample is not None and not isinstance(auxiliary_sample, AuxiliarySample):
        auxiliary_sample = AuxiliarySample.read(model, auxiliary_sample)
    given: dict[str, Any] = {
        "num_probes": default if num_probes is None else num_probes,
        "seed": seed,
        "distributed": distributed,
        "auxiliary_sample": auxiliary_sample,
    }
    if rescaling is None:
        return measure(kind, model, batches, options, **given)
    # the parts are sums over blocks of parameters, by which the measurement splits each norm; what minimizes over them
    # is the `finish` of the estimate
    minimal = minimal_trace(
        model, rescaling, granularity, options.get("parameters"), batches, options.get("num_sequences")
    )
    return minimized(minimal, kind, model, batches, options, **given)


def minimized(
    minimal: MinimalTraceEstimator,
    kind: Callable[..., Estimator],
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    options: MeasureOptions,
    **given: Any,
) -> Estimate:
    """Return the minimal trace by its estimator, from a measurement by an estimator of this kind."""
    # the check of the rescaling runs on the first batch, and a stream may give it only once
    first: list[Mapping[str, Any]] = []

    def noted() -> Iterator[Mapping[str, Any]]:
        for batch in as_tensors(batches):
            first.extend([] if first else [batch])
            yield batch

    stream = batches if isinstance(batches, Mapping) else noted()  # a single batch is refused
    estimate = measure(
        kind, model, stream, options, parameter_blocks=minimal.parameter_blocks, finish=minimal.finish, **given
    )
    return minimal.checked(estimate, first[0])


def empirical_fisher_trace(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    seed: int = 0,
    distributed: bool = False,
    **options: Unpack[MeasureOptions],
) -> Estimate:
    """Estimate the trace of the empirical Fisher: the mean of `||grad_theta log f(x)_y||^2` at the given labels y.

    It is another quantity than the Fisher's trace, where labels are drawn from the model (Kunstner et al. 2019,
    "Limitations of the empirical Fisher approximation"): the two agree on average where the model's predictions are
    the true conditionals.

    Where a sequence has one predicted position the value is exact for these inputs. Where it has several, each one's
    gradient gets a random sign, so that cross terms vanish on average.

    Args:
        model: As for `fisher_trace`.
        batches: As for `fisher_trace`; the labels' values count.
        seed: Decides the signs.
        distributed: As for `fisher_trace`.
        options: See `MeasureOptions`.

    Raises:
        IsolossError: As for `fisher_trace`.
        InterruptedEstimate: As for `fisher_trace`.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import empirical_fisher_trace
        >>> model, batches = tiny_bert()
        >>> trace = empirical_fisher_trace(model, batches)
        >>> trace.value > 0, trace.details["parameters_by_autograd"]
        (True, [])
    """
    return measure(GivenLabels, model, batches, options, num_probes=1, seed=seed, distributed=distributed)


class PerSequence(Estimator):
    """Squared norms from one backward pass to activations, for cotangents that a subclass puts on the logits."""

    takes_shards = True

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._predictor = GhostNorms(
            model, causal=self.causal, parameters=self.parameters, parameter_blocks=self.parameter_blocks
        )

    def __enter__(self) -> Self:
        self._predictor.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._predictor.__exit__(*error)

    def measure(self, batch: CheckedBatch) -> BatchSums:
        """Measure a batch; the mean over probes."""
        number = len(batch.clusters)
        square_norms = torch.zeros(number, len(self.columns), dtype=torch.float64)
        controls = torch.zeros(number, self.num_controls, dtype=torch.float64)
        # with rows all the same: clusters are numbered over all sequences
        if not batch.checked.predicts:
            return BatchSums(square_norms, torch.zeros(number, dtype=torch.int64), controls)
        predictions = self._predictor.forward(batch.checked)
        positions = torch.bincount(predictions.rows, minlength=number)
        for probe in self.probes():
            last = probe == self.num_probes - 1
            norms, centered = self._probe(predictions, positions, batch.first, probe, keep=not last)
            square_norms += norms / self.num_probes
            if centered is not None:
                controls += centered.cpu() / self.num_probes
        return BatchSums(square_norms, positions.cpu(), controls)

    def details(self) -> dict[str, Any]:
        """Return the details, with how the gradients were taken."""
        return {
            "positions_selected": str(self._predictor.selection),
            "parameters_without_gradient": list(self._predictor.unreached),
            "parameters_by_autograd": list(self._predictor.slow_parameters),
        }

    @abc.abstractmethod
    def _probe(
        self, predictions: Predictions, positions: torch.Tensor, first: int, probe: int, *, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (B, K) squared norms of one probe and, where there are any, (B, C) controls.

        Unless `keep`, it is the last one on these predictions.
        """


class ExactLabels(PerSequence):
    """The exact expectation over labels: cotangents S v, with control variates.

    Attributes:
        separate: Whether positions are squared one by one where that has less noise (`GhostNorms.squared_norms`).
    """

    method = "Fisher, exact expectation over labels"
    separate = True
    num_controls = controls.NUM_CONTROLS

    def details(self) -> dict[str, Any]:
        """Return the details, with the number of further probes of the last layer."""
        return {**super().details(), "tail_probes": self.choices.get("tail_probes", 0)}

    def _probe(
        self, predictions: Predictions, positions: torch.Tensor, first: int, probe: int, *, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cotangent, variates = self._root_probabilities(predictions, probe), None
        if predictions.hidden is not None and predictions.decoder is not None:
            variates = controls.Controls(
                cotangent, predictions.hidden, predictions.decoder, predictions.rows, len(positions)
            )
        # before the whole backward pass, which frees the graph as it goes
        others = [] if variates is None else self._tail(predictions, cotangent, variates, positions, first, probe)
        indices = range(first, first + len(positions))
        controls.exact_labels_(cotangent, positions, indices, seed=self.seed, probe=probe)
        norms = self._predictor.squared_norms(
            predictions, cotangent.to(predictions.logits.dtype), separate=self.separate, keep=keep
        )
        if variates is None or norms.hidden_cotangent is None:
            return norms.by_column, None
        return norms.by_column, variates.centered(
            cotangent, norms.hidden_cotangent, norms.intermediate_cotangents, others
        )

    def _root_probabilities(self, predictions: Predictions, probe: int) -> torch.Tensor:
        """Return (m, V) the square roots of the probabilities, for one probe."""
        return controls.root_probabilities(predictions.logits)

    def _tail(
        self,
        predictions: Predictions,
        root_p: torch.Tensor,
        variates: controls.Controls,
        positions: torch.Tensor,
        first: int,
        probe: int,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the first intermediate's cotangent (m, d) and `squares` (B, 3), for each affordable further probe."""
        # chosen on the first batch: a check of later sequences may find another fraction
        number = self.choices.setdefault("tail_probes", _tail_probes(self._predictor.tail_fraction))
        intermediates = intermediates_of(predictions)
        if not number or not intermediates:
            return []
        logits, indices = predictions.logits, range(first, first + len(positions))
        streams = controls.streams_of(positions, logits.shape[1], indices, "tail", probe)
        results = []
        for octets in controls.packed_probes(streams, logits.device, self.seed, copies=number):
            cotangent = controls.with_probe_(root_p.clone(), positions, octets)
            hidden, intermediate = tail_cotangents(predictions, intermediates[0], cotangent)
            results.append((intermediate, variates.squares(cotangent, hidden)))
        return results


class GivenLabels(PerSequence):
    """The given labels: cotangents p - onehot(y), each with a random sign."""

    method = "empirical Fisher, given labels"

    def _probe(
        self, predictions: Predictions, positions: torch.Tensor, first: int, probe: int, *, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cotangent = controls.root_probabilities(predictions.logits)
        indices = range(first, first + len(positions))
        controls.given_labels_(cotangent, predictions.targets, positions, indices, seed=self.seed)
        return self._predictor.squared_norms(
            predictions, cotangent.to(predictions.logits.dtype), separate=True, keep=keep
        ).by_column, None


class SampledLabels(Estimator):
    """The paper's estimator as appendix B.1 states it: the slow reference implementation.

    The squared norms of grad log f(x)_y, averaged over labels y that are drawn from f(x): each sequence has a forward
    pass of its own, and each label of each predicted position a backward pass.
    """

    method = "Fisher, sampled labels"

    def measure(self, batch: CheckedBatch) -> BatchSums:
        """Measure a batch, a sequence at a time."""
        predicted = batch.checked.predicted
        norms = torch.zeros(len(predicted), len(self.columns), dtype=torch.float64)
        for row in predicted.any(dim=1).nonzero()[:, 0].tolist():
            # by the sequence's index, as the probes are
            generator = seeds.generator(self.seed, "labels", batch.first + row)
            with eager_with_grad(self.model):
                logits = predicted_logits(self.model, batch.checked.rows(torch.tensor([row])))
                log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
                for position in log_p:
                    p = position.detach().cpu().double().exp()
                    drawn = torch.multinomial(p, self.num_probes, replacement=True, generator=generator).tolist()
                    for label in map(drawn.__getitem__, self.probes()):
                        for name, gradient in self.gradients(position[label]):
                            # squares leave the range of float16
                            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
                            sums = self.columns.sums(name, wide.square()).cpu().double()
                            norms[row, self.columns.of[name]] += sums / self.num_probes
        return BatchSums(norms, predicted.sum(dim=1).cpu(), torch.zeros(len(norms), 0))


_METHODS: dict[str, tuple[type[ExactLabels | SampledLabels], int]] = {  # and the default number of probes
    "ghost": (ExactLabels, 1),
    "paper": (SampledLabels, _PAPER_LABELS),
}


def _tail_probes(fraction: float) -> int:
    """Return how many backward passes of a tail, this fraction of a whole one, are worth their time."""
    affordable = int(_TAIL_COST / fraction) if fraction else 0
    return min(affordable, _MOST_TAIL_PROBES) if affordable >= _FEWEST_TAIL_PROBES else 0
