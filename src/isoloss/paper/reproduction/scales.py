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
from isoloss.paper.reproduction.costs import Costs, Tokens
from isoloss.paper.reproduction.design import (
    FLATNESS,
    SGD_EXACT,
    SGD_SAMPLED,
    SGD_SHOWN,
    TEACHER,
    Arm,
    Dataset,
    Reproduction,
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
RATE = 1.5e-3  # of grammars; with twice as much, the largest size gets worse as it trains
LEARNING_RATE = 3e-3  # of all others
# three levels are what three nested tasks take: sentences of 8 tokens. So few symbols that a small model nears the
# true conditionals within some thousand steps, and so few rules that it then transfers better than an untrained one
GRAMMAR = PCFGConfig(levels=3, symbols_per_level=4, rules_per_symbol=4, vocab_size=8)
# Python's reference and docstrings stand in for the paper's texts (docs/method/studies.md)
CORPUS = CorpusConfig(paths=("python:docs", "python:docstrings"), tokenizer="wordpiece:1000", length=64, held_out=0.1)
# CKA compares the features of so many sentences: an evaluation keeps their Gram matrix, 8 KB
PROBES = {"feature_sentences": 64, "probe_solver": "convex"}
OTHER_FLATNESS = tuple(name for name in FLATNESS if name not in ("trace", "minimal-trace"))
# the others take half of the time of measuring a model
SLOW_FLATNESS = ("hessian-trace", "weighted-trace", "adaptive-sharpness")
FAST_FLATNESS = tuple(name for name in OTHER_FLATNESS if name not in SLOW_FLATNESS)


def _settings(
    num_train: int, num_test: int | str, loss_sentences: int, num_sequences: int, **more: Any
) -> dict[str, Any]:
    """Return how many examples measures take: of tasks, for the loss, and for flatness."""
    tasks = {"num_train": num_train, "num_test": num_test, **more}
    return {**tasks, "loss_sentences": loss_sentences, "num_sequences": num_sequences}


def _small_sgd_arms(steps: int) -> dict[str, Arm]:
    return _sgd_arms(steps, sgd(steps, 0.2), steps // 4, steps // 2)


def _expanded(sizes: Mapping[str, ModelConfig]) -> dict[str, Any]:
    """Return the settings of the expansion into the last size."""
    largest = list(sizes.values())[-1]
    return {"expanded_layers": largest.layers, "expanded_heads": largest.heads}


def _small_pcfg(
    grammars: Sequence[int],
    sizes: Sequence[str],
    *,
    layers: int,
    sgd_steps: int,
    algorithm_steps: tuple[int, int],
    settings: Mapping[str, Any],
    flatness: tuple[str, ...] = OTHER_FLATNESS,
    pre_layer_norm: bool = True,
    **more: Any,
) -> Dataset:
    models, main = {size: small_bert(size, layers) for size in sizes}, sizes[1]
    # the whole sentence, its half, its quarter: as in the paper
    tasks = {"A": "probe-prefix-8", "B": "probe-prefix-4", "C": "probe-prefix-2"}

    def algorithm(title: str, steps: int, weight: float) -> Arm:
        term = AdversarialConfig(task="prefix-4", weight=weight)
        stage = StageConfig(steps=steps, labels="exact", optimizer=adamw(2 * RATE), algorithm=term)
        return Arm(title=title, stages=(stage,), shown_in=TABLES)

    # not in the paper; the compiled step is of post-layer-norm blocks
    pre_ln = Arm(title="Pre-layer-norm", changes={"model": small_bert(main, layers, "bert-pre-ln"), "compiled": False})
    optimizer = OptimizerConfig(learning_rate=RATE, weight_decay=0.0)
    return Dataset(
        name="pcfg",
        title="PCFG",
        languages=tuple(dataclasses.replace(GRAMMAR, seed=seed) for seed in grammars),
        tasks=tasks,
        common={"batch_size": 64, "optimizer": optimizer, "compiled": True, **ONE_CORE},
        sizes=models,
        main=main,
        cooldown_rate=RATE,
        arms={
            **_small_sgd_arms(sgd_steps),
            "adversary": algorithm("Adversary", algorithm_steps[0], ADVERSARY),
            "helper": algorithm("Helper", algorithm_steps[1], HELPER),
            **({"pre-ln": pre_ln} if pre_layer_norm else {}),
        },
        # a probe reads the states of all tokens; these are the features of the smallest size
        projected=2**GRAMMAR.levels * int(sizes[0][1:]),
        flatness=flatness,
        settings={**settings, **PROBES, **_expanded(models)},
        **more,
    )


def _small_hmm(
    seeds: Sequence[int],
    sizes: Sequence[str],
    *,
    states: int = 8,
    vocab_size: int = 8,
    sgd_steps: int,
    num_train: int,
    num_sequences: int,
    flatness: tuple[str, ...] = OTHER_FLATNESS,
    **more: Any,
) -> Dataset:
    """Return hidden Markov models with so few sentences that losses and accuracies are sums over all of them."""
    language = HMMConfig(states=states, blocks=2, vocab_size=vocab_size, length=4)
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, weight_decay=0.0)
    return Dataset(
        name="hmm",
        title="HMM",
        languages=tuple(dataclasses.replace(language, seed=seed) for seed in seeds),
        tasks={"6": "probe-state-2", "10": "probe-state-3"},
        common={"batch_size": 64, "optimizer": optimizer, **ONE_CORE},
        sizes={size: ModelConfig(architecture="lstm", size=size, dropout=0.0) for size in sizes},
        main=sizes[1],
        arms=_small_sgd_arms(sgd_steps),
        # an LSTM has states of both directions
        projected=language.length * 2 * int(sizes[0][1:]),
        flatness=flatness,
        settings={
            **{"num_train": num_train, "num_sequences": num_sequences, **PROBES},
            **{"num_test": "all", "loss_sentences": "all"},
        },
        **more,
    )


def _small_generated(
    sizes: Sequence[str],
    *,
    teacher_steps: int,
    vocab_size: int,
    length: int,
    num_sentences: int,
    settings: Mapping[str, Any],
    **more: Any,
) -> Dataset:
    """Return what a small OPT writes over its most frequent tokens, with two tasks of the text that it learned."""
    models = {size: small_bert(size, 1) for size in sizes}
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
    language = TeacherConfig(checkpoint=checkpoint, vocab_size=vocab_size, length=length, samples=1024)
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, weight_decay=0.0)
    # sentences are drawn once: a step takes less time than drawing its sentences
    drawn = {"num_sentences": num_sentences, "compiled": True, **ONE_CORE}
    return Dataset(
        name="generated",
        title="OPT-generated",
        teacher=teacher,
        languages=(language,),
        tasks={"QNLI": "probe-sentence-order", "SST-2": "probe-sentence-source"},
        common={"batch_size": 64, "optimizer": optimizer, **drawn},
        sizes=models,
        main=sizes[1],
        projected=64,
        # the regularization is that of so few examples
        settings={**settings, "probe_solver": "convex", "probe_regularization": (3e-3,), **_expanded(models)},
        **more,
    )


def _small_text(name: Literal["web", "text"], size: str, *, settings: Mapping[str, Any], **more: Any) -> Dataset:
    """Return a text on which models are fine-tuned: one model that is followed (web), or the arms of regularization.

    The arms have so few sentences that a model learns them by heart.
    """
    model, steps = small_bert(size), more["watched"][-1]
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE, warmup_steps=round(0.025 * steps), weight_decay=0.01)
    common = {
        "batch_size": 16,
        "optimizer": optimizer,
        "objective": ObjectiveConfig(masking="fraction", fraction=0.15),
        **ONE_CORE,
    }
    finetuning = {"finetune_seeds": 1, "finetune_learning_rate": LEARNING_RATE}
    about: dict[str, Any] = {"title": "Docstrings, longer training", "tasks": {"SST-2": "finetune-sentence-source"}}
    if name == "text":
        model = dataclasses.replace(model, dropout=0.1)
        common["num_sentences"] = more.pop("num_sentences")
        tasks = {**about["tasks"], "QNLI": "finetune-docstring-module"}
        about = {"title": "Docstrings", "tasks": tasks, "arms": _without_regularization(model, optimizer)}
    return Dataset(
        name=name,
        languages=(CORPUS,),
        common=common,
        sizes={size: model},
        main=size,
        settings={**finetuning, **settings},
        **about,
        **more,
    )


# after the few steps of `smoke`, models are further apart
_SMOKE: dict[str, Any] = {"watched": (20, 40, 60), "cooldowns": (20, 10, 40), "band": 0.4}
_SMOKE_TEXT: dict[str, Any] = {"seeds": 2, "settings": _settings(128, 64, 64, 64, finetune_epochs=1)}
SMOKE = Reproduction(
    description="some minutes on two cores: every part runs, no verdict is given",
    datasets=(
        _small_pcfg(
            (300, 301),
            ("d16", "d32"),
            seeds=2,
            layers=1,
            sgd_steps=20,
            algorithm_steps=(10, 10),
            settings=_settings(256, 256, 256, 64),
            flatness=FAST_FLATNESS,
            **_SMOKE,
        ),
        _small_hmm(
            (300, 301),
            ("h16", "h32"),
            states=4,
            sgd_steps=20,
            num_train=256,
            num_sequences=64,
            flatness=FAST_FLATNESS,
            **_SMOKE,
        ),
        _small_generated(
            ("d16", "d32"),
            seeds=2,
            teacher_steps=100,
            vocab_size=50,
            length=8,
            num_sentences=4_096,
            settings=_settings(256, 128, 64, 64),
            **_SMOKE,
        ),
        _small_text("web", "d16", **_SMOKE_TEXT, **_SMOKE),
        _small_text("text", "d16", watched=(20, 40), num_sentences=64, **_SMOKE_TEXT),
    ),
)

_LAPTOP_TEXT: dict[str, Any] = {"seeds": 3, "settings": _settings(1_024, 1_024, 512, 256, finetune_epochs=2)}
LAPTOP = Reproduction(
    description="half an hour on two cores",
    datasets=(
        _small_pcfg(
            range(710, 716),
            ("d16", "d32", "d64"),
            layers=2,
            watched=(500, 1_000, 2_000),
            cooldowns=(500, 125, 1_500),
            sgd_steps=1_000,
            algorithm_steps=(250, 150),
            settings=_settings(2_048, 4_096, 4_096, 256),
            flatness=FAST_FLATNESS,
            pre_layer_norm=False,
        ),
        _small_hmm(
            range(710, 713),
            ("h16", "h32"),
            watched=(250, 500, 1_000),
            cooldowns=(250, 60, 500),
            sgd_steps=500,
            num_train=1_024,
            num_sequences=256,
            flatness=FAST_FLATNESS,
        ),
        _small_generated(
            ("d16", "d32", "d64"),
            seeds=3,
            teacher_steps=600,
            vocab_size=100,
            length=12,
            num_sentences=16_384,
            watched=(1_000, 2_000, 4_000),
            # the shortest leaves a larger model at the loss of a smaller one after the longest
            cooldowns=(500, 50, 4_000),
            settings=_settings(1_024, 1_024, 256, 128),
        ),
        _small_text("web", "d32", watched=(250, 500, 1_000), cooldowns=(125, 30, 250, 1_000), **_LAPTOP_TEXT),
        _small_text("text", "d32", watched=(500, 1_000, 1_500), num_sentences=512, **_LAPTOP_TEXT),
    ),
)

_EVENING_TEXT: dict[str, Any] = {"seeds": 4, "settings": _settings(2_048, "all", 512, 256, finetune_epochs=2)}
EVENING = Reproduction(
    description="hours on two cores",
    datasets=(
        _small_pcfg(
            range(720, 728),
            ("d16", "d32", "d64"),
            seeds=2,
            layers=2,
            watched=(1_000, 2_000, 4_000),
            cooldowns=(1_000, 125, 500, 3_000),
            sgd_steps=2_000,
            algorithm_steps=(500, 300),
            settings=_settings(4_096, 8_192, 8_192, 512),
        ),
        _small_hmm(
            range(720, 726),
            ("h16", "h32", "h64"),
            vocab_size=16,
            watched=(500, 1_000, 2_000),
            cooldowns=(500, 60, 125, 250, 1_000),
            sgd_steps=1_000,
            num_train=2_048,
            num_sequences=512,
        ),
        _small_generated(
            ("d16", "d32", "d64"),
            seeds=4,
            teacher_steps=2_000,
            vocab_size=100,
            length=12,
            num_sentences=65_536,
            watched=(1_000, 2_000, 4_000),
            # the shortest leaves a larger model at the loss of a smaller one after the longest
            cooldowns=(500, 50, 1_000, 4_000),
            settings=_settings(4_096, 4_096, 1_024, 512),
        ),
        _small_text("web", "d32", watched=(500, 1_000, 2_000), cooldowns=(250, 60, 500, 2_000), **_EVENING_TEXT),
        _small_text("text", "d32", watched=(750, 1_500, 2_250, 3_000), num_sentences=1_024, **_EVENING_TEXT),
    ),
)


# --- GPUs ------------------------------------------------------------------------------------------------------------

TABLE_3 = ("d64", "d128", "d192", "d256", "d512", "d768", "d1024", "d1280", "d1536")
TABLE_4 = ("d128", "d192", "d320", "d384", "d640", "d960", "d1920")
BERT_TOKENIZER, VOCABULARY = "google-bert/bert-large-uncased", 30_522
BOOKS_STEPS = 300_000  # ours: the text has no number
SGD_STEPS = 30_000  # ours: the text has no number
HMM_TOKENS = Tokens(vocab_size=202, length=16)
TEXT_TOKENS = Tokens(vocab_size=VOCABULARY, length=128, predicted=19)
NEEDS = (
    (0, Resources(cores=4, gpus=1.0, memory=32.0)),
    (1280, Resources(cores=4, gpus=1.0, memory=128.0, processes=8)),
)
TEACHER_PARAMETERS = 85e6  # of OPT-125M without its embeddings
NUM_TEST = 10_000  # test examples of a probe: ours
ALL_EXAMPLES = {"num_train": "all", "num_test": "all"}  # of a task of text: QNLI has 104,743 to train on
PROJECTED = 512  # dimensions of the paper's random projection (appendix A.5), which makes probes of all widths alike
# Grammars, hidden Markov models and seeds of training on text: the least with which a paired t test at 0.05 / 130 (by
# Holm's method for up to 130 secondary tests) finds the paper's effect with 80 % power. The standard deviation is of
# differences over grammars (models, seeds) in the first run at scale `evening`, or rather its upper 80 % bound
# (`isoloss.statistics.power.sd_upper_bound`). Larger models may vary more or less.
# By dataset: the number, the paper's effect and the deviation in percentage points, how many grammars that is from.
POWER = {
    # table 2, the adversary on task C; figure 4's 1.6 points, with a deviation of 0.44, need 5 as the primary claim
    "pcfg": (7, 5.5, 1.12, 6),
    "hmm": (5, 4.0, 0.39, 6),  # figure 4, task-10
    "text": (9, 1.4, 0.35, 5),  # table 1, QNLI without dropout and weight decay
}
LEAST = 3  # of the others, for which no deviation is known: the fewest that an error can be over
COOLDOWNS = {"cooldowns": (2_000, 500, 1_000, 4_000), "cooldown_rate": 1e-3, "projected": PROJECTED}


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
    fields: dict[str, Any] = {
        "languages": tuple(each.language for each in configs),
        "common": {**common, "precision": "bfloat16", "device": "cuda", "threads": 4},
        "watched": watched_steps(preset.steps),
        "settings": {**preset.measures, "num_test": NUM_TEST},  # of languages; texts have their own
        "needs": NEEDS,
    }
    return Dataset(**fields | more)


def _large_sgd_arms(steps: int = SGD_STEPS) -> dict[str, Arm]:
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


def _lstm(layers: int, directions: Literal[1, 2] = 2) -> ModelConfig:
    return ModelConfig(architecture="lstm", size="h1024", layers=layers, directions=directions)


def _lstms(*sizes: str) -> dict[str, ModelConfig]:
    return {size: ModelConfig(architecture="lstm", size=size) for size in sizes}


def _hmm(preset: Preset) -> Dataset:
    """Return the hidden Markov model with the LSTMs of appendix A.4."""
    model: Any = PRESETS["hmm-paper"][0]
    return _dataset(
        preset,
        *(dataclasses.replace(model, seed=seed) for seed in range(POWER["hmm"][0])),
        name="hmm",
        title="HMM",
        tasks={"6": "probe-task-6", "10": "probe-task-10"},
        # the paper's "67M" and "135M" are the last two, but in one direction (docs/errata.md); these read both sides
        sizes={**_lstms("h128", "h256", "h512", "h768"), "h1024-8-layers": _lstm(8), "h1024": _lstm(16)},
        main="h1024-8-layers",
        arms=_large_sgd_arms(),
        **COOLDOWNS,
        needs=((0, NEEDS[0][1]),),
        tokens=HMM_TOKENS,
    )


def _generated(preset: Preset) -> Dataset:
    """Return the text that OPT-125M writes, with two tasks of GLUE."""
    return _dataset(
        preset,
        TeacherConfig(checkpoint="facebook/opt-125m"),
        name="generated",
        title="OPT-generated",
        seeds=LEAST,
        settings={**preset.measures, **ALL_EXAMPLES},
        tasks={"QNLI": "probe-qnli", "SST-2": "probe-sst2"},
        sizes=berts(preset, *TABLE_3),
        expanded=berts(preset, *TABLE_4),
        main="d1024",
        # a conditional takes each of the 2,000 tokens in turn, and from there on the rest of the sentence
        tokens=Tokens(vocab_size=2_002, length=24, truth=2_000 * 12 * 2 * TEACHER_PARAMETERS),
    )


def _web(preset: Preset, **more: Any) -> Dataset:
    """Return OpenWebText, on which one model is followed."""
    return _dataset(
        preset,
        CorpusConfig(paths=("hf:Skylion007/openwebtext",), tokenizer=BERT_TOKENIZER),
        name="web",
        title="OpenWebText",
        seeds=LEAST,
        settings={**preset.measures, **ALL_EXAMPLES},
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
    name, model = (
        f"{size}-{layers}-layers" if layers else size,
        dataclasses.replace(berts(preset, size)[size], layers=layers),
    )
    return _dataset(
        preset,
        corpus,
        name="text",
        title="BookCorpus",
        seeds=POWER["text"][0],
        settings={**preset.measures, **ALL_EXAMPLES},
        tasks={"QNLI": "finetune-qnli", "SST-2": "finetune-sst2", "RTE": "finetune-rte"},
        sizes={name: model},
        main=name,
        watched=watched_steps(BOOKS_STEPS, 50_000),
        arms=_without_regularization(model, train_config(preset, corpus).optimizer),
        needs=((0, NEEDS[1][1]),),
        tokens=TEXT_TOKENS,
    )


def _millions(directions: Literal[1, 2]) -> str:
    """Return how many parameters the two LSTMs of which the paper has a number have in one or both directions."""
    counts = (Costs(_lstm(layers, directions), HMM_TOKENS).parameters / 1e6 for layers in (8, 16))
    return " and ".join(f"{count:.1f}M" for count in counts)


def _large(preset: Preset) -> Reproduction:
    """Return the paper's scale with the settings of a preset."""
    counts = (
        f"LSTMs of width 1024 with 8 and 16 layers have {_millions(2)} parameters, as they read both sides of a masked "
        f"token; in one direction they have {_millions(1)}, which the paper's 67M and 135M seem to be"
    )
    return Reproduction(
        description=f"the paper's sizes on GPUs, settings: {preset.description}. {counts}",
        datasets=tuple(make(preset) for make in (_pcfg, _hmm, _generated, _web, _text)),
    )


PAPER, AUTHORS = (_large(load_preset(name)) for name in ("paper", "authors"))


def _workstation() -> Iterator[Dataset]:
    """Return the datasets of the preset `paper`, less what takes long: one language, one seed, no cooldowns."""
    preset, few = load_preset("paper"), {"num_train": 20_000, "num_test": NUM_TEST}
    fewer = {"loss_sentences": 20_000, "num_sequences": 4_096, "num_train": 20_000, "finetune_seeds": 2}
    preset = dataclasses.replace(preset, steps=10_000, measures={**preset.measures, **fewer})
    shorter: dict[str, Any] = {"watched": watched_steps(10_000, 2_000), "cooldowns": (), "seeds": 1}
    in_both = ("table 1", "table 2")

    pcfg, inside = _pcfg(preset), ("d64", "d128", "d192", "d256", "d384", "d768")  # widths that divide the last one
    yield dataclasses.replace(
        pcfg,
        languages=pcfg.languages[:1],
        sizes=berts(preset, "d64", "d128", "d256", "d512", "d768"),
        expanded=berts(preset, *inside),
        main="d512",
        arms={
            **_large_sgd_arms(3_000),
            "adversary": _algorithm(preset, "Adversary", "B", *in_both),
            "helper": _algorithm(preset, "Helper", "B", *in_both),
            "pre-ln": Arm(
                title="Pre-layer-norm", changes={"model": ModelConfig(architecture="bert-pre-ln", size="d512")}
            ),
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
