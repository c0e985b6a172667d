"""A page for people: a question, its answer in cards, a figure, a row with a small plot for each comparison.

A page is one HTML file that loads nothing, and needs no script unless it is given one. It reads well at 390 pixels, in
dark mode and in print. The title, the lede and the cards are the first screen, with the first section below them; what
few readers need is in folded sections.

Example:
    >>> from isoloss.report.html import IntervalRow, Section, interval_rows, page, table
    >>> from isoloss.studies import Card
    >>> flatter = Card(label="Flatter?", value="Yes: 0.82 times the trace", detail="95 % 0.78 to 0.86", tone="good")
    >>> row = IntervalRow(label="trace", effect="-9.1", interval="-11.0 to -7.2", value=-9.1, low=-11.0, high=-7.2)
    >>> document = page(
    ...     title="Is B flatter than A?",
    ...     lede="Flatness is the trace of the Fisher information, in nats a token: smaller is flatter.",
    ...     cards=[flatter],
    ...     sections=[
    ...         Section(title="Differences", body=interval_rows([row], effect="B − A (nats/token)")),
    ...         Section(title="Numbers", body=table(["model", "trace"], [["A", "50.1"], ["B", "41.0"]]), folded=True),
    ...     ],
    ... )
    >>> document.count("<details"), document.count("<svg")
    (1, 1)
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jinja2
from markupsafe import Markup, escape

Tone = Literal["good", "bad", "unclear", "neutral"]
# the sign carries the tone, not the color alone
SIGNS: dict[Tone, str] = {"good": "✓", "bad": "✗", "unclear": "○", "neutral": "–"}

_WIDTH, _HEIGHT = 220.0, 22.0  # of a small plot, in its own units
_EDGE = 6.0  # of these units, free at either end


@dataclass(frozen=True, kw_only=True)
class Card:
    """One answer of the first screen.

    Attributes:
        label: The question in two or three words: `Flatter?`
        value: The answer with its number: `Yes: 0.39 times the trace`.
        detail: What it rests on, in small letters: the interval, how many seeds.
        tone: Its color and sign; `neutral` has no sign.
    """

    label: str
    value: str
    detail: str = ""
    tone: Tone = "neutral"


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page."""

    title: str  # its heading, also in the side list
    # text, a paragraph for each line; or markup: of `interval_rows`, of `table`, a chart's `<svg>`, or several joined
    body: str | Markup
    folded: bool = False  # whether a click opens it; in print it is open


@dataclass(frozen=True, kw_only=True)
class IntervalRow:
    """One comparison: what it is, its effect with the interval, and where the two lie in a small plot."""

    label: str  # what is compared or measured
    effect: str  # the number as text, with its unit where the column's heading does not have it
    interval: str = ""  # as text
    value: float | None = None  # None: there is no plot
    low: float = 0.0  # of the interval
    high: float = 0.0
    reference: float = 0.0  # the value that means no effect, marked by a line
    log: bool = False  # whether equal ratios are equal distances; all numbers are then above 0
    claimed: tuple[float | None, float | None] | None = None  # the range of a claim, shaded; None at one end: open
    scale: str = ""  # rows of one scale share an axis; empty: its own, with the reference in the middle
    verdict: str = ""  # a word or two beside the sign
    tone: Tone = "neutral"  # the sign and color of the verdict
    group: str = ""  # a heading above this row and those after it that have the same
    values: Sequence[str] = ()  # as text: the values that are compared, a column each


def page(
    *,
    title: str,
    lede: str,
    cards: Sequence[Card] = (),
    sections: Sequence[Section] = (),
    banner: str = "",
    note: Markup | None = None,
    end: Markup | None = None,
) -> str:
    """Return one HTML document.

    The `title` is a question, and the `lede` one sentence that defines every word that the title and the cards use. The
    cards are the answers, three at best, the most important first. The first section, not folded, is what the reader
    sees below them: a figure. A `banner` is a warning above the cards, e.g. that the numbers mean nothing yet; a `note`
    is small markup below them; `end` is markup before the end of the document, such as scripts that draw charts, which
    may not load anything.
    """
    ids: dict[str, Section] = {}
    for section in sections:
        # with a word before it: a page's script has ids of its own
        plain = "section-" + re.sub(r"\W+", "-", section.title.lower()).strip("-")
        numbered = (f"{plain}-{number}" for number in itertools.count(2))
        ids[next(name for name in itertools.chain([plain], numbered) if name not in ids)] = section
    return environment().get_template("page.html.j2").render(
        **{"title": title, "lede": lede, "cards": cards, "sections": ids, "banner": banner},
        **{"note": note, "end": end, "signs": SIGNS},
    )  # fmt: skip


def interval_rows(
    rows: Sequence[IntervalRow],
    *,
    effect: str = "difference",
    interval: str = "95 % interval",
    values: Sequence[str] = (),
) -> Markup:
    """Return a table with a row for each comparison and a plot of its interval, as inline SVG.

    `effect` and `interval` are the headings of these columns, with the unit where all rows share it, and the level;
    `values` those of the values that are compared.
    """
    shared: dict[str, list[IntervalRow]] = {}
    for row in rows:
        if row.scale:
            shared.setdefault(row.scale, []).append(row)
    reaches = {scale: _reach(sharing) for scale, sharing in shared.items()}
    drawn = [
        (row, _plot(row, reaches[row.scale] if row.scale else _reach([row])) if row.value is not None else "")
        for row in rows
    ]
    groups = [(name, list(members)) for name, members in itertools.groupby(drawn, lambda each: each[0].group)]
    judged = any(row.verdict for row in rows)
    template = environment().get_template("interval_rows.html.j2")
    headings = {"effect": effect, "interval": interval, "values": values}
    rendered = template.render(groups=groups, judged=judged, **headings, signs=SIGNS)
    return Markup(rendered)  # noqa: S704 - the template escapes


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, caption: str = "") -> Markup:
    """Return a table of text that scrolls sideways where it is too wide, with a caption below it.

    The first `left` columns are text; the others are numbers, aligned on the right. Headings have the units.
    """
    rendered = (
        environment().get_template("table.html.j2").render(columns=columns, rows=rows, left=left, caption=caption)
    )
    return Markup(rendered)  # noqa: S704 - the template escapes


def _position(value: float, row: IntervalRow) -> float:
    return math.log(value / row.reference) if row.log else value - row.reference


def _reach(sharing: Sequence[IntervalRow]) -> float:
    """Return how far the axis of rows that share a scale goes to either side."""
    drawn = [one for one in sharing if one.value is not None]
    reaches = sorted(max(abs(_position(end, one)) for end in (one.low, one.high)) for one in drawn)
    values = [abs(_position(one.value, one)) for one in drawn if one.value is not None]
    # one wide interval must not flatten the others: all values and the narrower half of the intervals fit, and an
    # interval that goes on beyond the edge ends in an arrow
    return 1.1 * max([0.0, *reaches[: (len(reaches) + 1) // 2], *values]) or 1.0


def _plot(row: IntervalRow, reach: float) -> Markup:
    """Return the plot of a row, on an axis that goes so far."""
    middle = _WIDTH / 2

    def at(value: float) -> float:
        return middle + _position(value, row) / reach * (middle - _EDGE)

    def cut(x: float) -> float:
        return min(max(x, _EDGE), _WIDTH - _EDGE)

    parts: list[str] = []
    if row.claimed is not None:
        low, high = (None if end is None else at(end) for end in row.claimed)
        left, right = (0.0 if low is None else max(low, 0.0)), (_WIDTH if high is None else min(high, _WIDTH))
        if left < right:
            parts.append(
                f'<rect class="claimed" x="{left:.1f}" y="0" width="{right - left:.1f}" height="{_HEIGHT:g}"/>'
            )
    center = _HEIGHT / 2
    assert row.value is not None
    left, right = at(row.low), at(row.high)
    parts.append(f'<line class="reference" x1="{middle:g}" x2="{middle:g}" y1="0" y2="{_HEIGHT:g}"/>')
    parts.append(f'<line class="interval" x1="{cut(left):.1f}" x2="{cut(right):.1f}" y1="{center:g}" y2="{center:g}"/>')
    for end, edge, side in ((left, 0.0, 1), (right, _WIDTH, -1)):
        if cut(end) != end:
            tip = f"{edge:g},{center:g} {edge + side * 7:g},{center - 4:g} {edge + side * 7:g},{center + 4:g}"
            parts.append(f'<polygon class="beyond" points="{tip}"/>')
    parts.append(f'<circle class="effect" cx="{cut(at(row.value)):.1f}" cy="{center:g}" r="4.5"/>')
    words = escape(f"{row.label}: {row.effect}, {row.interval}")
    return Markup(  # noqa: S704 - numbers, and escaped just above
        f'<svg class="plot {row.tone}" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{words}">'
        f"{''.join(parts)}</svg>"
    )


def environment() -> jinja2.Environment:
    """Return the templates of `isoloss.report`: they escape every text, and a misspelled name in them is an error."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("isoloss.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["script_json"] = script_json
    made.filters["packed"] = packed
    return made


def packed(text: str) -> str:
    """Return a long text as gzip in base64, a fifth of its size, which a page's script reads."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def script_json(document: Any) -> Markup:
    r"""Return JSON that can stand in a `<script>` element: no text in it can end the element or open another.

    Example:
        >>> from isoloss.report.html import script_json
        >>> print(script_json({"run": "</script>"}))
        {"run":"\u003c/script\u003e"}
    """
    # as ASCII, since older JavaScript takes U+2028 in a string for the end of a line
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 - escaped just above
