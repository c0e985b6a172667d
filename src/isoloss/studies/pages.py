"""What the pages of all studies have: figures with their files, and how things were measured."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import polars as pl
from altair import ConcatChart
from matplotlib.figure import Figure as Drawing

from isoloss import files
from isoloss.evaluation.config import EvalConfig
from isoloss.languages.config import PCFGConfig
from isoloss.report import figures
from isoloss.report.claims import ClaimResult
from isoloss.report.html import Cell, Figure, Finding, Page, Table, checkpoint_table, render
from isoloss.runs import Run
from isoloss.statistics.estimate import Estimate
from isoloss.studies.comparison import SAME_LOSS_NATS
from isoloss.studies.study import SummaryTable


def write(
    folder: Path,
    study: str,
    scale: str,
    *,
    title: str,
    lead: tuple[str, ...],
    findings: tuple[Finding, ...],
    claims: tuple[ClaimResult, ...],
    draw: Callable[[Path], tuple[Figure, ...]],
    checkpoints: pl.DataFrame,
    settings: Mapping[str, str],
    tables: Mapping[str, Table] | None = None,
) -> Path:
    """Write report/index.html of the finished study in `folder`, and its figures; return the page.

    Args:
        folder: The study's.
        study: Its name.
        scale: The name of its scale.
        title: Heading, and so on as in `Page`.
        lead: What the study is.
        findings: What it found.
        claims: What it says to each claim.
        draw: Writes the figures' files under the folder that it is given, the page's, and returns the figures.
        checkpoints: Every evaluated checkpoint (see `isoloss.report.data.prepare`).
        settings: How the study was made.
        tables: What was compared, by heading.
    """
    target = folder / "report" / "index.html"
    page = Page(
        title=title,
        lead=lead,
        findings=findings,
        claims=claims,
        figures=draw(target.parent),
        tables=tables or {},
        checkpoints=checkpoint_table(checkpoints),
        command=shlex.join(["isoloss", "study", "run", study, "--scale", scale]),
        settings=settings,
    )
    files.write_text(target, render(page))
    return target


def figure(folder: Path, name: str, title: str, chart: ConcatChart, drawing: Drawing, caption: str) -> Figure:
    """Write a figure's PDF and PNG under `folder`, the page's, and return it for the page."""
    figures.save(drawing, folder / "figures" / name)
    links = {kind.upper(): f"figures/{name}.{kind}" for kind in ("pdf", "png")}
    caption = f"{caption} Error bars and bands are 95 % confidence intervals."
    return Figure(title=title, chart=chart, caption=caption, downloads=links, image=links["PNG"])


def table(found: SummaryTable, caption: str) -> Table:
    """A summary's table for the page, with its caption."""
    columns, texts = found.cells()
    rows = []
    for row, (labels, estimates) in zip(texts, found.rows, strict=True):
        numbers = [*(x if isinstance(x, int) else None for x in labels), *(e.value for e in estimates.values())]
        rows.append(tuple(Cell(text=text, sort=number) for text, number in zip(row, numbers, strict=True)))
    return Table(caption=caption, columns=tuple(columns), rows=tuple(rows))


def signed(difference: Estimate) -> str:
    """A difference with its sign, also where it is above 0."""
    return f"{'+' if difference.value > 0 else ''}{difference}"


def language(grammar: PCFGConfig) -> str:
    """A random grammar in words."""
    return (
        f"random grammar of {grammar.levels} binary levels, {grammar.symbols_per_level} symbols a level, "
        f"{grammar.rules_per_symbol} rules a symbol, {grammar.vocab_size} tokens"
    )


def measuring(settings: EvalConfig, trace: Estimate) -> dict[str, str]:
    """How checkpoints were measured, by name."""
    return {
        "Loss": f"{settings.loss_sentences:,} sentences, the same for all checkpoints that are compared",
        "Trace": f"{trace.method}, {settings.trace_sentences:,} sentences; "
        f"{trace.details['dtype']}, attention {trace.details['attention']}",
        "Probes": f"{settings.probe_train:,} training and {settings.probe_test:,} test sentences, "
        f"{settings.probe_seeds} seeds, {settings.probe_epochs} epochs, features centred and scaled",
        "Same loss": f"two models whose KL differs by less than {SAME_LOSS_NATS} nats with 95 % confidence",
    }


def making(run: Run, trace: Estimate) -> dict[str, str]:
    """With what the runs were made, by name, as one of them says."""
    record = run.record
    return {
        "Device": f"{trace.details['device']}, one thread a process",
        "Versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "Commit": record["commit"] or "unknown",
    }
