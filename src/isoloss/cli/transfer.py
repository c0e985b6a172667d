"""`isoloss transfer`: a linear probe of a run or a checkpoint on a downstream task."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from isoloss.cli import common
from isoloss.config import EvalConfig
from isoloss.errors import IsolossError
from isoloss.runs import Run

EXAMPLES = [
    ("isoloss transfer runs/first --task root", "the last checkpoint of a run"),
    ("isoloss transfer runs/first/checkpoints/step-500 --task prefix-4", "another one"),
    ("isoloss transfer runs/first --task root --how lookup", "what the true conditionals reach as features"),
]


@dataclass(frozen=True)
class Args:
    """Fit a linear probe on the concatenated token embeddings and score it: the paper's downstream accuracy."""

    model: tyro.conf.Positional[Path]
    """A run directory (its last checkpoint), or a checkpoint of a run."""
    task: str
    """root or prefix-L (isoloss ls tasks)."""
    how: Literal["probe", "lookup"] = "probe"
    """A probe on the model's embeddings, or on the true conditionals."""
    settings: tyro.conf.OmitArgPrefixes[EvalConfig] = field(default_factory=EvalConfig)
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    args = common.parse(Args, "transfer", arguments, examples=EXAMPLES)
    from isoloss.evaluation import Evaluator

    run, step = find_checkpoint(args.model)
    with common.Progress(f"probing {run.name} at step {step}", 1, "task"):
        evaluator = Evaluator(run, args.settings, device=args.device)
        evaluation = evaluator.measure(f"{args.how}-{args.task}", step)
    accuracy = evaluation.estimates["accuracy"]
    if args.json:
        common.emit_json({"run": str(run.path), **evaluation.to_dict()})
        return 0
    details = accuracy.details
    common.say(f"{args.task}, {args.how} of {run.path} at step {step}: {accuracy}")
    common.say(
        f"majority class {details['majority_rate']:.4f}; {accuracy.num_inputs:,} test sentences, "
        f"{details['num_train']:,} training sentences, {accuracy.samples} seeds"
    )
    return 0


def find_checkpoint(path: Path) -> tuple[Run, int]:
    """Return the run and the step that `path` names: a run (its last step) or a checkpoint in one."""
    run = Run(path)
    if run.exists:
        if not run.steps():
            raise IsolossError(f"{path} has no checkpoint yet: isoloss train {path} goes on with it")
        return run, run.steps()[-1]
    found = checkpoint_of(path)
    if found is not None:
        return found
    raise IsolossError(f"{path} is neither a run directory nor a checkpoint in one, so its language is not known")


def checkpoint_of(path: Path) -> tuple[Run, int] | None:
    """Return the run and the step of a checkpoint folder, or None if it does not lie in a run."""
    folder = path.resolve()
    run = Run(folder.parent.parent)
    step = folder.name.removeprefix("step-")
    if run.exists and step.isdecimal() and int(step) in run.steps() and run.checkpoint(int(step)) == folder:
        return run, int(step)
    return None
