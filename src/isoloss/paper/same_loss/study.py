"""The study same-loss as the command line sees it."""

from __future__ import annotations

from pathlib import Path

from isoloss.paper.same_loss.design import NAME, SCALES, design, scale_of
from isoloss.studies.study import Study, Summary, SummaryTable


def summarise(folder: Path, scale_name: str) -> Summary:
    """Return what the finished study in `folder` found."""
    from isoloss.paper.same_loss.claims import judge_all
    from isoloss.paper.same_loss.results import read, size_table

    results = read(folder, scale_of(scale_name))
    shown = ("kl", "trace", *results.scale.tasks)
    rows = [(place, {name: found[name].estimate for name in shown}) for place, found in results.estimates.items()]
    table = SummaryTable("checkpoints", "value ± standard error", ("run", "step"), rows)
    return Summary((table, size_table(results)), judge_all(results))


def write_page(folder: Path, scale_name: str) -> Path:
    """Write the report of the finished study in `folder`."""
    from isoloss.paper.same_loss import page

    return page.write(folder, scale_name)


STUDY = Study(name=NAME, scales=SCALES, design=design, write_page=write_page, summarise=summarise)
