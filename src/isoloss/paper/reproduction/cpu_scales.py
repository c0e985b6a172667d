"""The scales for two cores: small grammars, hidden Markov models and texts, with every arm of the study."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from isoloss.lab.languages.config import CorpusConfig, HMMConfig, PCFGConfig, TeacherConfig
from isoloss.lab.training.algorithms.config import AdversarialConfig
from isoloss.paper.design import HEAD_WIDTH, adamw, sgd, small_bert
from isoloss.paper.reproduction.spec import (
    FLATNESS,
    SHOWN,
    Arm,
    Dataset,
    Reproduction,
    sgd_arms,
    teacher_run,
    without_regularization,
)
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig

RATE = 1.5e-3  # of grammars; with twice as much, the largest size gets worse as it trains
FEATURE_SENTENCES = 64  # whose features are compared by CKA: an evaluation keeps their Gram matrix, 8 KB


def _small_sgd_arms(steps: int) -> dict[str, Arm]:
    return sgd_arms(steps, sgd(steps, 0.2), watched=(steps // 4, steps // 2))


def _algorithms(task: str, *, adversary: int, helper: int) -> dict[str, Arm]:
    def arm(title: str, steps: int, weight: float) -> Arm:
        algorithm = AdversarialConfig(task=task, weight=weight)
        stage = StageConfig(steps=steps, labels="exact", optimizer=adamw(2 * RATE), algorithm=algorithm)
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


# --- texts: Python's reference and docstrings stand in for the paper's (docs/method/studies.md) ---

CORPUS = CorpusConfig(paths=("python:docs", "python:docstrings"), tokenizer="wordpiece:1000", length=64, held_out=0.1)
LEARNING_RATE = 3e-3
PROJECTED = 64  # features of a probe, so that all sizes have as many
ONE_CORE: Mapping[str, Any] = {"device": "cpu", "threads": 1}


def _small_generated(
    *,
    teacher_steps: int,
    vocab_size: int,
    length: int,
    sizes: tuple[str, ...],
    main: str,
    num_sentences: int,
    settings: Mapping[str, Any],
    **more: Any,
) -> Dataset:
    """Return what a small OPT writes over its most frequent tokens, with two tasks of the text that it learned."""
    largest, layers, name = sizes[-1], 1, "generated"
    teacher = TrainConfig(
        language=dataclasses.replace(CORPUS, length=32),
        model=small_bert("d32", architecture="opt"),
        objective=ObjectiveConfig(kind="causal"),
        optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine"),
        batch_size=16,
        steps=teacher_steps,
        **ONE_CORE,
    )
    return Dataset(
        name=name,
        title="OPT-generated",
        teacher=teacher,
        languages=(
            TeacherConfig(
                checkpoint=f"../{teacher_run(name)}/checkpoints/step-{teacher_steps}",
                vocab_size=vocab_size,
                length=length,
                samples=1024,
            ),
        ),
        tasks={"QNLI": "probe-sentence-order", "SST-2": "probe-sentence-source"},
        common={
            "batch_size": 64,
            # drawn once: a step takes less time than drawing its sentences
            "num_sentences": num_sentences,
            "optimizer": OptimizerConfig(learning_rate=LEARNING_RATE, weight_decay=0.0),
            "compiled": True,
            **ONE_CORE,
        },
        sizes={size: small_bert(size, layers) for size in sizes},
        main=main,
        # exact ones take the teacher a hundred times as long as the step itself
        cooldown_labels="sampled",
        measures=("loss", "trace", "minimal-trace", "probe-sentence-order", "probe-sentence-source"),
        size_measures=(
            *(f"projected-{task}-{PROJECTED}" for task in ("sentence-order", "sentence-source")),
            *(f"trace-in-{largest}-{scale}" for scale in ("paper", "exact")),
            f"minimal-trace-in-{largest}",
        ),
        settings={
            **settings,
            "probe_solver": "convex",
            "probe_regularization": (3e-3,),  # of so few examples
            "expanded_layers": layers,
            "expanded_heads": small_bert(largest, layers).heads,
        },
        shown=SHOWN[name],
        **more,
    )


def _small_web(*, size: str, watched: tuple[int, ...], settings: Mapping[str, Any], **more: Any) -> Dataset:
    """Return a text on which one model is followed, fine-tuned on one task."""
    return Dataset(
        name="web",
        title="Docstrings, longer training",
        languages=(CORPUS,),
        tasks={"SST-2": "finetune-sentence-source"},
        common=_masked_text(watched[-1]),
        sizes={size: small_bert(size)},
        main=size,
        watched=watched,
        cooldown_labels="sampled",
        cooldown_rate=LEARNING_RATE,
        measures=("loss", "trace", "minimal-trace", "finetune-sentence-source"),
        settings={**_FINETUNING, **settings},
        shown=SHOWN["web"],
        **more,
    )


def _small_text(
    *, seeds: int, size: str, watched: tuple[int, ...], num_sentences: int, settings: Mapping[str, Any]
) -> Dataset:
    """Return a text, with and without regularization, and with SAM: so little that a model learns it by heart."""
    common = {**_masked_text(watched[-1]), "num_sentences": num_sentences}
    regularized = dataclasses.replace(small_bert(size), dropout=0.1)
    tasks = {"SST-2": "finetune-sentence-source", "QNLI": "finetune-docstring-module"}
    bare = {"model": small_bert(size), "optimizer": dataclasses.replace(common["optimizer"], weight_decay=0.0)}
    return Dataset(
        name="text",
        title="Docstrings",
        languages=(CORPUS,),
        seeds=seeds,
        tasks=tasks,
        common=common,
        sizes={size: regularized},
        main=size,
        watched=watched,
        arms=without_regularization(bare),
        measures=("loss", "generalization-gap", "trace", "minimal-trace", *tasks.values()),
        settings={**_FINETUNING, **settings},
        shown=SHOWN["text"],
    )


_FINETUNING = {"finetune_seeds": 1, "finetune_learning_rate": LEARNING_RATE}


def _masked_text(steps: int) -> Mapping[str, Any]:
    return {
        "batch_size": 16,
        "optimizer": OptimizerConfig(learning_rate=LEARNING_RATE, warmup_steps=round(0.025 * steps), weight_decay=0.01),
        "objective": ObjectiveConfig(masking="fraction", fraction=0.15),
        **ONE_CORE,
    }


SMOKE = Reproduction(
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
        _small_generated(
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
        _small_web(
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
        _small_text(
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

LAPTOP = Reproduction(
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
        _small_generated(
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
        _small_web(
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
        _small_text(
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

EVENING = Reproduction(
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
        _small_generated(
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
        _small_web(
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
        _small_text(
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
