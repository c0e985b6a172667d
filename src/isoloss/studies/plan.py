"""What a study is to run: runs with their measurements, by scale, and the units of work that they become.

Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from isoloss import config as configs
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.external import ExternalCheckpoint
from isoloss.run_config import TrainConfig

if TYPE_CHECKING:
    from isoloss.runs import Run

_LONGEST_NAME = 150  # bytes of a unit's name in file names: suffixes are added, and file systems allow 255


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a unit of work needs while it runs.

    Attributes:
        cores: CPU cores of each process, at least 1; the process computes with as many threads.
        gpus: GPUs of each process: a whole number, or a fraction below 1 to let several units share one. A unit with
            GPUs trains and measures on `cuda`, any other on `cpu`.
        memory: Memory in GiB; 0: unknown, so none is reserved.
        processes: Number of processes, started by torchrun.

    Raises:
        IsolossError: A number is out of range.

    Example:
        >>> from isoloss.studies import Resources
        >>> Resources(cores=2, gpus=0.25)
        Resources(cores=2, gpus=0.25, memory=0.0, processes=1)
    """

    cores: int = 1
    gpus: float = 0.0
    memory: float = 0.0
    processes: int = 1

    def __post_init__(self) -> None:
        for name, least in (("cores", 1), ("processes", 1), ("gpus", 0), ("memory", 0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise IsolossError(f"{name} of a unit of work is {value}; it must be at least {least}")
            if name in ("cores", "processes") and value != int(value):
                raise IsolossError(f"{name} of a unit of work is {value}; it must be a whole number")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise IsolossError(f"gpus of a unit of work is {self.gpus}; above 1 it must be a whole number")
        if 0 < self.gpus < 1 and self.processes > 1:
            raise IsolossError(
                f"gpus of a unit of work with {self.processes} processes is {self.gpus}; each needs a whole GPU"
            )

    @property
    def all_cores(self) -> int:
        """Cores of all its processes."""
        return self.cores * self.processes

    @property
    def all_gpus(self) -> float:
        """GPUs of all its processes."""
        return self.gpus * self.processes

    @property
    def device(self) -> str:
        """The device that it computes on."""
        return "cuda" if self.gpus else "cpu"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a unit of work is expected to need before any like it has run."""

    seconds: float  # with the resources that it needs
    memory: int | None = None  # bytes of all its processes at the peak; None: unknown
    gpu_memory: int | None = None
    disk: int | None = None  # bytes of its result


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
        config = self.config
        return config.fingerprint if isinstance(config, ExternalCheckpoint) else configs.fingerprint(config)

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


# --- units of work ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One command on a directory, which may be killed at any moment and run again."""

    name: str  # unique in a plan
    arguments: tuple[str, ...]  # of the `isoloss` command
    done: Callable[[], bool]  # whether its result is there; reads files only
    # whether the files of its result exist, whatever they hold: enough to show its status if its lease says that it is
    # done; None: `done` is called instead
    has_files: Callable[[], bool] | None = None
    # of a started unit that is not done, e.g. `step 100 of 300`; empty: not started. It is called with a function from
    # the path of each of `outputs` to the folder in which the current attempt makes it
    progress: Callable[[Callable[[Path], Path]], str] = lambda _: ""
    # the run directories that it makes, as they are written in `arguments`. An attempt makes each in its own folder
    # (`isoloss.studies.run.attempt`), and only a complete one gets its final name
    outputs: tuple[Path, ...] = ()
    after: tuple[str, ...] = ()  # names of the units whose results it needs
    seconds: float = 1.0  # expected duration, guessed beforehand
    needs: Resources = field(default_factory=Resources)  # while it runs
    block: int = 0  # units of lower blocks start first
    group: str = ""  # shared by units that need about the same time, memory and disk space
    shown_in: tuple[str, ...] = ()  # the figures and tables that show its result
    expected: Expected | None = None  # None: unknown but for the seconds

    @property
    def file_name(self) -> str:
        """The form of its name that is used in file names.

        Example:
            >>> from isoloss.studies.plan import Unit
            >>> Unit(name="train base, grammars 1 to 4", arguments=(), done=lambda: False).file_name
            'train-base-grammars-1-to-4'
        """
        plain = re.sub(r"[^\w-]+", "-", self.name)
        if len(plain.encode()) <= _LONGEST_NAME:
            return plain
        # cut by bytes, of which a letter may have several
        start = plain.encode()[: _LONGEST_NAME - 9].decode(errors="ignore")
        return f"{start}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"


def check(units: Sequence[Unit]) -> None:
    """Refuse a plan with a repeated name, a cycle, or a unit that waits for an unknown one or one of a later block."""
    blocks: dict[str, int] = {}
    names: dict[str, str] = {}
    for unit in units:
        if unit.name in blocks:
            raise IsolossError(f"two units of the plan are called {unit.name!r}")
        blocks[unit.name] = unit.block
        # they would share their folder
        other = names.setdefault(unit.file_name, unit.name)
        if other != unit.name:
            raise IsolossError(
                f"the units {other!r} and {unit.name!r} would have the same file name, {unit.file_name}: rename one"
            )
    for unit in units:
        for name in unit.after:
            if name not in blocks:
                raise IsolossError(f"unit {unit.name!r} waits for {name!r}, which is not in the plan")
            if blocks[name] > unit.block:
                raise IsolossError(
                    f"unit {unit.name!r} of block {unit.block} waits for {name!r} of block {blocks[name]}: a unit "
                    "cannot wait for a later block"
                )
    try:
        TopologicalSorter({unit.name: unit.after for unit in units}).prepare()
    except CycleError as error:
        raise IsolossError(f"the units {', '.join(sorted(set(error.args[1])))} wait for each other") from error
