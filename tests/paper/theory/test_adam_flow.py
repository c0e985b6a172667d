"""The example of Adam on label noise: its step against torch's, its flow against a closed form, and the verdicts."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from isoloss.paper.theory.sgd_flow import Flow, MaskedLM, TwoParameters

PATH = Path(__file__).parents[3] / "examples" / "adam_flow.py"
SPEC = importlib.util.spec_from_file_location("adam_flow", PATH)
adam_flow = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(adam_flow)
TWO = TwoParameters(0.7, 2.0)


def in_adams_coordinates(model):
    return adam_flow.OnRoots(model.minimizers.model, model.minimizers.conditionals)


def test_the_flow_of_two_parameters_is_exponential():
    """R is sqrt(v) (|a| + |b|), and -M grad R takes a - b down at the rate 1 / logit(p), whatever v is."""
    for model in (TWO, TwoParameters(0.6, 1.5)):
        a, b = Flow(in_adams_coordinates(model), torch.tensor(model.minimizer)).at(0.3)
        assert a * b == pytest.approx(model.logit, rel=1e-7)
        start = model.minimizer[0] - model.minimizer[1]
        assert a - b == pytest.approx(start * math.exp(-0.3 / model.logit), rel=1e-6)


def test_the_velocity_is_the_projected_gradient_at_a_constant_preconditioner():
    """-(1/2) M grad R is -(1/4) M grad Tr(D H), D held constant; M projects along the minimizers."""
    model = MaskedLM(seed=1)
    theta, found = torch.tensor(model.minimizer), in_adams_coordinates(model)
    root = found.root(theta)
    factors = 1 / root.square().sum(dim=0).sqrt()
    gradient = torch.func.grad(lambda point: (found.root(point).square().sum(dim=0) * factors).sum())(theta)
    velocity = found.velocity(theta) / 2
    assert (root @ velocity).norm() < 1e-9 * velocity.norm()  # along the minimizers
    # what is left of it is across them, in the metric 1 / D
    _, _, rows = torch.linalg.svd(root)
    tangents = rows[len(found.normals(theta)) :]
    torch.testing.assert_close(tangents @ (velocity / factors + gradient / 4), torch.zeros(len(tangents)).double())


def test_steps_are_those_of_torchs_adam():
    adam, eta = adam_flow.Adam(TWO), 0.01
    theta = np.array([[2.0, 0.4], [1.5, 0.7]])
    points = [torch.tensor(row, requires_grad=True) for row in theta]
    optimizer = torch.optim.Adam(points, lr=eta, betas=(0.9, 1 - eta**1.5))
    squares = torch.tensor(0.21 * TWO.minimizer[::-1].copy() ** 2)
    for point in points:  # at a step so late that nothing is left of the correction for a start at 0
        state = {"step": torch.tensor(1e9), "exp_avg": torch.zeros(2).double(), "exp_avg_sq": squares.clone()}
        optimizer.state[point] = state
    generator, again = np.random.default_rng(0), np.random.default_rng(0)
    for _ in range(5):
        adam.move(theta, eta, batch_size=1, generator=generator, exact=False)
        answers = again.random(2) > 0.3
        for point, answer in zip(points, answers, strict=True):
            point.grad = torch.autograd.grad(torch.nn.functional.softplus(point.prod()) - answer * point.prod(), point)[
                0
            ]
        optimizer.step()
    assert theta == pytest.approx(torch.stack(points).detach().numpy(), abs=1e-12)


def test_two_parameters_do_not_keep_the_trace_term():
    found = adam_flow.study(TWO, step_sizes=(0.03, 0.01), time=0.5, trajectories=512)
    assert found[2].verdict == "contradicted"
