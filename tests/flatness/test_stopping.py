"""What all measures have in common: influences, when they stop, and what an interruption leaves."""

import math

import numpy as np
import pytest
import torch
from dense_curvature import batch_of, windows

from isoloss.errors import IsolossError, IsolossWarning
from isoloss.flatness import (
    InterruptedEstimate,
    _measurement,
    empirical_fisher_trace,
    fisher_rao_norm,
    fisher_trace,
    hessian_trace,
    largest_eigenvalues,
    noise_sharpness,
    sam_sharpness,
    spectral_density,
    weighted_fisher_trace,
)
from isoloss.flatness._curvature import MeanLoss
from isoloss.statistics.comparison import paired_difference, paired_log_ratio

STREAMS = {
    "fisher": fisher_trace,
    "sampled labels": lambda *a, **o: fisher_trace(*a, method="paper", num_probes=2, **o),
    "empirical": empirical_fisher_trace,
    "hessian": lambda *a, **o: hessian_trace(*a, group_size=1, **o),
    "published-code": lambda *a, **o: hessian_trace(*a, method="published-code", **o),
    "fisher-rao": fisher_rao_norm,
    "weighted": weighted_fisher_trace,
    "sam": sam_sharpness,
}
BY_BATCH = ("published-code", "sam")


def moment(*args, **options):
    return spectral_density(*args, num_steps=3, **options).moment(1)


def first_eigenvalue(*args, **options):
    return largest_eigenvalues(*args, num_eigenvalues=1, **options)[0]


PROBES = {"noise": noise_sharpness, "spectrum": moment}


def stream(number, size, seed=0):
    batches = [batch_of(size, seed=100 * seed + i) for i in range(number)]
    return [{**batch, "documents": torch.arange(size) + i * size} for i, batch in enumerate(batches)]


def of_influence(estimate):
    n = estimate.samples
    return math.sqrt(float((estimate.influence**2).sum()) / (n * (n - 1)))


@pytest.fixture
def _looks_early(monkeypatch):
    monkeypatch.setattr(_measurement, "FIRST_CHECK", 8)
    monkeypatch.setattr(_measurement.Measurement, "fewest", 8)


# --- streams of batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STREAMS)
def test_the_influence_gives_the_error(name):
    found = STREAMS[name](windows(), stream(6, 5), causal=False)
    assert found.samples == (6 if name in BY_BATCH else 30)
    assert found.influence.shape == (found.samples,)
    assert found.influence.dtype == np.float64
    assert of_influence(found) == pytest.approx(found.stderr, rel=1e-9)
    # the residuals, of which the influences are made by leaving out each cluster, add up to 0
    sizes = np.array([len(labels[labels != -100]) for batch in stream(6, 5) for labels in batch["labels"]])
    residuals = found.influence * (1 if name in BY_BATCH else sizes.sum() - sizes)
    assert abs(residuals.sum()) < 1e-9 * abs(residuals).sum()


@pytest.mark.usefixtures("_looks_early")
@pytest.mark.parametrize("name", ["fisher", "hessian", "sam"])
def test_it_stops_as_asked(name):
    size = 1 if name in BY_BATCH else 4
    model, batches, seen = windows(), stream(20 // size, size), []
    measure = STREAMS[name]
    few = measure(model, batches, causal=False, num_sequences=12, progress=seen.append)
    assert (few.details["sequences"], seen[-1], few.details["ended"]) == (12, 12, "num_sequences")
    short = measure(model, batches, causal=False, seconds=1e-9)
    assert (short.samples, short.details["ended"]) == (8, "seconds")
    whole = measure(model, batches, causal=False)
    assert (whole.samples, whole.details["ended"]) == (20, "end of the batches")
    at = {n: measure(model, batches, causal=False, num_sequences=n) for n in (8, 16)}
    relative = {n: e.stderr / abs(e.value) for n, e in at.items()}
    reached = 8 if relative[8] <= 0.999 else 16
    enough = measure(model, batches, causal=False, rtol=0.999)
    assert enough.details["ended"] == ("rtol" if relative[reached] <= 0.999 else "end of the batches")
    if enough.details["ended"] == "rtol":
        assert (enough.samples, enough.value) == (reached, at[reached].value)
    with pytest.raises(IsolossError, match=r"rtol is 2\.0; it is a fraction of the value"):
        measure(model, batches, causal=False, rtol=2.0)


def test_a_wide_rtol_leaves_an_eigenvalue_as_exact_as_none():
    straight, wide = (first_eigenvalue(windows(), stream(2, 6), causal=False, **o) for o in ({}, {"rtol": 0.3}))
    assert (wide.value, wide.stderr) == (straight.value, straight.stderr)


@pytest.mark.parametrize("name", ["fisher", "hessian", "sam"])
def test_ctrl_c_in_a_stream_leaves_an_estimate(name):
    def interrupted(batches):
        yield from batches
        raise KeyboardInterrupt

    batches = stream(3, 6)
    with pytest.raises(InterruptedEstimate) as stop:
        STREAMS[name](windows(), interrupted(batches), causal=False)
    partial, whole = stop.value.partial, STREAMS[name](windows(), batches, causal=False)
    assert (partial.value, partial.stderr) == (whole.value, whole.stderr)
    assert partial.details["ended"] == "interrupted"


# --- probes ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_looks_early")
@pytest.mark.parametrize("name", PROBES)
def test_probes_stop_as_asked(name):
    model, batches, seen = windows(), stream(2, 8), []
    measure = PROBES[name]
    found = measure(model, batches, causal=False, num_probes=5, num_sequences=9, progress=seen.append)
    assert seen == [1, 2, 3, 4, 5]
    assert (found.num_probes, found.details["sequences"], found.details["ended"]) == (5, 9, "num_probes")
    enough = measure(model, batches, causal=False, rtol=0.999)
    assert (enough.num_probes, enough.details["ended"]) == (8, "rtol")
    short = measure(model, batches, causal=False, seconds=1e-9)
    assert (short.num_probes, short.details["ended"]) == (2, "seconds")


@pytest.mark.parametrize("name", PROBES)
def test_ctrl_c_between_probes_leaves_an_estimate(name):
    def stop(done):
        if done == 3:
            raise KeyboardInterrupt

    model = windows()
    with pytest.raises(InterruptedEstimate) as raised:
        PROBES[name](model, stream(2, 6), causal=False, progress=stop)
    partial, whole = raised.value.partial, PROBES[name](model, stream(2, 6), causal=False, num_probes=3)
    assert (partial.value, partial.stderr, partial.num_probes) == (whole.value, whole.stderr, 3)
    assert partial.details["ended"] == "interrupted"


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


# --- errors against repeated draws -----------------------------------------------------------------------------------


def repeated(measure, model, *, times=40, sequences=48):
    return [measure(model, stream(1, sequences, seed=r + 1), causal=False) for r in range(times)]


def ratio_of_errors(found):
    deviation = float(np.std([e.value for e in found], ddof=1))
    return deviation / math.sqrt(sum(e.stderr**2 for e in found) / len(found))


@pytest.mark.parametrize("matrix", ["gauss-newton", "hessian"])
def test_the_eigenvalues_error_is_that_of_the_jackknife(matrix):
    batch, options = batch_of(12, seed=3), {"causal": False, "matrix": matrix, "rtol": 1e-8}
    whole, left_out = first_eigenvalue(windows(), [batch], **options), []
    for row in range(12):
        rest = torch.arange(12) != row
        left_out.append(first_eigenvalue(windows(), [{k: v[rest] for k, v in batch.items()}], **options).value)
    jackknife = math.sqrt(11 / 12 * float(np.square(np.array(left_out) - np.mean(left_out)).sum()))
    assert whole.stderr == pytest.approx(jackknife, rel=0.15)
    documents = {**batch, "documents": torch.arange(12) // 2}
    assert first_eigenvalue(windows(), [documents], **options).samples == 6


def test_a_paired_difference_of_eigenvalues_has_the_deviation_over_fresh_inputs():
    models = windows(), windows()
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.1)
    one, two = (repeated(lambda *a, **o: first_eigenvalue(*a, rtol=1e-6, **o), model) for model in models)
    assert 0.66 < ratio_of_errors(one) < 1.34  # a standard deviation over 40 repetitions is right to 11 %
    for statistic in (paired_difference, paired_log_ratio):
        found = [statistic(a, b) for a, b in zip(one, two, strict=True)]
        assert 0.66 < ratio_of_errors(found) < 1.34
    apart = math.sqrt(sum(a.stderr**2 + b.stderr**2 for a, b in zip(one, two, strict=True)) / 40)
    assert math.sqrt(sum(paired_difference(a, b).stderr ** 2 for a, b in zip(one, two, strict=True)) / 40) < 0.5 * apart


def test_a_paired_difference_of_rises_under_noise_is_on_the_safe_side():
    models = windows(), windows()
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.1)
    pairs = []
    for r in range(40):
        batches = [batch_of(24, seed=r)]
        options = {"causal": False, "relative_std": 0.3, "num_probes": 6, "seed": r}
        pairs.append(paired_difference(*(noise_sharpness(model, batches, **options) for model in models)))
    assert ratio_of_errors(pairs) < 1.32


@pytest.mark.parametrize("name", BY_BATCH)
def test_the_error_over_batches_is_that_of_their_mean(name):
    batches = stream(8, 3)
    means = [STREAMS[name](windows(), batches[:n], causal=False) for n in range(2, 9)]
    sums = np.array([0.0, *(n * mean.value for n, mean in enumerate(means, start=2))])
    rest = np.diff(sums)[1:]  # of the third batch and the others
    # two numbers follow from their mean and the error of it
    first = means[0].value + np.array([1, -1]) * means[0].stderr
    every = np.concatenate([first, rest])
    assert means[-1].stderr == pytest.approx(every.std(ddof=1) / math.sqrt(8), rel=1e-9)


def test_an_eigenvalue_says_how_many_products_ended_its_search():
    with pytest.warns(IsolossWarning, match="ended with product 4 with the matrix"):
        found = first_eigenvalue(windows(), stream(2, 6), max_iterations=4, causal=False, rtol=1e-9)
    assert found.details["ended"] == "max_iterations"
