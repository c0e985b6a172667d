"""The scales: small ones for two cores with every arm of the study, and those for GPUs with the paper's own sizes.

The scales for GPUs have the datasets, sizes, data volumes and steps of section 2 and appendices A and B, or fewer. What
the text leaves open is chosen here: the steps of SGD and of BookCorpus, the model of "25M" parameters, the tasks of the
adversary, and the numbers of grammars, hidden Markov models and seeds. The paper has no cooldowns. Here they bring
models to one loss, so that claims can be judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from isoloss.config import LanguageConfig
from isoloss.lab.languages.config import PRESETS, CorpusConfig, HMMConfig, PCFGConfig, TeacherConfig
from isoloss.lab.presets import Preset, load_preset, train_config
from isoloss.lab.training.algorithms.config import AdversarialConfig, SAMConfig
from isoloss.paper.design import adamw, sgd, small_bert
from isoloss.paper.reproduction.design import (
    FLATNESS,
    SGD_EXACT,
    SGD_SAMPLED,
    SGD_SHOWN,
    TEACHER,
    Arm,
    Dataset,
    Reproduction,
    Tokens,
)
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.studies.plan import Resources

TABLES = ("table 1", "table 2")  # of algorithms
ADVERSARY, HELPER = AdversarialConfig.weight, -AdversarialConfig.weight  # the helper's term has the other sign


def _sgd_arms(steps: int, optimizer: OptimizerConfig, *watched: int) -> dict[str, Arm]:
    """Return SGD without label noise, the control, and with it."""
    kinds: dict[str, Literal["sampled", "exact"]] = {SGD_EXACT: "exact", SGD_SAMPLED: "sampled"}
    return {
        name: Arm(
            title=f"SGD ({labels} labels)",
            stages=(StageConfig(steps=steps, labels=labels, optimizer=optimizer),),
            watched=watched,
            shown_in=SGD_SHOWN,
        )
        for name, labels in kinds.items()
    }


def _without_regularization(model: ModelConfig, optimizer: OptimizerConfig) -> dict[str, Arm]:
    """Return the arms of text, with and without SAM, of a model with dropout and an optimizer with weight decay."""
    changes = {
        "model": dataclasses.replace(model, dropout=0.0),
        "optimizer": dataclasses.replace(optimizer, weight_decay=0.0),
    }
    sam = {**changes, "algorithm": SAMConfig()}
    return {
        "unregularized": Arm(title="Without dropout and weight decay", changes=changes, shown_in=TABLES),
        "sam": Arm(title="SAM, without dropout and weight decay", changes=sam, shown_in=TABLES),
    }


# --- two cores -------------------------------------------------------------------------------------------------------

ONE_CORE: Mapping[str, Any] = {"device": "cpu", "threads": 1}
RATE = 1.5e-3  # of grammars; at twice this rate, the largest size gets worse as it trains
LEARNING_RATE = 3e-3  # of all others
# three nested tasks need three levels: sentences of 8 tokens. With so few symbols, a small model nears the true
# conditionals within a few thousand steps; with so few rules, it then transfers better than an untrained one
GRAMMAR = PCFGConfig(levels=3, symbols_per_level=4, rules_per_symbol=4, vocab_size=8)
# Python's reference and docstrings stand in for the paper's texts (docs/method/studies.md)
CORPUS = CorpusConfig(paths=("python:docs", "python:docstrings"), tokenizer="wordpiece:1000", length=64, held_out=0.1)
# what stands in for the paper's three tasks of text
TEXT_TASKS = {"SST-2": "sentence-source", "QNLI": "docstring-module", "RTE": "docstring-kind"}
# sentences on which CKA compares features: an evaluation keeps their Gram matrix, 8 KB
PROBES = {"feature_sentences": 64, "probe_solver": "convex"}
OTHER_FLATNESS = tuple(name for name in FLATNESS if name not in ("trace", "minimal-trace"))
# without those that take half of the time it takes to measure a model
FAST_FLATNESS = tuple(
    name for name in OTHER_FLATNESS if name not in ("hessian-trace", "weighted-trace", "adaptive-sharpness")
)


def _settings(
    num_train: int, num_test: int | str, loss_sentences: int, num_sequences: int, **more: Any
) -> dict[str, Any]:
    """Return how many examples measures take: of tasks, for the loss, and for flatness."""
    tasks = {"num_train": num_train, "num_test": num_test, **more}
    return {**tasks, "loss_sentences": loss_sentences, "num_sequences": num_sequences}


def _small_pcfg(
    grammars: Sequence[int],
    sizes: Sequence[str],
    settings: Mapping[str, Any],
    *,
    layers: int,
    sgd_steps: int,
    algorithm_steps: Sequence[int],
    pre_layer_norm: bool = True,
    **more: Any,
) -> Dataset:
    """Return grammars with SGD and, trained for these numbers of steps, adversary and helper."""

    def algorithm(title: str, steps: int, weight: float) -> Arm:
        term = AdversarialConfig(task="prefix-4", weight=weight)
        stage = StageConfig(steps=steps, labels="exact", optimizer=adamw(2 * RATE), algorithm=term)
        return Arm(title=title, stages=(stage,), shown_in=TABLES)

    arms = {
        **_sgd_arms(sgd_steps, sgd(sgd_steps, 0.2), sgd_steps // 4, sgd_steps // 2),
        "adversary": algorithm("Adversary", algorithm_steps[0], ADVERSARY),
        "helper": algorithm("Helper", algorithm_steps[1], HELPER),
    }
    if pre_layer_norm:
        # not in the paper; the compiled step is of post-layer-norm blocks
        changes = {"model": small_bert(sizes[1], layers, "bert-pre-ln"), "compiled": False}
        arms["pre-ln"] = Arm(title="Pre-layer-norm", changes=changes)
    optimizer = OptimizerConfig(learning_rate=RATE, weight_decay=0.0)
    return Dataset(
        name="pcfg",
        title="PCFG",
        languages=tuple(dataclasses.replace(GRAMMAR, seed=seed) for seed in grammars),
        # the whole sentence, its half, its quarter: as in the paper
        tasks={"A": "probe-prefix-8", "B": "probe-prefix-4", "C": "probe-prefix-2"},
        common={"batch_size": 64, "optimizer": optimizer, "compiled": True, **ONE_CORE},
        sizes={size: small_bert(size, layers) for size in sizes},
        main=sizes[1],
        cooldown_rate=RATE,
        arms=arms,
        # a probe reads the states of all tokens; these are the features of the smallest size
        projected=2**GRAMMAR.levels * int(sizes[0][1:]),
        settings={**settings, **PROBES},
        **more,
    )


def _small_hmm(
    language: HMMConfig,
    seeds: Sequence[int],
    sizes: Sequence[str],
    settings: Mapping[str, Any],
    *,
    sgd_steps: int,
    **more: Any,
) -> Dataset:
    """Return hidden Markov models with so few sentences that losses and accuracies are sums over all of them."""
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, weight_decay=0.0)
    return Dataset(
        name="hmm",
        title="HMM",
        languages=tuple(dataclasses.replace(language, seed=seed) for seed in seeds),
        tasks={"6": "probe-state-2", "10": "probe-state-3"},
        common={"batch_size": 64, "optimizer": optimizer, **ONE_CORE},
        sizes={size: ModelConfig(architecture="lstm", size=size, dropout=0.0) for size in sizes},
        main=sizes[1],
        arms=_sgd_arms(sgd_steps, sgd(sgd_steps, 0.2), sgd_steps // 4, sgd_steps // 2),
        # an LSTM has states of both directions
        projected=language.length * 2 * int(sizes[0][1:]),
        settings={**settings, **PROBES, "num_test": "all", "loss_sentences": "all"},
        **more,
    )


def _small_generated(
    sizes: Sequence[str],
    settings: Mapping[str, Any],
    *,
    teacher_steps: int,
    num_sentences: int,
    vocab_size: int,
    length: int,
    **more: Any,
) -> Dataset:
    """Return what a small OPT writes over its most frequent tokens, with two tasks of the text that it learned."""
    teacher = TrainConfig(
        language=dataclasses.replace(CORPUS, length=32),
        model=small_bert("d32", architecture="opt"),
        objective=ObjectiveConfig(kind="causal"),
        optimizer=OptimizerConfig(learning_rate=2e-3, schedule="cosine"),
        batch_size=16,
        steps=teacher_steps,
        **ONE_CORE,
    )
    checkpoint = f"../generated-{TEACHER}/checkpoints/step-{teacher_steps}"
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, weight_decay=0.0)
    # sentences are drawn once: drawing them takes longer than a step
    drawn = {"num_sentences": num_sentences, "compiled": True, **ONE_CORE}
    # the regularization is for so few examples
    probes = {"probe_solver": "convex", "probe_regularization": (3e-3,)}
    return Dataset(
        name="generated",
        title="OPT-generated",
        teacher=teacher,
        languages=(TeacherConfig(checkpoint=checkpoint, vocab_size=vocab_size, length=length, samples=1024),),
        tasks={"QNLI": "probe-sentence-order", "SST-2": "probe-sentence-source"},
        common={"batch_size": 64, "optimizer": optimizer, **drawn},
        sizes={size: small_bert(size, 1) for size in sizes},
        main=sizes[1],
        projected=64,
        settings={**settings, **probes},
        **more,
    )


def _small_text(size: str, settings: Mapping[str, Any], *, num_sentences: int = 0, **more: Any) -> Dataset:
    """Return a text on which a model is fine-tuned.

    With `num_sentences`, so few that a model memorizes them, it has the arms of regularization; without, one model is
    followed.
    """
    model, few = small_bert(size), num_sentences > 0
    warmup = round(0.025 * more["watched"][-1])
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, warmup_steps=warmup, weight_decay=0.01)
    objective = ObjectiveConfig(masking="fraction", fraction=0.15)
    common = {"batch_size": 16, "optimizer": optimizer, "objective": objective, **ONE_CORE}
    finetuning = {"finetune_seeds": 1, "finetune_learning_rate": LEARNING_RATE}
    tasks = {name: f"finetune-{task}" for name, task in TEXT_TASKS.items()}
    return Dataset(
        name="text" if few else "web",
        title="Docstrings" if few else "Docstrings, longer training",
        languages=(CORPUS,),
        tasks=tasks if few else {"SST-2": tasks["SST-2"]},
        common={**common, "num_sentences": num_sentences} if few else common,
        sizes={size: dataclasses.replace(model, dropout=0.1) if few else model},
        main=size,
        arms=_without_regularization(model, optimizer) if few else {},
        settings={**finetuning, **settings},
        **more,
    )


# after the few steps of `smoke`, models are further apart
_SMOKE: dict[str, Any] = {"watched": (20, 40, 60), "cooldowns": (20, 10, 40), "band": 0.4}
SMOKE = Reproduction(
    description="some minutes on two cores: every part runs, no verdict is given",
    datasets=(
        _small_pcfg(
            *((300, 301), ("d16", "d32"), _settings(256, 256, 256, 64)),
            seeds=2,
            layers=1,
            sgd_steps=20,
            algorithm_steps=(10, 10),
            flatness=FAST_FLATNESS,
            **_SMOKE,
        ),
        _small_hmm(
            HMMConfig(states=4, blocks=2, vocab_size=8, length=4),
            *((300, 301), ("h16", "h32"), {"num_train": 256, "num_sequences": 64}),
            sgd_steps=20,
            flatness=FAST_FLATNESS,
            **_SMOKE,
        ),
        _small_generated(
            *(("d16", "d32"), _settings(256, 128, 64, 64)),
            seeds=2,
            teacher_steps=100,
            num_sentences=4_096,
            vocab_size=50,
            length=8,
            **_SMOKE,
        ),
        _small_text("d16", _settings(128, 64, 64, 64, finetune_epochs=1), seeds=2, **_SMOKE),
        _small_text("d16", _settings(128, 64, 64, 64, finetune_epochs=1), seeds=2, watched=(20, 40), num_sentences=64),
    ),
)

_LAPTOP_TEXT = ("d32", _settings(1_024, 1_024, 512, 256, finetune_epochs=2))
LAPTOP = Reproduction(
    description="about 45 minutes on two cores",
    datasets=(
        _small_pcfg(
            *(range(710, 716), ("d16", "d32", "d64"), _settings(2_048, 4_096, 4_096, 256)),
            layers=2,
            watched=(500, 1_000, 2_000),
            cooldowns=(500, 125, 1_500),
            sgd_steps=1_000,
            algorithm_steps=(250, 150),
            flatness=FAST_FLATNESS,
            pre_layer_norm=False,
        ),
        _small_hmm(
            HMMConfig(states=8, blocks=2, vocab_size=8, length=4),
            *(range(710, 713), ("h16", "h32"), {"num_train": 1_024, "num_sequences": 256}),
            watched=(250, 500, 1_000),
            cooldowns=(250, 60, 500),
            sgd_steps=500,
            flatness=FAST_FLATNESS,
        ),
        _small_generated(
            *(("d16", "d32", "d64"), _settings(1_024, 1_024, 256, 128)),
            seeds=3,
            teacher_steps=600,
            num_sentences=16_384,
            vocab_size=100,
            length=12,
            watched=(1_000, 2_000, 4_000),
            # after the shortest, a larger model has the loss of a smaller one after the longest
            cooldowns=(500, 50, 4_000),
        ),
        _small_text(*_LAPTOP_TEXT, seeds=3, watched=(250, 500, 1_000), cooldowns=(125, 30, 250, 1_000)),
        _small_text(*_LAPTOP_TEXT, seeds=3, watched=(500, 1_000, 1_500), num_sentences=4_096),
    ),
)

_EVENING_TEXT = ("d32", _settings(2_048, "all", 512, 256, finetune_epochs=2))
EVENING = Reproduction(
    description="hours on two cores",
    datasets=(
        _small_pcfg(
            *(range(720, 728), ("d16", "d32", "d64"), _settings(4_096, 8_192, 8_192, 512)),
            seeds=2,
            layers=2,
            watched=(1_000, 2_000, 4_000),
            cooldowns=(1_000, 125, 500, 3_000),
            sgd_steps=2_000,
            algorithm_steps=(500, 300),
            flatness=OTHER_FLATNESS,
        ),
        _small_hmm(
            HMMConfig(states=8, blocks=2, vocab_size=8, length=4),
            *(range(720, 726), ("h16", "h32", "h64"), {"num_train": 2_048, "num_sequences": 512}),
            watched=(500, 1_000, 2_000),
            cooldowns=(500, 60, 125, 250, 1_000),
            sgd_steps=1_000,
            flatness=OTHER_FLATNESS,
        ),
        _small_generated(
            *(("d16", "d32", "d64"), _settings(4_096, 4_096, 1_024, 512)),
            seeds=4,
            teacher_steps=2_000,
            num_sentences=65_536,
            vocab_size=100,
            length=12,
            watched=(1_000, 2_000, 4_000),
            # as at `laptop`
            cooldowns=(500, 50, 1_000, 4_000),
        ),
        _small_text(*_EVENING_TEXT, seeds=4, watched=(500, 1_000, 2_000), cooldowns=(250, 60, 500, 2_000)),
        _small_text(*_EVENING_TEXT, seeds=4, watched=(750, 1_500, 2_250, 3_000), num_sentences=4_096),
    ),
)


# --- GPUs ------------------------------------------------------------------------------------------------------------

TABLE_3 = ("d64", "d128", "d192", "d256", "d512", "d768", "d1024", "d1280", "d1536")
TABLE_4 = ("d128", "d192", "d320", "d384", "d640", "d960", "d1920")
BERT_TOKENIZER = "google-bert/bert-large-uncased"
TEXT_TOKENS = Tokens(vocab_size=30_522, length=128, predicted=19)  # by that tokenizer
NEEDS = (
    (0, Resources(cores=4, gpus=1.0, memory=32.0)),
    (1280, Resources(cores=4, gpus=1.0, memory=128.0, processes=8)),
)
NUM_TEST = 10_000  # test examples of a probe: ours
# Grammars, hidden Markov models and seeds of training on text: the least with which a paired t test at 0.05 / 130 (by
# Holm's method for up to 130 secondary tests) finds the paper's effect with 80 % power. The standard deviation is of
# differences over grammars (models, seeds) in the first run at scale `evening`, or rather its upper 80 % bound
# (`isoloss.statistics.power.sd_upper_bound`). Larger models may vary more or less.
# By dataset: the number, the paper's effect and the deviation (percentage points), and from how many grammars.
POWER = {
    # table 2, the adversary on task C; figure 4's 1.6 points, with a deviation of 0.44, need 5 as the primary claim
    "pcfg": (7, 5.5, 1.12, 6),
    "hmm": (5, 4.0, 0.39, 6),  # figure 4, task-10
    "text": (9, 1.4, 0.35, 5),  # table 1, QNLI without dropout and weight decay
}
LEAST = 3  # of the others, with no known deviation: the fewest that an error can be over
# 512 are the dimensions of the paper's random projection (appendix A.5), which makes probes of all widths alike
COOLDOWNS: Mapping[str, Any] = {"cooldowns": (2_000, 500, 1_000, 4_000), "cooldown_rate": 1e-3, "projected": 512}


def watched_steps(last: int, every: int = 5_000) -> tuple[int, ...]:
    """Return the steps up to the last that are measured."""
    return tuple(range(every, last + 1, every))


def berts(preset: Preset, *sizes: str) -> dict[str, ModelConfig]:
    """Return the transformers of some sizes, by size."""
    return {size: ModelConfig(architecture=preset.architecture, size=size) for size in sizes}


def _dataset(preset: Preset, *languages: LanguageConfig, **more: Any) -> Dataset:
    """Return a dataset with what the preset decides; `more` are its other fields, some of which have defaults here."""
    configs = [train_config(preset, language) for language in languages]
    shared = ("batch_size", "objective", "optimizer", "num_sentences", "masked_copies")
    common = {name: getattr(configs[0], name) for name in shared}
    # of a task of text all examples: QNLI has 104,743 to train on
    is_text = more["name"] in ("generated", "web", "text")
    examples = {"num_train": "all", "num_test": "all"} if is_text else {"num_test": NUM_TEST}
    fields: dict[str, Any] = {
        "languages": tuple(each.language for each in configs),
        "common": {**common, "precision": "bfloat16", "device": "cuda", "threads": 4},
        "watched": watched_steps(preset.steps),
        "settings": {**preset.measures, **examples},
        "needs": NEEDS,
    }
    return Dataset(**fields | more)


def _large_sgd_arms(steps: int = 30_000) -> dict[str, Arm]:  # ours: the text has no number
    """Return SGD after the last step: warm-up over 12 % of the steps, then 1e-3 (appendix B.2)."""
    optimizer = OptimizerConfig(name="sgd", learning_rate=1e-3, warmup_proportion=0.12, weight_decay=0.0)
    return _sgd_arms(steps, optimizer, *range(steps // 6, steps, steps // 6))


def _algorithm(preset: Preset, title: str, task: str, *shown_in: str) -> Arm:
    """Return the adversary or the helper of a task."""
    algorithm = AdversarialConfig(task=preset.tasks[task], weight=ADVERSARY if title == "Adversary" else HELPER)
    return Arm(title=f"{title} ({task})", changes={"algorithm": algorithm}, shown_in=shown_in)


def _pcfg(preset: Preset) -> Dataset:
    """Return the grammar: Tables 3 and 4, SGD, and an adversary for each task."""
    is_framed = preset.is_framed
    language: Any = PRESETS["pcfg-authors" if is_framed else "pcfg-paper"][0]
    return _dataset(
        preset,
        *(dataclasses.replace(language, seed=seed) for seed in range(POWER["pcfg"][0])),
        name="pcfg",
        title="PCFG",
        tasks={name: f"probe-{task}" for name, task in preset.tasks.items()},
        sizes=berts(preset, *TABLE_3),
        expanded=berts(preset, *TABLE_4),
        main="d1024",
        followed="d512",
        arms={
            **_large_sgd_arms(),
            "adversary-A": _algorithm(preset, "Adversary", "A", "table 1"),
            "adversary-C": _algorithm(preset, "Adversary", "C", "table 2"),
            # those that claims are about
            "adversary": _algorithm(preset, "Adversary", "B", "table 1"),
            "helper": _algorithm(preset, "Helper", "B", "table 2"),
        },
        **COOLDOWNS,
        # [CLS] and [SEP] are two more ids and two more places; 15 % of 16 tokens are predicted
        tokens=Tokens(vocab_size=204, length=18, predicted=3) if is_framed else Tokens(vocab_size=202, length=32),
    )


def _lstms(*sizes: str) -> dict[str, ModelConfig]:
    return {size: ModelConfig(architecture="lstm", size=size) for size in sizes}


def _hmm(preset: Preset) -> Dataset:
    """Return the hidden Markov model with the LSTMs of appendix A.4."""
    model: Any = PRESETS["hmm-paper"][0]
    large = {"h1024-8-layers": 8, "h1024": 16}
    return _dataset(
        preset,
        *(dataclasses.replace(model, seed=seed) for seed in range(POWER["hmm"][0])),
        name="hmm",
        title="HMM",
        tasks={"6": "probe-task-6", "10": "probe-task-10"},
        # the paper's "67M" and "135M" are the last two, but in one direction (docs/errata.md); these read both sides
        sizes={
            **_lstms("h128", "h256", "h512", "h768"),
            **{name: ModelConfig(architecture="lstm", size="h1024", layers=layers) for name, layers in large.items()},
        },
        main="h1024-8-layers",
        arms=_large_sgd_arms(),
        **COOLDOWNS,
        needs=((0, NEEDS[0][1]),),
        tokens=Tokens(vocab_size=202, length=16),
    )


def _generated(preset: Preset) -> Dataset:
    """Return the text that OPT-125M writes, with two tasks of GLUE."""
    return _dataset(
        preset,
        TeacherConfig(checkpoint="facebook/opt-125m"),
        name="generated",
        title="OPT-generated",
        seeds=LEAST,
        tasks={"QNLI": "probe-qnli", "SST-2": "probe-sst2"},
        sizes=berts(preset, *TABLE_3),
        expanded=berts(preset, *TABLE_4),
        main="d1024",
        # a conditional takes each of the 2,000 tokens in turn, and from there on the rest of the sentence; OPT-125M has
        # 85M parameters without its embeddings
        tokens=Tokens(vocab_size=2_002, length=24, truth=2_000 * 12 * 2 * 85e6),
    )


def _web(preset: Preset) -> Dataset:
    """Return OpenWebText, on which one model is followed."""
    return _dataset(
        preset,
        CorpusConfig(paths=("hf:Skylion007/openwebtext",), tokenizer=BERT_TOKENIZER),
        name="web",
        title="OpenWebText",
        seeds=LEAST,
        tasks={"SST-2": "finetune-sst2"},
        # "25M": 24.4M with the embedding, as the paper counts elsewhere
        sizes=berts(preset, "d384"),
        main="d384",
        watched=tuple(range(400_000, 1_400_001, 200_000)),
        tokens=TEXT_TOKENS,
    )


def _text(preset: Preset, size: str = "d1024", layers: int | None = 24) -> Dataset:
    """Return BookCorpus, with and without regularization, and with SAM."""
    corpus = CorpusConfig(paths=("hf:bookcorpus/bookcorpus",), tokenizer=BERT_TOKENIZER)
    # 24 layers: 335M with the embedding
    model = ModelConfig(architecture=preset.architecture, size=size, layers=layers)
    name = f"{size}-{layers}-layers" if layers else size
    return _dataset(
        preset,
        corpus,
        name="text",
        title="BookCorpus",
        seeds=POWER["text"][0],
        tasks={"QNLI": "finetune-qnli", "SST-2": "finetune-sst2", "RTE": "finetune-rte"},
        sizes={name: model},
        main=name,
        watched=watched_steps(300_000, 50_000),  # ours: the text has no number
        arms=_without_regularization(model, train_config(preset, corpus).optimizer),
        needs=((0, NEEDS[1][1]),),
        tokens=TEXT_TOKENS,
    )


def _large(preset: Preset) -> Reproduction:
    """Return the paper's scale with the settings of a preset."""
    return Reproduction(
        description=f"the paper's sizes on GPUs, settings: {preset.description}. LSTMs of width 1024 with 8 and 16 "
        "layers have 201.9M and 403.3M parameters, as they read both sides of a masked token; in one direction they "
        "have 67.4M and 134.6M, which the paper's 67M and 135M seem to be",
        datasets=tuple(make(preset) for make in (_pcfg, _hmm, _generated, _web, _text)),
    )


PAPER, AUTHORS = (_large(load_preset(name)) for name in ("paper", "authors"))


def _workstation() -> Iterator[Dataset]:
    """Return the datasets of the preset `paper`, less what takes long: one language, one seed, no cooldowns."""
    preset, few = load_preset("paper"), {"num_train": 20_000, "num_test": NUM_TEST}
    fewer = {"loss_sentences": 20_000, "num_sequences": 4_096, "num_train": 20_000, "finetune_seeds": 2}
    preset = dataclasses.replace(preset, steps=10_000, measures={**preset.measures, **fewer})
    shorter: dict[str, Any] = {"watched": watched_steps(10_000, 2_000), "cooldowns": (), "seeds": 1}
    pre_ln = ModelConfig(architecture="bert-pre-ln", size="d512")
    pcfg, inside = _pcfg(preset), ("d64", "d128", "d192", "d256", "d384", "d768")  # widths that divide the last one
    yield dataclasses.replace(
        pcfg,
        languages=pcfg.languages[:1],
        sizes=berts(preset, "d64", "d128", "d256", "d512", "d768"),
        expanded=berts(preset, *inside),
        main="d512",
        arms={
            **_large_sgd_arms(3_000),
            "adversary": _algorithm(preset, "Adversary", "B", *TABLES),
            "helper": _algorithm(preset, "Helper", "B", *TABLES),
            "pre-ln": Arm(title="Pre-layer-norm", changes={"model": pre_ln}),
        },
        **shorter,
    )
    hmm = _hmm(preset)
    yield dataclasses.replace(
        hmm,
        languages=hmm.languages[:1],
        sizes=_lstms("h128", "h256", "h512"),
        main="h256",
        arms=_large_sgd_arms(3_000),
        needs=NEEDS,
        **shorter,
    )
    generated = _generated(preset)
    yield dataclasses.replace(
        generated,
        settings={**generated.settings, **few},
        sizes=berts(preset, "d128", "d256", "d512"),
        expanded=berts(preset, *inside[1:]),
        main="d512",
        **shorter,
    )
    # a model of 8 layers in the place of the one of 24
    text = dataclasses.replace(_text(preset, "d512", None), needs=NEEDS)
    for dataset, watched in ((_web(preset), shorter["watched"]), (text, watched_steps(5_000, 1_000))):
        corpora: Any = dataset.languages
        yield dataclasses.replace(
            dataset,
            languages=tuple(dataclasses.replace(corpus, max_documents=500_000) for corpus in corpora),
            settings={**dataset.settings, **few},
            **{**shorter, "watched": watched},
        )


WORKSTATION = Reproduction(
    description="about a day on one GPU: models of up to about 100M parameters, 5,000 to 10,000 steps",
    datasets=tuple(_workstation()),
)
