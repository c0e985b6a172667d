"""`isoloss eval`: measure a run's checkpoints; what is measured already is not measured again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from isoloss import files
from isoloss.cli import common
from isoloss.errors import IsolossError
from isoloss.evaluation.config import EvalConfig
from isoloss.runs import Evaluation, Run, checkpoint_of, refuse_study
from isoloss.statistics.estimate import Estimate, rounded

EXAMPLES = [
    ("isoloss eval runs/first", "loss and trace of every checkpoint"),
    ("isoloss eval runs/first --measures loss trace probe-root --steps 1000 2000", "chosen measures and steps"),
    ("isoloss eval runs/first/checkpoints/step-2000/ema", "one checkpoint; this one holds averaged weights (--ema)"),
]

_DEFAULT = ("loss", "trace")


@dataclass(frozen=True)
class Args:
    """Measure the checkpoints of a run: pre-training loss, flatness, linear probes."""

    run: tyro.conf.Positional[Path]
    """The run directory, or one checkpoint in it: RUN/checkpoints/step-N, or step-N/ema for its averaged weights."""
    measures: tuple[str, ...] | None = None
    """loss, trace, probe-TASK, lookup-TASK (isoloss ls measures); default: loss, where it can be had, and trace."""
    steps: tuple[int, ...] = ()
    """Steps to measure; default: all that have a checkpoint."""
    settings: tyro.conf.OmitArgPrefixes[EvalConfig] = field(default_factory=EvalConfig)
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    args = common.parse(Args, "eval", arguments, examples=EXAMPLES)
    from isoloss.evaluation.evaluator import MEASURES, Evaluator, pending

    run, steps = _checkpoints(args)
    for name, value in dataclasses.asdict(args.settings).items():
        if value < 1 and name != "seed":
            raise IsolossError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if args.measures == ():
        raise IsolossError(f"--measures names none; the measures are {', '.join(MEASURES)}")
    common.use_threads(args.threads)
    measures = _DEFAULT if args.measures is None else args.measures
    todo = pending(run, measures, steps, args.settings)
    if todo:
        evaluator = Evaluator(run, args.settings, device=args.device)
        if any(measure == "loss" for _, measure in todo) and (reason := evaluator.why_no_loss()):
            if args.measures is not None:
                raise IsolossError(f"the loss of {run.path} cannot be measured: {reason}")
            common.note(f"the loss is left out: {reason}")
            todo = [(step, measure) for step, measure in todo if measure != "loss"]
        with common.Progress(f"measuring {run.name}", len(todo), "evaluations") as progress:
            for index, (step, measure) in enumerate(todo):
                progress(index, f"{measure} at step {step}")
                evaluator.evaluate(measure, step)
    made = [e for s in steps for m in measures if (e := run.evaluation(m, s)) is not None]
    if args.json:
        checkpoint = {} if Run(args.run).exists else {"checkpoint": str(args.run)}
        common.emit_json({"run": str(run.path), **checkpoint, "evaluations": [e.to_dict() for e in made]})
    else:
        print_evaluations(str(args.run), made)
    return 0


def _checkpoints(args: Args) -> tuple[Run, list[int]]:
    """Return the run and the steps that the command line names."""
    run = Run(args.run)
    if run.exists:
        steps = list(args.steps) or run.steps()
        if not steps:
            raise IsolossError(f"{run.path} has no checkpoint yet: {common.command('train', run.path)} goes on with it")
        return run, steps
    found = checkpoint_of(args.run)
    if found is None:
        refuse_study(args.run)
        raise IsolossError(
            f"{args.run} is neither a run directory (it has no run.json) nor a checkpoint in one"
            f"{files.nearest(args.run)}"
        )
    if args.steps:
        raise IsolossError(f"{args.run} is one checkpoint: leave out --steps, or name the run, {found[0].path}")
    return found[0], [found[1]]


def print_evaluations(title: str, evaluations: list[Evaluation]) -> None:
    """Print estimates as a table, one a line, each with its standard error and unit."""
    rows = [
        (e.step, e.measure, name, f"{estimate}{_more(estimate)}", f"{estimate.num_inputs:,}")
        for e in sorted(evaluations, key=lambda e: (e.step, e.measure))
        for name, estimate in e.estimates.items()
    ]
    common.print_table(title, ("step", "measure", "estimate", "value ± standard error", "inputs"), rows, left=4)


def _more(estimate: Estimate) -> str:
    """Return what belongs beside an accuracy or a trace."""
    from isoloss.transfer.results import bounds

    details = estimate.details
    if "majority_rate" in details:
        return f" ({bounds(details)})"
    if details.get("embeddings"):
        rest = rounded(details["without_embeddings"], details["without_embeddings_stderr"])
        return f" ({rest} without embeddings)"
    return ""
