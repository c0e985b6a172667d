"""The paper's own scale: its datasets, sizes, data volumes and steps (section 2, appendices A and B).

What the text leaves open is chosen here and said where it is: the steps of SGD and of BookCorpus, the model of "25M"
parameters, and the tasks of the adversary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from isoloss.languages.config import PRESETS, CorpusConfig, TeacherConfig
from isoloss.paper.reproduction.costs import Tokens
from isoloss.paper.reproduction.dataset import SGD_EXACT, SGD_SAMPLED, Arm, Dataset
from isoloss.paper.reproduction.scales import SGD_SHOWN, SHOWN, Scale
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig
from isoloss.studies.plan import Resources
from isoloss.training.algorithms.config import AdversarialConfig, SAMConfig

TABLE_3 = ("d64", "d128", "d192", "d256", "d512", "d768", "d1024", "d1280", "d1536")
TABLE_4 = ("d128", "d192", "d320", "d384", "d640", "d960", "d1920")
LSTMS = ("h128", "h256", "h512", "h768", "h1024")
BERT_TOKENIZER = "google-bert/bert-large-uncased"
VOCABULARY = 30_522  # of that tokenizer
STEPS = 30_000  # of AdamW on the synthetic datasets; ours on BookCorpus times ten
SGD_STEPS = 30_000  # ours: the text has no number
NEEDS = (
    (0, Resources(cores=4, gpus=1.0, memory=32.0)),
    (1280, Resources(cores=4, gpus=1.0, memory=128.0, processes=8)),
)
SETTINGS: Mapping[str, Any] = {
    "loss_sentences": 1_000_000,
    "flatness_sentences": 10_000,
    "num_train": 100_000,
    "num_test": 10_000,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How all models are pre-trained: the paper's text, or its authors' published command."""

    architecture: str
    learning_rate: float
    warmup_steps: int
    text_warmup_steps: int
    schedule: Any
    steps: int
    masking: ObjectiveConfig  # of synthetic languages

    def common(self, *, is_text: bool = False) -> dict[str, Any]:
        """Return the fields of `TrainConfig` that the runs share."""
        return {
            "batch_size": 4096,
            "objective": ObjectiveConfig(masking="fraction", corruption="bert") if is_text else self.masking,
            "optimizer": OptimizerConfig(
                learning_rate=self.learning_rate,
                schedule=self.schedule,
                warmup_steps=self.text_warmup_steps if is_text else self.warmup_steps,
                weight_decay=0.01,
            ),
            "precision": "bfloat16",
            "device": "cuda",
            "threads": 4,
        }


TEXT = Recipe(  # section 2 and appendix A.5
    architecture="bert",
    learning_rate=1e-3,
    warmup_steps=1_000,
    text_warmup_steps=5_000,
    schedule="constant",
    steps=STEPS,
    masking=ObjectiveConfig(),
)
AUTHORS = Recipe(  # the published command
    architecture="bert-pre-ln",
    learning_rate=5e-4,
    warmup_steps=3_333,
    text_warmup_steps=3_333,
    schedule="linear",
    steps=25_000,
    masking=ObjectiveConfig(masking="fraction"),
)


def _berts(recipe: Recipe, *sizes: str) -> dict[str, ModelConfig]:
    return {size: ModelConfig(architecture=recipe.architecture, size=size) for size in sizes}


def _sgd_arms(shown_in: tuple[str, ...]) -> dict[str, Arm]:
    """Return SGD after the last step: warm-up over 12 % of the steps, then 1e-3 (appendix B.2)."""
    optimizer = OptimizerConfig(name="sgd", learning_rate=1e-3, warmup_proportion=0.12, weight_decay=0.0)
    kinds: tuple[tuple[str, Literal["sampled", "exact"]], ...] = ((SGD_SAMPLED, "sampled"), (SGD_EXACT, "exact"))
    return {
        name: Arm(
            title=f"SGD ({labels} labels)",
            stages=(StageConfig(steps=SGD_STEPS, labels=labels, optimizer=optimizer),),
            watched=tuple(range(5_000, SGD_STEPS, 5_000)),
            shown_in=shown_in,
        )
        for name, labels in kinds
    }


def _watched(last: int, every: int = 5_000) -> tuple[int, ...]:
    return tuple(range(every, last + 1, every))


def _pcfg(recipe: Recipe) -> Dataset:
    tasks = {name: f"probe-{name}" for name in "ABC"}
    return Dataset(
        name="pcfg",
        title="PCFG",
        languages=(PRESETS["pcfg-paper"][0],),
        tasks=tasks,
        common=recipe.common(),
        sizes=_berts(recipe, *TABLE_3),
        expanded=_berts(recipe, *TABLE_4),
        main="d1024",
        followed="d512",
        watched=_watched(recipe.steps),
        arms={
            **_sgd_arms(SGD_SHOWN),
            **{
                f"adversary-{name}": Arm(
                    title=f"Adversary ({name})",
                    changes={"algorithm": AdversarialConfig(task=name)},
                    shown_in=("table 1",) if name != "C" else ("table 2",),
                )
                for name in tasks
            },
            "helper-C": Arm(
                title="Helper (C)",
                changes={"algorithm": AdversarialConfig(task="C", weight=-AdversarialConfig.weight)},
                shown_in=("table 2",),
            ),
        },
        measures=("loss", "trace", "minimal-trace", *tasks.values()),
        settings=SETTINGS,
        shown=SHOWN["pcfg"],
        needs=NEEDS,
        tokens=Tokens(vocab_size=202, length=32),
    )


def _hmm(recipe: Recipe) -> Dataset:
    tasks = {"6": "probe-task-6", "10": "probe-task-10"}
    lstms = {size: ModelConfig(architecture="lstm", size=size) for size in LSTMS}
    # "67M": width 1024 and 8 layers give that number in one direction (docs/errata.md); both are read here
    lstms["h1024-8-layers"] = ModelConfig(architecture="lstm", size="h1024", layers=8)
    return Dataset(
        name="hmm",
        title="HMM",
        languages=(PRESETS["hmm-paper"][0],),
        tasks=tasks,
        common=recipe.common(),
        sizes=lstms,
        main="h1024-8-layers",
        watched=_watched(recipe.steps),
        arms=_sgd_arms(SGD_SHOWN),
        measures=("loss", "trace", *tasks.values()),
        settings=SETTINGS,
        shown=SHOWN["hmm"],
        needs=((0, NEEDS[0][1]),),
        tokens=Tokens(vocab_size=202, length=16),
    )


def _generated(recipe: Recipe) -> Dataset:
    tasks = {"QNLI": "probe-qnli", "SST-2": "probe-sst2"}
    return Dataset(
        name="generated",
        title="OPT-generated",
        languages=(TeacherConfig(checkpoint="facebook/opt-125m"),),
        tasks=tasks,
        common=recipe.common(),
        sizes=_berts(recipe, *TABLE_3),
        expanded=_berts(recipe, *TABLE_4),
        main="d1024",
        watched=_watched(recipe.steps),
        measures=("loss", "trace", "minimal-trace", *tasks.values()),
        settings=SETTINGS,
        shown=SHOWN["generated"],
        needs=NEEDS,
        tokens=Tokens(vocab_size=2_002, length=24),
    )


def _web(recipe: Recipe) -> Dataset:
    tasks = {"SST-2": "finetune-sst2"}
    return Dataset(
        name="web",
        title="OpenWebText",
        languages=(CorpusConfig(paths=("hf:Skylion007/openwebtext",), tokenizer=BERT_TOKENIZER),),
        tasks=tasks,
        common=recipe.common(is_text=True),
        sizes=_berts(recipe, "d384"),  # "25M": 24.4M with the embedding, as the paper counts elsewhere
        main="d384",
        watched=tuple(range(400_000, 1_400_001, 200_000)),
        measures=("loss", "trace", "minimal-trace", *tasks.values()),
        settings=SETTINGS,
        shown=SHOWN["web"],
        needs=NEEDS,
        tokens=Tokens(vocab_size=VOCABULARY, length=128, predicted=19),
    )


def _books(recipe: Recipe) -> Dataset:
    tasks = {"QNLI": "finetune-qnli", "SST-2": "finetune-sst2", "RTE": "finetune-rte"}
    large = ModelConfig(architecture=recipe.architecture, size="d1024", layers=24)  # 335M with the embedding
    bare = dataclasses.replace(large, dropout=0.0)
    common = recipe.common(is_text=True)
    no_decay = dataclasses.replace(common["optimizer"], weight_decay=0.0)
    shown_in = ("table 1", "table 2")
    return Dataset(
        name="books",
        title="BookCorpus",
        languages=(CorpusConfig(paths=("hf:bookcorpus/bookcorpus",), tokenizer=BERT_TOKENIZER),),
        tasks=tasks,
        common=common,
        sizes={"d1024-24-layers": large},
        main="d1024-24-layers",
        watched=(10 * STEPS,),
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
        settings=SETTINGS,
        shown=SHOWN["books"],
        needs=((0, NEEDS[1][1]),),
        tokens=Tokens(vocab_size=VOCABULARY, length=128, predicted=19),
    )


def scale(recipe: Recipe, description: str) -> Scale:
    """Return the paper's scale by a recipe."""
    datasets = tuple(make(recipe) for make in (_pcfg, _hmm, _generated, _web, _books))
    return Scale(description=description, datasets=datasets)


PAPER = scale(TEXT, "the paper's sizes and steps, by the settings of its text, on GPUs")
PUBLISHED = scale(AUTHORS, "the same by its authors' published command, on GPUs")
