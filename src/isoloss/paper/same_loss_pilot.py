"""The pilot of the study same-loss: slopes of transfer on the loss, and how much the primary difference varies.

It runs on grammars of its own. Its results are in same_loss_pilot.toml; the study's claims rest on them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isoloss.paper.design import OverGrammars, Unit, loss_slope, pairs_of, units_with
from isoloss.paper.same_loss import CONTRASTS, GROUPS, UNTOUCHED, SameLoss
from isoloss.paper.same_loss import SCALES as STUDY_SCALES
from isoloss.paper.tables import changes
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.power import pairs_for_equivalence, pairs_for_power, sd_upper_bound
from isoloss.studies import Experiment, Study
from isoloss.studies.results import RESCALED, Results, difference
from isoloss.studies.summary import SummaryTable

PRIMARY = CONTRASTS["label noise"]  # what the primary claim compares
EFFECT = 0.5  # percentage points: the smallest effect of interest


@dataclass(frozen=True, kw_only=True)
class Pilot(OverGrammars):
    """How large the pilot is; the study has none of its grammars."""

    like: SameLoss  # the study's scale, for its settings
    lengths: tuple[int, ...]  # steps of AdamW before the cooldown: they spread the loss

    @property
    def accuracies(self) -> tuple[str, ...]:
        """The measures whose slope on the loss is estimated."""
        like = self.like
        return (*like.probes.values(), *like.few_shot_probes.values(), *like.projected_probes.values())

    def arms(self, unit: Unit) -> dict[str, Experiment]:
        """Return every size at every length of training, and from the study's base the arms that are compared."""
        like, runs = self.like, {}
        for size in like.sizes:
            for steps in self.lengths:
                config = like.from_scratch(unit, size, steps=steps)
                measured = like.measured(unit, ["loss", *RESCALED, *self.accuracies], config.steps)
                runs[f"{size}-{steps}"] = Experiment(config=config, measurements=(measured,), group=GROUPS[UNTOUCHED])
        # from before its cooldown: there the main run is what the base is in the study
        start = f"{self.main}/checkpoints/step-{like.steps}"
        sgd = {arm: like.sgd_stage(labels) for arm, labels in zip(PRIMARY, ("exact", "sampled"), strict=True)}
        for arm, stage in (sgd | like.more_stages()).items():
            config = like.continued(unit, start, stage)
            measured = like.measured(unit, ["loss", *RESCALED, *like.probes.values()], config.steps)
            runs[arm] = Experiment(config=config, measurements=(measured,), group=GROUPS[arm])
        return runs

    @property
    def main(self) -> str:
        """The arm that has the length and the size of the study's base."""
        return f"{self.like.main_size}-{self.like.steps}"


SCALES: Mapping[str, Pilot] = {
    "laptop": Pilot(
        description="twelve minutes on two cores",
        like=STUDY_SCALES["laptop"],
        language=STUDY_SCALES["laptop"].language,
        grammars=tuple(range(500, 506)),
        lengths=(300, 1_000, 3_000),
    ),
    "smoke": Pilot(
        description="a minute on two cores: every part runs, no number means anything",
        like=STUDY_SCALES["smoke"],
        language=STUDY_SCALES["smoke"].language,
        grammars=(500, 501),
        lengths=(30, 60),
    ),
}


def tables(results: Results) -> Sequence[SummaryTable]:
    """Return tables of the slopes, of the difference that the primary claim is about, and of adversary and helper."""
    scale: Pilot = results.scale
    units = units_with(results, PRIMARY[1])
    rows = []
    for size in scale.like.sizes:
        ends = [results.at(unit.run(f"{size}-{steps}")) for unit in units for steps in scale.lengths]
        of_ends = [unit for unit in units for _ in scale.lengths]
        rows += [((size, measure), {"slope": loss_slope(ends, of_ends, measure)}) for measure in scale.accuracies]
    slopes = SummaryTable(
        "slopes",
        "slopes of transfer on the KL, mean ± standard error over grammars",
        ("size", "accuracy"),
        rows,
        f"Within grammars, over models with {', '.join(map(str, scale.lengths))} steps before the cooldown.",
    )
    keys = ("kl", *scale.like.probes.values())
    of_primary = next(one["slope"] for label, one in rows if label == (scale.like.main_size, keys[1]))
    differences = SummaryTable(
        "primary",
        f"{GROUPS[PRIMARY[1]]} minus {GROUPS[PRIMARY[0]]}, mean ± standard error over grammars",
        ("grammars",),
        [((len(units),), changes(pairs_of(results, units, *PRIMARY), units, keys))],
        power_in_words(results, units, of_primary),
    )
    controls = SummaryTable(
        "controls",
        "adversary and helper vs. their control, mean ± standard error over grammars",
        ("arm", "control", "grammars"),
        [
            ((GROUPS[arm], GROUPS[control], len(units)), changes(pairs_of(results, units, control, arm), units, keys))
            for control, arm in (CONTRASTS["adversary"], CONTRASTS["helper"])
        ],
        f"After {scale.like.adversary_steps:,}, {scale.like.helper_steps:,} and {scale.like.longer_steps:,} steps of "
        "adversary, helper and AdamW alone, which were chosen so that the KL is about the same.",
    )
    return slopes, differences, controls


def power_in_words(results: Results, units: Sequence[Unit], slope: Estimate) -> str:
    """Return as text the grammars needed for the smallest effect of interest, and the equivalence margin of the loss.

    The margin is a fifth of that effect divided by the slope of the primary accuracy on the KL. It takes the steeper
    end of the slope's 95 % interval, as the slope is uncertain.
    """
    scale: Pilot = results.scale
    both, task = pairs_of(results, units, *PRIMARY), scale.like.tasks[0]
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
