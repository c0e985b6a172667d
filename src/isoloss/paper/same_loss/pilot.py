"""The pilot of the study same-loss: slopes of transfer on the loss, and how much the primary difference varies.

It runs on grammars of its own. Its results are in pilot.toml; the study's claims rest on them.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isoloss import config
from isoloss.paper.same_loss.design import (
    CONTRASTS,
    GROUPS,
    UNTOUCHED,
    Arms,
    OverGrammars,
    Replicate,
    StudySize,
    grammars_of,
)
from isoloss.paper.same_loss.design import SCALES as STUDY_SIZES
from isoloss.statistics.clusters import slope_within
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.power import pairs_for_equivalence, pairs_for_power, sd_upper_bound
from isoloss.studies.results import RESCALED, Pair, Results, change, difference
from isoloss.studies.spec import Experiment, Study
from isoloss.studies.summary import SummaryTable

PATH = Path(__file__).with_name("pilot.toml")
UNIT = "percentage points per nat"
PRIMARY = CONTRASTS["label noise"]  # what the primary claim compares
EFFECT = 0.5  # percentage points: the smallest effect of interest


@dataclass(frozen=True, kw_only=True)
class Slope:
    """The slope of one accuracy on the KL, within grammars, for models of one size.

    Attributes:
        size: Size of the models.
        measure: The measure of the accuracy.
        value: In percentage points per nat.
        stderr: Standard error over grammars.
        grammars: Number of grammars.
    """

    size: str
    measure: str
    value: float
    stderr: float
    grammars: int


@dataclass(frozen=True, kw_only=True)
class _Pilot:
    slopes: tuple[Slope, ...]


@functools.cache
def read(path: Path = PATH) -> tuple[Slope, ...]:
    """Return the slopes that a pilot found."""
    return config.read_toml(_Pilot, path).slopes


def slopes(*sizes: str, path: Path = PATH) -> dict[str, Estimate]:
    """Return the slope of each accuracy on the KL, by its measure: the mean of the sizes' slopes.

    Its error includes half the range of the sizes' slopes: which of them holds between two sizes is not known.
    """
    by_measure: dict[str, list[Slope]] = {}
    for slope in read(path):
        if slope.size in sizes:
            by_measure.setdefault(slope.measure, []).append(slope)
    return {measure: _mean_slope(some) for measure, some in by_measure.items() if len(some) == len(sizes)}


def _mean_slope(some: list[Slope]) -> Estimate:
    grammars, values = min(slope.grammars for slope in some), [slope.value for slope in some]
    return Estimate(
        value=sum(values) / len(some),
        stderr=math.hypot(math.hypot(*(slope.stderr for slope in some)) / len(some), (max(values) - min(values)) / 2),
        samples=grammars,
        unit=UNIT,
        num_predictions=grammars,
        method="slope on the KL in the pilot",
    )


@dataclass(frozen=True, kw_only=True)
class PilotSize(OverGrammars):
    """How large the pilot is; the study has none of its grammars."""

    description: str  # what it is for and how long it takes
    like: StudySize  # the study's scale, for its settings
    lengths: tuple[int, ...]  # steps of AdamW before the cooldown: they spread the loss

    @property
    def accuracies(self) -> tuple[str, ...]:
        """The measures whose slope on the loss is estimated."""
        like = self.like
        return (*like.probes.values(), *like.few_shot_probes.values(), *like.projected_probes.values())

    @functools.cached_property
    def experiments(self) -> dict[str, Experiment]:
        """Every size at every length of training, and from the study's base the arms that are compared."""
        runs = {}
        for block, unit in enumerate(self.units):
            arms = Arms(self.like, unit)
            for size in self.like.sizes:
                for steps in self.lengths:
                    config = arms.from_scratch(size, steps=steps)
                    measured = arms.measurement(["loss", *RESCALED, *self.accuracies], steps=(config.steps,))
                    runs[unit.run(f"{size}-{steps}")] = Experiment(
                        config=config, measurements=(measured,), group=GROUPS[UNTOUCHED], block=block
                    )
            # from before its cooldown: there the main run is what the base is in the study
            start = unit.run(self.main)
            sgd = {arm: arms.sgd_stage(labels) for arm, labels in zip(PRIMARY, ("exact", "sampled"), strict=True)}
            for arm, stage in (sgd | arms.more_stages()).items():
                config = arms.continued(f"../{start}/checkpoints/step-{self.like.steps}", stage)
                measured = arms.measurement(["loss", *RESCALED, *self.like.probes.values()], steps=(config.steps,))
                runs[unit.run(arm)] = Experiment(
                    config=config, measurements=(measured,), after=(start,), group=GROUPS[arm], block=block
                )
        return runs

    @property
    def main(self) -> str:
        """The arm that has the length and the size of the study's base."""
        return f"{self.like.main_size}-{self.like.steps}"


SCALES: Mapping[str, PilotSize] = {
    "laptop": PilotSize(
        description="twelve minutes on two cores",
        like=STUDY_SIZES["laptop"],
        grammars=tuple(range(500, 506)),
        lengths=(300, 1_000, 3_000),
    ),
    "smoke": PilotSize(
        description="a minute on two cores: every part runs, no number means anything",
        like=STUDY_SIZES["smoke"],
        grammars=(500, 501),
        lengths=(30, 60),
    ),
}


def tables(results: Results) -> Sequence[SummaryTable]:
    """Return tables of the slopes, of the difference that the primary claim is about, and of adversary and helper."""
    scale: PilotSize = results.scale
    units = [unit for unit in scale.units if unit.run(PRIMARY[1]) in results.experiments]
    rows = []
    for size in scale.like.sizes:
        ends = [(unit, results.at(unit.run(f"{size}-{steps}"))) for unit in units for steps in scale.lengths]
        clusters = grammars_of([unit for unit, _ in ends])
        losses = [one["kl"].value for _, one in ends]
        for measure in scale.accuracies:
            values = [100 * one[measure].value for _, one in ends]
            rows.append(((size, measure), {"slope": slope_within(values, losses, clusters, unit=UNIT)}))
    slopes = SummaryTable(
        "slopes",
        "slopes of transfer on the KL, mean ± standard error over grammars",
        ("size", "accuracy"),
        rows,
        f"Within grammars, over models with {', '.join(map(str, scale.lengths))} steps before the cooldown.",
    )
    clusters = grammars_of(units)
    keys = ("kl", *scale.like.probes.values())
    slope = next(one["slope"] for label, one in rows if label == (scale.like.main_size, keys[1]))
    differences = SummaryTable(
        "primary",
        f"{GROUPS[PRIMARY[1]]} minus {GROUPS[PRIMARY[0]]}, mean ± standard error over grammars",
        ("grammars",),
        [((len(units),), {key: change(pairs(results, units, PRIMARY), key, clusters=clusters) for key in keys})],
        power_in_words(results, units, slope),
    )
    matched = [CONTRASTS[name] for name in ("adversary", "helper")]
    controls = SummaryTable(
        "controls",
        "adversary and helper vs. their control, mean ± standard error over grammars",
        ("arm", "control", "grammars"),
        [
            (
                (GROUPS[arms[1]], GROUPS[arms[0]], len(units)),
                {key: change(pairs(results, units, arms), key, clusters=clusters) for key in keys},
            )
            for arms in matched
        ],
        f"After {scale.like.adversary_steps:,}, {scale.like.helper_steps:,} and {scale.like.longer_steps:,} steps of "
        "adversary, helper and AdamW alone, which were chosen so that the KL is about the same.",
    )
    return slopes, differences, controls


def pairs(results: Results, units: Sequence[Replicate], arms: tuple[str, str]) -> list[Pair]:
    """Return the last checkpoints of a control and an arm, by grammar."""
    control, treated = arms
    return [(results.at(unit.run(control)), results.at(unit.run(treated))) for unit in units]


def power_in_words(results: Results, units: Sequence[Replicate], slope: Estimate) -> str:
    """Return as text the grammars needed for the smallest effect of interest, and the equivalence margin of the loss.

    The margin is a fifth of that effect divided by the slope of the primary accuracy on the KL. It takes the steeper
    end of the slope's 95 % interval, as the slope is uncertain.
    """
    scale: PilotSize = results.scale
    both, task = pairs(results, units, PRIMARY), scale.like.tasks[0]
    moves, losses = ([difference(b[key], a[key]).value for a, b in both] for key in (f"probe-{task}", "kl"))
    sd = statistics.stdev(moves)
    # planned with the pilot's own spread, the power would fall short in about half of all cases (Browne, 1995)
    bound = sd_upper_bound(sd, len(units))
    margin = loss_margin(slope)
    loss_sd = sd_upper_bound(statistics.stdev(losses), len(units))
    return (
        f"Over {len(units)} grammars the difference in {task} has a standard deviation of {sd:.2f} points, below "
        f"{bound:.2f} points with 80 % confidence. At that bound, {pairs_for_power(EFFECT, bound)} grammars find "
        f"{EFFECT:g} points with 80 % power. A fifth of {EFFECT:g} points is worth {margin:.6f} nats; if the losses "
        f"are the same, {pairs_for_equivalence(margin, loss_sd)} grammars show it within that margin with 80 % power."
    )


def loss_margin(slope: Estimate) -> float:
    """Return the difference in KL, in nats, that changes the accuracy by at most a fifth of the effect of interest."""
    return EFFECT / 5 / max(map(abs, slope.ci95))


STUDY = Study(
    name="same-loss-pilot",
    scales=SCALES,
    title="Pilot of the study same-loss",
    lead=(
        "The study same-loss is planned from this pilot: the slopes of transfer on the loss, by size, and how much "
        "its primary difference varies between grammars. The two share no grammars and no seeds.",
    ),
    tables=tables,
    block_name="grammars",
)
