"""The measure `features`: its Gram matrix is that of the states that a probe reads, and checkpoints have a CKA."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from isoloss.checkpoints.loading import load_model
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.context import run_context
from isoloss.lab.evaluation.evaluator import evaluate
from isoloss.lab.evaluation.input_config import InputConfig
from isoloss.lab.evaluation.measures.transfer import Features
from isoloss.lab.languages.config import CorpusConfig, DyckConfig, PCFGConfig
from isoloss.lab.languages.exact import all_sentences
from isoloss.lab.lookup import lookup_features
from isoloss.lab.models.make import make_model
from isoloss.lab.training.train import train
from isoloss.run_config import ModelConfig, ObjectiveConfig, TrainConfig
from isoloss.runs import Run
from isoloss.seeds import generator
from isoloss.studies.results import cka, difference, measured
from isoloss.text.masking import with_start
from isoloss.transfer import effective_dimension, linear_cka
from isoloss.transfer.features import extract
from isoloss.transfer.similarity import from_upper_triangle

CONFIG = TrainConfig(
    language=DyckConfig(),
    model=ModelConfig(size="d16", dropout=0.0),
    steps=30,
    batch_size=16,
    checkpoints=(10,),
    device="cpu",
)
SETTINGS = {"feature_sentences": 40, "seed": 3}
MODELS = {
    "bert": CONFIG,
    "lstm": dataclasses.replace(CONFIG, model=ModelConfig(architecture="lstm", size="h16")),
    "opt": dataclasses.replace(
        CONFIG, model=ModelConfig(architecture="opt", size="d16"), objective=ObjectiveConfig(kind="causal")
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = {}
    for name, config in MODELS.items():
        made[name] = Run(tmp_path_factory.mktemp("runs") / name)
        train(made[name], config, config.language.build())
    evaluate([run.path for run in made.values()], "features", settings=SETTINGS, device="cpu")
    return made


def found(run, step=30):
    return measured(run, "features", step)["effective-dimension"]


def centered_gram(x):
    x = x.double().numpy()
    x = x - x.mean(axis=0)
    return x @ x.T


@pytest.mark.parametrize("name", list(MODELS))
def test_the_gram_matrix_is_that_of_the_states_that_a_probe_reads(runs, name):
    run = runs[name]
    language = run.config.language.build()
    sentences = language.sample(40, generator=generator(3, "trace sentences"))
    assert sentences.lengths.unique().numel() > 1
    read = with_start(sentences, language) if name == "opt" else sentences
    states = extract(load_model(str(run.checkpoint(30)), device="cpu").model, read)
    expected = centered_gram(states)
    kept = found(run).examples["gram"]
    assert (kept.dtype, kept.shape) == (np.float32, (40 * 41 // 2,))
    np.testing.assert_allclose(from_upper_triangle(kept), expected, atol=1e-6 * np.abs(expected).max())
    estimate = found(run)
    assert estimate.value == pytest.approx(effective_dimension(expected).value, rel=1e-4)
    assert estimate.stderr == pytest.approx(effective_dimension(expected).stderr, rel=1e-3)


def test_checkpoints_and_architectures_are_compared_on_the_same_sentences(runs):
    bert = found(runs["bert"])
    assert (cka(bert, bert).value, cka(bert, bert).stderr) == (1.0, 0.0)
    for other in (found(runs["bert"], 10), found(runs["lstm"]), found(runs["opt"])):
        alike = cka(bert, other)
        expected = linear_cka(*(from_upper_triangle(one.examples["gram"]) for one in (bert, other)))
        assert (alike.value, alike.stderr) == (expected.value, expected.stderr)
        assert 0.1 < alike.value < 1
        assert alike.stderr > 0
    assert cka(bert, found(runs["bert"], 10)).value > cka(bert, found(runs["opt"])).value


def test_the_truth_is_the_look_up_table(runs):
    language = CONFIG.language.build()
    sentences = language.sample(40, generator=generator(3, "trace sentences"))
    for name in ("bert", "lstm", "opt"):
        table = lookup_features(language, sentences, causal=name == "opt")
        one = measured(runs[name], "features", 30)
        expected = linear_cka(from_upper_triangle(found(runs[name]).examples["gram"]), centered_gram(table))
        assert one["cka-truth"].value == pytest.approx(expected.value, rel=1e-9)
        assert one["cka-truth"].stderr > 0
        assert difference(one["effective-rank"], measured(runs[name], "features", 30)["effective-rank"]).value == 0


def test_over_all_sentences_the_numbers_are_exact(runs):
    language = PCFGConfig(levels=1, symbols_per_level=2, rules_per_symbol=3, vocab_size=5)
    context = run_context(dataclasses.replace(CONFIG, language=language))
    model = make_model(ModelConfig(size="d16", dropout=0.0), context.language, seed=0).eval()
    found = Features(feature_sentences="all").run(model, context)
    sentences, p = all_sentences(context.language)
    x, y = (each.double().numpy() for each in (extract(model, sentences), lookup_features(context.language, sentences)))
    covariance = np.cov(np.hstack([x, y]).T, aweights=p.numpy(), ddof=0)
    own, width = covariance[: x.shape[1], : x.shape[1]], x.shape[1]
    values = {name: each.value for name, each in found.estimates.items()}
    assert values["effective-dimension"] == pytest.approx(np.trace(own) ** 2 / (own**2).sum(), rel=1e-8)
    cross, other = covariance[:width, width:], covariance[width:, width:]
    expected = (cross**2).sum() / np.linalg.norm(own) / np.linalg.norm(other)
    assert values["cka-truth"] == pytest.approx(expected, rel=1e-8)
    assert 1 < values["effective-rank"] < len(p)
    assert not found.more
    with pytest.raises(IsolossError, match="feature_sentences is all, and the sentences cannot be enumerated"):
        evaluate(runs["bert"].path, "features", settings={"feature_sentences": "all"}, device="cpu")


def test_effective_dimensions_have_a_paired_difference(runs):
    late, early = found(runs["bert"]), found(runs["bert"], 10)
    moved = difference(late, early)
    assert moved.value == pytest.approx(late.value - early.value)
    assert 0 < moved.stderr < late.stderr + early.stderr


def test_other_sentences_and_other_measures_have_no_cka(runs, tmp_path):
    other = Run(tmp_path / "run")
    train(other, CONFIG, CONFIG.language.build())
    evaluate(other.path, ["features", "squared-norm"], settings={**SETTINGS, "seed": 4}, device="cpu")
    with pytest.raises(IsolossError, match="are not of the same sentences, so they have no CKA"):
        cka(found(runs["bert"]), found(other))
    norm = measured(other, "squared-norm", 30)["squared-norm"]
    with pytest.raises(IsolossError, match="takes two evaluations by the measure features"):
        cka(found(other), norm)


def test_text_is_read_with_nothing_masked(tmp_path, monkeypatch, vocab, words):
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(words, size)) for size in draw.integers(20, 61, 40)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setenv("ISOLOSS_CACHE", str(tmp_path / "cache"))
    text = CorpusConfig(paths=(str(tmp_path / "text.jsonl"),), tokenizer=str(vocab), length=8, held_out=0.5)
    config = dataclasses.replace(CONFIG, language=text, objective=ObjectiveConfig(masking="fraction"))
    run, language = Run(tmp_path / "run"), text.build()
    train(run, config, language)
    evaluate(run.path, "features", steps=30, settings=SETTINGS, device="cpu")
    model = load_model(str(run.checkpoint(30)), device="cpu").model
    expected = centered_gram(extract(model, language.held_out(40)))
    gram = from_upper_triangle(found(run).examples["gram"])
    np.testing.assert_allclose(gram, expected, atol=1e-6 * np.abs(expected).max())

    # the same ids as a file: masked for the loss, and not for features
    ids = language.held_out(40).tokens
    np.save(tmp_path / "ids.npy", ids.numpy())
    inputs = InputConfig(mask_id=language.mask_id)
    (evaluation,) = evaluate(
        str(run.checkpoint(30)),
        "features",
        data=tmp_path / "ids.npy",
        inputs=inputs,
        settings=SETTINGS,
        output=tmp_path / "out",
        device="cpu",
    )
    (kept,) = (tmp_path / "out").rglob("*.safetensors")
    gram = from_upper_triangle(load_file(kept)["effective-dimension.gram"])
    np.testing.assert_allclose(gram, expected, atol=1e-6 * np.abs(expected).max())
    assert evaluation.estimates["effective-dimension"].samples == 40
