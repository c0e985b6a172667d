"""Tables of text as Markdown and as LaTeX, to paste into a README or a paper."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isoloss.studies.claim_table import all_claims_table
from isoloss.studies.results import Summary

MOST_ROWS = 40  # that fit on one page; a longer table may break across pages
_LATEX = {
    **{character: rf"\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{"[": "{[}", "*": "{*}"},  # at the start of a row, they would continue the line break before it
    **{"<": "$<$", ">": "$>$", "|": "$|$", "±": r"$\pm$", "−": "$-$", "×": r"$\times$", "≥": r"$\geq$", "≤": r"$\leq$"},
}


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of text.

    Attributes:
        name: A short name.
        caption: A sentence or two.
        columns: The headings, with units.
        rows: The cells of each row.
        left: How many of the first columns are text; the others are numbers, aligned on the right.
    """

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int

    def markdown(self) -> str:
        """Return the table as Markdown, with the caption above it."""
        rule = [":--" if i < self.left else "--:" for i in range(len(self.columns))]
        lines = [[_markdown(text) for text in row] for row in (self.columns, *self.rows)]
        body = [f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:])]
        return "\n".join([_markdown(self.caption), "", *body, ""])

    def latex(self, label: str) -> str:
        """Return the table as LaTeX, for `input`; it needs the packages booktabs and, if it is long, longtable."""
        align = "l" * self.left + "r" * (len(self.columns) - self.left)
        head, *rows = (f"{' & '.join(map(_latex, row))} \\\\" for row in (self.columns, *self.rows))
        caption = rf"\caption{{{_latex(self.caption)}}}\label{{{label}}}"
        top, bottom = [r"\toprule", head, r"\midrule"], [*rows, r"\bottomrule"]
        if len(rows) > MOST_ROWS:
            head_on_each_page = [rf"{caption} \\", *top, r"\endhead"]
            packages, lines = "{booktabs, longtable}", [rf"\begin{{longtable}}{{{align}}}", *head_on_each_page, *bottom]
            end = [r"\end{longtable}"]
        else:
            begin = [r"\begin{table}", r"\centering", caption, rf"\begin{{tabular}}{{{align}}}"]
            packages, lines, end = "{booktabs}", [*begin, *top, *bottom], [r"\end{tabular}", r"\end{table}"]
        return "\n".join([rf"% needs \usepackage{packages}", *lines, *end, ""])


def text_tables(summary: Summary) -> Iterator[TextTable]:
    """Yield the tables of a study's summary, then that of its claims if it has any."""
    for each in summary.tables:
        columns, rows = each.cells()
        caption = each.caption or f"{each.title[0].upper()}{each.title[1:]}."
        yield TextTable(name=each.name, caption=caption, columns=columns, rows=rows, left=each.left)
    if summary.claims:
        columns, rows = all_claims_table(summary.claims)
        caption = "The verdict on each claim, and the difference that is judged, with its standard error."
        yield TextTable(name="claims", caption=caption, columns=columns, rows=rows, left=4)


def _markdown(text: str) -> str:
    return re.sub(r"([\\|*_`<\[\]])", r"\\\1", " ".join(text.split()))


def _latex(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
    return re.sub(r"(?<![\w$-])-(?=\d)", "$-$", escaped)  # a minus, not a hyphen
