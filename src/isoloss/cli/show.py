"""`isoloss show`: what is in a run directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from isoloss import config as configs
from isoloss.cli import common, options
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.evaluator import Evaluations
from isoloss.runs import Run

EXAMPLES = [("isoloss show runs/first", "config, progress, checkpoints and evaluations")]


@dataclass(frozen=True)
class Args:
    """Show a run: its config, how far it has got, and what was measured."""

    run: options.Positional[Path]
    """The run directory."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args = options.parse(Args, "show", arguments, examples=EXAMPLES)
    run = Run(args.run)
    if run.exists and (damage := [*run.damage()]):
        raise IsolossError("\n".join(damage))
    record, config, evaluations = run.record, run.config, run.evaluations()
    metrics = run.metrics()
    if args.json:
        common.emit_json(
            {
                "run": str(run.path),
                **record,
                "complete": run.complete,
                "checkpoints": run.steps(),
                "metrics": metrics,
                "stages": run.stages(),
                "evaluations": [e.to_dict() for e in evaluations],
            }
        )
        return 0
    last = metrics[-1] if metrics else None
    state = "complete" if run.complete else f"at step {max(run.steps(), default=0)} of {config.steps}"
    common.say(f"{run.path}: {state}, fingerprint {record['fingerprint']}, seed {config.seed}")
    made = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    common.say_wrapped(f"made by {made}, commit {record['commit'] or 'unknown'}")
    if last:
        common.say(f"training loss {last['loss_nats']:.4f} nats per predicted token at step {last['step']}")
    common.say(f"checkpoints (step): {', '.join(map(str, run.steps())) or 'none yet'}")
    common.say_stages(run)
    common.say("")
    common.say(configs.to_toml(config).rstrip())
    common.say("")
    if evaluations:
        columns, rows, num_text = Evaluations(("",) * len(evaluations), tuple(evaluations)).table()
        common.print_table("evaluations", columns, rows, left=num_text)
    else:
        common.say("no evaluation yet: " + common.command("measure", run.path))
    return 0
