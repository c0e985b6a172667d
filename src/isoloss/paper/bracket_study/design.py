"""The design of the study: models, seeds, the arms that each model goes through, and what is measured of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Self

from isoloss.lab.languages.config import HiddenBracketConfig
from isoloss.lab.training.algorithms.config import FisherPenaltyConfig, SAMConfig
from isoloss.paper.reproduction.cpu_scales import sgd
from isoloss.paper.reproduction.spec import CONTINUED, MEASURED, OFFSET
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.studies.spec import Experiment, Measurement

Model = Literal["attention", "transformer"]
MODELS: Mapping[Model, ModelConfig] = MappingProxyType(
    {
        "attention": ModelConfig(architecture="bracket-attention", size="m64", dropout=0.0),
        "transformer": ModelConfig(architecture="bert", size="d16", dropout=0.0),
    }
)
BASE, SHAM = "base", "sham"
# what the runs are called in figures and tables
GROUPS: Mapping[str, str] = MappingProxyType(
    {
        BASE: "Base",
        "no-noise": "SGD (exact labels)",
        "label-noise": "SGD (sampled labels)",
        "adamw": "AdamW (sampled labels)",
        "sam": "SAM",
        SHAM: "Sham penalty",
        "penalty": "Flatness penalty",
        "reward": "Sharpness reward",
    }
)
TARGET_KL = 1e-5  # nats: every base and every cooldown ends here
MISSED_KL = 2 * TARGET_KL  # nats: a run that ends above it has missed the target, which is met on a sample
MOST_STEPS = 3000  # of a base or cooldown, by when the target is long reached
ADAMW_STEPS = 3000  # of AdamW on sampled labels
BATCH, SGD_BATCH, PENALTY_BATCH = 64, 8, 16  # sentences in a step: of base and cooldown, of noise, of the penalty
# SGD's, by T: label noise makes larger ones diverge
RATES: Mapping[Model, Mapping[int, float]] = MappingProxyType({"attention": {6: 1.0, 8: 0.7}, "transformer": {6: 0.3}})
PENALIZED: Mapping[Model, tuple[str, ...]] = MappingProxyType(
    # u and V, the neurons
    {"attention": ("*.value.*", "answers.*"), "transformer": ("*",)}
)
TASKS = {"r2-g": "g", "r2-abs-g": "|g|", "r2-zero": "g = 0", "r2-parity": "parity"}


@dataclass(frozen=True, kw_only=True)
class Replicate:
    """A model of a language with a seed: what every arm has in common."""

    model: Model
    length: int  # T
    seed: int  # of the study: what errors are over

    @property
    def run_seed(self) -> int:
        """The seed of pre-training and of the measures; different for every unit."""
        return 1000 * self.seed + 100 * (self.model == "transformer") + self.length

    def run(self, arm: str) -> str:
        """Return the name of the run of an arm."""
        return f"{self.model}-{self.length}-s{self.seed}-{arm}"


@dataclass(frozen=True, kw_only=True)
class StudySize:
    """How large the study is."""

    description: str  # what it is for and how long it takes
    seeds: tuple[int, ...]
    lengths: Mapping[Model, tuple[int, ...]]  # T, by model
    sgd_steps: int
    doses: tuple[int, ...]  # steps of label noise after which a model is cooled down too, all below `sgd_steps`
    penalties: tuple[float, ...]  # weights; the sham, a weight of 0, is added. The last one is what claims are about
    penalty_steps: int
    has_others: bool  # whether there are AdamW on sampled labels and SAM

    def with_seed_offset(self, offset: int) -> Self:
        """Return the study with other seeds."""
        return dataclasses.replace(self, seeds=tuple(OFFSET * offset + seed for seed in self.seeds))

    def units(self, model: Model, length: int) -> tuple[Replicate, ...]:
        """Return every seed of a model."""
        return tuple(Replicate(model=model, length=length, seed=seed) for seed in self.seeds)

    def dosed(self, model: Model) -> dict[int, str]:
        """Return the arms of label noise by their steps, from the base, which has none."""
        doses = self.doses if model == "attention" else ()
        return {0: BASE, **{steps: f"label-noise-{steps}" for steps in doses}, self.sgd_steps: "label-noise"}

    def weighted(self, model: Model) -> dict[float, str]:
        """Return the arms of the penalty by its weight, ascending."""
        strengths = self.penalties if model == "attention" else self.penalties[-1:]
        arms = {
            sign * each: f"{name}-{each:g}" for name, sign in (("penalty", 1), ("reward", -1)) for each in strengths
        }
        return dict(sorted({**arms, 0.0: SHAM}.items()))

    @functools.cached_property
    def experiments(self) -> dict[str, Experiment]:
        """Every arm of every unit; a seed is a block of the study."""
        places = {seed: place for place, seed in enumerate(self.seeds)}
        return {
            unit.run(arm): dataclasses.replace(experiment, block=places[unit.seed])
            for model, lengths in self.lengths.items()
            for length in lengths
            for unit in self.units(model, length)
            for arm, experiment in Arms(self, unit).experiments().items()
        }


@dataclass(frozen=True)
class Arms:
    """The runs of one unit, and what is measured of each."""

    scale: StudySize
    unit: Replicate

    def experiments(self) -> dict[str, Experiment]:
        """Return the runs by the names of their arms."""
        scale, model = self.scale, self.unit.model
        rate = RATES[model][self.unit.length]
        noise = StageConfig(
            steps=scale.sgd_steps,
            labels="sampled",
            batch_size=SGD_BATCH,
            optimizer=sgd(scale.sgd_steps, rate),
        )
        dosed = scale.dosed(model)
        kept = tuple(steps for steps in dosed if 0 < steps < scale.sgd_steps)
        arms = {
            BASE: self._base(),
            "no-noise": self._from_base("no-noise", dataclasses.replace(noise, labels="exact")),
            "label-noise": self._from_base("label-noise", noise, checkpoints=kept),
            **{dosed[steps]: self._dose(steps) for steps in kept},
        }
        if scale.has_others and model == "attention":
            arms["adamw"] = self._from_base(
                "adamw",
                StageConfig(steps=ADAMW_STEPS, labels="sampled", batch_size=SGD_BATCH, optimizer=adamw("constant")),
            )
            # a step takes two gradients
            half = scale.sgd_steps // 2
            sam = dataclasses.replace(
                noise, steps=half, labels="exact", optimizer=sgd(half, rate), algorithm=SAMConfig(batch="same")
            )
            arms["sam"] = self._from_base("sam", sam)
        for weight, arm in scale.weighted(model).items():
            penalty = FisherPenaltyConfig(weight=weight, sentences=PENALTY_BATCH, parameters=PENALIZED[model])
            stage = StageConfig(
                steps=scale.penalty_steps, batch_size=PENALTY_BATCH, optimizer=adamw("constant"), algorithm=penalty
            )
            arms[arm] = self._from_base(arm, stage)
        return arms

    def _config(self, optimizer: OptimizerConfig, *stages: StageConfig, **more: Any) -> TrainConfig:
        """Return the config of a run that ends at the target."""
        unit = self.unit
        # the penalty takes second derivatives, which the compiled step does not have
        compiled = unit.model == "transformer" and all(stage.algorithm is None for stage in stages)
        return TrainConfig(
            language=HiddenBracketConfig(length=unit.length),
            model=MODELS[unit.model],
            objective=ObjectiveConfig(labels="exact"),
            optimizer=optimizer,
            stages=(*stages, StageConfig(steps=MOST_STEPS, target_kl=TARGET_KL)),
            batch_size=BATCH,
            compiled=compiled,
            device="cpu",
            threads=1,
            **more,
        )

    def _base(self) -> Experiment:
        config = self._config(adamw("cosine", 1e-2), seed=self.unit.run_seed, checkpoints=(0,))
        untrained = self._measurement("bracket-probes", "bracket-tokens", steps=(0,), name="measure the untrained")
        return Experiment(config=config, measurements=(self._ends(), untrained), group=GROUPS[BASE])

    def _from_base(self, arm: str, stage: StageConfig, checkpoints: tuple[int, ...] = ()) -> Experiment:
        return self._continued(BASE, "", arm, stage, checkpoints=checkpoints)

    def _dose(self, steps: int) -> Experiment:
        """Return the cooldown of a model after part of the label noise."""
        return self._continued("label-noise", f"/checkpoints/step-{steps}", "label-noise")

    def _continued(
        self, start: str, checkpoint: str, arm: str, *stages: StageConfig, checkpoints: tuple[int, ...] = ()
    ) -> Experiment:
        run = self.unit.run(start)
        # sentences depend on seed and step alone: with the base's seed they would be its first ones again
        seed = self.unit.run_seed + CONTINUED
        config = self._config(
            adamw("cosine"), *stages, init_from=f"../{run}{checkpoint}", seed=seed, checkpoints=checkpoints
        )
        group = GROUPS.get(arm) or GROUPS[arm.partition("-")[0]]
        return Experiment(config=config, measurements=(self._ends(),), after=(run,), group=group)

    def _ends(self) -> Measurement:
        flatness = ("bracket-parts",) if self.unit.model == "attention" else ("trace", "minimal-trace")
        return self._measurement("loss", *flatness, "bracket-probes", "features", steps=("last",))

    def _measurement(self, *measures: str, **more: Any) -> Measurement:
        # other sentences than training has
        settings = {"loss_sentences": "all", "feature_sentences": "all", "seed": self.unit.run_seed + MEASURED}
        return Measurement(measures=measures, settings=settings, **more)


def adamw(schedule: Literal["constant", "cosine"], rate: float = 3e-3) -> OptimizerConfig:
    """Return AdamW without weight decay."""
    return OptimizerConfig(learning_rate=rate, schedule=schedule, weight_decay=0.0)


STRENGTHS = (0.0003, 0.001, 0.003)
SCALES = {
    "laptop": StudySize(
        description="about 45 minutes on two cores",
        seeds=tuple(range(1100, 1120)),
        lengths={"attention": (6, 8), "transformer": (6,)},
        sgd_steps=6000,
        doses=(1000, 2000, 4000),
        penalties=STRENGTHS,
        penalty_steps=1500,
        has_others=True,
    ),
    "demo": StudySize(
        description="about two minutes on two cores: the paper's model at T = 6 with eight seeds",
        seeds=tuple(range(8)),
        lengths={"attention": (6,)},
        sgd_steps=3000,
        doses=(1000,),
        penalties=STRENGTHS[-1:],
        penalty_steps=600,
        has_others=False,
    ),
    "smoke": StudySize(
        description="half a minute on two cores: every part runs, no result means anything",
        seeds=(0, 1),
        lengths={"attention": (6,), "transformer": (6,)},
        sgd_steps=100,
        doses=(50,),
        penalties=STRENGTHS[-1:],
        penalty_steps=50,
        has_others=True,
    ),
}
