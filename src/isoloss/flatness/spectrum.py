"""Largest eigenvalues and spectral density of the Gauss-Newton matrix or the Hessian of a language model's loss.

Shapes: R random probes, s steps of Lanczos' method for each, G points of a grid, P parameters counted one by one.
The examples measure the model and the batches of that of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import torch
from torch import nn

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness.engine import control_variates
from isoloss.flatness.engine.accumulation import UNIT, Accumulation, Options, Probes, State, Stopping, takes_options
from isoloss.flatness.engine.curvature_products import Lanczos, MeanLoss, Product
from isoloss.model_checks import device_of
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import influence

_PROBES = 8
_RTOL = 1e-3  # of the largest eigenvalue

Matrix = Literal["gauss-newton", "hessian"]
_NAMES: Mapping[Matrix, str] = {"gauss-newton": "Gauss-Newton matrix", "hessian": "Hessian"}


@takes_options
def largest_eigenvalues(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    matrix: Matrix = "gauss-newton",
    num_eigenvalues: int = 1,
    max_iterations: int = 100,
    seed: int = 0,
    **options: Unpack[Options],
) -> list[Estimate]:
    """Estimate the largest eigenvalues of a curvature matrix of the mean loss.

    Lanczos' method with full reorthogonalization gives those of the mean matrix A over the given inputs, labels
    included for the Hessian. `details["residual_norm"]` is the norm of A x - theta x of the unit vector x: an
    eigenvalue of A lies within it, for certain up to rounding. Equal eigenvalues appear one after another only.

    The error covers the inputs. A is a ratio of sums over independent clusters of sequences, A = sum_b A_b / sum_b m_b
    with m_b the predicted positions of cluster b, and to first order a simple eigenvalue moves with A by x^T dA x, its
    vector held fixed. So theta = sum_b x^T A_b x / sum_b m_b has the error of that ratio (the delta method; to the same
    order the jackknife over clusters), with the influence n (x^T A_b x - theta m_b) / sum_b m_b; the squared residual
    norm is added to its square. It holds where the error is small beside the distance to the next eigenvalue. The
    largest eigenvalue of a mean over few inputs is too large on average, by a term of second order.

    Args:
        model: As for `fisher_trace`; its attention must have second derivatives (not flash attention).
        batches: As for `fisher_trace`; all are kept, and each product runs over all.
        matrix: `"gauss-newton"` (the Fisher matrix), or `"hessian"` at the given labels.
        num_eigenvalues: How many, by value: for the Hessian, negative ones come last.
        max_iterations: Stop after as many products; `details["converged"]` is then False. As many vectors of P
            numbers are kept.
        seed: Decides the start vector.
        options: As follows, but `rtol` is of the residual norms: stop as soon as all are at most this fraction of the
            largest eigenvalue (1e-3 unless it is smaller). `seconds` ends it once there are `num_eigenvalues` products
            with the matrix, and `progress` counts these.

    Returns:
        The estimates, the largest eigenvalue first.

    Raises:
        IsolossError: An argument is out of its range, a batch does not fit, something is not finite, there are fewer
            than two independent sequences, or a part of the model has no second derivative.

    Example:
        >>> first, second = largest_eigenvalues(model, batches, num_eigenvalues=2)
        >>> first.value > second.value > 0, first.details["residual_norm"] <= 1e-3 * first.value
        (True, True)
    """
    rtol = min(Stopping.of(options).rtol or _RTOL, _RTOL)  # of the residual: it is no sampling error
    loss = MeanLoss.of(model, batches, options)
    if not 1 <= num_eigenvalues <= min(max_iterations, loss.num_parameters):
        raise IsolossError(
            f"num_eigenvalues is {num_eigenvalues}; it is at least 1 and at most max_iterations ({max_iterations}) and "
            f"the number of parameters ({loss.num_parameters})"
        )
    product = _product(loss, matrix)
    generator = seeds.generator(seed, "lanczos")
    start = torch.randn(loss.num_parameters, generator=generator, dtype=loss.dtype).to(device_of(model))
    search = _Search(Lanczos(product, start, generator), num_eigenvalues, rtol)
    file = loss.resume_file(options, {"measure": "eigenvalues", "matrix": matrix, "seed": seed})
    if file is not None and (state := file.read()) is not None:
        search.load_state(*state)
    limit = Stopping(seconds=options.get("seconds"))
    search.run(search.steps(max_iterations), limit, file=file, progress=options.get("progress"))
    estimates = []
    values, vectors, _ = search.space.ritz()
    for number in range(1, num_eigenvalues + 1):
        x = search.space.vector(vectors[:, -number])
        x /= x.norm()
        value = float(values[-number])
        residual_norm = float((product(x) - value * x).norm())
        _, psi = influence(*loss.quadratic_forms(x, hessian=matrix == "hessian"))
        n = len(psi)
        estimates.append(
            Estimate(
                value=value,
                stderr=math.sqrt(float(psi.square().sum()) / (n * (n - 1)) + residual_norm**2),
                samples=n,
                unit=UNIT,
                num_predictions=loss.num_positions,
                method=f"eigenvalue {number} of the {_NAMES[matrix]}, Lanczos",
                seconds=search.seconds,
                details={
                    **loss.details(seed),
                    "clusters": "documents" if loss.by_document else "sequences",
                    "matrix": matrix,
                    "iterations": search.space.steps,
                    "converged": search.converged or search.space.complete,
                    "residual_norm": residual_norm,
                    "error_covers": "inputs, and the residual of Lanczos' method",
                },
                influence=psi.numpy(),
            )
        )
    if file is not None:
        file.remove()
    return estimates


class _Search(Accumulation):
    """Steps of Lanczos' method until the largest eigenvalues are there."""

    def __init__(self, space: Lanczos, wanted: int, rtol: float) -> None:
        self.space, self._rtol = space, rtol
        self.fewest, self.converged = wanted, False

    def __len__(self) -> int:
        return self.space.steps

    def steps(self, most: int) -> Iterator[None]:
        """Yield for each step that is to be taken."""
        while not (self.converged or self.space.complete or self.space.steps >= most):
            yield

    def add(self, item: None) -> None:
        """Take a step."""
        self.space.step()
        self._update()

    @property
    def is_whole(self) -> bool:
        """Whether the last step is over."""
        return self.space.is_whole

    def state(self) -> State:
        """Return the vectors."""
        return {"seconds": self.seconds}, self.space.state()

    def load_state(self, document: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Go on from the vectors."""
        self.seconds = document["seconds"]
        self.space.load_state(tensors)
        self._update()

    def _update(self) -> None:
        values, _, residuals = self.space.ritz()
        near = bool((residuals[-self.fewest :] <= self._rtol * values.abs().max()).all())
        self.done, self.converged = self.space.steps, self.space.steps >= self.fewest and near


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


@takes_options
def spectral_density(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    matrix: Matrix = "gauss-newton",
    num_probes: int | None = None,
    num_steps: int = 30,
    seed: int = 0,
    **options: Unpack[Options],
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
        options: As follows; `rtol` is of the trace, `moment(1)`.

    Raises:
        IsolossError: An argument is out of its range, a batch does not fit, something is not finite, or a part of the
            model has no second derivative.
        InterruptedEstimate: Ctrl-C after at least two probes; it carries the estimate of the trace so far.

    Example:
        >>> spectrum = spectral_density(model, batches, num_steps=5)
        >>> density, stderr = spectrum.density(torch.linspace(-0.1, 0.5, 7), width=0.01)
        >>> spectrum.nodes.shape == (8, 5), density.shape == stderr.shape == (7,), spectrum.moment(1).value > 0
        (True, True, True)
    """
    stopping = Stopping.of(options)
    most = stopping.number_of_probes(num_probes, _PROBES)
    if num_steps < 1:
        raise IsolossError(f"num_steps is {num_steps}; it must be at least 1")
    loss = MeanLoss.of(model, batches, options)
    product = _product(loss, matrix)

    def quadrature(probe: int) -> torch.Tensor:
        """Return (2, s): nodes and weights."""
        signs = control_variates.rademacher((loss.num_parameters,), device_of(model), seed, "spectrum", probe)
        space = Lanczos(product, signs.to(loss.dtype), seeds.generator(seed, "lanczos", probe))
        for _ in range(min(num_steps, loss.num_parameters)):
            space.step()
        nodes, vectors, _ = space.ritz()
        return torch.stack([nodes, vectors[0].square()])

    def density(values: torch.Tensor, ended: str) -> SpectralDensity:
        return SpectralDensity(
            nodes=values[:, 0],
            weights=values[:, 1],
            num_parameters=loss.num_parameters,
            num_predictions=loss.num_positions,
            details={
                **loss.details(seed),
                "matrix": matrix,
                "ended": ended,
                "error_covers": "probes; the inputs are given",
            },
            seconds=probes.seconds,
        )

    probes = Probes(quadrature, lambda values: density(values, "interrupted").moment(1))
    file = loss.resume_file(options, {"measure": "spectrum", "matrix": matrix, "steps": num_steps, "seed": seed})
    ended = probes.take(most, stopping, file=file, progress=options.get("progress"))
    return density(probes.values, ended)


def _product(loss: MeanLoss, matrix: str) -> Product:
    products: dict[str, Product] = {"gauss-newton": loss.gauss_newton_product, "hessian": loss.hessian_product}
    if matrix not in products:
        raise IsolossError(f"matrix is {matrix!r}; it is one of {', '.join(products)}")
    return products[matrix]


def _mean_and_error(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean over the last dimension and its standard error."""
    return values.mean(dim=-1), values.std(dim=-1) / math.sqrt(values.shape[-1])
