"""Sixty checkpoints for a suite: four recipes, five seeds, three steps of a small Llama, on a grammar and on text."""

import dataclasses

from isoloss.lab.languages.config import CorpusConfig, PCFGConfig
from isoloss.lab.training.algorithms.config import SAMConfig
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, TrainConfig
from isoloss.studies import Experiment, Measurement, Scale, Study

SEEDS = {"": range(5), "-repeated": range(5, 10)}  # of the first run, and of its replication
ADAMW = OptimizerConfig(name="adamw", learning_rate=1e-3, warmup_steps=50, weight_decay=0.0)
RECIPES = {
    "adamw": {"optimizer": ADAMW},
    "adamw-4x": {"optimizer": dataclasses.replace(ADAMW, learning_rate=4e-3)},
    "muon": {"optimizer": dataclasses.replace(ADAMW, name="muon")},
    "sam": {"optimizer": ADAMW, "algorithm": SAMConfig(rho=0.05)},
}
LANGUAGES = {
    "grammar": {
        "language": PCFGConfig(levels=3, symbols_per_level=4, rules_per_symbol=4, vocab_size=16, zipf=1.0, seed=1510),
        "batch_size": 64,
        "steps": 2000,
        "checkpoints": (1000, 1500),
        "model": ModelConfig(architecture="llama", size="d32", layers=2, dropout=0.0),
    },
    "docs": {
        "language": CorpusConfig(paths=("python:docs",), tokenizer="wordpiece:1000", length=64),
        "batch_size": 32,
        "steps": 600,
        "checkpoints": (300, 450),
        "model": ModelConfig(architecture="llama", size="d64", layers=2, dropout=0.0),
    },
}


def runs(language: str, draw: str) -> dict[str, Experiment]:
    return {
        f"{recipe}-{seed}": Experiment(
            config=TrainConfig(
                seed=seed,
                objective=ObjectiveConfig(kind="causal"),
                device="cpu",
                threads=1,
                **LANGUAGES[language],
                **settings,
            ),
            measurements=(Measurement(measures=("loss",)),),
            group=recipe,
        )
        for recipe, settings in RECIPES.items()
        for seed in SEEDS[draw]
    }


STUDY = Study(
    name="suite_laptop",
    title="Sixty checkpoints: four recipes, five seeds, three steps",
    scales={
        f"{language}{draw}": Scale(description="ten to thirty minutes on two cores", experiments=runs(language, draw))
        for language in LANGUAGES
        for draw in SEEDS
    },
)
