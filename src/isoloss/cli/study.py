"""`isoloss study`: plan, run, inspect, report or verify a whole study, export its results, and compare two exports."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from isoloss import files, interrupts
from isoloss.cli import common, options
from isoloss.errors import IsolossError
from isoloss.registry import EXECUTORS
from isoloss.runs import Run
from isoloss.studies.leases import EXPIRY_SECONDS

if TYPE_CHECKING:
    from isoloss.studies.claims import ClaimResult
    from isoloss.studies.folder import StudyFolder
    from isoloss.studies.job import Options
    from isoloss.studies.jobs import Executor
    from isoloss.studies.results import Summary

EXAMPLES = [
    ("isoloss study run same-loss --scale laptop", "everything, ending with a report; the same command resumes"),
    ("isoloss study run my_study.py", "your own study: a Python file that defines an isoloss.studies.Study"),
    ("isoloss study new my_study", "write such a file, my_study.py, to start from"),
    ("isoloss study new mine --checkpoints A B --data text.txt", "one that compares checkpoints trained elsewhere"),
    ("isoloss study status same-loss --scale laptop", "which units are done, which have started"),
    ("isoloss study verify same-loss --scale laptop", "check every file against what it was made from"),
    ("isoloss study run algorithms --seed-offset 1", "a repetition with other seeds, in a folder of its own"),
    ("isoloss study export algorithms --output results/a", "the results of a finished study, in one small folder"),
    ("isoloss study compare results/a results/b", "compare a study with its repetition"),
]

WORK_OPTIONS = {"--workers", "--retries", "--fail-fast", "--expiry"}  # options of work
RUN_OPTIONS = WORK_OPTIONS | {"--executor", "--submit", "--address"}
Action = Literal["new", "plan", "run", "work", "status", "report", "verify", "export", "compare"]


@dataclass(frozen=True)
class Args:
    """Begin, plan, run, inspect, report, verify, export or compare a study. Its whole state is in its folder."""

    action: tyro.conf.Positional[Action]
    """new: write NAME.py, a study to start from; plan: list the units; run: run them; work: help another process run
    them; status: show progress; report: write the page; verify: check the files; export: write the results to --output;
    compare: compare two exports."""
    name: tyro.conf.Positional[str]
    """The study (isoloss ls studies) or the path of a Python file that defines one, which is code and is run; for
    compare: an exported folder. For new: what the study is to be called."""
    other: tyro.conf.Positional[Path | None] = None
    """For compare: the exported folder of the same study with other seeds."""
    scale: str | None = None
    """Scale of the study (isoloss ls studies); default: the study's first scale."""
    seed_offset: int = 0
    """Repeat the study with different seeds: 1, 2, ...; 0 is the study itself."""
    folder: Path | None = None
    """Folder of the study; default: runs/NAME-SCALE, or runs/NAME-SCALE-seeds-N for a seed offset of N."""
    checkpoints: tuple[str, ...] = ()
    """For new: checkpoint folders, or names on the Hugging Face hub, that the study compares on --data."""
    data: Path | None = None
    """For new, with --checkpoints: text (.txt, .jsonl or a folder) or token ids (.npy) that they are measured on."""
    output: Path | None = None
    """For export: folder for the results. An earlier one of the same study is replaced."""
    formats: tuple[Literal["csv", "parquet", "markdown", "latex"], ...] = ("csv", "parquet", "markdown", "latex")
    """For export: which files of values (csv, parquet) and of tables (markdown, latex) to write; default: all."""
    workers: int = 2
    """Cores that units may use at the same time; most units use one. For the executor slurm: number of workers."""
    executor: str = "local"
    """What runs the units (isoloss ls executors)."""
    retries: int = 2
    """How many times to retry a unit that fails."""
    fail_fast: bool = False
    """Start no further units once one has failed."""
    address: str = ""
    """For the executor ray: address of a cluster, such as auto; default: start one on this machine."""
    submit: tuple[str, ...] = ()
    """For the executor slurm: parameters of submitit as NAME=VALUE, such as timeout_min=600 slurm_partition=gpu."""
    expiry: float = EXPIRY_SECONDS
    """A process without a heartbeat for this many seconds is presumed dead, and others take over its units; give more
    on a slow network file system."""
    watch: bool = False
    """For status: keep refreshing until all units are done."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args = options.parse(Args, "study", arguments, examples=EXAMPLES)
    _check_options(args, arguments)
    if args.action == "compare":
        from isoloss.cli import study_results

        return study_results.compare(Path(args.name), args.other, as_json=args.json)
    if args.action == "new":
        from isoloss.cli import study_new

        return study_new.write(args.name, args.checkpoints, args.data, as_json=args.json)
    if Run(Path(args.name)).exists:
        raise IsolossError(f"{args.name} is a run, not a study: {common.command('show', args.name)} says what it holds")
    from isoloss.studies.folder import StudyFolder
    from isoloss.studies.spec import load_study

    study = load_study(args.name)
    scale = args.scale or next(iter(study.scales))
    seeds = f"-seeds-{args.seed_offset}" if args.seed_offset else ""
    path = args.folder or Path("runs") / f"{study.name}-{scale}{seeds}"
    if args.executor != Args.executor:  # commands may start in another folder or on another machine
        path = path.absolute()
    folder = StudyFolder(study, path, scale, args.seed_offset)
    if args.action in ("plan", "status"):
        from isoloss.cli import study_progress

        start = _run_command(args, folder)
        return study_progress.show(folder, args.action, start, args.workers, watch=args.watch, as_json=args.json)
    actions = {"run": _run, "work": _work, "report": _report, "verify": _verify}
    return {**actions, "export": _export}[args.action](args, folder)


def _check_options(args: Args, arguments: list[str]) -> None:
    """Refuse options that the action does not use."""
    for option in (word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")):
        if args.action == "compare" and option != "--json":
            raise IsolossError(f"{option} is not for study compare, which only reads two exports")
        if args.action == "new" and option not in ("--checkpoints", "--data", "--json"):
            raise IsolossError(f"{option} is not for study new, which only writes a file")
        if args.action != "new" and option in ("--checkpoints", "--data"):
            raise IsolossError(f"{option} is for study new, not for study {args.action}: it stands in the study's file")
        takes = {"run": RUN_OPTIONS, "work": WORK_OPTIONS, "plan": {"--workers"}}
        if option in RUN_OPTIONS - takes.get(args.action, set()):
            raise IsolossError(f"{option} is for study run, not for study {args.action}")
        if args.action != "status" and option == "--watch":
            raise IsolossError(f"--watch is for study status, not for study {args.action}")
        if args.action != "export" and option == "--output":
            raise IsolossError(f"--output is for study export: study {args.action} writes into the study's folder")
        if args.action != "export" and option == "--formats":
            raise IsolossError(f"--formats is for study export, not for study {args.action}")
    if args.workers < 1:
        raise IsolossError(f"--workers is {args.workers}; it must be at least 1")
    for option, executor in (("submit", "slurm"), ("address", "ray")):
        if getattr(args, option) and args.executor != executor:
            raise IsolossError(f"--{option} is for --executor {executor}; the executor is {args.executor}")
    if args.other is not None and args.action != "compare":
        raise IsolossError(f"unexpected argument {args.other}: study {args.action} takes one study")


def _run(args: Args, folder: StudyFolder) -> int:
    from isoloss.studies.attempts import adopt
    from isoloss.studies.growing import GrowingPage
    from isoloss.studies.jobs import Jobs
    from isoloss.studies.plan import in_order

    folder.check()
    folder.exists()  # refuses a folder that is not this study's before anything is written
    execute: Executor = EXECUTORS.load(args.executor)
    options = _options(args, folder)
    with files.lock(folder.path, wait=True):
        folder.write_plan()
        units = folder.plan()
        adopt(units)
    if args.executor == "local" and args.workers > (os.cpu_count() or 1):
        common.note(f"{args.workers} workers share {os.cpu_count()} cores: more workers than cores bring no speedup")
    jobs = Jobs(in_order(units), folder.path, options, say=common.note, on_done=GrowingPage(folder, units, common.note))
    todo = len(units) - jobs.num_done
    try:
        execute(jobs, options)
    except KeyboardInterrupt:
        common.note("stopped; progress is saved. To resume:")
        common.note(f"  {_run_command(args, folder)} --workers {args.workers}")
        return interrupts.status()
    jobs.raise_failures()
    if todo:
        common.note(f"{todo} units done; writing the report")
    else:
        common.note(f"all {len(units)} units were already done")
    with files.lock(folder.path, wait=True):
        page = folder.report()
    return _emit_summary(args, folder, page)


def _options(args: Args, folder: StudyFolder) -> Options:
    """Return the options of the executor, including the command that lets another process help."""
    from isoloss.studies.job import Options

    name = str(Path(args.name).absolute()) if args.name.endswith(".py") else args.name
    work = ["study", "work", name, *folder.options, "--folder", str(folder.path.absolute())]
    work += ["--retries", str(args.retries), "--expiry", str(args.expiry)]
    work += ["--fail-fast"] if args.fail_fast else []
    pairs = dict[str, str | int | float]()
    for text in args.submit:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise IsolossError(f"--submit takes NAME=VALUE, such as timeout_min=600, not {text!r}")
        pairs[name] = int(value) if value.isdecimal() else value
    return Options(
        workers=args.workers,
        retries=args.retries,
        keep_going=not args.fail_fast,
        expiry=args.expiry,
        worker_arguments=tuple(work),
        submit_parameters=pairs,
        address=args.address,
    )


def _work(args: Args, folder: StudyFolder) -> int:
    """Carry out units of a study that another process runs, until none is left; the other process writes the report."""
    from isoloss.studies.executors import local
    from isoloss.studies.jobs import Jobs
    from isoloss.studies.plan import in_order

    if not folder.exists():
        raise IsolossError(f"{folder.path} holds no study yet: {_run_command(args, folder)} starts one")
    options = _options(args, folder)
    jobs = Jobs(in_order(folder.plan()), folder.path, options, say=common.note)
    try:
        local.run(jobs, options)
    except KeyboardInterrupt:
        common.note("stopped; progress is saved")
        return interrupts.status()
    jobs.raise_failures()
    common.note(f"{jobs.num_run_here} units done by this process; none are left")
    return 0


def _run_command(args: Args, folder: StudyFolder) -> str:
    words: list[object] = ["study", "run", args.name, *folder.options, "--folder", folder.path]
    for option in ("executor", "address", "retries", "expiry"):
        if (value := getattr(args, option)) != getattr(Args, option):
            words += [f"--{option}", value]
    words += ["--fail-fast"] if args.fail_fast else []
    words += ["--submit", *args.submit] if args.submit else []
    return common.command(*words)


def _report(args: Args, folder: StudyFolder) -> int:
    folder.exists()  # or refuses
    (missing, complete), first = _progress(folder), folder.study.first_page_blocks
    if missing and (first is None or len(complete) < first):
        raise _unfinished(args, folder)
    with files.lock(folder.path):
        page = folder.report(complete)
    return _emit_summary(args, folder, page, complete)


def _export(args: Args, folder: StudyFolder) -> int:
    from isoloss.cli import study_results

    if args.output is None:
        raise IsolossError("--output is required for study export: the folder for the results")
    folder.exists()  # or refuses
    if _progress(folder)[0]:
        raise _unfinished(args, folder)
    with files.lock(folder.path):
        return study_results.export(folder, args.output, args.formats, as_json=args.json)


def _progress(folder: StudyFolder) -> tuple[list[str], tuple[int, ...]]:
    """Return the names of the units that are not done, and the numbers of the blocks that are complete."""
    from isoloss.studies.growing import complete_blocks

    units = folder.plan()
    missing = [unit.name for unit in units if not unit.done()]
    return missing, complete_blocks(units, {unit.name for unit in units} - set(missing))


def _unfinished(args: Args, folder: StudyFolder) -> IsolossError:
    """Return the error for a study that does not have enough results yet."""
    missing, complete = _progress(folder)
    blocks = len({experiment.block for experiment in folder.scale.experiments.values()})
    count = f"{len(missing)} units are" if len(missing) > 1 else "1 unit is"
    done = f", and {len(complete)} of {blocks} blocks are complete" if blocks > 1 else ""
    return IsolossError(f"{count} not done (first: {missing[0]}){done}; {_run_command(args, folder)} resumes the study")


def _emit_summary(args: Args, folder: StudyFolder, page: Path, complete: Collection[int] | None = None) -> int:
    results = folder.results(complete)
    summary = folder.summary(results)
    if args.json:
        about = {"study": folder.study.name, "scale": folder.scale_name, "report": str(page)}
        blocks = {"blocks": results.blocks, "blocks_done": results.blocks_done}
        common.emit_json({**about, **blocks, **summary.to_dict()})
        return 0
    print_summary(f"{folder.study.name} at scale {folder.scale_name}", summary)
    if results.blocks_done < results.blocks:
        common.say(f"interim: {results.blocks_done} of {results.blocks} blocks are done; verdicts follow when all are")
    common.say(f"report: {page}")
    for sentence in summary.answer:
        common.say_wrapped(sentence)
    return 0


def print_summary(heading: str, summary: Summary) -> None:
    """Print a study's tables of estimates, then every claim: its verdict, and the numbers behind it case by case."""
    for table in summary.tables:
        columns, rows = table.cells()
        common.print_table(f"{heading}, {table.title}", columns, rows, left=table.left)
        common.say("")
    for result in summary.claims:
        _print_claim(result)
    if summary.claims_file:
        common.say_wrapped(str(summary.claims_file))
    if summary.warning:
        common.say_wrapped(summary.warning)


def _print_claim(result: ClaimResult) -> None:
    """Print a claim: its verdict, the numbers behind it case by case, and what was compared, or why nothing was."""
    from isoloss.studies.claim_table import VERDICT, claim_table, explanations

    common.say_wrapped(f"{result.claim.id}: {result.verdict}")
    common.say_wrapped(result.claim.statement, indent=4)
    if any(answer.numbers for answer in result.answers):
        columns, rows = claim_table(result)
        common.print_table("", columns, rows, left=columns.index(VERDICT) + 1)
    for explanation in filter(None, explanations(result)):
        common.say_wrapped(explanation, indent=4)
    common.say("")


def _verify(args: Args, folder: StudyFolder) -> int:
    """Check the files; return status 1 if one of them is not what it should be."""
    checks = []
    for name, problem in folder.verify():
        checks.append({"check": name, "problem": problem})
        if not args.json:
            common.say(f"{'ok  ' if problem is None else 'FAIL'}  {name}" + (f": {problem}" if problem else ""))
    failed = sum(check["problem"] is not None for check in checks)
    if args.json:
        document = {"study": folder.study.name, "folder": str(folder.path), "failed": failed, "checks": checks}
        common.emit_json(document)
    else:
        common.say(f"{len(checks)} checks, {failed} failed")
    return 1 if failed else 0
