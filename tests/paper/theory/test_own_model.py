"""A model of one's own in Theorem 3.3, by its log-probabilities alone: against the models written out by hand."""

import math

import numpy as np
import pytest
import torch

from isoloss.errors import IsolossError
from isoloss.paper.theory.sgd_flow import LogProbsModel, MaskedLM, TwoParameters, is_far, study, two_parameters
from isoloss.statistics.estimate import Estimate


def two(theta):
    return torch.stack([theta["a"] * theta["b"], torch.zeros_like(theta["a"])], dim=-1).log_softmax(dim=-1)


def flat_two(theta):
    return two({"a": theta[:1], "b": theta[1:]})


START = {"a": torch.tensor([2.0]), "b": torch.tensor([0.5])}


def test_a_dict_and_a_tensor_are_one_model():
    by_name, flat = LogProbsModel(two, START), LogProbsModel(flat_two, torch.tensor([2.0, 0.5]))
    closed = TwoParameters(1 / (1 + math.exp(-1.0)), 2.0)
    for model in (by_name, flat):
        assert model.minimizer.tolist() == [2.0, 0.5]
        assert model.flow(0.2) == pytest.approx(closed.flow(0.2), rel=1e-6)


def test_a_start_is_brought_to_the_conditionals_that_are_given():
    model = LogProbsModel(two, START, conditionals=torch.tensor([[0.7, 0.3]]))
    assert model.minimizer.prod() == pytest.approx(math.log(0.7 / 0.3), abs=1e-6)
    assert math.dist(model.minimizer, (2.0, 0.5)) < 0.3


@pytest.mark.parametrize("exact", [False, True], ids=["drawn answers", "exact conditionals"])
def test_steps_and_traces_are_those_written_out(exact):
    by_hand = MaskedLM(seed=2)
    theta = by_hand.minimizer + 0.1 * np.random.default_rng(0).standard_normal((5, len(by_hand.minimizer)))
    assert LogProbsModel.trace(by_hand, theta) == pytest.approx(by_hand.trace(theta), rel=1e-12)
    ends = [theta.copy(), theta.copy()]
    for kind, end in zip((MaskedLM, LogProbsModel), ends, strict=True):
        generator = np.random.default_rng(1)
        for _ in range(3):
            kind.move(by_hand, end, 0.1, batch_size=3, generator=generator, exact=exact)
    assert ends[0] == pytest.approx(ends[1], abs=1e-13)


def test_a_run_by_its_settings_is_shown_and_a_small_one_says_what_it_lacks():
    model = LogProbsModel(two, START)
    settings = model.settings()
    trace = model.trace(model.minimizer[None])[0]
    assert settings.step_sizes == pytest.approx((0.2 / trace, 0.1 / trace, 0.05 / trace))
    # a quarter of the trace, as far as a line goes
    assert 0.75 < settings.flow_trace(settings.times[0], 1) / trace < 0.85
    assert [statement.verdict for statement in study(settings).statements] == ["shown"] * 5
    found = study(model.settings(trajectories=4))
    coefficient = found.statements[1]
    assert coefficient.verdict == "not shown"
    wanted = 4 * 4 * (found.limits[1].coefficient.stderr / (0.1 * 0.25)) ** 2
    assert f"too imprecise to tell: take about {float(f'{wanted:.2g}'):,.0f} trajectories" in coefficient.evidence


def test_a_miss_is_contradicted_only_beyond_its_errors_and_those_that_are_allowed():
    known = {"samples": 32, "unit": "", "num_predictions": 32, "method": "coefficient"}
    # of 32 trajectories, whose errors are too small; of 128 and more, near and far
    for value, stderr, far in ((0.451, 0.058, False), (0.260, 0.028, False), (0.488, 0.013, True)):
        assert is_far(Estimate(value=value, stderr=stderr, **known), 0.25) == far


def test_a_precise_miss_is_contradicted():
    found = study(two_parameters(trajectories=2048, batch_sizes=(1, 2), times=(0.5,), coefficient=0.5))
    assert [statement.verdict for statement in found.statements[1:3]] == ["contradicted"] * 2


@pytest.mark.parametrize(
    ("log_probs", "more", "message"),
    [
        (lambda theta: theta["a"] * theta["b"], {}, r"own model: log_probs has the shape \(1,\)"),
        (lambda theta: two(theta) + 1, {}, r"log_probs has the shape \(1, 2\), sums from 2\.71828 to 2\.71828"),
        (two, {"conditionals": torch.tensor([[1.0, 0.0]])}, "conditionals has .* a least entry of 0;"),
        (lambda theta: two(theta) + (theta["a"] - 2.0) / 2, {}, "not normalized at all parameters"),
        (two, {"conditionals": torch.tensor([[0.7, 0.2]])}, "conditionals has the shape"),
        (two, {"weights": torch.tensor([0.5, 0.5])}, "weights has the shape"),
        (lambda theta: two(theta).float(), {}, "log_probs gives float32; it must compute in float64"),
    ],
)
def test_tables_that_are_refused(log_probs, more, message):
    with pytest.raises(IsolossError, match=message):
        LogProbsModel(log_probs, START, **more)


def test_the_least_eigenvalue_is_that_of_the_hessian():
    model = MaskedLM(seed=2)

    def loss(theta):
        return -(model.minimizers.model.log_probs(theta) * torch.tensor(model.weights)[:, None] * truth).sum()

    truth = torch.tensor(model.conditionals)
    hessian = torch.autograd.functional.hessian(loss, torch.tensor(model.minimizer))
    eigenvalues = torch.linalg.eigvalsh(hessian)
    rank = truth.shape[0] * (truth.shape[1] - 1)
    assert eigenvalues[:-rank].abs().max() < 1e-9
    assert model.least_eigenvalue == pytest.approx(float(eigenvalues[-rank]), rel=1e-6)


def test_a_start_where_the_flow_rests_is_refused():
    model = LogProbsModel(two, {"a": torch.tensor([1.0]), "b": torch.tensor([1.0])})
    with pytest.raises(IsolossError, match="own model: the flow rests at the start"):
        model.settings()


def test_conditionals_may_be_in_float32():
    def three(theta):
        logits = torch.stack([theta[0] * theta[1], theta[2] * theta[3], torch.zeros_like(theta[0])])
        return logits.log_softmax(dim=0)[None]

    given = torch.tensor([[0.1, 0.2, 0.7]])  # their sum is 1 to seven digits alone
    model = LogProbsModel(three, torch.tensor([2.0, 0.5, 1.0, -1.0]), conditionals=given)
    found = three(torch.tensor(model.minimizer)).exp()
    torch.testing.assert_close(found, given.double(), rtol=1e-6, atol=0)


def test_a_small_trace_has_step_sizes_below_1():
    model = LogProbsModel(lambda theta: two({"a": 0.1 * theta["a"], "b": theta["b"]}), START)
    assert 0.2 / model.trace(model.minimizer[None])[0] > 1
    assert model.settings().step_sizes == (0.9, 0.45, 0.225)
