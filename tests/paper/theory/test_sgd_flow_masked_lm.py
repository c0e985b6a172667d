"""The tiny masked language model: its truth, its trace and its steps against loops over sentences and autograd."""

import itertools
import math

import numpy as np
import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.paper.theory.bartlett import curvature
from isoloss.paper.theory.sgd_flow import MaskedLM, simulate

SHAPES = [{"vocab": 3, "length": 2, "width": 8}, {"vocab": 2, "length": 3, "width": 12}]


@pytest.fixture(scope="module", params=SHAPES, ids=["two positions", "three positions"])
def model(request):
    return MaskedLM(seed=1, **request.param)


def slow_truth(model):
    """{masked sentence: (its probability, the probabilities of the answers)}, by summing over all sentences."""
    vocab, length = model.joint.shape[0], model.joint.ndim
    table = {}
    for sentence in itertools.product(range(vocab), repeat=length):
        for place in range(length):
            masked = (*sentence[:place], vocab, *sentence[place + 1 :])
            table.setdefault(masked, [0.0] * vocab)[sentence[place]] += model.joint[sentence] / length
    return {masked: (sum(joint), [value / sum(joint) for value in joint]) for masked, joint in table.items()}


def slow_logits(model, theta, masked):
    """U tanh(sum_t E[t, x_t]) by loops, of a tensor of parameters."""
    vocab, length, d = model.joint.shape[0], model.joint.ndim, model.width
    embedding = theta[: length * (vocab + 1) * d].view(length, vocab + 1, d)
    decoder = theta[length * (vocab + 1) * d :].view(vocab, d)
    hidden = torch.tanh(sum(embedding[place, token] for place, token in enumerate(masked)))
    return torch.stack([row @ hidden for row in decoder])


def contexts_of(model):
    """Masked sentences in the model's order, read off the rows of the embedding."""
    vocab = model.joint.shape[0]
    return [tuple(int(row) - place * (vocab + 1) for place, row in enumerate(rows)) for rows in model.rows]


def test_contexts_and_conditionals_are_those_of_the_language(model):
    truth, contexts = slow_truth(model), contexts_of(model)
    assert sorted(contexts) == sorted(truth)
    for context, weight, conditionals in zip(contexts, model.weights, model.conditionals, strict=True):
        assert weight == pytest.approx(truth[context][0], rel=1e-13)
        assert conditionals.tolist() == pytest.approx(truth[context][1], rel=1e-13)
    assert model.weights.sum() == pytest.approx(1)


def test_log_probs_are_those_of_loops(model):
    theta = torch.tensor(model.minimizer) + 0.1
    expected = torch.stack([slow_logits(model, theta, masked).log_softmax(dim=0) for masked in contexts_of(model)])
    torch.testing.assert_close(model.minimizers.model.log_probs(theta), expected, rtol=0, atol=1e-13)


def test_start_is_a_minimizer_far_from_the_flattest(model):
    theta = torch.tensor(model.minimizer)
    found = curvature(model.minimizers.model, theta, torch.tensor(model.conditionals))
    assert abs(found.kl_nats) < 1e-14
    assert found.gradient_norm < 1e-11
    assert found.gap < 1e-10  # Bartlett's identity
    rank = len(model.minimizers.normals(theta))
    assert rank == len(model.weights) * (model.joint.shape[0] - 1) < len(theta)
    assert model.trace(model.flow(0.5)[None])[0] < 0.7 * model.trace(model.minimizer[None])[0]


def test_trace_is_the_hessians_on_the_minimizers_and_off(model):
    rng = np.random.default_rng(0)
    points = model.minimizer + np.array([0.0, 0.1, 0.5])[:, None] * rng.standard_normal((3, len(model.minimizer)))
    truth = torch.tensor(model.conditionals)
    expected = [float(curvature(model.minimizers.model, torch.tensor(x), truth).hessian.trace()) for x in points]
    assert model.trace(points) == pytest.approx(np.array(expected), rel=1e-10)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("exact", [False, True], ids=["drawn answers", "exact conditionals"])
def test_steps_are_sgd_by_loops_and_autograd(model, batch_size, exact):
    """Each trajectory alone, each example alone, with the same random numbers."""
    eta, steps, n = 0.1, 5, 3
    starts = model.minimizer + 0.1 * np.random.default_rng(1).standard_normal((n, len(model.minimizer)))
    before = starts.copy()
    (found,) = simulate(
        model,
        starts,
        step_size=eta,
        times=[steps * eta**2],
        generator=np.random.default_rng(7),
        batch_size=batch_size,
        exact=exact,
    )
    truth = slow_truth(model)
    outcomes = [(masked, answer) for masked in contexts_of(model) for answer in range(model.joint.shape[0])]
    chances = [truth[masked][0] * truth[masked][1][answer] for masked, answer in outcomes]
    generator = np.random.default_rng(7)
    theta = [torch.tensor(start) for start in starts]
    for _ in range(steps):
        draws = generator.random((n, batch_size))
        for which in range(n):
            point = theta[which].requires_grad_()
            loss = 0.0
            for draw in draws[which]:
                passed = next(place for place in range(len(chances)) if draw < sum(chances[: place + 1]))
                masked, answer = outcomes[passed]
                target = (
                    truth[masked][1] if exact else [float(token == answer) for token in range(len(truth[masked][1]))]
                )
                log_probs = slow_logits(model, point, masked).log_softmax(dim=0)
                loss = loss - (torch.tensor(target, dtype=torch.float64) * log_probs).sum() / batch_size
            (gradient,) = torch.autograd.grad(loss, point)
            theta[which] = (point - eta * gradient).detach()
    assert found == pytest.approx(torch.stack(theta).numpy(), abs=1e-12)
    assert (starts == before).all()


@pytest.mark.parametrize("batch_size", [1, 2])
def test_mean_squared_step_at_a_minimizer_is_the_trace(model, batch_size):
    """Bartlett's identity by sampling: the gradient's covariance has the trace of the Hessian, over B."""
    n, eta = 20_000, 0.01
    starts = np.tile(model.minimizer, (n, 1))
    generator = np.random.default_rng(0)
    (moved,) = simulate(model, starts, step_size=eta, times=[eta**2], generator=generator, batch_size=batch_size)
    gradients = (starts - moved) / eta
    squares = (gradients**2).sum(axis=1)
    expected = model.trace(model.minimizer[None])[0] / batch_size
    assert abs(squares.mean() - expected) < 4 * squares.std() / math.sqrt(n)
    mean = gradients.mean(axis=0)
    assert (mean**2).sum() < 2 * expected / n


def test_reached_is_the_time_of_the_flow(model):
    found = model.reached(np.stack([model.flow(0.25)] * 3))
    assert found.value == pytest.approx(0.25, abs=1e-6)
    assert found.stderr == pytest.approx(0, abs=1e-12)
    near = model.reached(np.stack([model.flow(0.24), model.flow(0.26)]))
    assert near.stderr == pytest.approx(0.01, rel=0.02)  # of times that differ by 0.02


def test_a_width_that_may_not_reach_the_truth_is_refused():
    with pytest.raises(IsolossError, match="the width is 5; to reach the truth in 6 contexts it must be at least 6"):
        MaskedLM(seed=0, width=5)
