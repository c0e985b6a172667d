"""The paper's own scale: its datasets, sizes, data volumes and steps (section 2, appendices A and B).

What the text leaves open is chosen here and said where it is: the steps of SGD and of BookCorpus, the model of "25M"
parameters, and the tasks of the adversary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from isoloss.config import LanguageConfig
from isoloss.languages.config import PRESETS, CorpusConfig, TeacherConfig
from isoloss.paper.reproduction.costs import Tokens
from isoloss.paper.reproduction.dataset import SGD_EXACT, SGD_SAMPLED, Arm, Dataset
from isoloss.paper.reproduction.scales import SGD_SHOWN, SHOWN, Scale
from isoloss.presets import Preset, load_preset, train_config
from isoloss.run_config import ModelConfig, OptimizerConfig, StageConfig
from isoloss.studies.plan import Resources
from isoloss.training.algorithms.config import AdversarialConfig, SAMConfig

TABLE_3 = ("d64", "d128", "d192", "d256", "d512", "d768", "d1024", "d1280", "d1536")
TABLE_4 = ("d128", "d192", "d320", "d384", "d640", "d960", "d1920")
INSIDE = tuple(f"trace-in-{TABLE_4[-1]}-{scale}" for scale in ("paper", "exact"))
LSTMS = ("h128", "h256", "h512", "h768", "h1024")
BERT_TOKENIZER = "google-bert/bert-large-uncased"
VOCABULARY = 30_522  # of that tokenizer
BOOKS_STEPS = 300_000  # ours: the text has no number
SGD_STEPS = 30_000  # ours: the text has no number
NEEDS = (
    (0, Resources(cores=4, gpus=1.0, memory=32.0)),
    (1280, Resources(cores=4, gpus=1.0, memory=128.0, processes=8)),
)
TEACHER_PARAMETERS = 85e6  # of OPT-125M without its embeddings
NUM_TEST = 10_000  # test examples of a probe: ours


def _common(preset: Preset, language: LanguageConfig) -> tuple[LanguageConfig, dict[str, Any]]:
    """Return a language as a preset trains on it, and the fields of `TrainConfig` that its runs share."""
    config = train_config(preset, language)
    names = ("batch_size", "objective", "optimizer", "num_sentences", "masked_copies")
    shared = {name: getattr(config, name) for name in names}
    return config.language, {**shared, "precision": "bfloat16", "device": "cuda", "threads": 4}


def _settings(preset: Preset) -> dict[str, Any]:
    return {**preset.measures, "num_test": NUM_TEST}


def berts(preset: Preset, *sizes: str) -> dict[str, ModelConfig]:
    """Return the transformers of some sizes, by size."""
    return {size: ModelConfig(architecture=preset.architecture, size=size) for size in sizes}


def sgd_arms(shown_in: tuple[str, ...], steps: int = SGD_STEPS) -> dict[str, Arm]:
    """Return SGD after the last step: warm-up over 12 % of the steps, then 1e-3 (appendix B.2)."""
    optimizer = OptimizerConfig(name="sgd", learning_rate=1e-3, warmup_proportion=0.12, weight_decay=0.0)
    kinds: tuple[tuple[str, Literal["sampled", "exact"]], ...] = ((SGD_SAMPLED, "sampled"), (SGD_EXACT, "exact"))
    return {
        name: Arm(
            title=f"SGD ({labels} labels)",
            stages=(StageConfig(steps=steps, labels=labels, optimizer=optimizer),),
            watched=tuple(range(steps // 6, steps, steps // 6)),
            shown_in=shown_in,
        )
        for name, labels in kinds
    }


def watched_steps(last: int, every: int = 5_000) -> tuple[int, ...]:
    """Return the steps up to the last that are measured."""
    return tuple(range(every, last + 1, every))


def pcfg(preset: Preset) -> Dataset:
    """Return the grammar: Tables 3 and 4, SGD, and an adversary for each task."""
    is_framed = preset.is_framed
    language, common = _common(preset, PRESETS["pcfg-authors" if is_framed else "pcfg-paper"][0])
    tasks = {name: f"probe-{task}" for name, task in preset.tasks.items()}
    return Dataset(
        name="pcfg",
        title="PCFG",
        languages=(language,),
        tasks=tasks,
        common=common,
        sizes=berts(preset, *TABLE_3),
        expanded=berts(preset, *TABLE_4),
        main="d1024",
        followed="d512",
        watched=watched_steps(preset.steps),
        arms={
            **sgd_arms(SGD_SHOWN),
            **{
                f"adversary-{name}": Arm(
                    title=f"Adversary ({name})",
                    changes={"algorithm": AdversarialConfig(task=task)},
                    shown_in=("table 1",) if name != "C" else ("table 2",),
                )
                for name, task in preset.tasks.items()
            },
            "helper-C": Arm(
                title="Helper (C)",
                changes={"algorithm": AdversarialConfig(task=preset.tasks["C"], weight=-AdversarialConfig.weight)},
                shown_in=("table 2",),
            ),
        },
        measures=("loss", "trace", "minimal-trace", *tasks.values()),
        expanded_measures=INSIDE,
        settings=_settings(preset),
        shown=SHOWN["pcfg"],
        needs=NEEDS,
        tokens=Tokens(vocab_size=204, length=18, predicted=3) if is_framed else Tokens(vocab_size=202, length=32),
    )


def hmm(preset: Preset) -> Dataset:
    """Return the hidden Markov model with the LSTMs of appendix A.4."""
    language, common = _common(preset, PRESETS["hmm-paper"][0])
    tasks = {"6": "probe-task-6", "10": "probe-task-10"}
    lstms = {size: ModelConfig(architecture="lstm", size=size) for size in LSTMS}
    # "67M": width 1024 and 8 layers give that number in one direction (docs/errata.md); both are read here
    lstms["h1024-8-layers"] = ModelConfig(architecture="lstm", size="h1024", layers=8)
    return Dataset(
        name="hmm",
        title="HMM",
        languages=(language,),
        tasks=tasks,
        common=common,
        sizes=lstms,
        main="h1024-8-layers",
        watched=watched_steps(preset.steps),
        arms=sgd_arms(SGD_SHOWN),
        measures=("loss", "trace", *tasks.values()),
        settings=_settings(preset),
        shown=SHOWN["hmm"],
        needs=((0, NEEDS[0][1]),),
        tokens=Tokens(vocab_size=202, length=16),
    )


def generated(preset: Preset) -> Dataset:
    """Return the text that OPT-125M writes, with two tasks of GLUE."""
    language, common = _common(preset, TeacherConfig(checkpoint="facebook/opt-125m"))
    tasks = {"QNLI": "probe-qnli", "SST-2": "probe-sst2"}
    return Dataset(
        name="generated",
        title="OPT-generated",
        languages=(language,),
        tasks=tasks,
        common=common,
        sizes=berts(preset, *TABLE_3),
        expanded=berts(preset, *TABLE_4),
        main="d1024",
        watched=watched_steps(preset.steps),
        measures=("loss", "trace", "minimal-trace", *tasks.values()),
        expanded_measures=INSIDE,
        settings=_settings(preset),
        shown=SHOWN["generated"],
        needs=NEEDS,
        # a conditional takes each of the 2,000 tokens in turn, and from there on the rest of the sentence
        tokens=Tokens(vocab_size=2_002, length=24, truth=2_000 * 12 * 2 * TEACHER_PARAMETERS),
    )


def web(preset: Preset) -> Dataset:
    """Return OpenWebText, on which one model is followed."""
    corpus = CorpusConfig(paths=("hf:Skylion007/openwebtext",), tokenizer=BERT_TOKENIZER)
    language, common = _common(preset, corpus)
    tasks = {"SST-2": "finetune-sst2"}
    return Dataset(
        name="web",
        title="OpenWebText",
        languages=(language,),
        tasks=tasks,
        common=common,
        sizes=berts(preset, "d384"),  # "25M": 24.4M with the embedding, as the paper counts elsewhere
        main="d384",
        watched=tuple(range(400_000, 1_400_001, 200_000)),
        measures=("loss", "trace", "minimal-trace", *tasks.values()),
        settings=_settings(preset),
        shown=SHOWN["web"],
        needs=NEEDS,
        tokens=Tokens(vocab_size=VOCABULARY, length=128, predicted=19),
    )


def text(preset: Preset) -> Dataset:
    """Return BookCorpus, with and without regularization, and with SAM."""
    tasks = {"QNLI": "finetune-qnli", "SST-2": "finetune-sst2", "RTE": "finetune-rte"}
    large = ModelConfig(architecture=preset.architecture, size="d1024", layers=24)  # 335M with the embedding
    bare = dataclasses.replace(large, dropout=0.0)
    corpus = CorpusConfig(paths=("hf:bookcorpus/bookcorpus",), tokenizer=BERT_TOKENIZER)
    language, common = _common(preset, corpus)
    no_decay = dataclasses.replace(common["optimizer"], weight_decay=0.0)
    shown_in = ("table 1", "table 2")
    return Dataset(
        name="text",
        title="BookCorpus",
        languages=(language,),
        tasks=tasks,
        common=common,
        sizes={"d1024-24-layers": large},
        main="d1024-24-layers",
        watched=watched_steps(BOOKS_STEPS, 50_000),
        arms={
            "unregularized": Arm(
                title="Without dropout and weight decay",
                changes={"model": bare, "optimizer": no_decay},
                shown_in=shown_in,
            ),
            "sam": Arm(
                title="SAM, without dropout and weight decay",
                changes={"model": bare, "optimizer": no_decay, "algorithm": SAMConfig()},
                shown_in=shown_in,
            ),
        },
        measures=("loss", "trace", "minimal-trace", *tasks.values()),
        settings=_settings(preset),
        shown=SHOWN["text"],
        needs=((0, NEEDS[1][1]),),
        tokens=Tokens(vocab_size=VOCABULARY, length=128, predicted=19),
    )


def scale(preset: Preset) -> Scale:
    """Return the paper's scale with the settings of a preset."""
    datasets = tuple(make(preset) for make in (pcfg, hmm, generated, web, text))
    return Scale(description=f"the paper's sizes on GPUs, settings: {preset.description}", datasets=datasets)


PAPER, AUTHORS = (scale(load_preset(name)) for name in ("paper", "authors"))
