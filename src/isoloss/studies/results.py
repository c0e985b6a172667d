"""Results of a study: the estimates of every checkpoint, read from its files, and tables of them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss.errors import IsolossError, did_you_mean
from isoloss.lab.evaluation.external import ExternalCheckpoint, ExternalRun
from isoloss.runs import Run
from isoloss.statistics.estimate import Estimate, number
from isoloss.studies.claims import Answer, ClaimResult, ClaimsFile
from isoloss.studies.comparison import Checkpoint, Measured, loss_key, measured
from isoloss.studies.spec import AnyScale, Experiment

if TYPE_CHECKING:
    import polars as pl

RESCALED = {key: f"{key}-rescaled-at-random" for key in ("trace", "minimal-trace")}  # what rescaling-control measures
UNITS = {"nats per predicted token": "nats/token", "accuracy": "accuracy, %", "percentage points": "points"}

COLUMNS: dict[str, Any] = {"run": str, "group": str, "block": int, "size": str, "step": int, "estimate": str,
                           "value": float, "standard error": float, "unit": str}  # of `Results.values`  # fmt: skip


@dataclass(frozen=True)
class Results:
    """All evaluations of a finished study, or of the complete blocks of one that is not finished.

    An estimate has the name of its measure as its key, e.g. `trace` or `probe-root`. Where a measure has several, each
    has its own name: those of `loss` are `entropy`, `kl` and `loss`.

    Attributes:
        scale: The scale of the study.
        checkpoints: The estimates of each checkpoint by key, by run and step.
        folder: The study's folder.
        complete: The blocks that these results cover; None: all.
    """

    scale: Any  # an `AnyScale`; a study knows its own class
    checkpoints: Mapping[tuple[str, int], Checkpoint]
    folder: Path
    complete: Collection[int] | None = None

    @classmethod
    def read(cls, folder: Path, scale: AnyScale, complete: Collection[int] | None = None) -> Results:
        """Return the results in `folder`, of the blocks that are named; an evaluation that is missing is an error."""
        checkpoints: dict[tuple[str, int], dict[str, Measured]] = {}
        for name, experiment in _of_blocks(scale, complete).items():
            for step in experiment.kept_steps:
                checkpoint: dict[str, Measured] = {}
                for part in experiment.measurements:
                    for measure in part.measures if step in experiment.steps(part) else ():
                        _add(checkpoint, measure, measured(run_of(folder, name, experiment), measure, step))
                if checkpoint:
                    checkpoints[name, step] = checkpoint
        return cls(scale, checkpoints, folder, complete)

    @functools.cached_property
    def experiments(self) -> Mapping[str, Experiment]:
        """The runs by name, of the complete blocks."""
        return _of_blocks(self.scale, self.complete)

    @property
    def blocks(self) -> int:
        """How many blocks the study has."""
        return len({experiment.block for experiment in self.scale.experiments.values()})

    @property
    def blocks_done(self) -> int:
        """How many of them these results cover: fewer than all if the study is not finished."""
        return len({experiment.block for experiment in self.experiments.values()})

    @property
    def keys(self) -> tuple[str, ...]:
        """The estimates that every checkpoint has; entropy and loss are left out if there is a KL."""
        first, *rest = self.checkpoints.values()
        common = [key for key in first if all(key in other for other in rest)]
        return tuple(key for key in common if "kl" not in common or key not in ("entropy", "loss"))

    @property
    def columns(self) -> tuple[str, ...]:
        """The estimates that three quarters of the checkpoints of some block have, as those of a study's page.

        Blocks may be of different languages. Entropy and loss are left out of blocks in which there is a KL.
        """
        found: dict[str, None] = {}
        blocks: dict[int, list[Checkpoint]] = {}
        for (run, _), checkpoint in self.checkpoints.items():
            blocks.setdefault(self.experiments[run].block, []).append(checkpoint)
        for checkpoints in blocks.values():
            counts = Counter(key for checkpoint in checkpoints for key in checkpoint)
            common = [key for key, count in counts.items() if 4 * count >= 3 * len(checkpoints)]
            found |= dict.fromkeys(key for key in common if "kl" not in common or key not in ("entropy", "loss"))
        return tuple(found)

    @property
    def identical(self) -> str:
        """Which runs end with identical weights, in a sentence; empty if none do."""
        having: dict[str, dict[str, None]] = {}  # the runs, by weights
        for (run, step), checkpoint in self.checkpoints.items():
            for one in checkpoint.values() if step == self.experiments[run].last_step else ():
                having.setdefault(one.weights, {})[run] = None
        groups = [" and ".join(runs) for weights, runs in having.items() if weights and len(runs) > 1]
        return f"Identical weights: {'; '.join(groups)}." if groups else ""

    @property
    def loss_key(self) -> str:
        """Which estimate is the loss: `kl`, or `loss` if the truth is not known."""
        first = next(iter(self.checkpoints.values()))
        return loss_key([(first, first)])

    def run(self, name: str) -> Run:
        """Return a run of the study."""
        return run_of(self.folder, name, self.scale.experiments[name])

    def at(self, run: str, step: int | None = None) -> Checkpoint:
        """Return the estimates of a run's checkpoint, by default its last.

        Raises:
            IsolossError: There is no such run, or nothing was measured at this step.
        """
        if run not in self.experiments:
            raise IsolossError(f"the study has no run {run!r}{did_you_mean(run, self.experiments)}")
        chosen = self.experiments[run].last_step if step is None else step
        if (run, chosen) not in self.checkpoints:
            steps = ", ".join(map(str, self.of_run(run)))
            raise IsolossError(f"nothing was measured of the run {run} at step {chosen}; its steps are {steps}")
        return self.checkpoints[run, chosen]

    def of_run(self, name: str) -> dict[int, Checkpoint]:
        """Return the checkpoints of a run by step."""
        return {step: checkpoint for (run, step), checkpoint in self.checkpoints.items() if run == name}

    def table(self, keys: Sequence[str] | None = None) -> pl.DataFrame:
        """Return a row per checkpoint, as `isoloss.report.data` takes it; by default of `columns`."""
        import polars as pl

        rows = [self.row(*key, each, keys or self.columns) for key, each in self.checkpoints.items()]
        return pl.DataFrame(rows, infer_schema_length=None)

    def values(self) -> pl.DataFrame:
        """Return a row for each checkpoint and estimate; an accuracy is a fraction from 0 to 1."""
        import polars as pl

        rows = [
            (
                *(run, experiment.group or run, experiment.block, experiment.size, step),
                *(key, one.estimate.value, one.estimate.stderr, one.estimate.unit),
            )
            for (run, step), checkpoint in self.checkpoints.items()
            for experiment in [self.experiments[run]]
            for key, one in checkpoint.items()
        ]
        return pl.DataFrame(rows, schema=COLUMNS, orient="row")

    def row(self, run: str, step: int, checkpoint: Checkpoint, keys: Sequence[str]) -> dict[str, Any]:
        """Return the row of one checkpoint: of these estimates of it, at this step; null where it has none."""
        experiment = self.experiments[run]
        cells: dict[str, Any] = {
            "run": run,
            "group": experiment.group or run,
            "size": experiment.size,
            "parameters": self.run(run).result()["num_parameters"],
            "step": step,
        }
        for key in keys:
            own = checkpoint[key].estimate if key in checkpoint else None
            cells |= {key: own and own.value, f"{key}_stderr": own and own.stderr}
        return cells


def _of_blocks(scale: AnyScale, blocks: Collection[int] | None) -> Mapping[str, Experiment]:
    return {name: one for name, one in scale.experiments.items() if blocks is None or one.block in blocks}


def run_of(folder: Path, name: str, experiment: Experiment) -> Run:
    """Return the run called `name` of the study in `folder`."""
    path = folder / "runs" / name
    return ExternalRun(path) if isinstance(experiment.config, ExternalCheckpoint) else Run(path)


def _add(checkpoint: dict[str, Measured], measure: str, estimates: Mapping[str, Measured]) -> None:
    """Add what a measure found to a checkpoint: one estimate under the measure's name, several under their own."""
    for name, each in estimates.items():
        key = measure if len(estimates) == 1 else name
        checkpoint[f"{measure}.{name}" if key in checkpoint else key] = each


@dataclass(frozen=True)
class SummaryTable:
    """Rows of estimates.

    Attributes:
        name: Its key in JSON, a plural word.
        title: What is printed above it.
        labels: Headings of the columns that name a row, e.g. run and step.
        rows: The labels and estimates of each row, with the same keys in all.
        caption: Its caption on the page.
    """

    name: str
    title: str
    labels: tuple[str, ...]
    rows: Sequence[tuple[tuple[str | int, ...], Mapping[str, Estimate]]]
    caption: str = ""

    @property
    def left(self) -> int:
        """How many of the first columns are text, not numbers."""
        return sum(isinstance(label, str) for label in self.rows[0][0])

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Return columns and rows as text; accuracies are in percent."""
        columns = [*self.labels, *(_column(key, estimate.unit) for key, estimate in self.rows[0][1].items())]
        return columns, [
            [*(f"{x:,}" if isinstance(x, int) else x for x in labels), *map(number, some.values())]
            for labels, some in self.rows
        ]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the rows as JSON types."""
        return [
            {**dict(zip(self.labels, labels, strict=True)), "estimates": {key: bare(e) for key, e in some.items()}}
            for labels, some in self.rows
        ]


@dataclass(frozen=True)
class Summary:
    """Summary of a study's results."""

    tables: Sequence[SummaryTable]  # tables of estimates
    claims: Sequence[ClaimResult]  # the result of each claim
    claims_file: ClaimsFile | None = None  # the file that states them
    warning: str = ""  # that no verdict is given at this scale, or that models are identical
    answer: Sequence[str] = ()  # the study's answer, in sentences

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON types."""
        file = self.claims_file
        return {
            **{table.name: table.to_dict() for table in self.tables},
            "claims": [
                {
                    "claim": result.claim.id,
                    "verdict": result.verdict,
                    "answers": [_answer_to_dict(answer) for answer in result.answers],
                }
                for result in self.claims
            ],
            "claims_file": file and {"name": file.name, "sha256": file.sha256, "same_loss_nats": file.same_loss_nats},
            "warning": self.warning,
            "answer": list(self.answer),
        }


def tables_in(summary: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each table in what `Summary.to_dict` returned, by the table's name."""
    return {key: rows for key, rows in summary.items() if isinstance(rows, list) and key not in ("claims", "answer")}


def _answer_to_dict(answer: Answer) -> dict[str, Any]:
    gate = answer.same_loss
    return {
        "case": answer.case,
        "verdict": answer.verdict.value,
        "is_primary": answer.is_primary,
        "difference": answer.difference and bare(answer.difference),
        "interval95": answer.interval95,
        "p_value": answer.p_value,
        "p_adjusted": answer.p_adjusted,
        "detectable": answer.detectable,
        "below": answer.below,
        "adjusted": answer.adjusted and bare(answer.adjusted),
        "same_loss": gate
        and {
            "difference": bare(gate.difference),
            "margin": gate.margin,
            "p_value": gate.p_value,
            "interval90": gate.interval,
            "smallest_margin": gate.smallest_margin,
            "shown": gate.shown,
        },
        "numbers": {name: str(estimate) for name, estimate in answer.numbers.items()},
        "explanation": answer.explanation,
    }


def checkpoint_tables(results: Results) -> tuple[SummaryTable, ...]:
    """Return the table of every checkpoint, the default of a study without tables of its own."""
    rows = [(label, {key: each[key].estimate for key in results.keys}) for label, each in results.checkpoints.items()]
    return (SummaryTable("checkpoints", "value ± standard error", ("run", "step"), rows),)


def control_tables(results: Results) -> tuple[SummaryTable, ...]:
    """Return the table of the checkpoints that were also measured after a random rescaling; empty if none was."""
    rows: list[tuple[tuple[str | int, ...], Mapping[str, Estimate]]] = []
    for label, each in results.checkpoints.items():
        if all(key in each and rescaled in each for key, rescaled in RESCALED.items()):
            shown = [name for pair in RESCALED.items() for name in pair]
            rows.append((label, {key: each[key].estimate for key in shown}))
    if not rows:
        return ()
    factors = {
        key: [estimates[rescaled].value / estimates[key].value for _, estimates in rows]
        for key, rescaled in RESCALED.items()
    }
    plain, off = factors["trace"], max(abs(factor - 1) for factor in factors["minimal-trace"])
    caption = (
        "In each of these models, some weights are multiplied and others divided by random factors between 2 and 3, "
        f"which leaves every prediction unchanged. The trace is multiplied by {min(plain):.3g} to {max(plain):.3g}; "
        f"the minimal trace changes by at most {off:.0e} of its value."
    )
    return (SummaryTable("controls", "the same models, rescaled at random", ("run", "step"), rows, caption),)


def common_measures(scale: AnyScale) -> dict[str, dict[str, str]]:
    """Return what any study's claims can measure: each measure, `flatness` (both traces), `transfer` (all probes)."""
    measures = [measure for one in scale.experiments.values() for part in one.measurements for measure in part.measures]
    probes = {m.removeprefix("probe-"): m for m in dict.fromkeys(measures) if m.startswith("probe-")}
    by_name = {m: {"": m} for m in dict.fromkeys(measures)}
    flatness = {trace: trace for trace in RESCALED if trace in by_name}
    return {"kl": {"": "kl"}, **by_name, "flatness": flatness, "transfer": probes}


def bare(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON types, without its parts by parameter and layer."""
    parts = ("by_parameter", "by_parameter_stderr", "by_layer", "by_layer_stderr")
    return {**estimate.to_dict(), **dict.fromkeys(parts)}


def _column(key: str, unit: str) -> str:
    short = UNITS.get(unit, unit)
    return f"{'KL' if key == 'kl' else key} ({short})" if short else key
