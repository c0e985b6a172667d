"""What evaluations keep of each example: paired errors from the files against direct computation from the models."""

import dataclasses
import json
import math

import numpy as np
import pytest

from isoloss import files
from isoloss.checkpoints.loading import load_model
from isoloss.comparison.traces import compare_traces
from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace
from isoloss.lab.evaluation import loss
from isoloss.lab.evaluation.context import language_inputs
from isoloss.lab.evaluation.evaluator import Evaluator, pending
from isoloss.lab.evaluation.loss import exact_targets as make_targets
from isoloss.lab.evaluation.measures.base import settings_of
from isoloss.lab.languages.config import PRESETS, CorpusConfig
from isoloss.lab.lookup import lookup_probe
from isoloss.lab.models.architectures import SIZES
from isoloss.lab.models.expansion import expand
from isoloss.lab.tasks import make_task
from isoloss.lab.training.train import train
from isoloss.run_config import ModelConfig, ObjectiveConfig, TrainConfig
from isoloss.runs import Run
from isoloss.statistics.comparison import paired_difference
from isoloss.studies.results import difference, measured
from isoloss.text.masking import IGNORED
from isoloss.transfer.compare import accuracy_difference
from isoloss.transfer.probe import linear_probe

CONFIG = TrainConfig(
    language=PRESETS["pcfg-laptop"][0],
    model=ModelConfig(size="d16", dropout=0.0),
    steps=60,
    batch_size=32,
    checkpoints=(30,),
    device="cpu",
)
SETTINGS = {
    "loss_sentences": 200,
    "num_sequences": 96,
    "num_train": 300,
    "num_test": 120,
    "probe_seeds": 3,
    "probe_epochs": 3,
    "seed": 7,
}
PROBE = {"seeds": 3, "epochs": 3, "seed": 7}
MEASURES = ("loss", "trace", "probe-prefix-4", "lookup-prefix-4")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("runs") / "run")
    train(run, CONFIG, CONFIG.language.build())
    evaluator = Evaluator(run, SETTINGS)
    for step, measure in pending(run, MEASURES, [30, 60], SETTINGS):
        evaluator.evaluate(measure, step)
    return run


@pytest.fixture(scope="module")
def models(run):
    return {step: load_model(str(run.checkpoint(step)), device="cpu").model for step in (30, 60)}


@pytest.fixture(scope="module")
def language():
    return CONFIG.language.build()


@pytest.fixture(scope="module")
def batches(language):
    return language_inputs(language, CONFIG.objective, num_sequences=96, seed=7).batches


def moved(run, measure, key):
    return difference(measured(run, measure, 60)[key], measured(run, measure, 30)[key])


@pytest.mark.parametrize("key", ["kl", "loss"])
def test_the_paired_error_of_the_loss_is_that_of_the_sentences(run, models, language, key):
    targets = make_targets(language, num_sentences=200, objective=CONFIG.objective, seed=7)
    later, earlier = (loss.kl_values(models[step], targets) for step in (60, 30))
    expected = paired_difference(*(loss.pretraining_loss(models[step], targets)[key] for step in (60, 30)))
    found = moved(run, "loss", key)
    assert found.value == pytest.approx(expected.value, rel=1e-9)
    assert found.stderr == pytest.approx(expected.stderr, rel=1e-5)
    assert found.samples == 200
    # by hand: one token of each sentence is masked
    assert found.stderr == pytest.approx(float((later - earlier).std()) / math.sqrt(200), rel=1e-5)


def test_the_paired_error_of_the_trace_is_that_of_a_comparison_of_the_models(run, models, batches):
    expected = compare_traces({"later": models[60], "earlier": models[30]}, batches, seed=7)
    found = moved(run, "trace", "trace")
    difference = expected.difference("trace", "later", "earlier")
    assert found.value == pytest.approx(difference.value, rel=1e-9)
    assert found.stderr == pytest.approx(difference.stderr, rel=1e-5)


def test_the_trace_is_that_of_fisher_trace(run, models, batches):
    expected = fisher_trace(models[60], batches, seed=7)
    kept = run.evaluation("trace", 60).estimates["trace"]
    assert dataclasses.replace(expected, seconds=None) == kept
    psi = measured(run, "trace", 60)["trace"].examples["influence"].astype(float)
    assert math.sqrt((psi**2).sum() / (96 * 95)) == pytest.approx(expected.stderr, rel=1e-5)


def test_the_paired_error_of_a_probe_is_that_of_its_predictions(run, models, language):
    task = make_task(language, "prefix-4", num_train=300, num_test=120, seed=7)
    results = {step: linear_probe(model, task, **PROBE) for step, model in models.items()}
    expected = accuracy_difference(results[60].correct, results[30].correct)
    found = moved(run, "probe-prefix-4", "accuracy")
    assert found.value == pytest.approx(100 * expected.value)
    assert found.stderr == pytest.approx(100 * expected.stderr)
    kept = measured(run, "probe-prefix-4", 60)["accuracy"]
    assert kept.examples["predictions"].tolist() == results[60].predictions.tolist()
    assert kept.examples["labels"].tolist() == results[60].labels.tolist()
    table = lookup_probe(language, task, **PROBE)
    against = difference(kept, measured(run, "lookup-prefix-4", 60)["accuracy"])
    assert against.stderr == pytest.approx(100 * accuracy_difference(results[60].correct, table.correct).stderr)


@pytest.mark.parametrize("scale", ["paper", "balanced", "exact"])
def test_the_trace_of_an_expanded_model_is_measured_in_the_large_one(run, models, batches, scale):
    evaluation, _ = Evaluator(run, SETTINGS).measure(f"trace-in-d64-{scale}", 60)
    expected = fisher_trace(expand(models[60], SIZES["d64"], embedding_scale=scale).model, batches, seed=7)
    trace = evaluation.estimates["trace"]
    assert trace.value == pytest.approx(expected.value)
    assert trace.details["num_parameters"] == expected.details["num_parameters"]
    assert 0 < trace.details["logits_differ_by"] < 1e-5
    assert evaluation.inputs == run.evaluation("trace", 60).inputs  # so that it is paired with the trace of a d64
    assert evaluation.settings == settings_of("trace", SETTINGS)


def test_the_minimal_trace_of_an_expanded_model_does_not_depend_on_the_scale_of_its_embeddings(run, models, batches):
    evaluation, _ = Evaluator(run, SETTINGS).measure("minimal-trace-in-d64", 60)
    minimum = evaluation.estimates["minimal-trace"]
    for scale in ("paper", "balanced"):
        large = expand(models[60], SIZES["d64"], embedding_scale=scale).model
        expected = fisher_trace(large, batches, seed=7, rescaling="minimal")
        assert (minimum.value, minimum.stderr) == pytest.approx((expected.value, expected.stderr), rel=1e-4)
    assert minimum.details["expanded_into"] == "d64"
    assert evaluation.inputs == run.evaluation("trace", 60).inputs


def test_the_larger_architecture_may_have_other_layers_and_heads(run, models, batches):
    own = {"expanded_layers": 2, "expanded_heads": 4}
    evaluation, _ = Evaluator(run, {**SETTINGS, **own}).measure("trace-in-d64-exact", 60)
    into = dataclasses.replace(SIZES["d64"], num_layers=2, num_heads=4)
    expected = fisher_trace(expand(models[60], into, embedding_scale="exact").model, batches, seed=7)
    assert evaluation.estimates["trace"].value == pytest.approx(expected.value)
    assert own.items() <= evaluation.settings.items()


def test_other_sentences_are_other_inputs(run):
    other = Evaluator(run, {**SETTINGS, "seed": 8})
    for measure in MEASURES:
        assert other.measure(measure, 60)[0].inputs != run.evaluation(measure, 60).inputs
        assert run.evaluation(measure, 60).inputs == run.evaluation(measure, 30).inputs


def test_what_is_missing_or_changed_is_measured_again_and_never_used(run):
    path = run.evaluation_path("probe-prefix-4", 60).with_suffix(".safetensors")
    kept = path.read_bytes()
    todo = [(60, "probe-prefix-4")]
    try:
        path.unlink()
        assert pending(run, MEASURES, [30, 60], SETTINGS) == todo
        with pytest.raises(IsolossError, match=r"probe-prefix-4@step-60\.safetensors is missing beside .*measure the"):
            measured(run, "probe-prefix-4", 60)
        path.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        assert pending(run, MEASURES, [30, 60], SETTINGS) == todo
        with pytest.raises(IsolossError, match="is not the file that was written with"):
            measured(run, "probe-prefix-4", 60)
        Evaluator(run, SETTINGS).evaluate("probe-prefix-4", 60)
        assert path.read_bytes() == kept
    finally:
        path.write_bytes(kept)


def test_an_evaluation_without_examples_is_measured_again(run):
    """One of a version that kept none: it can be read and shown, but a difference needs it anew."""
    path = run.evaluation_path("trace", 30)
    kept = path.read_bytes()
    document = files.read_sealed(path, "")
    del document["inputs"], document["examples"]
    try:
        files.write_json(path, document)
        assert run.evaluation("trace", 30).estimates["trace"].value > 0
        assert pending(run, MEASURES, [30, 60], SETTINGS) == [(30, "trace")]
    finally:
        path.write_bytes(kept)


def test_held_out_sequences_of_a_text_are_paired_too(tmp_path, monkeypatch, vocab, words):
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(words, size)) for size in draw.integers(20, 61, 40)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setenv("ISOLOSS_CACHE", str(tmp_path / "cache"))
    text = CorpusConfig(paths=(str(tmp_path / "text.jsonl"),), tokenizer=str(vocab), length=8, held_out=0.2)
    config = dataclasses.replace(CONFIG, language=text, objective=ObjectiveConfig(masking="fraction"))
    run, language = Run(tmp_path / "run"), text.build()
    train(run, config, language)
    for step in (30, 60):
        Evaluator(run, SETTINGS).evaluate("loss", step)
    batch = loss.held_out_batch(language, num_sequences=200, objective=config.objective, seed=7)
    checkpoints = [load_model(str(run.checkpoint(step))).model for step in (60, 30)]
    expected = paired_difference(
        *(
            loss.text_loss(model, [batch], objective=config.objective, seed=7, method="")["loss"]
            for model in checkpoints
        )
    )
    found = moved(run, "loss", "loss")
    assert (batch["labels"] != IGNORED).sum(dim=1).unique().numel() > 1
    assert found.value == pytest.approx(expected.value, rel=1e-9)
    assert found.stderr == pytest.approx(expected.stderr, rel=1e-5)
