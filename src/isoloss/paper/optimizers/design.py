"""The design of the study: grammars, the optimizers that bring a causal model to one loss, and what is measured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from isoloss.lab.languages.config import PCFGConfig
from isoloss.lab.training.algorithms.config import AdversarialConfig, SAMConfig
from isoloss.paper.reproduction.spec import CONTINUED, MEASURED
from isoloss.paper.same_loss.design import OverGrammars, Replicate
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, StageConfig, TrainConfig
from isoloss.studies.spec import Experiment, Measurement

STABLE, ADAMW, HELPER, ADVERSARY = "stable", "adamw", "helper", "adversary"
# what the arms are called in figures and tables; AdamW is what the others are compared with
OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        ADAMW: "AdamW",
        "sgd": "SGD after AdamW",
        "muon": "Muon",
        "soap": "SOAP",
        "schedule-free": "Schedule-free AdamW",
        "sam": "SAM",
        "wsd": "AdamW, decaying rate (WSD)",
        "lawa": "AdamW, averaged weights (LAWA)",
    }
)
# trained with a downstream task: its probe must see a difference
CONTROLS: Mapping[str, str] = MappingProxyType({HELPER: "Helper", ADVERSARY: "Adversary"})
ARMS = {**OPTIMIZERS, **CONTROLS}
BRANCHES = (ADAMW, "sgd", "wsd")  # go on from one run of AdamW


@dataclass(frozen=True, kw_only=True)
class StudySize(OverGrammars):
    """How large the study is."""

    description: str  # what it is for and how long it takes
    language: PCFGConfig  # the grammars, but for their seeds
    size: str = "d32"  # of the model, a Llama
    layers: int = 2
    batch_size: int = 64
    stable_kl: float  # nats per token: where SGD and the decaying rate take over from AdamW
    target_kl: float  # where every arm ends
    max_steps: int  # of an arm
    wsd_steps: int  # the length of the decay; the target ends most runs sooner
    learning_rate: float = 1e-3  # of all but SGD and schedule-free, constant after a warm-up
    sgd_learning_rate: float = 0.3
    schedule_free_learning_rate: float = 3e-3  # its authors recommend a larger rate than for a decaying schedule
    rho: float = 0.02  # of SAM
    validate_every: int = 10  # steps after which the KL is compared with the target
    tasks: tuple[str, ...] = ("prefix-4", "root")  # of the few-shot probes; helper and adversary train with the first
    shots: int = 30  # training examples of a few-shot probe
    span_level: int = 1  # whose symbols are probed at their spans
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the measures

    @property
    def probes(self) -> dict[str, str]:
        """By task: the measure of its few-shot probe."""
        return {f"{task} ({self.shots} examples)": f"few-shot-{task}-{self.shots}" for task in self.tasks}

    @property
    def last_layer(self) -> str:
        """The estimate of the probe of spans in the last layer."""
        return f"layer-{self.layers}"

    @property
    def accuracies(self) -> tuple[str, ...]:
        """The outcomes that are accuracies."""
        return (*self.probes.values(), self.last_layer)

    @functools.cached_property
    def experiments(self) -> dict[str, Experiment]:
        """Every arm of every grammar; a grammar is a block of the study."""
        return {
            unit.run(arm): dataclasses.replace(experiment, block=block)
            for block, unit in enumerate(self.units)
            for arm, experiment in self._arms(unit).items()
        }

    def _arms(self, unit: Replicate) -> dict[str, Experiment]:
        """Return the runs of a grammar by the names of their arms, and what is measured of each."""
        adamw = self._optimizer("adamw")
        stable = self._config(unit, adamw, target_kl=self.stable_kl)
        # a branch goes on with other sentences than the run that it begins from
        branch: dict[str, Any] = {"init_from": f"../{unit.run(STABLE)}", "seed": unit.seed + CONTINUED}
        going_on = dataclasses.replace(adamw, warmup_steps=0)
        decaying = dataclasses.replace(going_on, schedule="1-sqrt")
        sgd = dataclasses.replace(self._optimizer("sgd"), learning_rate=self.sgd_learning_rate)
        free = dataclasses.replace(self._optimizer("schedule-free"), learning_rate=self.schedule_free_learning_rate)
        task = self.tasks[0]
        configs = {
            ADAMW: self._config(unit, going_on, **branch, init_optimizer=True),
            "sgd": self._config(unit, sgd, **branch),
            **{name: self._config(unit, self._optimizer(name)) for name in ("muon", "soap", "lawa")},
            "schedule-free": self._config(unit, free),
            "sam": self._config(unit, adamw, algorithm=SAMConfig(rho=self.rho)),
            "wsd": self._config(unit, decaying, **branch, init_optimizer=True, max_steps=self.wsd_steps),
            HELPER: self._config(unit, adamw, algorithm=AdversarialConfig(task=task, weight=-AdversarialConfig.weight)),
            ADVERSARY: self._config(unit, adamw, algorithm=AdversarialConfig(task=task)),
        }
        flatness = ("trace", "minimal-trace", "directional-sharpness", "noise-sharpness", "int4-rise")
        probes = (f"span-{self.span_level}", *self.probes.values())
        measured = (self._measurement(unit, "loss", *flatness, "features", *probes),)
        return {
            STABLE: Experiment(
                config=stable, measurements=(self._measurement(unit, "loss"),), group="AdamW, before the branches"
            ),
            **{
                arm: Experiment(
                    config=configs[arm],
                    measurements=measured,
                    after=(unit.run(STABLE),) if arm in BRANCHES else (),
                    group=title,
                )
                for arm, title in ARMS.items()
            },
        }

    def _optimizer(self, name: str) -> OptimizerConfig:
        return OptimizerConfig(name=name, learning_rate=self.learning_rate, warmup_steps=50, weight_decay=0.0)

    def _config(
        self,
        unit: Replicate,
        optimizer: OptimizerConfig,
        *,
        target_kl: float | None = None,
        max_steps: int | None = None,
        **more: Any,
    ) -> TrainConfig:
        stage = StageConfig(
            steps=max_steps or self.max_steps,
            optimizer=optimizer,
            target_kl=target_kl or self.target_kl,
            validate_every=self.validate_every,
        )
        settings = {"seed": unit.seed, **more}
        return TrainConfig(
            language=dataclasses.replace(self.language, seed=unit.grammar),
            model=ModelConfig(architecture="llama", size=self.size, layers=self.layers, dropout=0.0),
            objective=ObjectiveConfig(kind="causal"),
            batch_size=self.batch_size,
            stages=(stage,),
            log_every=self.validate_every,
            device="cpu",
            threads=1,
            **settings,
        )

    def _measurement(self, unit: Replicate, *measures: str) -> Measurement:
        # other sentences than helper and adversary have
        settings = {**self.settings, "seed": unit.seed + MEASURED}
        return Measurement(measures=measures, steps=("last",), settings=settings)


LAPTOP = StudySize(
    description="half an hour on two cores",
    language=PCFGConfig(levels=3, symbols_per_level=4, rules_per_symbol=4, vocab_size=16, zipf=1.0),
    grammars=tuple(range(1410, 1418)),
    stable_kl=0.04,
    target_kl=0.02,
    max_steps=8_000,
    wsd_steps=3_000,
    settings={
        # at 1 % the rise under noise is lost in its error
        **{"loss_sentences": 4096, "num_sequences": 4096, "feature_sentences": 2048, "noise_relative_std": 0.03},
        # this strength, because with few examples it is as accurate as weaker ones and several times as fast
        **{"num_train": 2048, "num_test": 4096, "probe_draws": 64, "probe_regularization": (0.1,)},
    },
)
SCALES: Mapping[str, StudySize] = {
    "laptop": LAPTOP,
    "smoke": dataclasses.replace(
        LAPTOP,
        description="two minutes on two cores: every part runs, no verdict is given",
        language=PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8, zipf=1.0),
        grammars=(1490, 1491, 1492),
        size="d16",
        layers=1,
        batch_size=32,
        stable_kl=0.25,
        target_kl=0.2,
        max_steps=200,
        wsd_steps=40,
        tasks=("prefix-2", "root"),
        shots=20,
        settings={
            **{"loss_sentences": 256, "num_sequences": 64, "feature_sentences": 128},
            **{"num_train": 128, "num_test": 256, "probe_draws": 3, "probe_regularization": (0.1,)},
        },
    ),
}
