"""`isoloss study`: plan, run, status, report or verify a whole study."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from isoloss import files, interrupts
from isoloss.cli import common
from isoloss.errors import IsolossError
from isoloss.runs import Run
from isoloss.studies import find
from isoloss.studies.executors import local
from isoloss.studies.study import Study, Summary, found

EXAMPLES = [
    ("isoloss study run same-loss --scale laptop", "everything, ending with a report; the same command resumes"),
    ("isoloss study status same-loss --scale laptop", "what is done and what is not"),
    ("isoloss study verify same-loss --scale laptop", "check every file against what it was made from"),
]

Action = Literal["plan", "run", "status", "report", "verify"]


@dataclass(frozen=True)
class Args:
    """Plan, run, look at, report or verify a study. Everything it knows is in the files of its folder."""

    action: tyro.conf.Positional[Action]
    """plan: what would be done; run: do it; status: how far it is; report: write the page; verify: check the files."""
    name: tyro.conf.Positional[str]
    """The study (isoloss ls studies)."""
    scale: str = "laptop"
    """How large (isoloss ls studies)."""
    folder: Path | None = None
    """Where; default: runs/NAME-SCALE."""
    workers: int = 2
    """Processes at a time, one thread each."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    args = common.parse(Args, "study", arguments, examples=EXAMPLES)
    if Run(Path(args.name)).exists:
        raise IsolossError(f"{args.name} is a run, not a study: {common.command('show', args.name)} says what it holds")
    study = find(args.name)
    study.check_scale(args.scale)
    folder = args.folder or Path("runs") / f"{args.name}-{args.scale}"
    return {"plan": _status, "status": _status, "run": _run, "report": _report, "verify": _verify}[args.action](
        args, study, folder
    )


def _status(args: Args, study: Study, folder: Path) -> int:
    if not study.holds(folder, args.scale) and args.action == "status":
        raise IsolossError(f"{folder} holds no study: {_run_command(args, folder)} starts one{files.nearest(folder)}")
    units = study.plan(folder, args.scale)
    states = ["done" if unit.done() else "to do" for unit in units]
    if args.json:
        rows = [
            {"unit": unit.name, "state": state, "after": list(unit.after), "arguments": unit.arguments}
            for unit, state in zip(units, states, strict=True)
        ]
        common.emit_json({"study": args.name, "scale": args.scale, "folder": str(folder), "units": rows})
        return 0
    if args.action == "plan":
        cells = [
            (unit.name, state, ", ".join(unit.after), _command(unit.arguments))
            for unit, state in zip(units, states, strict=True)
        ]
        columns = ("unit", "state", "after", "command")
        common.print_table(f"{args.name} at scale {args.scale}", columns, cells, key=1)
    else:
        lines = [(unit.name, state) for unit, state in zip(units, states, strict=True)]
        common.print_table(str(folder), ("unit", "state"), lines, left=2)
    common.say_wrapped(f"{states.count('done')} of {len(units)} units done in {folder}")
    return 0


def _command(arguments: tuple[str, ...]) -> str:
    """A unit's command as far as it tells units apart; its settings are in the plan's JSON."""
    return common.command(*arguments[:2])


def _run(args: Args, study: Study, folder: Path) -> int:
    study.holds(folder, args.scale)  # refuses another's folder before anything is written
    with files.lock(folder):
        study.prepare(folder, args.scale)
        units = study.plan(folder, args.scale)
        if args.workers > (os.cpu_count() or 1):
            common.note(f"{args.workers} workers share {os.cpu_count()} cores: they will not be faster than those")
        try:
            count = local.run(units, workers=args.workers, logs=folder / "logs", say=common.note)
        except KeyboardInterrupt:
            common.note("stopped, saved. To go on:")
            words = ("study", "run", args.name, "--scale", args.scale, "--folder", folder, "--workers", args.workers)
            common.note("  " + common.command(*words))
            return interrupts.status()
        if count:
            common.note(f"{count} units done; writing the report")
        else:
            common.note(f"all {len(units)} units were done already")
        page = study.report(folder, args.scale)
    return _emit_summary(args, study, folder, page)


def _run_command(args: Args, folder: Path) -> str:
    return common.command("study", "run", args.name, "--scale", args.scale, "--folder", folder)


def _report(args: Args, study: Study, folder: Path) -> int:
    study.holds(folder, args.scale)  # or refuses
    missing = [unit.name for unit in study.plan(folder, args.scale) if not unit.done()]
    if missing:
        raise IsolossError(
            f"{len(missing)} units are not done ({missing[0]} first); {_run_command(args, folder)} goes on with them"
        )
    with files.lock(folder):
        page = study.report(folder, args.scale, force=True)
    return _emit_summary(args, study, folder, page)


def _emit_summary(args: Args, study: Study, folder: Path, page: Path) -> int:
    summary = study.summary(folder, args.scale)
    if args.json:
        common.emit_json({"study": args.name, "scale": args.scale, "report": str(page), **summary.to_dict()})
        return 0
    print_summary(f"{args.name} at scale {args.scale}", summary)
    common.say(f"\nreport: {page}")
    return 0


def print_summary(heading: str, summary: Summary) -> None:
    """Print a study's tables of estimates, then every claim: its verdict, and the numbers behind it case by case."""
    for table in summary.tables:
        columns, rows = table.cells()
        common.print_table(f"{heading}, {table.title}", columns, rows, left=table.left)
        common.say("")
    for result in summary.results:
        common.say_wrapped(f"{result.claim.id}: {result.verdict}")
        common.say_wrapped(result.claim.statement, indent=4)
        for answer in result.answers:
            if answer.case:
                common.say_wrapped(f"{answer.case}: {answer.verdict}", indent=4)
            for line in found(answer):
                common.say_wrapped(line, indent=8)


def _verify(args: Args, study: Study, folder: Path) -> int:
    """Check the files; status 1 if one of them is not what it should be."""
    checks = []
    for name, problem in study.verify(folder, args.scale):
        checks.append({"check": name, "problem": problem})
        if not args.json:
            common.say(f"{'ok  ' if problem is None else 'FAIL'}  {name}" + (f": {problem}" if problem else ""))
    failed = sum(check["problem"] is not None for check in checks)
    if args.json:
        common.emit_json({"study": args.name, "folder": str(folder), "failed": failed, "checks": checks})
    else:
        common.say(f"{len(checks)} checks, {failed} failed")
    return 1 if failed else 0
