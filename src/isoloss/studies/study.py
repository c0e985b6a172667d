"""A study: its scales, its claims and what its page shows; and how to load one.

Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from isoloss.errors import IsolossError
from isoloss.registry import (
    ALGORITHMS,
    LANGUAGES,
    MEASURES,
    MODELS,
    OPTIMIZERS,
    RESCALINGS,
    STUDIES,
    TASKS,
    run_python,
)
from isoloss.statistics.checking import positive
from isoloss.statistics.significance import LOSS_MARGIN
from isoloss.studies.plan import AnyScale

if TYPE_CHECKING:
    from isoloss.report.html import Card, Section
    from isoloss.report.study_page import Figure
    from isoloss.studies.claims import Claim, ClaimResult
    from isoloss.studies.results import Results
    from isoloss.studies.summary import SummaryTable


@dataclass(frozen=True, kw_only=True)
class PageParts:
    """What a study adds to its page.

    Attributes:
        figures: The figures; the first is in the page's first screen.
        sections: More sections.
        paper_claims: The ids of the claims that the first table sets beside the paper's own results, each with what a
            verdict needs, for a scale without verdicts.
        settings: How the study was made, by name; listed before what every page says about that.
    """

    figures: Sequence[Figure]
    sections: Sequence[Section] = ()
    paper_claims: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study. Only `name` and `scales` are needed; the rest has defaults that fit any study.

    Attributes:
        name: What the command line and the page call it.
        scales: Its scales by name; the first is the default.
        title: The page's heading, a question; empty: the name.
        lead: What the study is about, a paragraph each. The first one opens the page in the place of a paragraph on
            what was measured: a sentence that defines every word that the title and the answer use.
        claims: What it claims, fixed before the runs.
        loss_margin: Equivalence margin of the mean difference in loss between two models, in nats.
        verdicts_at: The scales at which verdicts are given; empty: all.
        answer: The study's answer from the results of the claims and all results: cards, three at best, that open the
            page and the command's output; None: the first claims or, without claims, the runs compared.
        tables: The tables of the summary; None: every checkpoint.
        page: What the page shows, or where the function is, `"module:attribute"`; None: each estimate against the
            loss and, where checkpoints of several steps were measured, over the steps.
        block_name: What the blocks are, in the plural, e.g. `grammars`; for the page of an unfinished study.
        file: The name of the file that it is in, for the command on its page; `load_study` sets it.

    Example:
        >>> from isoloss.lab.languages.config import PCFGConfig
        >>> from isoloss.run_config import TrainConfig
        >>> from isoloss.studies import Experiment, Measurement, Scale, Study
        >>> config = TrainConfig(language=PCFGConfig(levels=2), steps=100)
        >>> run = Experiment(config=config, measurements=(Measurement(measures=("loss", "trace")),))
        >>> study = Study(name="small", scales={"smoke": Scale(description="a minute", experiments={"plain": run})})
        >>> study.scale("smoke").experiments["plain"].kept_steps
        (100,)
    """

    name: str
    scales: Mapping[str, AnyScale]
    title: str = ""
    lead: Sequence[str] = ()
    claims: Sequence[Claim] = ()
    loss_margin: float = LOSS_MARGIN
    verdicts_at: Sequence[str] = ()
    answer: Callable[[Sequence[ClaimResult], Results], Sequence[Card]] | None = None
    tables: Callable[[Results], Sequence[SummaryTable]] | None = None
    page: Callable[[Results], PageParts] | str | None = None
    block_name: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        # checked here, when the file is loaded: these are called only once all units are done, perhaps days later
        for name in ("answer", "tables"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise IsolossError(
                    f"{name} of the study {self.name} is of type {type(value).__name__}; it must be a function "
                    "(isoloss.studies.Study says of what) or None"
                )
        if isinstance(self.lead, str):
            raise IsolossError(
                f"lead of the study {self.name} is one text; give a tuple of paragraphs, ({self.lead!r},)"
            )
        if isinstance(self.claims, str | Path):
            raise IsolossError(
                f"claims of the study {self.name} is a file, {self.claims}: state them in the study, each as an "
                "isoloss.studies.Claim"
            )
        positive(f"loss_margin of the study {self.name}", self.loss_margin)
        for scale in self.verdicts_at:
            if scale not in self.scales:
                raise IsolossError(
                    f"verdicts_at of the study {self.name} has {scale!r}; its scales are {', '.join(self.scales)}"
                )

    def has_verdicts(self, scale: str) -> bool:
        """Whether its claims are judged at a scale."""
        return not self.verdicts_at or scale in self.verdicts_at

    def scale(self, name: str | None = None, *, seed_offset: int = 0) -> AnyScale:
        """Return the scale called `name`, by default the first; with other seeds if `seed_offset` is not 0.

        Raises:
            IsolossError: There is no such scale, or it has no replications.
        """
        chosen = next(iter(self.scales)) if name is None else name
        if chosen not in self.scales:
            raise IsolossError(
                f"the study {self.name} has no scale {chosen!r}; its scales are {', '.join(self.scales)}"
            )
        scale = self.scales[chosen]
        if seed_offset < 0:
            raise IsolossError(f"the seed offset is {seed_offset}; it must be at least 0")
        if seed_offset == 0:
            return scale
        repeated: Callable[[int], AnyScale] | None = getattr(scale, "with_seed_offset", None)
        if repeated is None:
            raise IsolossError(
                f"the study {self.name} cannot be made with other seeds, as its scale {chosen} has no method "
                f"with_seed_offset: the seed offset must be 0, not {seed_offset}"
            )
        return repeated(seed_offset)


def load_study(name: str | Path) -> Study:
    """Return a registered study, or the one in a Python file: its `STUDY`, or what its function `study()` returns.

    A name that ends in `.py` is a path. The file is run; languages, measures and other components of its own need an
    entry point in an installed package, as the units of a study are processes that do not read the file.

    Args:
        name: The study's name, or the path of a file.

    Raises:
        IsolossError: There is no such study or file, the file fails or registers a component, or it has no study.

    Example:
        >>> from isoloss.studies import load_study
        >>> list(load_study("same-loss").scales)
        ['laptop', 'smoke']
    """
    study = _from_file(Path(name)) if Path(name).suffix == ".py" else STUDIES.load(str(name))
    if not isinstance(study, Study) and callable(study):
        try:
            study = study()
        except Exception as error:  # whatever a function of another package does
            raise IsolossError(f"the study {name} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(study, Study):
        raise IsolossError(f"{name} is a {type(study).__name__}, not an isoloss.studies.Study")
    return dataclasses.replace(study, file=Path(name).name) if Path(name).suffix == ".py" else study


_OF_UNITS = (LANGUAGES, MODELS, TASKS, ALGORITHMS, OPTIMIZERS, MEASURES, RESCALINGS)  # what units look up by name


def _from_file(path: Path) -> object:
    known = [set(registry) for registry in _OF_UNITS]
    module = run_python(path, "isoloss_study")
    for registry, before in zip(_OF_UNITS, known, strict=True):
        if new := sorted(set(registry) - before):
            raise IsolossError(
                f"{path} registers the {registry.kind} {new[0]!r}, but the units of a study are commands, which find a "
                f"component only by its entry point: give it one in {registry.group} of a package (docs/extending.md)"
            )
    for attribute in ("STUDY", "study"):
        if hasattr(module, attribute):
            study: object = getattr(module, attribute)
            return study
    raise IsolossError(f"{path} has no study: assign an isoloss.studies.Study to STUDY, or define study()")
