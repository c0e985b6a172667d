"""Step rules against their formulas written out, in float64."""

import copy
from functools import partial

import pytest
import torch
from toy_language import PairLanguage

from isoloss.config import ModelConfig, OptimizerConfig, PCFGConfig, TrainConfig
from isoloss.errors import IsolossError
from isoloss.models.bert import build
from isoloss.pretraining.objectives import prediction_loss, training_batch
from isoloss.pretraining.steps import GradientStep, learning_rate

STEPS = 20


def tiny(dtype=torch.float64):
    return build(ModelConfig(size="d16", dropout=0.0), vocab_size=10, max_length=4, pad_id=8, seed=0).to(dtype)


def batches(steps=STEPS):
    config = TrainConfig(language=PCFGConfig(), batch_size=8)
    language = PairLanguage(is_ragged=True)
    return [training_batch(language, config, step, torch.device("cpu")).inputs for step in range(1, steps + 1)]


def run(model, rule, steps, *, start=1):
    outcomes = []
    for number, batch in enumerate(batches(start + steps - 1), 1):
        if number >= start:
            outcomes.append(rule.step(number, batch, partial(prediction_loss, model, causal=False), with_norm=True))
    return outcomes


def decays(name):
    return not (name.endswith("bias") or "LayerNorm" in name)


def reference(model, config):
    """Make the steps in plain formulas; return each step's loss and gradient norm."""
    model = copy.deepcopy(model)
    memory = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    outcomes = []
    for t, batch in enumerate(batches(), 1):
        rate = config.learning_rate * min(1, t / config.warmup_steps) if config.warmup_steps else config.learning_rate
        loss = prediction_loss(model, batch, causal=False)
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(loss, parameters)
        outcomes.append((loss.item(), rate, sum(float((g**2).sum()) for g in gradients) ** 0.5))
        with torch.no_grad():
            for name, p, g in zip(names, parameters, gradients, strict=True):
                weight_decay = config.weight_decay if decays(name) else 0.0
                m, v = memory[name]
                if config.name == "adamw":
                    b1, b2 = config.betas
                    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
                    step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + 1e-8)
                    p.copy_(p - rate * weight_decay * p - rate * step)
                else:
                    m = config.momentum * m + g + weight_decay * p
                    p.copy_(p - rate * m)
                memory[name] = (m, v)
    return model, outcomes


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(learning_rate=0.01, warmup_steps=5, weight_decay=0.1),
        OptimizerConfig(learning_rate=0.01, warmup_steps=0, weight_decay=0.0, betas=(0.0, 0.5)),
        OptimizerConfig(name="sgd", learning_rate=0.3, warmup_steps=5, weight_decay=0.1),
        OptimizerConfig(name="sgd", learning_rate=0.3, warmup_steps=0, weight_decay=0.1, momentum=0.9),
    ],
    ids=["adamw", "adamw-plain", "sgd", "sgd-momentum"],
)
def test_the_steps_are_their_formulas(config):
    model = tiny()
    expected_model, expected = reference(model, config)
    start = [p.detach().clone() for p in model.parameters()]
    outcomes = run(model, GradientStep(model, config), STEPS)
    assert [tuple(outcome) for outcome in outcomes] == [pytest.approx(e, rel=1e-9) for e in expected]
    for (name, got), want, first in zip(model.named_parameters(), expected_model.parameters(), start, strict=True):
        # the keys' biases have a gradient of 0 but for rounding, which AdamW scales up to its full step
        if config.name == "adamw" and name.endswith("key.bias"):
            continue
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
        assert not torch.equal(got, first) or name.endswith("token_type_embeddings.weight")


def test_the_norm_is_only_computed_when_asked_for():
    model = tiny()
    outcome = GradientStep(model, OptimizerConfig()).step(
        1, batches(1)[0], partial(prediction_loss, model, causal=False)
    )
    assert outcome.grad_norm is None


@pytest.mark.parametrize(
    "config",
    [OptimizerConfig(warmup_steps=3), OptimizerConfig(name="sgd", momentum=0.9), OptimizerConfig(name="sgd")],
    ids=["adamw", "sgd-momentum", "sgd"],
)
def test_a_rule_goes_on_from_its_state_bit_for_bit(config):
    whole = tiny(torch.float32)
    run(whole, GradientStep(whole, config), 10)

    first = tiny(torch.float32)
    rule = GradientStep(first, config)
    run(first, rule, 4)
    second = copy.deepcopy(first)
    resumed = GradientStep(second, config)
    resumed.load_state(rule.state())
    run(first, rule, 2, start=5)  # what the first one does afterwards must not matter
    run(second, resumed, 6, start=5)
    for got, want in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(got, want)


def test_a_state_names_the_parameters_it_belongs_to():
    model = tiny()
    rule = GradientStep(model, OptimizerConfig())
    assert rule.state() == {}
    run(model, rule, 1)
    names = [name for name, _ in model.named_parameters()]
    assert set(rule.state()) == {f"{what}/{name}" for what in ("exp_avg", "exp_avg_sq", "step") for name in names}
    gradient = model.cls.predictions.bias.grad
    torch.testing.assert_close(rule.state()["exp_avg/cls.predictions.bias"], 0.1 * gradient)


@pytest.mark.parametrize("key", ["exp_avg/nothing", "exp_avg/cls.predictions.bias", "exp_avg"])
def test_a_state_that_does_not_fit_is_refused(key):
    with pytest.raises(IsolossError, match=rf"the optimizer's {key}, of shape \(3,\), fits no parameter"):
        GradientStep(tiny(), OptimizerConfig()).load_state({key: torch.zeros(3)})


def test_the_warm_up_is_linear_and_then_constant():
    config = OptimizerConfig(learning_rate=1e-3, warmup_steps=1000)
    rates = [learning_rate(config, step) for step in (1, 500, 999, 1000, 1001, 10**6)]
    assert rates == pytest.approx([1e-6, 5e-4, 9.99e-4, 1e-3, 1e-3, 1e-3])
    assert learning_rate(OptimizerConfig(learning_rate=1e-3, warmup_steps=0), 1) == 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be above 0"),
        ({"learning_rate": float("inf")}, "learning_rate is inf"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"warmup_steps": -1}, "warmup_steps is -1; it must be at least 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; it must be at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\); it must be two numbers"),
        ({"momentum": 1.0}, "momentum is 1.0; it must be at least 0 and below 1"),
        ({"name": "lamb"}, "name is 'lamb'; it must be adamw or sgd"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(IsolossError, match=f"the optimizer's {message}"):
        GradientStep(tiny(), OptimizerConfig(**changes))
