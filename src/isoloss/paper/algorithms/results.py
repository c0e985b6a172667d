"""What the study found: every checkpoint, means over seeds, and pairs of checkpoints of the same loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from isoloss.paper.algorithms.design import ALGORITHMS, BASELINE, Scale, experiments, run_name
from isoloss.statistics.estimate import Estimate
from isoloss.studies import comparison
from isoloss.studies.comparison import Found, Pair, change, over_seeds, same_loss
from isoloss.studies.design import run_of
from isoloss.studies.study import SummaryTable


@dataclass(frozen=True)
class Matched:
    """Checkpoints of an algorithm beside those of AdamW, a pair for each seed.

    Attributes:
        pairs: What was found: AdamW's, the algorithm's.
        steps: Their steps, in the same order.
    """

    pairs: tuple[Pair, ...]
    steps: tuple[tuple[int, int], ...]

    @property
    def same_loss(self) -> str:
        """Whether the two models of each pair have the same loss: yes or no."""
        return "yes" if same_loss(self.pairs) else "no"

    def ranges(self) -> tuple[str, str]:
        """The algorithm's and AdamW's steps, each from first to last."""
        own, control = ([pair[i] for pair in self.steps] for i in (1, 0))
        return _range(own), _range(control)

    def sentence(self, algorithm: str) -> str:
        """Which checkpoints these are, in words."""
        own, baseline = self.ranges()
        return f"Where the KL is nearest: {ALGORITHMS[algorithm]} at step {own}, AdamW at step {baseline}."


@dataclass(frozen=True)
class Results:
    """All evaluations of a finished study.

    Attributes:
        scale: How large the study is.
        estimates: What was found, by run and step.
        folder: The study's folder.
    """

    scale: Scale
    estimates: Mapping[tuple[str, int], Found]
    folder: Path

    def last(self, algorithm: str) -> list[Found]:
        """The last checkpoints of an algorithm, by seed."""
        return [self.estimates[run_name(algorithm, seed), self.scale.steps] for seed in self.scale.seeds]

    def means(self, algorithm: str) -> dict[str, Estimate]:
        """Means over seeds of what was found at the last checkpoints."""
        last = self.last(algorithm)
        return {key: over_seeds([found[key].estimate for found in last]) for key in ("kl", "trace", *self.scale.tasks)}

    def matched(self, algorithm: str) -> Matched:
        """For each seed the pair of checkpoints at which an algorithm is compared with AdamW.

        Of the two runs the one whose last KL is higher is taken at its last checkpoint, the other at the checkpoint
        whose KL is nearest to that.
        """
        pairs, steps = [], []
        for seed in self.scale.seeds:
            control, own = self._run(run_name(BASELINE, seed)), self._run(run_name(algorithm, seed))
            last = self.scale.steps
            if own[last]["kl"].estimate.value >= control[last]["kl"].estimate.value:
                places = (_nearest(control, own[last]), last)
            else:
                places = (last, _nearest(own, control[last]))
            pairs.append((control[places[0]], own[places[1]]))
            steps.append(places)
        return Matched(tuple(pairs), tuple(steps))

    def differences(self, algorithm: str) -> dict[str, Estimate]:
        """Means over seeds of the differences from AdamW at those pairs, which are paired by seed."""
        pairs = self.matched(algorithm).pairs
        return {key: change(pairs, key) for key in ("kl", "trace", *self.scale.tasks)}

    def table(self) -> pl.DataFrame:
        """Return a row a checkpoint, as `isoloss.report.data` takes it."""
        runs = experiments(self.scale)
        return pl.DataFrame(
            [
                comparison.row(name, group_of(name), runs[name], step, found, self.scale.tasks)
                for (name, step), found in self.estimates.items()
            ]
        )

    def _run(self, name: str) -> dict[int, Found]:
        return {step: found for (run, step), found in self.estimates.items() if run == name}


def _range(steps: list[int]) -> str:
    low, high = min(steps), max(steps)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _nearest(checkpoints: Mapping[int, Found], target: Found) -> int:
    """The step whose KL is nearest to that of `target`; of two as near, the later."""
    kl = target["kl"].estimate.value
    return min(checkpoints, key=lambda step: (abs(checkpoints[step]["kl"].estimate.value - kl), -step))


def read(folder: Path, scale: Scale) -> Results:
    """Return the results in `folder`; an evaluation that is missing is an error that names it."""
    estimates = {
        (name, step): found
        for name, experiment in experiments(scale).items()
        for step, found in comparison.read(run_of(folder, name), experiment, scale.tasks).items()
    }
    return Results(scale, estimates, folder)


def tables(results: Results) -> tuple[SummaryTable, SummaryTable]:
    """Return the means at the last checkpoints, and the differences from AdamW at the same loss."""
    seeds = len(results.scale.seeds)
    last = SummaryTable(
        "last",
        f"last checkpoints, mean ± standard error over {seeds} seeds",
        ("algorithm", "step"),
        [((text, results.scale.steps), results.means(name)) for name, text in ALGORITHMS.items()],
    )
    matched = SummaryTable(
        "matched",
        f"minus AdamW at the nearest KL, mean ± standard error of the differences paired over {seeds} seeds",
        ("algorithm", "steps", "AdamW's steps", "same loss"),
        [
            ((text, *results.matched(name).ranges(), results.matched(name).same_loss), results.differences(name))
            for name, text in ALGORITHMS.items()
            if name != BASELINE
        ],
        unit="points",
    )
    return last, matched


def group_of(run: str) -> str:
    """What a run's algorithm is called in figures."""
    return ALGORITHMS[run.rpartition("-")[0]]
