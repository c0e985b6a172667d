"""The scales for two cores: small grammars, hidden Markov models and texts, with every arm of the study."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from isoloss.lab.languages.config import HMMConfig, PCFGConfig
from isoloss.lab.training.algorithms.config import AdversarialConfig
from isoloss.paper.reproduction import cpu_texts
from isoloss.paper.reproduction.spec import FLATNESS, HEAD_WIDTH, SHOWN, Arm, Dataset, StudySize, sgd_arms, small_bert
from isoloss.run_config import ModelConfig, OptimizerConfig, StageConfig

RATE = 1.5e-3  # of grammars; with twice as much, the largest size gets worse as it trains
FEATURE_SENTENCES = 64  # whose features are compared by CKA: an evaluation keeps their Gram matrix, 8 KB


def sgd(steps: int, rate: float) -> OptimizerConfig:
    """Return plain SGD with the paper's warm-up, 12 % of the steps (appendix B.2)."""
    return OptimizerConfig(name="sgd", learning_rate=rate, warmup_steps=round(0.12 * steps), weight_decay=0.0)


def _small_sgd_arms(steps: int) -> dict[str, Arm]:
    return sgd_arms(steps, sgd(steps, 0.2), watched=(steps // 4, steps // 2))


def _algorithms(task: str, *, adversary: int, helper: int) -> dict[str, Arm]:
    adamw = OptimizerConfig(learning_rate=2 * RATE, schedule="cosine", weight_decay=0.0)

    def arm(title: str, steps: int, weight: float) -> Arm:
        algorithm = AdversarialConfig(task=task, weight=weight)
        stage = StageConfig(steps=steps, labels="exact", optimizer=adamw, algorithm=algorithm)
        return Arm(title=title, stages=(stage,), shown_in=("table 1", "table 2"))

    weight = AdversarialConfig.weight
    return {"adversary": arm("Adversary", adversary, weight), "helper": arm("Helper", helper, -weight)}


PROBES = {"feature_sentences": FEATURE_SENTENCES, "probe_solver": "convex"}
# so few sentences that losses and accuracies are sums over all of them
ENUMERATED = {**PROBES, "num_test": "all", "loss_sentences": "all"}
# three levels are what three nested tasks take: sentences of 8 tokens. So few symbols that a small model nears the
# true conditionals within some thousand steps, and so few rules that it then transfers better than an untrained one
GRAMMAR = PCFGConfig(levels=3, symbols_per_level=4, rules_per_symbol=4, vocab_size=8)
TASKS = {
    "A": "prefix-8",
    "B": "prefix-4",
    "C": "prefix-2",
}  # the whole sentence, its half, its quarter: as in the paper
OTHER_FLATNESS = tuple(name for name in FLATNESS if name not in ("trace", "minimal-trace"))
# they take half of the time of measuring a model
SLOW_FLATNESS = ("hessian-trace", "weighted-trace", "adaptive-sharpness")
FAST_FLATNESS = tuple(name for name in OTHER_FLATNESS if name not in SLOW_FLATNESS)


def _small_pcfg(
    *,
    grammars: tuple[int, ...],
    sizes: tuple[str, ...],
    main: str,
    layers: int,
    sgd_steps: int,
    algorithm_steps: tuple[int, int],
    settings: Mapping[str, Any],
    flatness: Sequence[str] = OTHER_FLATNESS,
    pre_layer_norm: bool = True,
    **more: Any,
) -> Dataset:
    largest = sizes[-1]
    # not in the paper; the compiled step is of post-layer-norm blocks
    pre_ln = Arm(title="Pre-layer-norm", changes={"model": small_bert(main, layers, "bert-pre-ln"), "compiled": False})
    adversary, helper = algorithm_steps
    # a probe reads the states of all tokens; these are the features of the smallest size
    features = 2**GRAMMAR.levels * small_bert(sizes[0], layers).heads * HEAD_WIDTH
    return Dataset(
        name="pcfg",
        title="PCFG",
        languages=tuple(dataclasses.replace(GRAMMAR, seed=seed) for seed in grammars),
        tasks={name: f"probe-{task}" for name, task in TASKS.items()},
        common={
            "batch_size": 64,
            "optimizer": OptimizerConfig(learning_rate=RATE, weight_decay=0.0),
            "compiled": True,
            "device": "cpu",
            "threads": 1,
        },
        sizes={size: small_bert(size, layers) for size in sizes},
        main=main,
        cooldown_rate=RATE,
        arms={
            **_small_sgd_arms(sgd_steps),
            **_algorithms(TASKS["B"], adversary=adversary, helper=helper),
            **({"pre-ln": pre_ln} if pre_layer_norm else {}),
        },
        measures=("loss", "trace", "minimal-trace", *(f"probe-{task}" for task in TASKS.values())),
        size_measures=(
            *(f"projected-{task}-{features}" for task in TASKS.values()),
            *(f"trace-in-{largest}-{scale}" for scale in ("paper", "exact")),
            f"minimal-trace-in-{largest}",
        ),
        arm_measures=(*(f"few-shot-{task}-100" for task in TASKS.values()), *flatness, "features"),
        settings={
            **settings,
            **PROBES,
            "expanded_layers": layers,
            "expanded_heads": small_bert(largest, layers).heads,
        },
        shown=SHOWN["pcfg"],
        **more,
    )


def _small_hmm(
    *,
    models: tuple[int, ...],
    language: HMMConfig,
    sizes: tuple[str, ...],
    sgd_steps: int,
    settings: Mapping[str, Any],
    flatness: Sequence[str] = OTHER_FLATNESS,
    **more: Any,
) -> Dataset:
    tasks = {"6": "probe-state-2", "10": "probe-state-3"}
    # an LSTM has states of both directions
    features = language.length * 2 * int(sizes[0][1:])
    return Dataset(
        name="hmm",
        title="HMM",
        languages=tuple(dataclasses.replace(language, seed=seed) for seed in models),
        tasks=tasks,
        common={
            "batch_size": 64,
            "optimizer": OptimizerConfig(learning_rate=3e-3, weight_decay=0.0),
            "device": "cpu",
            "threads": 1,
        },
        sizes={size: ModelConfig(architecture="lstm", size=size, dropout=0.0) for size in sizes},
        arms=_small_sgd_arms(sgd_steps),
        measures=("loss", "trace", *tasks.values()),
        size_measures=tuple(f"projected-state-{state}-{features}" for state in (2, 3)),
        arm_measures=(*flatness, "features"),
        settings={**settings, **ENUMERATED},
        shown=SHOWN["hmm"],
        **more,
    )


SMOKE = StudySize(
    description="some minutes on two cores: every part runs, no verdict is given",
    datasets=(
        _small_pcfg(
            grammars=(300, 301),
            seeds=2,
            sizes=("d16", "d32"),
            main="d32",
            layers=1,
            watched=(20, 40, 60),
            branch=40,
            cooldown_steps=20,
            other_cooldowns=(10, 40),
            sgd_steps=20,
            algorithm_steps=(10, 10),
            settings={"num_train": 256, "num_test": 256, "loss_sentences": 256, "num_sequences": 64},
            flatness=FAST_FLATNESS,
            band=0.4,  # after so few steps, models are further apart
        ),
        _small_hmm(
            models=(300, 301),
            language=HMMConfig(states=4, blocks=2, vocab_size=8, length=4),
            seeds=1,
            sizes=("h16", "h32"),
            main="h32",
            watched=(20, 40, 60),
            branch=40,
            cooldown_steps=20,
            other_cooldowns=(10, 40),
            sgd_steps=20,
            settings={"num_train": 256, "num_sequences": 64},
            flatness=FAST_FLATNESS,
            band=0.4,  # after so few steps, models are further apart
        ),
        cpu_texts.generated(
            seeds=2,
            teacher_steps=100,
            vocab_size=50,
            length=8,
            sizes=("d16", "d32"),
            main="d32",
            num_sentences=4_096,
            watched=(20, 40, 60),
            branch=40,
            cooldown_steps=20,
            other_cooldowns=(10, 40),
            settings={"num_train": 256, "num_test": 128, "loss_sentences": 64, "num_sequences": 64},
            band=0.4,
        ),
        cpu_texts.web(
            seeds=2,
            size="d16",
            watched=(20, 40, 60),
            branch=40,
            cooldown_steps=20,
            other_cooldowns=(10, 40),
            settings={
                **{"num_train": 128, "num_test": 64, "finetune_epochs": 1},
                **{"loss_sentences": 64, "num_sequences": 64},
            },
        ),
        cpu_texts.text(
            seeds=2,
            size="d16",
            watched=(20, 40),
            num_sentences=64,
            settings={
                **{"num_train": 128, "num_test": 64, "finetune_epochs": 1},
                **{"loss_sentences": 64, "num_sequences": 64},
            },
        ),
    ),
)

LAPTOP = StudySize(
    description="half an hour on two cores",
    datasets=(
        _small_pcfg(
            grammars=tuple(range(710, 716)),
            seeds=1,
            sizes=("d16", "d32", "d64"),
            main="d32",
            layers=2,
            watched=(500, 1_000, 2_000),
            branch=1_000,
            cooldown_steps=500,
            other_cooldowns=(125, 1_500),
            sgd_steps=1_000,
            algorithm_steps=(250, 150),
            settings={"num_train": 2_048, "num_test": 4_096, "loss_sentences": 4_096, "num_sequences": 256},
            flatness=FAST_FLATNESS,
            pre_layer_norm=False,
        ),
        _small_hmm(
            models=(710, 711, 712),
            language=HMMConfig(states=8, blocks=2, vocab_size=8, length=4),
            seeds=1,
            sizes=("h16", "h32"),
            main="h32",
            watched=(250, 500, 1_000),
            branch=500,
            cooldown_steps=250,
            other_cooldowns=(60, 500),
            sgd_steps=500,
            settings={"num_train": 1_024, "num_sequences": 256},
            flatness=FAST_FLATNESS,
        ),
        cpu_texts.generated(
            seeds=3,
            teacher_steps=600,
            vocab_size=100,
            length=12,
            sizes=("d16", "d32", "d64"),
            main="d32",
            num_sentences=16_384,
            watched=(1_000, 2_000, 4_000),
            branch=2_000,
            cooldown_steps=500,
            # the shortest leaves a larger model at the loss of a smaller one after the longest
            other_cooldowns=(50, 4_000),
            settings={"num_train": 1_024, "num_test": 1_024, "loss_sentences": 256, "num_sequences": 128},
        ),
        cpu_texts.web(
            seeds=3,
            size="d32",
            watched=(250, 500, 1_000),
            branch=500,
            cooldown_steps=125,
            other_cooldowns=(30, 250, 1_000),
            settings={
                **{"num_train": 1_024, "num_test": 1_024, "finetune_epochs": 2},
                **{"loss_sentences": 512, "num_sequences": 256},
            },
        ),
        cpu_texts.text(
            seeds=3,
            size="d32",
            watched=(500, 1_000, 1_500),
            num_sentences=512,
            settings={
                **{"num_train": 1_024, "num_test": 1_024, "finetune_epochs": 2},
                **{"loss_sentences": 512, "num_sequences": 256},
            },
        ),
    ),
)

EVENING = StudySize(
    description="hours on two cores",
    datasets=(
        _small_pcfg(
            grammars=tuple(range(720, 728)),
            seeds=2,
            sizes=("d16", "d32", "d64"),
            main="d32",
            layers=2,
            watched=(1_000, 2_000, 4_000),
            branch=2_000,
            cooldown_steps=1_000,
            other_cooldowns=(125, 500, 3_000),
            sgd_steps=2_000,
            algorithm_steps=(500, 300),
            settings={"num_train": 4_096, "num_test": 8_192, "loss_sentences": 8_192, "num_sequences": 512},
        ),
        _small_hmm(
            models=tuple(range(720, 726)),
            language=HMMConfig(states=8, blocks=2, vocab_size=16, length=4),
            seeds=1,
            sizes=("h16", "h32", "h64"),
            main="h32",
            watched=(500, 1_000, 2_000),
            branch=1_000,
            cooldown_steps=500,
            other_cooldowns=(60, 125, 250, 1_000),
            sgd_steps=1_000,
            settings={"num_train": 2_048, "num_sequences": 512},
        ),
        cpu_texts.generated(
            seeds=4,
            teacher_steps=2_000,
            vocab_size=100,
            length=12,
            sizes=("d16", "d32", "d64"),
            main="d32",
            num_sentences=65_536,
            watched=(1_000, 2_000, 4_000),
            branch=2_000,
            cooldown_steps=500,
            # the shortest leaves a larger model at the loss of a smaller one after the longest
            other_cooldowns=(50, 1_000, 4_000),
            settings={"num_train": 4_096, "num_test": 4_096, "loss_sentences": 1_024, "num_sequences": 512},
        ),
        cpu_texts.web(
            seeds=4,
            size="d32",
            watched=(500, 1_000, 2_000),
            branch=1_000,
            cooldown_steps=250,
            other_cooldowns=(60, 500, 2_000),
            settings={
                **{"num_train": 2_048, "num_test": "all", "finetune_epochs": 2},
                **{"loss_sentences": 512, "num_sequences": 256},
            },
        ),
        cpu_texts.text(
            seeds=4,
            size="d32",
            watched=(750, 1_500, 2_250, 3_000),
            num_sentences=1_024,
            settings={
                **{"num_train": 2_048, "num_test": "all", "finetune_epochs": 2},
                **{"loss_sentences": 512, "num_sequences": 256},
            },
        ),
    ),
)
