"""Which measure predicts which outcome at the same loss: by pingouin and scipy, by brute force, and by hand."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from isoloss.errors import IsolossError
from isoloss.statistics import association
from isoloss.statistics.association import associate
from isoloss.statistics.correlation import correlation
from isoloss.statistics.power import minimal_detectable_effect


def suite(seed=56, groups=6, steps=4, effect=0.3):
    """Checkpoints of runs along steps, as pingouin had them."""
    rng = np.random.default_rng(seed)
    codes, step = np.divmod(np.arange(groups * steps), steps)
    loss = np.round(3 - 0.3 * step + 0.1 * rng.standard_normal(len(codes)), 3)
    trace = np.round(np.exp(loss + 0.4 * rng.standard_normal(len(codes))), 3)
    outcome = np.round(-loss + effect * np.log(trace) + 0.3 * rng.standard_normal(len(codes)), 3)
    return {"seed": codes, "step": step, "loss": loss, "trace": trace, "acc": outcome}


def found(columns, measure="trace", outcome="acc", **options):
    """The association of one pair."""
    (one,) = associate(columns, measures=[measure], outcomes=[outcome], loss="loss", clusters="seed", **options)
    return one


def residuals(values, loss):
    design = np.column_stack([np.ones_like(loss), loss])
    return values - design @ np.linalg.lstsq(design, values, rcond=None)[0]


def test_given_the_loss_correlations_are_those_of_pingouin():
    # pingouin 0.7.0: partial_corr(frame, "x", "y", "loss", method=...) of x = log(trace)
    one = found(suite())
    assert one.pearson.value == pytest.approx(0.6888136871626472, abs=1e-12)
    assert one.spearman.value == pytest.approx(0.4896351649143127, abs=1e-12)
    assert (one.logarithms, one.given, one.observations, one.clusters) == (("trace",), ("loss",), 24, 6)
    assert one.problem == ""


def test_over_levels_the_value_has_another_error():
    columns = suite() | {"recipe": np.repeat(["a", "b", "c"], 8)}
    one = found(columns, levels="recipe")
    expected = correlation(np.log(columns["trace"]), columns["acc"], columns["recipe"], given={"loss": columns["loss"]})
    assert one.over_levels.interval95 == expected.interval95
    assert one.over_levels.value == one.pearson.value
    assert f"over 6 seeds and ({expected.interval95[0]:.2f} to {expected.interval95[1]:.2f}) over 3 recipes" in str(one)
    two = found(columns | {"recipe": np.repeat(["a", "b"], 12)}, levels="recipe")
    assert two.pearson == one.pearson
    assert two.missing["over_levels"] == "the number of clusters is 2; an error over clusters needs at least 3"


def test_kendalls_is_of_residuals_in_cells():
    columns = suite()
    one = found(columns, hyperparameters=["seed", "step"])
    x, y = (residuals(values, columns["loss"]) for values in (np.log(columns["trace"]), columns["acc"]))
    taus = {
        name: np.mean([stats.kendalltau(x[cell == c], y[cell == c])[0] for c in np.unique(cell)])
        for name, cell in (("seed", columns["step"]), ("step", columns["seed"]))
    }
    assert {name: each.value for name, each in one.kendall.by_hyperparameter.items()} == pytest.approx(taus)
    assert found(columns).kendall is None


def brute_force(columns, permutations):
    """The correlations' sizes by least squares on each permuted outcome; without a donor it is the fitted value."""
    loss, x, y = columns["loss"], np.log(columns["trace"]), columns["acc"]
    rows = [np.flatnonzero(columns["seed"] == seed) for seed in np.unique(columns["seed"])]
    rows = [own[np.argsort(columns["step"][own])] for own in rows]
    off = residuals(y, loss)
    sizes = []
    for order in permutations:
        permuted = y - off
        for own, donor in zip(rows, (rows[i] for i in order), strict=True):
            number = min(len(own), len(donor))
            permuted[own[:number]] += off[donor[:number]]
        sizes.append(abs(np.corrcoef(residuals(x, loss), residuals(permuted, loss))[0, 1]))
    return np.array(sizes)


@pytest.mark.parametrize("kept", [slice(None), [0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 11, 13, 12, 14, 15, 16]])
def test_the_p_value_is_that_of_all_permutations_of_the_clusters(kept):
    # the second time the rows are out of order and the clusters of 4, 4, 3, 4 and 1
    columns = {name: values[kept] for name, values in suite(4, groups=5, effect=0.0).items()}
    sizes = brute_force(columns, itertools.permutations(range(5)))
    p = np.mean(sizes > sizes[0] - 1e-9)
    assert 1 / 120 < p < 0.95
    one = found(columns, along="step")
    assert one.p_permutation == pytest.approx(p, abs=1e-12)
    # the effect that a paired t test of 4 pairs finds, of which the mean has this error
    error = max(math.sqrt(np.square(np.arctanh(sizes)).mean()), one.pearson.z_stderr)
    assert math.atanh(one.detectable) == pytest.approx(minimal_detectable_effect(2 * error, 4, power=0.85), rel=1e-6)


def test_of_many_clusters_permutations_are_drawn(monkeypatch):
    columns = suite(1, groups=8, effect=0.1)
    drawn = found(columns)
    assert drawn.p_permutation == found(columns).p_permutation != found(columns, seed=1).p_permutation
    monkeypatch.setattr(association, "_ALL", 8)
    exact = found(columns).p_permutation
    assert 0.02 < exact < 0.98
    assert drawn.p_permutation == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 10_000))


def test_only_measures_that_differ_by_factors_are_logarithms():
    columns = suite()
    for name in ("minimal-trace", "hessian-trace (docs)", "SAM_sharpness", "largest-eigenvalue", "empirical-fisher"):
        assert found(columns | {name: columns["trace"]}, name).logarithms == (name,)
    for name in ("int4-rise", "traceless", "probe-sst2", "int4-rise (trace)"):
        assert found(columns | {name: columns["trace"]}, name).logarithms == ()
    assert found(columns | {"trace": columns["trace"] - 10}).logarithms == ()
    assert found(columns | {"norm": columns["trace"], "trace": columns["acc"]}, "norm", "trace").logarithms == ("norm",)


def test_the_band_is_the_window_with_the_most_clusters():
    columns = {
        "seed": [0, 0, 0, 0, 1, 1, 2, 2, 3, 3],
        "loss": [1.0, 1.001, 1.002, 3.0, 1.003, 2.0, 3.004, 2.003, 3.009, 2.5],
        "rise": [1.0, 2.0, 4.0, 3.0, 3.0, 5.0, 1.0, 2.0, 7.0, 6.0],
        "acc": [3.0, 1.0, 2.0, 2.0, 5.0, 4.0, 3.0, 7.0, 7.0, 8.0],
        "step": [0, 1, 2, 3, 0, 1, 0, 1, 0, 1],
    }
    one = found(columns, "rise")
    assert one.within_band is None  # of three single checkpoints one cannot be left out
    assert one.band == "3 checkpoints with losses from 3 to 3.009"
    assert one.missing["within_band"].startswith("the correlation is 1 without the cluster")
    # from 2 to 2.5 there are three clusters, too, but three checkpoints
    assert found(columns, "rise", loss_margin=0.6).band == "4 checkpoints with losses from 2.5 to 3.009"
    wide = found(columns, "rise", loss_margin=1.1)
    rows = [3, 5, 6, 7, 8, 9]
    assert wide.band == "6 checkpoints with losses from 2 to 3.009"
    expected = stats.pearsonr([columns["rise"][i] for i in rows], [columns["acc"][i] for i in rows])[0]
    assert wide.within_band.value == pytest.approx(expected)


def test_runs_are_taken_at_one_loss_between_two_of_their_steps():
    runs = {  # losses; the last one never comes down to 2.2
        0: [3.0, 2.0, 1.8],
        1: [2.9, 2.4, 1.9],
        2: [3.2, 2.2, 2.5],  # has it at a step
        3: [2.8, 2.3, 2.1],
        4: [3.1, 2.6, 2.4],
    }
    seeds, losses = np.repeat([*runs], 3), np.concatenate([*runs.values()])
    steps = np.tile([0, 10, 30], 5)
    x, y = np.random.default_rng(0).standard_normal((2, 15))
    columns = {"seed": seeds, "loss": losses, "step": steps, "rise": x, "acc": y}
    mixed = np.random.default_rng(1).permutation(15)
    one = found({name: values[mixed] for name, values in columns.items()}, "rise", along="step")
    # all five pass 2.4 = the end of the last: at parts 3/5, 1, 4/5, 4/5, 1 of the way
    level, parts = 2.4, [(0, 0.6), (1, 0.0), (0, 0.8), (0, 0.8), (2, 0.0)]
    there = []
    for run, (i, part) in zip(runs, parts, strict=True):
        before, after = 3 * run + i, min(3 * run + i + 1, 14)
        assert losses[before] + part * (losses[after] - losses[before]) == pytest.approx(level)
        there.append([v[before] + part * (v[after] - v[before]) for v in (x, y)])
    assert one.band == "5 checkpoints at a loss of 2.4, 3 of them interpolated"
    assert one.within_band.value == pytest.approx(stats.pearsonr(*np.transpose(there))[0])
    # without steps nothing is interpolated, nor where a run has two checkpoints of one step
    assert found(columns, "rise").band.endswith("checkpoints with losses from 2.4 to 2.4")
    assert "interpolated" not in found(columns | {"step": np.zeros(15)}, "rise", along="step").band


def test_values_that_are_missing_are_left_out_by_pair():
    columns = suite()
    holes = {name: [*values] for name, values in columns.items()} | {"other": [*columns["acc"]]}
    holes["acc"][3], holes["trace"][5] = None, math.nan
    rest = {name: np.delete(values, [3, 5]) for name, values in columns.items()}
    first, second = associate(holes, measures=["trace"], outcomes=["acc", "other"], loss="loss", clusters="seed")
    assert (first.observations, second.observations) == (22, 23)
    assert (first.pearson, first.p_permutation) == (found(rest).pearson, found(rest).p_permutation)


def test_p_values_are_adjusted_for_all_pairs_and_so_is_what_could_be_shown():
    columns = suite(effect=1.0) | {"noise": np.random.default_rng(0).standard_normal(24), "none": [None] * 24}
    pairs = {"measures": ["trace", "noise", "loss"], "outcomes": ["acc", "none"], "loss": "loss", "clusters": "seed"}
    trace, empty, noise, _, *others = associate(columns, **pairs)
    assert trace.p_permutation == 1 / 720
    assert trace.p_adjusted == pytest.approx(2 / 720)
    assert noise.p_adjusted == noise.p_permutation > 0.05
    assert 1 > trace.detectable > found(columns).detectable
    assert trace.sentence().startswith("At the same loss, log trace predicts acc: r = 0.")
    # it is shown, and what could not be shown would contradict that
    assert trace.sentence().endswith(" after Holm.")
    assert noise.sentence().endswith(f"correlation that this suite could show is {noise.detectable:.2f}.")
    assert noise.sentence().startswith("At the same loss, noise is not shown to predict acc: r = ")
    assert empty.problem == "no checkpoint has a value for none"
    assert (
        others[0].sentence()
        == "Whether loss predicts acc at the same loss is not known (given loss, nothing is left of loss)."
    )
    assert all(math.isnan(each.p_adjusted) for each in (empty, *others))
    # four clusters have 24 permutations: of two pairs neither can have a p-value below 0.05
    few = {name: values[:16] for name, values in columns.items()}
    first, *_ = associate(few, **pairs)
    assert first.detectable == 1
    advice = "4 seeds are too few to test 2 pairs of measures and outcomes: test fewer pairs, or take at least 5 seeds."
    assert first.sentence().endswith(f"after Holm; {advice}")
    assert not first.shown
    one = dataclasses.replace(first, pairs=1, clusters=3).sentence()
    many = dataclasses.replace(first, pairs=500).sentence()
    two = dataclasses.replace(first, clusters=3)
    assert two.advice.endswith(": take at least 4 seeds, and 5 for all of these pairs")
    assert two.sentence(with_advice=False).endswith(" after Holm.")
    assert one.endswith("3 seeds are too few to test 1 pair of measures and outcomes: take at least 4 seeds.")
    assert many.endswith("4 seeds are too few to test 500 pairs of measures and outcomes: test fewer pairs.")


def test_what_an_interval_with_0_holds_is_not_shown():
    answers = [found(suite(seed, groups=5, effect=0.25)) for seed in range(40)]
    assert 0 < sum(each.shown for each in answers) < 40
    for each in answers:
        low, high = each.pearson.interval95
        assert (" predicts " in str(each)) == (each.p_adjusted < 0.05 and not low <= 0 <= high)


def test_what_holds_only_for_these_levels_is_not_shown():
    recipes = {"recipe": np.repeat(["a", "b", "c"], 8)}
    answers = [found(suite(seed, effect=0.7) | recipes, levels="recipe") for seed in range(20)]
    here = [each for each in answers if each.p_adjusted < 0.05 and not _holds_0(each.pearson)]
    assert 0 < sum(each.shown for each in here) < len(here)
    for each in here:
        assert each.shown == (not _holds_0(each.over_levels)) == (" predicts acc: r = " in str(each))
        assert each.shown or "is not shown to predict acc beyond these 3 recipes: r = " in str(each)


def _holds_0(found):
    low, high = found.interval95
    return low <= 0 <= high


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"seed": [0] * 12 + [1] * 12}, "the number of clusters is 2; an error over clusters needs at least 3"),
        ({"seed": [0] * 24}, "the number of clusters is 1; an error over clusters needs at least 3"),
        ({"acc": [0.5] * 24}, "acc is the same in all 24 checkpoints that have trace and acc"),
        ({"acc": [math.nan] * 24}, "no checkpoint has a value for acc"),
        ({"acc": [math.nan, 1.0] * 12, "trace": [1.0, math.nan] * 12}, "no checkpoint has a value for trace and acc"),
        ({"acc": [math.inf, 1.0] * 12}, "acc[0] is inf; all of acc must be finite"),
        ({"acc": ["good"] * 24}, "acc is not a list of numbers: could not convert string to float: 'good'"),
        ({"acc": [1.0]}, "acc has 1 values, but loss has 24"),
        ({"seed": [0, "a"] * 12}, None),
    ],
)
def test_what_is_wrong_with_a_pair_is_one_sentence(change, problem):
    columns = suite() | {"other": suite()["acc"]} | change
    bad, _ = associate(columns, measures=["trace"], outcomes=["acc", "other"], loss="loss", clusters="seed")
    if problem is not None:
        assert bad.problem.startswith(problem)
    assert bad.pearson is None
    assert f"({bad.problem})." in str(bad)


def test_a_cluster_of_one_checkpoint_counts_and_others_go_on():
    columns = {name: values[3:] for name, values in suite().items()}
    one, missing = associate(columns, measures=["trace", "trase"], outcomes=["acc"], loss="loss", clusters="seed")
    assert (one.observations, one.clusters, one.problem) == (21, 6, "")
    assert missing.problem == "there is no column 'trase'; did you mean trace?"
    with pytest.raises(IsolossError, match="loss_margin is 0"):
        found(columns, loss_margin=0)
