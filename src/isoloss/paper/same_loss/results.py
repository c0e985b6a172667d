"""What the study found: the estimates of every checkpoint and of the look-up table, and the tables of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from isoloss.paper.same_loss.design import EXPANSIONS, Scale, adamw_run, expanded_trace, experiments, main_run, sgd_run
from isoloss.run_config import TrainConfig
from isoloss.studies import comparison
from isoloss.studies.comparison import Found
from isoloss.studies.design import run_of
from isoloss.studies.study import SummaryTable


@dataclass(frozen=True)
class Results:
    """All evaluations of a finished study.

    Attributes:
        scale: How large the study is.
        estimates: What was found, by run and step.
        lookups: Accuracy of the look-up table by task.
        folder: The study's folder.
    """

    scale: Scale
    estimates: Mapping[tuple[str, int], Found]
    lookups: Found
    folder: Path

    def at(self, run: str, step: int | None = None) -> Found:
        """The estimates of a run's checkpoint, by default its last."""
        config = experiments(self.scale)[run].config
        return self.estimates[run, config.steps if step is None else step]

    def table(self) -> pl.DataFrame:
        """Return a row a checkpoint, as `isoloss.report.data` takes it."""
        return pl.DataFrame([self._row(name, step, found) for (name, step), found in self.estimates.items()])

    def by_size(self) -> pl.DataFrame:
        """Return the rows of AdamW's last checkpoints, by size.

        Their traces are `trace_own`, each model in its own architecture, and `trace_<way>`, expanded into the largest.
        """
        rows = []
        for size in self.scale.sizes:
            found = self.at(adamw_run(size))
            cells = self._row(adamw_run(size), self.scale.steps, found)
            cells["trace_own"], cells["trace_own_stderr"] = cells.pop("trace"), cells.pop("trace_stderr")
            for way in EXPANSIONS:
                estimate = found[expanded_trace(self.scale, way)].estimate
                cells |= {f"trace_{way}": estimate.value, f"trace_{way}_stderr": estimate.stderr}
            rows.append(cells)
        return pl.DataFrame(rows)

    def over_time(self) -> pl.DataFrame:
        """Return the rows of the main run and of SGD on from it, whose steps count on from the main run's last.

        SGD's first row is the checkpoint that it started from.
        """
        main, sgd, start = main_run(self.scale), sgd_run(self.scale), self.scale.steps
        rows = [self._row(name, step, found) for (name, step), found in self.estimates.items() if name == main]
        rows.append(self._row(sgd, start, self.at(main)))
        later = ((step, found) for (name, step), found in self.estimates.items() if name == sgd)
        rows += [self._row(sgd, start + step, found) for step, found in later]
        return pl.DataFrame(rows)

    def _row(self, name: str, step: int, found: Found) -> dict[str, Any]:
        experiment = experiments(self.scale)[name]
        return comparison.row(name, group_of(experiment.config), experiment, step, found, self.scale.tasks)


def read(folder: Path, scale: Scale) -> Results:
    """Return the results in `folder`; an evaluation that is missing is an error that names it."""
    estimates = {
        (name, step): found
        for name, experiment in experiments(scale).items()
        for step, found in comparison.read(run_of(folder, name), experiment, scale.tasks).items()
    }
    for size in scale.sizes:
        place = adamw_run(size), scale.steps
        estimates[place] = {**estimates[place], **_expanded(folder, scale, size, estimates[place])}
    main = run_of(folder, main_run(scale))
    lookups = {task: comparison.measured(main, f"lookup-{task}", scale.steps)["accuracy"] for task in scale.tasks}
    return Results(scale, estimates, lookups, folder)


def _expanded(folder: Path, scale: Scale, size: str, found: Found) -> Found:
    """Return the traces of a size's last checkpoint in the largest size's architecture, its own where it is that."""
    run = run_of(folder, adamw_run(size))
    measures = [expanded_trace(scale, way) for way in EXPANSIONS]
    if size == scale.sizes[-1]:
        return dict.fromkeys(measures, found["trace"])
    return {measure: comparison.measured(run, measure, scale.steps)["trace"] for measure in measures}


def size_table(results: Results) -> SummaryTable:
    """Return the trace of each size's last checkpoint: in its own architecture, and in that of the largest size."""
    scale = results.scale
    largest = scale.sizes[-1]
    rows = []
    for size in scale.sizes:
        found = results.at(adamw_run(size))
        traces = {"raw, not comparable": found["trace"].estimate}
        traces |= {f"in {largest}, scale {way}": found[expanded_trace(scale, way)].estimate for way in EXPANSIONS}
        rows.append(((size,), traces))
    return SummaryTable(
        "sizes",
        f"traces of the sizes after {scale.steps:,} steps, value ± standard error",
        ("size",),
        rows,
        unit="nats/token",
    )


def group_of(config: TrainConfig) -> str:
    """What a run is called in figures: its step rule."""
    return "AdamW" if config.optimizer.name == "adamw" else "SGD from AdamW's last"
