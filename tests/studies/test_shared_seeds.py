"""Contrasts of several pairs without clusters: runs that share a seed are not independent, so errors are over seeds."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from known_claims import measured
from scipy import stats
from test_runs_compared import Known

from isoloss.lab.evaluation.external import ExternalCheckpoint
from isoloss.lab.languages.config import PCFGConfig
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.studies import Claim, Contrast, Experiment, Measurement, Scale
from isoloss.studies.answer import Comparison
from isoloss.studies.claims import Verdict, judge_claims

LANGUAGE = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8)
OTHER = dataclasses.replace(LANGUAGE, seed=LANGUAGE.seed + 1)
MEASURED = Measurement(measures=("trace",))
RATES, SEEDS = (0.5, 1, 2), (1, 2, 3, 4, 5, 6)


def trained(seed, language=LANGUAGE, **more):
    config = TrainConfig(language=language, model=ModelConfig(size="d16"), steps=10, seed=seed)
    return Experiment(config=config, measurements=(MEASURED,), **more)


def results(runs):
    """Results of runs whose trace and KL are these."""
    experiments = {name: experiment for name, (experiment, _) in runs.items()}
    last = {(name, each.last_step): runs[name][1] for name, each in experiments.items()}
    known = {key: {"trace": measured(trace), "kl": measured(kl)} for key, (trace, kl) in last.items()}
    return Known(Scale(description="", experiments=experiments), known, Path())


def answer(pairs, found, **more):
    """The answer about these pairs of runs."""
    contrast = Contrast(names=("adamw", "signum"), pairs=[tuple(found.at(run) for run in pair) for pair in pairs])
    return judged(contrast, found, **more)


def judged(contrast, found, **more):
    claim = Claim(id="flatter", statement="", direction="decrease", of=lambda _: contrast, measures={"": "trace"})
    return judge_claims([claim], found, **more)[0].answer()


def at_three_rates(seeds=SEEDS, language=lambda rate: LANGUAGE, other=lambda seed: seed, **more):
    """Two optimizers at three rates: the difference is a seed's own, with a little noise."""
    rng = np.random.default_rng(4)
    # (rates, seeds): in the trace, then in the KL
    moves = np.stack([rng.normal(-0.6, 1, len(seeds)), rng.normal(0, 0.004, len(seeds))])[:, None]
    moves = moves + [[[0.1]], [[0.0004]]] * rng.normal(size=(2, len(RATES), len(seeds)))
    runs, pairs = {}, []
    for j, seed in enumerate(seeds):
        for i, rate in enumerate(RATES):
            pair = f"adamw-{rate}-{seed}", f"signum-{rate}-{seed}"
            runs[pair[0]] = trained(seed, language(rate), group="adamw", **more), (10.0, 1.0)
            runs[pair[1]] = trained(other(seed), language(rate), group="signum", **more), (10, 1) + moves[:, i, j]
            pairs.append(pair)
    return pairs, results(runs), moves


def test_errors_are_over_the_seeds_that_pairs_share():
    pairs, found, (moves, losses) = at_three_rates()
    one = answer(pairs, found, loss_margin=0.05)
    by_seed = moves.mean(axis=0)
    assert one.difference.value == pytest.approx(by_seed.mean())
    interval = stats.t.interval(0.95, len(SEEDS) - 1, by_seed.mean(), stats.sem(by_seed))
    assert one.interval95 == pytest.approx(interval)
    assert one.p_value == pytest.approx(stats.ttest_1samp(by_seed, 0).pvalue)
    # as if all pairs were independent, it would be shown
    assert one.verdict is Verdict.NOT_SHOWN
    assert stats.ttest_1samp(moves.ravel(), 0).pvalue < 0.05
    assert "18 pairs by seed, 95 % interval over 6 seeds (t with 5 degrees of freedom)" in one.explanation
    # so are the test of equal loss and the means
    assert one.same_loss.difference.stderr == pytest.approx(stats.sem(losses.mean(axis=0)))
    assert [one.numbers[name].samples for name in ("adamw", "signum")] == [6, 6]


def test_one_pair_for_each_seed_is_as_it_was():
    pairs, found, (moves, _) = at_three_rates()
    one = answer(pairs[::3], found, loss_margin=0.05)
    assert one.p_value == pytest.approx(stats.ttest_1samp(moves[0], 0).pvalue)
    assert "paired by seed, 95 % interval over 6 seeds (t with 5 degrees of freedom)" in one.explanation


def test_runs_of_other_languages_are_independent():
    pairs, found, (moves, _) = at_three_rates(language=lambda rate: OTHER if rate == 2 else LANGUAGE)
    one = answer(pairs, found, loss_margin=0.05)
    means = [*moves[:2].mean(axis=0), *moves[2]]
    assert one.difference.stderr == pytest.approx(stats.sem(means))
    assert "over 12 independent sets of runs (t with 11" in one.explanation


def test_pairs_that_are_connected_by_a_third_are_one_cluster():
    # the pair of seeds 2 and 3 connects the first two
    pairs = [("adamw-1", "signum-2"), ("adamw-3", "signum-4"), ("adamw-2", "signum-3"), ("adamw-5", "signum-6")]
    traces = dict(zip([second for _, second in pairs], (9.0, 6.0, 3.0, 5.0), strict=True))
    runs = {run: (trained(int(run[-1])), (traces.get(run, 10.0), 1.0)) for pair in pairs for run in pair}
    for order in itertools.permutations(pairs):
        one = answer(order, results(runs))
        assert one.difference.value == pytest.approx((-4 - 5) / 2)
        assert one.difference.stderr == pytest.approx(stats.sem([-4, -5]))
        assert "over 2 independent sets of runs (t with 1" in one.explanation
    all_one = answer(pairs[:3], results(runs))
    assert (all_one.verdict, all_one.difference) == (Verdict.NOT_TESTED, None)
    assert all_one.explanation.startswith(
        "signum vs. adamw: the 3 pairs share seeds or runs, directly or through other pairs, so they count as one"
    )


def test_a_derived_checkpoint_is_of_the_runs_that_its_estimates_are_of_and_others_count_by_themselves():
    pairs, found, (moves, _) = at_three_rates()
    made = [tuple({**found.at(run), "sum": measured(0.0)} for run in pair) for pair in pairs]
    known = judged(Contrast(names=("adamw", "signum"), pairs=made), found, loss_margin=0.05)
    assert known.difference == answer(pairs, found, loss_margin=0.05).difference
    new = [tuple({key: measured(each.value) for key, each in one.items()} for one in pair) for pair in made]
    unknown = judged(Contrast(names=("adamw", "signum"), pairs=new), found, loss_margin=0.05)
    assert unknown.difference.stderr == pytest.approx(stats.sem(moves.ravel()))


def test_clusters_that_are_given_are_kept():
    pairs, found, (moves, _) = at_three_rates()
    of_runs = [tuple(found.at(run) for run in pair) for pair in pairs]
    given = Contrast(names=("adamw", "signum"), pairs=of_runs, clusters=[str(i) for i in range(18)])
    assert judged(given, found, loss_margin=0.05).difference.stderr == pytest.approx(stats.sem(moves.ravel()))


def test_a_checkpoint_without_a_seed_is_independent_of_all_but_itself():
    def external(name, seed=None):
        config = ExternalCheckpoint(checkpoint=name, data="text.txt", seed=seed)
        return Experiment(config=config, measurements=(MEASURED,))

    runs = {name: (external(name), (trace, 1.0)) for name, trace in (("a", 10.0), ("b", 9.0), ("c", 7.0), ("d", 9.5))}
    runs["e"] = external("e", seed=1), (8.0, 1.0)
    runs["f"] = external("f", seed=1), (10.0, 1.0)
    found = results(runs)
    assert answer([("a", "b"), ("d", "c")], found).difference.stderr == pytest.approx(stats.sem([-1, -2.5]))
    assert answer([("a", "b"), ("a", "c")], found).verdict is Verdict.NOT_TESTED
    three = answer([("a", "b"), ("c", "e"), ("d", "f")], found)
    assert three.difference.stderr == pytest.approx(stats.sem([-1, (1 + 0.5) / 2]))


def test_groups_are_compared_over_the_same_seeds_whatever_their_blocks():
    _, found, (moves, _) = at_three_rates()
    for name, experiment in found.experiments.items():
        block = RATES.index(float(name.split("-")[1]))
        found.experiments[name] = dataclasses.replace(experiment, block=block)
    comparison = Comparison(found)
    assert comparison.difference("trace", "adamw", "signum").stderr == pytest.approx(stats.sem(moves.mean(axis=0)))
    assert comparison.over("adamw", "signum") == "over 6 seeds, paired"
