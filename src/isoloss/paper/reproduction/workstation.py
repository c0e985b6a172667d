"""The scale for one GPU: the paper's datasets with models of up to about 100M parameters and fewer steps.

Settings are those of the preset `paper`, less what takes long: fewer steps, fewer sentences for the measures, and the
trace over exact labels instead of sampled ones. Probes read standardized features, unlike the paper's: 20 epochs are
too few to fit the small numbers that the look-up table has for features.
"""

from __future__ import annotations

import dataclasses

from isoloss.languages.config import CorpusConfig
from isoloss.paper.reproduction import paper_scale
from isoloss.paper.reproduction.dataset import Arm, Dataset
from isoloss.paper.reproduction.paper_scale import NEEDS, berts, sgd_arms, watched_steps
from isoloss.paper.reproduction.scales import SGD_SHOWN, Scale
from isoloss.presets import Preset, load_preset
from isoloss.run_config import ModelConfig
from isoloss.training.algorithms.config import AdversarialConfig

STEPS, SGD_STEPS, TEXT_STEPS = 10_000, 3_000, 5_000
SIZES = ("d64", "d128", "d256", "d512", "d768")  # of Table 3
INSIDE = ("d64", "d128", "d192", "d256", "d384", "d768")  # those whose width divides the last one's
LSTMS = ("h128", "h256", "h512")
DOCUMENTS = 500_000  # of a corpus
SETTINGS = {
    "loss_sentences": 20_000,
    "num_sequences": 4_096,
    "num_train": 20_000,
    "probe_epochs": 20,
    "probe_seeds": 2,
    "probe_standardize": True,
    "finetune_seeds": 2,
}


def _preset() -> Preset:
    return dataclasses.replace(load_preset("paper"), steps=STEPS, measures=SETTINGS)


def _pcfg(preset: Preset) -> Dataset:
    """Return the grammar with the adversary and the helper of task C alone, and a model with pre-layer-norm blocks."""
    task = preset.tasks["C"]
    return dataclasses.replace(
        paper_scale.pcfg(preset),
        sizes=berts(preset, *SIZES),
        expanded=berts(preset, *INSIDE),
        expanded_measures=tuple(f"trace-in-{INSIDE[-1]}-{scale}" for scale in ("paper", "exact")),
        main="d512",
        watched=watched_steps(STEPS, 2_000),
        arms={
            **sgd_arms(SGD_SHOWN, SGD_STEPS),
            "adversary-C": Arm(
                title="Adversary (C)",
                changes={"algorithm": AdversarialConfig(task=task)},
                shown_in=("table 1", "table 2"),
            ),
            "helper-C": Arm(
                title="Helper (C)",
                changes={"algorithm": AdversarialConfig(task=task, weight=-AdversarialConfig.weight)},
                shown_in=("table 1", "table 2"),
            ),
            "pre-ln": Arm(
                title="Pre-layer-norm", changes={"model": ModelConfig(architecture="bert-pre-ln", size="d512")}
            ),
        },
    )


def _hmm(preset: Preset) -> Dataset:
    return dataclasses.replace(
        paper_scale.hmm(preset),
        sizes={size: ModelConfig(architecture="lstm", size=size) for size in LSTMS},
        main="h256",
        watched=watched_steps(STEPS, 2_000),
        arms=sgd_arms(SGD_SHOWN, SGD_STEPS),
        needs=NEEDS,
    )


def _generated(preset: Preset) -> Dataset:
    return dataclasses.replace(
        paper_scale.generated(preset),
        sizes=berts(preset, "d128", "d256", "d512"),
        expanded=berts(preset, "d128", "d192", "d256", "d384", "d768"),
        expanded_measures=tuple(f"trace-in-d768-{scale}" for scale in ("paper", "exact")),
        main="d512",
        watched=watched_steps(STEPS, 2_000),
    )


def _web(preset: Preset) -> Dataset:
    return _fewer_documents(dataclasses.replace(paper_scale.web(preset), watched=watched_steps(STEPS, 2_000)))


def _text(preset: Preset) -> Dataset:
    """Return BookCorpus with a model of 8 layers in the place of the one of 24."""
    dataset = paper_scale.text(preset)
    model = berts(preset, "d512")["d512"]
    bare = dataclasses.replace(model, dropout=0.0)
    arms = {
        name: dataclasses.replace(arm, changes={**arm.changes, "model": bare}) for name, arm in dataset.arms.items()
    }
    watched = watched_steps(TEXT_STEPS, 1_000)
    return _fewer_documents(
        dataclasses.replace(dataset, sizes={"d512": model}, main="d512", watched=watched, arms=arms, needs=NEEDS)
    )


def _fewer_documents(dataset: Dataset) -> Dataset:
    (corpus,) = dataset.languages
    assert isinstance(corpus, CorpusConfig)
    return dataclasses.replace(dataset, languages=(dataclasses.replace(corpus, max_documents=DOCUMENTS),))


WORKSTATION = Scale(
    description="about a day on one GPU: models of up to about 100M parameters, 5,000 to 10,000 steps",
    datasets=tuple(make(_preset()) for make in (_pcfg, _hmm, _generated, _web, _text)),
)
