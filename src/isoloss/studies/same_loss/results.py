"""What the study found: the table of checkpoints, and the comparisons that the claims rest on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from isoloss.config import TrainConfig
from isoloss.errors import IsolossError
from isoloss.estimate import Estimate
from isoloss.models.sizes import num_parameters, shape
from isoloss.runs import Run
from isoloss.studies.same_loss.design import (
    Scale,
    experiments,
    lookups_of,
    main_run,
    run_of,
    sgd_run,
    steps_of,
)

SAME_LOSS_NATS = 0.01  # two models whose KL differs by less, with 95 % confidence, count as of the same loss


@dataclass(frozen=True)
class Results:
    """All evaluations of a finished study.

    Attributes:
        scale: How large the study is.
        estimates: By run, step and name: `entropy`, `kl`, `loss` (nats per masked token), `trace`, and the accuracy of
            each task by the task's name.
        lookups: Accuracy of the look-up table by task.
        folder: The study's folder.
    """

    scale: Scale
    estimates: Mapping[tuple[str, int], Mapping[str, Estimate]]
    lookups: Mapping[str, Estimate]
    folder: Path

    def at(self, run: str, step: int | None = None) -> Mapping[str, Estimate]:
        """The estimates of a run's checkpoint, by default its last."""
        config = experiments(self.scale)[run]
        return self.estimates[run, config.steps if step is None else step]

    def table(self) -> pl.DataFrame:
        """Return a row a checkpoint, as `isoloss.report.data` takes it."""
        return pl.DataFrame([self._row(name, step, found) for (name, step), found in self.estimates.items()])

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

    def _row(self, name: str, step: int, found: Mapping[str, Estimate]) -> dict[str, Any]:
        config = experiments(self.scale)[name]
        row: dict[str, Any] = {
            "run": name,
            "group": group_of(config),
            "size": config.model.size,
            "parameters": parameters_of(config),
            "step": step,
            "path": str(Path("..") / "runs" / name / "run.json"),
        }
        columns = {"kl_nats": "kl", "trace": "trace", **{f"acc_{task}": task for task in self.scale.tasks}}
        for column, key in columns.items():
            row |= {column: found[key].value, f"{column}_stderr": found[key].stderr}
        return row


def read(folder: Path, scale: Scale) -> Results:
    """Return the results in `folder`; an evaluation that is missing is an error that names it."""
    estimates = {}
    for name, config in experiments(scale).items():
        run = run_of(folder, name)
        for step in steps_of(config):
            found = dict(_get(run, "loss", step))
            found["trace"] = _get(run, "trace", step)["trace"]
            for task in scale.tasks:
                found[task] = _get(run, f"probe-{task}", step)["accuracy"]
            estimates[name, step] = found
    main = run_of(folder, main_run(scale))
    lookups = {
        task: _get(main, measure, scale.steps)["accuracy"]
        for task, measure in zip(scale.tasks, lookups_of(scale), strict=True)
    }
    return Results(scale, estimates, lookups, folder)


def _get(run: Run, measure: str, step: int) -> Mapping[str, Estimate]:
    found = run.evaluation(measure, step)
    if found is None:
        raise IsolossError(f"{run.path} has no evaluation {measure} at step {step}: run the study first")
    return found.estimates


def group_of(config: TrainConfig) -> str:
    """What a run is called in figures: its step rule."""
    return "AdamW" if config.optimizer.name == "adamw" else "SGD from AdamW's last"


def parameters_of(config: TrainConfig) -> int:
    """The number of a model's parameters."""
    language = config.language
    assert language.kind == "pcfg"
    return num_parameters(shape(config.model.size), language.vocab_size + 2, 2**language.levels)


def difference(later: Estimate, earlier: Estimate, *, factor: float = 1.0) -> Estimate:
    """Return later - factor * earlier, of accuracies in percentage points, the errors added as if independent.

    Both are measured on the same sentences with the same probes, so their errors are positively correlated and this
    overstates the error of the difference.
    """
    points = later.unit == "accuracy"
    scale = 100 if points else 1
    return Estimate(
        value=scale * (later.value - factor * earlier.value),
        stderr=scale * math.hypot(later.stderr, factor * earlier.stderr),
        samples=min(later.samples, earlier.samples),
        unit="percentage points" if points else later.unit,
        num_inputs=later.num_inputs,
        num_probes=later.num_probes,
        method="difference of two estimates",
    )
