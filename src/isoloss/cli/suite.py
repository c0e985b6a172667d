"""`isoloss suite`: many checkpoints measured in the same way; which measure predicts which outcome at the same loss?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss import config as configs
from isoloss import files, interrupts
from isoloss.cli import common, options
from isoloss.cli.study import costs_of, duration, executor_of, print_costs, rough, submit_parameters
from isoloss.errors import IsolossError, naming_extras, require_package
from isoloss.lab.evaluation.measures.base import measure_class
from isoloss.registry import MEASURES
from isoloss.suites.config import SuiteConfig, members, replaced
from isoloss.suites.table import PAGE, RECORD

if TYPE_CHECKING:
    from isoloss.statistics.association import Association
    from isoloss.suites.run import SuiteFolder

EXAMPLES = [
    (
        "isoloss suite 'lab/tiny-seed{seed}@step{step}' --data text.txt --output tiny",
        "several seeds, each at several steps",
    ),
    ("isoloss suite suite.toml --plan", "the download size, time and memory of a suite in a file"),
    ("isoloss suite tiny --import 'lm/samples_*.jsonl' --predict lastword.acc", "adds outcomes from lm-eval"),
    ("isoloss suite 'runs/{recipe}-{seed}/checkpoints/step-{step}' --output out --levels recipe", "runs of isoloss"),
    ("isoloss suite 'runs/*/checkpoint-*' --data docs=python:docs code=src --output out", "on two texts"),
]
COMMON = "checkpoints output data measures outcomes cluster along levels import_ predict plan num_sequences workers"
_FEW = 8  # problems, and pairs that are not shown, that are printed
_GUESS = "a guess: 6 operations per parameter, token and measure, at 40 GFLOP/s (CPU) or 40 TFLOP/s (GPU)"
_IN_CONFIG = ("measures", "outcomes", "cluster", "along", "levels", "loss_margin", "device", "trust_remote_code")


@dataclass(frozen=True)
class Args:
    """Measure many checkpoints in the same way: which measure predicts which outcome at the same loss?

    Writes one table and one page. The same command resumes. If a checkpoint cannot be loaded or a measure does not
    apply, its cells are empty, with the reason, and everything else is still measured.
    """

    checkpoints: options.Positional[tuple[str, ...]]
    """Checkpoint folders, names on the Hugging Face hub (NAME@REVISION) and patterns of either, in which {seed} becomes
    the column seed and * matches anything; or one TOML file with the settings; or the folder of a suite."""
    output: Path | None = None
    """The folder of the suite; default for a TOML file: its name without .toml."""
    data: tuple[str, ...] = ()
    """Texts to measure on, as PATH or NAME=PATH: .txt, .jsonl, a folder, hf:NAME or python:docs, or token ids (.npy);
    default: the language of the checkpoints' runs, or else python:docs."""
    measures: tuple[str, ...] = ()
    """Names of measures (isoloss ls measures); default: trace, minimal trace, the rises of the loss with 4-bit weights
    and under noise, and effective rank and participation ratio. The loss is always measured."""
    outcomes: tuple[str, ...] = ()
    """What to predict: measures such as probe-sst2 or lm-eval-TASK, or imported outcomes; default: the rises."""
    cluster: str = ""
    """The label of the independent units, such as seed; default: each training run is one."""
    along: str = ""
    """The label of the position in a training run; default: step."""
    levels: str = ""
    """A label across which the answer must also hold, such as optimizer or recipe."""
    loss_margin: float = SuiteConfig.loss_margin
    """How far apart losses may be and still count as the same, in nats per predicted token."""
    import_: tuple[str, ...] = ()
    """Outcomes that were measured elsewhere, kept in the folder: results of lm-evaluation-harness (samples_*.jsonl,
    results_*.json, or their folder), tables (.csv, .tsv) with a column checkpoint or the labels, or patterns."""
    predict: tuple[str, ...] = ()
    """Columns of the table to predict; default: the outcomes of the suite, else the imported ones, else the rises."""
    plan: bool = False
    """Print the download size, the time and the memory that the suite needs, and stop."""
    executor: str = "local"
    """What measures the checkpoints (isoloss ls executors)."""
    workers: int = 2
    """How many checkpoints are measured at the same time, one core each; for the executor slurm: number of workers."""
    address: str = ""
    """For the executor ray: address of a cluster; default: start one on this machine."""
    submit: tuple[str, ...] = ()
    """For the executor slurm: parameters of submitit as NAME=VALUE."""
    device: str = "auto"
    """auto, cpu, cuda."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoints. Only for checkpoints that you trust."""
    json: bool = False
    """Print one JSON document."""
    work: bool = False
    """Help another process measure a suite until no checkpoint is left."""
    member: str = ""
    """Measure only this checkpoint of a suite; for the processes that isoloss starts."""


def arguments_class() -> type:
    """Return the arguments with the settings of all measures."""
    return options.with_measures(Args, MEASURES.loaded(measure_class))


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args: Any = options.parse(arguments_class(), "suite", arguments, examples=EXAMPLES, common=COMMON)
    from isoloss.suites.outcomes import read_outcomes
    from isoloss.suites.run import SuiteFolder

    if args.member or args.work:
        folder = SuiteFolder.open(Path(args.checkpoints[0]))
        with contextlib.chdir(folder.directory):
            return _measure(folder, args.member) if args.member else _run(folder, args)
    folder = _folder(args)
    imported = [Path(each).absolute() for each in args.import_]
    with contextlib.chdir(folder.directory):
        # before anything is measured: polars is installed, and every file can be read
        require_package("polars")
        outcomes = read_outcomes(imported, folder.members)
        folder.check_outcomes(outcomes, args.predict)
        if args.plan:
            return _plan(folder, args)
        if few := _too_few(folder):
            common.note(few)
        status = _run(folder, args)
        if status == interrupts.status():
            return status
        if outcomes:
            folder.keep(outcomes)
        return _finish(folder, args, status, common.command("suite", *arguments))


def _folder(args: Any) -> SuiteFolder:
    """Return the suite that is named, with the settings of the command line."""
    from isoloss.suites.run import SuiteFolder

    if not args.checkpoints:
        raise IsolossError("no checkpoint is named: give folders, names on the Hugging Face hub, patterns or a file")
    first, path = Path(args.checkpoints[0]), args.output
    given = {name: getattr(args, name) for name in _IN_CONFIG}
    given |= {"texts": dict(map(_text, args.data)), "inputs": args.inputs, "settings": args.measure}
    changes = {name: value for name, value in given.items() if value != getattr(Args, name, {})}
    stored = None
    if len(args.checkpoints) == 1 and (first / RECORD).is_file():
        if path is not None:
            raise IsolossError(f"{first} is the folder of a suite: leave out --output")
        stored = SuiteFolder.open(first)
        if not changes:
            return stored
        path, config = stored.path, stored.config
    elif len(args.checkpoints) == 1 and first.suffix == ".toml":
        config = configs.read_toml(SuiteConfig, first)
        if path is None:
            path = Path(first.stem)
            common.note(f"the folder of the suite is {path}")
    else:
        config = SuiteConfig(checkpoints=args.checkpoints)
    if path is None:
        is_other = f"; {first} is not the folder of a suite" if len(args.checkpoints) == 1 and first.is_dir() else ""
        raise IsolossError(f"--output is missing: name a folder for the suite{is_other}")
    if not (path / RECORD).exists():
        files.check_new(path)
    directory = stored.directory if stored else os.getcwd()
    with contextlib.chdir(directory):
        config = replaced(config, changes)
        found = tuple(members(config, common.note))
        folder = SuiteFolder(path.absolute(), config, found, config.sources(), directory)
    if stored is None and (path / RECORD).exists() and SuiteFolder.open(path).config != config:
        common.note(f"{path} has a suite with other settings: its table and page are replaced, its cells are kept")
    return folder


def _text(word: str) -> tuple[str, str]:
    """Return the name and the place of a text."""
    name, equals, place = word.partition("=")
    return (name, place) if equals and not Path(word).exists() else (Path(word).stem or word, word)


def _measure(folder: SuiteFolder, name: str) -> int:
    import torch

    torch.set_num_threads(1)
    member = next((each for each in folder.members if each.folder == name), None)
    if member is None:
        raise IsolossError(f"{folder.path} has no checkpoint {name}")
    folder.measure(member)
    return 0


def _run(folder: SuiteFolder, args: Any) -> int:
    """Measure what is left of a suite; the status is 2 if checkpoints could not be measured."""
    from isoloss.studies.run.loop import Loop, Options

    execute = executor_of(args)
    settings = Options(
        workers=args.workers,
        address=args.address,
        submit_parameters=submit_parameters(args.submit),
        worker_arguments=("suite", str(folder.path), "--work"),
    )
    if not args.work:
        folder.write()
    loop = Loop(folder.units(), folder.path, settings, say=common.note)
    try:
        execute(loop, settings)
    except KeyboardInterrupt:
        common.note("stopped; the results so far are kept, and the same command resumes")
        return interrupts.status()
    except IsolossError as error:
        # a checkpoint that cannot be loaded ends the workers of Slurm without a unit done: the table has its reason
        if not all((folder.path / "checkpoints" / unit.name / "problem.json").exists() for unit in loop.todo):
            raise
        common.note(str(error))
    return 0 if not loop.todo else 2


def _finish(folder: SuiteFolder, args: Any, status: int, command: str) -> int:
    """Write the table and the page, and print the answers."""
    with naming_extras():
        from isoloss.suites.page import suite_page

    table = folder.table()
    path, page = table.write(folder.path), folder.path / PAGE
    answers = table.associations(args.predict)
    files.write_text(page, suite_page(table, answers, command=command))
    problems = table.problems()
    if args.json:
        found = [
            {"measure": each.measure, "outcome": each.outcome, "shown": each.shown, "answer": each.sentence()}
            for each in answers
        ]
        about = {"folder": str(folder.path), "table": str(path), "page": str(page), "checkpoints": len(folder.members)}
        common.emit_json({**about, "answers": found, "problems": problems})
        return status
    for sentence in _sentences(answers):
        common.say_wrapped(sentence)
    common.say(f"{path}: {len(folder.members)} checkpoints, {len(table.frame):,} rows")
    common.say(f"the page is {page}")
    for problem in problems[:_FEW]:
        common.say_wrapped(f"empty: {problem}")
    if len(problems) > _FEW:
        common.say(f"{len(problems) - _FEW} more reasons are in the column 'problem' of the table")
    return status


def _too_few(folder: SuiteFolder) -> str:
    """Return that the suite will have no answers, because it has too few clusters; empty if it has enough."""
    from isoloss.statistics.association import clusters_to_show

    count, cluster, least = folder.num_clusters(), folder.config.cluster or "training", clusters_to_show(1)
    if least is None or count >= least:
        return ""
    told = (
        f"{count} {cluster}{'s' * (count > 1)}: the suite will have the numbers, but which measure predicts which "
        f"outcome takes at least {least}"
    )
    return f"{told}; to compare two trainings, see isoloss compare" if count == 2 else told


def _sentences(answers: Sequence[Association]) -> Iterator[str]:
    """Yield the answers that are shown, the strongest others, and a sentence for each reason why pairs are unknown."""
    from isoloss.statistics.association import strongest_first

    known = strongest_first(each for each in answers if each.pearson)
    count = sum(each.shown for each in answers) + _FEW
    yield from (each.sentence(with_advice=False) for each in known[:count])
    if len(known) > count:
        yield f"{len(known) - count} more pairs are not shown, with weaker correlations: they are on the page."
    # once, as it is the same for all
    yield from (f"{advice}." for advice in dict.fromkeys(each.advice for each in known) if advice)
    for problem in dict.fromkeys(each.problem for each in answers if each.problem):
        first, *more = [each for each in answers if each.problem == problem]
        many = f"{1 + len(more)} of {len(answers)} pairs cannot be tested, such as {first.measure} and {first.outcome}"
        yield f"At the same loss, {many}: {problem}." if more else first.sentence()


def _plan(folder: SuiteFolder, args: Any) -> int:
    """Print the cost of what is left of a suite, by the number of parameters."""
    from isoloss.studies.status import remaining, statuses
    from isoloss.suites.sizes import sizes

    known = sizes(folder.config, folder.members)
    states = statuses(folder.units({name: size.parameters for name, size in known.items()}), folder.path)
    measured = [state.unit.group for state in states if state.is_measured]
    costs = costs_of([state for state, size in zip(states, known.values(), strict=True) if size.parameters is not None])
    for unit in (state.unit for state in states):
        # until a size is measured, `statuses` takes the memory from other sizes
        if unit.group in costs and unit.group not in measured and unit.expected is not None:
            costs[unit.group]["memory_bytes"] = unit.expected.memory or 0
    left = remaining(states, args.workers)
    about: dict[str, Any] = {
        "checkpoints": len(states),
        "download_bytes": sum(size.download or 0 for size in known.values()),
        "seconds": left.with_workers,
        "sizes": costs,
        "sizes_from": sorted({size.source for size in known.values() if size.parameters is not None}),
        "time_from": f"{len(measured)} checkpoints measured here" if measured else _GUESS,
        "unknown": [name for name, size in known.items() if size.parameters is None],
        "clusters": folder.num_clusters(),
    }
    if args.json:
        common.emit_json(about)
        return 0
    done = sum(state.state == "done" for state in states)
    common.say(f"{len(states)} checkpoints, {done} done, to be kept in {folder.path}")
    if few := _too_few(folder):
        common.say_wrapped(few)
    if costs:
        print_costs(costs, "The rest, by size")
        common.say_wrapped(
            f"To download: {rough(about['download_bytes'] / 1e9)} GB. Time: {duration(left.with_workers)} with "
            f"{args.workers} workers. Sizes are from {' and '.join(about['sizes_from'])}, times and memory from "
            f"{about['time_from']}."
        )
    if unknown := about["unknown"]:
        common.say_wrapped(
            f"Not on this machine: {len(unknown)} of the checkpoints, so their size and time are unknown (first: "
            f"{unknown[0]}). Train or download them first, or give the table `parameters`."
        )
    return 0
