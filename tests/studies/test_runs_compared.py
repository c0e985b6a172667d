"""The answer of a study without claims: its groups of runs compared at their last checkpoints."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from isoloss.lab.evaluation.external import ExternalCheckpoint
from isoloss.lab.languages.config import PRESETS, PCFGConfig
from isoloss.run_config import ModelConfig, OptimizerConfig, TrainConfig
from isoloss.statistics.estimate import rounded
from isoloss.statistics.significance import equivalence
from isoloss.studies import Experiment, Measurement, Scale
from isoloss.studies.answer import Comparison, below_majority, definitions, setup, task_of, title_of
from isoloss.studies.page import _with_baselines, shown
from isoloss.studies.results import CheckpointEstimate, Results, change
from known_estimates import ON, estimate

LANGUAGE = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8)
MEASURED = Measurement(measures=("loss", "trace", "minimal-trace", "probe-root"))


class Known(Results):
    """Results without runs; those of a group called `wide` have more parameters."""

    def run(self, name):
        return SimpleNamespace(result=lambda: {"num_parameters": 2000 if "wide" in name else 1000})


def results(groups, seeds=(1, 2, 3, 4)):
    """Results of some groups: of each, by key, the mean over seeds, from which seeds differ by known numbers."""
    experiments, checkpoints = {}, {}
    for number, (group, values) in enumerate(groups.items()):
        for place, seed in enumerate(seeds if isinstance(seeds, tuple) else seeds[group]):
            config = TrainConfig(language=LANGUAGE, model=ModelConfig(size="d16"), steps=10, seed=seed)
            experiments[f"{group}-{seed}"] = Experiment(config=config, measurements=(MEASURED,), group=group)
            # what a seed adds to all groups, and a little that differs
            shift = 1 + 0.1 * place + 0.002 * np.sin(3 * place + number)
            checkpoints[f"{group}-{seed}", 10] = {key: known(key, value, shift) for key, value in values.items()}
    return Known(Scale(description="", experiments=experiments), checkpoints, Path())


def known(key, value, shift):
    unit = "accuracy" if key.startswith("probe") else "nats per predicted token"
    value = value * (1 + (shift - 1) / 100 if key in ("loss", "probe-root") else shift)
    return CheckpointEstimate.of(
        dataclasses.replace(estimate(value, 0.0), unit=unit), **ON, examples={"influence": np.zeros(2, np.float32)}
    )


PLAIN = {"loss": 3.0, "trace": 80.0, "minimal-trace": 8.0, "probe-root": 0.6}


def cards(groups, **more):
    return [(card.label, card.value, card.tone) for card in Comparison(results(groups, **more)).cards()]


def test_the_flatter_of_two_of_one_loss_is_named():
    found = results({"a": PLAIN, "b": PLAIN | {"trace": 60.0, "minimal-trace": 7.0}})
    comparison = Comparison(found)
    labels = [card.label for card in comparison.cards()]
    assert labels == ["Which is flatter?", "The same loss?", "Which is better on root?"]
    flatter, loss, root = comparison.cards()
    assert (flatter.value, flatter.tone) == ("b", "good")
    # as in the rows, whichever is better
    swapped = Comparison(results({"b": PLAIN | {"trace": 60.0, "minimal-trace": 7.0}, "a": PLAIN})).cards()
    for cards_of_two, minus in ((comparison.cards(), "b minus a"), (swapped, "a minus b")):
        assert all(minus in card.detail for card in cards_of_two)
    assert loss.value.startswith("Yes: ")
    assert (root.value, root.tone) == ("No difference shown", "unclear")
    pairs = [(found.at(f"a-{seed}"), found.at(f"b-{seed}")) for seed in (1, 2, 3, 4)]
    by_hand = change(pairs, "trace")
    row = next(row for row in comparison.rows() if row.label == "trace")
    assert (row.value, (row.low, row.high)) == (by_hand.value, by_hand.ci95)
    assert row.group == "b minus a, over 4 seeds, paired"
    assert by_hand.stderr < 2  # paired by seed: unpaired, seeds alone would add 7
    assert equivalence(change(pairs, "loss"), 0.01).shown


@pytest.mark.parametrize(
    ("changed", "value", "tone"),
    [
        ({"trace": 60.0, "minimal-trace": 9.0}, "The measures disagree", "unclear"),
        ({"trace": 60.0, "minimal-trace": 7.0, "loss": 3.2}, "b, but the losses differ", "unclear"),
        ({}, "No difference shown", "unclear"),
    ],
)
def test_no_model_is_called_flatter_where_that_cannot_be_said(changed, value, tone):
    assert cards({"a": PLAIN, "b": PLAIN | changed})[0] == ("Which is flatter?", value, tone)


def test_the_loss_is_the_same_only_where_that_is_shown_of_every_group():
    groups = {name: PLAIN | {"loss": loss} for name, loss in (("a", 3.0), ("b", 3.001), ("c", 3.002))}
    found = results(groups)
    assert Comparison(found).cards()[1].tone == "good"
    # of b alone, seeds differ much
    for place, seed in enumerate((1, 2, 3, 4)):
        found.checkpoints[f"b-{seed}", 10]["loss"] = known("loss", 3.001 + 0.1 * (-1) ** place, 1 + 0.1 * place)
    loss = Comparison(found).cards()[1]
    assert (loss.label, loss.tone) == ("The same loss?", "unclear")
    assert loss.detail.startswith("b minus a; ")


def test_models_of_two_sizes_are_compared_in_loss_and_transfer_alone():
    groups = {"a": PLAIN, "wide": PLAIN | {"trace": 20.0, "minimal-trace": 2.0, "probe-root": 0.7}}
    assert cards(groups)[0] == ("Which is flatter?", "Not comparable", "unclear")
    assert cards(groups)[2] == ("Which is better on root?", "wide", "good")
    assert [row.label for row in Comparison(results(groups)).rows()] == ["loss", "probe accuracy, root"]


def test_runs_without_a_partner_are_independent():
    groups = {"a": PLAIN, "b": PLAIN | {"trace": 20.0, "minimal-trace": 2.0}}
    found = results(groups, seeds={"a": (1, 2, 3), "b": (4, 5)})
    row = next(row for row in Comparison(found).rows() if row.label == "trace")
    assert row.group == "b minus a, over 2 and 3 seeds, not paired"
    welch(row, [found.at(f"b-{seed}")["trace"].value for seed in (4, 5)],
          [found.at(f"a-{seed}")["trace"].value for seed in (1, 2, 3)])  # fmt: skip


def test_one_run_against_several_has_no_error():
    groups = {"a": PLAIN, "b": PLAIN | {"trace": 20.0, "minimal-trace": 2.0}}
    one = {"seeds": {"a": (1,), "b": (2, 3)}}
    assert Comparison(results(groups, **one)).rows() == []
    assert cards(groups, **one)[:2] == [
        ("Which is flatter?", "No difference shown", "unclear"),
        ("The same loss?", "Not known", "unclear"),
    ]


def welch(row, second, first):
    expected = stats.ttest_ind(second, first, equal_var=False)
    assert row.value == pytest.approx(np.mean(second) - np.mean(first), rel=1e-12)
    assert (row.low, row.high) == pytest.approx(tuple(expected.confidence_interval()), rel=1e-9)


def external(traces, seed_of=lambda seed: seed):
    """Results of external checkpoints; of each group, (seeds, steps) traces, and 40 sentences' part of each."""
    experiments, checkpoints = {}, {}
    sentences = np.random.default_rng(1).normal(size=(2, 40))
    for number, (group, rows) in enumerate(traces.items()):
        for (seed, step), value in np.ndenumerate(rows):
            name = f"{group}-{seed}-{step}"
            config = ExternalCheckpoint(checkpoint=name, data="text.txt", seed=seed_of(seed))
            experiments[name] = Experiment(config=config, measurements=(MEASURED,), group=group)
            influence = (sentences[0] + (number + step) * sentences[1]).astype(np.float32)
            one = CheckpointEstimate.of(
                dataclasses.replace(estimate(value, 1.0), samples=40), **ON, examples={"influence": influence}
            )
            checkpoints[name, 0] = {"trace": one}
    return Comparison(Known(Scale(description="", experiments=experiments), checkpoints, Path()))


def drawn(seeds, steps):
    """Traces of two kinds that fall over the steps, from one start for each seed."""
    noise = np.random.default_rng(0)
    start = noise.normal(1000, 200, size=(seeds, 1)) - 60 * np.arange(steps)
    return {"a": start + noise.normal(0, 5, (seeds, steps)), "b": start - 264 + noise.normal(0, 5, (seeds, steps))}


def test_every_step_of_every_seed_of_external_checkpoints_counts():
    traces = drawn(5, 12)
    (row,) = external(traces).rows()
    by_seed = (traces["b"] - traces["a"]).mean(axis=1)
    assert row.group == "b minus a, over 5 seeds, paired"
    assert row.value == pytest.approx(by_seed.mean(), rel=1e-12)
    assert row.value == pytest.approx(-264, abs=10)
    assert (row.low, row.high) == pytest.approx(stats.t.interval(0.95, 4, by_seed.mean(), stats.sem(by_seed)), rel=1e-9)


def test_external_checkpoints_without_seeds_count_each_for_itself():
    traces = drawn(5, 12)
    comparison = external(traces, seed_of=lambda seed: None)
    (row,) = comparison.rows()
    assert row.group == "b minus a, over 60 and 60 checkpoints without a seed, not paired"
    assert comparison.has_unknown_seeds
    welch(row, traces["b"].ravel(), traces["a"].ravel())


def test_steps_of_one_seed_are_averaged_and_paired_by_sentence():
    traces = drawn(1, 3)
    comparison = external(traces)
    (row,) = comparison.rows()
    # the sentences' parts are those of step 1 on average, and the groups differ by one wave
    apart = np.random.default_rng(1).normal(size=(2, 40))[1]
    error = np.sqrt(np.square(apart).sum() / (40 * 39))
    assert row.value == pytest.approx((traces["b"] - traces["a"]).mean(), rel=1e-12)
    half = stats.t.ppf(0.975, 39) * error
    assert (row.low, row.high) == pytest.approx((row.value - half, row.value + half), rel=1e-6)
    assert not comparison.has_unknown_seeds


def test_the_one_group_of_several_seeds_has_its_mean():
    traces = drawn(5, 12)
    (card,) = external({"a": traces["a"]}).cards()
    by_seed = traces["a"].mean(axis=1)
    told = rounded(by_seed.mean(), stats.sem(by_seed))
    assert (card.value, card.detail) == (f"{told} nats/token", "mean over 5 seeds")


def test_one_group_has_its_values():
    assert cards({"a": PLAIN}, seeds=(1,)) == [
        ("loss", "3 nats/token", "neutral"),
        ("trace", "80 nats/token", "neutral"),
        ("minimal trace", "8 nats/token", "neutral"),
    ]


def test_the_setup_names_the_runs_and_defines_the_words():
    told = setup(results({"a": PLAIN, "b": PLAIN}))
    assert told.startswith(
        "4 seeds each of a and b, at the end of training. The models are bert d16 (1,000 parameters), trained on a "
        "random layered grammar (levels 2, symbols per level 3, rules per symbol 3, vocab size 8). The trace"
    )
    assert "smaller trace is flatter" in told
    assert "minimum over all rescalings" in told
    assert told.endswith("Task root: the most likely symbol below the start symbol.")
    assert "majority" not in told


def test_the_setup_has_the_rates_at_which_optimizers_are_compared():
    found = results({"a": PLAIN, "b": PLAIN})
    assert "rate" not in setup(found)  # all runs have one
    for rates, told in (
        ((0.01,), "the answer may differ: adamw at 0.001; sgd at 0.01."),
        ((0.02, 0.01, 0.005), "Learning rates: adamw at 0.001; sgd at 0.005, 0.01 and 0.02."),
    ):
        for name, rate in zip([f"b-{seed}" for seed in range(1, 5)], rates * 4, strict=False):
            config = found.experiments[name].config
            config = dataclasses.replace(config, optimizer=OptimizerConfig(name="sgd", learning_rate=rate))
            found.experiments[name] = dataclasses.replace(found.experiments[name], config=config)
        assert told in setup(found)
    # the names of groups may have the rates
    for name, one in found.experiments.items():
        optimizer = one.config.optimizer
        group = f"{optimizer.name} {optimizer.learning_rate:g}"
        found.experiments[name] = dataclasses.replace(one, group=group)
    told = setup(found)
    assert told.startswith("1 to 4 seeds each of adamw 0.001, sgd 0.02, sgd 0.01 and sgd 0.005, at the end")
    assert "rates" not in told


def test_the_setup_has_the_languages_of_runs_in_words():
    found = results({"a": PLAIN})
    for name, seed in (("a-1", 3), ("a-2", 5)):
        one = found.experiments[name]
        language = dataclasses.replace(LANGUAGE, seed=seed)
        found.experiments[name] = dataclasses.replace(one, config=dataclasses.replace(one.config, language=language))
    told = setup(found)
    assert told.startswith("4 runs of a, ")
    assert "trained on 3 languages, each a random layered grammar (levels 2" in told
    for name, one in found.experiments.items():
        config = dataclasses.replace(one.config, language=PRESETS["pcfg-laptop"][0])
        found.experiments[name] = dataclasses.replace(one, config=config)
    assert f"trained on pcfg-laptop ({PRESETS['pcfg-laptop'][1]})." in setup(found)


def test_a_probe_on_the_tokens_is_a_line_beside_probes_on_as_many_sentences():
    accuracies = {"few-shot-root-50": 0.7, "few-shot-root-80": 0.8, "probe-root": 0.6, "one-hot-root": 0.55}
    found = results({"a": {"loss": 3.0} | accuracies})
    for checkpoint in found.checkpoints.values():
        for key in accuracies:
            one = dataclasses.replace(checkpoint[key], unit="accuracy", settings={"num_train": 50})
            checkpoint[key] = dataclasses.replace(one, value=0.55) if key == "one-hot-root" else one
    lines = {column.name: column.reference for column in _with_baselines(found, shown(found))}
    assert lines.pop("few-shot-root-50") == lines.pop("probe-root") == pytest.approx(55)
    assert lines == {"loss": None, "few-shot-root-80": None}
    # of two languages, say, tokens have two accuracies, and each checkpoint its own point
    other = found.checkpoints["a-1", 10]["one-hot-root"]
    found.checkpoints["a-1", 10]["one-hot-root"] = dataclasses.replace(other, value=0.5)
    columns = _with_baselines(found, shown(found))
    assert [column.reference for column in columns if column.name == "one-hot-root"] == [None]
    assert not any(column.reference for column in columns)


@pytest.mark.parametrize(
    ("key", "settings", "task", "asked", "told"),
    [
        (
            "few-shot-prefix-4-50",
            {"probe_draws": 7},
            "prefix-4",
            "the most likely symbol over the first 4 tokens",
            "mean accuracy of convex probes fitted to few sentences each, over draws of these (50 training sentences; "
            "7 draws)",
        ),
        (
            "one-hot-level-1",
            {"num_train": 50, "probe_solver": "convex"},
            "level-1",
            "the most likely first symbol on level 1 of the tree, where the root has level 0",
            "accuracy of the same probe on the tokens themselves, one-hot: what a model must beat (50 training "
            "sentences)",
        ),
        (
            "probe-prefix-2-latent",
            {"num_train": 1000},
            "prefix-2-latent",
            "the symbol or state that produced the sentence, for root, level-D, prefix-L and state-K",
            "accuracy of a linear probe on the last hidden states of all tokens, concatenated (1,000 training "
            "sentences)",
        ),
        (
            "finetune-sst2",
            {"num_train": "all", "task_data": ["sst2=moved/since"]},
            "sst2",
            "GLUE: whether a review is positive",
            "accuracy of the fine-tuned model with a linear head (all training sentences)",
        ),
    ],
)
def test_tasks_and_their_accuracies_are_defined(key, settings, task, asked, told):
    found = results({"a": {"trace": 80.0, key: 0.6}})
    for checkpoint in found.checkpoints.values():
        one = dataclasses.replace(checkpoint[key], unit="accuracy", settings=settings)
        checkpoint[key] = one
    assert task_of(key) == task
    assert f"Task {task}: {asked}." in setup(found)
    assert definitions(found) == [f"{title_of(key)}: {told}."]


def test_many_accuracies_are_not_defined_one_by_one():
    keys = [f"few-shot-root-{number}" for number in range(1, 6)]
    assert definitions(results({"a": dict.fromkeys(keys, 0.6)})) == []
    assert len(definitions(results({"a": dict.fromkeys(keys[1:], 0.6)}))) == 4


def test_the_setup_has_the_accuracy_of_the_majority_class_where_it_is_known():
    found = results({"a": PLAIN, "b": PLAIN})
    for rate, checkpoint in zip((0.54, 0.56) * 4, found.checkpoints.values(), strict=True):
        probe = checkpoint["probe-root"]
        checkpoint["probe-root"] = dataclasses.replace(probe, details=probe.details | {"majority_rate": rate})
    assert setup(found).endswith(" The majority class alone has an accuracy of 54.00 to 56.00 % (root).")
    assert below_majority(found) == []
    probe = checkpoint["probe-root"]
    checkpoint["probe-root"] = dataclasses.replace(probe, value=0.55)
    assert below_majority(found)[0].startswith("1 of 8 probes of root are less accurate than always guessing")
