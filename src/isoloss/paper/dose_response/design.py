"""The design of the study: grammars, seeds, the arms that each model goes through, and what is measured of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.training.algorithms.config import AdversarialConfig, FisherPenaltyConfig, SAMConfig
from isoloss.paper.reproduction.cpu_scales import sgd
from isoloss.paper.reproduction.spec import CONTINUED, MEASURED, small_bert
from isoloss.paper.same_loss.design import OverGrammars, Replicate
from isoloss.run_config import ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.studies.spec import Experiment, Measurement

BASE, CONTROL, SHAM, HELPER, SAM = "base", "control", "sham", "helper", "sam"
# the arms with a penalty, from the sharpest to the flattest; the sham, whose weight is 0, stands between
SHARPER = ("sharp-3", "sharp-2", "sharp-1")
FLATTER = ("flat-1", "flat-2", "flat-3")
DOSES = (*SHARPER, SHAM, *FLATTER)
NOISES = ("noise-1", "noise-2", "noise-3")
ARMS = (CONTROL, *DOSES, *NOISES, SAM, HELPER)
OTHER_SENTENCES = 15  # added to the seed of the control, whose sentences are others than those of the other arms


@dataclass(frozen=True, kw_only=True)
class StudySize(OverGrammars):
    """How large the study is."""

    description: str  # what it is for and how long it takes
    language: PCFGConfig  # the grammars, but for their seeds
    size: str = "d32"  # of the model
    layers: int = 2
    batch_size: int = 64
    base_kl: float  # nats per masked token: where the base ends
    target_kl: float  # where the cooldown of every arm ends
    base_steps: int  # of the base: AdamW with exact labels, at most
    steps: int  # of the arms with a penalty, of sham, control and SAM
    weights: tuple[float, float, float]  # of the penalty for a flatter model, ascending
    sharp_weights: tuple[float, float, float]  # of the penalty for a sharper one, ascending in size
    sentences: int = 16  # that the penalty's trace is estimated on
    noise_steps: tuple[int, int, int]  # of SGD on sampled labels
    noise_rate: float = 0.2
    helper_steps: int
    cooldown_steps: int  # of the cooldown that ends every arm, at most
    learning_rate: float = 3e-3  # AdamW's highest, in the base and in the stage that differs between arms
    cooldown_rate: float = 1e-3  # in the cooldown
    validate_every: tuple[int, int] = (100, 20)  # steps after which base and cooldown compare the KL with the target
    tasks: tuple[str, ...] = ("prefix-2", "prefix-4")  # downstream tasks; the helper trains with the first
    shots: tuple[int, ...] = (30, 100)  # training examples of their few-shot probes
    pair: tuple[str, str] = ("needed-2", "spare-2")  # what later tokens need of the first two, and what they do not
    pair_shots: int = 50  # training examples of these
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the measures

    @property
    def probes(self) -> dict[str, str]:
        """By task and number of training examples: the measure of the few-shot probe, those of the prefixes first."""
        asked = [(task, n) for n in self.shots for task in self.tasks] + [(task, self.pair_shots) for task in self.pair]
        return {f"{task} ({n:,} examples)": f"few-shot-{task}-{n}" for task, n in asked}

    @property
    def titles(self) -> Mapping[str, str]:
        """What the runs of the arms are called in figures and tables, by arm."""
        penalties = zip((*FLATTER, *SHARPER[::-1]), (*self.weights, *(-w for w in self.sharp_weights)), strict=True)
        noises = zip(NOISES, self.noise_steps, strict=True)
        return MappingProxyType(
            {
                BASE: "Base",
                CONTROL: "AdamW, other sentences",
                SHAM: "Sham",
                **{arm: f"Penalty {weight:+g}" for arm, weight in penalties},
                **{arm: f"Label noise, {steps:,} steps" for arm, steps in noises},
                SAM: "SAM",
                HELPER: "Helper",
            }
        )

    @functools.cached_property
    def experiments(self) -> dict[str, Experiment]:
        """Every arm of every unit; a grammar is a block of the study."""
        places = {grammar: place for place, grammar in enumerate(self.grammars)}
        return {
            unit.run(arm): dataclasses.replace(experiment, block=places[unit.grammar])
            for unit in self.units
            for arm, experiment in self._arms(unit).items()
        }

    # --- what is trained ---------------------------------------------------------------------------------------------

    def _arms(self, unit: Replicate) -> dict[str, Experiment]:
        """Return the runs of one unit by the names of their arms, and what is measured of each."""
        made = {
            BASE: self._experiment(
                unit,
                BASE,
                self._config(
                    unit, (self._to_target(self.base_kl, self.base_steps, self.learning_rate, self.validate_every[0]),)
                ),
            )
        }
        cooldown = self._to_target(self.target_kl, self.cooldown_steps, self.cooldown_rate, self.validate_every[1])
        for arm, stage in self._stages().items():
            start = unit.run(BASE)
            config = self._config(unit, (stage, cooldown), init_from=f"../{start}")
            # sentences depend on seed and step alone: with the base's seed they would be its first ones again
            seed = unit.seed + CONTINUED + (OTHER_SENTENCES if arm == CONTROL else 0)
            made[arm] = self._experiment(unit, arm, dataclasses.replace(config, seed=seed), after=(start,))
        return made

    def _config(self, unit: Replicate, stages: tuple[StageConfig, ...], **more: Any) -> TrainConfig:
        return TrainConfig(
            language=dataclasses.replace(self.language, seed=unit.grammar),
            model=small_bert(self.size, self.layers),
            objective=ObjectiveConfig(labels="exact"),
            batch_size=self.batch_size,
            stages=stages,
            seed=unit.seed,
            log_every=math.gcd(*self.validate_every),
            compiled=True,
            device="cpu",
            threads=1,
            **more,
        )

    def _to_target(self, target_kl: float, steps: int, rate: float, every: int) -> StageConfig:
        """AdamW on exact labels with a rate that decays to 0, until the target is reached."""
        optimizer = OptimizerConfig(learning_rate=rate, schedule="cosine", weight_decay=0.0)
        return StageConfig(steps=steps, optimizer=optimizer, target_kl=target_kl, validate_every=every)

    def _stages(self) -> dict[str, StageConfig]:
        """Return the stage between base and cooldown, by arm: all that differs between arms."""
        adamw = OptimizerConfig(learning_rate=self.learning_rate, schedule="cosine", weight_decay=0.0)

        def stage(algorithm: Any = None, steps: int = self.steps) -> StageConfig:
            return StageConfig(steps=steps, optimizer=adamw, algorithm=algorithm)

        sharp = [-weight for weight in self.sharp_weights[::-1]]
        penalties = {
            arm: stage(FisherPenaltyConfig(weight=weight, sentences=self.sentences))
            for arm, weight in zip(DOSES, (*sharp, 0.0, *self.weights), strict=True)
        }
        noises = {
            arm: StageConfig(steps=steps, labels="sampled", optimizer=sgd(steps, self.noise_rate))
            for arm, steps in zip(NOISES, self.noise_steps, strict=True)
        }
        helper = AdversarialConfig(task=self.tasks[0], weight=-AdversarialConfig.weight)
        return {
            CONTROL: stage(),
            **penalties,
            **noises,
            SAM: stage(SAMConfig()),
            HELPER: stage(helper, self.helper_steps),
        }

    # --- what is measured --------------------------------------------------------------------------------------------

    def _experiment(self, unit: Replicate, arm: str, config: TrainConfig, after: tuple[str, ...] = ()) -> Experiment:
        parts = [self._measurement(unit, ["loss", "trace", "minimal-trace", "features", *self.probes.values()], "last")]
        if arm == BASE:
            config = dataclasses.replace(config, checkpoints=(0,))
            parts.append(self._measurement(unit, [*self.probes.values()], 0, name="measure before training of"))
        return Experiment(config=config, measurements=tuple(parts), after=after, group=self.titles[arm])

    def _measurement(
        self, unit: Replicate, measures: Sequence[str], step: int | Literal["last"], **more: Any
    ) -> Measurement:
        # other sentences than the helper has
        settings = {**self.settings, "seed": unit.seed + MEASURED}
        return Measurement(measures=tuple(measures), steps=(step,), settings=settings, **more)


LANGUAGE = PCFGConfig(levels=2, symbols_per_level=4, rules_per_symbol=4, vocab_size=8)
SETTINGS: Mapping[str, Any] = {
    **{"loss_sentences": "all", "feature_sentences": "all", "num_test": "all"},
    # this strength, because with few examples it is as accurate as weaker ones and several times as fast
    **{"num_sequences": 512, "probe_draws": 16, "probe_regularization": (0.1,)},
}
LAPTOP = StudySize(
    description="about forty-five minutes on two cores",
    language=LANGUAGE,
    grammars=tuple(range(800, 812)),
    seeds_per_grammar=3,
    base_kl=2e-4,
    target_kl=1.2e-4,
    base_steps=8_000,
    steps=200,
    weights=(1e-4, 3e-4, 1e-3),
    sharp_weights=(1e-5, 3e-5, 1e-4),
    noise_steps=(500, 1_500, 4_000),
    helper_steps=100,
    cooldown_steps=1_200,
    settings=SETTINGS,
)
SCALES: Mapping[str, StudySize] = {
    "laptop": LAPTOP,
    "evening": dataclasses.replace(LAPTOP, description="two hours on two cores", grammars=tuple(range(800, 830))),
    "pilot": dataclasses.replace(
        LAPTOP,
        description="six minutes on two cores: what the claims are planned with, no verdict is given",
        grammars=tuple(range(9000, 9004)),
        seeds_per_grammar=1,
        settings={**SETTINGS, "probe_draws": 24},
    ),
    "demo": dataclasses.replace(
        LAPTOP,
        description="two minutes on two cores: two grammars, at a higher loss; too few for a verdict",
        grammars=(840, 841),
        seeds_per_grammar=1,
        base_kl=1e-3,
        target_kl=6e-4,
        base_steps=4_000,
        steps=60,
        noise_steps=(100, 300, 900),
        helper_steps=60,
        cooldown_steps=600,
        settings={**SETTINGS, "probe_draws": 6},
    ),
    "smoke": dataclasses.replace(
        LAPTOP,
        description="a minute on two cores: every part runs, no verdict is given",
        language=dataclasses.replace(LANGUAGE, symbols_per_level=3, rules_per_symbol=3, vocab_size=6),
        grammars=(890, 891),
        seeds_per_grammar=1,
        layers=1,
        base_kl=0.1,
        target_kl=0.05,
        base_steps=200,
        steps=20,
        sentences=4,
        noise_steps=(20, 30, 40),
        helper_steps=20,
        cooldown_steps=100,
        shots=(10, 20),
        settings={**SETTINGS, "num_sequences": 64, "probe_draws": 3},
    ),
}
