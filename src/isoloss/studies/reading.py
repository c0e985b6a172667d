"""A study's results as data frames, for notebooks and further analysis."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss import files
from isoloss.errors import IsolossError, naming_extras
from isoloss.registry import STUDIES
from isoloss.statistics.tables import FORMULA
from isoloss.studies.claims import claims_sha256
from isoloss.studies.results import COLUMNS, ESTIMATE
from isoloss.studies.run.attempt import Attempts
from isoloss.studies.study import Study, load_study
from isoloss.studies.summary import tables_in

if TYPE_CHECKING:
    import polars as pl

    from isoloss.studies.folder import StudyFolder
    from isoloss.studies.results import Results

VALUES, VALUES_PARQUET, SUMMARY, PROVENANCE = "values.csv", "values.parquet", "summary.json", "provenance.json"
CLAIMS = {"claim": str, "case": str, "role": str, "verdict": str, "difference": float, "standard error": float,
          "low": float, "high": float, "unit": str, "p": float, "adjusted p": float, "p of no effect": float,
          "adjusted p of no effect": float, "tests": int, "explanation": str}  # fmt: skip


@dataclass(frozen=True)
class StudyResults:
    """The results of a study as data frames.

    An accuracy is a fraction from 0 to 1, with the unit `accuracy`; a difference of two is in percentage points.

    Attributes:
        values: A row for each checkpoint and estimate: run, group, block, size, step, estimate, value, standard error,
            unit.
        claims: A row for each claim and case: its role and verdict, the difference that is judged, its standard error,
            the ends of its 95 % interval (low, high), its unit, its p-value, the p-value of no effect of interest, both
            adjusted, and the number of tests that they are adjusted for. Null is what was not computed. No rows before
            the study is finished.
        tables: The study's tables by name. A row for each row of the table and estimate: its labels, then estimate,
            value, standard error, unit.
        provenance: How the results were made: study, scale, seed offset, versions, and so on.
    """

    values: pl.DataFrame
    claims: pl.DataFrame
    tables: Mapping[str, pl.DataFrame]
    provenance: Mapping[str, Any]

    def wide(self, table: str | None = None) -> pl.DataFrame:
        """Return a row for each checkpoint, or for each row of a table, with columns NAME and NAME_stderr by estimate.

        Null is what was not measured. The units are in `values` or in the table.

        Args:
            table: The table; None: the checkpoints.

        Raises:
            IsolossError: There is no such table.
        """
        if table is not None and table not in self.tables:
            raise IsolossError(f"the study has no table {table!r}; its tables are {', '.join(self.tables) or 'none'}")
        long = self.values if table is None else self.tables[table]
        labels, names = (
            [name for name in long.columns if name not in ESTIMATE],
            long["estimate"].unique(maintain_order=True),
        )
        wide = long.pivot("estimate", index=labels, values=["value", "standard error"])
        columns = {f"value_{name}": name for name in names}
        columns |= {f"standard error_{name}": f"{name}_stderr" for name in names}
        return wide.rename(columns).select(*labels, *(each for name in names for each in (name, f"{name}_stderr")))


@naming_extras()
def read_study(path: str | Path, study: str | Path | Study | None = None) -> StudyResults:
    """Return the results of a study as data frames, from its folder or from an exported one.

    An exported folder is read without torch. A study's own folder need not be finished: the results are then those of
    its complete blocks, without claims.

    Args:
        path: The study's folder, or one that `isoloss study export` wrote.
        study: For a study's own folder: the study, or the Python file that defines it; None: the registered study that
            the folder names.

    Raises:
        IsolossError: The folder holds neither, was made by another version of the study's plan, or has no complete
            block yet; or the study's definition is not found.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from isoloss import read_study
        >>> folder = Path(tempfile.mkdtemp())  # usually written by `isoloss study export same-loss --output FOLDER`
        >>> columns = "run,group,block,size,step,estimate,value,standard error,unit"
        >>> row = "base,AdamW,0,d32,100,trace,85.4,0.6,nats per predicted token"
        >>> _ = (folder / "values.csv").write_text(chr(10).join([columns, row]))
        >>> _ = (folder / "summary.json").write_text('{"claims": []}')
        >>> _ = (folder / "provenance.json").write_text('{"study": "same-loss"}')
        >>> read_study(folder).wide().row(0, named=True)
        {'run': 'base', 'group': 'AdamW', 'block': 0, 'size': 'd32', 'step': 100, 'trace': 85.4, 'trace_stderr': 0.6}
    """
    folder = Path(path)
    if (folder / PROVENANCE).is_file():
        documents = (files.read_json(folder / name) for name in (SUMMARY, PROVENANCE))
        return _frames(_values(folder), *documents)
    files.require_folder(folder)
    if not (folder / "study.json").is_file():
        raise IsolossError(
            f"{folder} is no study's folder and no export of one: it has neither study.json nor {PROVENANCE}"
        )
    made = study_in(folder, study)
    missing, complete = made.progress()
    if not complete:
        raise IsolossError(
            f"{folder} has no complete block yet: {len(missing)} of {len(made.plan())} units are not done"
        )
    results = made.results(complete if missing else None)
    return _frames(results.values(), made.summary(results).to_dict(), provenance(made, results))


def _values(folder: Path) -> pl.DataFrame:
    """Return the values of an export, from whichever of the two files it has."""
    import polars as pl

    for path in (folder / VALUES_PARQUET, folder / VALUES):
        if path.is_file():
            try:
                is_parquet = path.name == VALUES_PARQUET
                return pl.read_parquet(path) if is_parquet else _from_csv(pl.read_csv(path, schema=pl.Schema(COLUMNS)))
            except (OSError, pl.exceptions.PolarsError) as error:
                raise IsolossError(f"{path} cannot be read: {error}") from error
    raise IsolossError(f"{folder} has neither {VALUES} nor {VALUES_PARQUET}: export the study again with one of them")


def as_csv(values: pl.DataFrame) -> pl.DataFrame:
    """Return values with an apostrophe before each text that a spreadsheet would take for a formula."""
    import polars as pl

    # only in columns of text: in one of numbers, a minus is a minus
    return values.with_columns(pl.col(pl.String).str.replace("^" + FORMULA, "'$1"))


def _from_csv(values: pl.DataFrame) -> pl.DataFrame:
    """Return values as they were before `as_csv`."""
    import polars as pl

    return values.with_columns(pl.col(pl.String).str.replace("^'" + FORMULA, "$1"))


def study_in(path: Path, study: str | Path | Study | None = None) -> StudyFolder:
    """Return the study that a folder holds; one that is not registered has to be given.

    Raises:
        IsolossError: The folder was made by another study or another version of it, or by one that is not registered.
    """
    from isoloss.studies.folder import StudyFolder

    document = files.read_json(path / "study.json")
    name = document["study"]
    if study is None and name not in STUDIES:
        raise IsolossError(
            f"{path} was made by the study {name!r}, which is not registered: name the file that defines it, such as "
            f"{name}.py, instead of the folder or, in Python, as study='{name}.py'"
        )
    if not isinstance(study, Study):
        study = load_study(name if study is None else study)
    folder = StudyFolder(study, path, document["scale"], document.get("seed_offset", 0))
    folder.exists()  # or refuses
    return folder


def _frames(values: pl.DataFrame, summary: Mapping[str, Any], made: Mapping[str, Any]) -> StudyResults:
    """Return the data frames of what an export's files hold."""
    import polars as pl

    claims = [
        (
            *(claim["claim"], answer["case"]),
            # an earlier export says only which test is the primary one
            answer.get("role", "primary" if answer.get("is_primary") else "secondary"),
            answer["verdict"],
            *(difference.get(key) for key in ("value", "stderr")),
            *(answer["interval95"] or (None, None)),
            *(difference.get("unit"), answer["p_value"], answer["p_adjusted"]),
            *(answer.get(key) for key in ("p_no_effect", "p_no_effect_adjusted", "tests", "explanation")),
        )
        for claim in summary["claims"]
        for answer in claim["answers"]
        for difference in [answer["difference"] or {}]
    ]
    tables = {name: _table(rows) for name, rows in tables_in(summary).items() if rows}
    return StudyResults(values, pl.DataFrame(claims, schema=CLAIMS, orient="row"), tables, made)


def _table(rows: list[dict[str, Any]]) -> pl.DataFrame:
    import polars as pl

    labels = [{name: label for name, label in row.items() if name != "estimates"} for row in rows]
    cells = [
        {**label, "estimate": key, "value": one["value"], "standard error": one["stderr"], "unit": one["unit"]}
        for label, row in zip(labels, rows, strict=True)
        for key, one in row["estimates"].items()
    ]
    # by all rows: polars would guess a label's type from the first 100
    return pl.DataFrame(cells, schema_overrides=ESTIMATE, infer_schema_length=None)


# --- how results were made


def provenance(folder: StudyFolder, results: Results) -> dict[str, Any]:
    """Return how results of a study were made."""
    made: dict[str, dict[str, Any]] = {}  # most often one; a study that went on with another version has two
    for name in results.experiments:
        record = {key: results.run(name).record[key] for key in ("versions", "commit")}
        # by its JSON, as a dictionary is no key
        made.setdefault(json.dumps(record), {**record, "runs": []})["runs"].append(name)
    units, attempts = folder.plan(), Attempts(folder.path)
    began = [lease["began"] for unit in units for lease in attempts.records(unit) if "began" in lease]
    seconds = [line.get("seconds", 0.0) for name in results.experiments for line in results.run(name).log_lines()]
    return {
        "study": folder.study.name,
        "scale": folder.scale_name,
        "seed_offset": folder.seed_offset,
        "description": folder.scale.description,
        "blocks": results.blocks,
        "blocks_done": results.blocks_done,
        "runs": {name: one.fingerprint for name, one in results.experiments.items()},
        "claims_sha256": claims_sha256(folder.study.claims, folder.scale) if folder.study.claims else None,
        "made_with": list(made.values()),
        "exported_with": {"isoloss": metadata.version("isoloss"), "processor": processor()},
        "began": min(began, default=None),  # the first attempt at a unit
        "units": len(units),
        "unit_seconds": round(sum(seconds), 1),
    }


def processor() -> str:
    """Return this machine's processor in words."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{next(iter(names), platform.processor() or 'unknown')}, {platform.machine()}, {os.cpu_count()} cores"
