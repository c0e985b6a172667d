"""The scales for GPUs: the paper's own datasets, sizes, data volumes and steps (section 2, appendices A, B), or fewer.

What the text leaves open is chosen here and said where it is: the steps of SGD and of BookCorpus, the model of "25M"
parameters, the tasks of the adversary, and the numbers of grammars, hidden Markov models and seeds. The paper has no
cooldowns. Here they bring models to one loss, as at the small scales, so that claims can be judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from isoloss.config import LanguageConfig
from isoloss.lab.languages.config import PRESETS, CorpusConfig, TeacherConfig
from isoloss.lab.presets import Preset, load_preset, train_config
from isoloss.lab.training.algorithms.config import AdversarialConfig
from isoloss.paper.reproduction.costs import Tokens, num_parameters
from isoloss.paper.reproduction.spec import SHOWN, Arm, Dataset, Reproduction, sgd_arms, without_regularization
from isoloss.run_config import ModelConfig, OptimizerConfig
from isoloss.studies.plan import Resources

TABLE_3 = ("d64", "d128", "d192", "d256", "d512", "d768", "d1024", "d1280", "d1536")
TABLE_4 = ("d128", "d192", "d320", "d384", "d640", "d960", "d1920")
LSTMS = ("h128", "h256", "h512", "h768", "h1024")
BERT_TOKENIZER = "google-bert/bert-large-uncased"
VOCABULARY = 30_522  # of that tokenizer
BOOKS_STEPS = 300_000  # ours: the text has no number
SGD_STEPS = 30_000  # ours: the text has no number
HMM_TOKENS = Tokens(vocab_size=202, length=16)
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
# of cooldowns; the text has none
BRANCH, COOLDOWN_STEPS, OTHER_COOLDOWNS, COOLDOWN_RATE = 15_000, 2_000, (500, 1_000, 4_000), 1e-3
# of `workstation`: the settings of the preset `paper`, less what takes long
WORKSTATION_STEPS, WORKSTATION_SGD_STEPS, WORKSTATION_TEXT_STEPS = 10_000, 3_000, 5_000
WORKSTATION_SIZES = ("d64", "d128", "d256", "d512", "d768")  # of Table 3
WORKSTATION_INSIDE = ("d64", "d128", "d192", "d256", "d384", "d768")  # those whose width divides the last one's
WORKSTATION_LSTMS = ("h128", "h256", "h512")
DOCUMENTS = 500_000  # of a corpus
_PAPER = load_preset("paper")
FEWER_EXAMPLES = {"num_train": 20_000, "num_test": NUM_TEST}
WORKSTATION_SETTINGS = {
    **_PAPER.measures,
    "loss_sentences": 20_000,
    "num_sequences": 4_096,
    "num_train": FEWER_EXAMPLES["num_train"],
    "finetune_seeds": 2,
}


def _dataset(preset: Preset, *languages: LanguageConfig, tasks: Mapping[str, str], **more: Any) -> Dataset:
    """Return a dataset with what the preset decides; `more` are its other fields, some of which have defaults here."""
    configs = [train_config(preset, language) for language in languages]
    config = configs[0]
    shared = ("batch_size", "objective", "optimizer", "num_sentences", "masked_copies")
    return Dataset(
        **{
            "languages": tuple(each.language for each in configs),
            "tasks": tasks,
            "common": {
                **{name: getattr(config, name) for name in shared},
                **{"precision": "bfloat16", "device": "cuda", "threads": 4},
            },
            "watched": watched_steps(preset.steps),
            "measures": ("loss", "trace", "minimal-trace", *tasks.values()),
            "settings": {**preset.measures, "num_test": NUM_TEST},  # of languages; texts have their own
            "shown": SHOWN[more["name"]],
            "needs": NEEDS,
            **more,
        }
    )


def berts(preset: Preset, *sizes: str) -> dict[str, ModelConfig]:
    """Return the transformers of some sizes, by size."""
    return {size: ModelConfig(architecture=preset.architecture, size=size) for size in sizes}


def _sgd_arms(steps: int = SGD_STEPS) -> dict[str, Arm]:
    """Return SGD after the last step: warm-up over 12 % of the steps, then 1e-3 (appendix B.2)."""
    optimizer = OptimizerConfig(name="sgd", learning_rate=1e-3, warmup_proportion=0.12, weight_decay=0.0)
    return sgd_arms(steps, optimizer, watched=tuple(range(steps // 6, steps, steps // 6)))


def _algorithm(preset: Preset, title: str, task: str, *shown_in: str) -> Arm:
    """Return the adversary of a task, or the helper, whose term has the other sign."""
    weight = AdversarialConfig.weight if title == "Adversary" else -AdversarialConfig.weight
    algorithm = AdversarialConfig(task=preset.tasks[task], weight=weight)
    return Arm(title=f"{title} ({task})", changes={"algorithm": algorithm}, shown_in=shown_in)


def _inside(largest: str) -> tuple[str, ...]:
    return tuple(f"trace-in-{largest}-{scale}" for scale in ("paper", "exact"))


def _cooldowns(tasks: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a dataset that is judged after cooldowns."""
    return {
        "branch": BRANCH,
        "cooldown_steps": COOLDOWN_STEPS,
        "other_cooldowns": OTHER_COOLDOWNS,
        "cooldown_rate": COOLDOWN_RATE,
        "size_measures": tuple(f"projected-{key.removeprefix('probe-')}-{PROJECTED}" for key in tasks.values()),
    }


NO_COOLDOWNS: Mapping[str, Any] = {"branch": 0, "cooldown_steps": 0, "other_cooldowns": ()}


def watched_steps(last: int, every: int = 5_000) -> tuple[int, ...]:
    """Return the steps up to the last that are measured."""
    return tuple(range(every, last + 1, every))


def pcfg(preset: Preset) -> Dataset:
    """Return the grammar: Tables 3 and 4, SGD, and an adversary for each task."""
    is_framed = preset.is_framed
    language: Any = PRESETS["pcfg-authors" if is_framed else "pcfg-paper"][0]
    grammars = [dataclasses.replace(language, seed=seed) for seed in range(POWER["pcfg"][0])]
    tasks = {name: f"probe-{task}" for name, task in preset.tasks.items()}
    return _dataset(
        preset,
        *grammars,
        name="pcfg",
        title="PCFG",
        tasks=tasks,
        sizes=berts(preset, *TABLE_3),
        expanded=berts(preset, *TABLE_4),
        main="d1024",
        followed="d512",
        arms={
            **_sgd_arms(),
            "adversary-A": _algorithm(preset, "Adversary", "A", "table 1"),
            "adversary-C": _algorithm(preset, "Adversary", "C", "table 2"),
            # those that claims are about
            "adversary": _algorithm(preset, "Adversary", "B", "table 1"),
            "helper": _algorithm(preset, "Helper", "B", "table 2"),
        },
        **_cooldowns(tasks),
        expanded_measures=_inside(TABLE_4[-1]),
        # [CLS] and [SEP] are two more ids and two more places; 15 % of 16 tokens are predicted
        tokens=Tokens(vocab_size=204, length=18, predicted=3) if is_framed else Tokens(vocab_size=202, length=32),
    )


def _lstm(layers: int, directions: Literal[1, 2] = 2) -> ModelConfig:
    return ModelConfig(architecture="lstm", size="h1024", layers=layers, directions=directions)


def hmm(preset: Preset) -> Dataset:
    """Return the hidden Markov model with the LSTMs of appendix A.4."""
    tasks = {"6": "probe-task-6", "10": "probe-task-10"}
    lstms = {size: ModelConfig(architecture="lstm", size=size) for size in LSTMS[:-1]}
    # the paper's "67M" and "135M" are the next two, but in one direction (docs/errata.md); here they read both sides
    lstms |= {"h1024-8-layers": _lstm(8), "h1024": _lstm(16)}
    model: Any = PRESETS["hmm-paper"][0]
    return _dataset(
        preset,
        *(dataclasses.replace(model, seed=seed) for seed in range(POWER["hmm"][0])),
        name="hmm",
        title="HMM",
        tasks=tasks,
        sizes=lstms,
        main="h1024-8-layers",
        arms=_sgd_arms(),
        **_cooldowns(tasks),
        measures=("loss", "trace", *tasks.values()),
        needs=((0, NEEDS[0][1]),),
        tokens=HMM_TOKENS,
    )


def generated(preset: Preset) -> Dataset:
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
        expanded_measures=_inside(TABLE_4[-1]),
        # a conditional takes each of the 2,000 tokens in turn, and from there on the rest of the sentence
        tokens=Tokens(vocab_size=2_002, length=24, truth=2_000 * 12 * 2 * TEACHER_PARAMETERS),
    )


def web(preset: Preset) -> Dataset:
    """Return OpenWebText, on which one model is followed."""
    corpus = CorpusConfig(paths=("hf:Skylion007/openwebtext",), tokenizer=BERT_TOKENIZER)
    return _dataset(
        preset,
        corpus,
        name="web",
        title="OpenWebText",
        seeds=LEAST,
        settings={**preset.measures, **ALL_EXAMPLES},
        tasks={"SST-2": "finetune-sst2"},
        # "25M": 24.4M with the embedding, as the paper counts elsewhere
        sizes=berts(preset, "d384"),
        main="d384",
        watched=tuple(range(400_000, 1_400_001, 200_000)),
        tokens=Tokens(vocab_size=VOCABULARY, length=128, predicted=19),
    )


def text(preset: Preset) -> Dataset:
    """Return BookCorpus, with and without regularization, and with SAM."""
    # 335M with the embedding
    large = ModelConfig(architecture=preset.architecture, size="d1024", layers=24)
    corpus = CorpusConfig(paths=("hf:bookcorpus/bookcorpus",), tokenizer=BERT_TOKENIZER)
    decay_off = dataclasses.replace(train_config(preset, corpus).optimizer, weight_decay=0.0)
    changes = {"model": dataclasses.replace(large, dropout=0.0), "optimizer": decay_off}
    tasks = {"QNLI": "finetune-qnli", "SST-2": "finetune-sst2", "RTE": "finetune-rte"}
    return _dataset(
        preset,
        corpus,
        name="text",
        title="BookCorpus",
        seeds=POWER["text"][0],
        settings={**preset.measures, **ALL_EXAMPLES},
        tasks=tasks,
        measures=("loss", "generalization-gap", "trace", "minimal-trace", *tasks.values()),
        sizes={"d1024-24-layers": large},
        main="d1024-24-layers",
        watched=watched_steps(BOOKS_STEPS, 50_000),
        arms=without_regularization(changes),
        needs=((0, NEEDS[1][1]),),
        tokens=Tokens(vocab_size=VOCABULARY, length=128, predicted=19),
    )


def _millions(directions: Literal[1, 2]) -> str:
    """Return how many parameters the two LSTMs of which the paper has a number have in one or both directions."""
    counts = (num_parameters(_lstm(layers, directions), HMM_TOKENS) / 1e6 for layers in (8, 16))
    return " and ".join(f"{count:.1f}M" for count in counts)


def scale(preset: Preset) -> Reproduction:
    """Return the paper's scale with the settings of a preset."""
    datasets = tuple(make(preset) for make in (pcfg, hmm, generated, web, text))
    counts = (
        f"LSTMs of width 1024 with 8 and 16 layers have {_millions(2)} parameters, as they read both sides of a masked "
        f"token; in one direction they have {_millions(1)}, which the paper's 67M and 135M seem to be"
    )
    return Reproduction(
        description=f"the paper's sizes on GPUs, settings: {preset.description}. {counts}", datasets=datasets
    )


PAPER, AUTHORS = (scale(load_preset(name)) for name in ("paper", "authors"))


def _workstation_pcfg(preset: Preset) -> Dataset:
    dataset = pcfg(preset)
    return dataclasses.replace(
        dataset,
        languages=dataset.languages[:1],
        **NO_COOLDOWNS,
        sizes=berts(preset, *WORKSTATION_SIZES),
        expanded=berts(preset, *WORKSTATION_INSIDE),
        expanded_measures=_inside(WORKSTATION_INSIDE[-1]),
        main="d512",
        watched=watched_steps(WORKSTATION_STEPS, 2_000),
        arms={
            **_sgd_arms(WORKSTATION_SGD_STEPS),
            "adversary": _algorithm(preset, "Adversary", "B", "table 1", "table 2"),
            "helper": _algorithm(preset, "Helper", "B", "table 1", "table 2"),
            "pre-ln": Arm(
                title="Pre-layer-norm", changes={"model": ModelConfig(architecture="bert-pre-ln", size="d512")}
            ),
        },
    )


def _workstation_hmm(preset: Preset) -> Dataset:
    dataset = hmm(preset)
    return dataclasses.replace(
        dataset,
        languages=dataset.languages[:1],
        **NO_COOLDOWNS,
        sizes={size: ModelConfig(architecture="lstm", size=size) for size in WORKSTATION_LSTMS},
        main="h256",
        watched=watched_steps(WORKSTATION_STEPS, 2_000),
        arms=_sgd_arms(WORKSTATION_SGD_STEPS),
        needs=NEEDS,
    )


def _workstation_generated(preset: Preset) -> Dataset:
    dataset = generated(preset)
    return dataclasses.replace(
        dataset,
        seeds=1,
        settings={**dataset.settings, **FEWER_EXAMPLES},
        sizes=berts(preset, "d128", "d256", "d512"),
        expanded=berts(preset, "d128", "d192", "d256", "d384", "d768"),
        expanded_measures=_inside("d768"),
        main="d512",
        watched=watched_steps(WORKSTATION_STEPS, 2_000),
    )


def _workstation_web(preset: Preset) -> Dataset:
    return _fewer_documents(dataclasses.replace(web(preset), watched=watched_steps(WORKSTATION_STEPS, 2_000)))


def _workstation_text(preset: Preset) -> Dataset:
    """Return BookCorpus with a model of 8 layers in the place of the one of 24."""
    dataset = text(preset)
    model = berts(preset, "d512")["d512"]
    bare = dataclasses.replace(model, dropout=0.0)
    arms = {
        name: dataclasses.replace(arm, changes={**arm.changes, "model": bare}) for name, arm in dataset.arms.items()
    }
    watched = watched_steps(WORKSTATION_TEXT_STEPS, 1_000)
    return _fewer_documents(
        dataclasses.replace(dataset, sizes={"d512": model}, main="d512", watched=watched, arms=arms, needs=NEEDS)
    )


def _fewer_documents(dataset: Dataset) -> Dataset:
    (corpus,) = dataset.languages
    assert isinstance(corpus, CorpusConfig)
    return dataclasses.replace(
        dataset,
        languages=(dataclasses.replace(corpus, max_documents=DOCUMENTS),),
        seeds=1,
        settings={**dataset.settings, **FEWER_EXAMPLES},
    )


_WORKSTATION_PRESET = dataclasses.replace(_PAPER, steps=WORKSTATION_STEPS, measures=WORKSTATION_SETTINGS)
WORKSTATION = Reproduction(
    description="about a day on one GPU: models of up to about 100M parameters, 5,000 to 10,000 steps",
    datasets=tuple(
        make(_WORKSTATION_PRESET)
        for make in (_workstation_pcfg, _workstation_hmm, _workstation_generated, _workstation_web, _workstation_text)
    ),
)
