"""Largest eigenvalues and spectral density of the Gauss-Newton matrix or the Hessian of a language model's loss.

Shapes: R random probes, s steps of Lanczos' method for each, G points of a grid, P parameters counted one by one.
The examples measure the model and the batches of the example of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError, warn
from isoloss.flatness._curvature import MeanLoss
from isoloss.flatness._ghost import controls
from isoloss.flatness._measurement import (
    UNIT,
    MeasureOptions,
    StopCriteria,
    StopRule,
    interruptible,
)
from isoloss.model_checks import device_of
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import effective_samples, influence

_PROBES = 8
_RTOL = 1e-3  # of the largest eigenvalue

Matrix = Literal["gauss-newton", "hessian"]
_NAMES: Mapping[Matrix, str] = {"gauss-newton": "Gauss-Newton matrix", "hessian": "Hessian"}


def largest_eigenvalues(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    matrix: Matrix = "gauss-newton",
    num_eigenvalues: int = 1,
    max_iterations: int = 100,
    seed: int = 0,
    **options: Unpack[MeasureOptions],
) -> list[Estimate]:
    """Estimate the largest eigenvalues of a curvature matrix of the mean loss.

    Lanczos' method with full reorthogonalization gives the eigenvalues of the mean matrix A over the given inputs,
    labels included for the Hessian. `details["residual_norm"]` is the norm of A x - theta x of the unit vector x: an
    eigenvalue of A lies within it, for certain up to rounding. Equal eigenvalues appear one after another only.

    The error covers the inputs. A is a ratio of sums over independent clusters of sequences, A = sum_b A_b / sum_b m_b
    with m_b the predicted positions of cluster b, and to first order a simple eigenvalue moves with A by x^T dA x, its
    vector held fixed. So theta = sum_b x^T A_b x / sum_b m_b has the error of that ratio (the delta method; to the same
    order the jackknife over clusters), with the influence n (x^T A_b x - theta m_b) / sum_b m_b; the squared residual
    norm is added to its square. It holds where the error is small beside the distance to the next eigenvalue. The
    largest eigenvalue of a mean over few inputs is too large on average, by a term of second order.

    A search that `seconds` or `max_iterations` end before it converges gives values that are too small: each is at most
    the eigenvalue of the same rank of A (Cauchy's interlacing), and the eigenvalue within its residual norm may be one
    of lower rank. The error does not cover that, `details["converged"]` is False, and a warning says so.

    Args:
        model: As for `fisher_trace`; its attention must have second derivatives (not flash attention).
        batches: As for `fisher_trace`; all are kept, and each product runs over all.
        matrix: `"gauss-newton"` (the Fisher matrix), or `"hessian"` at the given labels.
        num_eigenvalues: How many, by value: for the Hessian, negative ones come last.
        max_iterations: Stop after as many products. As many vectors of P numbers are kept.
        seed: Decides the start vector.
        options: See `MeasureOptions`, but `rtol` is not of the error: the search stops as soon as all residual norms
            are at most this fraction of the largest eigenvalue in size, and 1e-3 where it is larger or None. More
            products do not make the inputs' part of the error smaller, more sequences do. `progress` counts products,
            and `seconds` ends the search once there are `num_eigenvalues` of them; the residual norms and errors then
            take one more product and pass over the inputs for each eigenvalue.

    Returns:
        The estimates, the largest eigenvalue first. The details' `ended` is `"rtol"` where it converged, `"complete
        basis"` where the vectors span everything, `"seconds"` or `"max_iterations"`.

    Raises:
        IsolossError: An argument is out of its range, a batch does not fit, something is not finite, there are fewer
            than two independent sequences, or a part of the model has no second derivative.
        KeyboardInterrupt: Ctrl-C. It carries no estimate, which would take further products.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import largest_eigenvalues
        >>> model, batches = tiny_bert()
        >>> first, second = largest_eigenvalues(model, batches, num_eigenvalues=2)
        >>> first.value > second.value > 0, first.details["residual_norm"] <= 1e-3 * first.value
        (True, True)
        >>> first.details["ended"], first.stderr > 10 * first.details["residual_norm"]
        ('rtol', True)
    """
    rtol = min(StopCriteria.of(options).rtol or _RTOL, _RTOL)  # of the residual: it is no sampling error
    loss = MeanLoss.of(model, batches, options)
    if not 1 <= num_eigenvalues <= min(max_iterations, loss.num_parameters):
        raise IsolossError(
            f"num_eigenvalues is {num_eigenvalues}; it is at least 1 and at most max_iterations ({max_iterations}) and "
            f"the number of parameters ({loss.num_parameters})"
        )
    product = _product(loss, matrix)
    generator = seeds.generator(seed, "lanczos")
    start = torch.randn(loss.num_parameters, generator=generator, dtype=loss.dtype).to(device_of(model))
    space, converged, ended = Lanczos(product, start, generator), False, None
    # without rtol, which limits the residual norms here
    watch = StopRule(StopCriteria(seconds=options.get("seconds")), fewest=num_eigenvalues)
    while ended is None and not converged and not space.complete and space.steps < max_iterations:
        space.step()
        values, vectors, residuals = space.ritz()
        near = bool((residuals[-num_eigenvalues:] <= rtol * values.abs().max()).all())
        converged = near and space.steps >= num_eigenvalues
        ended = watch.limit_reached(range(space.steps))
        if (progress := options.get("progress")) is not None:
            progress(space.steps)
    is_exact = converged or space.complete
    if is_exact:  # with the last product that was allowed, perhaps
        ended = "rtol" if converged else "complete basis"
    residual = "the residual of Lanczos' method" if is_exact else "the distance to an eigenvalue, perhaps a smaller one"
    begun, estimates = time.perf_counter(), []
    for number in range(1, num_eigenvalues + 1):
        x = space.vector(vectors[:, -number])
        x /= x.norm()
        value = float(values[-number])
        # measured: the residual norm that Lanczos' method gives holds in exact arithmetic alone
        residual_norm = float((product(x) - value * x).norm())
        # the error over inputs: what each cluster adds to x^T A x
        forms, positions = loss.quadratic_forms(x, hessian=matrix == "hessian")
        _, psi = influence(forms, positions)
        n = len(psi)
        estimates.append(
            Estimate(
                value=value,
                stderr=math.sqrt(float(psi.square().sum()) / (n * (n - 1)) + residual_norm**2),
                samples=n,
                effective_samples=effective_samples(positions),
                unit=UNIT,
                num_predictions=loss.num_positions,
                method=f"eigenvalue {number} of the {_NAMES[matrix]}, Lanczos",
                details={
                    **loss.details(seed),
                    "clusters": loss.clusters_name,
                    "matrix": matrix,
                    "iterations": space.steps,
                    "converged": is_exact,
                    "residual_norm": residual_norm,
                    "ended": ended or "max_iterations",
                    "error_covers": f"inputs, and {residual}",
                },
                influence=psi.numpy(),
            )
        )
    if not is_exact:
        warn(
            f"the search for eigenvalues ended with product {space.steps} with the matrix, before it converged: "
            "the values are too small, and their errors do not say by how much"
        )
    seconds = watch.seconds + time.perf_counter() - begun
    return [replace(estimate, seconds=seconds) for estimate in estimates]


@dataclass(frozen=True, kw_only=True, repr=False)
class SpectralDensity:
    """The eigenvalues' distribution as R random probes see it, each a quadrature with s nodes.

    For a smooth function h, the mean over probes of sum_j weights_j h(nodes_j) estimates (1/P) sum_i h(lambda_i); it
    is exact on average over probes for polynomials up to degree 2 s - 1.

    Attributes:
        nodes: (R, s) float64, eigenvalues seen by each probe, ascending.
        weights: (R, s) float64, at least 0; each probe's add up to 1.
        num_parameters: P.
        num_predictions: Predicted positions.
        details: What was measured and how.
        seconds: The time that it took.
    """

    nodes: torch.Tensor
    weights: torch.Tensor
    num_parameters: int
    num_predictions: int
    details: Mapping[str, Any]
    seconds: float

    def __repr__(self) -> str:
        probes, steps = self.nodes.shape
        return f"SpectralDensity({probes} probes of {steps} steps; trace {self.moment(1)})"

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

        The error, and the influence, are over probes; the inputs are given.

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
            num_predictions=self.num_predictions,
            num_probes=len(sums),
            method=f"moment {power} of the spectrum, stochastic Lanczos quadrature",
            seconds=self.seconds,
            details=self.details,
            influence=(sums - value).numpy(),
        )


def spectral_density(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    matrix: Matrix = "gauss-newton",
    num_probes: int | None = None,
    num_steps: int = 30,
    seed: int = 0,
    **options: Unpack[MeasureOptions],
) -> SpectralDensity:
    """Estimate the distribution of the eigenvalues of a curvature matrix of the mean loss over the given inputs.

    Stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017): `num_steps` of Lanczos' method from each of `num_probes`
    Rademacher probes, vectors of independent random signs. Its errors are over probes; the inputs are given.

    Args:
        model: As for `fisher_trace`; its attention must have second derivatives (not flash attention).
        batches: As for `fisher_trace`; all are kept, and each product runs over all.
        matrix: `"gauss-newton"` (the Fisher matrix), or `"hessian"` at the given labels.
        num_probes: R, at least 2. None: 8; or at most 1024 with `rtol` or `seconds`.
        num_steps: s, at most P of them are taken; as many vectors of P numbers are kept.
        seed: Decides the probes.
        options: See `MeasureOptions`, each sample a probe of s products with the matrix. `rtol` is of the trace,
            `moment(1)`, over probes; a higher moment or the density at a point may have another relative error.
            `seconds` ends it within a probe too, which is then left out.

    Raises:
        IsolossError: An argument is out of its range, a batch does not fit, something is not finite, or a part of the
            model has no second derivative.
        InterruptedEstimate: Ctrl-C after at least two probes; it carries the estimate of the trace so far.

    Example:
        >>> import torch
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import spectral_density
        >>> model, batches = tiny_bert()
        >>> spectrum = spectral_density(model, batches, num_steps=5)
        >>> density, stderr = spectrum.density(torch.linspace(-0.1, 0.5, 7), width=0.01)
        >>> spectrum.nodes.shape == (8, 5), density.shape == stderr.shape == (7,), spectrum.moment(1).value > 0
        (True, True, True)
        >>> short = spectral_density(model, batches, num_steps=5, seconds=1e-6)  # two probes are taken in any case
        >>> short.nodes.shape == (2, 5), short.details["ended"]
        (True, 'seconds')
    """
    stopping = StopCriteria.of(options)
    most = stopping.number_of_probes(num_probes, _PROBES)
    if num_steps < 1:
        raise IsolossError(f"num_steps is {num_steps}; it must be at least 1")
    loss = MeanLoss.of(model, batches, options)
    product = _product(loss, matrix)

    steps, quadratures, ended = min(num_steps, loss.num_parameters), list[torch.Tensor](), None
    watch = StopRule(stopping)

    def density(ended: str) -> SpectralDensity:
        nodes, weights = torch.stack(quadratures, dim=1)
        return SpectralDensity(
            nodes=nodes,
            weights=weights,
            num_parameters=loss.num_parameters,
            num_predictions=loss.num_positions,
            details={
                **loss.details(seed),
                "matrix": matrix,
                "ended": ended,
                "error_covers": "probes; the inputs are given",
            },
            seconds=watch.seconds,
        )

    with interruptible(quadratures, lambda ended: density(ended).moment(1)):
        while ended is None and len(quadratures) < most:
            probe = len(quadratures)
            signs = controls.rademacher((loss.num_parameters,), device_of(model), seed, "spectrum", probe)
            space = Lanczos(product, signs.to(loss.dtype), seeds.generator(seed, "lanczos", probe))
            # `seconds` may end it within a probe, which is then left out
            while ended is None and space.steps < steps:
                space.step()
                if space.steps == steps:
                    nodes, vectors, _ = space.ritz()
                    # Gauss quadrature: the weights are the squares of the first components (Golub and Welsch 1969)
                    quadratures.append(torch.stack([nodes, vectors[0].square()]))
                ended = watch.limit_reached(quadratures, lambda: density("").moment(1))
            if (progress := options.get("progress")) is not None and len(quadratures) > probe:
                progress(len(quadratures))
    return density(ended or "num_probes")


def _product(loss: MeanLoss, matrix: str) -> Product:
    products: dict[str, Product] = {"gauss-newton": loss.gauss_newton_product, "hessian": loss.hessian_product}
    if matrix not in products:
        raise IsolossError(f"matrix is {matrix!r}; it is one of {', '.join(products)}")
    return products[matrix]


def _mean_and_error(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over the last dimension and its standard error."""
    return values.mean(dim=-1), values.std(dim=-1) / math.sqrt(values.shape[-1])


# --- Lanczos' method -------------------------------------------------------------------------------------------------

Product = Callable[[torch.Tensor], torch.Tensor]


class Lanczos:
    """An orthonormal basis q_1, q_2, ... of the Krylov space of A and a start vector, in which A is tridiagonal.

    Where the space is invariant the basis goes on with a random vector orthogonal to it, so that eigenvalues that the
    start vector does not show, repeated ones too, appear in the end. All basis vectors are kept and every one
    is made orthogonal to all before it, twice (Golub and Van Loan, Matrix Computations, section 10.3).
    """

    def __init__(self, product: Product, start: torch.Tensor, generator: torch.Generator) -> None:
        self._product, self._generator = product, generator
        self._basis = [start / start.norm()]
        self._diagonal: list[float] = []
        self._beside: list[float] = []

    @property
    def steps(self) -> int:
        """Products taken."""
        return len(self._diagonal)

    @property
    def complete(self) -> bool:
        """Whether the basis spans everything."""
        return self.steps == len(self._basis[0])

    def step(self) -> None:
        """Take one product and add a vector to the basis."""
        last = self._basis[-1]
        w = self._product(last).to(last.dtype)
        self._diagonal.append(_dot(last, w))
        if self.complete:
            self._beside.append(0.0)
            return
        self._orthogonalize(w)
        norm = float(w.norm())
        size = max(abs(value) for value in self._diagonal + self._beside + [norm])
        # the space is invariant; see the class
        if norm <= 100 * torch.finfo(w.dtype).eps * size:
            norm = 0.0
            w = torch.randn(len(w), generator=self._generator, dtype=w.dtype).to(w.device)
            self._orthogonalize(w)
        self._beside.append(norm)
        self._basis.append(w / w.norm())

    def ritz(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return eigenvalues (s,) of A in the subspace, ascending, its eigenvectors (s, s), and residual norms (s,).

        Column i of the second holds the coordinates of eigenvector i; `|A x_i - theta_i x_i|` is the i-th residual norm
        in exact arithmetic. All are float64.
        """
        # the last one leads out of the subspace: it gives the residual norms
        beside = torch.tensor(self._beside[:-1], dtype=torch.float64)
        small = torch.diag(torch.tensor(self._diagonal, dtype=torch.float64))
        small += torch.diag(beside, 1) + torch.diag(beside, -1)
        values, vectors = torch.linalg.eigh(small)
        return values, vectors, self._beside[-1] * vectors[-1].abs()

    def vector(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Return (P,): the vector with these coordinates (s,)."""
        total = torch.zeros_like(self._basis[0])
        for weight, q in zip(coordinates.tolist(), self._basis[: self.steps], strict=True):
            total.add_(q, alpha=weight)
        return total

    def _orthogonalize(self, w: torch.Tensor) -> None:
        # twice: rounding leaves the first result with parts of what was cancelled
        for _ in range(2):
            for q in self._basis:
                w.sub_(q, alpha=_dot(q, w))


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    # a sum of P products in float32 is too rough to be orthogonal by
    return float((a.double() * b.double()).sum())
