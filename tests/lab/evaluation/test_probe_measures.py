"""Probes over all sentences, of few sentences and of projections: against loops over sentences, scipy and numpy."""

import copy
import dataclasses
import functools
import gc
import math
import weakref

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax

from isoloss.errors import IsolossError
from isoloss.lab import lookup
from isoloss.lab.evaluation.context import MeasureContext
from isoloss.lab.evaluation.evaluator import Evaluator
from isoloss.lab.evaluation.measures.base import make_measure, settings_of, used_settings
from isoloss.lab.finetuning import finetune
from isoloss.lab.languages.config import BracketsConfig, DyckConfig, PCFGConfig
from isoloss.lab.languages.exact import all_sentences
from isoloss.lab.lookup import lookup_probe
from isoloss.lab.models.make import make_model
from isoloss.lab.tasks import labeling, make_task, read_from_start, whole_task
from isoloss.lab.training.train import train
from isoloss.run_config import ModelConfig, ObjectiveConfig, TrainConfig
from isoloss.runs import Run
from isoloss.studies.results import difference, measured
from isoloss.text.masking import with_start
from isoloss.transfer import features
from isoloss.transfer.probe import linear_probe

GRAMMAR = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=5)
WHOLE = {"probe_solver": "convex", "num_test": "all", "num_train": 60}
STRENGTH = 1e-3


def context_of(language, kind="masked"):
    def read(num_sequences, seed):
        raise AssertionError("a probe reads no inputs")

    return MeasureContext(read=read, objective=ObjectiveConfig(kind=kind), language=language)


@pytest.fixture(scope="module")
def language():
    return GRAMMAR.build()


@pytest.fixture(scope="module")
def context(language):
    return context_of(language)


@pytest.fixture(scope="module")
def model(language):
    return make_model(ModelConfig(size="d16"), language, seed=0).eval()


def found(name, settings, model, context):
    return make_measure(name, settings).run(model, context)


def accuracy(name, settings, model, context):
    return found(name, settings, model, context).estimates["accuracy"]


@functools.cache
def every(language, task):
    """All sentences, and the probability of each with each label, given that there is a label."""
    asked = labeling(language, task)
    sentences, probabilities = all_sentences(language)
    if asked.scores is None:
        shares = torch.stack([asked.label(sentences) == index for index in range(len(asked.classes))], dim=1)
    else:
        shares = asked.scores(sentences)
    joint = (probabilities[:, None] * shares).numpy()
    return sentences, joint / joint.sum()


def states(model, sentences):
    return features.extract(model, sentences).double().numpy()


def scipy_probe(x, y, classes):
    """Weights, intercepts, centre and scale of the penalized regression on standardized features, in float64."""
    center = x.mean(axis=0)
    scale = np.sqrt(np.square(x - center).mean())
    z = (x - center) / scale
    present = np.unique(y)
    target = np.searchsorted(present, y)

    def objective(theta):
        w, b = theta[: -len(present)].reshape(-1, len(present)), theta[-len(present) :]
        logs = log_softmax(z @ w + b, axis=1)
        residual = np.exp(logs)
        residual[np.arange(len(y)), target] -= 1
        gradient = z.T @ residual / len(y) + STRENGTH * w
        value = -logs[np.arange(len(y)), target].mean() + STRENGTH / 2 * np.square(w).sum()
        return value, np.concatenate([gradient.ravel(), residual.mean(axis=0)])

    start = np.zeros((x.shape[1] + 1) * len(present))
    best = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 5000, "ftol": 0, "gtol": 1e-7}).x
    w, b = best[: -len(present)].reshape(-1, len(present)), best[-len(present) :]
    return lambda other: present[((other - center) / scale @ w + b).argmax(axis=1)]


def share_right(predictions, joint):
    return sum(joint[row, guess] for row, guess in enumerate(predictions))


@pytest.mark.parametrize("task", ["prefix-2", "root-latent", "level-1"])
def test_an_accuracy_over_all_sentences_is_that_of_a_loop_over_them(model, language, context, task):
    sentences, joint = every(language, task)
    drawn = make_task(language, task, num_train=60, num_test=1, seed=0)
    x = states(model, sentences)
    train_x = features.extract(model, drawn.train).double().numpy()
    predictions = scipy_probe(train_x, drawn.train_labels.numpy(), len(drawn.classes))(x)
    result = accuracy(f"probe-{task}", WHOLE, model, context)
    # the two minima are the same to 1e-6 of the objective: sentences between two classes may go either way
    assert result.value == pytest.approx(share_right(predictions, joint), abs=0.005)
    assert (result.stderr, result.samples, result.num_predictions) == (0, 0, (joint.sum(axis=1) > 0).sum())
    assert result.method == "linear probe, convex; exact over all sentences, given the training sentences"
    seen = {tuple(row) for row in drawn.train.tokens.tolist()}
    shared = sum(p.sum() for row, p in zip(sentences.tokens.tolist(), joint, strict=True) if tuple(row) in seen)
    assert result.details["overlap"] == pytest.approx(shared)
    assert result.details["majority_rate"] == pytest.approx(joint.sum(axis=0).max())
    assert result.details["bayes_accuracy"] == pytest.approx(joint.max(axis=1).sum())


def test_the_sum_over_sentences_is_that_of_the_probes_own_predictions(model, language, context):
    sentences, joint = every(language, "root-latent")
    whole = whole_task(context.language, "root-latent", context.all_sentences(), num_train=60, seed=0)
    assert torch.equal(sentences.tokens, whole.task.test.tokens)
    probe = make_measure("probe-root-latent", WHOLE)
    predictions, _ = probe._fitted(model, context, whole)
    result = probe.run(model, context).estimates["accuracy"]
    assert result.value == pytest.approx(share_right(predictions[0].tolist(), joint), abs=1e-12)


def test_sentences_without_a_label_and_of_other_lengths():
    language = DyckConfig(kinds=2, max_length=6).build()
    context, task = context_of(language), "prefix-4"
    sentences, joint = every(language, task)
    assert 0 < (joint.sum(axis=1) > 0).sum() < len(joint)
    assert len(set(sentences.lengths.tolist())) > 1
    one = accuracy(f"one-hot-{task}", WHOLE, None, context)
    drawn = make_task(language, task, num_train=60, num_test=1, seed=0)

    def one_hot(tokens):
        hot = np.zeros((len(tokens), language.max_length, language.vocab_size))
        for row, place in np.ndindex(*tokens.shape):
            if tokens[row, place] < language.vocab_size:
                hot[row, place, tokens[row, place]] = 1
        return hot.reshape(len(tokens), -1)

    tokens = sentences.tokens.numpy()
    assert np.array_equal(lookup.one_hot_features(language, drawn.train).numpy(), one_hot(drawn.train.tokens.numpy()))
    fitted = scipy_probe(one_hot(drawn.train.tokens.numpy()), drawn.train_labels.numpy(), len(drawn.classes))
    assert one.value == pytest.approx(share_right(fitted(one_hot(tokens)), joint), abs=0.005)
    assert one.num_predictions == (joint.sum(axis=1) > 0).sum()
    # with the pooling of a probe's states, the mean over the tokens that there are
    means = [
        one_hot(each.tokens.numpy()).reshape(len(each.tokens), language.max_length, -1).sum(axis=1) / n[:, None]
        for each in (drawn.train, sentences)
        for n in [each.lengths.numpy()]
    ]
    fitted = scipy_probe(means[0], drawn.train_labels.numpy(), len(drawn.classes))
    mean = accuracy(f"one-hot-{task}", {**WHOLE, "probe_pooling": "mean"}, None, context)
    assert mean.value == pytest.approx(share_right(fitted(means[1]), joint), abs=0.005)
    assert abs(mean.value - one.value) > 0.02


def test_the_draws_of_a_few_shot_probe_are_slices_of_one_stream(model, language, context):
    sentences, joint = every(language, "prefix-2")
    x = states(model, sentences)
    stream = make_task(language, "prefix-2", num_train=120, num_test=1, seed=3)
    train_x, train_y = features.extract(model, stream.train).double().numpy(), stream.train_labels.numpy()
    expected = []
    for first in (0, 40, 80):
        rows = slice(first, first + 40)
        expected.append(share_right(scipy_probe(train_x[rows], train_y[rows], 3)(x), joint))
    settings = {"num_test": "all", "probe_draws": 3, "seed": 3}
    few = found("few-shot-prefix-2-40", settings, model, context)
    result = few.estimates["accuracy"]
    assert result.details["accuracies"] == pytest.approx(expected, abs=0.005)
    assert result.value == pytest.approx(np.mean(result.details["accuracies"]))
    assert result.stderr == pytest.approx(np.std(result.details["accuracies"], ddof=1) / math.sqrt(3))
    assert (result.samples, result.details["draws"], result.details["num_train"]) == (3, 3, 40)
    assert few.arrays()["accuracy.influence"] == pytest.approx(np.array(result.details["accuracies"]) - result.value)
    same = accuracy("probe-prefix-2", {**WHOLE, **settings, "num_train": 40}, model, context)
    assert (same.value, same.stderr) == (result.value, result.stderr)
    first = accuracy("few-shot-prefix-2-40", {**settings, "probe_draws": 1}, model, context)
    assert first.value == pytest.approx(result.details["accuracies"][0], abs=1e-12)
    assert first.is_exact


def test_few_sentences_that_lack_a_class_never_predict_it_and_warn_of_nothing(model, language, context):
    for num_test in ("all", 50):
        result = found("few-shot-prefix-2-1", {"num_test": num_test, "probe_draws": 4}, model, context)
        estimate = result.estimates["accuracy"]
        assert estimate.details["absent_classes"] == [2, 2, 2, 2]
        stream = make_task(language, "prefix-2", num_train=4, num_test=1, seed=0)
        _, joint = every(language, "prefix-2")
        if num_test == "all":
            shares = joint.sum(axis=0)[stream.train_labels.numpy()]
            assert estimate.details["accuracies"] == pytest.approx(shares)
        else:
            assert (result.more["accuracy.predictions"] == stream.train_labels.numpy()[:, None]).all()


def test_a_projected_probe_is_the_probe_of_the_projected_features(model, language, context):
    sentences, joint = every(language, "prefix-2")
    x = states(model, sentences)
    drawn = make_task(language, "prefix-2", num_train=60, num_test=1, seed=0)
    train_x = features.extract(model, drawn.train).double().numpy()
    settings = {"num_test": "all", "num_train": 60, "probe_draws": 2}
    for width in (10, x.shape[1]):
        expected = []
        for draw in range(2):
            matrix = features.projection_matrix(x.shape[1], width, 0, draw).double().numpy()
            fitted = scipy_probe(train_x @ matrix, drawn.train_labels.numpy(), 3)
            expected.append(share_right(fitted(x @ matrix), joint))
        result = accuracy(f"projected-prefix-2-{width}", settings, model, context)
        assert result.details["accuracies"] == pytest.approx(expected, abs=0.005)
        assert (result.samples, result.details["projections"]) == (2, 2)
        assert result.details["given"] == "the training sentences"
    with pytest.raises(IsolossError, match="the width is 65, but the model has 64 features: choose at most that many"):
        accuracy("projected-prefix-2-65", settings, model, context)


def test_tables_are_functions_of_the_language_and_take_a_sampled_test(model, language, context):
    for how, table in (("lookup", lookup.lookup_features), ("log-lookup", lookup.log_lookup_features)):
        sampled = accuracy(f"{how}-prefix-2", {**WHOLE, "num_test": 100}, None, context)
        task = make_task(language, "prefix-2", num_train=60, num_test=100, seed=0)
        fitted = scipy_probe(table(language, task.train).double().numpy(), task.train_labels.numpy(), 3)
        guesses = fitted(table(language, task.test).double().numpy())
        assert sampled.value == pytest.approx((guesses == task.test_labels.numpy()).mean(), abs=0.02)
        whole = accuracy(f"{how}-prefix-2", WHOLE, None, context)
        sentences, joint = every(language, "prefix-2")
        x = table(language, sentences).double().numpy()
        assert whole.value == pytest.approx(share_right(fitted(x), joint), abs=0.005)


def test_tables_of_causal_models_are_of_next_tokens(language, context):
    causal = context_of(language, "causal")
    settings = {"num_train": 60, "num_test": 100, "probe_solver": "convex", "seed": 0}
    task = make_task(language, "prefix-2", num_train=60, num_test=100, seed=0)
    for how, table in (("lookup", lookup.lookup_features), ("log-lookup", lookup.log_lookup_features)):
        of_next_tokens = functools.partial(table, causal=True)
        of_next = accuracy(f"{how}-prefix-2", settings, None, causal)
        assert (
            of_next.value
            == lookup_probe(language, task, features=of_next_tokens, solver="convex", seeds=1).accuracy.value
        )
        assert of_next.value != accuracy(f"{how}-prefix-2", settings, None, context).value


@pytest.mark.parametrize("standardize", [False, True])
def test_the_look_up_table_by_raw_and_by_standardized_features_is_the_same_whatever_the_setting(standardize, context):
    settings = {**WHOLE, "probe_standardize": standardize}
    by_setting = accuracy("lookup-prefix-2", settings, None, context)
    named = {how: accuracy(f"{how}-lookup-prefix-2", settings, None, context) for how in ("raw", "standardized")}
    assert named["standardized" if standardize else "raw"].value == by_setting.value
    assert {how: each.details["standardize"] for how, each in named.items()} == {"raw": False, "standardized": True}
    assert named["raw"].value != named["standardized"].value


def test_draws_on_sampled_sentences_have_the_errors_of_both(model, language, context):
    result = found("few-shot-prefix-2-30", {"num_test": 200}, model, context)
    estimate, predictions = result.estimates["accuracy"], result.more["accuracy.predictions"]
    each = (predictions == result.more["accuracy.labels"]).mean(axis=1)
    assert predictions.shape == (5, 200)
    assert estimate.details["accuracies"] == pytest.approx(each)
    variance = each.mean() * (1 - each.mean()) / 200 + each.var(ddof=1) / 5
    assert estimate.stderr == pytest.approx(math.sqrt(variance))
    assert (estimate.details["draws"], "seeds" in estimate.details) == (5, False)


def test_adamw_and_fine_tuning_over_all_sentences(model, language, context):
    settings = {"num_test": "all", "num_train": 60, "probe_seeds": 3, "probe_epochs": 3}
    _, joint = every(language, "prefix-2")
    data = whole_task(context.language, "prefix-2", context.all_sentences(), num_train=60, seed=0).task
    predictions = finetune(model, data, seeds=2, epochs=1, warmup_steps=1).predictions
    shares = [share_right(row, joint) for row in predictions.tolist()]
    tuning = {"finetune_seeds": 2, "finetune_epochs": 1, "finetune_warmup_steps": 1}
    tuned = accuracy("finetune-prefix-2", {**settings, **tuning}, model, context)
    assert tuned.details["accuracies"] == pytest.approx(shares)
    assert (tuned.samples, tuned.details["seeds"]) == (2, 2)
    probes = accuracy("probe-prefix-2", settings, model, context)
    assert probes.stderr == pytest.approx(np.std(probes.details["accuracies"], ddof=1) / math.sqrt(3))
    assert probes.details["clusters"] == "seeds"
    single = accuracy("probe-prefix-2", {**settings, "probe_seeds": 1}, model, context)
    assert single.value == pytest.approx(probes.details["accuracies"][0], abs=1e-9)
    assert single.details["given"] == "the training sentences and the seed"


def test_a_causal_model_reads_the_start(language):
    model = make_model(ModelConfig(architecture="opt", size="d16"), language, seed=0).eval()
    context = context_of(language, "causal")
    sentences, joint = every(language, "prefix-2")
    task = read_from_start(make_task(language, "prefix-2", num_train=60, num_test=1, seed=0), language)
    train_x = features.extract(model, task.train).double().numpy()
    x = states(model, with_start(sentences, language))
    expected = share_right(scipy_probe(train_x, task.train_labels.numpy(), 3)(x), joint)
    assert accuracy("probe-prefix-2", WHOLE, model, context).value == pytest.approx(expected, abs=0.005)


def test_a_probe_may_read_one_token_the_mean_or_another_layer(language):
    model = make_model(ModelConfig(architecture="llama", size="d16", layers=2), language, seed=0).eval()
    context = context_of(language, "causal")
    sentences, joint = every(language, "prefix-2")
    task = make_task(language, "prefix-2", num_train=60, num_test=1, seed=0)
    for pooling, layer in (("last", -1), ("mean", -1), ("last", 1)):

        def read(sentences, pooling=pooling, layer=layer):
            with torch.no_grad():
                ids = with_start(sentences, language).tokens
                states = model(input_ids=ids, output_hidden_states=True).hidden_states[layer].double().numpy()
            return states[:, -1] if pooling == "last" else states.mean(axis=1)

        assert len({*task.train.lengths.tolist()}) == 1
        probe = scipy_probe(read(task.train), task.train_labels.numpy(), 3)
        expected = share_right(probe(read(sentences)), joint)
        settings = {**WHOLE, "probe_pooling": pooling, "probe_layer": layer}
        # one after the other in one context: each has its own features
        assert accuracy("probe-prefix-2", settings, model, context).value == pytest.approx(expected, abs=0.01)
        sampled = {**settings, "num_test": 500, "probe_solver": "adamw", "probe_seeds": 2, "probe_epochs": 2}
        direct = linear_probe(
            model,
            read_from_start(make_task(language, "prefix-2", num_train=60, num_test=500, seed=0), language),
            **{"seeds": 2, "epochs": 2, "pooling": pooling, "layer": layer},
        )
        assert accuracy("probe-prefix-2", sampled, model, context).value == direct.accuracy.value
    lookup = make_measure("lookup-prefix-2", {"probe_pooling": "last", "probe_layer": 0})
    assert lookup == make_measure("lookup-prefix-2", {})


def test_the_measures_of_a_model_share_its_forward_pass_and_a_changed_model_has_its_own(language, monkeypatch):
    context, calls = context_of(language), []
    extract = features.extract
    monkeypatch.setattr(features, "extract", lambda *given, **named: calls.append(1) or extract(*given, **named))
    model = make_model(ModelConfig(size="d16"), language, seed=0).eval()
    settings = {**WHOLE, "probe_draws": 2}
    names = ("probe-prefix-2", "few-shot-root-20", "projected-root-8")
    before = [accuracy(name, settings, model, context).value for name in names]
    assert len(calls) == 1
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.add_(0.5 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    after = [accuracy(name, settings, model, context).value for name in names]
    assert len(calls) == 2
    assert after == [accuracy(name, settings, model, context_of(language)).value for name in names]
    assert all(new != old for new, old in zip(after, before, strict=True))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("runs") / "run")
    config = TrainConfig(
        language=GRAMMAR, model=ModelConfig(size="d16"), steps=20, batch_size=16, checkpoints=(10,), device="cpu"
    )
    train(run, config, config.language.build())
    return run


def test_differences_are_paired_by_draw_or_exact(run):
    evaluator = Evaluator(run, WHOLE)
    for name in ("few-shot-prefix-2-20", "projected-prefix-2-8", "probe-prefix-2"):
        both = [evaluator.evaluate(name, step).estimates["accuracy"] for step in (10, 20)]
        later, earlier = (measured(run, name, step)["accuracy"] for step in (20, 10))
        moved = difference(later, earlier)
        points = 100 * np.subtract(both[1].details["accuracies"], both[0].details["accuracies"])
        assert moved.value == pytest.approx(points.mean())
        assert moved.unit == "percentage points"
        if len(points) == 1:
            assert (moved.stderr, moved.samples, str(moved).endswith("(exact)")) == (0, 0, True)
        else:
            assert moved.stderr == pytest.approx(points.std(ddof=1) / math.sqrt(len(points)), rel=1e-5)
            assert moved.samples == len(points)
        with pytest.raises(IsolossError, match="an accuracy is compared as it is"):
            difference(later, earlier, factor=2)
        other = dataclasses.replace(earlier, inputs="others")
        with pytest.raises(IsolossError, match="not made on the same examples"):
            difference(later, other)


def test_defaults_are_recorded_as_before():
    old = {"num_train": 4096, "num_test": 4096, "probe_seeds": 5, "probe_epochs": 100, "seed": 0}
    assert settings_of("probe-root") == settings_of("lookup-root") == old
    assert settings_of("probe-root", {"probe_solver": "convex"}) == {**old, "probe_solver": "convex"}
    convex = {"num_train": 4096, "num_test": 4096, "probe_solver": "convex", "seed": 0}
    assert used_settings("probe-root", {**old, "probe_solver": "convex"}) == convex
    assert used_settings("probe-root", old) == old
    assert settings_of("few-shot-root-10", {"probe_draws": 7}) == {"num_test": 4096, "probe_draws": 7, "seed": 0}


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("probe-root", {"probe_regularization": (1.0,)}, "probe_regularization has no effect with the solver adamw"),
        ("probe-root", {"probe_draws": 2}, "probe_draws has no effect with the solver adamw"),
        ("one-hot-root", {**WHOLE, "probe_epochs": 2}, "probe_epochs has no effect with the solver convex"),
        ("probe-root", {**WHOLE, "probe_seeds": 2}, "probe_seeds has no effect with the solver convex"),
        ("probe-root", {"probe_solver": "newton"}, "probe_solver is 'newton'; it must be one of adamw, convex"),
        ("few-shot-root-9", {"probe_regularization": ()}, "probe_regularization is empty"),
        ("few-shot-root-9", {"probe_regularization": (0.0,)}, r"probe_regularization\[0\] is 0.0; it must be above 0"),
        ("few-shot-root-many", {}, "number is 'many'; it must be a whole number, at least 1"),
        ("few-shot-root-0", {}, "number is 0; it must be at least 1"),
        ("projected-root-wide", {}, "width is 'wide'; it must be a whole number, at least 1"),
        ("few-shot-TASK-NUMBER", {}, "replace TASK and NUMBER, e.g. few-shot-root-100"),
        ("probe-root", {"num_test": "some"}, "num_test is 'some'; it must be a whole number, at least 1, or all"),
        ("probe-root", {"num_test": 0}, "num_test is 0; it must be at least 1"),
        ("probe-root", {"num_test": 2.5}, "num_test is 2.5; it must be a whole number, at least 1, or all"),
    ],
)
def test_settings_that_cannot_be_are_refused(name, settings, sentence):
    with pytest.raises(IsolossError, match=sentence):
        make_measure(name, settings)


def test_languages_that_cannot_be_enumerated_are_refused():
    wide = context_of(PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=17).build())
    assert "too many sentences to enumerate" in make_measure("probe-root", WHOLE).why_not_applicable(wide)
    brackets = context_of(BracketsConfig(length=4).build())
    reason = make_measure("probe-mismatch", WHOLE).why_not_applicable(brackets)
    assert reason == "num_test is all, but the task mismatch has sentences of its own: give num_test as a number"


def test_an_exact_rescaling_moves_a_few_shot_probe_but_not_the_invariant_one(context, language):
    settings = {"num_test": "all", "probe_draws": 3, "probe_regularization": (1e-2,)}
    model = make_model(ModelConfig(size="d16"), language, seed=0).eval()
    with torch.no_grad():
        # the last norm's gain, which the head can undo
        draws = torch.Generator().manual_seed(1)
        other = copy.deepcopy(model)
        norm = other.base_model.encoder.layer[-1].output.LayerNorm
        factors = torch.exp(2 * torch.randn(16, generator=draws))
        norm.weight *= factors
        norm.bias *= factors
    by_name = {
        name: [accuracy(f"{name}-prefix-2-8", settings, one, context) for one in (model, other)]
        for name in ("few-shot", "invariant-few-shot")
    }
    plain, invariant = by_name["few-shot"], by_name["invariant-few-shot"]
    assert plain[0].value != plain[1].value
    assert invariant[0].value == invariant[1].value
    assert (invariant[0].influence == invariant[1].influence).all()
    assert invariant[0].value > 0.4
