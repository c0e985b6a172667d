"""Export of a finished study: its numbers, how they were made, and its page, in one small folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jinja2

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.studies import page
from isoloss.studies.folder import StudyFolder
from isoloss.studies.reading import PROVENANCE, SUMMARY, VALUES, VALUES_PARQUET, as_csv, provenance
from isoloss.studies.summary import all_claims_table

Format = Literal["csv", "parquet", "markdown", "latex"]
FORMATS: tuple[Format, ...] = get_args(Format)
SAME = ("study", "scale", "seed_offset")  # what identifies an export
KINDS = {"markdown": "md", "latex": "tex"}  # the ends of the names of tables of text
MOST_ROWS = 40  # that fit on one page; a longer table may break across pages
_LATEX = {
    **{character: rf"\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{"[": "{[}", "*": "{*}"},  # at the start of a row, they would continue the line break before it
    **{"<": "$<$", ">": "$>$", "|": "$|$", "±": r"$\pm$", "−": "$-$", "×": r"$\times$", "≥": r"$\geq$", "≤": r"$\leq$"},
}


def export(folder: StudyFolder, output: Path, formats: Collection[Format] = FORMATS) -> None:
    """Write the results of a finished study to `output`, whole or not at all.

    - `values.csv`, `values.parquet`: a row for each checkpoint and estimate; an accuracy is a fraction from 0 to 1.
    - `summary.json`: the study's tables and claims.
    - `tables/NAME.md`, `tables/NAME.tex`: each of these tables, and `claims`, as Markdown and as LaTeX.
    - `provenance.json`: study, scale and seeds, the fingerprints of the configs, when the first unit was started,
      versions, processor, seconds.
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
            tables = {
                each.name: (each.caption or f"{each.title[0].upper()}{each.title[1:]}.", *each.cells(), each.left)
                for each in summary.tables
            }
            if summary.claims:
                caption = "The verdict on each claim, and the difference that is judged, with its standard error."
                tables["claims"] = (caption, *all_claims_table(summary.claims), 5)
            for kind in (KINDS[each] for each in KINDS if each in formats):
                for name, table in tables.items():
                    text = text_table(kind, *table, label=f"tab:{folder.study.name}-{name}")
                    files.write_text(new / "tables" / f"{name}.{kind}", text)
            page.write(folder, results, summary, new / "index.html", formats=("png",))
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


def text_table(
    kind: str, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, *, label: str = ""
) -> str:
    """Return a table of text as Markdown (`md`), with the caption above it, or as LaTeX (`tex`), for `input`.

    The first `left` columns are text; the others are numbers, aligned on the right. LaTeX needs the packages booktabs
    and, for a table of more rows than a page has, longtable.
    """
    # texts are escaped for Markdown or LaTeX, not for HTML
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("isoloss.report"),
        autoescape=False,  # noqa: S701
        undefined=jinja2.StrictUndefined,
        block_start_string="<%",  # braces are LaTeX's
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["escaped"] = {"md": _markdown, "tex": _latex}[kind]
    template = environment.get_template(f"table.{kind}.j2")
    return template.render(caption=caption, columns=columns, rows=rows, left=left, label=label, most_rows=MOST_ROWS)


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_`<\[\]])", r"\\\1", " ".join(text.split()))


def _latex(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
    # a hyphen before a number, unless it joins two words, is a minus
    return re.sub(r"(?<![\w$-])-(?=\d)", "$-$", escaped)
