"""`isoloss average`: the model whose weights are the mean of those of several checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from isoloss import files
from isoloss.cli import common, options

EXAMPLES = [
    ("isoloss average runs/first/checkpoints/step-* --output averaged", "the checkpoints of a run: LAWA"),
    ("isoloss average runs/a runs/b runs/c --output soup", "the last checkpoints of three runs: a uniform soup"),
]


@dataclass(frozen=True)
class Args:
    """Average the weights of checkpoints of one architecture, and write the mean as a Hugging Face folder."""

    checkpoints: options.Positional[tuple[Path, ...]]
    """Checkpoint folders, or runs for their last checkpoints; at least two."""
    output: Path
    """Folder to write, new or empty."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args = options.parse(Args, "average", arguments, examples=EXAMPLES)
    files.check_new(args.output)
    from isoloss.lab.training.averaging import average_checkpoints

    average_checkpoints(args.checkpoints, args.output)
    if args.json:
        common.emit_json({"output": str(args.output), "checkpoints": [str(path) for path in args.checkpoints]})
    else:
        common.say(f"{args.output}: the mean of {len(args.checkpoints)} checkpoints")
    return 0
