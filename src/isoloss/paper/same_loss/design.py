"""The design of the study: grammars, seeds, the arms that each model goes through, and what is measured of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.models.sizes import shape
from isoloss.lab.training.algorithms.config import AdversarialConfig
from isoloss.paper.reproduction.cpu_scales import sgd
from isoloss.paper.reproduction.spec import CONTINUED, MEASURED, OFFSET, small_bert
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.studies.spec import Experiment, Measurement

EMBEDDING_SCALES = ("paper", "balanced", "exact")  # all values of isoloss expand --embedding-scale
BASE, UNTOUCHED = "base", "untouched"
# what the runs are called in figures and tables
GROUPS: Mapping[str, str] = MappingProxyType(
    {
        UNTOUCHED: "Untouched",
        "no-noise": "SGD (exact labels)",
        "label-noise": "SGD (sampled labels)",
        "longer": "AdamW for longer",
        "adversary": "Adversary",
        "helper": "Helper",
        "weight-decay": "Weight decay",
    }
)
# the arms that are compared, the control first. Adversary and helper lower the KL as more AdamW does, so their
# control is AdamW for longer
CONTRASTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "label noise": ("no-noise", "label-noise"),
        "sgd": (UNTOUCHED, "label-noise"),
        "longer": (UNTOUCHED, "longer"),
        "adversary": ("longer", "adversary"),
        "helper": ("longer", "helper"),
        "weight decay": (UNTOUCHED, "weight-decay"),
    }
)
WEIGHT_DECAY = 0.1
# what is probed beside models, functions of the language alone
BASELINES: Mapping[str, str] = MappingProxyType(
    {
        "one-hot": "Tokens, one-hot",
        "lookup": "Look-up table: true conditionals",
        "log-lookup": "Look-up table: their logarithms",
    }
)


@dataclass(frozen=True, kw_only=True)
class Replicate:
    """A grammar and a pre-training seed: what every arm has in common."""

    grammar: int  # the seed of the grammar
    seed: int  # of pre-training and of the measures; different for every unit

    @property
    def prefix(self) -> str:
        """What the names of its runs begin with."""
        return f"g{self.grammar}-s{self.seed}"

    def run(self, arm: str) -> str:
        """Return the name of the run of an arm."""
        return f"{self.prefix}-{arm}"


@dataclass(frozen=True, kw_only=True)
class OverGrammars:
    """A study of random grammars with some pre-training runs on each."""

    grammars: tuple[int, ...]  # their seeds
    seeds_per_grammar: int = 1  # pre-training runs

    def with_seed_offset(self, offset: int) -> Self:
        """Return the study on other grammars, with other seeds."""
        return dataclasses.replace(self, grammars=tuple(OFFSET * offset + grammar for grammar in self.grammars))

    @property
    def units(self) -> tuple[Replicate, ...]:
        """Every grammar with every seed."""
        return tuple(
            Replicate(grammar=grammar, seed=100 * grammar + index)
            for grammar in self.grammars
            for index in range(self.seeds_per_grammar)
        )


@dataclass(frozen=True, kw_only=True)
class StudySize(OverGrammars):
    """How large the study is."""

    description: str  # what it is for and how long it takes
    language: PCFGConfig  # the grammars, but for their seeds
    sizes: tuple[str, ...]  # model sizes, ascending
    main_size: str  # the size of all arms but the arms that differ in size
    layers: int = 2
    batch_size: int = 64
    steps: int  # of the base: AdamW with exact labels
    learning_rate: float = 3e-3  # AdamW's highest, in base and cooldown
    sgd_steps: int
    sgd_learning_rate: float = 0.2
    longer_steps: int  # of AdamW alone after the base
    # of AdamW with adversary or helper after the base; in the pilot, these give the same KL as AdamW for longer
    adversary_steps: int
    helper_steps: int
    cooldown_steps: int  # of the cooldown that ends every arm
    other_cooldowns: tuple[int, ...]  # its other lengths
    tasks: tuple[str, ...]  # downstream tasks; the first is the primary one, which adversary and helper train with
    shots: tuple[int, ...]  # training examples of few-shot probes
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the measures

    @property
    def probes(self) -> dict[str, str]:
        """By task: the measure of its probe on all training examples."""
        return {task: f"probe-{task}" for task in self.tasks}

    @property
    def few_shot_probes(self) -> dict[str, str]:
        """By number of training examples and task: the measure of the probe on so few."""
        return {f"{task} ({n:,} examples)": f"few-shot-{task}-{n}" for n in self.shots for task in self.tasks}

    @property
    def projected_probes(self) -> dict[str, str]:
        """By task: the measure of the probe on features projected to as many as the smallest size has."""
        features = 2**self.language.levels * shape(self.sizes[0]).d_model
        return {task: f"projected-{task}-{features}" for task in self.tasks}

    @property
    def expanded_traces(self) -> dict[str, str]:
        """By each of `EMBEDDING_SCALES`: the measure of a trace after expanding a model into the largest size."""
        return {scale: f"trace-in-{self.sizes[-1]}-{scale}" for scale in EMBEDDING_SCALES}

    @property
    def expanded_minimum(self) -> str:
        """The measure of the minimal trace after expanding a model into the largest size."""
        return f"minimal-trace-in-{self.sizes[-1]}"

    def model(self, size: str) -> ModelConfig:
        """Return the model of a size: heads are of one width in all sizes, so that one can be expanded into another."""
        return small_bert(size, self.layers)

    def arm_of_size(self, size: str) -> str:
        """Return the arm whose model has that size and is otherwise untouched."""
        return UNTOUCHED if size == self.main_size else size

    @functools.cached_property
    def experiments(self) -> dict[str, Experiment]:
        """Every arm of every unit; a grammar is a block of the study."""
        places = {grammar: place for place, grammar in enumerate(self.grammars)}
        return {
            unit.run(arm): dataclasses.replace(experiment, block=places[unit.grammar])
            for unit in self.units
            for arm, experiment in Arms(self, unit).experiments().items()
        }


@dataclass(frozen=True)
class Arms:
    """The runs of one unit, and what is measured of each."""

    scale: StudySize  # what decides their settings
    unit: Replicate  # the grammar and the seed

    def experiments(self) -> dict[str, Experiment]:
        """Return the runs by the names of their arms."""
        scale = self.scale
        arms = {BASE: self._base(), UNTOUCHED: self._from_base(UNTOUCHED)}
        for arm, labels in (("label-noise", "sampled"), ("no-noise", "exact")):
            arms |= {arm: self._from_base(arm, self.sgd_stage(labels)), **self._cooldowns(arm)}
        for arm, stage in self.more_stages().items():
            arms[arm] = self._from_base(arm, stage)
        decayed = self.from_scratch(scale.main_size, weight_decay=WEIGHT_DECAY)
        arms["weight-decay"] = self._measured("weight-decay", decayed)
        for size in scale.sizes:
            if size != scale.main_size:
                arms[size] = self._measured(size, self.from_scratch(size))
        return arms

    # --- what is trained ---------------------------------------------------------------------------------------------

    def _config(self, size: str, optimizer: OptimizerConfig, **more: Any) -> TrainConfig:
        scale, unit = self.scale, self.unit
        return TrainConfig(
            language=dataclasses.replace(scale.language, seed=unit.grammar),
            model=scale.model(size),
            objective=ObjectiveConfig(labels="exact"),
            optimizer=optimizer,
            batch_size=scale.batch_size,
            seed=unit.seed,
            compiled=True,
            device="cpu",
            threads=1,
            **more,
        )

    def _adamw(self, weight_decay: float = 0.0) -> OptimizerConfig:
        """AdamW with a rate that decays to 0, so that every stage ends in a model at rest."""
        return OptimizerConfig(learning_rate=self.scale.learning_rate, schedule="cosine", weight_decay=weight_decay)

    def _base(self) -> Experiment:
        config = self._config(self.scale.main_size, self._adamw(), steps=self.scale.steps, checkpoints=(0,))
        tables = [f"{kind}-{task}" for kind in BASELINES for task in self.scale.tasks]
        parts = (
            self.measurement(self.common()),
            self.measurement(tables, steps=(0,), name="measure the baselines of"),
        )
        return Experiment(config=config, measurements=parts, group=GROUPS[UNTOUCHED])

    def _from_base(self, arm: str, *stages: StageConfig) -> Experiment:
        start = self.unit.run(BASE)
        return self._measured(arm, self.continued(f"../{start}", *stages), after=(start,))

    def continued(self, start: str, *stages: StageConfig, cooldown_steps: int | None = None) -> TrainConfig:
        """Return the config that continues training another model, on other sentences; its last stage is the cooldown.

        Args:
            start: The run or checkpoint that it goes on from, relative to the folder of the run.
            stages: The stages before the cooldown.
            cooldown_steps: The length of the cooldown; None: the usual one.
        """
        cooldown = StageConfig(steps=cooldown_steps or self.scale.cooldown_steps)
        config = self._config(self.scale.main_size, self._adamw(), stages=(*stages, cooldown), init_from=start)
        # sentences depend on seed and step alone: with the base's seed they would be its first ones again
        return dataclasses.replace(config, seed=self.unit.seed + CONTINUED)

    def from_scratch(self, size: str, *, steps: int | None = None, weight_decay: float = 0.0) -> TrainConfig:
        """Return the config of training from scratch; its last stage is the cooldown, which has no weight decay."""
        # None stands for the run's own optimizer, which the cooldown has too
        decaying = self._adamw(weight_decay) if weight_decay else None
        base = StageConfig(steps=steps or self.scale.steps, optimizer=decaying)
        return self._config(size, self._adamw(), stages=(base, StageConfig(steps=self.scale.cooldown_steps)))

    def sgd_stage(self, labels: Any) -> StageConfig:
        """SGD with the paper's warm-up, 12 % of the steps (appendix B.2)."""
        steps = self.scale.sgd_steps
        return StageConfig(steps=steps, labels=labels, optimizer=sgd(steps, self.scale.sgd_learning_rate))

    def more_stages(self) -> dict[str, StageConfig]:
        """Return what follows the base in the arms of more AdamW: alone, with the adversary, or with the helper."""
        scale = self.scale
        adversary, helper = (
            AdversarialConfig(task=scale.tasks[0], weight=sign * AdversarialConfig.weight) for sign in (1, -1)
        )
        return {
            "longer": StageConfig(steps=scale.longer_steps),
            "adversary": StageConfig(steps=scale.adversary_steps, algorithm=adversary),
            "helper": StageConfig(steps=scale.helper_steps, algorithm=helper),
        }

    def _cooldowns(self, arm: str) -> dict[str, Experiment]:
        """Return an arm of SGD with cooldowns of other lengths, by name; they branch off before the cooldown."""
        start = self.unit.run(arm)
        before = f"../{start}/checkpoints/step-{self.scale.sgd_steps}"
        return {
            cooldown_run(arm, steps): Experiment(
                config=self.continued(before, cooldown_steps=steps),
                measurements=(self.measurement(self.common()),),
                after=(start,),
                group=GROUPS[arm],
            )
            for steps in self.scale.other_cooldowns
        }

    # --- what is measured --------------------------------------------------------------------------------------------

    def common(self) -> list[str]:
        """Return what is measured of every checkpoint but the untrained one."""
        return ["loss", "trace", "minimal-trace", *self.scale.probes.values()]

    def _measured(self, arm: str, config: TrainConfig, after: tuple[str, ...] = ()) -> Experiment:
        scale, measures = self.scale, [*self.common(), *self.scale.few_shot_probes.values()]
        sizes = {scale.arm_of_size(size): size for size in scale.sizes}
        if arm in sizes:
            measures += scale.projected_probes.values()
            # the largest is what others are expanded into
            if sizes[arm] != scale.sizes[-1]:
                measures += [*scale.expanded_traces.values(), scale.expanded_minimum]
        if arm in (UNTOUCHED, "label-noise"):
            measures.append("rescaling-control")
        parts = [self.measurement(measures, steps=(config.steps,))]
        # tables before the cooldown are of the main size only
        if len(config.stages) > 1 and arm not in scale.sizes:
            before = (config.steps - scale.cooldown_steps,)
            parts.append(self.measurement(self.common(), steps=before, name="measure before the cooldown of"))
        return Experiment(
            config=config,
            measurements=tuple(parts),
            after=after,
            group=GROUPS.get(arm, GROUPS[UNTOUCHED]),
        )

    def measurement(self, measures: list[str], **more: Any) -> Measurement:
        """Return what is measured of a run, with the settings of this unit."""
        largest = self.scale.model(self.scale.sizes[-1])
        settings = {
            **self.scale.settings,
            # other sentences than the adversary and the helper have
            "seed": self.unit.seed + MEASURED,
            "expanded_layers": largest.layers,
            "expanded_heads": largest.heads,
        }
        return Measurement(measures=tuple(measures), settings=settings, **more)


def cooldown_run(arm: str, steps: int) -> str:
    """Return the name of an arm with a cooldown of another length."""
    return f"{arm}-polished-{steps}"


def grammars_of(units: Sequence[Replicate]) -> list[str]:
    """Return the grammar of each unit, as the clusters that errors are over."""
    return [f"grammar {unit.grammar}" for unit in units]


SCALES = {
    "laptop": StudySize(
        description="about twenty minutes on two cores",
        language=PCFGConfig(levels=2, symbols_per_level=8, rules_per_symbol=8, vocab_size=16),
        grammars=tuple(range(800, 812)),
        sizes=("d16", "d32", "d64"),
        main_size="d32",
        steps=3_000,
        sgd_steps=2_000,
        longer_steps=800,
        adversary_steps=500,
        helper_steps=300,
        cooldown_steps=2_000,
        other_cooldowns=(1_000,),
        tasks=("prefix-4", "prefix-2"),
        shots=(100, 1_000),
        settings={
            **{"loss_sentences": "all", "num_sequences": 1_024},
            **{"num_train": 8_192, "num_test": "all", "probe_solver": "convex"},
        },
    ),
    "smoke": StudySize(
        description="two minutes on two cores: every part runs, no verdict is given",
        language=PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8),
        grammars=(300, 301),
        sizes=("d16", "d32"),
        main_size="d32",
        layers=1,
        steps=60,
        sgd_steps=40,
        longer_steps=20,
        adversary_steps=15,
        helper_steps=10,
        cooldown_steps=40,
        other_cooldowns=(20,),
        tasks=("prefix-4", "prefix-2"),
        shots=(20, 50),
        settings={
            **{"loss_sentences": "all", "num_sequences": 64},
            **{"num_train": 256, "num_test": "all", "probe_solver": "convex"},
        },
    ),
}
