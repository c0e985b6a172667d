"""SAM against its definition on copies of the model, in float64."""

import copy

import pytest
import torch
from stepping import batches, check, context, gradients_of, loss_of, plain_loss, run, tiny

from isoloss.errors import IsolossError
from isoloss.lab.training.algorithms.config import SAMConfig
from isoloss.lab.training.algorithms.sam import SAM
from isoloss.run_config import OptimizerConfig

SGD = OptimizerConfig(name="sgd", learning_rate=0.3, warmup_steps=0, momentum=0.5)
ADAMW = OptimizerConfig(learning_rate=0.01, warmup_steps=5)


def reference_gradient(sam):
    """The documented steps of davda54/sam: climb to p + rho g / ||g|| on one batch, take the gradient there."""

    def gradient(model, t, batch):
        first, second = (slice(0, 4), slice(4, 8)) if sam.batch == "halves" else (slice(None), slice(None))
        loss = plain_loss(model, batch, first)
        gradients = gradients_of(loss, model)
        norm = torch.stack([g.norm(p=2) for g in gradients]).norm(p=2)
        climbed = copy.deepcopy(model)
        with torch.no_grad():
            for p, g in zip(climbed.parameters(), gradients, strict=True):
                p.add_(sam.rho * g / (norm + 1e-12))
        return loss, gradients_of(plain_loss(climbed, batch, second), climbed)

    return gradient


@pytest.mark.parametrize(
    ("optimizer", "batch", "micro_batch_size"),
    [(SGD, "halves", 0), (ADAMW, "halves", 3), (ADAMW, "same", 0), (SGD, "same", 3)],
)
def test_the_steps_are_those_of_the_definition(optimizer, batch, micro_batch_size):
    model, sam = tiny(), SAMConfig(rho=0.1, batch=batch)
    algorithm = SAM(model, context(optimizer, total=10, micro_batch_size=micro_batch_size), sam)
    check(model, algorithm, optimizer, reference_gradient(sam), batches(10))


def test_the_loss_at_the_ascent_point_is_above_that_at_the_weights():
    model = tiny()
    algorithm = SAM(model, context(SGD, total=5), SAMConfig(rho=0.5, batch="same"))
    for outcome in run(model, algorithm, 5):
        # to first order, by rho times the gradient's norm at the weights
        assert outcome.details["loss_at_ascent_nats"] > outcome.loss_nats


def test_the_weights_are_put_back_to_the_bit():
    model = tiny(torch.float32)
    before = [p.detach().clone() for p in model.parameters()]
    algorithm = SAM(model, context(SGD, total=1), SAMConfig(rho=3.0))
    algorithm.optimizer.zero_grad()
    algorithm.add_gradient(1, batches(1)[0], loss_of(model))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_an_odd_batch_has_no_halves():
    model = tiny()
    batch = {name: tensor[:7] for name, tensor in batches(1)[0].items()}
    with pytest.raises(IsolossError, match="the batch has 7 sentences; SAM's halves need an even number"):
        SAM(model, context(SGD, total=1), SAMConfig()).step(1, batch, loss_of(model))
