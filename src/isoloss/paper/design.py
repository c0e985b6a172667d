"""What the studies of the paper share: languages x seeds x arms, each arm with a cooldown, become runs.

A study's scale is a `Design`. Its units are languages with a pre-training seed; every unit goes through the same arms,
and a language is a block of the study.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from isoloss import config
from isoloss.config import LanguageConfig
from isoloss.lab.evaluation.external import ExternalCheckpoint
from isoloss.lab.languages.config import PCFGConfig
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, TrainConfig
from isoloss.statistics.clusters import slope_within
from isoloss.statistics.estimate import Estimate
from isoloss.studies import Experiment, Measurement
from isoloss.studies.claims import Contrast, Trend
from isoloss.studies.plan import Expected
from isoloss.studies.results import Checkpoint, Pair, Results, combined

# what is added to a unit's seed: for what follows its first run, and for the measures. Units of one language have
# consecutive seeds, fewer than 30, and languages are 100 apart: no two streams meet
CONTINUED, MEASURED = 30, 60
OFFSET = 1000  # added to the seeds of languages per seed offset
HEAD_WIDTH = 8  # of all small models, so that one can be expanded into another


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A language with a pre-training seed: what all runs that are compared have in common."""

    prefix: str  # what the names of its runs begin with
    cluster: str  # what errors are over: runs on one language are alike
    language: LanguageConfig
    seed: int  # of pre-training; different for every unit
    block: int  # the place of the language

    def run(self, arm: str) -> str:
        """Return the name of the run of an arm."""
        return f"{self.prefix}-{arm}"


def clusters_of(units: Iterable[Unit]) -> list[str]:
    """Return what errors are over, for each unit."""
    return [unit.cluster for unit in units]


@dataclass(frozen=True, kw_only=True)
class Design:
    """A scale of a study: its units, and the arms that each of them goes through."""

    description: str  # what it is for and how long it takes
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the measures
    # that training and measuring a run took in a draw, which the plan of the next one says; None: a rough guess
    seconds: tuple[float, float] | None = None

    @property
    def units(self) -> tuple[Unit, ...]:
        """Every language with every seed."""
        raise NotImplementedError

    def arms(self, unit: Any) -> Mapping[str, Experiment]:
        """Return the runs of a unit by the names of their arms, and what is measured of each."""
        raise NotImplementedError

    @functools.cached_property
    def experiments(self) -> dict[str, Experiment]:
        """Every arm of every unit, after the run that it goes on from."""
        return {
            unit.run(arm): dataclasses.replace(
                self._with_seconds(experiment), block=unit.block, after=_goes_on_from(experiment.config)
            )
            for unit in self.units
            for arm, experiment in self.arms(unit).items()
        }

    def _with_seconds(self, experiment: Experiment) -> Experiment:
        if self.seconds is None:
            return experiment
        training, measuring = (Expected(seconds=each) for each in self.seconds)
        parts = tuple(dataclasses.replace(part, expected=measuring) for part in experiment.measurements)
        return dataclasses.replace(experiment, measurements=parts, expected=training)

    def measurement(
        self, unit: Unit, measures: Iterable[str], *steps: int | Literal["last"], **more: Any
    ) -> Measurement:
        """Return what is measured of a run, on other sentences than training has."""
        settings = {**self.settings, "seed": unit.seed + MEASURED, **more.pop("settings", {})}
        return Measurement(measures=tuple(measures), steps=steps, settings=settings, **more)


@dataclass(frozen=True, kw_only=True)
class OverGrammars(Design):
    """A study of random grammars with some pre-training runs on each."""

    language: PCFGConfig  # the grammars, but for their seeds
    grammars: tuple[int, ...]  # their seeds
    seeds_per_grammar: int = 1  # pre-training runs

    def with_seed_offset(self, offset: int) -> Self:
        """Return the study on other grammars, with other seeds."""
        return dataclasses.replace(self, grammars=tuple(OFFSET * offset + grammar for grammar in self.grammars))

    @property
    def units(self) -> tuple[Unit, ...]:
        """Every grammar with every seed."""
        return tuple(
            Unit(
                prefix=f"g{grammar}-s{100 * grammar + index}",
                cluster=f"grammar {grammar}",
                language=dataclasses.replace(self.language, seed=grammar),
                seed=100 * grammar + index,
                block=block,
            )
            for block, grammar in enumerate(self.grammars)
            for index in range(self.seeds_per_grammar)
        )


# --- what is trained -------------------------------------------------------------------------------------------------


def exact_labels(unit: Unit, model: ModelConfig, **more: Any) -> TrainConfig:
    """Return the config of a small model on one core whose labels are the exact conditionals."""
    fields = {"seed": unit.seed, "objective": ObjectiveConfig(labels="exact"), "compiled": True, **more}
    return TrainConfig(language=unit.language, model=model, device="cpu", threads=1, **fields)


def _goes_on_from(config: TrainConfig | ExternalCheckpoint) -> tuple[str, ...]:
    start = config.init_from if isinstance(config, TrainConfig) else None
    # ../RUN or ../RUN/checkpoints/step-N
    return (start.split("/")[1],) if start else ()


def continued(unit: Unit, experiment: TrainConfig, start: str) -> TrainConfig:
    """Return a config that goes on from a run or checkpoint of the unit, on other sentences."""
    # sentences depend on seed and step alone: with the seed of the first run they would be its first ones again
    return dataclasses.replace(experiment, init_from=f"../{unit.run(start)}", seed=unit.seed + CONTINUED)


def small_bert(size: str, layers: int = 2, architecture: str = "bert") -> ModelConfig:
    """Return a transformer without dropout whose heads are of one width in all sizes."""
    return ModelConfig(
        architecture=architecture, size=size, layers=layers, heads=int(size[1:]) // HEAD_WIDTH, dropout=0.0
    )


def sgd(steps: int, rate: float) -> OptimizerConfig:
    """Return plain SGD with the paper's warm-up, 12 % of the steps (appendix B.2)."""
    return OptimizerConfig(name="sgd", learning_rate=rate, warmup_steps=round(0.12 * steps), weight_decay=0.0)


def adamw(
    rate: float, schedule: Literal["constant", "cosine"] = "cosine", weight_decay: float = 0.0
) -> OptimizerConfig:
    """Return AdamW; by default its rate decays to 0, so that a stage ends in a model at rest."""
    return OptimizerConfig(learning_rate=rate, schedule=schedule, weight_decay=weight_decay)


# --- what is compared ------------------------------------------------------------------------------------------------


def units_with(results: Results, *arms: str) -> list[Any]:
    """Return the units that have results for all of these arms."""
    design: Design = results.scale
    return [unit for unit in design.units if all(unit.run(arm) in results.experiments for arm in arms)]


def ends_of(results: Results, units: Iterable[Unit], arm: str) -> list[Checkpoint]:
    """Return the last checkpoint of an arm, by unit."""
    return [results.at(unit.run(arm)) for unit in units]


def pairs_of(results: Results, units: Sequence[Unit], control: str, arm: str) -> list[Pair]:
    """Return the last checkpoints of a control and of an arm, by unit."""
    return list(zip(ends_of(results, units, control), ends_of(results, units, arm), strict=True))


# --- models of one loss ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AtOneLoss(OverGrammars):
    """A study of models that end at one KL; what is left of its differences is taken out by slopes on the KL."""

    target_kl: float  # nats per predicted token: where every arm ends
    largest_kl: float = math.inf  # a unit is left out if an arm ends above it: it has diverged

    needed: ClassVar[tuple[str, ...]]  # arms, of which a unit must have results
    falling: ClassVar[tuple[str, str]]  # two arms between which the KL falls and else nothing is done
    # parts of the minimal trace, by what their kinds of map begin with. Maps that share a factor, as an MLP's first and
    # last, have equal parts at the minimum, so a part of the maps that write to the residual stream says nothing more
    parts: ClassVar[Mapping[str, str]] = {
        "minimal-trace-of-attention": "attention-",
        "minimal-trace-of-mlps": "mlp-",
    }

    def title(self, arm: str) -> str:
        """Return what an arm is called in figures and tables."""
        raise NotImplementedError

    @property
    def adjusted(self) -> tuple[str, ...]:
        """The estimates that claims are about."""
        raise NotImplementedError

    def sums(self, end: Checkpoint) -> dict[str, Mapping[str, float]]:
        """Return what is made of a checkpoint's estimates: their weights, by the new estimate's key."""
        return {part: {key: 1.0 for key in end if key.startswith(kinds)} for part, kinds in self.parts.items()}

    def complete(self, results: Results) -> list[Unit]:
        """Return the units that have results for all arms, of which none has diverged; none if of one grammar."""
        ends = [arm for arm in self.needed if arm != self.falling[0]]
        complete = [
            unit
            for unit in units_with(results, *self.needed)
            if all(results.at(unit.run(arm))["kl"].value <= self.largest_kl for arm in ends)
        ]
        return complete if len(set(clusters_of(complete))) > 1 else []

    def at_end(self, results: Results, arm: str) -> list[Checkpoint]:
        """Return the last checkpoint of an arm, by unit, with what is made of its estimates."""
        ends = ends_of(results, self.complete(results), arm)
        return [{**end, **{key: combined(end, weights) for key, weights in self.sums(end).items()}} for end in ends]

    def pairs(self, results: Results, control: str, arm: str) -> list[Pair]:
        """Return the last checkpoints of a control and of an arm, by unit."""
        return list(zip(self.at_end(results, control), self.at_end(results, arm), strict=True))

    def loss_slopes(self, results: Results) -> dict[str, Estimate]:
        """Return the slope on the KL of each estimate that claims are about; none if a unit's KL does not fall."""
        if not (units := self.complete(results)):
            return {}
        first, second = (self.at_end(results, arm) for arm in self.falling)
        # at a scale without verdicts, both may have missed their targets
        if any(one["kl"].value == other["kl"].value for one, other in zip(first, second, strict=True)):
            return {}
        groups = [unit.prefix for unit in units] * 2
        known = [key for key in self.adjusted if all(key in end for end in (*first, *second))]
        return {key: loss_slope([*first, *second], [*units, *units], key, within=groups) for key in known}


def loss_slope(
    ends: Sequence[Checkpoint], units: Sequence[Unit], key: str, *, within: Sequence[str] | None = None
) -> Estimate:
    """Return the slope of an estimate on the KL, over a checkpoint for each of the units, by default within languages.

    That of an accuracy is in percentage points.
    """
    scale, unit = (100, PER_NAT) if ends[0][key].unit == "accuracy" else (1, f"{ends[0][key].unit} per nat")
    outcomes, losses = [scale * end[key].value for end in ends], [end["kl"].value for end in ends]
    return slope_within(outcomes, losses, clusters_of(units), within=within, unit=unit)


def against(results: Results, *, arm: str, control: str) -> Contrast:
    """Return an arm against a control on the same units."""
    scale: AtOneLoss = results.scale
    return Contrast(
        names=(scale.title(control), scale.title(arm)),
        pairs=scale.pairs(results, control, arm),
        clusters=clusters_of(scale.complete(results)),
        clusters_are="grammars",
        where=f"Both where the KL has come down to {scale.target_kl:g}.",
        slopes=scale.loss_slopes(results),
    )


def trend(
    results: Results, *, along: str, per: Literal["halving", "doubling"], arms: Sequence[str], given: str = ""
) -> Trend:
    """Return the arms of each unit as a trend along a measure."""
    scale: AtOneLoss = results.scale
    return Trend(
        names=(scale.title(arms[0]), scale.title(arms[-1])),
        along=along,
        per=per,
        groups=list(zip(*(scale.at_end(results, arm) for arm in arms), strict=True)),
        clusters=clusters_of(scale.complete(results)),
        clusters_are="grammars",
        given=(given,) if given else (),
        where=f"All where the KL has come down to {scale.target_kl:g}.",
        slopes=scale.loss_slopes(results),
    )


# --- pilots ----------------------------------------------------------------------------------------------------------

PER_NAT = "percentage points per nat"


@dataclass(frozen=True, kw_only=True)
class Slope:
    """The slope of one accuracy on the KL, within grammars, for models of one size, in percentage points per nat."""

    size: str
    measure: str
    value: float
    stderr: float  # over grammars
    grammars: int


@dataclass(frozen=True, kw_only=True)
class _Pilot:
    slopes: tuple[Slope, ...]


@functools.cache
def read_pilot(path: Path) -> tuple[Slope, ...]:
    """Return the slopes that a pilot found."""
    return config.read_toml(_Pilot, path).slopes


def pilot_slopes(path: Path, *sizes: str) -> dict[str, Estimate]:
    """Return the slope of each accuracy on the KL, by its measure: the mean of the sizes' slopes.

    Its error includes half the range of the sizes' slopes: which of them holds between two sizes is not known.
    """
    by_measure: dict[str, list[Slope]] = {}
    for slope in read_pilot(path):
        if slope.size in sizes:
            by_measure.setdefault(slope.measure, []).append(slope)
    return {measure: _mean_slope(some) for measure, some in by_measure.items() if len(some) == len(sizes)}


def _mean_slope(some: list[Slope]) -> Estimate:
    grammars, values = min(slope.grammars for slope in some), [slope.value for slope in some]
    return Estimate(
        value=sum(values) / len(some),
        stderr=math.hypot(math.hypot(*(slope.stderr for slope in some)) / len(some), (max(values) - min(values)) / 2),
        samples=grammars,
        unit=PER_NAT,
        num_predictions=grammars,
        method="slope on the KL in the pilot",
    )
