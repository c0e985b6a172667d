"""The answer of a study without claims: its groups of runs compared at their last checkpoints."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from isoloss.lab.languages.config import PCFGConfig
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.statistics.significance import equivalence
from isoloss.studies.answer import Comparison, setup
from isoloss.studies.results import Measured, Results, change
from isoloss.studies.spec import Experiment, Measurement, Scale
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
    return Measured.of(
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
    assert loss.value.startswith("Yes: ")
    assert (root.value, root.tone) == ("No difference shown", "unclear")
    pairs = [(found.at(f"a-{seed}"), found.at(f"b-{seed}")) for seed in (1, 2, 3, 4)]
    by_hand = change(pairs, "trace")
    row = next(row for row in comparison.rows() if row.label == "trace")
    assert (row.value, (row.low, row.high), row.group) == (by_hand.value, by_hand.ci95, "b minus a")
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


def test_models_of_two_sizes_are_compared_in_loss_and_transfer_alone():
    groups = {"a": PLAIN, "wide": PLAIN | {"trace": 20.0, "minimal-trace": 2.0, "probe-root": 0.7}}
    assert cards(groups)[0] == ("Which is flatter?", "Not comparable", "unclear")
    assert cards(groups)[2] == ("Which is better on root?", "wide", "good")
    assert [row.label for row in Comparison(results(groups)).rows()] == ["loss", "probe accuracy, root"]


def test_runs_without_a_partner_have_no_paired_difference():
    groups = {"a": PLAIN, "b": PLAIN | {"trace": 20.0, "minimal-trace": 2.0}}
    apart = {"seeds": {"a": (1, 2), "b": (3, 4)}}
    assert Comparison(results(groups, **apart)).rows() == []
    assert cards(groups, **apart)[:2] == [
        ("Which is flatter?", "No difference shown", "unclear"),
        ("The same loss?", "Not known", "unclear"),
    ]


def test_one_group_has_its_values():
    assert cards({"a": PLAIN}, seeds=(1,)) == [
        ("loss", "3 nats/token", "neutral"),
        ("trace", "80 nats/token", "neutral"),
        ("minimal trace", "8 nats/token", "neutral"),
    ]


def test_the_setup_names_the_runs_and_defines_the_words():
    told = setup(results({"a": PLAIN, "b": PLAIN}))
    assert told.startswith("a, b, at the end of training.")
    assert "smaller trace is flatter" in told
    assert "minimum over all rescalings" in told
