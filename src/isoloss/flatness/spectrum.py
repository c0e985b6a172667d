"""Largest eigenvalues and spectral density of the Gauss-Newton matrix or the Hessian of a language model's loss.

Shapes: R random probes, s steps of Lanczos' method for each, G points of a grid, P parameters counted one by one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness.engine import control_variates
from isoloss.flatness.engine.curvature_products import MeanLoss
from isoloss.flatness.engine.lanczos import Lanczos, Product
from isoloss.flatness.engine.run import UNIT, described
from isoloss.model_checks import device_of
from isoloss.statistics.estimate import Estimate

Matrix = Literal["gauss-newton", "hessian"]


def largest_eigenvalues(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    matrix: Matrix = "gauss-newton",
    k: int = 5,
    tolerance: float = 1e-3,
    max_iterations: int = 100,
    seed: int = 0,
    causal: bool | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> list[Estimate]:
    """Find the largest eigenvalues of a curvature matrix of the mean loss over the given inputs.

    Lanczos' method with full reorthogonalisation. The matrix is that of these inputs, labels included for the
    Hessian; nothing is said of others. An estimate's error is the norm of A x - theta x of its unit vector x:
    an eigenvalue of A lies within it, for certain up to rounding. Equal eigenvalues are found one after another only.

    Args:
        model: As for `fisher_trace`; its attention must have second derivatives (not flash attention).
        batches: As for `fisher_trace`; all are kept, and each product runs over all.
        matrix: `"gauss-newton"` (the Fisher matrix), or `"hessian"` at the given labels.
        k: How many, by value: for the Hessian, negative ones come last.
        tolerance: Stop as soon as all errors are at most this share of the largest eigenvalue.
        max_iterations: Stop after as many products; `details["converged"]` is then False. As many vectors of P
            numbers are kept.
        seed: Decides the start vector.
        causal: Whether position t predicts token t + 1. None: by the model's class name, then its config.
        parameters: The parameters, by name; None: all trainable ones, tied ones once.

    Returns:
        k estimates, the largest eigenvalue first.

    Raises:
        IsolossError: An argument is out of its range, a batch does not fit, something is not finite, or a part of the
            model has no second derivative.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> _ = torch.manual_seed(0)
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> model = BertForMaskedLM(config).eval()
        >>> input_ids = torch.randint(0, 8, (16, 4))
        >>> labels = torch.tensor([3, -100, -100, -100]).expand(16, 4)
        >>> first, second = largest_eigenvalues(model, [{"input_ids": input_ids, "labels": labels}], k=2)
        >>> first.value > second.value > 0, first.stderr <= 1e-3 * first.value
        (True, True)
    """
    if not 0 < tolerance < 1:
        raise IsolossError(f"tolerance is {tolerance}; it is a share of the largest eigenvalue, between 0 and 1")
    begun = time.perf_counter()
    loss = MeanLoss(model, batches, causal=causal, parameters=parameters)
    if not 1 <= k <= min(max_iterations, loss.num_parameters):
        raise IsolossError(
            f"k is {k}; it is at least 1 and at most max_iterations ({max_iterations}) and the number of parameters "
            f"({loss.num_parameters})"
        )
    product = _product(loss, matrix)
    generator = seeds.generator(seed, "lanczos")
    start = torch.randn(loss.num_parameters, generator=generator, dtype=loss.dtype).to(device_of(model))
    space = Lanczos(product, start, generator)
    while True:
        space.step()
        values, vectors, residuals = space.ritz()
        small = space.steps >= k and bool((residuals[-k:] <= tolerance * values.abs().max()).all())
        if small or space.complete or space.steps == max_iterations:
            break
    details = {
        **described(model, list(loss.parameters.values()), causal=loss.causal),
        "sequences": loss.num_sequences,
        "skipped_batches": loss.skipped_batches,
        "seed": seed,
        "matrix": matrix,
        "iterations": space.steps,
        "converged": small or space.complete,
        "error_covers": "the residual norm of Lanczos' method; the inputs are given",
    }
    found = []
    for place in range(1, k + 1):
        x = space.vector(vectors[:, -place])
        x /= x.norm()
        value = float(values[-place])
        found.append(
            Estimate(
                value=value,
                stderr=float((product(x) - value * x).norm()),
                samples=max(2, space.steps),
                unit=UNIT,
                num_inputs=loss.num_positions,
                num_probes=1,
                method=f"eigenvalue {place} of the {matrix} matrix, lanczos",
                seconds=time.perf_counter() - begun,
                details=details,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class SpectralDensity:
    """The eigenvalues' distribution as R random probes see it, each a quadrature with s nodes.

    For a smooth function h, the mean over probes of sum_j weights_j h(nodes_j) estimates (1/P) sum_i h(lambda_i); it
    is exact on average over probes for polynomials up to degree 2 s - 1.

    Attributes:
        nodes: (R, s) float64, eigenvalues seen by each probe, ascending.
        weights: (R, s) float64, at least 0; each probe's add up to 1.
        num_parameters: P.
        num_inputs: Predicted positions.
        details: What was measured and how.
    """

    nodes: torch.Tensor
    weights: torch.Tensor
    num_parameters: int
    num_inputs: int
    details: Mapping[str, Any]

    def density(self, grid: torch.Tensor, *, width: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the density of eigenvalues at points (G,), and its standard error over probes, both (G,) float64.

        Each eigenvalue is smoothed by a Gaussian of standard deviation `width`; the density integrates to 1.

        Raises:
            IsolossError: `width` is not positive.
        """
        if not width > 0:
            raise IsolossError(f"width is {width}; it must be more than 0")
        distance = (grid.double()[:, None, None].cpu() - self.nodes) / width
        kernel = torch.exp(-distance.square() / 2) / (width * math.sqrt(2 * math.pi))
        return _mean_and_error((kernel * self.weights).sum(dim=2))

    def moment(self, power: int) -> Estimate:
        """Return the sum of the eigenvalues' powers: 1 gives the trace, 2 the squared Frobenius norm.

        The error is that over probes; the inputs are given.

        Raises:
            IsolossError: `power` is below 1, or so high that s nodes do not hold it.
        """
        highest = 2 * self.nodes.shape[1] - 1
        if not 1 <= power <= highest:
            raise IsolossError(f"power is {power}; it is from 1 to {highest}, with {self.nodes.shape[1]} steps")
        sums = self.num_parameters * (self.weights * self.nodes**power).sum(dim=1)
        value, stderr = _mean_and_error(sums[None])
        return Estimate(
            value=float(value),
            stderr=float(stderr),
            samples=len(sums),
            unit=UNIT if power == 1 else f"({UNIT})^{power}",
            num_inputs=self.num_inputs,
            num_probes=len(sums),
            method=f"moment {power} of the spectrum, stochastic lanczos quadrature",
            details=self.details,
        )


def spectral_density(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    matrix: Matrix = "gauss-newton",
    num_probes: int = 8,
    num_steps: int = 30,
    seed: int = 0,
    causal: bool | None = None,
    parameters: Mapping[str, nn.Parameter] | None = None,
) -> SpectralDensity:
    """Estimate the distribution of the eigenvalues of a curvature matrix of the mean loss over the given inputs.

    Stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017): `num_steps` of Lanczos' method from each of `num_probes`
    vectors of random signs. Its errors are over probes; the inputs are given.

    Args:
        model: As for `largest_eigenvalues`.
        batches: As for `largest_eigenvalues`.
        matrix: As for `largest_eigenvalues`.
        num_probes: R, at least 2.
        num_steps: s, at most P of them are taken; as many vectors of P numbers are kept.
        seed: Decides the probes.
        causal: As for `largest_eigenvalues`.
        parameters: As for `largest_eigenvalues`.

    Raises:
        IsolossError: As for `largest_eigenvalues`.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> _ = torch.manual_seed(0)
        >>> config = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        ...                     intermediate_size=16, max_position_embeddings=8)
        >>> model = BertForMaskedLM(config).eval()
        >>> input_ids = torch.randint(0, 8, (16, 4))
        >>> labels = torch.tensor([3, -100, -100, -100]).expand(16, 4)
        >>> spectrum = spectral_density(model, [{"input_ids": input_ids, "labels": labels}], num_steps=5)
        >>> density, stderr = spectrum.density(torch.linspace(-0.1, 0.5, 7), width=0.01)
        >>> spectrum.nodes.shape == (8, 5), density.shape == stderr.shape == (7,), spectrum.moment(1).value > 0
        (True, True, True)
    """
    if num_probes < 2:
        raise IsolossError(f"num_probes is {num_probes}; an error bar needs at least 2")
    if num_steps < 1:
        raise IsolossError(f"num_steps is {num_steps}; it must be at least 1")
    begun = time.perf_counter()
    loss = MeanLoss(model, batches, causal=causal, parameters=parameters)
    product = _product(loss, matrix)
    steps = min(num_steps, loss.num_parameters)
    nodes = torch.zeros(num_probes, steps, dtype=torch.float64)
    weights = torch.zeros_like(nodes)
    for probe in range(num_probes):
        signs = control_variates.random_signs((loss.num_parameters,), device_of(model), seed, "spectrum", probe)
        space = Lanczos(product, signs.to(loss.dtype), seeds.generator(seed, "lanczos", probe))
        for _ in range(steps):
            space.step()
        nodes[probe], vectors, _ = space.ritz()
        weights[probe] = vectors[0].square()
    details = {
        **described(model, list(loss.parameters.values()), causal=loss.causal),
        "sequences": loss.num_sequences,
        "skipped_batches": loss.skipped_batches,
        "seed": seed,
        "matrix": matrix,
        "seconds": time.perf_counter() - begun,
        "error_covers": "probes; the inputs are given",
    }
    return SpectralDensity(
        nodes=nodes,
        weights=weights,
        num_parameters=loss.num_parameters,
        num_inputs=loss.num_positions,
        details=details,
    )


def _product(loss: MeanLoss, matrix: str) -> Product:
    products: dict[str, Product] = {"gauss-newton": loss.gauss_newton_product, "hessian": loss.hessian_product}
    if matrix not in products:
        raise IsolossError(f"matrix is {matrix!r}; it is one of {', '.join(products)}")
    return products[matrix]


def _mean_and_error(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over the last dimension and its standard error."""
    return values.mean(dim=-1), values.std(dim=-1) / math.sqrt(values.shape[-1])
