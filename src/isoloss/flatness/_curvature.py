"""The mean loss over given batches, its gradient, and products of its Hessian and Gauss-Newton matrix with vectors.

Shapes: m predicted positions of a batch, V vocabulary, P trainable parameters counted one by one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from isoloss.errors import NOTHING_PREDICTED, IsolossError
from isoloss.flatness._batches import Batch, CheckedBatch, read_batches
from isoloss.flatness._ghost.capture import Capture, PositionSelection
from isoloss.flatness._ghost.engine import Predictions, agree, all_logits, plain_logits, predict
from isoloss.flatness._measurement import MeasureOptions, model_details
from isoloss.flatness._parameters import check_reached, counted_parameters, requiring_gradients
from isoloss.model_checks import (
    architecture,
    device_of,
    eager_with_grad,
    forward_arguments,
    is_causal,
    logits_of_output,
    refuse_dropout,
)
from isoloss.text.clusters import SequenceClusters

# what torch says where a function has a first derivative only
_ONCE_ONLY = ("is not implemented", "differentiate twice")
_PART = 1 << 20  # numbers that are in float64 at a time
_ROWS = 64  # positions whose logits stay in a CPU's cache while their losses are computed


# not a `Capture`, which follows every function of a pass and would take a third of a small model's time
class _SelectedAtDecoder(TorchFunctionMode):
    """Gives the linear map with the weight `decoder` the predicted positions (1, m, d) instead of all (B, T, d)."""

    def __init__(self, decoder: torch.Tensor | None, predicted: torch.Tensor) -> None:
        super().__init__()
        self._decoder, self._predicted = decoder, predicted

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and len(args) > 1 and args[1] is self._decoder:
            args = (args[0][self._predicted][None], *args[1:])
        return func(*args, **(kwargs or {}))


class MeanLoss:
    """The mean cross-entropy per predicted token over given batches, as a function of the P trainable parameters.

    Vectors are flat: the parameters in the order of `parameters`, each in its own order of elements. Every product
    runs over all batches again. The model is not changed.

    With J the derivative of the logits at a position, the Hessian of the loss there is
    J^T (diag p - p p^T) J + sum_c (p - y)_c H(f_c); the first term is the Gauss-Newton matrix, which is the Fisher's.
    The Hessian's products take two backward passes (Pearlmutter 1994). Those of the Gauss-Newton matrix take three:
    J v is the derivative of v^T J^T u by u, the rest is one more.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Mapping[str, Any]] | Sequence[CheckedBatch],
        *,
        causal: bool | None = None,
        parameters: Mapping[str, nn.Parameter] | None = None,
        num_sequences: int | None = None,
    ) -> None:
        refuse_dropout(model)
        self.model = model
        self.parameters = counted_parameters(model, parameters)
        self.causal = is_causal(model) if causal is None else causal
        clusters = SequenceClusters(getattr(architecture(model), "config", None))
        if isinstance(batches, Sequence) and batches and isinstance(batches[0], CheckedBatch):
            self.batches = list(cast("Sequence[CheckedBatch]", batches))
        else:
            given = cast("Iterable[Mapping[str, Any]]", batches)
            self.batches = list(
                read_batches(given, model=model, causal=self.causal, num_sequences=num_sequences, clusters=clusters)
            )
        if not self.batches:
            raise IsolossError("there are no batches to measure on")
        self._batches = [batch.checked for batch in self.batches if batch.checked.predicts]
        if not self._batches:
            raise IsolossError(NOTHING_PREDICTED)
        numbers, self.clusters_name = torch.cat([batch.clusters for batch in self.batches]), clusters.name
        self.parts = numbers  # (n,) as `clusters`; where these are blocks, the number of each sequence's part of one
        self.blocks: torch.Tensor | None = None  # (parts,) the block of each
        if (blocks := clusters.blocks()) is not None:
            self.blocks = blocks.labels
            numbers, self.clusters_name = blocks.labels[numbers], blocks.name
        self.clusters = numbers  # (n,) the number of each sequence's cluster
        self._clusters = torch.split(numbers, [len(batch.clusters) for batch in self.batches])
        self.num_sequences = sum(len(batch.clusters) for batch in self.batches)
        self.skipped_batches = len(self.batches) - len(self._batches)
        self.num_positions = sum(len(batch.targets) for batch in self._batches)
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters.values())
        self._decoder: torch.Tensor | None = None  # the weight of the last linear map, once it is known
        self._selects_at_decoder = True  # whether it may be given the predicted positions alone
        self.dtype = torch.float32
        for parameter in self.parameters.values():
            self.dtype = torch.promote_types(self.dtype, parameter.dtype)

    @classmethod
    def of(cls, model: nn.Module, batches: Iterable[Mapping[str, Any]], options: MeasureOptions) -> Self:
        """Return the loss that a measure with these options is of."""
        chosen = {name: options.get(name) for name in ("causal", "parameters", "num_sequences")}
        return cls(model, batches, **chosen)  # type: ignore[arg-type]

    def details(self, seed: int) -> dict[str, Any]:
        return {
            **model_details(self.model, self._leaves, causal=self.causal),
            "sequences": self.num_sequences,
            "skipped_batches": self.skipped_batches,
            "seed": seed,
        }

    def positions(self, *, numbers: torch.Tensor | None = None) -> torch.Tensor:
        """Return (N,) float64: the predicted positions of each cluster; refuse a single one, which has no error.

        `numbers` (n,) has the cluster of each sequence, such as `parts`; None: `clusters`.
        """
        positions = self._by_cluster(lambda batch: torch.ones(len(batch.targets), dtype=torch.float64), None, numbers)
        if len(positions) < 2:
            raise IsolossError("an error bar needs at least 2 independent sequences or documents")
        return positions

    def by_cluster(self, chosen: torch.Tensor | None = None, *, numbers: torch.Tensor | None = None) -> torch.Tensor:
        """Return (N,) float64: the losses summed over the predicted positions of each cluster.

        Args:
            chosen: (n,) bool, the sequences that count; the model must have run on all before. None: all.
            numbers: As for `positions`.
        """
        with torch.no_grad():
            return self._by_cluster(lambda batch: self._losses(batch, chosen is None).double().cpu(), chosen, numbers)

    def _losses(self, batch: Batch, is_checked: bool) -> torch.Tensor:
        """Return (m,): the cross-entropy of each predicted position."""
        if not is_checked:
            return _plain_losses(self.model, batch, self._decoder if self._selects_at_decoder else None)
        predictions = _predicted(self.model, batch)
        losses = _cross_entropy(predictions.logits, batch.targets)
        self._decoder = predictions.capture.last_weight
        head = batch.head(2)  # of one sequence, positions may be taken for sequences
        try:
            selected = _plain_losses(self.model, head, self._decoder)
        except Exception:  # what needs all positions may fail in any way
            self._selects_at_decoder = False
        else:
            self._selects_at_decoder &= predictions.decoder is not None and agree(selected, losses[: len(selected)])
        return losses

    def _by_cluster(
        self,
        values: Callable[[Batch], torch.Tensor],
        chosen: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return (N,) float64: the sums over each cluster of (m,) values of each batch."""
        numbers = self.clusters if numbers is None else numbers
        sums = torch.zeros(int(numbers.max()) + 1, dtype=torch.float64)
        sizes = [len(batch.clusters) for batch in self.batches]
        parts: Iterable[torch.Tensor | None] = itertools.repeat(None) if chosen is None else torch.split(chosen, sizes)
        for given, clusters, part in zip(self.batches, torch.split(numbers, sizes), parts, strict=False):
            batch = given.checked
            if part is not None:
                rows = part.nonzero()[:, 0]
                batch, clusters = batch.rows(rows), clusters[rows]
            if batch.predicts:
                sums.index_add_(0, clusters[batch.predicted.nonzero()[:, 0].cpu()], values(batch))
        return sums

    def value(self) -> float:
        with torch.no_grad():
            return sum(float(_total_loss(self.model, batch)) for batch in self._batches) / self.num_positions

    def gradient(self) -> torch.Tensor:
        return self._mean(lambda batch: self._gradients(_total_loss(self.model, batch)), "the gradient of the loss")

    def gradients_by_cluster(self) -> Iterator[torch.Tensor]:
        """Yield (P,): the gradient of the loss summed over each cluster, in the order of `positions`."""

        def of_batch(batch: Batch) -> Sequence[torch.Tensor]:  # without checks, which take half of a small model's time
            logits = plain_logits(self.model, batch, graph=True)
            return self._gradients(_cross_entropy(logits, batch.targets).sum(dtype=torch.float64))

        for number in range(int(self.clusters.max()) + 1):
            rows = ((clusters == number).nonzero()[:, 0] for clusters in self._clusters)
            parts = [batch.checked.rows(own) for batch, own in zip(self.batches, rows, strict=True) if len(own)]
            yield self._sum([part for part in parts if part.predicts], of_batch, "the gradient of the loss")

    @contextmanager
    def training(self) -> Iterator[Callable[[Batch], tuple[float, Sequence[torch.Tensor]]]]:
        """Yield what gives the mean loss of a batch and its gradient by each parameter, while weights may change.

        Without the checks of `value`, by which the model must have run on the batch before.
        """
        arguments: dict[int, dict[str, Any]] = {}
        with eager_with_grad(self.model) as plain, requiring_gradients(self.parameters):

            def of_batch(batch: Batch) -> tuple[float, Sequence[torch.Tensor]]:
                if id(batch) not in arguments:
                    arguments[id(batch)] = forward_arguments(plain, batch.inputs)
                logits = logits_of_output(plain(**arguments[id(batch)]))[batch.predicted]
                loss = _cross_entropy(logits, batch.targets).mean()
                gradients = torch.autograd.grad(loss, self._leaves, allow_unused=True, materialize_grads=True)
                return float(loss.detach()), gradients

            yield of_batch

    def hessian_product(self, vector: torch.Tensor) -> torch.Tensor:
        """Return (P,): the Hessian times a vector (P,)."""
        directions = self.split(vector)

        def of_batch(batch: Batch) -> Sequence[torch.Tensor]:
            gradients = torch.autograd.grad(
                _total_loss(self.model, batch), self._leaves, create_graph=True, allow_unused=True
            )
            unused = [gradient is None for gradient in gradients]
            check_reached(self.model, self.parameters, itertools.compress(self.parameters, unused))
            return hessian_vector_product(gradients, self._leaves, directions)

        with second_derivatives():
            return self._mean(of_batch, "the Hessian's product")

    def gauss_newton_product(self, vector: torch.Tensor) -> torch.Tensor:
        """Return (P,): the Gauss-Newton matrix times a vector (P,); errors as for `hessian_product`."""
        directions = self.split(vector)

        def of_batch(batch: Batch) -> Sequence[torch.Tensor]:
            logits = predicted_logits(self.model, batch)
            derivative = derivative_along(logits, self._leaves, directions)
            p = logits.detach().to(derivative.dtype).softmax(dim=-1)
            # (diag p - p p^T) J v: the Hessian of the cross-entropy by the logits, times their derivative along v
            cotangent = p * (derivative - (p * derivative).sum(dim=-1, keepdim=True))
            return torch.autograd.grad(
                logits, self._leaves, cotangent.to(logits.dtype), allow_unused=True, materialize_grads=True
            )

        with second_derivatives():
            return self._mean(of_batch, "the Gauss-Newton matrix's product")

    def quadratic_forms(self, vector: torch.Tensor, *, hessian: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each cluster's part of v^T A v of a vector v (P,), times the number of positions.

        Returns:
            (N,) float64 the sums over a cluster's predicted positions of their own v^T A v, and (N,) their number: the
            ratio of the sums of both is v^T A v.
        """
        directions, positions = self.split(vector), self.positions()
        if not hessian:
            of_batch = functools.partial(prediction_variances, self.model, self.parameters, directions)
            return self._by_cluster(of_batch), positions
        sums = torch.zeros_like(positions)
        for batch, clusters in zip(self.batches, self._clusters, strict=True):
            # a sequence at a time: each needs a v^T H v of its own, and unlike the Gauss-Newton form it is no function
            # of J v
            for row in batch.checked.predicted.any(dim=1).nonzero()[:, 0].tolist():
                with second_derivatives(), eager_with_grad(self.model), requiring_gradients(self.parameters):
                    loss = _total_loss(self.model, batch.checked.rows(torch.tensor([row])))
                    gradients = torch.autograd.grad(loss, self._leaves, create_graph=True, allow_unused=True)
                    products = hessian_vector_product(gradients, self._leaves, directions)
                pairs = zip(directions, products, strict=True)
                sums[clusters[row]] += sum(float((v.double() * h.double()).sum()) for v, h in pairs)
        return sums, positions

    def split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return a vector (P,) as tensors of the parameters' shapes and dtypes."""
        if vector.shape != (self.num_parameters,):
            raise IsolossError(f"a vector of shape {tuple(vector.shape)} does not fit {self.num_parameters} parameters")
        parts = torch.split(vector, [parameter.numel() for parameter in self._leaves])
        return [part.view(leaf.shape).to(leaf) for part, leaf in zip(parts, self._leaves, strict=True)]

    @property
    def _leaves(self) -> list[nn.Parameter]:
        return list(self.parameters.values())

    def _gradients(self, loss: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.autograd.grad(loss, self._leaves, allow_unused=True, materialize_grads=True)

    def _mean(self, of_batch: Callable[[Batch], Sequence[torch.Tensor]], what: str) -> torch.Tensor:
        return self._sum(self._batches, of_batch, what) / self.num_positions

    def _sum(
        self, batches: Iterable[Batch], of_batch: Callable[[Batch], Sequence[torch.Tensor]], what: str
    ) -> torch.Tensor:
        with eager_with_grad(self.model), requiring_gradients(self.parameters):
            # at least float32: a sum over many batches in half precision would lose the last ones
            total = torch.zeros(self.num_parameters, dtype=self.dtype, device=device_of(self.model))
            for batch in batches:
                total += torch.cat([part.reshape(-1).to(self.dtype) for part in of_batch(batch)])
        if not bool(total.isfinite().all()):
            raise IsolossError(f"{what} is not finite; use a wider dtype")
        return total


def inner(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the inner product of two vectors (P,), summed in float64."""
    parts = zip(torch.split(first, _PART), torch.split(second, _PART), strict=True)
    return sum(float(a.double() @ b.double()) for a, b in parts)


def predicted_logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return (m, V): the logits at the predicted positions, with their graph."""
    return _predicted(model, batch).logits


def _predicted(model: nn.Module, batch: Batch) -> Predictions:
    predictions = predict(model, batch, Capture({}, batch.predicted), PositionSelection())
    assert predictions is not None  # only an early selection can fail
    return predictions


def hessian_vector_product(
    gradients: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor], directions: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the derivative of gradients by the leaves, times directions of their shapes; the graph is kept."""
    reached, along = _that_need_gradients(gradients, directions)
    if not reached:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(
        torch.autograd.grad(reached, leaves, along, retain_graph=True, allow_unused=True, materialize_grads=True)
    )


def derivative_along(
    logits: torch.Tensor, leaves: Sequence[torch.Tensor], directions: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the derivative of the logits along directions of the leaves' shapes; float32 or wider.

    J^T u is linear in u, and its derivative by u along v is J v. The logits' graph is kept.
    """
    # two backward passes instead of forward-mode differentiation, which attention kernels and many models lack
    cotangent = torch.zeros_like(logits, requires_grad=True)
    pulled = torch.autograd.grad(logits, leaves, cotangent, create_graph=True, allow_unused=True)
    reached, along = _that_need_gradients(pulled, directions)
    if not reached:
        raise IsolossError("no trainable parameter of the model reaches its logits")
    (derivative,) = torch.autograd.grad(reached, cotangent, along, retain_graph=True)
    return derivative.to(torch.promote_types(derivative.dtype, torch.float32))


def prediction_variances(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], directions: Sequence[torch.Tensor], batch: Batch
) -> torch.Tensor:
    """Return (m,) float64 on the CPU: the variance under each prediction of the logits' derivative along directions.

    That is v^T J^T (diag p - p p^T) J v, the quadratic form of each position's Gauss-Newton matrix.
    """
    with second_derivatives(), eager_with_grad(model), requiring_gradients(parameters):
        logits = predicted_logits(model, batch)
        derivative = derivative_along(logits, list(parameters.values()), directions).double()
    p = logits.detach().double().softmax(dim=-1)
    # about the mean first: E[d^2] - E[d]^2 would cancel where the model is sure
    centered = derivative - (p * derivative).sum(dim=-1, keepdim=True)
    return (p * centered.square()).sum(dim=-1).cpu()


@contextmanager
def second_derivatives() -> Iterator[None]:
    """Let attention take its plain kernel, and say so clearly where a part has no second derivative."""
    try:
        # the fused kernels have first derivatives only
        with sdpa_kernel(SDPBackend.MATH):
            yield
    except RuntimeError as error:
        if any(hint in str(error) for hint in _ONCE_ONLY):
            raise IsolossError(
                f'a part of the model has no second derivative: load it with attention="eager" (torch: {error})'
            ) from error
        raise


def losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return (m,): the cross-entropy of each predicted position."""
    return _cross_entropy(predicted_logits(model, batch), batch.targets)


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, reduction="none")


def _plain_losses(model: nn.Module, batch: Batch, decoder: torch.Tensor | None) -> torch.Tensor:
    """Return what `losses` returns, without its checks, of a model that is run as it is.

    The linear map with the weight `decoder`, whose output the logits have to be, gets the predicted positions alone.
    """
    with _SelectedAtDecoder(decoder, batch.predicted):
        logits = all_logits(model, batch)
    selected = logits[batch.predicted] if logits.shape[:2] == batch.predicted.shape else logits[0]
    # on a CPU, few at a time: a copy of all predicted logits would take as long as the model's output layer
    rows = _ROWS if logits.device.type == "cpu" else max(1, len(selected))
    parts = zip(torch.split(selected, rows), torch.split(batch.targets, rows), strict=True)
    return torch.cat([_cross_entropy(part, targets) for part, targets in parts])


# summed in float64: sharpness is a small difference of two such sums
def _total_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return losses(model, batch).sum(dtype=torch.float64)


def _that_need_gradients(
    values: Sequence[torch.Tensor | None], directions: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the values that can be differentiated, and the directions that go with them."""
    # a gradient that is constant in all parameters has no graph, such as the decoder bias's where p is held fixed
    pairs = [
        (value, direction)
        for value, direction in zip(values, directions, strict=True)
        if value is not None and value.requires_grad
    ]
    return [value for value, _ in pairs], [direction for _, direction in pairs]
