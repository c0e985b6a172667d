"""`isoloss study`: plan, run, status, report or verify a whole study."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from isoloss import files, interrupts
from isoloss.cli import common
from isoloss.errors import IsolossError
from isoloss.registry import EXECUTORS
from isoloss.runs import Run

if TYPE_CHECKING:
    from isoloss.studies.claims import ClaimResult
    from isoloss.studies.folder import StudyFolder
    from isoloss.studies.plan import Executor, Unit
    from isoloss.studies.results import Summary

EXAMPLES = [
    ("isoloss study run same-loss --scale laptop", "everything, ending with a report; the same command resumes"),
    ("isoloss study run my_study.py", "a study of your own: a Python file that has an isoloss.studies.Study"),
    ("isoloss study status same-loss --scale laptop", "what is done, what is begun and what is not"),
    ("isoloss study verify same-loss --scale laptop", "check every file against what it was made from"),
]

Action = Literal["plan", "run", "status", "report", "verify"]


@dataclass(frozen=True)
class Args:
    """Plan, run, look at, report or verify a study. Its whole state is in its folder."""

    action: tyro.conf.Positional[Action]
    """plan: what would be done; run: do it; status: how far it is; report: write the page; verify: check the files."""
    name: tyro.conf.Positional[str]
    """The study (isoloss ls studies), or the path of a Python file that has one."""
    scale: str | None = None
    """Scale of the study (isoloss ls studies); default: the study's first scale."""
    folder: Path | None = None
    """Folder of the study; default: runs/NAME-SCALE."""
    workers: int = 2
    """Units run at the same time, one thread each."""
    executor: str = "local"
    """What runs the units: local, or one that an installed package registers."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args = common.parse(Args, "study", arguments, examples=EXAMPLES)
    if args.action in ("report", "verify"):
        options = [word for word in arguments if word.partition("=")[0] in ("--executor", "--workers")]
        if options:
            raise IsolossError(f"{options[0]} is for study run: study {args.action} starts no units")
    if Run(Path(args.name)).exists:
        raise IsolossError(f"{args.name} is a run, not a study: {common.command('show', args.name)} says what it holds")
    from isoloss.studies.folder import StudyFolder
    from isoloss.studies.spec import load_study

    study = load_study(args.name)
    scale = args.scale or next(iter(study.scales))
    folder = StudyFolder(study, args.folder or Path("runs") / f"{study.name}-{scale}", scale)
    actions = {"plan": _show_units, "status": _show_units, "run": _run, "report": _report, "verify": _verify}
    return actions[args.action](args, folder)


def _show_units(args: Args, folder: StudyFolder) -> int:
    """Print each unit and how far it is, for `plan` and `status`; refuse a folder that holds something else."""
    if not folder.exists() and args.action == "status":
        start = f"{_run_command(args, folder)} starts one"
        raise IsolossError(f"{folder.path} holds no study: {start}{files.nearest(folder.path)}")
    units = folder.plan()
    progress = [(unit, *_state(unit)) for unit in units]
    done = sum(state == "done" for _, state, _ in progress)
    if args.json:
        rows = [
            {
                "unit": unit.name,
                "state": state,
                "progress": text,
                "after": list(unit.after),
                "arguments": list(unit.arguments),
            }
            for unit, state, text in progress
        ]
        common.emit_json(
            {"study": folder.study.name, "scale": folder.scale_name, "folder": str(folder.path), "units": rows}
        )
        return 0
    if args.action == "plan":
        cells = [(unit.name, text or state, ", ".join(unit.after)) for unit, state, text in progress]
        columns = ("unit", "state", "after")
        common.print_table(f"{folder.study.name} at scale {folder.scale_name}", columns, cells, left=len(columns))
    else:
        lines = [(unit.name, text or state) for unit, state, text in progress]
        common.print_table(str(folder.path), ("unit", "state"), lines, left=2)
    common.say_wrapped(f"{done} of {len(units)} units done in {folder.path}; --json has the command of each")
    return 0


def _state(unit: Unit) -> tuple[str, str]:
    """Return `done`, `begun` or `to do`, and how far a unit is that was begun."""
    if unit.done():
        return "done", ""
    progress = unit.progress()
    return ("begun", progress) if progress else ("to do", "")


def _run(args: Args, folder: StudyFolder) -> int:
    folder.exists()  # refuses another's folder before anything is written
    execute: Executor = EXECUTORS.load(args.executor)
    with files.lock(folder.path):
        folder.prepare()
        units = folder.plan()
        if args.executor == "local" and args.workers > (os.cpu_count() or 1):
            common.note(f"{args.workers} workers share {os.cpu_count()} cores: they will not be faster than those")
        try:
            count = execute(units, workers=args.workers, logs=folder.path / "logs", say=common.note)
        except KeyboardInterrupt:
            common.note("stopped; progress is saved. To resume:")
            common.note(f"  {_run_command(args, folder)} --workers {args.workers}")
            return interrupts.status()
        if count:
            common.note(f"{count} units done; writing the report")
        else:
            common.note(f"all {len(units)} units were done already")
        page = folder.report()
    return _emit_summary(args, folder, page)


def _run_command(args: Args, folder: StudyFolder) -> str:
    words = ["study", "run", args.name, "--scale", folder.scale_name, "--folder", folder.path]
    return common.command(*words, *(["--executor", args.executor] if args.executor != Args.executor else []))


def _report(args: Args, folder: StudyFolder) -> int:
    folder.exists()  # or refuses
    missing = [unit.name for unit in folder.plan() if not unit.done()]
    if missing:
        raise IsolossError(
            f"{len(missing)} units are not done ({missing[0]} first); {_run_command(args, folder)} goes on with them"
        )
    with files.lock(folder.path):
        page = folder.report()
    return _emit_summary(args, folder, page)


def _emit_summary(args: Args, folder: StudyFolder, page: Path) -> int:
    summary = folder.summary()
    if args.json:
        about = {"study": folder.study.name, "scale": folder.scale_name, "report": str(page)}
        common.emit_json({**about, **summary.to_dict()})
        return 0
    print_summary(f"{folder.study.name} at scale {folder.scale_name}", summary)
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
    """Check the files; status 1 if one of them is not what it should be."""
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
