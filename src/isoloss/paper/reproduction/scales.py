"""The scales of the study: what each of the paper's datasets is there, and how much is trained on it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from isoloss.languages.config import CorpusConfig, HMMConfig, PCFGConfig
from isoloss.paper.reproduction.dataset import FIGURE_1, Arm, Dataset, Shown
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig
from isoloss.studies.spec import Experiment
from isoloss.training.algorithms.config import AdversarialConfig, SAMConfig

OFFSET = 1000  # added to the seeds of languages per seed offset
HEAD_WIDTH = 8  # of all sizes that are small, so that one can be expanded into another
FEATURE_SENTENCES = 64  # whose features are compared by CKA: their Gram matrices take 8 KB each
# flatness by every measure that is one number
FLATNESS = (
    *("trace", "minimal-trace", "empirical-fisher", "hessian-trace", "weighted-trace", "fisher-rao"),
    *("relative-flatness", "largest-eigenvalue", "sam-sharpness", "adaptive-sharpness", "noise-sharpness"),
    "squared-norm",
)
SHOWN: Mapping[str, Shown] = {
    "pcfg": Shown(
        sizes=(FIGURE_1, "figure 3a", "figure 8", "figure 9"),
        longer=("figure 2a", "figure 9"),
        expanded=("figure 5",),
        main=("table 1", "table 2"),
        baselines=(FIGURE_1, "table 1"),
    ),
    "hmm": Shown(sizes=("figure 3b", "figure 8")),
    "generated": Shown(sizes=("figure 3c", "figure 8"), longer=("figure 2b", "figure 9"), expanded=("figure 5",)),
    "web": Shown(longer=("figure 2c", "figure 4")),
    "text": Shown(main=("table 1", "table 2")),
}
SGD_SHOWN = ("figure 4", "figure 10")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the study is."""

    description: str  # what it is for and how long it takes
    datasets: tuple[Dataset, ...]

    def with_seed_offset(self, offset: int) -> Self:
        """Return the study on other grammars and other hidden Markov models, with other seeds."""
        return dataclasses.replace(self, datasets=tuple(_other_seeds(each, offset) for each in self.datasets))

    def dataset(self, name: str) -> Dataset | None:
        """Return the dataset of a name, if the scale has it."""
        return next((each for each in self.datasets if each.name == name), None)

    @functools.cached_property
    def experiments(self) -> dict[str, Experiment]:
        """Every run of every dataset; a language is a block of the study."""
        made: dict[str, Experiment] = {}
        block = 0
        for dataset in self.datasets:
            blocks = {replicate.prefix: block + replicate.place for replicate in dataset.replicates}
            for replicate in dataset.replicates:
                own = [name for name in dataset.experiments if name.startswith(f"{replicate.prefix}-")]
                for name in own:
                    made[name] = dataclasses.replace(dataset.experiments[name], block=blocks[replicate.prefix])
            block += len(dataset.languages)
        return made


def _other_seeds(dataset: Dataset, offset: int) -> Dataset:
    """Return a dataset whose languages have other seeds."""
    languages: list[Any] = [dataclasses.replace(each) for each in dataset.languages]
    if all(hasattr(each, "seed") for each in languages):
        languages = [dataclasses.replace(each, seed=each.seed + OFFSET * offset) for each in languages]
    return dataclasses.replace(dataset, languages=tuple(languages), offset=OFFSET * offset)


# --- small scales ----------------------------------------------------------------------------------------------------


def small_bert(size: str, layers: int = 2, architecture: str = "bert") -> ModelConfig:
    """Return a transformer without dropout whose heads are of one width in all sizes."""
    return ModelConfig(
        architecture=architecture, size=size, layers=layers, heads=int(size[1:]) // HEAD_WIDTH, dropout=0.0
    )


def _sgd(steps: int, rate: float, labels: Any) -> StageConfig:
    """Return plain SGD with the paper's warm-up, 12 % of the steps (appendix B.2)."""
    optimizer = OptimizerConfig(name="sgd", learning_rate=rate, warmup_steps=round(0.12 * steps), weight_decay=0.0)
    return StageConfig(steps=steps, labels=labels, optimizer=optimizer)


def _sgd_arms(steps: int, rate: float, watched: tuple[int, ...]) -> dict[str, Arm]:
    return {
        f"sgd-{labels}": Arm(
            title=f"SGD ({labels} labels)", stages=(_sgd(steps, rate, labels),), watched=watched, shown_in=SGD_SHOWN
        )
        for labels in ("exact", "sampled")
    }


def _algorithms(task: str, *, adversary: int, helper: int, rate: float) -> dict[str, Arm]:
    """Return AdamW with a second loss on a task, whose features it spoils or helps."""
    adamw = OptimizerConfig(learning_rate=rate, schedule="cosine", weight_decay=0.0)

    def arm(title: str, steps: int, weight: float) -> Arm:
        algorithm = AdversarialConfig(task=task, weight=weight)
        stage = StageConfig(steps=steps, labels="exact", optimizer=adamw, algorithm=algorithm)
        return Arm(title=title, stages=(stage,), shown_in=("table 1", "table 2"))

    weight = AdversarialConfig.weight
    return {"adversary": arm("Adversary", adversary, weight), "helper": arm("Helper", helper, -weight)}


def _small_pcfg(
    *,
    grammars: tuple[int, ...],
    language: PCFGConfig,
    seeds: int,
    sizes: tuple[str, ...],
    main: str,
    layers: int,
    watched: tuple[int, ...],
    branch: int,
    polish_steps: int,
    other_polishes: tuple[int, ...],
    sgd_steps: int,
    algorithm_steps: tuple[int, int],
    settings: Mapping[str, Any],
    band: float = Dataset.band,
) -> Dataset:
    tasks = {"A": "probe-prefix-4", "B": "probe-prefix-2", "C": "probe-prefix-2"}
    largest = sizes[-1]
    into = small_bert(largest, layers)
    adversary, helper = algorithm_steps
    features = 2**language.levels * small_bert(sizes[0], layers).heads * HEAD_WIDTH
    few_shot = ("few-shot-prefix-4-100", "few-shot-prefix-2-100")
    return Dataset(
        name="pcfg",
        title="PCFG",
        languages=tuple(dataclasses.replace(language, seed=seed) for seed in grammars),
        seeds=seeds,
        tasks=tasks,
        common={
            "batch_size": 64,
            "optimizer": OptimizerConfig(learning_rate=1e-3, weight_decay=0.0),
            "stacked": True,
            "device": "cpu",
            "threads": 1,
        },
        sizes={size: small_bert(size, layers) for size in sizes},
        main=main,
        watched=watched,
        branch=branch,
        polish_steps=polish_steps,
        other_polishes=other_polishes,
        band=band,
        arms={
            **_sgd_arms(sgd_steps, 0.2, (sgd_steps // 4, sgd_steps // 2)),
            **_algorithms("prefix-4", adversary=adversary, helper=helper, rate=3e-3),
            "pre-ln": Arm(
                title="Pre-layer-norm",
                changes={"model": small_bert(main, layers, "bert-pre-ln"), "stacked": False},
            ),
        },
        measures=("loss", "trace", "minimal-trace", *dict.fromkeys(tasks.values())),
        end_measures=(
            *few_shot,
            *(f"projected-prefix-{n}-{features}" for n in (4, 2)),
            *(f"trace-in-{largest}-{scale}" for scale in ("paper", "exact")),
            f"minimal-trace-in-{largest}",
        ),
        extra_measures=(*(name for name in FLATNESS if name not in ("trace", "minimal-trace")), "features"),
        settings={
            **settings,
            "feature_sentences": FEATURE_SENTENCES,
            "num_test": "all",
            "loss_sentences": "all",
            "probe_solver": "convex",
            "expanded_layers": layers,
            "expanded_heads": into.heads,
        },
        shown=SHOWN["pcfg"],
    )


def _small_hmm(
    *,
    models: tuple[int, ...],
    language: HMMConfig,
    seeds: int,
    sizes: tuple[str, ...],
    main: str,
    watched: tuple[int, ...],
    branch: int,
    polish_steps: int,
    other_polishes: tuple[int, ...],
    sgd_steps: int,
    settings: Mapping[str, Any],
    band: float = Dataset.band,
) -> Dataset:
    tasks = {"6": "probe-state-2", "10": "probe-state-3"}
    features = language.length * 2 * int(sizes[0][1:])  # of both directions
    return Dataset(
        name="hmm",
        title="HMM",
        languages=tuple(dataclasses.replace(language, seed=seed) for seed in models),
        seeds=seeds,
        tasks=tasks,
        common={
            "batch_size": 64,
            "optimizer": OptimizerConfig(learning_rate=3e-3, weight_decay=0.0),
            "device": "cpu",
            "threads": 1,
        },
        sizes={size: ModelConfig(architecture="lstm", size=size, dropout=0.0) for size in sizes},
        main=main,
        watched=watched,
        branch=branch,
        polish_steps=polish_steps,
        other_polishes=other_polishes,
        band=band,
        arms=_sgd_arms(sgd_steps, 0.2, (sgd_steps // 4, sgd_steps // 2)),
        measures=("loss", "trace", *tasks.values()),
        end_measures=tuple(f"projected-state-{state}-{features}" for state in (2, 3)),
        extra_measures=(*(name for name in FLATNESS if name not in ("trace", "minimal-trace")), "features"),
        settings={
            **settings,
            "feature_sentences": FEATURE_SENTENCES,
            "num_test": "all",
            "loss_sentences": "all",
            "probe_solver": "convex",
        },
        shown=SHOWN["hmm"],
    )


def _small_text(*, seeds: int, size: str, watched: tuple[int, ...], settings: Mapping[str, Any]) -> Dataset:
    """Return the paper's rows of BookCorpus, on text that comes with Python."""
    last = watched[-1]
    regularized = dataclasses.replace(small_bert(size), dropout=0.1)
    adamw = OptimizerConfig(learning_rate=1e-3, warmup_steps=round(0.025 * last), weight_decay=0.01)
    bare = {"model": small_bert(size), "optimizer": dataclasses.replace(adamw, weight_decay=0.0)}
    shown_in = ("table 1", "table 2")
    return Dataset(
        name="text",
        title="Docstrings",
        languages=(
            CorpusConfig(
                paths=("python:docs", "python:docstrings"), tokenizer="wordpiece:1000", length=64, held_out=0.1
            ),
        ),
        seeds=seeds,
        tasks={
            "SST-2": "finetune-docstring-kind",
            "QNLI": "finetune-docstring-module",
        },
        common={
            "batch_size": 16,
            "optimizer": adamw,
            "objective": ObjectiveConfig(masking="fraction", fraction=0.15),
            "device": "cpu",
            "threads": 1,
        },
        sizes={size: regularized},
        main=size,
        watched=watched,
        arms={
            "unregularized": Arm(title="Without dropout and weight decay", changes=bare, shown_in=shown_in),
            "sam": Arm(
                title="SAM, without dropout and weight decay",
                changes={**bare, "algorithm": SAMConfig()},
                shown_in=shown_in,
            ),
        },
        measures=("loss", "trace", "minimal-trace", "finetune-docstring-kind", "finetune-docstring-module"),
        settings={"finetune_seeds": 1, "finetune_learning_rate": 1e-3, **settings},
        shown=SHOWN["text"],
    )


SMOKE = Scale(
    description="some minutes on two cores: every part runs, no verdict is given",
    datasets=(
        _small_pcfg(
            grammars=(300, 301),
            language=PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8),
            seeds=2,
            sizes=("d16", "d32"),
            main="d32",
            layers=1,
            watched=(20, 40, 60),
            branch=40,
            polish_steps=20,
            other_polishes=(10, 40),
            sgd_steps=20,
            algorithm_steps=(10, 10),
            settings={"num_train": 256, "num_sequences": 64},
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
            polish_steps=20,
            other_polishes=(10, 40),
            sgd_steps=20,
            settings={"num_train": 256, "num_sequences": 64},
            band=0.4,  # after so few steps, models are further apart
        ),
        _small_text(
            seeds=2,
            size="d16",
            watched=(20, 40),
            settings={
                **{"num_train": 128, "num_test": 64, "finetune_epochs": 1},
                **{"loss_sentences": 64, "num_sequences": 64},
            },
        ),
    ),
)

EVENING = Scale(
    description="hours on two cores",
    datasets=(
        _small_pcfg(
            grammars=tuple(range(700, 706)),
            language=PCFGConfig(levels=2, symbols_per_level=8, rules_per_symbol=8, vocab_size=16),
            seeds=5,
            sizes=("d16", "d32", "d64"),
            main="d32",
            layers=2,
            watched=(1_000, 2_000, 4_000, 8_000),
            branch=2_000,
            polish_steps=2_000,
            other_polishes=(250, 500, 1_000, 4_000),
            sgd_steps=2_000,
            algorithm_steps=(500, 300),
            settings={"num_train": 8_192, "num_sequences": 1_024},
        ),
        _small_hmm(
            models=tuple(range(700, 706)),
            language=HMMConfig(states=8, blocks=2, vocab_size=16, length=4),
            seeds=2,
            sizes=("h16", "h32", "h64"),
            main="h32",
            watched=(500, 1_000, 2_000, 4_000),
            branch=1_000,
            polish_steps=1_000,
            other_polishes=(125, 250, 500, 2_000),
            sgd_steps=2_000,
            settings={"num_train": 8_192, "num_sequences": 1_024},
        ),
        _small_text(
            seeds=5,
            size="d64",
            watched=(4_000, 5_000, 6_000, 7_000, 8_000),
            settings={
                **{"num_train": "all", "num_test": "all", "finetune_epochs": 5},
                **{"loss_sentences": 1_024, "num_sequences": 512},
            },
        ),
    ),
)
