"""The study algorithms as the command line sees it."""

from __future__ import annotations

from pathlib import Path

from isoloss.paper.algorithms.design import NAME, SCALES, design, scale_of
from isoloss.studies.study import Study, Summary


def summarise(folder: Path, scale_name: str) -> Summary:
    """Return what the finished study in `folder` found."""
    from isoloss.paper.algorithms.claims import judge_all
    from isoloss.paper.algorithms.results import read, tables

    results = read(folder, scale_of(scale_name))
    return Summary(tables(results), judge_all(results))


def write_page(folder: Path, scale_name: str) -> Path:
    """Write the report of the finished study in `folder`."""
    from isoloss.paper.algorithms import page

    return page.write(folder, scale_name)


STUDY = Study(name=NAME, scales=SCALES, design=design, write_page=write_page, summarise=summarise)
