"""Settings of a run that are refused, in one sentence, before anything is written."""

import math
from dataclasses import dataclass
from typing import Literal

import pytest
from distributed_workers import examples
from running import small, validate
from toy_language import PairLanguage

from isoloss.config import AlgorithmConfig
from isoloss.errors import IsolossError
from isoloss.lab.training.algorithms.config import (
    AdversarialConfig,
    FeatureEntropyConfig,
    FisherPenaltyConfig,
    SAMConfig,
)
from isoloss.lab.training.train import train
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig
from isoloss.runs import Run

CAUSAL = {"model": ModelConfig(architecture="opt"), "objective": ObjectiveConfig(kind="causal")}
LSTM = ModelConfig(architecture="lstm", size="h16")
COMPILED, FSDP = {"compiled": True}, {"parallel": "fsdp"}


@dataclass(frozen=True, kw_only=True)
class Own(AlgorithmConfig):
    """Of another package."""

    kind: Literal["own"] = "own"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"checkpoints": (-1, 3, 11)}, "checkpoints is -1, 3, 11; it must be steps from 0 to 10"),
        ({"model": ModelConfig(size="d7")}, "has no model size 'd7'"),
        ({"device": "gpu"}, "device is 'gpu'; it must be auto, cpu"),
        ({"precision": "fp16"}, "precision is 'fp16'; it must be one of float32, bfloat16"),
        # algorithms
        ({"algorithm": SAMConfig(), "batch_size": 7}, "batch_size is 7; sam's halves need a multiple of 2"),
        ({"algorithm": SAMConfig(ascent="none")}, "ascent is 'none'; it must be one of"),
        (
            {"algorithm": AdversarialConfig(weight=0.0)},
            "weight is 0.0; it must be finite, above 0 to spoil .* below 0 to help",
        ),
        ({"algorithm": AdversarialConfig(weight=math.nan)}, "the adversary's weight is nan; it must be finite"),
        ({"algorithm": AdversarialConfig(weight=math.inf)}, "the adversary's weight is inf; it must be finite"),
        (
            {"algorithm": AdversarialConfig(task_examples=255)},
            r"draws 128 \+ 128 examples per step from .*, 255",
        ),
        (
            {"algorithm": FeatureEntropyConfig(weight=0)},
            "the weight of the feature entropy is 0; it must be finite",
        ),
        ({"algorithm": FisherPenaltyConfig(weight=math.nan)}, "weight of the Fisher penalty is nan; it must be finite"),
        ({"algorithm": FisherPenaltyConfig(parameters=())}, "parameters is empty: give a pattern of their names"),
        # objectives
        ({"objective": ObjectiveConfig(labels="soft")}, "objective.labels is 'soft'; it must be one of sampled, exact"),
        ({"objective": ObjectiveConfig(labels="exact", corruption="bert")}, "choose the corruption 'mask'"),
        ({"objective": ObjectiveConfig(labels="exact")}, "PairLanguage has no exact conditionals"),
        ({"objective": ObjectiveConfig(fraction=0.4)}, "fraction is 0.4, but masking is 'one'"),
        ({"objective": CAUSAL["objective"]}, "objective is 'causal', and the architecture bert learns 'masked'"),
        ({"model": CAUSAL["model"]}, "objective is 'masked', and the architecture opt learns 'causal'"),
        (
            {**CAUSAL, "objective": ObjectiveConfig(kind="causal", masking="fraction")},
            "masks no tokens: leave out masking",
        ),
        # training sets
        ({"masked_copies": 5}, "masked_copies is 5, and the sentences are fresh ones at every step: give num_sent"),
        ({"masked_copies": 5, "num_sentences": 9, **CAUSAL}, "the causal objective masks no tokens"),
        (
            {"num_sentences": 9, "steps": 3, "stages": (StageConfig(steps=1), StageConfig(steps=2, batch_size=4))},
            "a stage has a batch_size other than 8",
        ),
        ({"num_sentences": (1 << 25) + 1}, "PairLanguage draws .* held in memory: at most 33,554,432 of 4 tokens"),
        # the compiled step
        ({**COMPILED, "model": LSTM}, "architecture is lstm; it must be bert"),
        (
            {**COMPILED, "model": ModelConfig(architecture="bert-pre-ln")},
            "is bert-pre-ln; it must be bert",
        ),
        ({**COMPILED, "model": ModelConfig(size="d16", width=24)}, "width is 24; it must be a multiple of 16"),
        ({**COMPILED, "model": ModelConfig(size="d16", ffn=50)}, "ffn is 50; it must be a multiple of 4"),
        ({**COMPILED, "objective": ObjectiveConfig(masking="fraction")}, "masking is 'fraction'; it must be 'one'"),
        ({**COMPILED, "precision": "bfloat16"}, "precision is bfloat16; it must be float32"),
        ({**COMPILED, "threads": 2}, "threads is 2; it must be 1, or 0"),
        (
            {**COMPILED, "optimizer": OptimizerConfig(name="muon")},
            "the optimizer is muon; it must be adamw or sgd",
        ),
        ({**COMPILED, "algorithm": Own()}, "compiled is on and the algorithm own is not isoloss's: leave compiled out"),
        # shards
        ({"parallel": "zero"}, "parallel is 'zero'; it must be one of ddp, fsdp"),
        ({**FSDP, "algorithm": FisherPenaltyConfig()}, "the fisher-penalty algorithm takes second derivatives"),
        ({**FSDP, "algorithm": SAMConfig(ascent="per-process")}, "sam's ascent is 'per-process'"),
        ({**FSDP, "model": LSTM}, "but lstm needs full weights"),
        ({**FSDP, "optimizer": OptimizerConfig(name="muon")}, "is 'fsdp', but muon does not run with it: use ddp, or"),
    ],
)
def test_settings_are_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(IsolossError, match=message):
        train(Run(tmp_path / "run"), small(**changes), PairLanguage(), task_examples=examples, validate=validate)
    assert not (tmp_path / "run").exists()
