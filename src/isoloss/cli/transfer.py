"""`isoloss transfer`: a linear probe of a run or a checkpoint on a downstream task."""

from __future__ import annotations

from dataclasses import dataclass
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
    probe_train: int = EvalConfig.probe_train
    """Sentences that the probe is fitted on."""
    probe_test: int = EvalConfig.probe_test
    """Sentences that it is scored on."""
    probe_seeds: int = EvalConfig.probe_seeds
    """Probes, each with its own initial weights and order."""
    probe_epochs: int = EvalConfig.probe_epochs
    """Passes of a probe over its training sentences."""
    seed: int = EvalConfig.seed
    """Decides the sentences and the probes."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    threads: int = 0
    """CPU threads; 0: all cores."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    args = common.parse(Args, "transfer", arguments, examples=EXAMPLES)
    common.use_threads(args.threads)
    from isoloss.evaluation import Evaluator

    run, step = find_checkpoint(args.model)
    with common.Progress(f"probing {run.name} at step {step}", 1, "task"):
        settings = EvalConfig(
            probe_train=args.probe_train,
            probe_test=args.probe_test,
            probe_seeds=args.probe_seeds,
            probe_epochs=args.probe_epochs,
            seed=args.seed,
        )
        evaluator = Evaluator(run, settings, device=args.device)
        evaluation = evaluator.measure(f"{args.how}-{args.task}", step)
    accuracy = evaluation.estimates["accuracy"]
    if args.json:
        common.emit_json({"run": str(run.path), **evaluation.to_dict()})
        return 0
    details = accuracy.details
    common.say(f"{args.task}, {args.how} of {run.path} at step {step}: {accuracy}")
    common.say(
        f"  majority class {100 * details['majority_rate']:.2f} %; {details['num_test']:,} test sentences, "
        f"{details['num_train']:,} training sentences; {details['seeds']} seeds, whose accuracies deviate by "
        f"{100 * details['seed_std']:.2f} percentage points"
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
