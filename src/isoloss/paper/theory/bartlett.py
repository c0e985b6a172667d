"""Lemma 3.2, Bartlett's identity: at a minimizer of the loss the covariance of its gradients is its Hessian.

Shapes: P parameters, n contexts, V token ids. Everything is summed over all contexts and ids, in float64.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.func import functional_call
from transformers import BertConfig, BertForMaskedLM

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.models.architectures import seeded_weights
from isoloss.paper.theory.brackets import each_bracket_hidden
from isoloss.paper.theory.statements import Statement, counter, mean_and_stderr

TOLERANCE = 1e-10  # relative gap at a minimizer that rounding in float64 may leave; measured: 5e-16
RADII = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # distances from the minimizer
EXPONENT_TOLERANCE = 0.05  # of the power of the KL, measured at radii that are small but not 0
MAX_LENGTH = 8  # brackets in a sentence of the enumerated language


def unflattened(theta: torch.Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Return (P,) parameters split into tensors of these shapes, in order."""
    pieces = torch.split(theta, [shape.numel() for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


@dataclass(frozen=True)
class EnumerableModel:
    """A model whose every context and every answer can be visited."""

    name: str  # what it is
    # from (P,) parameters to (n, V) log-probabilities in nats, differentiable twice
    log_probs: Callable[[torch.Tensor], torch.Tensor]
    # (P,) float64: the parameters whose predictions are the true conditionals, so that they minimize the loss
    teacher: torch.Tensor
    weights: torch.Tensor  # (n,) float64, with sum 1: the probability of each context


@dataclass(frozen=True)
class Curvature:
    """Both sides of the identity at one point, exactly."""

    kl_nats: float  # KL divergence from the true conditionals to the model's, in nats per predicted token
    gradient_norm: float  # length of the gradient of the loss
    covariance: torch.Tensor  # (P, P): of the gradient on one example whose answer is drawn from the true conditionals
    hessian: torch.Tensor  # (P, P): of the loss
    fisher_trace: float  # trace of the Fisher information, where the answer is drawn from the model

    @property
    def gap(self) -> float:
        """Frobenius norm of covariance minus Hessian, as a fraction of the Hessian's."""
        return float((self.covariance - self.hessian).norm() / self.hessian.norm())

    @property
    def trace_gap(self) -> float:
        """Absolute trace of covariance minus Hessian, in nats per predicted token."""
        return abs(float((self.covariance - self.hessian).trace()))


@dataclass(frozen=True, kw_only=True)
class Row:
    """Means over the directions at one distance from a minimizer, with standard errors over the directions."""

    model: str  # name of the model
    radius: float  # Euclidean distance from the minimizer
    kl_nats: float  # this and all traces are in nats per predicted token
    gap: float  # see `Curvature.gap`
    gap_stderr: float
    trace_gap: float  # see `Curvature.trace_gap`
    trace_gap_stderr: float
    covariance_trace: float
    hessian_trace: float
    fisher_trace: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of `study`: the table and the statements."""

    rows: tuple[Row, ...]
    statements: tuple[Statement, ...]


def softmax_model(*, seed: int, contexts: int = 6, vocab: int = 4, rank: int = 3) -> EnumerableModel:
    """Return a softmax over the products of a vector for each context and a vector for each token.

    The logits are `U @ W.T`, which is not linear in the parameters, and many parameters give the same logits. `seed`
    decides the teacher and the probabilities of the contexts.
    """
    draw = functools.partial(torch.randn, generator=seeds.generator(seed, "bartlett", "softmax"), dtype=torch.float64)
    split = contexts * rank

    def log_probs(theta: torch.Tensor) -> torch.Tensor:
        u, w = theta[:split].view(contexts, rank), theta[split:].view(vocab, rank)
        return (u @ w.T).log_softmax(dim=-1)

    return EnumerableModel("softmax", log_probs, draw(split + vocab * rank), draw(contexts).softmax(dim=0))


def bert_model(*, seed: int, length: int = 4) -> EnumerableModel:
    """Return a BERT of width 4 with one layer that predicts one hidden bracket of every sentence of `Brackets(length)`.

    The contexts are all sentences with each of their brackets hidden in turn, equally likely; the answers are the
    teacher's, over the language's ids and the two special ones. `seed` decides the teacher: normal weights with
    standard deviation 0.5 on top of the initial ones.

    Raises:
        IsolossError: The length is odd or not from 2 to 8.
    """
    if length % 2 or not 2 <= length <= MAX_LENGTH:
        raise IsolossError(f"length is {length}; it must be even, from 2 to {MAX_LENGTH}, to visit every sentence")
    language = Brackets(length)
    tokens, hidden = each_bracket_hidden(language)
    input_ids = tokens.masked_fill(hidden, language.mask_id)
    config = BertConfig(
        vocab_size=language.model_vocab_size,
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=4,
        max_position_embeddings=length,
        pad_token_id=language.pad_id,
        # eager attention has second derivatives
        attn_implementation="eager",
    )
    with seeded_weights(seed):
        # without dropout, which would draw anew at every call
        model = BertForMaskedLM(config).double().eval()
    # each tied weight is here once: P counts it once, and functional_call sets both of its uses
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    start = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    noise = torch.randn(len(start), generator=seeds.generator(seed, "bartlett", "bert"), dtype=torch.float64)

    def log_probs(theta: torch.Tensor) -> torch.Tensor:
        values = unflattened(theta, shapes)
        logits: torch.Tensor = functional_call(model, values, (), {"input_ids": input_ids}).logits
        return logits[hidden].log_softmax(dim=-1)

    weights = torch.full((len(input_ids),), 1 / len(input_ids), dtype=torch.float64)
    # the initial weights alone predict nearly the same in every context, within 0.013 of uniform
    return EnumerableModel(f"BERT, brackets of length {length}", log_probs, start + 0.5 * noise, weights)


def curvature(model: EnumerableModel, theta: torch.Tensor, conditionals: torch.Tensor) -> Curvature:
    r"""Return both sides of the identity at `theta` (section 3, Lemma 3.2), summed over every context and answer.

    With `L = -sum_x w(x) sum_y q(y|x) log f(y|x)` and `g(x, y)` the gradient of `-log f(y|x)`, the covariance is
    `sum_x w(x) sum_y q(y|x) g g^T - (grad L)(grad L)^T`. `theta` is (P,), `conditionals` are the (n, V) true q.
    """
    theta = theta.detach().requires_grad_()
    log_probs = model.log_probs(theta)
    flat = log_probs.flatten()
    cotangents = torch.eye(len(flat), dtype=flat.dtype)
    # (nV, P) gradients of log f, not of the loss -log f: the sign drops out of their products
    (gradients,) = torch.autograd.grad(flat, theta, cotangents, is_grads_batched=True, retain_graph=True)
    joint = (model.weights[:, None] * conditionals).flatten()
    (gradient,) = torch.autograd.grad(-(joint * flat).sum(), theta, create_graph=True)
    identity = torch.eye(len(theta), dtype=theta.dtype)
    # differentiated twice, not as Gauss-Newton plus a residual: the identity must not be built in
    (hessian,) = torch.autograd.grad(gradient, theta, identity, is_grads_batched=True)
    models_joint = (model.weights[:, None] * log_probs.detach().exp()).flatten()
    mean = gradient.detach()
    log_ratio = (conditionals.log() - log_probs.detach()).flatten()
    return Curvature(
        kl_nats=float((joint * log_ratio).sum()),
        gradient_norm=float(mean.norm()),
        covariance=(gradients.T * joint) @ gradients - torch.outer(mean, mean),
        hessian=hessian,
        # a score has mean 0 under the model itself, so nothing is subtracted
        fisher_trace=float(models_joint @ gradients.square().sum(dim=1)),
    )


def study(
    *, length: int = 4, directions: int = 4, seed: int = 0, progress: Callable[[int], None] | None = None
) -> Result:
    """Check the identity at minimizers of two models, and follow the gap along straight lines away from them.

    Each of the `directions` has a minimizer of its own. `progress` is called with the number of points that are done,
    of `num_points(directions)`.

    Raises:
        IsolossError: The length is out of range, or there are fewer than 2 directions.
    """
    if directions < 2:
        raise IsolossError(f"directions is {directions}; a standard error needs at least 2")
    makers: list[Callable[..., EnumerableModel]] = [softmax_model, functools.partial(bert_model, length=length)]
    rows: list[Row] = []
    statements: list[Statement] = []
    count = counter(progress)
    for make in makers:
        paths: list[list[Curvature]] = []
        for index in range(directions):
            # a teacher for each direction: errors over directions of one teacher would hide how teachers differ
            model = make(seed=seeds.derive(seed, "bartlett", index))
            truth = model.log_probs(model.teacher).exp().detach()
            generator = seeds.generator(seed, "bartlett", "direction", index)
            draw = torch.randn(len(model.teacher), generator=generator, dtype=torch.float64)
            paths.append([])
            for radius in (0.0, *RADII):
                paths[-1].append(curvature(model, model.teacher + radius * (draw / draw.norm()), truth))
                count()
        rows += [_row(model.name, *at) for at in zip((0.0, *RADII), zip(*paths, strict=True), strict=True)]
        statements += _judge(model.name, paths)
    return Result(rows=tuple(rows), statements=tuple(statements))


def num_points(directions: int) -> int:
    """Return how many points `study` visits."""
    return 2 * directions * (1 + len(RADII))


def _row(name: str, radius: float, points: Sequence[Curvature]) -> Row:
    gap, gap_stderr = mean_and_stderr([point.gap for point in points])
    trace_gap, trace_gap_stderr = mean_and_stderr([point.trace_gap for point in points])
    return Row(
        model=name,
        radius=radius,
        kl_nats=statistics.fmean(point.kl_nats for point in points),
        gap=gap,
        gap_stderr=gap_stderr,
        trace_gap=trace_gap,
        trace_gap_stderr=trace_gap_stderr,
        covariance_trace=statistics.fmean(float(point.covariance.trace()) for point in points),
        hessian_trace=statistics.fmean(float(point.hessian.trace()) for point in points),
        fisher_trace=statistics.fmean(point.fisher_trace for point in points),
    )


def _judge(name: str, paths: Sequence[Sequence[Curvature]]) -> list[Statement]:
    minimizers = [path[0] for path in paths]
    # that the points are minimizers is tested, too: no slope, and no direction in which the loss falls
    worst = max(point.gap for point in minimizers)
    slope = max(point.gradient_norm for point in minimizers)
    lowest = min(float(torch.linalg.eigvalsh(point.hessian)[0] / point.hessian.norm()) for point in minimizers)
    equal = Statement(
        text=f"{name}: where the model's predictions are the true conditionals, the covariance of the gradient on one "
        "example equals the Hessian of the loss.",
        evidence=f"largest relative gap of {len(paths)} minimizers {worst:.1e}, at most {TOLERANCE:.0e} allowed; "
        f"gradient {slope:.1e}; lowest eigenvalue of the Hessian {lowest:.1e} of its norm",
        shown=worst <= TOLERANCE and slope <= TOLERANCE and lowest >= -TOLERANCE,
    )
    # the KL grows as the square of the distance, the gap as the distance; path[1] and [2] are at the two least radii
    powers = [math.log(path[2].gap / path[1].gap) / math.log(path[2].kl_nats / path[1].kl_nats) for path in paths]
    power, stderr = mean_and_stderr(powers)
    grows = Statement(
        text=f"{name}: away from a minimizer they differ, at first in proportion to the square root of the KL.",
        evidence=f"the gap grows as the KL to the power {power:.4f} ± {stderr:.4f} between the radii {RADII[0]:g} and "
        f"{RADII[1]:g}; 0.5 ± {EXPONENT_TOLERANCE:g} allowed",
        shown=abs(power - 0.5) <= EXPONENT_TOLERANCE and all(path[1].gap > 100 * path[0].gap for path in paths),
    )
    return [equal, grows]
