"""The schedules of the learning rate, and settings out of range."""

import math

import pytest
import torch

from isoloss import config as configs
from isoloss.errors import IsolossError
from isoloss.lab.training.optimizers import Optimizer
from isoloss.run_config import OptimizerConfig, learning_rate


def rates(steps, total, **settings):
    config = OptimizerConfig(learning_rate=1e-3, **settings)
    return [learning_rate(config, step, total=total) / 1e-3 for step in steps]


def test_the_warm_up_is_linear_and_then_constant():
    got = rates((1, 500, 999, 1000, 1001, 10**6), 10**6, warmup_steps=1000)
    assert got == pytest.approx([0.001, 0.5, 0.999, 1, 1, 1])
    assert rates((1,), 10, warmup_steps=0) == [1]


def test_by_default_6_percent_of_the_steps_warm_up_and_at_most_1000():
    assert [OptimizerConfig().num_warmup_steps(total) for total in (0, 8, 100, 20_000)] == [0, 0, 6, 1000]


def test_a_proportion_warms_up_that_fraction_of_the_steps():
    steps = (1, 11, 12, 13, 100)
    assert rates(steps, 100, warmup_proportion=0.12) == rates(steps, 100, warmup_steps=12)
    assert rates((1, 2), 100, warmup_proportion=0.0) == [1, 1]


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_the_schedules_fall_from_the_highest_to_0_one_step_after_the_last(warmup):
    total = 10
    peak = max(warmup, 1)
    steps = range(peak, total + 2)  # 0 would be reached at step 11
    fractions = [(step - peak) / (total + 1 - peak) for step in steps]
    linear = rates(steps, total, warmup_steps=warmup, schedule="linear")
    assert linear == pytest.approx([1 - fraction for fraction in fractions])
    cosine = rates(steps, total, warmup_steps=warmup, schedule="cosine")
    assert cosine == pytest.approx([math.cos(math.pi * fraction / 2) ** 2 for fraction in fractions])
    assert linear[0] == cosine[0] == 1
    assert linear[-2] > 0
    assert linear[-1] == 0


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_decay_of_so_many_steps_comes_after_a_stable_rate(warmup):
    done = [0.0] * 6 + [1 / 5, 2 / 5, 3 / 5, 4 / 5, 1.0]  # of a decay of the last 4 of 10 steps, at 0 after the last
    for schedule, rate in (
        ("linear", lambda r: 1 - r),
        ("cosine", lambda r: math.cos(math.pi * r / 2) ** 2),
        ("1-sqrt", lambda r: 1 - r**0.5),
    ):
        got = rates(range(1, 12), 10, warmup_steps=warmup, schedule=schedule, decay_steps=4)
        assert got[warmup:] == pytest.approx([rate(r) for r in done[warmup:]])
        assert got[:warmup] == pytest.approx([step / 3 for step in range(1, warmup + 1)])


def test_all_steps_after_the_warm_up_may_decay_by_the_square_root():
    assert rates(range(2, 8), 6, warmup_steps=2, schedule="1-sqrt") == pytest.approx(
        [1 - (k / 5) ** 0.5 for k in range(6)]
    )


@pytest.mark.parametrize("name", ["adamw", "lawa", "muon", "schedule-free"])
def test_adam_eps_is_added_to_the_root_of_the_second_moment(name):
    moved = {}
    for eps in (1e-8, 3.0):
        model = torch.nn.Linear(1, 3, bias=True)
        optimizer = Optimizer(
            model, OptimizerConfig(name=name, warmup_steps=0, adam_eps=eps, weight_decay=0.0), total=2
        )
        before = model.bias.detach().clone()
        model.weight.grad, model.bias.grad = torch.ones(3, 1), torch.tensor([1.0, -2.0, 4.0])
        optimizer.update(1, with_norm=False)
        moved[eps] = (model.bias.detach() - before) / 1e-3
    # at the first step m' / (sqrt(v') + eps) is g / (|g| + eps)
    torch.testing.assert_close(moved[1e-8], torch.tensor([-1.0, 1.0, -1.0]), rtol=1e-3, atol=0)
    torch.testing.assert_close(moved[3.0], torch.tensor([-1 / 4, 2 / 5, -4 / 7]), rtol=1e-3, atol=0)


def test_the_fingerprint_of_the_usual_eps_is_that_without_the_setting():
    assert "adam_eps" not in configs.identity(OptimizerConfig())
    assert configs.identity(OptimizerConfig(adam_eps=1e-6))["adam_eps"] == 1e-6


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(IsolossError, match=r"momentum is 0\.9, but the optimizer is adamw: it needs sgd or muon"):
        configs.check(OptimizerConfig(momentum=0.9))
    with pytest.raises(IsolossError, match="no optimizer 'lamb'; the optimizers are adamw, sgd, muon, lawa, soap, "):
        configs.check(OptimizerConfig(name="lamb"))
    with pytest.raises(IsolossError, match="warmup_steps is 11, more than the 10 steps, which leaves none"):
        OptimizerConfig(schedule="linear", warmup_steps=11).check_steps(10)
    OptimizerConfig(warmup_steps=11).check_steps(10)
    with pytest.raises(IsolossError, match="decay_steps is 5, but the schedule is constant: choose linear, cosine or"):
        configs.check(OptimizerConfig(decay_steps=5))
    decay = OptimizerConfig(schedule="linear", warmup_steps=3, decay_steps=8)
    with pytest.raises(IsolossError, match="decay_steps is 8, which the 10 steps do not have after a warm-up of 3"):
        decay.check_steps(10)
    decay.check_steps(11)
