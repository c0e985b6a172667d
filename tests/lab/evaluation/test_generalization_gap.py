"""The generalization gap of a model that has learned its few training sentences by heart."""

import math

import pytest
import torch

from isoloss import evaluate, pretrain
from isoloss.checkpoints.loading import load_model
from isoloss.errors import IsolossError
from isoloss.lab.languages.config import PCFGConfig
from isoloss.run_config import ModelConfig, OptimizerConfig, TrainConfig
from isoloss.seeds import derive
from isoloss.studies.results import difference, measured

LANGUAGE = PCFGConfig(levels=2, symbols_per_level=8, rules_per_symbol=8, vocab_size=16)
NUM = 48
SETTINGS = {"loss_sentences": 2048}


def config(**changes):
    fields = {
        "language": LANGUAGE,
        "model": ModelConfig(size="d32", layers=1, heads=4, dropout=0.0),
        "optimizer": OptimizerConfig(learning_rate=1e-2, weight_decay=0.0),
        "batch_size": 16,
        "steps": 400,
        "seed": 3,
    }
    return TrainConfig(**fields | changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return pretrain(tmp_path_factory.mktemp("runs") / "few", config(num_sentences=NUM))


def test_it_is_the_loss_on_unseen_sentences_minus_the_loss_on_those_trained_on(run):
    loss, found = evaluate(run.path, ["loss", "generalization-gap"], settings=SETTINGS)
    language = LANGUAGE.build()
    seen = language.sentences_at(torch.arange(NUM), seed=derive(3, "training set")).tokens
    model = load_model(run.checkpoint(400)).model.eval()
    nats = []
    for position in range(seen.shape[1]):  # every mask of every training sentence
        masked = seen.clone()
        masked[:, position] = language.mask_id
        with torch.no_grad():
            logits = model(input_ids=masked).logits[:, position]
        nats.append(torch.nn.functional.cross_entropy(logits, seen[:, position], reduction="none"))
    by_hand = float(torch.stack(nats).mean())
    training, gap = found.estimates["training-loss"], found.estimates["generalization-gap"]
    assert abs(training.value - by_hand) < 4 * training.stderr
    unseen = loss.estimates["loss"]
    assert gap.value == pytest.approx(unseen.value - training.value, abs=1e-12)
    assert gap.stderr == pytest.approx(math.hypot(unseen.stderr, training.stderr))
    assert training.num_predictions == NUM  # all sentences of the set, once each
    assert gap.value > 5 * gap.stderr


def test_the_gaps_of_two_checkpoints_are_paired(tmp_path):
    run = pretrain(tmp_path / "run", config(num_sentences=NUM, steps=60, checkpoints=(40,)))
    evaluate(run.path, ["loss", "generalization-gap"], settings={"loss_sentences": 64})
    early, late = ({**measured(run, "loss", step), **measured(run, "generalization-gap", step)} for step in (40, 60))
    of_gap, of_loss, of_training = (
        difference(late[key], early[key]) for key in ("generalization-gap", "loss", "training-loss")
    )
    assert of_gap.value == pytest.approx(of_loss.value - of_training.value)
    assert of_gap.stderr == pytest.approx(math.hypot(of_loss.stderr, of_training.stderr))


def test_a_run_without_a_training_set_has_none(tmp_path):
    endless = pretrain(tmp_path / "endless", config(steps=1))
    with pytest.raises(IsolossError, match="there is no training set: the run draws new sentences at every step"):
        evaluate(endless.path, ["generalization-gap"], settings=SETTINGS)


def test_two_runs_on_one_language_have_training_sets_of_their_own(tmp_path):
    for seed in (1, 2):
        pretrain(tmp_path / f"run-{seed}", config(num_sentences=NUM, steps=20, seed=seed))
    names = [tmp_path / "run-1", tmp_path / "run-2"]
    together = evaluate(names, ["generalization-gap"], settings={"loss_sentences": 64})
    for path in names:
        for file in (path / "evaluations").iterdir():
            file.unlink()
    alone = [evaluate(path, ["generalization-gap"], settings={"loss_sentences": 64})[0] for path in names]
    assert [each.inputs for each in together] == [each.inputs for each in alone]
    assert alone[0].inputs != alone[1].inputs
