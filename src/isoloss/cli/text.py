"""`isoloss text`: a small real text for examples, which comes with Python and so needs no network."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isoloss.cli import common, options

EXAMPLES = [("isoloss text python-docs text/", "Python's language reference, about 80 files of English prose")]


@dataclass(frozen=True)
class Args:
    """Write a small sample text to files, to try the commands that need text."""

    name: options.Positional[Literal["python-docs"]]
    """python-docs: the language reference of the Python that runs isoloss."""
    folder: options.Positional[Path]
    """Folder for the .txt files, new or empty."""
    json: bool = False
    """Print one JSON document."""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    args = options.parse(Args, "text", arguments, examples=EXAMPLES)
    from isoloss.text.python_docs import write_python_docs

    was_there = args.folder.is_dir() and any(args.folder.iterdir())
    number = write_python_docs(args.folder)
    if args.json:
        common.emit_json({"folder": str(args.folder), "files": number, "python": platform.python_version()})
    else:
        there = "they were there already" if was_there else f"from Python {platform.python_version()}"
        common.say(f"{args.folder}: {number} text files of Python's language reference; {there}")
    return 0
