"""The gradient step against its formulas written out, in float64; micro-batches; its state."""

import pytest
import torch
from stepping import STEPS, batches, check, context, gradients_of, loss_of, plain_loss, run, tiny

from isoloss.errors import IsolossError
from isoloss.lab.training.algorithms.base import TrainingAlgorithm, split, without_dropout
from isoloss.run_config import ObjectiveConfig, OptimizerConfig
from isoloss.text.masking import IGNORED


def plain_gradient(model, t, batch):
    loss = plain_loss(model, batch)
    return loss, gradients_of(loss, model)


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(learning_rate=0.01, warmup_steps=5, weight_decay=0.1),
        OptimizerConfig(learning_rate=0.01, warmup_steps=0, weight_decay=0.0, betas=(0.0, 0.5)),
        OptimizerConfig(learning_rate=0.01, warmup_proportion=0.1, schedule="cosine", max_grad_norm=1.5),
        OptimizerConfig(name="sgd", learning_rate=0.3, warmup_steps=5, weight_decay=0.1),
        OptimizerConfig(name="sgd", learning_rate=0.3, warmup_steps=0, weight_decay=0.1, momentum=0.9),
        OptimizerConfig(name="sgd", learning_rate=0.3, warmup_steps=0, schedule="linear", max_grad_norm=1.5),
    ],
    ids=["adamw", "adamw-plain", "adamw-cosine-clipped", "sgd", "sgd-momentum", "sgd-linear-clipped"],
)
def test_the_steps_are_their_formulas(config):
    model = tiny()
    outcomes = check(model, TrainingAlgorithm(model, context(config, total=STEPS)), config, plain_gradient, batches())
    norms = [outcome.grad_norm for outcome in outcomes]
    assert min(norms) < 1.5 < max(norms) or config.max_grad_norm is None  # some are clipped, some are not


@pytest.mark.parametrize("masking", ["one", "fraction"])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 8, 100])
def test_micro_batches_give_the_same_steps(masking, micro_batch_size):
    objective = ObjectiveConfig(masking=masking, fraction=0.6)  # parts of unequally many predicted tokens
    config = OptimizerConfig(name="sgd", learning_rate=0.3, warmup_steps=0)
    whole, cut = tiny(), tiny()
    expected = run(whole, TrainingAlgorithm(whole, context(config, total=10)), 10, objective=objective)
    got = run(
        cut,
        TrainingAlgorithm(cut, context(config, total=10, micro_batch_size=micro_batch_size)),
        10,
        objective=objective,
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.tensor(a[:3]), torch.tensor(b[:3]), rtol=1e-10, atol=0)
    for a, b in zip(cut.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_batch_is_split_with_the_targets_of_each_part():
    labels = torch.tensor([[1, 2, -100], [-100, -100, 3], [4, 5, 6]])
    batch = {"input_ids": torch.arange(9).view(3, 3), "labels": labels, "targets": labels[labels != IGNORED][:, None]}
    first, second = split(batch, [1, 2])
    assert first["targets"][:, 0].tolist() == [1, 2]
    assert second["targets"][:, 0].tolist() == [3, 4, 5, 6]
    assert torch.equal(second["input_ids"], batch["input_ids"][1:])
    assert torch.equal(second["labels"], labels[1:])


def test_every_module_gets_its_mode_back():
    model = tiny(dropout=0.5)
    model.bert.embeddings.eval()
    modes = [module.training for module in model.modules()]
    with without_dropout(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes
    assert True in modes
    assert False in modes


def test_the_norm_is_only_computed_when_asked_for():
    for limit in (None, 0.1):
        model = tiny()
        algorithm = TrainingAlgorithm(model, context(OptimizerConfig(max_grad_norm=limit), total=1))
        assert algorithm.step(1, batches(1)[0], loss_of(model)).grad_norm is None


def test_a_state_names_the_parameters_it_belongs_to():
    model = tiny()
    algorithm = TrainingAlgorithm(model, context(OptimizerConfig(), total=1))
    assert algorithm.state() == {}
    run(model, algorithm, 1)
    names = [name for name, _ in model.named_parameters()]
    assert set(algorithm.state()) == {f"{what}/{name}" for what in ("exp_avg", "exp_avg_sq", "step") for name in names}
    gradient = model.cls.predictions.bias.grad
    torch.testing.assert_close(algorithm.state()["exp_avg/cls.predictions.bias"], 0.1 * gradient)


@pytest.mark.parametrize("key", ["exp_avg/nothing", "exp_avg/cls.predictions.bias", "exp_avg"])
def test_a_state_that_does_not_fit_is_refused(key):
    with pytest.raises(IsolossError, match=rf"the optimizer's {key}, of shape \(3,\), fits no parameter"):
        TrainingAlgorithm(tiny(), context(OptimizerConfig(), total=1)).load_state({key: torch.zeros(3)})
