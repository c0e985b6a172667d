"""Convex probes against closed forms, plain gradient descent and autograd in float64, and each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from torch.nn import functional as F

from isoloss import load_language, seeds
from isoloss.errors import IsolossError
from isoloss.lab.lookup import lookup_features
from isoloss.lab.tasks import make_task
from isoloss.transfer.logistic_regression import fit


def planted(
    n: int, width: int, classes: int, *, seed: int = 0, noise: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return features of unequal scales and means, and labels by a noisy linear rule, every class present."""
    g = seeds.generator(seed, "planted")
    x = torch.randn(n, width, generator=g) / torch.arange(1, width + 1) + torch.randn(width, generator=g)
    rule = 4 * torch.randn(width, classes, generator=g)
    y = ((x - x.mean(0)) @ rule + noise * torch.randn(n, classes, generator=g)).argmax(1)
    y[:classes] = torch.arange(classes)
    return x, y


def objective(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, strength: float
) -> torch.Tensor:
    return F.cross_entropy(x.double() @ weight + bias, y) + strength / 2 * weight.square().sum()


def descended(x: torch.Tensor, y: torch.Tensor, classes: int, strength: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the minimum by gradient descent at the step 1 / L, L the largest curvature that softmax can have."""
    wide = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
    step = 1 / (0.5 * float(torch.linalg.eigvalsh(wide.T @ wide / len(x))[-1]) + strength)
    weight = torch.zeros(x.shape[1], classes, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    for _ in range(20_000):
        gradients = torch.autograd.grad(objective(x, y, weight, bias, strength), (weight, bias))
        if max(float(part.abs().max()) for part in gradients) < 1e-11:
            return weight.detach(), bias.detach()
        with torch.no_grad():
            weight -= step * gradients[0]
            bias -= step * gradients[1]
    raise AssertionError("gradient descent did not converge")


def test_two_examples_in_closed_form() -> None:
    # with W = (-a, a) the logits differ by 2 a x, and the derivative of F vanishes where sigmoid(-2a) = strength * a
    a = 0.7
    strength = 1 / (1 + math.exp(2 * a)) / a
    x, y = torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])
    found = fit(x, y, classes=2, regularization=[strength], tolerance=1e-13)
    torch.testing.assert_close(found.weights[0].T, torch.tensor([[-a, a]], dtype=torch.float64), atol=1e-6, rtol=0)
    assert float(found.objectives) == pytest.approx(math.log1p(math.exp(-2 * a)) + strength * a * a, rel=1e-12)
    assert float(found.intercepts.abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("n", "width", "classes", "seed"), [(512, 8, 4, 5), (512, 8, 4, 9), (512, 16, 8, 23), (1024, 16, 8, 7)]
)
def test_classes_in_two_clusters_far_apart_are_fitted_to_the_tolerance(
    n: int, width: int, classes: int, seed: int
) -> None:
    """Hardly any probability crosses the gap, so nearly flat directions of the intercepts move all of the weights."""
    g = torch.Generator().manual_seed(seed)
    cluster = torch.randint(2, (n,), generator=g)
    fine = 0.8 ** torch.arange(width)
    x = 0.18 * torch.randn(n, width, generator=g) * fine
    x[:, 0] += 7 * (2 * cluster - 1)
    rule = 10 * torch.randn(width, classes // 2, generator=g) / fine[:, None].sqrt()
    rule[0] = 0
    y = torch.multinomial((x @ rule).softmax(dim=1), 1, generator=g)[:, 0] + cluster * (classes // 2)
    strength = 4e-4
    found = fit(x, y, classes=classes, regularization=[strength])
    weight, bias = found.weights[0].T.clone().requires_grad_(), found.intercepts[0].clone().requires_grad_()
    value = objective(x, y, weight, bias, strength)
    gradient, of_bias = torch.autograd.grad(value, (weight, bias))
    assert float(of_bias.abs().max()) < 1e-10
    assert float(gradient.square().sum()) / (2 * strength) <= 1e-9 * value.item()


@pytest.mark.parametrize(
    ("counts", "strength"), [((15, 114, 64, 63), 2.5e-7), ((1, 2, 3, 3), 4e-6), ((1, 2, 3, 3), 1e-6)]
)
def test_intercepts_far_from_where_they_were_are_found(counts: tuple[int, ...], strength: float) -> None:
    """One feature with two blocks of states, as of an LSTM on a language of two blocks of hidden states.

    Classes of one block are told apart by large weights. On the way there almost all probabilities are 0 or 1, so that
    Newton's steps for the intercepts are far too long, or have no Hessian.
    """
    y = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    x = torch.where(y < 2, 1.0, -1.0) + 0.01 * torch.sin(torch.arange(len(y)))
    found = fit(x[:, None], y, classes=4, regularization=[strength])

    def value(parameters: torch.Tensor) -> torch.Tensor:
        weight, bias = parameters.view(2, 1, 4)
        return objective(x[:, None], y, weight, bias, strength)

    # SciPy's trust region with exact second derivatives, over weights and intercepts at once
    least = optimize.minimize(
        lambda point: float(value(torch.from_numpy(point))),
        torch.zeros(8, dtype=torch.float64).numpy(),
        jac=lambda point: torch.autograd.functional.jacobian(value, torch.from_numpy(point)).numpy(),
        hess=lambda point: torch.autograd.functional.hessian(value, torch.from_numpy(point)).numpy(),
        method="trust-exact",
        options={"gtol": 1e-9, "maxiter": 1000},
    )
    assert float(found.gaps) <= 1e-9 * float(found.objectives)
    assert -1e-13 < float(found.objectives) - least.fun <= float(found.gaps) + 1e-13


def test_logarithms_of_rare_probabilities_are_fitted_to_the_tolerance_too() -> None:
    """Features of which many are equal, where optimal intercepts move the gradient by the weights above the bound."""
    language = load_language("hmm-laptop")
    task = make_task(language, "state-4", num_train=500, num_test=1, seed=0)
    x = lookup_features(language, task.train).clamp(min=1e-6).log()
    strength = 1e-3 * float((x - x.mean(0)).square().mean())
    found = fit(x, task.train_labels, classes=len(task.classes), regularization=[strength])
    assert float(found.gaps) <= 1e-9 * float(found.objectives)
    value = objective(x, task.train_labels, found.weights[0].T, found.intercepts[0], strength)
    assert float(value) == pytest.approx(float(found.objectives), rel=1e-9)


def test_features_without_information_give_the_class_frequencies() -> None:
    x, y = torch.tensor([[1.0, 2.0], [3.0, 5.0]]).repeat_interleave(6, dim=0), torch.tensor([0, 0, 0, 1, 1, 2] * 2)
    found = fit(x, y, classes=3, regularization=[0.01], tolerance=1e-12)
    logs = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64).div(6).log()
    torch.testing.assert_close(found.intercepts[0], logs - logs.mean(), atol=1e-10, rtol=0)
    assert float(found.weights.abs().max()) < 1e-7
    assert float(found.objectives) == pytest.approx(float(-(logs.exp() * logs).sum()), rel=1e-12)


@pytest.mark.parametrize("strength", [0.3, 0.03])
def test_minimum_is_that_of_gradient_descent(strength: float) -> None:
    x, y = planted(60, 4, 3)
    weight, bias = descended(x, y, 3, strength)
    least = float(objective(x, y, weight, bias, strength))
    found = fit(x, y, classes=3, regularization=[strength], tolerance=1e-6)
    assert -1e-14 < float(found.objectives) - least <= float(found.gaps) + 1e-14
    close = fit(x, y, classes=3, regularization=[strength], tolerance=1e-13)
    torch.testing.assert_close(close.weights[0].T, weight, atol=1e-5, rtol=0)
    torch.testing.assert_close(close.intercepts[0], bias - bias.mean(), atol=1e-5, rtol=0)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(8, 60),
    width=st.integers(1, 90),
    classes=st.integers(2, 5),
    strengths=st.lists(st.floats(1e-3, 10), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_certificate_is_that_of_autograd(n: int, width: int, classes: int, strengths: list[float], seed: int) -> None:
    x, y = planted(n, width, classes, seed=seed)
    found = fit(x, y, classes=classes, regularization=strengths)
    assert found.weights.shape == (len(strengths), classes, width)
    assert bool((found.gaps <= 1e-9 * found.objectives).all())
    for r, strength in enumerate(strengths):
        weight = found.weights[r].T.clone().requires_grad_()
        bias = found.intercepts[r].clone().requires_grad_()
        value = objective(x, y, weight, bias, strength)
        by_weight, by_bias = torch.autograd.grad(value, (weight, bias))
        assert float(found.objectives[r]) == pytest.approx(float(value.detach()), rel=1e-12)
        assert float(by_bias.abs().max()) < 1e-10
        bound = float(by_weight.square().sum()) / (2 * strength)
        assert float(found.gaps[r]) == pytest.approx(bound, rel=1e-5, abs=1e-20)


def test_variances_of_many_magnitudes_cost_few_evaluations() -> None:
    """As of the token states of language models; L-BFGS in the features' own coordinates takes ten times as many."""
    g = seeds.generator(0, "decaying")
    axes = torch.linalg.qr(torch.randn(300, 300, generator=g)).Q
    x = torch.randn(2000, 300, generator=g) * 5 / torch.arange(1, 301) @ axes
    y = (x @ torch.randn(300, 6, generator=g) - (-torch.rand(2000, 6, generator=g).log()).log()).argmax(dim=1)
    found = fit(x, y, classes=6, regularization=[1e-3 * float((x - x.mean(0)).square().mean())])
    assert found.evaluations[0] <= 60  # 31


def test_far_means_and_small_scales_do_not_matter() -> None:
    x, y = planted(80, 5, 3)
    near = fit(x, y, classes=3, regularization=[0.01], tolerance=1e-9)
    far = fit(x.double() + 1e4, y, classes=3, regularization=[0.01], tolerance=1e-9)
    assert float(far.objectives) == pytest.approx(float(near.objectives), rel=2e-9)
    # weights a thousand times as large have a million times the penalty
    small = fit(x.double() / 1000, y, classes=3, regularization=[0.01 / 1000**2], tolerance=1e-9)
    assert float(small.objectives) == pytest.approx(float(near.objectives), rel=2e-9)


def test_directions_without_variance_do_not_matter() -> None:
    # as layer norms leave them: the features of a row add up to the same number, and one direction has most variance
    g = seeds.generator(0, "null")
    x = torch.randn(1000, 128, generator=g)
    x[:, 0] *= 30
    x = x @ torch.linalg.qr(torch.randn(128, 128, generator=g)).Q
    x = x - x.mean(dim=1, keepdim=True)
    y = (x[:, 5] + 3 * torch.randn(1000, generator=g) > 0).long()
    found = fit(x, y, classes=2, regularization=[1e-6, 1e-7])
    for r, strength in enumerate((1e-6, 1e-7)):
        value = objective(x, y, found.weights[r].T, found.intercepts[r], strength)
        assert float(found.objectives[r]) == pytest.approx(float(value), rel=1e-10)
    assert bool((found.gaps <= 1e-9 * found.objectives).all())


def test_wide_features_are_certified() -> None:
    x, y = planted(120, 2100, 3)
    before = torch.get_rng_state()
    found = fit(x, y, classes=3, regularization=[0.01])
    assert torch.equal(torch.get_rng_state(), before)  # torch draws the directions of such wide features
    value = objective(x, y, found.weights[0].T, found.intercepts[0], 0.01)
    assert float(found.objectives) == pytest.approx(float(value), rel=1e-12)
    assert float(found.gaps) <= 1e-9 * float(value)


def test_where_rounding_ends_the_descent_the_bound_says_how_near_the_minimum_is() -> None:
    x, y = planted(60, 4, 3)
    found = fit(x, y, classes=3, regularization=[0.01], tolerance=1e-40)
    assert 1e-40 < float(found.gaps / found.objectives) < 1e-12


def test_same_bits_again_and_alone() -> None:
    x, y = planted(60, 5, 3)
    first, second = (fit(x, y, classes=3, regularization=[0.1, 0.01]) for _ in range(2))
    assert torch.equal(first.weights, second.weights)
    assert torch.equal(first.gaps, second.gaps)
    assert torch.equal(fit(x, y, classes=3, regularization=[0.01]).weights[0], first.weights[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": torch.full((6, 2), math.nan)}, "6 of 6 examples have NaN"),
        ({"features": torch.zeros(5, 2)}, r"features \(n, D\) and labels \(n,\), not \(5, 2\) and \(6,\)"),
        ({"features": torch.zeros(0, 2), "labels": torch.zeros(0, dtype=torch.int64)}, "there are no examples"),
        ({"labels": torch.tensor([0, 1, 2, 0, 1, 3])}, "labels go from 0 to 3; with 3 classes they are 0 to 2"),
        ({"labels": torch.tensor([0, 1, 1, 0, 1, 0])}, "there is no example of class 2 among the 6"),
        ({"labels": torch.zeros(6, dtype=torch.int64)}, "there is no example of classes 1, 2 among the 6"),
        ({"labels": torch.zeros(6)}, "needs int64 labels, not torch.float32"),
        ({"classes": 1, "labels": torch.zeros(6, dtype=torch.int64)}, "classes is 1; a convex probe needs at least 2"),
        ({"regularization": []}, "regularization is empty"),
        ({"regularization": [0.1, 0.0]}, "regularization has 0.0; strengths must be above 0"),
        ({"tolerance": 0.0}, "tolerance is 0.0; it must be above 0"),
        ({"max_evaluations": 0}, "max_evaluations is 0; it must be at least 1"),
        ({"max_evaluations": 3, "tolerance": 1e-12}, "allow more evaluations, a larger tolerance or a larger strength"),
    ],
)
def test_bad_input(changes: dict[str, object], message: str) -> None:
    features, labels = planted(6, 2, 3)[0], torch.tensor([0, 1, 2, 0, 1, 2])
    arguments = {"features": features, "labels": labels, "classes": 3, "regularization": [0.01], **changes}
    with pytest.raises(IsolossError, match=message):
        fit(arguments.pop("features"), arguments.pop("labels"), **arguments)


def test_predicting_features_of_another_width() -> None:
    x, y = planted(20, 3, 2)
    found = fit(x, y, classes=2, regularization=[0.1])
    with pytest.raises(IsolossError, match="fitted on 3 features"):
        found.predict(x[:, :2])


def test_one_hot_features_that_are_mostly_constant_have_a_minimum() -> None:
    # nearly all eigenvalues of their moments are 0
    g = seeds.generator(0, "one-hot")
    tokens = torch.randint(66, (70, 12), generator=g)
    present = torch.arange(12) < torch.randint(3, 13, (70, 1), generator=g)
    x = (F.one_hot(tokens, 66) * present[:, :, None]).float().flatten(1)
    x /= (x - x.mean(0)).square().mean().sqrt()
    y = tokens[:, 0] % 2
    found = fit(x, y, classes=2, regularization=[1e-3])
    value = objective(x, y, found.weights[0].T, found.intercepts[0], 1e-3)
    assert float(found.objectives) == pytest.approx(float(value), rel=1e-10)
    assert float(found.gaps) <= 1e-9 * float(found.objectives)
