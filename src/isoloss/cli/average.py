"""`isoloss average`: the model whose weights are the mean of those of several checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from isoloss import files
from isoloss.checkpoints import places
from isoloss.cli import common, options

EXAMPLES = [
    ("isoloss average runs/first/checkpoints/step-* --output averaged", "the checkpoints of a run: LAWA"),
    ("isoloss average runs/a runs/b runs/c --output soup", "the last checkpoints of three runs: a uniform soup"),
]


@dataclass(frozen=True)
class Args:
    """Average the weights of checkpoints of one architecture, and write the mean as a Hugging Face folder."""

    checkpoints: options.Positional[tuple[str, ...]]
    """Checkpoint folders, runs for their last checkpoints, or names on the Hugging Face hub (NAME@REVISION); also by
    patterns, such as 'NAME@step*'; at least two."""
    output: Path
    """Folder to write, new or empty."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args = options.parse(Args, "average", arguments, examples=EXAMPLES)
    files.check_new(args.output)
    names = places.expand_checkpoints(args.checkpoints, common.note)
    from isoloss.lab.evaluation.external import ExternalCheckpoint
    from isoloss.lab.training.averaging import average_checkpoints

    on_hub = [places.may_be_hub_name(name.partition("@")[0]) and not Path(name).exists() for name in names]
    folders = [
        ExternalCheckpoint(checkpoint=name, data="none").folder(download=True) if is_on_hub else Path(name)
        for name, is_on_hub in zip(names, on_hub, strict=True)
    ]
    average_checkpoints(folders, args.output)
    if args.json:
        common.emit_json({"output": str(args.output), "checkpoints": names})
    else:
        common.say(f"{args.output}: the mean of {len(names)} checkpoints")
    return 0
