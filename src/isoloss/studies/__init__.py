"""Studies: plans of many runs and measures, the engines that carry them out, and what they conclude."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from isoloss.errors import IsolossError, did_you_mean

if TYPE_CHECKING:
    from isoloss.studies.study import Study

STUDIES = {
    "same-loss": "models of the same pre-training loss: longer training, another step rule, other sizes",
    "algorithms": "the paper's algorithms and others, several seeds of each: loss, flatness and transfer",
}


def find(name: str) -> Study:
    """Return the study called `name`; an unknown name is an error that lists the studies."""
    if name not in STUDIES:
        raise IsolossError(
            f"no study {name!r}{did_you_mean(name, STUDIES) or ';'} the studies are {', '.join(STUDIES)}"
        )
    study: Study = importlib.import_module(f"isoloss.paper.{name.replace('-', '_')}.study").STUDY
    return study
