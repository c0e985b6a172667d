"""Results as tables: as plain text, for `print`, and as data frames."""

from __future__ import annotations

import csv
import importlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isoloss.errors import naming_extras

FORMULA = r"([=+\-@\t\r])"  # how text begins that a spreadsheet takes for a formula


class Tabular:
    """A result with numbers that also come as one long table, a row for each number."""

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows, all with the same columns."""
        raise NotImplementedError

    def to_polars(self) -> Any:
        """Return the rows as a `polars.DataFrame`; it takes the extra `study`."""
        with naming_extras():
            import polars
        return polars.DataFrame(self.rows(), infer_schema_length=None)

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`; it takes the extra `hub`, which brings pandas."""
        with naming_extras():
            pandas: Any = importlib.import_module("pandas")  # which has no types
        return pandas.DataFrame(self.rows())


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a table as lines of text; the first `left` columns are aligned on the left, the others on the right.

    Example:
        >>> from isoloss.statistics.tables import text_table
        >>> print(text_table(["model", "accuracy"], [["a", "81 %"], ["larger", "9 %"]]))
        model   accuracy
        a           81 %
        larger       9 %
    """
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    cells = (
        [
            f"{cell:<{width}}" if i < left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in cells)


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    r"""Return rows, all with the same columns, as CSV; with an apostrophe before what looks like a formula."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    for row in rows:
        texts = {name: re.sub("^" + FORMULA, r"'\1", cell) for name, cell in row.items() if isinstance(cell, str)}
        writer.writerow({**row, **texts})
    return text.getvalue()


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Return each name without the folders above it, and without those below it, that all have in common.

    Example:
        >>> from isoloss.statistics.tables import short_names
        >>> short_names(["runs/x/step-1", "runs/x/step-2"])
        {'runs/x/step-1': 'step-1', 'runs/x/step-2': 'step-2'}
        >>> short_names(["runs/x/step-1", "runs/y/step-1"])
        {'runs/x/step-1': 'x', 'runs/y/step-1': 'y'}
    """
    parts = {name: Path(name).parts for name in names}
    # `os.path.commonpath` raises where some paths are absolute and others relative
    shared = len(Path(os.path.commonpath(names)).parts) if len({Path(name).is_absolute() for name in names}) == 1 else 0
    shared = max(0, min(shared, *(len(path) - 1 for path in parts.values())))  # one may lie in another
    rest = {name: path[shared:] for name, path in parts.items()}
    while (
        len(rest) > 1
        and all(len(path) > 1 for path in rest.values())
        and len({path[-1] for path in rest.values()}) == 1
    ):
        rest = {name: path[:-1] for name, path in rest.items()}
    return {name: str(Path(*path)) for name, path in rest.items()}


def label(measure: str, name: str, names: Sequence[str]) -> str:
    """Return the name of an estimate beside the estimates of other measures.

    Example:
        >>> from isoloss.statistics.tables import label
        >>> label("spectral-density", "trace", ("trace", "squared-frobenius-norm"))
        'spectral-density, trace'
        >>> label("trace-in-d64-paper", "trace", ("trace",))
        'trace-in-d64-paper'
    """
    return measure if name == measure or len(names) == 1 else f"{measure}, {name}"


def probability(fraction: float) -> str:
    """Return a probability with three decimals, and none that reads as certain."""
    if 0.001 <= fraction <= 0.999:
        return f"{fraction:.3f}"
    return "above 0.999" if fraction > 0.5 else "below 0.001"
