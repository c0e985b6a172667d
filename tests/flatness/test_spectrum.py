"""Eigenvalues and spectral densities against dense eigendecompositions."""

import math

import numpy as np
import pytest
import torch
from dense_curvature import batch_of, bert, dense_gauss_newton, dense_hessian, windows
from flatness_measures import first_eigenvalue, stream

from isoloss import seeds
from isoloss.errors import IsolossError, IsolossWarning
from isoloss.flatness import _measurement, largest_eigenvalues, noise_sharpness, spectral_density
from isoloss.flatness._curvature import MeanLoss
from isoloss.flatness._ghost import controls
from isoloss.flatness.spectrum import Lanczos


def matrix_of(model, batches, matrix, *, causal=False):
    return (dense_hessian if matrix == "hessian" else dense_gauss_newton)(model, batches, causal=causal)


# --- Lanczos' method -------------------------------------------------------------------------------------------------


def space_of(matrix, start, steps, seed=0):
    space = Lanczos(lambda v: matrix @ v, start, seeds.generator(seed))
    for _ in range(steps):
        space.step()
    return space


def symmetric(size, seed=0):
    draw = torch.randn(size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return draw + draw.T


def test_a_complete_basis_gives_every_eigenvalue():
    matrix = symmetric(30)
    values, vectors, residuals = space_of(matrix, torch.ones(30).double(), 30).ritz()
    torch.testing.assert_close(values, torch.linalg.eigvalsh(matrix), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(30).double())
    assert float(residuals.max()) == 0


def test_residual_norms_are_those_of_the_vectors():
    matrix = symmetric(40)
    space = space_of(matrix, torch.ones(40).double(), 12)
    values, vectors, residuals = space.ritz()
    for place in range(12):
        x = space.vector(vectors[:, place])
        assert float(x.norm()) == pytest.approx(1, rel=1e-12)
        assert float((matrix @ x - values[place] * x).norm()) == pytest.approx(float(residuals[place]), abs=1e-10)


def test_an_invariant_start_and_repeated_eigenvalues_do_not_end_it():
    matrix = torch.diag(torch.tensor([5.0, 5.0, 5.0, 2.0, 2.0, 0.0], dtype=torch.float64))
    start = torch.eye(6, dtype=torch.float64)[3]
    space = space_of(matrix, start, 6)
    values, vectors, _ = space.ritz()
    torch.testing.assert_close(values, matrix.diagonal().sort().values)
    assert space.complete
    # the start vector sees nothing but its own eigenvalue
    assert float((vectors[0].square() * values).sum()) == pytest.approx(2, rel=1e-12)


def test_the_basis_stays_orthogonal_where_eigenvalues_converge():
    # without reorthogonalisation the first eigenvalue, found after a few steps, comes back as a copy
    matrix = torch.diag(torch.cat([torch.tensor([100.0]), torch.linspace(0, 1, 199)]).double())
    values, _, _ = space_of(matrix, torch.ones(200).double(), 60).ritz()
    assert int((values > 50).sum()) == 1


# --- largest eigenvalues ---------------------------------------------------------------------------------------------


def test_the_error_bounds_the_distance_to_an_eigenvalue_before_convergence():
    model, batches = bert(), [batch_of(8, seed=1)]
    truth = torch.linalg.eigvalsh(matrix_of(model, batches, "hessian"))
    for iterations in (3, 5, 8):
        with pytest.warns(IsolossWarning, match=f"ended with product {iterations} .*, before it converged"):
            found = largest_eigenvalues(
                model, batches, matrix="hessian", num_eigenvalues=3, rtol=1e-12, max_iterations=iterations, seed=1
            )
        assert not found[0].details["converged"]
        assert (found[0].details["iterations"], found[0].details["ended"]) == (iterations, "max_iterations")
        for rank, e in enumerate(found, start=1):
            assert e.value <= float(truth[-rank]) + 1e-12  # Cauchy's interlacing: too small, if anything
            distance = float((truth - e.value).abs().min())
            assert e.details["residual_norm"] > 1e-6
            assert distance <= e.details["residual_norm"] * (1 + 1e-9)
            low, high = e.ci95
            assert low < e.value < high


def test_all_eigenvalues_of_a_tiny_matrix():
    model, batches = windows(), [batch_of(6)]
    hessian = matrix_of(model, batches, "hessian")
    found = largest_eigenvalues(model, batches, causal=False, matrix="hessian", num_eigenvalues=len(hessian), rtol=1e-9)
    truth = torch.linalg.eigvalsh(hessian).flip(0)
    torch.testing.assert_close(
        torch.tensor([e.value for e in found], dtype=torch.float64), truth, rtol=1e-9, atol=1e-10
    )


def test_a_smaller_rtol_takes_more_steps_and_a_larger_one_no_fewer():
    model, batches = bert(), [batch_of(8)]
    steps = [
        largest_eigenvalues(model, batches, num_eigenvalues=2, rtol=rtol)[0].details["iterations"]
        for rtol in (0.3, 1e-3, 1e-8)
    ]
    assert steps[0] == steps[1] < steps[2]


# --- spectral density ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("matrix", ["gauss-newton", "hessian"])
def test_low_moments_are_those_of_the_probes_exactly(matrix):
    model, batches = bert(), [batch_of(6)]
    truth = matrix_of(model, batches, matrix)
    spectrum = spectral_density(model, batches, matrix=matrix, num_probes=5, num_steps=4, seed=2)
    z = torch.stack([controls.rademacher((len(truth),), torch.device("cpu"), 2, "spectrum", r) for r in range(5)])
    z = z.double()
    for power, sums in ((1, (z * (z @ truth)).sum(1)), (2, (z @ truth).square().sum(1))):
        moment = spectrum.moment(power)
        assert moment.value == pytest.approx(float(sums.mean()), rel=1e-9)
        assert moment.stderr == pytest.approx(float(sums.std()) / math.sqrt(5), rel=1e-8)
    torch.testing.assert_close(spectrum.weights.sum(dim=1), torch.ones(5).double())
    assert spectrum.num_parameters == len(truth)


def test_moments_and_density_agree_with_the_dense_spectrum():
    model, batches = windows(), [batch_of(6)]
    matrix = matrix_of(model, batches, "gauss-newton")
    truth = torch.linalg.eigvalsh(matrix)
    spectrum = spectral_density(model, batches, causal=False, num_probes=60, num_steps=12)
    for power, value in ((1, matrix.trace()), (2, matrix.square().sum())):
        moment = spectrum.moment(power)
        assert abs(moment.value - float(value)) < 4 * moment.stderr < 0.7 * float(value)
    width = 0.1
    grid = torch.linspace(float(truth.min()) - 1, float(truth.max()) + 1, 321)
    density, stderr = spectrum.density(grid, width=width)
    kernel = torch.distributions.Normal(truth, width).log_prob(grid.double()[:, None]).exp()
    # 4.5 standard errors over 60 probes, and what 12 nodes leave out of a smooth function
    assert bool(((density - kernel.mean(dim=1)).abs() <= 4.5 * stderr + 1e-3).all())
    assert float(density.sum() * (grid[1] - grid[0])) == pytest.approx(1, abs=1e-6)


def test_steps_end_at_the_number_of_parameters():
    model = windows()
    spectrum = spectral_density(model, [batch_of(4)], causal=False, num_probes=2, num_steps=500)
    assert spectrum.nodes.shape == (2, sum(p.numel() for p in model.parameters()))


def test_moments_and_widths_out_of_range_are_refused():
    spectrum = spectral_density(windows(), [batch_of(3)], causal=False, num_probes=2, num_steps=2)
    for power in (0, 4):
        with pytest.raises(IsolossError, match=f"power is {power}; it is from 1 to 3"):
            spectrum.moment(power)
    with pytest.raises(IsolossError, match="width is 0"):
        spectrum.density(torch.zeros(1), width=0)


# --- time and errors -------------------------------------------------------------------------------------------------


def test_seconds_end_the_search_for_eigenvalues_unconverged():
    options = {"num_eigenvalues": 3, "causal": False, "rtol": 1e-9}
    with pytest.warns(
        IsolossWarning, match="ended with product 3 with the matrix, before it converged: the values are"
    ):
        first, *_ = largest_eigenvalues(windows(), stream(2, 6), **options, seconds=1e-9)
    assert (first.details["iterations"], first.details["converged"], first.details["ended"]) == (3, False, "seconds")
    assert first.stderr >= first.details["residual_norm"] > 0
    whole = largest_eigenvalues(windows(), stream(2, 6), **options)[0]
    assert (whole.details["converged"], whole.details["ended"], first.value < whole.value) == (True, "rtol", True)
    every = {**options, "num_eigenvalues": whole.details["num_parameters"], "rtol": None}
    assert largest_eigenvalues(windows(), stream(2, 6), **every)[0].details["ended"] in ("rtol", "complete basis")


def test_seconds_end_a_spectrum_within_a_probe_which_is_left_out(monkeypatch):
    now, product = [0.0], MeanLoss.gauss_newton_product

    def slow(loss, vector):
        now[0] += 1.0
        return product(loss, vector)

    monkeypatch.setattr(_measurement.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(MeanLoss, "gauss_newton_product", slow)
    short = spectral_density(windows(), stream(2, 6), causal=False, num_steps=5, seconds=13.0)
    assert (short.nodes.shape, short.details["ended"], short.seconds, now[0]) == ((2, 5), "seconds", 13.0, 13.0)
    whole = spectral_density(windows(), stream(2, 6), causal=False, num_steps=5, num_probes=2)
    assert torch.equal(short.nodes, whole.nodes)
    assert (short.moment(1).value, short.moment(1).stderr) == (whole.moment(1).value, whole.moment(1).stderr)


def test_the_time_is_that_of_everything(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_measurement.time, "perf_counter", lambda: now[0])

    def slowly(method):
        def slow(loss, *arguments):
            now[0] += 1.0
            return method(loss, *arguments)

        return slow

    for name in ("by_cluster", "gauss_newton_product"):
        monkeypatch.setattr(MeanLoss, name, slowly(getattr(MeanLoss, name)))
    noise = noise_sharpness(windows(), stream(2, 6), causal=False, seconds=4.5)
    # the loss without noise, and two pairs
    assert (noise.num_probes, noise.seconds) == (2, 5.0)
    eigenvalues = largest_eigenvalues(windows(), stream(2, 6), causal=False, num_eigenvalues=2)
    # the search, and the residual of each vector
    assert {e.seconds for e in eigenvalues} == {e.details["iterations"] + 2.0 for e in eigenvalues}


def test_the_eigenvalues_error_is_that_of_the_jackknife():
    batch, options = batch_of(12, seed=3), {"causal": False, "matrix": "hessian", "rtol": 1e-8}
    whole, left_out = first_eigenvalue(windows(), [batch], **options), []
    for row in range(12):
        rest = torch.arange(12) != row
        left_out.append(first_eigenvalue(windows(), [{k: v[rest] for k, v in batch.items()}], **options).value)
    jackknife = math.sqrt(11 / 12 * float(np.square(np.array(left_out) - np.mean(left_out)).sum()))
    assert whole.stderr == pytest.approx(jackknife, rel=0.15)
    documents = {**batch, "documents": torch.arange(12) // 2}
    assert first_eigenvalue(windows(), [documents], **options).samples == 6
