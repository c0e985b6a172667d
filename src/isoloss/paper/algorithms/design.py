"""The plan of the study: one model, one language, seven algorithms, several seeds of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isoloss.evaluation.config import EvalConfig
from isoloss.languages.config import LAPTOP_PCFG, PCFGConfig
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, TrainConfig
from isoloss.studies.design import Design, Experiment, Measurement, choose, steps_of
from isoloss.training.algorithms.config import AdversarialConfig, FisherPenaltyConfig, SAMConfig

NAME = "algorithms"
BASELINE = "adamw"

# what each is called in figures and tables; all but SGD go with AdamW
ALGORITHMS: Mapping[str, str] = {
    BASELINE: "AdamW",
    "regularised": "Dropout and weight decay",
    "sam": "SAM",
    "adversarial": "Adversary",
    "exact": "Exact labels",
    "fisher-penalty": "Fisher penalty",
    "sgd": "SGD",
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the study is.

    Attributes:
        text: What it is for and how long it takes.
        language: The grammar.
        size: The model's size.
        steps: Training steps.
        watched: Steps at which each run is measured, besides the last.
        early: Steps at which the runs with exact labels are measured, too: they reach AdamW's last loss so early.
        batch_size: Sentences in a step.
        warmup_steps: AdamW's; SGD's is 12 % of the steps (the paper's appendix B.2).
        learning_rate: AdamW's, constant after the warm-up.
        sgd_learning_rate: SGD's.
        seeds: Of the runs of each algorithm. Runs of one seed have the same initial weights, sentences and masks.
        tasks: Downstream tasks; the first is the one that the adversary spoils.
        evaluation: How much a checkpoint is measured on; the seed is added to that of the run, so that each seed is
            measured on sentences of its own, and no probe is fitted on the sentences that the adversary has.
    """

    text: str
    language: PCFGConfig
    size: str
    steps: int
    watched: tuple[int, ...]
    early: tuple[int, ...]
    batch_size: int
    warmup_steps: int
    learning_rate: float = 1e-3
    sgd_learning_rate: float = 0.4
    seeds: tuple[int, ...]
    tasks: tuple[str, ...]
    evaluation: EvalConfig


SCALES = {
    "laptop": Scale(
        text="about forty minutes of one core",
        language=LAPTOP_PCFG,
        size="d64",
        steps=3_000,
        watched=(700, 1_000, 1_400, 1_900, 2_400),
        early=(200, 300, 400, 500),
        batch_size=128,
        warmup_steps=200,
        seeds=(1, 2, 3),
        tasks=("prefix-4", "root", "prefix-2"),
        evaluation=EvalConfig(probe_seeds=3, seed=100),
    ),
    "smoke": Scale(
        text="two minutes on two cores: every part runs, no result means anything",
        language=PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8),
        size="d16",
        steps=100,
        watched=(50,),
        early=(25,),
        batch_size=32,
        warmup_steps=10,
        seeds=(1, 2),
        tasks=("prefix-2", "root", "prefix-1"),
        evaluation=EvalConfig(
            loss_sentences=256,
            trace_sentences=64,
            probe_train=256,
            probe_test=256,
            probe_seeds=2,
            probe_epochs=10,
            seed=100,
        ),
    ),
}


def scale_of(name: str) -> Scale:
    """Return the scale called `name`; an unknown name is an error that lists them."""
    return choose(SCALES, name, study=NAME)


def design(scale_name: str) -> Design:
    """Return all that is trained and measured at a scale."""
    return Design(NAME, scale_name, experiments(scale_of(scale_name)))


def run_name(algorithm: str, seed: int) -> str:
    """The name of the run of an algorithm and a seed."""
    return f"{algorithm}-{seed}"


def experiments(scale: Scale) -> dict[str, Experiment]:
    """Return each run by its name."""
    runs = {}
    for algorithm in ALGORITHMS:
        for seed in scale.seeds:
            config = config_of(scale, algorithm, seed)
            settings = dataclasses.replace(scale.evaluation, seed=scale.evaluation.seed + seed)
            measures = ("loss", "trace", *(f"probe-{task}" for task in scale.tasks))
            part = Measurement(measures=measures, steps=steps_of(config), settings=settings)
            runs[run_name(algorithm, seed)] = Experiment(config=config, measurements=(part,))
    return runs


def config_of(scale: Scale, algorithm: str, seed: int) -> TrainConfig:
    """Return what a run is trained with: AdamW without dropout and weight decay, but for what its algorithm changes."""
    adamw = OptimizerConfig(learning_rate=scale.learning_rate, warmup_steps=scale.warmup_steps, weight_decay=0.0)
    sgd = OptimizerConfig(
        name="sgd", learning_rate=scale.sgd_learning_rate, warmup_steps=round(0.12 * scale.steps), weight_decay=0.0
    )
    own: dict[str, dict[str, Any]] = {
        BASELINE: {},
        "regularised": {
            "model": ModelConfig(size=scale.size, dropout=0.1),
            "optimizer": dataclasses.replace(adamw, weight_decay=0.01),
        },
        "sam": {"algorithm": SAMConfig()},
        "adversarial": {"algorithm": AdversarialConfig(task=scale.tasks[0])},
        "exact": {
            "objective": ObjectiveConfig(labels="exact"),
            "checkpoints": (*scale.early, *scale.watched),
        },
        "fisher-penalty": {"algorithm": FisherPenaltyConfig()},
        "sgd": {"optimizer": sgd},
    }
    common: dict[str, Any] = {
        "language": scale.language,
        "model": ModelConfig(size=scale.size, dropout=0.0),
        "optimizer": adamw,
        "steps": scale.steps,
        "batch_size": scale.batch_size,
        "checkpoints": scale.watched,
        "seed": seed,
        "device": "cpu",
        "threads": 1,
    }
    return TrainConfig(**{**common, **own[algorithm]})
