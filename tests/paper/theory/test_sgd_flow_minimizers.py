"""Tangents, retraction and the flow along minimizers: against closed forms, null spaces and finite differences."""

import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.paper.theory import sgd_flow as module
from isoloss.paper.theory.bartlett import EnumerableModel, curvature, softmax_model
from isoloss.paper.theory.sgd_flow import Flow, MaskedLM, Minimizers, TwoParameters

PROBLEMS = [TwoParameters(0.7, 2.0), TwoParameters(0.7, 0.4), TwoParameters(0.2, -1.5)]


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


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
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
