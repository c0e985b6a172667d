"""Outcomes that were measured elsewhere: results of lm-evaluation-harness, and tables."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from isoloss.errors import IsolossError, did_you_mean, naming_extras, warn
from isoloss.statistics.estimate import Estimate
from isoloss.suites.config import Member, label_names
from isoloss.suites.lm_eval import UNKNOWN, read_lm_eval

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_MISSING = ["", "nan", "NaN", "NA", "N/A", "<NA>", "None", "null", "NULL"]  # as pandas, R and databases write it
_STDERR = "_stderr"


class Outcome(NamedTuple):
    """An imported number of a checkpoint; an estimate with one sample has no error."""

    checkpoint: str
    name: str
    estimate: Estimate


def read_outcomes(paths: Sequence[str | Path], members: Sequence[Member]) -> list[Outcome]:
    r"""Return the outcomes in files; outcomes of checkpoints outside the suite are left out with a warning.

    Args:
        paths: Results of lm-evaluation-harness, as for `isoloss.read_lm_eval`; tables, `.csv` or `.tsv`; patterns of
            either. A table needs a column `checkpoint`, or columns of labels that tell the checkpoints apart. Its other
            numeric columns are outcomes, and `NAME_stderr` is the error of NAME.
        members: The checkpoints.

    Raises:
        IsolossError: A path holds no outcomes; a table lacks columns, has text among numbers, or a checkpoint twice.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from isoloss.suites.config import Member
        >>> from isoloss.suites.outcomes import read_outcomes
        >>> members = [Member(f"runs/seed{seed}", {"seed": seed}) for seed in (0, 1)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "results.csv")
        ...     _ = file.write_text("seed,chess,chess_stderr\n0,1480,25\n1,1520,24\n")
        ...     outcomes = read_outcomes([file], members)
        >>> [(each.checkpoint, each.name, each.estimate.value) for each in outcomes]
        [('runs/seed0', 'chess', 1480.0), ('runs/seed1', 'chess', 1520.0)]
    """
    places = [Path(place) for path in paths for place in sorted(glob.glob(str(path))) or [str(path)]]
    tables = [place for place in places if place.suffix.lower() in _SEPARATORS]
    found = [outcome for table in tables for outcome in _of_table(table, members)]
    for model, estimates in read_lm_eval([place for place in places if place not in tables]).models.items():
        fitting = _called(model, members)
        if len(fitting) == 1:
            found += [Outcome(fitting[0].name, name, estimate) for name, estimate in estimates.items()]
            continue
        why = f"is not a checkpoint of the suite{did_you_mean(model, [member.name for member in members])}"
        if fitting:
            why = f"may belong to {fitting[0].name} or {fitting[1].name}: put results_DATE.json beside the samples"
        warn(f"left out: the results of {model}, which {why}")
    return found


def _called(name: str, members: Sequence[Member]) -> list[Member]:
    """Return the checkpoints that a name may mean: by path, by the end of a path, or by a folder of results."""

    def place(path: str) -> str:
        return os.path.realpath(os.path.expanduser(path))

    by_way = [
        [member for member in members if place(member.name) == place(name)],
        [member for member in members if f"/{member.name}".endswith(f"/{os.path.normpath(name)}")],
        # as lm-evaluation-harness names the folder of a model's results
        [member for member in members if re.sub(r'["<>:/|\\?*\[\]]+', "__", member.name.partition("@")[0]) == name],
    ]
    return next((fitting for fitting in by_way if fitting), [])


def _of_table(path: Path, members: Sequence[Member]) -> list[Outcome]:
    frame = _read(path)
    labels = label_names(member.labels for member in members)
    keys = ["checkpoint"] if "checkpoint" in frame.columns else [name for name in labels if name in frame.columns]
    if not keys:
        known = f" and no column of a label ({', '.join(labels)})" if labels else ""
        raise IsolossError(f"{path} has no column checkpoint{known}; it has {', '.join(frame.columns)}")
    numbers = {name: _numbers(path, frame[name]) for name in frame.columns if name not in ("checkpoint", *labels)}
    names = [name for name in numbers if numbers[name] and name.removesuffix(_STDERR) not in numbers.keys() - {name}]
    if not names:
        has = ", ".join(frame.columns)
        raise IsolossError(f"{path} has no numeric column besides {', '.join(keys)}; it has {has}")
    found: list[Outcome] = []
    lines: dict[str, int] = {}
    others = []
    for index, row in enumerate(frame.select(keys).fill_null("").rows()):
        line, told = index + 2, ", ".join(map(" ".join, zip(keys, row, strict=True)))
        # a whole number may have become a float in the table
        own = {key: (cell, cell.removesuffix(".0")) for key, cell in zip(keys, row, strict=True)}
        fitting = [member for member in members if all(str(member.labels.get(key)) in own[key] for key in keys)]
        if keys == ["checkpoint"]:
            fitting = _called(row[0], members)
        if not fitting:
            others.append(f"line {line}, {told}")
            continue
        name, by = fitting[0].name, ", ".join(keys)
        if len(fitting) > 1:
            raise IsolossError(f"{path}, line {line}: {told} is {name} or {fitting[1].name}; add a label column")
        if (first := lines.setdefault(name, line)) != line:
            raise IsolossError(f"{path}, lines {first} and {line} are both for {name} (by {by}): leave out one")
        for outcome in (outcome for outcome in names if index in numbers[outcome]):
            value, stderr = numbers[outcome][index], numbers.get(f"{outcome}{_STDERR}", {}).get(index)
            samples, method = 1 if stderr is None else UNKNOWN, f"{outcome} of {path}, line {line}"
            about: dict[str, Any] = {"samples": samples, "unit": "", "num_predictions": 0, "method": method}
            found.append(Outcome(name, outcome, Estimate(value=value, stderr=stderr or 0.0, **about)))
    if others:
        warn(f"{path}: left out rows that match no checkpoint of the suite: {len(others):,} (first: {others[0]})")
    return found


def _read(path: Path) -> Any:
    """Return a table as a `polars.DataFrame` of strings."""
    with naming_extras():
        import polars
    try:
        separator = _SEPARATORS[path.suffix.lower()]
        frame = polars.read_csv(path, separator=separator, infer_schema=False, null_values=_MISSING)
    except OSError as error:
        problem = error.strerror or (error if path.exists() else "there is no such file")
        raise IsolossError(f"cannot read {path}: {problem}") from error
    except polars.exceptions.PolarsError as error:
        raise IsolossError(f"{path} is not a readable {path.suffix} file: {str(error).splitlines()[0]}") from error
    names = [re.sub(r"_duplicated_\d+$", "", name).strip() for name in frame.columns]  # as polars tells them apart
    if twice := next((name for name in names if name and names.count(name) > 1), None):
        raise IsolossError(f"{path} has two columns {twice!r}: leave out one of them")
    # a column without a name is the index that pandas writes
    named = [column.alias(name).str.strip_chars() for column, name in zip(frame, names, strict=True) if name]
    return polars.DataFrame(named)


def _numbers(path: Path, column: Any) -> dict[int, float]:
    """Return the numbers of a column by row; a column of text has none."""
    import polars

    found = column.cast(polars.Float64, strict=False)
    wrong = (column.is_not_null() & found.is_null()).arg_true().to_list()
    numbers = {index: value for index, value in enumerate(found) if value is not None}
    # a column of 0,5 or 61% is no text
    if wrong and (numbers or re.fullmatch(r"[-+]?\d*([.,]\d+)?\s*%?", column[wrong[0]])):
        place = f"{path}, line {wrong[0] + 2}"
        raise IsolossError(f"{place}: the column {column.name} should hold numbers, but has {column[wrong[0]]!r}")
    return numbers
