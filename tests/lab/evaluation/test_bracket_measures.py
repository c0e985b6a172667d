"""Probes on few strings of brackets: against ridge regressions that are fitted again without each example, in numpy."""

import numpy as np
import pytest
import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness import fisher_trace
from isoloss.lab.evaluation.context import MeasureContext
from isoloss.lab.evaluation.measures.base import make_measure
from isoloss.lab.evaluation.measures.brackets import TASKS, targets
from isoloss.lab.languages.brackets import Brackets
from isoloss.lab.languages.hidden_bracket import HiddenBracket
from isoloss.lab.models.make import make_model
from isoloss.run_config import ModelConfig, ObjectiveConfig
from isoloss.transfer.features import extract
from isoloss.transfer.ridge import STRENGTHS, leave_one_out_ridge, r_squared

LANGUAGE = HiddenBracket(4)
CONTEXT = MeasureContext(read=None, objective=ObjectiveConfig(), language=LANGUAGE)


def fitted(x, y, strength):
    """Predictions of least |y - x w - b|^2 + strength |w|^2, as least squares with a further row for each weight."""
    n, d = x.shape
    rows = np.block([[x, np.ones((n, 1))], [strength**0.5 * np.eye(d), np.zeros((d, 1))]])
    solution = np.linalg.lstsq(rows, np.concatenate([y, np.zeros(d)]), rcond=None)[0]
    return lambda new: new @ solution[:-1] + solution[-1]


def ridge(x, y, test_x):
    places = range(len(x))

    def error(strength):
        left_out = [fitted(np.delete(x, i, 0), np.delete(y, i), strength)(x[i : i + 1])[0] for i in places]
        return np.square(y - left_out).sum()

    errors = {strength: error(strength) for strength in STRENGTHS}
    allowed = min(errors.values()) + 1e-9 * np.square(y - y.mean()).sum()
    return fitted(x, y, max(strength for strength in errors if errors[strength] <= allowed))(test_x)


def test_what_the_chosen_rows_hardly_differ_in_is_not_magnified():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 16))
    x[:8] = x[0] + 0.01 * rng.normal(size=(8, 16))
    y = rng.normal(size=(64, 1))
    # y is noise: guessing by eight rows costs an R² of about -1, and fitting the hundredths costs hundreds
    assert -5 < r_squared(x, y, np.arange(8))[0] < 0


def test_the_closed_form_is_leaving_out_one_by_one():
    rng = np.random.default_rng(0)
    x, test_x = rng.normal(size=(7, 3)), rng.normal(size=(5, 3))
    y = np.stack([x @ [1.0, -2.0, 0.5] + 0.3 * rng.normal(size=7), rng.normal(size=7)], axis=1)
    expected = np.stack([ridge(x, column, test_x) for column in y.T], axis=1)
    np.testing.assert_allclose(leave_one_out_ridge(x, y, test_x), expected, rtol=1e-8)
    # the second target is noise, for which the largest strength is best; and where nothing varies there is the mean
    np.testing.assert_allclose(leave_one_out_ridge(np.ones((7, 3)), y, test_x), np.tile(y.mean(axis=0), (5, 1)))


def test_targets_are_functions_of_g():
    counts = (LANGUAGE.strings().tokens[:, :-1] == 3).sum(dim=1).numpy()
    g = counts - (4 - counts)
    np.testing.assert_array_equal(targets(LANGUAGE).T, [g, abs(g), g == 0, (-1.0) ** counts])


def test_a_model_of_zeros_is_refused_and_its_traces_are_0():
    model = make_model(ModelConfig(architecture="bracket-attention", size="m16"), LANGUAGE, seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(IsolossError, match="f is 0 in every context, so it has no cancellation"):
        make_measure("bracket-parts").run(model, CONTEXT)
    ids = LANGUAGE.contexts()
    labels = torch.full_like(ids, -100)
    labels[:, -1] = 0
    batches = [{"input_ids": ids, "labels": labels}]
    assert [fisher_trace(model, batches, rescaling=each).value for each in (None, "minimal")] == [0, 0]


@pytest.mark.parametrize(("name", "prefix"), [("bracket-probes", ""), ("bracket-tokens", "tokens-")])
def test_r2_is_the_mean_over_draws_of_numpys(name, prefix):
    model = make_model(ModelConfig(architecture="bracket-attention", size="m16"), LANGUAGE, seed=0).double().eval()
    found = make_measure(name, {"bracket_draws": 3, "seed": 5}).run(model, CONTEXT).estimates
    assert list(found) == [f"{prefix}r2-{task}-{n}" for n in (4, 8) for task in TASKS]
    features = LANGUAGE.signs().numpy()
    if not prefix:
        features = extract(model, LANGUAGE.strings(), pooling="last").double().numpy()
    features = features - features.mean(axis=0)
    features = features / np.square(features).sum(axis=1).mean() ** 0.5
    for n in (4, 8):
        for place, task in enumerate(TASKS):
            scores = []
            for draw in range(3):
                rows = torch.randperm(16, generator=seeds.generator(5, "bracket strings", n, draw))[:n].numpy()
                rest = np.setdiff1d(np.arange(16), rows)
                y = targets(LANGUAGE)[:, place]
                missed = y[rest] - ridge(features[rows], y[rows], features[rest])
                scores.append(1 - np.square(missed).sum() / np.square(y[rest] - y[rest].mean()).sum())
            one = found[f"{prefix}r2-{task}-{n}"]
            assert one.value == pytest.approx(np.mean(scores), rel=1e-8, abs=1e-10)
            assert one.stderr == pytest.approx(np.std(scores, ddof=1) / 3**0.5, rel=1e-7)
            assert one.num_predictions == 16 - n


def test_a_model_that_has_g_has_what_is_linear_in_its_neurons():
    language = HiddenBracket(6)
    model = make_model(ModelConfig(architecture="bracket-attention", size="m16"), language, seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        # two neurons, g where it is above 0 and -g where that is: |g| is their sum
        model.brackets.value.weight[0, :6], model.brackets.value.weight[1, :6] = 1, -1
    context = MeasureContext(read=None, objective=ObjectiveConfig(), language=language)
    found = make_measure("bracket-probes").run(model, context).estimates
    assert found["r2-g-32"].value > 0.999 < found["r2-abs-g-32"].value
    assert found["r2-parity-32"].value < 0.5
    assert make_measure("bracket-tokens").run(model, context).estimates["tokens-r2-abs-g-32"].value < 0


def test_other_languages_and_models_are_refused():
    other = MeasureContext(read=None, objective=ObjectiveConfig(), language=Brackets(4))
    for name in ("bracket-parts", "bracket-probes", "bracket-tokens"):
        assert (
            make_measure(name).why_not_applicable(other)
            == "it is of the language hidden-bracket (isoloss ls languages)"
        )
        assert make_measure(name).why_not_applicable(CONTEXT) is None
    bert = make_model(ModelConfig(size="d16"), LANGUAGE, seed=0).eval()
    with pytest.raises(IsolossError, match="bracket-parts is of the model bracket-attention, not of a BertForMaskedLM"):
        make_measure("bracket-parts").run(bert, CONTEXT)
    model = make_model(ModelConfig(architecture="bracket-attention"), LANGUAGE, seed=0).eval()
    found = make_measure("bracket-parts").run(model, CONTEXT).estimates
    assert all(estimate.is_exact for estimate in found.values())
    assert found["parts-trace"].value == pytest.approx(found["attention-trace"].value + found["neurons-trace"].value)
