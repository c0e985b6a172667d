"""The models of SGD, their minimizers and flows: against closed forms, null spaces, loops and autograd."""

import itertools
import math

import numpy as np
import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.paper.theory import sgd_flow as module
from isoloss.paper.theory.bartlett import EnumerableModel, curvature, softmax_model
from isoloss.paper.theory.sgd_flow import Flow, MaskedLM, Minimizers, TwoParameters, simulate

# where p is 1/2, the minimizers are the axes
PROBLEMS = [TwoParameters(0.7, 2.0), TwoParameters(0.7, 0.4), TwoParameters(0.2, -1.5), TwoParameters(0.5, 0.3)]


def numerical(problem):
    """The model of two parameters, as one with tables of log-probabilities."""

    def log_probs(theta):
        return torch.stack([theta[0] * theta[1], torch.zeros_like(theta[0])]).log_softmax(dim=0)[None]

    weights = torch.ones(1, dtype=torch.float64)
    model = EnumerableModel("two", log_probs, torch.tensor(problem.minimizer), weights)
    p = problem.probability
    return Minimizers(model, torch.tensor([[p, 1 - p]], dtype=torch.float64))


def softmax():
    model = softmax_model(seed=2)
    return Minimizers(model, model.log_probs(model.teacher).exp()), model.teacher


def masked():
    model = MaskedLM(seed=3)
    return model.minimizers, torch.tensor(model.minimizer)


@pytest.fixture(scope="module", params=[softmax, masked], ids=["softmax", "masked LM"])
def manifold(request):
    return request.param()


def loss_of(found):
    joint = found.model.weights[:, None] * found.conditionals
    return lambda theta: -(joint * found.model.log_probs(theta)).sum()


def test_bartletts_identity_gives_the_hessian(manifold):
    found, theta = manifold
    both = curvature(found.model, theta, found.conditionals)
    root = found.root(theta)
    assert both.gap < 1e-10
    assert (root.T @ root - both.hessian).norm() < 1e-10 * both.hessian.norm()
    assert float(found.trace(theta)) == pytest.approx(float(both.hessian.trace()), rel=1e-12)


def test_projection_is_on_the_null_space_of_the_hessian(manifold):
    found, theta = manifold
    hessian = curvature(found.model, theta, found.conditionals).hessian
    values, vectors = torch.linalg.eigh(hessian)
    null = vectors[:, values < 1e-10 * values[-1]]
    assert 0 < null.shape[1] == len(theta) - len(found.normals(theta))
    vector = torch.randn(len(theta), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(found.project(theta, vector), null @ (null.T @ vector), rtol=0, atol=1e-9)


def test_velocity_is_the_projected_gradient_of_the_hessians_own_trace(manifold):
    """The sum of squares is the Hessian's trace on the manifold only, so the two agree along it, not across."""
    found, theta = manifold
    hessian = torch.func.jacrev(torch.func.jacrev(loss_of(found)))
    step, basis = 1e-5, torch.eye(len(theta), dtype=torch.float64)

    def slope(direction):
        ends = [hessian(theta + sign * step * direction).trace() for sign in (1, -1)]
        return (ends[0] - ends[1]) / (2 * step)

    gradient = torch.stack([slope(direction) for direction in basis])
    torch.testing.assert_close(found.velocity(theta), -found.project(theta, gradient), rtol=0, atol=1e-6)
    assert found.velocity(theta).norm() > 0.1


def test_retraction_reaches_the_truth_and_leaves_minimizers_alone(manifold):
    found, theta = manifold
    moved = theta + 0.05 * torch.randn(len(theta), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    back = found.retract(moved)
    torch.testing.assert_close(found.model.log_probs(back).exp(), found.conditionals, rtol=0, atol=1e-11)
    assert torch.equal(found.retract(back), back)
    # the way back is across the manifold, up to the curvature of what is a small step
    way = back - moved
    assert found.project(back, way).norm() < 0.1 * way.norm()


def test_a_truth_out_of_reach_has_no_minimizer():
    def log_probs(theta):  # the logit is not negative
        return torch.stack([theta[0] ** 2, torch.zeros_like(theta[0])]).log_softmax(dim=0)[None]

    ones = torch.ones(1, dtype=torch.float64)
    model = EnumerableModel("squares", log_probs, ones, ones)
    found = Minimizers(model, torch.tensor([[0.1, 0.9]], dtype=torch.float64))
    with pytest.raises(IsolossError, match="squares: Gauss-Newton steps lead to no minimizer; the error is"):
        found.retract(ones)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_flow_is_the_closed_form_of_two_parameters(problem):
    flow = Flow(numerical(problem), torch.tensor(problem.minimizer))
    for time in (0.0, 0.013, 0.4):
        point = problem.flow(time)
        assert flow.at(time) == pytest.approx(point, rel=1e-6, abs=1e-6)
        trace = problem.trace(point[None])[0]
        reached, fall = flow.time_of(trace)
        assert reached == pytest.approx(time, abs=1e-6)
        near = [problem.trace(problem.flow(time + shift)[None])[0] for shift in (-1e-4, 1e-4)]
        assert fall == pytest.approx((near[0] - near[1]) / 2e-4, rel=1e-3)


def test_shorter_steps_change_nothing(monkeypatch):
    found, theta = masked()
    usual = Flow(found, theta).at(0.15)
    monkeypatch.setattr(module, "TOLERANCE", 1e-10)
    monkeypatch.setattr(module, "LONGEST_STEP", 0.02)
    assert Flow(found, theta).at(0.15) == pytest.approx(usual, abs=1e-6)


def test_what_the_flow_has_answered_does_not_depend_on_the_order():
    found, theta = masked()
    one, other = Flow(found, theta), Flow(found, theta)
    ahead = one.at(0.1)
    assert one.at(0.04).tolist() == other.at(0.04).tolist()
    assert other.at(0.1).tolist() == ahead.tolist()


def test_traces_beyond_the_flow_are_met_by_a_line(monkeypatch):
    monkeypatch.setattr(module, "FLAT", 0.1)
    problem = PROBLEMS[0]
    flow = Flow(numerical(problem), torch.tensor(problem.minimizer))
    start = float(problem.trace(problem.minimizer[None])[0])
    time, fall = flow.time_of(1.01 * start)
    assert time == pytest.approx(-0.01 * start / fall)
    least = 2 * problem.variance * abs(problem.logit)
    time, fall = flow.time_of(0.99 * least)
    assert time > 0.3
    assert fall <= module.FLAT * 1.2 * least


def test_a_rank_that_falls_ends_the_flow():
    def log_probs(theta):  # p = 1/2 in both contexts: the first product's hyperbola is a cross, and the flow ends at 0
        logits = torch.stack([theta[0] * theta[1], theta[2]])
        return torch.stack([logits, torch.zeros_like(logits)], dim=1).log_softmax(dim=1)

    start = torch.tensor([1.2 * module.RANK_TOLERANCE, 0.0, 0.0], dtype=torch.float64)
    half = torch.full((2, 2), 0.5, dtype=torch.float64)
    flow = Flow(Minimizers(EnumerableModel("cross", log_probs, start, half[0]), half), start)
    with pytest.raises(IsolossError, match="cross: the Hessian's rank is 2 at the start and 1 at time"):
        flow.at(3.0)


# --- the models: against loops over sentences and autograd -----------------------------------------------------------

MODELS = {
    "two parameters": lambda: PROBLEMS[0],
    "two parameters, negative": lambda: PROBLEMS[2],
    "two positions": lambda: MaskedLM(seed=1, vocab=3, length=2, width=8),
    "three positions": lambda: MaskedLM(seed=1, vocab=2, length=3, width=12),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture(scope="module", params=["two positions", "three positions"])
def masked_model(request):
    return MODELS[request.param]()


def minimizers_of(model):
    return model.minimizers if isinstance(model, MaskedLM) else numerical(model)


def slow_truth(model):
    """{masked sentence: (its probability, the probabilities of the answers)}, by summing over all sentences."""
    table = {}
    for sentence in itertools.product(range(model.vocab), repeat=model.length):
        for place in range(model.length):
            masked = (*sentence[:place], model.vocab, *sentence[place + 1 :])
            table.setdefault(masked, [0.0] * model.vocab)[sentence[place]] += model.joint[sentence] / model.length
    return {masked: (sum(joint), [value / sum(joint) for value in joint]) for masked, joint in table.items()}


def contexts_of(model):
    """Masked sentences in the model's order, read off the rows of the embedding."""
    return [tuple(int(row) - place * (model.vocab + 1) for place, row in enumerate(rows)) for rows in model.rows]


def test_contexts_and_conditionals_are_those_of_the_language(masked_model):
    truth, contexts = slow_truth(masked_model), contexts_of(masked_model)
    assert sorted(contexts) == sorted(truth)
    for context, weight, each in zip(contexts, masked_model.weights, masked_model.conditionals, strict=True):
        assert weight == pytest.approx(truth[context][0], rel=1e-13)
        assert each.tolist() == pytest.approx(truth[context][1], rel=1e-13)
    assert masked_model.weights.sum() == pytest.approx(1)


def test_log_probs_are_those_of_loops(masked_model):
    """U tanh(sum_t E[t, x_t]), token by token."""
    vocab, length, d = masked_model.vocab, masked_model.length, masked_model.width
    theta = torch.tensor(masked_model.minimizer) + 0.1
    embedding = theta[: length * (vocab + 1) * d].view(length, vocab + 1, d)
    decoder = theta[length * (vocab + 1) * d :].view(vocab, d)
    logits = [
        decoder @ torch.tanh(sum(embedding[place, token] for place, token in enumerate(context)))
        for context in contexts_of(masked_model)
    ]
    expected = torch.stack(logits).log_softmax(dim=1)
    torch.testing.assert_close(masked_model.minimizers.model.log_probs(theta), expected, rtol=0, atol=1e-13)


def test_start_is_a_minimizer_far_from_the_flattest(model):
    minimizers, theta = minimizers_of(model), torch.tensor(model.minimizer)
    found = curvature(minimizers.model, theta, minimizers.conditionals)
    assert abs(found.kl_nats) < 1e-14
    assert found.gradient_norm < 1e-11
    assert found.gap < 1e-10  # Bartlett's identity
    contexts, answers = minimizers.conditionals.shape
    assert len(minimizers.normals(theta)) == contexts * (answers - 1) < len(theta)
    fraction = 0.7 if isinstance(model, MaskedLM) else 1.0
    assert model.trace(model.flow(0.5)[None])[0] < fraction * model.trace(model.minimizer[None])[0]


def test_trace_is_the_hessians_on_the_minimizers_and_off(model):
    rng, found = np.random.default_rng(0), minimizers_of(model)
    points = model.minimizer + np.array([0.0, 0.1, 0.5])[:, None] * rng.standard_normal((3, len(model.minimizer)))
    expected = [float(curvature(found.model, torch.tensor(x), found.conditionals).hessian.trace()) for x in points]
    assert model.trace(points) == pytest.approx(np.array(expected), rel=1e-10)


def drawn(model, generator, n, batch_size):
    """The context and the distribution of the answer of each example, for n trajectories, drawn as a step draws."""
    if isinstance(model, TwoParameters):
        p = model.probability
        ways = [math.comb(batch_size, k) * p**k * (1 - p) ** (batch_size - k) for k in range(batch_size)]
        shares = [sum(draw > sum(ways[: k + 1]) for k in range(batch_size)) for draw in generator.random(n)]
        return [[(0, [1.0, 0.0])] * share + [(0, [0.0, 1.0])] * (batch_size - share) for share in shares]
    truth = [slow_truth(model)[context] for context in contexts_of(model)]
    outcomes = [(place, answer) for place in range(len(truth)) for answer in range(model.vocab)]
    chances = np.cumsum([truth[place][0] * truth[place][1][answer] for place, answer in outcomes])
    one_hot = np.eye(model.vocab).tolist()
    examples = [[outcomes[np.sum(chances <= draw)] for draw in some] for some in generator.random((n, batch_size))]
    return [[(place, one_hot[answer]) for place, answer in some] for some in examples]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("exact", [False, True], ids=["drawn answers", "exact conditionals"])
def test_steps_are_sgd_by_autograd(model, batch_size, exact):
    """Each trajectory alone, each example alone, with the same random numbers."""
    eta, steps, n, found = 0.1, 5, 3, minimizers_of(model)
    starts = model.minimizer + 0.1 * np.random.default_rng(1).standard_normal((n, len(model.minimizer)))
    before, size = starts.copy(), {"step_size": eta, "times": [steps * eta**2], "batch_size": batch_size}
    (ends,) = simulate(model, starts, **size, generator=np.random.default_rng(7), exact=exact)
    generator, theta = np.random.default_rng(7), [torch.tensor(start) for start in starts]
    for _ in range(steps):
        for which, examples in enumerate(drawn(model, generator, n, batch_size)):
            point, loss = theta[which].requires_grad_(), 0.0
            for context, answer in examples:
                target = found.conditionals[context] if exact else torch.tensor(answer, dtype=torch.float64)
                loss = loss - (target * found.model.log_probs(point)[context]).sum() / batch_size
            theta[which] = (point - eta * torch.autograd.grad(loss, point)[0]).detach()
    assert ends == pytest.approx(torch.stack(theta).numpy(), abs=1e-12)
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
    # a mean of zero: n times its squared norm has the mean tr C and the variance 2 tr C^2
    covariance = np.cov(gradients.T)
    assert n * (gradients.mean(axis=0) ** 2).sum() < expected + 4 * math.sqrt(2 * (covariance**2).sum())


def test_reached_is_the_time_of_the_flow(model):
    found = model.reached(np.stack([model.flow(0.25)] * 3))
    assert found.value == pytest.approx(0.25, abs=1e-6)
    assert found.stderr == pytest.approx(0, abs=1e-12)
    near = model.reached(np.stack([model.flow(0.24), model.flow(0.26)]))
    assert near.stderr == pytest.approx(0.01, rel=0.02)  # of times that differ by 0.02


def test_reached_is_where_gradient_flow_of_the_loss_leads():
    """Gradient descent with a small step on the loss, without noise, to its end."""
    two, start, step, generator = PROBLEMS[0], np.array([[1.7, 0.9]]), 1e-3, np.random.default_rng(0)
    (end,) = simulate(two, start, step_size=step, times=[50_000 * step**2], generator=generator, exact=True)
    assert end[0, 0] * end[0, 1] == pytest.approx(two.logit, abs=1e-9)
    time = two.reached(np.repeat(start, 2, axis=0)).value
    # Euler's steps change the difference by a share of the order of the step
    assert two.trace(two.flow(time)[None])[0] == pytest.approx(two.trace(end)[0], rel=1e-4)


@pytest.mark.parametrize(
    ("p", "start", "message"),
    [
        (1.0, 2.0, "the probability is 1.0"),
        (math.nan, 2.0, "the probability is nan"),
        (0.7, 0.0, "the start is 0.0"),
        (0.7, math.sqrt(math.log(0.7 / 0.3)), "is the flattest minimizer"),
    ],
)
def test_starts_that_are_refused(p, start, message):
    with pytest.raises(IsolossError, match=message):
        TwoParameters(p, start)


def test_a_width_that_may_not_reach_the_truth_is_refused():
    with pytest.raises(IsolossError, match="the width is 5; to reach the truth in 6 contexts it must be at least 6"):
        MaskedLM(seed=0, width=5)
