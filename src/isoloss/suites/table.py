"""The table of a suite: a row for each checkpoint, text and number, with its error or the reason why it is empty."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss import config as configs
from isoloss import files
from isoloss.errors import IsolossError, did_you_mean, naming_extras
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.tables import short_names
from isoloss.suites.config import COLUMNS, Member, SuiteConfig, label_names
from isoloss.suites.lm_eval import UNKNOWN

if TYPE_CHECKING:
    from isoloss.statistics.association import Association

RECORD, TABLE, PAGE = "suite.json", "suite.parquet", "index.html"


@dataclass(frozen=True, eq=False)
class SuiteTable:
    """The numbers of a suite.

    Attributes:
        frame: A `polars.DataFrame` with a row for each checkpoint, text and estimate. Its columns are checkpoint, the
            labels, text, measure, value, stderr, low and high (the 95 % interval), unit, samples, problem (why there is
            no number, else null), and sha256 (of the weights).
        labels: The names of the labels.
        config: The settings of the suite.
    """

    frame: Any
    labels: tuple[str, ...]
    config: SuiteConfig

    @classmethod
    def of(
        cls, config: SuiteConfig, members: Sequence[Member], rows: Iterable[tuple[Member, Mapping[str, Any]]]
    ) -> SuiteTable:
        """Return the table of rows from `number` and `empty`, each with its checkpoint."""
        with naming_extras():
            import polars

        labels = label_names(member.labels for member in members)
        words = {name for each in members for name, label in each.labels.items() if isinstance(label, str)}
        schema: dict[str, Any] = dict.fromkeys(("checkpoint", *labels, *COLUMNS[1:]), polars.String)
        schema |= dict.fromkeys(("value", "stderr", "low", "high"), polars.Float64)
        schema |= dict.fromkeys(("samples", *(name for name in labels if name not in words)), polars.Int64)
        cells = [
            {"checkpoint": member.name, **{k: str(v) if k in words else v for k, v in member.labels.items()}, **row}
            for member, row in rows
        ]
        return cls(polars.DataFrame(cells, schema, strict=False), labels, config)

    @classmethod
    def read(cls, folder: Path) -> SuiteTable:
        """Return the table in the folder of a suite."""
        with naming_extras():
            import polars

        config = configs.from_dict(SuiteConfig, files.read_json(folder / RECORD)["config"])
        frame = polars.read_parquet(folder / TABLE)
        return cls(frame, tuple(name for name in frame.columns if name not in COLUMNS), config)

    def write(self, folder: Path) -> Path:
        """Write the table as Parquet, and return the path."""
        buffer = io.BytesIO()
        self.frame.write_parquet(buffer)
        files.write_bytes(folder / TABLE, buffer.getvalue())
        return folder / TABLE

    @property
    def along(self) -> str:
        """The label of the position in a training run; empty if there is none."""
        return _along(self.config, self.labels)

    def wide(self) -> Any:
        """Return a `polars.DataFrame` with a row for each checkpoint, in the order of the suite.

        Its columns are checkpoint, the labels, and the value and `NAME_stderr` of each measure. With several texts, the
        columns are called `measure (text)`. An empty cell is null.
        """
        import polars

        rows: dict[str, dict[str, Any]] = {}
        values: dict[str, None] = {}
        several = len({text for text in self.frame["text"] if text}) > 1
        for row in self.frame.iter_rows(named=True):
            of_it = rows.setdefault(row["checkpoint"], {name: row[name] for name in ("checkpoint", *self.labels)})
            if row["value"] is not None:
                name = column_name(row["measure"], row["text"] if several else "")
                values |= dict.fromkeys((name, f"{name}_stderr"))
                of_it |= {name: row["value"], f"{name}_stderr": row["stderr"]}
        schema = {name: self.frame.schema[name] for name in ("checkpoint", *self.labels)}
        schema |= dict.fromkeys(values, polars.Float64)
        return polars.DataFrame([[row.get(name) for name in schema] for row in rows.values()], schema, orient="row")

    def clusters(self) -> list[str]:
        """Return the independent unit of each row of `wide`: its label `cluster`, else all labels except `along`."""
        return clusters(self.config, self.labels, self.wide().iter_rows(named=True))

    def copies(self) -> dict[str, list[str]]:
        """Return, by checkpoint, the later checkpoints with identical weights."""
        alike: dict[str, list[str]] = {}
        for checkpoint, weights in self.frame.select("checkpoint", "sha256").unique(maintain_order=True).iter_rows():
            if weights:
                alike.setdefault(weights, []).append(checkpoint)
        return {first: others for first, *others in alike.values() if others}

    def roles(self, predict: Sequence[str] = ()) -> tuple[str, list[str], list[str]]:
        """Return the columns of `wide` by role: the loss (of the first text), the measures, and the outcomes.

        The outcomes are those of the suite and of `predict`, else the imported ones, else all rises of the loss. Losses
        on other texts, the parts of a loss, and an outcome on another text have no role.

        Raises:
            IsolossError: A name in `predict` is not a column.
        """
        wide = self.wide()
        named = [name for name in wide.columns if f"{name}_stderr" in wide.columns]
        bare = {name: name.partition(" (")[0] for name in named}
        losses = [name for name in named if bare[name] in ("loss", "kl", "entropy")]
        # imported numbers have no weights beside them
        imported = set(self.frame.filter(self.frame["sha256"].is_null()).drop_nulls("value")["measure"])
        outcomes: dict[str, None] = {}
        rises = [name for name in named if bare[name].endswith("-rise")]
        for wanted in (*self.config.outcomes, *predict) or [name for name in named if name in imported] or rises:
            found = [name for name in named if wanted in (name, bare[name]) or bare[name].startswith(parts_of(wanted))]
            if not found and wanted in predict:
                known = did_you_mean(wanted, named) or f"; it has {', '.join(named)}"
                raise IsolossError(f"the table has no column {wanted!r}{known}")
            outcomes |= dict.fromkeys(found)
        loss = next((name for name in losses if bare[name] == "loss"), "")
        others, elsewhere = {*losses, *imported}, {bare[name] for name in outcomes}
        return loss, [name for name in named if name not in others and bare[name] not in elsewhere], list(outcomes)

    def associations(self, predict: Sequence[str] = ()) -> tuple[Association, ...]:
        """Return which measure predicts which outcome at the same loss; `predict`: further outcomes.

        Of checkpoints with identical weights, only the first counts.
        """
        from isoloss.statistics.association import associate

        wide = self.wide()
        loss, measures, outcomes = self.roles(predict)
        if not loss:
            return ()
        cluster, levels = self.config.cluster or "training", self.config.levels
        varying = [name for name in self.labels if wide[name].n_unique() > 1]
        columns = {name: wide[name].to_list() for name in (*varying, loss, *measures, *outcomes)}
        columns |= {cluster: self.clusters()}
        once = ~wide["checkpoint"].is_in(list(itertools.chain(*self.copies().values())))
        return associate(
            {name: list(itertools.compress(values, once)) for name, values in columns.items()},
            measures=measures,
            outcomes=outcomes,
            loss=loss,
            clusters=cluster,
            levels=levels or None,
            along=self.along if self.along in varying else None,
            hyperparameters=[name for name in varying if name not in (cluster, levels, self.along, "seed", "series")],
            loss_margin=self.config.loss_margin,
        )

    def problems(self) -> list[str]:
        """Return a line for each reason why cells are empty, with an example and the number of other cells."""
        found: dict[str, list[str]] = {}
        names = short_names(self.frame["checkpoint"].unique(maintain_order=True).to_list())
        for row in self.frame.iter_rows(named=True):
            if row["problem"] is not None:
                found.setdefault(row["problem"], []).append(f"{row['measure']} of {names[row['checkpoint']]}")
        return [
            f"{where[0]}{f' and {len(where) - 1:,} more' if len(where) > 1 else ''}: {problem}"
            for problem, where in found.items()
        ]


def clusters(config: SuiteConfig, labels: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the independent unit of each checkpoint, of rows with its name and its labels."""
    along = _along(config, labels)
    names = [config.cluster] if config.cluster else [name for name in labels if name != along]
    if not names:
        return ["" if along else row["checkpoint"] for row in rows]
    if len(names) == 1:
        return [str(row[names[0]]) for row in rows]
    # with the names: "a, b" and "c" are not "a" and "b, c"
    return [", ".join(f"{name} {row[name]}" for name in names) for row in rows]


def _along(config: SuiteConfig, labels: Sequence[str]) -> str:
    return config.along or ("step" if "step" in labels else "")


def column_name(measure: str, text: str) -> str:
    """Return the name of a measure's column; `text` is empty if there is only one text."""
    return f"{measure} ({text})" if text else measure


def parts_of(outcome: str) -> tuple[str, str]:
    """Return how column names begin, for a measure or a task of lm-evaluation-harness with several columns."""
    return f"{outcome}, ", f"{outcome.removeprefix('lm-eval-')}."


def number(text: str, measure: str, estimate: Estimate, sha256: str | None = None) -> dict[str, Any]:
    """Return the cells of an estimate."""
    row = estimate.row()
    row |= {"low": row.pop("low95"), "high": row.pop("high95")}
    if estimate.samples == 1:  # imported, and its error is not known
        row |= dict.fromkeys(("stderr", "low", "high"))
    if estimate.samples in (1, UNKNOWN):
        row["samples"] = None
    return {"text": text, "measure": measure, **row, "sha256": sha256}


def empty(text: str, measure: str, problem: str, sha256: str | None = None) -> dict[str, Any]:
    """Return the cells of a missing number, with the reason."""
    return {"text": text, "measure": measure, "problem": problem, "sha256": sha256}
