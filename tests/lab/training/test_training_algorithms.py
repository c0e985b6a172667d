"""Which algorithm a config builds, what is refused, and that each goes on bit for bit and trains through the loop."""

import dataclasses
from typing import Literal

import pytest
import torch
from distributed_workers import examples
from running import Signalling, content, small
from stepping import context
from toy_language import PairLanguage

from isoloss import config as configs
from isoloss.config import AlgorithmConfig
from isoloss.errors import IsolossError
from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.models.make import make_model
from isoloss.lab.training.algorithms.adversarial import Adversarial
from isoloss.lab.training.algorithms.base import TrainingAlgorithm
from isoloss.lab.training.algorithms.config import (
    AdversarialConfig,
    FeatureEntropyConfig,
    FisherPenaltyConfig,
    GradientConfig,
    SAMConfig,
)
from isoloss.lab.training.algorithms.feature_entropy import FeatureEntropy
from isoloss.lab.training.algorithms.fisher_penalty import FisherPenalty
from isoloss.lab.training.algorithms.sam import SAM
from isoloss.lab.training.train import Interrupted, train
from isoloss.registry import ALGORITHMS
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.runs import Run
from isoloss.seeds import generator

ADVERSARIAL = AdversarialConfig(head_examples=8, loss_examples=4, task_examples=40)
EACH = [
    *(GradientConfig(), SAMConfig(), SAMConfig(batch="same"), ADVERSARIAL),
    *(FisherPenaltyConfig(sentences=3), FeatureEntropyConfig(sentences=8)),
]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    list(zip(EACH, [TrainingAlgorithm, SAM, SAM, Adversarial, FisherPenalty, FeatureEntropy], strict=True)),
)
def test_a_config_builds_its_algorithm(algorithm, expected):
    config = small(algorithm=algorithm)
    assert configs.from_dict(TrainConfig, configs.to_dict(config)) == config
    model = make_model(ModelConfig(size="d16"), PairLanguage(), seed=0)
    made = context(config.optimizer, language=PairLanguage(), task_examples=examples)
    assert type(algorithm.build(model, made)) is expected


def test_what_an_algorithm_computes_is_in_the_metrics(tmp_path):
    for algorithm, names in [
        (SAMConfig(), ["loss_at_ascent_nats"]),
        (ADVERSARIAL, ["adversary_loss", "adversary_accuracy"]),
        (FisherPenaltyConfig(), ["trace_estimate"]),
        (FeatureEntropyConfig(), ["feature_entropy"]),
    ]:
        run = Run(tmp_path / algorithm.kind)
        train(run, small(algorithm=algorithm), PairLanguage(), task_examples=examples)
        assert list(run.metrics()[0]) == ["step", "loss_nats", "learning_rate", "grad_norm", *names]


def test_an_objective_that_is_not_finite_stops_the_run(tmp_path):
    config = small(algorithm=SAMConfig(rho=1e30, batch="same"), checkpoints=(0,))
    with pytest.raises(
        IsolossError, match=r"loss_at_ascent_nats at step 1 is (nan|inf).*the checkpoint of step 0 is kept"
    ):
        train(Run(tmp_path), config, PairLanguage())
    assert Run(tmp_path).steps() == [0]


def test_the_adversary_needs_examples(tmp_path):
    with pytest.raises(IsolossError, match=r"needs 40 examples of the task root: isoloss\.pretrain draws them"):
        train(Run(tmp_path / "run"), small(algorithm=ADVERSARIAL), PairLanguage())
    assert not (tmp_path / "run" / "run.json").exists()


def test_an_unknown_algorithm_or_field_is_refused():
    document = configs.to_dict(TrainConfig(language=PCFGConfig()))
    with pytest.raises(
        IsolossError,
        match="algorithm is one of gradient, sam, adversarial, fisher-penalty, feature-entropy, not 'lion'",
    ):
        configs.from_dict(TrainConfig, {**document, "algorithm": {"kind": "lion"}})
    with pytest.raises(IsolossError, match="rho"):
        configs.from_dict(TrainConfig, {**document, "algorithm": {"kind": "gradient", "rho": 0.1}})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noisy(AlgorithmConfig):
    """The gradient plus noise: an algorithm of another package, in one place."""

    kind: Literal["noisy"] = "noisy"
    scale: float = configs.setting(0.1, above=0)

    def build(self, model, context):
        config = self

        class Algorithm(TrainingAlgorithm):
            def add_gradient(self, number, batch, loss):
                loss_nats = self.add_loss_gradient(batch, loss)
                draws = generator(self.context.seed, "noise", number)
                for p in self.optimizer.parameters:
                    p.grad.add_(config.scale * torch.randn(p.shape, generator=draws))
                return loss_nats, {"scale": config.scale}

        return Algorithm(model, context)

    def check_run(self, run, *, num_processes=1):
        if run.batch_size > 100:
            raise IsolossError("too many")


def test_an_algorithm_from_outside_is_registered_trained_and_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(ALGORITHMS, "_entries", dict(ALGORITHMS._entries))
    ALGORITHMS.register("noisy", Noisy)
    config = configs.from_dict(TrainConfig, configs.to_dict(small(algorithm=Noisy(scale=0.01))))
    assert config.algorithm == Noisy(scale=0.01)
    whole, stopped = Run(tmp_path / "whole"), Run(tmp_path / "stopped")
    train(whole, config, PairLanguage())
    with pytest.raises(Interrupted):
        train(stopped, config, Signalling({3}))
    train(stopped, config, PairLanguage())
    assert content(stopped) == content(whole)
    assert whole.metrics()[0]["scale"] == 0.01
    with pytest.raises(IsolossError, match=r"algorithm.scale is 0\.0; it must be above 0"):
        configs.check(small(algorithm=Noisy(scale=0.0)))
    with pytest.raises(IsolossError, match="too many"):
        configs.check(small(algorithm=Noisy(), batch_size=101))


def test_what_an_algorithm_builds_and_keeps_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(ALGORITHMS, "_entries", dict(ALGORITHMS._entries))
    ALGORITHMS.register("noisy", Noisy)
    loaded = []

    class Algorithm(TrainingAlgorithm):
        def state(self):
            return {**super().state(), "mine": torch.zeros(1)}

        def load_state(self, state):
            loaded.append(state["mine"])
            super().load_state({name: value for name, value in state.items() if name != "mine"})

    monkeypatch.setattr(Noisy, "build", lambda self, model, context: Algorithm(model, context))
    with pytest.raises(Interrupted):
        train(Run(tmp_path / "mine"), small(algorithm=Noisy()), Signalling({3}))
    assert loaded == []
    train(Run(tmp_path / "mine"), small(algorithm=Noisy()), PairLanguage())
    assert len(loaded) == 1
    monkeypatch.setattr(Algorithm, "state", lambda self: {"mine": [1]})
    with pytest.raises(IsolossError, match="state of the training algorithm noisy has a list under 'mine'"):
        train(Run(tmp_path / "list"), small(algorithm=Noisy()), PairLanguage())
    monkeypatch.setattr(Noisy, "build", lambda self, model, context: None)
    with pytest.raises(IsolossError, match="noisy builds a NoneType; it must be an"):
        train(Run(tmp_path / "none"), small(algorithm=Noisy()), PairLanguage())
