"""Each optimizer against its published formulas, and what a checkpoint holds of it."""

import copy
import dataclasses
import math
from collections import defaultdict

import pytest
import torch
from running import Signalling, content, small, staged, trained, validate
from stepping import context, tiny
from toy_language import PairLanguage

from isoloss.errors import IsolossError
from isoloss.lab.models.architectures import OPT
from isoloss.lab.training.algorithms.base import TrainingAlgorithm
from isoloss.lab.training.optimizers import Optimizer
from isoloss.lab.training.train import Interrupted, train
from isoloss.run_config import ModelConfig, OptimizerConfig, StageConfig
from isoloss.runs import Run

STEPS = 25


class Toy(torch.nn.Module):
    """An embedding and two layers, of widths whose gradients leave no two directions out: eigenvectors are unique."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.inner, self.outer = torch.nn.Linear(4, 5), torch.nn.Linear(5, 4)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)

    def forward(self, ids, targets):
        return (self.outer(self.inner(self.embedding(ids)).tanh()) - targets).square().mean()


def toy_batch(step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.arange(50) % 5
    return {"ids": ids, "targets": torch.randn(50, 4, generator=generator, dtype=torch.float64)}


def power(matrix, exponent):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values**exponent) @ vectors.T


class AdamW:
    """The reference of all others: an update from a gradient, to be multiplied by the rate, with its own memory."""

    def __init__(self, name, p, config):
        self.name, self.config, self.t = name, config, 0
        self.m, self.v = torch.zeros_like(p), torch.zeros_like(p)

    def update(self, g):
        self.t += 1
        b1, b2 = self.config.betas
        self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g**2
        return self.m / (1 - b1**self.t) / ((self.v / (1 - b2**self.t)).sqrt() + 1e-8)


class Muon(AdamW):
    def update(self, g):
        if g.ndim == 1 or self.name.startswith("embedding"):
            return super().update(g)
        self.m = 0.95 * self.m + 0.05 * g
        x = 0.05 * g + 0.95 * self.m
        x = x / x.norm()
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
        return 0.2 * math.sqrt(max(x.shape)) * x


class Lion(AdamW):
    def update(self, g):
        b1, b2 = self.config.betas
        update = torch.sign(b1 * self.m + (1 - b1) * g)
        self.m = b2 * self.m + (1 - b2) * g
        return update


class Shampoo(AdamW):
    def update(self, g):
        sides = [g.movedim(i, 0).reshape(n, -1) for i, n in enumerate(g.shape)]
        before = getattr(self, "sums", [1e-6 * torch.eye(len(side), dtype=g.dtype) for side in sides])
        self.sums = [total + side @ side.T for total, side in zip(before, sides, strict=True)]
        if g.ndim == 1:
            return power(self.sums[0], -1 / 2) @ g
        return power(self.sums[0], -1 / 4) @ g @ power(self.sums[1], -1 / 4)


class Soap(AdamW):
    def update(self, g):
        b1, b2 = self.config.betas
        if self.t == 0:
            # the first gradient makes the bases and moves nothing
            self.t = 1
            self.sums = [(1 - b2) * g @ g.T, (1 - b2) * g.T @ g] if g.ndim == 2 else []
            self.bases = [torch.linalg.eigh(total)[1].flip(1) for total in self.sums]
            return torch.zeros_like(g)
        left, right = self.bases if g.ndim == 2 else (torch.eye(len(g), dtype=g.dtype), torch.ones(1, 1, dtype=g.dtype))
        rotated = (left.T @ g.reshape(len(g), -1) @ right).reshape(g.shape)
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * rotated**2
        adam = (left.T @ self.m.reshape(len(g), -1) @ right).reshape(g.shape) / (self.v.sqrt() + 1e-8)
        adam *= math.sqrt(1 - b2**self.t) / (1 - b1**self.t)
        if g.ndim == 2:
            products = (g @ g.T, g.T @ g)
            self.sums = [b2 * total + (1 - b2) * new for total, new in zip(self.sums, products, strict=True)]
            if self.t % 10 == 0:
                # a step of the power iteration; the second moments go with the basis vectors, by eigenvalue
                for side, (total, basis) in enumerate(zip(self.sums, self.bases, strict=True)):
                    order = (basis * (total @ basis)).sum(0).argsort(descending=True)
                    self.v = self.v.index_select(side, order)
                    # the package makes this step in float32
                    self.bases[side] = torch.linalg.qr((total @ basis)[:, order].float())[0].double()
        self.t += 1
        return (left @ adam.reshape(len(g), -1) @ right.T).reshape(g.shape)


REFERENCES = {"muon": Muon, "soap": Soap, "shampoo": Shampoo, "lion": Lion}


@pytest.mark.parametrize("name", REFERENCES)
def test_each_step_is_the_published_formulas(name):
    config = OptimizerConfig(name=name, learning_rate=0.01, warmup_steps=5, weight_decay=0.1, betas=(0.8, 0.9))
    model = Toy()
    algorithm = TrainingAlgorithm(model, context(config, total=STEPS))
    references = {key: REFERENCES[name](key, p, config) for key, p in model.named_parameters()}
    for step in range(1, STEPS + 1):
        before = {key: p.detach().clone() for key, p in model.named_parameters()}
        gradients = torch.autograd.grad(model(**toy_batch(step)), list(model.parameters()))
        rate = algorithm.step(step, toy_batch(step), lambda batch: model(**batch)).learning_rate
        for (key, p), g in zip(model.named_parameters(), gradients, strict=True):
            decay = rate * 0.1 if p.ndim > 1 and not (name == "soap" and step == 1) else 0
            update = references[key].update(g)
            expected = (1 - decay) * before[key] - rate * update
            if name == "soap":
                # it decays what it has moved
                expected = (1 - decay) * (before[key] - rate * update)
            if name == "muon" and p.ndim > 1 and not key.startswith("embedding"):
                # torch computes these in bfloat16, and five iterations amplify its rounding: by 0.11 at most here
                assert (p.detach() - expected).norm() < 0.15 * (rate * update).norm(), (key, step)
            else:
                torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


def test_schedule_free_trains_between_the_last_weights_and_their_average():
    config = OptimizerConfig(name="schedule-free", learning_rate=0.01, warmup_steps=5, weight_decay=0.1)
    model = Toy()
    algorithm = TrainingAlgorithm(model, context(config, total=STEPS))
    last = {key: p.detach().clone() for key, p in model.named_parameters()}
    average = copy.deepcopy(last)
    squares, total = defaultdict(float), 0.0
    b1, b2 = config.betas
    for step in range(1, STEPS + 1):
        gradients = torch.autograd.grad(model(**toy_batch(step)), list(model.parameters()))
        trained_at = {key: p.detach().clone() for key, p in model.named_parameters()}
        rate = algorithm.step(step, toy_batch(step), lambda batch: model(**batch)).learning_rate
        total += rate**2
        for (key, p), g in zip(model.named_parameters(), gradients, strict=True):
            squares[key] = b2 * squares[key] + (1 - b2) * g**2
            adam = g / ((squares[key] / (1 - b2**step)).sqrt() + 1e-8)
            last[key] = last[key] - rate * (adam + (0.1 * trained_at[key] if p.ndim > 1 else 0))
            average[key] = average[key] + rate**2 / total * (last[key] - average[key])
            torch.testing.assert_close(p.detach(), (1 - b1) * last[key] + b1 * average[key], rtol=0, atol=1e-9)
        kept = {key: p.detach().clone() for key, p in model.named_parameters()}
        with algorithm.optimizer.evaluated():
            for key, p in model.named_parameters():
                torch.testing.assert_close(p.detach(), average[key], rtol=0, atol=1e-9)
        assert all(torch.equal(p, kept[key]) for key, p in model.named_parameters())
    assert (average["inner.weight"] - last["inner.weight"]).abs().max() > 0.01


def test_lawa_trains_as_adamw_and_is_evaluated_at_its_latest_weights():
    config = OptimizerConfig(name="lawa", learning_rate=0.01, warmup_steps=5, weight_decay=0.1)
    model, plain = Toy(), Toy()
    algorithm = TrainingAlgorithm(model, context(config, total=150))
    reference = TrainingAlgorithm(plain, context(dataclasses.replace(config, name="adamw"), total=150))
    latest = []
    for step in range(1, 151):
        for one, of in ((algorithm, model), (reference, plain)):
            one.step(step, toy_batch(step), lambda batch, of=of: of(**batch))
        if step % 20 == 0:
            latest.append({key: p.detach().clone() for key, p in plain.named_parameters()})
        if step in (19, 60, 150):
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
            with algorithm.optimizer.evaluated():
                for key, p in model.named_parameters():
                    # of 140, 120, ..., 40 at the end; before there is one, the weights themselves
                    kept = [weights[key] for weights in latest[-6:]] or [dict(plain.named_parameters())[key]]
                    torch.testing.assert_close(p.detach(), sum(kept) / len(kept), rtol=0, atol=1e-12)


def test_muon_has_the_matrices_of_hidden_layers_alone():
    for model in (
        tiny(),
        OPT.new_model(ModelConfig(architecture="opt", size="d16"), vocab_size=10, max_length=4, pad_id=8, seed=0),
    ):
        matrices, others = Optimizer(model, OptimizerConfig(name="muon"), total=1)._optimizers
        names = {parameter: name for name, parameter in model.named_parameters()}
        by_muon = {names[p] for group in matrices.param_groups for p in group["params"]}
        by_adamw = {names[p] for group in others.param_groups for p in group["params"]}
        assert by_muon | by_adamw == {*names.values()}
        assert not by_muon & by_adamw
        assert all(name.endswith("weight") and "embed" not in name and "norm" not in name.lower() for name in by_muon)
        assert all(names[p] in by_muon for p in names if p.ndim == 2 and "embed" not in names[p])


def test_a_stage_goes_on_from_the_average_of_a_schedule_free_one(tmp_path):
    free = OptimizerConfig(name="schedule-free", learning_rate=0.01, warmup_steps=1)
    stages = (StageConfig(steps=6, optimizer=free), StageConfig(steps=4, optimizer=OptimizerConfig(name="sgd")))
    config = staged(stages=stages, steps=10)
    whole = trained(tmp_path / "whole", config, validate=validate)
    for step in (4, 6):
        stopped = Run(tmp_path / f"stopped-{step}")
        with pytest.raises(Interrupted):
            train(stopped, config, Signalling({step}), validate=validate)
        train(stopped, config, PairLanguage(), validate=validate)
        assert content(stopped) == content(whole)
    alone = trained(tmp_path / "alone", small(optimizer=free, steps=6, log_every=2))
    first = alone.checkpoint(6) / "model.safetensors"
    assert (whole.checkpoint(6) / "model.safetensors").read_bytes() == first.read_bytes()


def test_what_an_optimizer_cannot_do_is_said(tmp_path):
    with pytest.raises(IsolossError, match="schedule is 'cosine', and schedule-free averages weights"):
        train(
            Run(tmp_path / "run"),
            small(optimizer=OptimizerConfig(name="schedule-free", schedule="cosine")),
            PairLanguage(),
        )
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_rate_that_diverges_is_told_with_its_step(tmp_path):
    for name, message in (
        ("shampoo", "at step 2, shampoo cannot decompose a matrix of gradients: lower the learning rate"),
        ("soap", r"the loss at step 3 is nan: lower the learning rate .*\(no checkpoint was saved\)"),
    ):
        with pytest.raises(IsolossError, match=message):
            trained(tmp_path / name, small(optimizer=OptimizerConfig(name=name, learning_rate=1e30, warmup_steps=0)))
