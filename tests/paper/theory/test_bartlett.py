"""Bartlett's identity: both sides against loops over every answer, at minimizers and away from them."""

import dataclasses
import math

import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.paper.theory import bartlett
from isoloss.paper.theory.bartlett import bert_model, curvature, num_points, softmax_model, study


@pytest.fixture(scope="module", params=["softmax", "bert"])
def model(request):
    return softmax_model(seed=3) if request.param == "softmax" else bert_model(seed=3, length=2)


def truth_of(model):
    return model.log_probs(model.teacher).exp().detach()


def slow_covariance(model, theta, truth):
    """E[g g^T] - E[g] E[g]^T by one backward pass for each context and answer."""
    theta = theta.clone().requires_grad_()
    second, first = torch.zeros(len(theta), len(theta), dtype=torch.float64), torch.zeros_like(theta)
    log_probs = model.log_probs(theta)
    for context, row in enumerate(log_probs):
        for answer, log_prob in enumerate(row):
            (gradient,) = torch.autograd.grad(-log_prob, theta, retain_graph=True)
            chance = model.weights[context] * truth[context, answer]
            second += chance * torch.outer(gradient, gradient)
            first += chance * gradient
    return second - torch.outer(first, first)


def loss(model, theta, truth):
    return -(model.weights[:, None] * truth * model.log_probs(theta)).sum()


def test_equal_at_a_minimizer(model):
    found = curvature(model, model.teacher, truth_of(model))
    assert found.gap < 1e-10
    assert found.trace_gap < 1e-10
    assert found.gradient_norm < 1e-12
    assert abs(found.kl_nats) < 1e-14
    assert found.fisher_trace == pytest.approx(float(found.hessian.trace()), rel=1e-12)


def test_both_sides_against_slow_references_away_from_it(model):
    truth, theta = truth_of(model), model.teacher + 0.1
    found = curvature(model, theta, truth)
    torch.testing.assert_close(found.covariance, slow_covariance(model, theta, truth), rtol=1e-10, atol=1e-12)
    hessian = torch.autograd.functional.hessian(lambda point: loss(model, point, truth), theta)
    torch.testing.assert_close(found.hessian, hessian, rtol=1e-10, atol=1e-10)
    entropy = loss(model, model.teacher, truth)
    assert found.kl_nats == pytest.approx(float(loss(model, theta, truth) - entropy), rel=1e-9)
    own = model.log_probs(theta).exp().detach()
    scores = slow_covariance(model, theta, own)  # a score has mean 0 under the model itself
    assert found.fisher_trace == pytest.approx(float(scores.trace()), rel=1e-10)
    assert found.gap > 1e-3
    assert found.trace_gap == pytest.approx(abs(float((found.covariance - found.hessian).trace())), rel=1e-12)


def test_other_conditionals_than_the_models_break_it():
    model = softmax_model(seed=0)
    truth = truth_of(model)
    assert curvature(model, model.teacher, truth.flip(0)).gap > 0.01


def test_bert_sees_every_sentence_with_every_bracket_hidden(monkeypatch):
    seen = []

    def recorded(module, values, arguments, named, original=bartlett.functional_call):
        seen.append(named["input_ids"])
        return original(module, values, arguments, named)

    monkeypatch.setattr(bartlett, "functional_call", recorded)
    model = bert_model(seed=0, length=4)
    assert model.log_probs(model.teacher).shape == (6 * 4, 4)
    assert model.weights.sum() == pytest.approx(1)
    contexts = model.log_probs(model.teacher)
    assert len({tuple(row) for row in contexts.round(decimals=9).tolist()}) == 6 * 4  # all are told apart
    assert {"".join("<>.?"[token] for token in row) for row in seen[0].tolist()} == {
        sentence[:place] + "?" + sentence[place + 1 :]
        for sentence in ("<<>>", "<><>", "<>><", "><<>", "><><", ">><<")
        for place in range(4)
    }
    assert bert_model(seed=0).teacher.equal(bert_model(seed=0).teacher)


def test_the_gap_is_the_square_root_of_the_kl():
    done = []
    found = study(length=2, directions=2, seed=1, progress=done.append)
    assert done == list(range(1, num_points(2) + 1))
    assert [statement.verdict for statement in found.statements] == ["shown"] * 4
    for name in {row.model for row in found.rows}:
        rows = [row for row in found.rows if row.model == name]
        assert rows[0].radius == 0
        assert rows[0].gap < 1e-10
        ratio = rows[2].kl_nats / rows[1].kl_nats
        assert rows[2].gap / rows[1].gap == pytest.approx(math.sqrt(ratio), rel=0.05)


@pytest.mark.parametrize(("halved", "away", "verdicts"), [(True, 0.0, ["not shown"] * 4), (False, 1e-4, ["not shown"])])
def test_what_is_wrong_is_not_shown(monkeypatch, halved, away, verdicts):
    def spoiled(model, theta, truth, original=curvature):
        found = original(model, theta + away, truth)
        return dataclasses.replace(found, covariance=found.covariance / (2 if halved else 1))

    monkeypatch.setattr(bartlett, "curvature", spoiled)
    statements = study(length=2, directions=2).statements
    assert [statement.verdict for statement in statements[: len(verdicts)]] == verdicts


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"length": 0}, "length is 0; it must be even, from 2 to 8"),
        ({"length": 3}, "length is 3; it must be even, from 2 to 8"),
        ({"length": 10}, "length is 10; it must be even, from 2 to 8"),
        ({"directions": 1}, "directions is 1; a standard error needs at least 2"),
    ],
)
def test_what_is_refused(wrong, message):
    with pytest.raises(IsolossError, match=message):
        study(**wrong)
