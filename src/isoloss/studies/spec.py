"""What a study consists of: runs, their measurements, claims, and a page; and how to load one.

Nothing here needs torch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from isoloss import config as configs
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.external import ExternalCheckpoint
from isoloss.registry import STUDIES, run_python
from isoloss.run_config import TrainConfig
from isoloss.statistics.checking import positive
from isoloss.statistics.significance import LOSS_MARGIN
from isoloss.studies.plan import Expected, Resources

if TYPE_CHECKING:
    from isoloss.report.html import Card
    from isoloss.runs import Run
    from isoloss.studies.claims import Claim, ClaimResult
    from isoloss.studies.page import PageParts
    from isoloss.studies.results import Results
    from isoloss.studies.summary import SummaryTable


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measurement of a run by one unit of work.

    Attributes:
        measures: Names of registered measures (`isoloss ls measures`), at least one.
        steps: Steps that have a checkpoint; `"last"`: the last one, wherever a target ends the run; empty: every
            checkpoint that the run keeps.
        settings: Settings of the measures, e.g. `{"loss_sentences": 256}`, as the options of `isoloss measure`.
        name: First part of the unit's name; the second is the run.
        needs: What the unit needs; with GPUs it measures on `cuda`.
        expected: What it is expected to take; None: a rough guess of the time.

    Raises:
        IsolossError: It has no measures, or needs several processes, which only training can use.
    """

    measures: tuple[str, ...]
    steps: tuple[int | Literal["last"], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    name: str = "measure"
    needs: Resources = field(default_factory=Resources)
    expected: Expected | None = None

    def __post_init__(self) -> None:
        if not self.measures:
            raise IsolossError(f"the measurement {self.name!r} has no measures: name at least one")
        if self.needs.processes > 1:
            raise IsolossError(
                f"a measurement needs {self.needs.processes} processes, but only training uses several: give it cores"
            )


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A pre-training run, or a checkpoint that was trained elsewhere, and what is measured of it.

    Attributes:
        config: What is trained; or an `isoloss.studies.ExternalCheckpoint`, which has only step 0.
        measurements: What is measured, a unit of work each.
        after: The runs of the study that must be trained before it.
        group: What the run is called in figures and tables, the same for all seeds of one setting; empty: its name.
        block: The number of its block: a part of the study that is complete in itself, e.g. one grammar with all its
            runs. Lower blocks run first, and a page of an unfinished study shows the complete ones.
        needs: What training needs; with GPUs it trains on `cuda`.
        shown_in: The figures and tables that show it, e.g. `figure 3a`; `isoloss study plan` says what each costs.
        expected: What training is expected to take; None: a rough guess of the time.
    """

    config: TrainConfig | ExternalCheckpoint
    measurements: tuple[Measurement, ...]
    after: tuple[str, ...] = ()
    group: str = ""
    block: int = 0
    needs: Resources = field(default_factory=Resources)
    shown_in: tuple[str, ...] = ()
    expected: Expected | None = None

    @property
    def kept_steps(self) -> tuple[int, ...]:
        """The steps whose checkpoint the run keeps, in order."""
        if isinstance(self.config, ExternalCheckpoint):
            return (0,)
        return tuple(sorted({*self.config.checkpoints, *self.config.stage_ends()}))

    @property
    def last_step(self) -> int:
        """The last step of training; 0 of an external checkpoint."""
        return 0 if isinstance(self.config, ExternalCheckpoint) else self.config.steps

    @property
    def size(self) -> str:
        """The name of the model's size, if it has one."""
        return "external" if isinstance(self.config, ExternalCheckpoint) else self.config.model.size or "free shape"

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits over all that decides the results of its config."""
        return (
            self.config.fingerprint if isinstance(self.config, ExternalCheckpoint) else configs.fingerprint(self.config)
        )

    def steps(self, measurement: Measurement, run: Run | None = None) -> tuple[int, ...]:
        """The steps at which a measurement is made; without its run, or before that has ended, as they are planned."""
        last = self.last_step
        if run is not None and "last" in measurement.steps and isinstance(self.config, TrainConfig) and run.complete:
            last = run.result()["steps"]
        return tuple(last if step == "last" else step for step in measurement.steps) or self.kept_steps


class AnyScale(Protocol):
    """A scale of a study: `Scale`, or a study's own class with settings from which its experiments are made.

    It may have a method `with_seed_offset(offset: int) -> AnyScale` that returns the same scale with other seeds for
    runs, measures and everything else that is drawn. No two offsets share a seed; 0 is the scale itself.
    """

    @property
    def description(self) -> str:
        """What it is for and how long it takes."""

    @property
    def experiments(self) -> Mapping[str, Experiment]:
        """The runs by name."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One size of a study.

    Attributes:
        description: What it is for and how long it takes.
        experiments: The runs by name.
    """

    description: str
    experiments: Mapping[str, Experiment]


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study. Only `name` and `scales` are needed; the rest has defaults that fit any study.

    Attributes:
        name: What the command line and the page call it.
        scales: Its scales by name; the first is the default.
        title: The page's heading, a question; empty: the name.
        lead: What the study is about, a paragraph each. The first one opens the page: a sentence that defines every
            word that the title and the answer use.
        claims: What it claims, fixed before the runs.
        loss_margin: Equivalence margin of the mean difference in loss between two models, in nats.
        verdicts_at: The scales at which verdicts are given; empty: all.
        answer: The study's answer from the results of the claims and all results: cards, three at best, that open the
            page and the command's output; None: the first claims or, without claims, the runs compared.
        tables: The tables of the summary; None: every checkpoint.
        page: What the page shows, or where the function is, `"module:attribute"`; None: each estimate against the
            loss and, where checkpoints of several steps were measured, over the steps.
        block_name: What the blocks are, in the plural, e.g. `grammars`; for the page of an unfinished study.

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
    lead: tuple[str, ...] = ()
    claims: Sequence[Claim] = ()
    loss_margin: float = LOSS_MARGIN
    verdicts_at: Sequence[str] = ()
    answer: Callable[[Sequence[ClaimResult], Results], Sequence[Card]] | None = None
    tables: Callable[[Results], Sequence[SummaryTable]] | None = None
    page: Callable[[Results], PageParts] | str | None = None
    block_name: str = ""

    def __post_init__(self) -> None:
        # checked here, when the file is loaded: these are called only once all units are done, perhaps days later
        for name in ("answer", "tables"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise IsolossError(
                    f"{name} of the study {self.name} is a {type(value).__name__}; it must be a function "
                    "(isoloss.studies.Study says of what) or None"
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
            IsolossError: There is no such scale, or it has no repetitions.
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


def call_study_hook(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a study; the error says where it fails."""
    try:
        return function(*arguments)
    except IsolossError:
        raise
    except Exception as error:  # whatever a function of another package does
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}, line {place.lineno}"
        raise IsolossError(f"{name} fails with {type(error).__name__}: {error} ({where})") from error


def load_study(name: str | Path) -> Study:
    """Return a registered study, or the one in a Python file: its `STUDY`, or what its function `study()` returns.

    A name that ends in `.py` is a path. The file is run; registered components of its own (languages, measures) must be
    in an installed package, as the units of a study are processes that do not read the file.

    Args:
        name: The study's name, or the path of a file.

    Raises:
        IsolossError: There is no such study or file, the file fails, or it has no study.

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
    return study


def _from_file(path: Path) -> object:
    module = run_python(path, "isoloss_study")
    for attribute in ("STUDY", "study"):
        if hasattr(module, attribute):
            study: object = getattr(module, attribute)
            return study
    raise IsolossError(f"{path} has no study: assign an isoloss.studies.Study to STUDY, or define study()")
