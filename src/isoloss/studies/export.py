"""Export of a finished study: its numbers, how they were made, and its page, in one small folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, get_args

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.studies import page
from isoloss.studies.folder import StudyFolder
from isoloss.studies.provenance import provenance
from isoloss.studies.reading import PROVENANCE, SUMMARY, VALUES, VALUES_PARQUET, as_csv
from isoloss.studies.text_tables import text_tables

Format = Literal["csv", "parquet", "markdown", "latex"]
FORMATS: tuple[Format, ...] = get_args(Format)
SAME = ("study", "scale", "seed_offset")  # what identifies an export


def export(folder: StudyFolder, output: Path, formats: Collection[Format] = FORMATS) -> None:
    """Write the results of a finished study to `output`, whole or not at all.

    - `values.csv`, `values.parquet`: a row for each checkpoint and estimate; an accuracy is a fraction from 0 to 1.
    - `summary.json`: the study's tables and claims.
    - `tables/NAME.md`, `tables/NAME.tex`: each of these tables, and `claims`, as Markdown and as LaTeX.
    - `provenance.json`: study, scale and seeds, the fingerprints of the configs, versions, processor, seconds.
    - `index.html` and `figures/`: the page, with figures as PNG.

    No file names a path of this machine.

    Args:
        folder: The study.
        output: New, empty, or an earlier export of the same study, scale and seeds, which is replaced.
        formats: Which files of values and tables to write; the other files are always written.

    Raises:
        IsolossError: The study is not finished, or `output` is something else or cannot be written.
    """
    results = folder.results()
    made, values = provenance(folder, results), results.values()
    _check(output, made)
    try:
        with files.new_directory(output) as new:
            summary = folder.summary(results)
            files.write_json(new / SUMMARY, {key: made[key] for key in SAME} | summary.to_dict())
            files.write_json(new / PROVENANCE, made)
            if "csv" in formats:
                as_csv(values).write_csv(new / VALUES)
            if "parquet" in formats:
                values.write_parquet(new / VALUES_PARQUET)
            for table in text_tables(summary):
                if "markdown" in formats:
                    files.write_text(new / "tables" / f"{table.name}.md", table.markdown())
                if "latex" in formats:
                    label = f"tab:{folder.study.name}-{table.name}"
                    files.write_text(new / "tables" / f"{table.name}.tex", table.latex(label))
            page.write(folder, results, new / "index.html", formats=("png",))
    except OSError as error:
        raise IsolossError(f"cannot write {output}: {error.strerror or error}") from error


def _check(output: Path, made: dict[str, Any]) -> None:
    """Refuse to replace anything but an earlier export of the same results."""
    if (output / PROVENANCE).is_file():
        found = files.read_json(output / PROVENANCE)
        held, ours = (", ".join(f"{key.replace('_', ' ')} {one.get(key)}" for key in SAME) for one in (found, made))
        if held != ours:
            raise IsolossError(
                f"{output} holds other results ({held}), which this export ({ours}) does not replace: choose another "
                "--output"
            )
    else:
        files.check_new(output)
