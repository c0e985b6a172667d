"""Every algorithm, optimizer, architecture and setting: a run that is stopped and goes on ends with the same bytes."""

import os
import signal

import pytest
from distributed_workers import examples, language_of
from running import SGD_MOMENTUM, content, small, validate

from isoloss.lab.training.algorithms.config import (
    AdversarialConfig,
    FeatureEntropyConfig,
    FisherPenaltyConfig,
    SAMConfig,
)
from isoloss.lab.training.train import Interrupted, train
from isoloss.registry import ALGORITHMS, MODELS, OPTIMIZERS
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig
from isoloss.runs import Run

ADVERSARY = AdversarialConfig(head_examples=8, loss_examples=4, task_examples=40)
STAGES = (
    StageConfig(steps=30, target_kl=2.21, validate_every=2),
    StageConfig(steps=5, optimizer=SGD_MOMENTUM, batch_size=6),
    StageConfig(steps=3, algorithm=SAMConfig()),
)
COMPILED = {"compiled": True, "model": ModelConfig(size="d16", dropout=0.1), "checkpoints": (0, 5)}
# more steps than the optimizers have between two changes of their bases, or two weights that they keep
LONG = {"steps": 24, "checkpoints": (4,)}
RUNS = {
    "gradient": {},
    "sam": {"algorithm": SAMConfig()},
    "sam on the same": {"algorithm": SAMConfig(batch="same")},
    "sam by sgd": {"algorithm": SAMConfig(), "optimizer": SGD_MOMENTUM},
    "adversarial": {"algorithm": ADVERSARY},
    "fisher-penalty": {"algorithm": FisherPenaltyConfig(sentences=3)},
    "feature-entropy": {"algorithm": FeatureEntropyConfig(sentences=8)},
    "sgd with momentum": {"optimizer": SGD_MOMENTUM},
    "cosine, clipped": {"optimizer": OptimizerConfig(warmup_proportion=0.3, schedule="cosine", max_grad_norm=0.5)},
    "linear, in parts": {"optimizer": OptimizerConfig(warmup_steps=3, schedule="linear"), "micro_batch_size": 3},
    **{
        name: {"optimizer": OptimizerConfig(name=name, learning_rate=0.01, warmup_steps=3), **LONG}
        for name in OPTIMIZERS
    },
    "bert-pre-ln": {"model": ModelConfig(architecture="bert-pre-ln", size="d16")},
    "lstm": {"model": ModelConfig(architecture="lstm", size="h64")},
    "opt": {"model": ModelConfig(architecture="opt", size="d16"), "objective": ObjectiveConfig(kind="causal")},
    "llama": {"model": ModelConfig(architecture="llama", size="d16"), "objective": ObjectiveConfig(kind="causal")},
    "modernbert": {"model": ModelConfig(architecture="modernbert", size="d16")},
    "two layers": {"model": ModelConfig(size="d16", layers=2)},
    "bfloat16": {"precision": "bfloat16"},
    "a fraction masked": {"objective": ObjectiveConfig(masking="fraction", fraction=0.4)},
    "exact labels": {"objective": ObjectiveConfig(labels="exact", masking="fraction", fraction=0.4)},
    "compiled": COMPILED,
    "compiled, clipped": {**COMPILED, "optimizer": OptimizerConfig(learning_rate=0.01, max_grad_norm=0.1)},
    "compiled, stages": {**COMPILED, "stages": STAGES, "steps": 38, "log_every": 2, "checkpoints": ()},
    "compiled, adversarial": {**COMPILED, "algorithm": ADVERSARY},
}


def signalling(language, at, number):
    """Let a language send this process a signal while the batches of some steps are made, each once."""
    draw = language.batch

    def batch(step, n, *, seed):
        if step in at:
            at.remove(step)
            os.kill(os.getpid(), number)
        return draw(step, n, seed=seed)

    language.batch = batch
    return language


def test_every_algorithm_optimizer_and_architecture_is_here():
    configs = [small(**changes) for changes in RUNS.values()]
    assert {config.algorithm.kind for config in configs} == set(ALGORITHMS)
    assert {config.optimizer.name for config in configs} == set(OPTIMIZERS)
    # the model of brackets is for their language alone
    assert {config.model.architecture for config in configs} == set(MODELS) - {"bracket-attention"}


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_ends_with_the_same_bytes(tmp_path, name):
    config, options = small(**RUNS[name]), {"task_examples": examples, "validate": validate}
    whole, stopped = Run(tmp_path / "whole"), Run(tmp_path / "stopped")
    train(whole, config, language_of(config), **options)
    for at, number in ((3, signal.SIGINT), (13 if config.steps == 24 else 9, signal.SIGTERM)):
        with pytest.raises(Interrupted):
            train(stopped, config, signalling(language_of(config), [at], number), **options)
    train(stopped, config, language_of(config), **options)
    assert content(stopped) == content(whole)
