"""`isoloss study`: begin, plan, run, inspect, report or verify a study; export its results, and compare two exports."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoloss import config as configs
from isoloss import files, interrupts
from isoloss.checkpoints.places import check_checkpoint, expand_checkpoints
from isoloss.cli import common, options
from isoloss.errors import IsolossError, printable, require_package
from isoloss.registry import EXECUTORS, STUDIES
from isoloss.runs import Run, last_checkpoint
from isoloss.statistics.estimate import number, rounded
from isoloss.statistics.tables import short_names
from isoloss.studies.run.attempt import EXPIRY_SECONDS
from isoloss.text import hub_datasets

if TYPE_CHECKING:
    from isoloss.studies.folder import StudyFolder
    from isoloss.studies.repetition import Repeated
    from isoloss.studies.results import Results
    from isoloss.studies.run.loop import Executor, Options
    from isoloss.studies.status import UnitStatus
    from isoloss.studies.summary import Summary

EXAMPLES = [
    ("isoloss study run same-loss --scale laptop", "everything, ending with a report; the same command resumes"),
    ("isoloss study run my_study.py", "your own study: a Python file that defines an isoloss.studies.Study"),
    ("isoloss study new my_study", "write such a file, my_study.py, to start from"),
    ("isoloss study new mine --checkpoints A B --data text.txt", "one that compares checkpoints trained elsewhere"),
    ("isoloss study status same-loss --scale laptop", "which units are done, which have started"),
    ("isoloss study verify same-loss --scale laptop", "check every file against what it was made from"),
    ("isoloss study run brackets --seed-offset 1", "a replication with other seeds, in a folder of its own"),
    ("isoloss study export brackets --output results/a", "the results of a finished study, in one small folder"),
    ("isoloss study compare results/a results/b", "compare a study with its replication"),
]

EXECUTOR_PACKAGES = {"ray": "ray", "slurm": "submitit"}
_DATA = "python:docs"  # a text that comes with Python
WATCH_SECONDS = 2.0  # between two tables of `study status --watch` on a terminal
LINE_SECONDS = 30.0  # between two lines elsewhere
MIB = 2**20
_OF_ONE_RUN = ("seed", "init_from", "checkpoints")  # settings that differ from run to run by design
STATUS_COLUMNS = ("unit", "state", "progress", "host", "since (UTC)")
BEGUN = ("running", "failed", "interrupted")


# --- the subcommands -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Command:
    """A subcommand about one study, whose whole state is in its folder."""

    name: options.Positional[str]
    """The study (isoloss ls studies) or the path of a Python file that defines one, which is code and is run."""
    scale: str | None = None
    """Scale of the study (isoloss ls studies); default: the study's first scale."""
    seed_offset: int = 0
    """Repeat the study with different seeds: 1, 2, ...; 0 is the study itself."""
    folder: Path | None = None
    """Folder of the study; default: runs/NAME-SCALE, or runs/NAME-SCALE-seeds-N for a seed offset of N."""
    json: bool = False
    """Print one JSON document."""

    def study(self) -> StudyFolder:
        """Return the study in its folder, which may not be there yet."""
        if Run(Path(self.name)).exists:
            told = common.command("show", self.name)
            raise IsolossError(f"{self.name} is a run, not a study: {told} says what it holds")
        from isoloss.studies import load_study
        from isoloss.studies.folder import StudyFolder, usual_folder

        if (Path(self.name) / "study.json").is_file():
            return self._of_folder(Path(self.name))
        if Path(self.name).is_dir():
            raise IsolossError(f"{self.name} is a folder that holds no study: there is no study.json in it")
        if "/" in self.name and not self.name.endswith(".py"):
            files.require_folder(Path(self.name))
        study = load_study(self.name)
        scale = self.scale or next(iter(study.scales))
        path = self.folder or usual_folder(study, scale, self.seed_offset)
        return StudyFolder(study, path, scale, self.seed_offset)

    def _of_folder(self, path: Path) -> StudyFolder:
        """Return the study that a folder holds, named by the folder alone."""
        from isoloss.studies.reading import study_in

        for option, value in (("scale", self.scale), ("seed-offset", self.seed_offset), ("folder", self.folder)):
            if value:
                raise IsolossError(f"{path} is a study's folder, which says its scale and seeds: leave out --{option}")
        return study_in(path)

    def run_command(self, folder: StudyFolder) -> str:
        """Return the command that runs the study, or goes on with it."""
        own = self._given("executor", "address", "retries", "expiry", "fail_fast", "submit")
        return common.command("study", "run", self.study_name(folder), *folder.options, "--folder", folder.path, *own)

    def study_name(self, folder: StudyFolder) -> str:
        """Return what names the study on a command line, wherever its folder is: its name or its file."""
        return self.name if self.name.endswith(".py") else folder.study.name

    def _given(self, *names: str) -> list[object]:
        """Return the options of these names that are not at their defaults, as words of a command."""
        words: list[object] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in names and value != field.default:
                words.append(options.option_name(field.name))
                words += value if isinstance(value, tuple) else [] if value is True else [value]
        return words


@dataclass(frozen=True, kw_only=True)
class _Working(_Command):
    """A subcommand that carries out units."""

    workers: int = 2
    """Cores that units may use at the same time; most units use one. For the executor slurm: number of workers."""
    retries: int = 1
    """How many times to retry a unit that fails."""
    fail_fast: bool = False
    """Start no further units once one has failed."""
    expiry: float = EXPIRY_SECONDS
    """A process on another machine without a heartbeat for this many seconds is presumed dead, and others take over its
    units; give more on a slow network file system."""

    def executor_options(self, folder: StudyFolder, **more: Any) -> Options:
        """Return the options of the executor, including the command that lets another process help."""
        from isoloss.studies.run.loop import Options

        # a helper may start in another folder
        name = str(Path(self.name).absolute()) if self.name.endswith(".py") else self.study_name(folder)
        work = ["study", "work", name, *folder.options, "--folder", str(folder.path.absolute())]
        work += map(str, self._given("retries", "expiry", "fail_fast"))
        return Options(
            workers=self.workers,
            retries=self.retries,
            keep_going=not self.fail_fast,
            expiry=self.expiry,
            worker_arguments=tuple(work),
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class _Run(_Working):
    """Carry out what is left of a study, and write its report. The same command resumes."""

    executor: str = "local"
    """What runs the units (isoloss ls executors)."""
    address: str = ""
    """For the executor ray: address of a cluster, such as auto; default: start one on this machine."""
    submit: tuple[str, ...] = ()
    """For the executor slurm: parameters of submitit as NAME=VALUE, such as timeout_min=600 slurm_partition=gpu."""

    def run(self) -> int:
        from isoloss.studies.run.loop import Loop

        # one that is not there is refused before anything is written
        execute = executor_of(self)
        folder = self.study()
        # commands of other executors may start in another folder or on another machine
        if self.executor != "local":
            folder.path = folder.path.absolute()
        folder.check()
        # refuses a folder of something else before anything is written into it
        folder.exists()
        folder.check_code()
        settings = self.executor_options(folder, address=self.address, submit_parameters=submit_parameters(self.submit))
        # waiting, as several executors may be started on one new folder at the same time
        with files.lock(folder.path, wait=True):
            folder.write_plan()
            units = folder.plan()
        cores = os.cpu_count() or 1
        if self.executor == "local" and self.workers > cores:
            common.note(f"{self.workers} workers share {cores} cores: more workers than cores bring no speedup")
        loop = Loop(units, folder.path, settings, say=common.note)
        todo = len(loop.todo)
        try:
            execute(loop, settings)
        except KeyboardInterrupt:
            common.note("stopped; progress is saved. To resume:")
            common.note(f"  {self.run_command(folder)} --workers {self.workers}")
            return interrupts.status()
        loop.raise_failures()
        if todo:
            common.note(f"{todo} units done; writing the report")
        else:
            common.note(f"all {len(units)} units were already done")
        from isoloss.studies.page import report

        with files.lock(folder.path, wait=True):
            written = report(folder)
        return _emit_summary(folder, *written, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class _Work(_Working):
    """Help another process carry out a study, until no unit is left; that process writes the report."""

    def run(self) -> int:
        from isoloss.studies.run import local
        from isoloss.studies.run.loop import Loop

        folder = self.study()
        if not folder.exists():
            raise IsolossError(f"{folder.path} holds no study yet: {self.run_command(folder)} starts one")
        settings = self.executor_options(folder)
        loop = Loop(folder.plan(), folder.path, settings, say=common.note)
        try:
            local.run(loop, settings)
        except KeyboardInterrupt:
            common.note("stopped; progress is saved")
            return interrupts.status()
        loop.raise_failures()
        common.note(f"{loop.num_run_here} units done by this process; none are left")
        return 0


@dataclass(frozen=True, kw_only=True)
class _Plan(_Command):
    """Say what a study costs: its time, memory and disk space, and what each of its parts costs."""

    workers: int = 2
    """Number of workers that the expected time assumes."""

    def run(self) -> int:
        if self.workers < 1:
            raise IsolossError(f"--workers is {self.workers}; it must be at least 1")
        folder = self.study()
        folder.check()
        folder.exists()  # refuses a folder that holds something else
        states = _states(folder)
        if self.json:
            common.emit_json(_document(folder, states, self.workers))
        else:
            _print_plan(folder, states, self.workers)
        return 0


@dataclass(frozen=True, kw_only=True)
class _Show(_Command):
    """Say what a study is: its question, scales and claims; with --settings, every hyper-parameter."""

    settings: bool = False
    """Print each setting of training and measuring with its values, and which models have each value."""

    def run(self) -> int:
        folder = self.study()
        values = _settings(folder) if self.settings or self.json else {}
        if self.json:
            claims = {claim.id: claim.statement for claim in folder.study.claims}
            common.emit_json({"scale": folder.scale_name, "claims": claims, "settings": values})
            return 0
        if not self.settings:
            for paragraph in (folder.study.title or folder.study.name, *folder.study.lead):
                common.say_wrapped(paragraph)
            scales = [(name, scale.description) for name, scale in folder.study.scales.items()]
            common.print_table("Scales", ("scale", "what it takes"), scales, left=2)
            stated = [(claim.id, claim.role, claim.statement) for claim in folder.study.claims]
            common.print_table("Claims", ("claim", "role", "statement"), stated, left=3)
            return 0
        rows = [
            (setting, value, ", ".join(models)) for setting, found in values.items() for value, models in found.items()
        ]
        title = f"Settings of {folder.study.name} at scale {folder.scale_name}; no models named: all"
        common.print_table(title, ("setting", "value", "models"), rows, left=3)
        return 0


@dataclass(frozen=True, kw_only=True)
class _Status(_Command):
    """Show which units are done, which are running and which have failed."""

    watch: bool = False
    """Keep refreshing until all units are done."""

    def run(self) -> int:
        folder = _begun(self)
        if self.watch and self.json:
            raise IsolossError("--json prints one document, but --watch keeps printing: give only one of them")
        if self.watch:
            return _watch(folder)
        states = _states(folder)
        if self.json:
            common.emit_json(_document(folder, states, 2))
            return 0
        rows = [(*_cells(status), str(status.attempts) if status.attempts > 1 else "") for status in states]
        common.print_table(str(folder.path), (*STATUS_COLUMNS, "attempts"), rows, left=len(STATUS_COLUMNS))
        _say_done(folder, states)
        return 0


@dataclass(frozen=True, kw_only=True)
class _Report(_Command):
    """Write the page of a finished study."""

    partial: bool = False
    """Write it from the complete blocks of an unfinished study; verdicts follow once all blocks are complete."""

    def run(self) -> int:
        from isoloss.studies.page import report

        folder = _begun(self)
        complete = _complete(self, folder, partial=self.partial)
        with files.lock(folder.path):
            written = report(folder, complete)
        return _emit_summary(folder, *written, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class _Verify(_Command):
    """Check every file of a study against what it was made from; exit status 1 if a file is wrong."""

    def run(self) -> int:
        folder = _begun(self)
        # only now: a folder without a study is refused before the seconds that torch takes
        from isoloss.studies.verify import verify

        checks = []
        for name, problem in verify(folder):
            checks.append({"check": name, "problem": problem})
            if not self.json:
                # as they come: measuring again takes minutes
                common.say(f"{'ok  ' if problem is None else 'FAIL'}  {name}" + (f": {problem}" if problem else ""))
        failed = sum(check["problem"] is not None for check in checks)
        if self.json:
            document = {"study": folder.study.name, "folder": str(folder.path), "failed": failed, "checks": checks}
            common.emit_json(document)
        else:
            common.say(f"{len(checks)} checks, {failed} failed")
        return 1 if failed else 0


@dataclass(frozen=True, kw_only=True)
class _Export(_Command):
    """Write the results of a finished study into one small folder."""

    output: Path
    """Folder for the results. An earlier one of the same study is replaced."""
    formats: tuple[Literal["csv", "parquet", "markdown", "latex"], ...] = ("csv", "parquet", "markdown", "latex")
    """Which files of values (csv, parquet) and of tables (markdown, latex) to write."""

    def run(self) -> int:
        from isoloss.studies.export import export

        folder = _begun(self)
        _complete(self, folder)
        with files.lock(folder.path):
            export(folder, self.output, self.formats)
        sizes = [path.stat().st_size for path in self.output.rglob("*") if path.is_file()]
        if self.json:
            common.emit_json({"output": str(self.output), "files": len(sizes), "bytes": sum(sizes)})
        else:
            common.say(f"{self.output}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB")
        return 0


@dataclass(frozen=True, kw_only=True)
class _Compare:
    """Compare two exports of a study with different seeds, number by number."""

    first: options.Positional[Path]
    """An exported folder."""
    second: options.Positional[Path]
    """The exported folder of the same study with other seeds."""
    json: bool = False
    """Print one JSON document."""

    def run(self) -> int:
        from isoloss.studies.repetition import compare

        found = compare(self.first, self.second)
        if self.json:
            common.emit_json(found.to_dict())
            return 0
        a, b = found.seed_offsets
        title = f"{found.study} at scale {found.scale}: A with seed offset {a}, B with {b}"
        columns = ("what", "verdict of A", "verdict of B", "A", "B", "B − A", "95 % interval", "unit", "p (Holm)")
        common.print_table(title, columns, [_row(each) for each in found.numbers], left=3)
        common.say("")
        common.say_wrapped(found.conclusion)
        return 0


@dataclass(frozen=True, kw_only=True)
class _New:
    """Write NAME.py into the current folder: a study to start from."""

    name: options.Positional[str]
    """Name of the new study."""
    checkpoints: tuple[str, ...] = ()
    """Checkpoint folders, or names on the Hugging Face hub, that the study compares on --data."""
    data: Path | None = None
    """With --checkpoints: text (.txt, .jsonl, a folder, hf:NAME) or token ids (.npy) that they are measured on;
    default: python:docs, a text that comes with Python."""
    json: bool = False
    """Print one JSON document."""

    def run(self) -> int:
        stem = self.name.removesuffix(".py")
        if not re.fullmatch(r"[A-Za-z][\w-]*", stem, re.ASCII):
            raise IsolossError(
                f"the study's name is {self.name!r}; it must begin with a letter and have letters, digits, - and _"
            )
        if stem in STUDIES:
            raise IsolossError(f"there is a study {stem} already (isoloss ls studies): choose another name")
        if self.data is not None and not self.checkpoints:
            raise IsolossError("--data is what checkpoints are measured on: add --checkpoints")
        path = Path(f"{stem}.py")
        if path.exists():
            raise IsolossError(f"{path} is there already: choose another name")
        text = (
            _external_study(stem, self.checkpoints, self.data or Path(_DATA))
            if self.checkpoints
            else _TRAINED.format(name=stem)
        )
        files.write_text(path, text)
        if self.json:
            common.emit_json({"file": str(path)})
        else:
            common.say(f"{path} written. To run it:")
            common.say(f"  {common.command('study', 'run', path)}")
        return 0


def executor_of(args: Any) -> Executor:
    """Return the executor of these arguments; an error for options of another one, or if it is not installed."""
    for option, executor in (("submit", "slurm"), ("address", "ray")):
        if getattr(args, option) and args.executor != executor:
            raise IsolossError(f"--{option} is for --executor {executor}; the executor is {args.executor}")
    if args.executor in EXECUTOR_PACKAGES:
        require_package(EXECUTOR_PACKAGES[args.executor])
    found: Executor = EXECUTORS.load(args.executor)
    return found


def submit_parameters(words: Sequence[str]) -> dict[str, str | int | float]:
    """Return the parameters of submitit that `--submit` names."""
    pairs = dict[str, str | int | float]()
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise IsolossError(f"--submit takes NAME=VALUE, such as timeout_min=600, not {word!r}")
        pairs[name] = int(value) if value.isdecimal() else value
    return pairs


SUBCOMMANDS = {
    "new": _New,
    "show": _Show,
    "plan": _Plan,
    "run": _Run,
    "work": _Work,
    "status": _Status,
    "report": _Report,
    "verify": _Verify,
    "export": _Export,
    "compare": _Compare,
}


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    return int(options.parse(SUBCOMMANDS, "study", arguments, examples=EXAMPLES).run())


# --- a study to start from -------------------------------------------------------------------------------------------


_TRAINED = '''\
"""{name}: does dropout change how flat a model is, and how well it transfers?"""

from isoloss.lab.languages.config import PCFGConfig
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.studies import Experiment, Measurement, Scale, Study

LANGUAGE = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8)  # isoloss ls languages
MEASURED = Measurement(
    measures=("loss", "trace", "minimal-trace", "probe-prefix-2"),  # isoloss ls measures
    settings={{"num_train": 256, "num_test": 256, "probe_seeds": 2}},
)


def run(dropout, seed):
    model = ModelConfig(size="d16", dropout=dropout)  # isoloss ls models
    config = TrainConfig(language=LANGUAGE, model=model, steps=400, batch_size=64, checkpoints=(200,), seed=seed)
    return Experiment(config=config, measurements=(MEASURED,), group=f"dropout {{dropout}}")


# A model trained elsewhere: Experiment(config=ExternalCheckpoint(checkpoint="FOLDER", data="text.txt"), ...),
# with isoloss.studies.ExternalCheckpoint
RUNS = {{f"dropout-{{rate}}-seed-{{seed}}": run(rate, seed) for rate in (0.0, 0.2) for seed in (1, 2)}}

# Claims, each with its role, written before the runs: Study(claims=...); docs/studies.md has an example
STUDY = Study(
    name="{name}",
    title="Does dropout change how flat a model is, and how well it transfers?",
    scales={{"laptop": Scale(description="a minute", experiments=RUNS)}},
)
'''

_EXTERNAL = '''\
"""{name}: how flat are these checkpoints, and what is their loss?"""

from isoloss.studies import Experiment, ExternalCheckpoint, Measurement, Scale, Study

DATA = {data}
CHECKPOINTS = {{  # what each is called in tables: its folder, or its name on the Hugging Face hub
{checkpoints}
}}
MEASURED = Measurement(measures=("loss", "trace", "minimal-trace"))  # isoloss ls measures
# Several trainings of one kind: Experiment(..., group="KIND") and ExternalCheckpoint(..., seed=SEED) compare kinds
RUNS = {{
    name: Experiment(config=ExternalCheckpoint(checkpoint=checkpoint, data=DATA), measurements=(MEASURED,))
    for name, checkpoint in CHECKPOINTS.items()
}}

# Claims, each with its role, written before the runs: Study(claims=...); docs/studies.md has an example
STUDY = Study(
    name="{name}",
    title="Which of these checkpoints is flatter?",
    scales={{"all": Scale(description="a minute for small models", experiments=RUNS)}},
)
'''


def _external_study(name: str, checkpoints: Sequence[str], data: Path) -> str:
    if not (hub_datasets.is_dataset(data) or data.exists()):
        raise IsolossError(f"there is no data {data}{files.nearest(data)}")
    found = list(dict.fromkeys(expand_checkpoints(map(last_checkpoint, checkpoints), common.note)))
    for checkpoint in found:
        check_checkpoint(checkpoint)
    called: dict[str, str] = {}
    for checkpoint, title in short_names(found).items():
        plain = re.sub(r"[^\w.-]+", "-", title).strip("-.") or "checkpoint"
        numbered = (f"{plain}-{number}" for number in itertools.count(2))
        called[next(each for each in itertools.chain([plain], numbered) if each not in called)] = checkpoint
    # JSON's strings are Python's too; unlike `repr`, they are always in double quotes
    quoted = partial(json.dumps, ensure_ascii=False)
    return _EXTERNAL.format(
        name=name,
        data=quoted(str(data)),
        checkpoints="\n".join(f"    {quoted(key)}: {quoted(value)}," for key, value in called.items()),
    )


# --- units, how far along each is, and the time that is left ---------------------------------------------------------


def _states(folder: StudyFolder) -> list[UnitStatus]:
    from isoloss.studies.status import statuses

    return statuses(folder.plan(), folder.path)


def _document(folder: StudyFolder, states: Sequence[UnitStatus], workers: int) -> dict[str, object]:
    """Return the plan and the state of its units, with the time and the cost of what is left."""
    from isoloss.studies.status import remaining

    left = dataclasses.asdict(remaining(states, workers))
    return {
        "study": folder.study.name,
        "scale": folder.scale_name,
        "folder": str(folder.path),
        "workers": workers,
        "remaining_seconds": {name: round(value, 1) for name, value in left.items()},
        "needed_for": costs_of(states),
        "units": [
            {
                "unit": status.unit.name,
                **{
                    key: getattr(status, key) for key in ("state", "progress", "host", "since", "attempts", "last_line")
                },
                "after": list(status.unit.after),
                "needs": dataclasses.asdict(status.unit.needs),
                "expected_seconds": round(status.unit.seconds, 3),
                "memory_bytes": status.memory,
                "gpu_memory_bytes": status.gpu_memory,
                "disk_bytes": status.disk,
                "measured": status.is_measured,
                "shown_in": list(status.unit.shown_in),
                "arguments": list(status.unit.arguments),
            }
            for status in states
        ],
    }


def _settings(folder: StudyFolder) -> dict[str, dict[str, list[str]]]:
    """Return each setting's values, each with the models that have it, by language: none where all have it.

    Models of one name may differ, as one of them continues another. Of those that do, only some have a value.
    """
    from isoloss.lab.evaluation.measures.base import settings_of, used_settings

    found: dict[str, dict[str, dict[str, None]]] = {}
    languages: dict[str, dict[str, None]] = {}
    measuring: dict[str, list[tuple[str, Any]]] = {}  # by measurement: what its measures take, with defaults
    for name, experiment in folder.scale.experiments.items():
        config = configs.to_dict(experiment.config)
        language = (config.get("language") or {}).get("kind", "")
        continued = " (continued)" * bool(config.get("init_from"))
        model = ": ".join(filter(None, (language, f"{experiment.group or name}{continued}")))
        languages.setdefault(language, {})[model] = None
        values = [*_flat(config)]
        for part in experiment.measurements:
            key = f"{part.measures} {part.settings}"
            if key not in measuring:
                taken = [used_settings(each, settings_of(each, part.settings)) for each in part.measures]
                measuring[key] = [each for some in taken for each in _flat({"measures": some})]
            values += measuring[key]
        for setting, value in values:
            if setting.rpartition(".")[2] not in _OF_ONE_RUN:
                found.setdefault(setting, {}).setdefault(str(value), {})[model] = None

    def named(value: str, values: dict[str, dict[str, None]]) -> list[str]:
        others = {model for other, models in values.items() if other != value for model in models}
        alone = values[value].keys() - others
        whole = [language for language, models in languages.items() if models.keys() <= alone]
        if len(whole) == len(languages):
            return []
        rest = values[value].keys() - {model for language in whole for model in languages[language]}
        some = [f"{'' if model in alone else 'some of '}{model}" for model in values[value] if model in rest]
        return [f"{language}: all" for language in whole] + some

    return {
        setting: {value: named(value, values) for value in values}
        for setting, values in found.items()
        if values.keys() != {"None"}
    }


def _flat(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of nested tables, by dotted names."""
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {str(number): each for number, each in enumerate(value, start=1)}
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _print_plan(folder: StudyFolder, states: Sequence[UnitStatus], workers: int) -> None:
    from isoloss.studies.status import remaining

    common.say_wrapped(f"{folder.study.name} at scale {folder.scale_name}: {folder.scale.description}")
    _say_done(folder, states)
    disk = sum(status.disk or 0 for status in states)
    if all(status.state == "done" for status in states):
        used = sum(status.unit.seconds * status.unit.needs.all_cores for status in states)
        common.say_wrapped(f"All units are done: {rough(used / 3600)} core-hours and {rough(disk / MIB)} MiB on disk.")
        return
    left, measured = remaining(states, workers), sum(status.is_measured for status in states)
    basis = f"from the {measured} units measured here" if measured else "a rough guess, as no unit is measured yet"
    gpus = f" and {rough(left.gpu_seconds / 3600)} GPU-hours" if left.gpu_seconds else ""
    common.say_wrapped(
        f"Expected time for the rest ({basis}): {duration(left.with_workers)} with {workers} workers. "
        f"Cost: {rough(left.core_seconds / 3600)} core-hours{gpus}."
    )
    if unknown := sum(status.disk is None for status in states):
        common.say_wrapped(
            f"Memory and disk space are not known yet for {unknown} unit{'s' * (unknown > 1)}: they follow once a unit "
            "of each kind is done."
        )
    if disk:
        to_come = sum(status.disk or 0 for status in states if status.state != "done")
        common.say_wrapped(f"Disk space: {rough(disk / MIB)} MiB, {rough(to_come / MIB)} MiB of it not written yet.")
    if (secondary := folder.secondary_tests) is not None:
        common.say_wrapped(
            f"Secondary tests: {secondary}; p of each is adjusted for all of them, also where some cannot be made."
        )
    common.say("")
    print_costs(costs_of(states), "The rest, by what it is needed for")
    common.say_wrapped("A unit that several rows need counts in each.")


def print_costs(costs: Mapping[str, Mapping[str, float]], title: str) -> None:
    """Print the result of `costs_of` as a table."""
    columns = {
        "trained": [cost["trained"] for cost in costs.values()],
        "units": [cost["units"] for cost in costs.values()],
        "core-hours": [cost["core_hours"] for cost in costs.values()],
        "GPU-hours": [cost["gpu_hours"] for cost in costs.values()],
        "largest memory (MiB)": [cost["memory_bytes"] / MIB for cost in costs.values()],
        "largest GPU memory (MiB)": [cost["gpu_memory_bytes"] / MIB for cost in costs.values()],
    }
    # left out where nothing is needed or known
    shown = {name: map(rough, column) for name, column in columns.items() if any(column)}
    common.print_table(title, ("", *shown), zip(costs, *shown.values(), strict=True))


def costs_of(states: Sequence[UnitStatus]) -> dict[str, dict[str, float]]:
    """Return what the units that are left cost, by what they are needed for."""
    from isoloss.studies.status import by_purpose

    return {
        name: {
            "trained": sum(status.unit.arguments[0] == "train" for status in needed),
            "units": len(needed),
            "core_hours": sum(status.unit.seconds * status.unit.needs.all_cores for status in needed) / 3600,
            "gpu_hours": sum(status.unit.seconds * status.unit.needs.all_gpus for status in needed) / 3600,
            "memory_bytes": max(status.memory or 0 for status in needed),
            "gpu_memory_bytes": max(status.gpu_memory or 0 for status in needed),
        }
        for name, needed in by_purpose(states).items()
    }


def rough(amount: float) -> str:
    """Return a number with two digits at least, as estimates of cost have no more.

    Example:
        >>> from isoloss.cli.study import rough
        >>> rough(0.123), rough(2.6), rough(1234.5)
        ('0.12', '2.6', '1,234')
    """
    return f"{amount:,.0f}" if amount >= 10 or amount == int(amount) else f"{amount:.2g}"


def _cells(status: UnitStatus) -> tuple[str, ...]:
    when = (status.host, status.since.removesuffix("+00:00")) if status.state in BEGUN else ("", "")
    return status.unit.name, status.state, status.progress or status.last_line, *when


def _say_done(folder: StudyFolder, states: Sequence[UnitStatus]) -> None:
    common.say_wrapped(f"{_counts(states)} in {folder.path}; --json has the command of each")


def _counts(states: Sequence[UnitStatus]) -> str:
    count = Counter(status.state for status in states)
    more = "".join(f", {count[state]} {state}" for state in ("running", "failed") if count[state])
    return f"{count['done']} of {len(states)} units done{more}"


def _watch(folder: StudyFolder) -> int:
    """Show the running and failed units until all units are done, or those that failed for good hold up the rest."""
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    from isoloss.studies.status import remaining

    looks = 0  # in a row that found nothing running
    with Live(auto_refresh=False) if sys.stdout.isatty() else contextlib.nullcontext() as live:
        while True:
            states = _states(folder)
            running = sum(status.state == "running" for status in states)
            # with as many workers as units are running now, since nothing says how many there are
            line = f"{_counts(states)}; about {duration(remaining(states, max(1, running)).with_workers)} left"
            if live is None:
                common.say(line)
            else:
                shown = Table(*STATUS_COLUMNS, title=line)
                for status in states:
                    if status.state in ("running", "failed"):
                        shown.add_row(*(Text(printable(cell)) for cell in _cells(status)))
                live.update(shown, refresh=True)
            if all(status.state == "done" for status in states):
                return 0
            looks = 0 if running else looks + 1
            given_up = [status.unit.name for status in states if status.is_given_up]
            # between two units nothing runs for a moment: hence a second look
            if given_up and looks > 1:
                break
            time.sleep(LINE_SECONDS if live is None else WATCH_SECONDS)
    common.say_wrapped(f"Nothing is running, and what is left waits for failed units: {', '.join(given_up)}.")
    return 1


def duration(seconds: float) -> str:
    """Return a duration in words.

    Example:
        >>> from isoloss.cli.study import duration
        >>> duration(42), duration(600), duration(9000)
        ('42 s', '10 min', '2 h 30 min')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


# --- results ---------------------------------------------------------------------------------------------------------


def _begun(command: _Command) -> StudyFolder:
    """Return the study in its folder, which must be there."""
    folder = command.study()
    if not folder.exists():
        start, nearest = command.run_command(folder), files.nearest(folder.path)
        raise IsolossError(f"{folder.path} holds no study: {start} starts one{nearest}")
    return folder


def _complete(command: _Command, folder: StudyFolder, *, partial: bool = False) -> tuple[int, ...]:
    """Return the complete blocks of a study; one that is not finished is refused, unless some blocks will do."""
    missing, complete = folder.progress()
    if not missing or (partial and complete):
        return complete
    blocks = len({experiment.block for experiment in folder.scale.experiments.values()})
    count = f"{len(missing)} units are" if len(missing) > 1 else "1 unit is"
    done = f", and {len(complete)} of {blocks} blocks are complete" if blocks > 1 else ""
    raise IsolossError(f"{count} not done (first: {missing[0]}){done}; {command.run_command(folder)} resumes the study")


def _emit_summary(folder: StudyFolder, page: Path, results: Results, summary: Summary, *, as_json: bool) -> int:
    if as_json:
        about = {"study": folder.study.name, "scale": folder.scale_name, "report": str(page)}
        blocks = {"blocks": results.blocks, "blocks_done": results.blocks_done}
        common.emit_json({**about, **blocks, **summary.to_dict()})
        return 0
    print_summary(folder.study.title or folder.study.name, summary)
    if results.blocks_done < results.blocks:
        common.say(f"Partial: {results.blocks_done} of {results.blocks} blocks are done. {folder.follows}".rstrip())
    common.say(f"page: {page}")
    return 0


def print_summary(title: str, summary: Summary) -> None:
    """Print a study's answer and a line for each claim; the page, an export and --json have the numbers behind it."""
    from isoloss.report.html import SIGNS
    from isoloss.studies.answer import claim_lines

    common.say_wrapped(title)
    for card in summary.answer:
        common.say("")
        common.say_wrapped(f"{card.label}{'' if card.label.endswith('?') else ':'} {card.value}")
        common.say_wrapped(card.detail, indent=4)
    common.say("")
    by_words: dict[tuple[str, str], list[str]] = {}  # what is not tested for one reason is one line
    for result in summary.claims if summary.answer else ():
        for tone, case, words in claim_lines(result):
            name = f"{result.claim.id}, {case}" if case else result.claim.id
            by_words.setdefault((SIGNS[tone], words), []).append(name)
    for (sign, words), names in by_words.items():
        common.say_wrapped(f"{sign} {'; '.join(names)}: {words}")
    if summary.warning:
        common.say_wrapped(summary.warning)
    if summary.missed is not None:
        common.say_wrapped(". ".join(filter(None, (summary.missed.line, summary.missed.next_step))))


def _row(each: Repeated) -> tuple[str, ...]:
    from isoloss.studies.results import UNITS

    name = ", ".join(each.name)
    verdicts = each.verdicts or ("", "")
    numbers = tuple("" if one is None else number(one) for one in (each.first, each.second))
    if (d := each.difference) is None or each.p_holm is None:
        return name, *verdicts, *numbers, "", "", "", ""
    low, high = (rounded(end, d.stderr).split(" ±")[0] for end in d.ci95)
    difference = rounded(d.value, d.stderr)
    return name, *verdicts, *numbers, difference, f"{low} to {high}", UNITS.get(d.unit, d.unit), f"{each.p_holm:.2g}"
