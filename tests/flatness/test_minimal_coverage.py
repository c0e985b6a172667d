"""How often the 95 % intervals of the minimal trace contain the true value: simulated shares, and trained models.

Every tolerance is three standard errors of what as many runs give of an interval that is right.
"""

import functools

import numpy as np
import pytest
from rescaling_programs import Clusters, pre_norm, program_of
from tiny_language import Pool, inputs, trained

from isoloss.flatness import fisher_trace
from isoloss.flatness._rescaling.solve import cross_fit, minimize
from isoloss.statistics.comparison import paired_difference
from isoloss.statistics.estimate import student95
from isoloss.statistics.ratio import FOLDS

HEAVY, BY_PART = {"common": 0.5, "group": 0.3, "own": 1.0}, {"common": 0.05, "group": 0.1, "own": 1.0}


class Runs:
    """Values and errors of many samples of n sequences, and the true value."""

    def __init__(self, found, truth, number):
        self.values, self.errors = np.array(found).T
        self.truth, self.number, self.spread = truth, number, self.values.std(ddof=1)

    @property
    def coverage(self):
        return float(np.mean(np.abs(self.values - self.truth) <= student95(self.number - 1) * self.errors))

    @property
    def bias(self):
        """In standard deviations of the value."""
        return float((self.values.mean() - self.truth) / self.spread)

    @property
    def ratio(self):
        """Of the errors to the standard deviation of the value."""
        return float(self.errors.mean() / self.spread)

    def __str__(self):
        return f"bias {self.bias:+.2f}, error {self.ratio:.2f}, coverage {100 * self.coverage:.1f} %"

    def assert_right(self, low=0.95, high=0.95):
        runs = len(self.values)
        error = 3 * np.sqrt(0.95 * 0.05 / runs)
        assert low - error <= self.coverage <= high + error, str(self)
        assert abs(self.bias) <= 0.25 + 3 / np.sqrt(runs), str(self)


def simulated(parts, law, number, runs, *, rare=None, seed=0):
    """By what is estimated: the value, the sums in sample and cross-fitted with its error, and that of true weights.

    With `rare`, the last part of the parts have a share in so small a fraction of the sequences alone.
    """
    shares, program, _ = program_of(parts)
    solve, rng = functools.partial(minimize, **program), np.random.default_rng(seed)
    truth, clusters, folds = solve(shares), Clusters(shares, **law), np.arange(number) % FOLDS
    found = {"value": [], "in sample": [], "cross-fitted": [], "true weights": []}
    for _ in range(runs):
        drawn = clusters.draw(rng, number)
        if rare is not None:  # pairs of parts that a neuron has
            pairs = (len(shares) // 2) // 2
            seen = np.repeat(rng.random((number, pairs)) < rare, 2, axis=1)
            drawn[:, -2 * pairs - 2 : -2] *= seen / rare
        sums = np.stack([drawn[folds == fold].sum(axis=0) for fold in range(FOLDS)])
        others = number - np.bincount(folds)
        fit = cross_fit(solve, sums, (sums.sum(axis=0) - sums) / others[:, None], number)
        error = (drawn * fit.weights[folds]).sum(axis=1).std(ddof=1) / np.sqrt(number)
        by_truth = drawn @ truth.weights
        for name, value in ("value", fit.value), ("in sample", fit.in_sample), ("cross-fitted", fit.cross_fitted):
            found[name].append((value, error))
        found["true weights"].append((by_truth.mean(), by_truth.std(ddof=1) / np.sqrt(number)))
    return {name: Runs(rows, truth.value, number) for name, rows in found.items()}


def measured(kind, granularity, number, runs):
    """By what is estimated of two models of a kind, a and b, and of their difference: `Runs` over fresh samples."""
    pools = {name: Pool.of(trained(kind, seed=seed), granularity, number * runs) for seed, name in enumerate("ab")}
    truths = {f"{name} {what}": value for name, pool in pools.items() for what, value in pool.truths().items()}
    for what in "value", "without embeddings":
        truths[f"difference, {what}"] = truths[f"a {what}"] - truths[f"b {what}"]
    rows = {what: [] for what in truths}
    for samples in zip(*(pool.samples(number) for pool in pools.values()), strict=True):
        for name, (estimate, rest) in zip(pools, samples, strict=True):
            details, stderr = estimate.details, estimate.stderr
            for what, value, error in (
                ("value", estimate.value, stderr),
                ("in sample", details["in_sample"], stderr),
                ("cross-fitted", details["cross_fitted"], stderr),
                ("plain trace", details["trace"], details["trace_stderr"]),
                ("keeping features", details["keeping_features"], details["keeping_features_stderr"]),
                ("without embeddings", rest.value, rest.stderr),
                *((layer, value, estimate.by_layer_stderr[layer]) for layer, value in estimate.by_layer.items()),
            ):
                rows[f"{name} {what}"].append((value, error))
        for place, what in enumerate(("value", "without embeddings")):
            difference = paired_difference(samples[0][place], samples[1][place])
            rows[f"difference, {what}"].append((difference.value, difference.stderr))
    return {what: Runs(found, truths[what], number) for what, found in rows.items()}


def test_intervals_of_simulated_shares():
    found = simulated(pre_norm(1), BY_PART, 64, 60)
    found["value"].assert_right()
    found["true weights"].assert_right()
    assert found["in sample"].bias < found["value"].bias < found["cross-fitted"].bias


def test_intervals_of_a_trained_model():
    found = measured("llama", "tensor", 64, 30)
    parts = ["a value", "a model.norm", "a lm_head", "b lm_head"]
    for what in [*parts, "difference, value", "difference, without embeddings"]:
        found[what].assert_right(high=1)
        assert found[what].ratio == pytest.approx(1, abs=3 / np.sqrt(2 * 30))


def test_samples_are_what_fisher_trace_measures():
    model = trained("llama")
    batch, chances = inputs(causal=True)
    drawn = np.random.default_rng(1).choice(len(chances), 256, p=chances)
    fresh = [{name: value[drawn] for name, value in batch.items()}]
    estimate = fisher_trace(model, fresh, rescaling="minimal", seed=1)
    pool = Pool.of(model, "tensor", 256, seed=1)
    ((again, _),) = pool.samples(256)
    # the further probes of the last layer are as many as there is time for, so that both are not quite the same
    assert again.value == pytest.approx(estimate.value, abs=estimate.stderr)
    assert again.stderr == pytest.approx(estimate.stderr, rel=0.1)
    assert pool.truths()["value"] == pytest.approx(estimate.value, abs=4 * estimate.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("law", [BY_PART, HEAVY], ids=["by part", "heavy"])
@pytest.mark.parametrize("number", [64, 256, 2048])
@pytest.mark.parametrize(("layers", "neurons"), [(1, 1), (4, 10), (4, 120)], ids=["11 parts", "107 parts", "987 parts"])
def test_intervals_of_many_simulated_shares(layers, neurons, number, law):
    runs = 200 if number < 2048 else 100
    found = simulated(pre_norm(layers, neurons), law, number, runs)
    for what, each in found.items():
        print(f"\n{layers} layers, {neurons} neurons, {number} sequences: {what:12s} {each}", end="")
    # of numbers this skewed, the interval of a mean of 64 contains too little also where the weights are known
    low = 0.95 if number > 64 else min(0.95, found["true weights"].coverage)
    found["value"].assert_right(low=low)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "granularity", "number"),
    [
        ("bert", "neuron", 256),
        ("bert", "tensor", 256),
        ("gpt2", "head", 256),
        ("llama", "neuron", 64),
        ("llama", "head", 256),
    ],
)
def test_intervals_of_trained_models(kind, granularity, number):
    found = measured(kind, granularity, number, 200)
    for what, each in found.items():
        print(f"\n{kind} {granularity} {number}: {what:32s} {each}", end="")
    for what in "a value", "b value", "a keeping features", "a without embeddings":
        found[what].assert_right()
    for what in "difference, value", "difference, without embeddings":
        found[what].assert_right()
