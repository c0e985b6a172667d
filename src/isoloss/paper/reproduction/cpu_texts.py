"""The datasets of text of the scales for two cores, from what comes with Python: its reference and docstrings.

They stand in for the paper's OPT-generated text, OpenWebText and BookCorpus with GLUE: docs/method/studies.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from isoloss.lab.languages.config import CorpusConfig, TeacherConfig
from isoloss.paper.reproduction.spec import SHOWN, Dataset, small_bert, teacher_run, without_regularization
from isoloss.run_config import ObjectiveConfig, OptimizerConfig, TrainConfig

CORPUS = CorpusConfig(paths=("python:docs", "python:docstrings"), tokenizer="wordpiece:1000", length=64, held_out=0.1)
LEARNING_RATE = 3e-3
PROJECTED = 64  # features of a probe, so that all sizes have as many
ONE_CORE: Mapping[str, Any] = {"device": "cpu", "threads": 1}


def generated(
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


def web(*, size: str, watched: tuple[int, ...], settings: Mapping[str, Any], **more: Any) -> Dataset:
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


def text(
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
