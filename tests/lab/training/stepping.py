"""What the tests of training algorithms share: a tiny model, batches, and the optimizers' formulas written out."""

import copy
import math
from functools import partial

import pytest
import torch
from toy_language import PairLanguage

from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.models.architectures import BERT
from isoloss.lab.training.algorithms.base import TrainingContext
from isoloss.lab.training.objectives import prediction_loss, training_batch
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.text.masking import IGNORED

STEPS = 25  # the first of which has half the rate by default


def tiny(dtype=torch.float64, dropout=0.0):
    return BERT.new_model(ModelConfig(size="d16", dropout=dropout), vocab_size=10, max_length=4, pad_id=8, seed=0).to(
        dtype
    )


def context(optimizer, *, total=STEPS, **changes):
    return TrainingContext(optimizer=optimizer, total_steps=total, **changes)


def batches(steps=STEPS, **changes):
    config = TrainConfig(language=PCFGConfig(), batch_size=8, **changes)
    language = PairLanguage(is_ragged=True)
    return [training_batch(language, config, step, torch.device("cpu")).inputs for step in range(1, steps + 1)]


def loss_of(model):
    return partial(prediction_loss, model, causal=False)


def run(model, algorithm, steps, *, start=1, **changes):
    """Make the steps from `start` on with `algorithm`; return their results."""
    made = batches(start + steps - 1, **changes)[start - 1 :]
    return [algorithm.step(n, batch, loss_of(model), with_norm=True) for n, batch in enumerate(made, start)]


def plain_loss(model, batch, rows=slice(None)):
    """Return the mean cross-entropy of the predicted tokens of some rows, from the model's own logits."""
    kept = {name: batch[name][rows] for name in ("input_ids", "attention_mask") if name in batch}
    labels = batch["labels"][rows]
    masked = labels != IGNORED
    return torch.nn.functional.cross_entropy(model(**kept).logits[masked], labels[masked])


def plain_rate(config, t, total):
    """Return the learning rate of step t."""
    warmup = min(1000, round(0.06 * total)) if config.warmup_steps is None else config.warmup_steps
    if config.warmup_proportion is not None:
        warmup = round(config.warmup_proportion * total)
    if t < warmup:
        return config.learning_rate * t / warmup
    r = (t - max(warmup, 1)) / (total + 1 - max(warmup, 1))
    factor = {"constant": 1.0, "linear": 1 - r, "cosine": 0.5 + 0.5 * math.cos(math.pi * r)}[config.schedule]
    return config.learning_rate * factor


def reference(model, config, gradient, made):
    """Make the steps in plain formulas.

    Args:
        model: Where they start; it is left alone.
        config: The optimizer.
        gradient: From a model, a step and its batch to the loss and the gradients, in the order of the parameters.
        made: The batches.

    Returns:
        The model after the steps, and of each the loss, the rate and the gradient's norm.
    """
    model = copy.deepcopy(model)
    memory = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    outcomes = []
    for t, batch in enumerate(made, 1):
        rate = plain_rate(config, t, len(made))
        loss, gradients = gradient(model, t, batch)
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        outcomes.append((loss.item(), rate, norm))
        if config.max_grad_norm is not None and norm > config.max_grad_norm:
            gradients = [g * config.max_grad_norm / norm for g in gradients]
        with torch.no_grad():
            for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
                is_exempt = name.endswith("bias") or "LayerNorm" in name
                weight_decay = 0.0 if is_exempt else config.weight_decay
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


def check(model, algorithm, config, gradient, made):
    """Fail unless the steps of `algorithm` on `model` are those of `reference`, to 1e-9, and every parameter moves."""
    start = [p.detach().clone() for p in model.parameters()]
    expected_model, expected = reference(model, config, gradient, made)
    outcomes = [algorithm.step(n, batch, loss_of(model), with_norm=True) for n, batch in enumerate(made, 1)]
    for outcome, (loss, rate, norm) in zip(outcomes, expected, strict=True):
        torch.testing.assert_close(torch.tensor(outcome[:3]), torch.tensor((loss, rate, norm)), rtol=1e-9, atol=1e-9)
    for (name, got), want, first in zip(model.named_parameters(), expected_model.parameters(), start, strict=True):
        # the keys' biases have a gradient of 0 but for rounding, which AdamW scales up to its full step
        if config.name == "adamw" and name.endswith("key.bias"):
            continue
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
        assert not torch.equal(got, first) or name.endswith("token_type_embeddings.weight"), name
    return outcomes


def check_slope(value, parameters, gradients, *, seed=0, rel=1e-6):
    """Fail unless a function of the parameters changes in a random direction as its gradients say."""
    draws = torch.Generator().manual_seed(seed)
    direction = [torch.randn(p.shape, generator=draws, dtype=p.dtype) for p in parameters]
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
    values = []
    for step in (1e-6, -2e-6, 1e-6):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(step * d)
        values.append(value())
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=rel)


def gradients_of(value, model):
    return torch.autograd.grad(value, list(model.parameters()))
