"""What all verbs share: arguments from a dataclass, one JSON document or readable text, and progress on stderr."""

from __future__ import annotations

import codecs
import inspect
import json
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from isoloss.errors import IsolossError

T = TypeVar("T")

NARROW = 80  # columns of a terminal below which progress leaves out the bar and what follows a comma
LINE_EVERY_SECONDS = 30.0  # how often progress writes a line where there is no terminal


def parse(cls: type[T], verb: str, arguments: Sequence[str], *, examples: Iterable[tuple[str, str]]) -> T:
    """Return `cls` filled from the command line; `--help` opens with the examples.

    Args:
        cls: A dataclass whose docstring says what the verb does and whose field docs are the help.
        verb: E.g. `train`, `study run`.
        arguments: What follows the verb.
        examples: Pairs of a command and what it does.
    """
    import tyro

    lines = "\n".join(f"  {command}\n      {text}" for command, text in examples)
    return tyro.cli(
        cls,
        prog=f"isoloss {verb}",
        args=list(arguments),
        description=f"{inspect.cleandoc(cls.__doc__ or '')}\n\nexamples:\n{lines}",
        config=(
            tyro.conf.FlagCreatePairsOff,
            tyro.conf.AvoidSubcommands,
            tyro.conf.DisallowNone,
            tyro.conf.PositionalMetavarFromFieldName,
        ),
    )


def use_threads(threads: int) -> None:
    """Give torch this many threads; 0: all cores."""
    if threads < 0:
        raise IsolossError(f"--threads is {threads}; it must be at least 0 (0: all cores)")
    if threads > 0:
        import torch

        torch.set_num_threads(threads)


def emit_json(document: Any) -> None:
    """Print the one JSON document of a verb on stdout; where stdout is not UTF-8, other characters are escaped."""
    is_utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    print(json.dumps(document, indent=1, allow_nan=False, ensure_ascii=not is_utf8))


def say(text: str) -> None:
    """Print a line of readable output on stdout."""
    print(text)


def note(text: str) -> None:
    """Print a line about what is going on, on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> None:
    """Print a table; the first `left` columns are text, the others numbers. Piped output is not cut to a width."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(_escape(str(cell)) for cell in row))
    console: Console = _Output()
    if not console.is_terminal:
        unbounded = Console(width=10_000)
        console = _Output(width=max(unbounded.measure(table).maximum, len(title) + 1), color_system=None)
    console.print(table)


def command(*words: object) -> str:
    """Return a command line that a shell reads back as `words`."""
    return shlex.join(["isoloss", *map(str, words)])


class _Output(Console):
    """A console on stdout that leaves a reader who has gone to the one place that deals with it, `main.entry`."""

    def on_broken_pipe(self) -> None:
        raise


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


class Progress:
    """A bar on a terminal, a line every 30 seconds elsewhere; always on stderr."""

    def __init__(self, label: str, total: int, unit: str = "") -> None:
        """Name the work, how much there is, and in what it is counted."""
        self.label, self.total, self.unit = label, total, unit
        self._bar: Bar | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        console = Console(stderr=True)
        if console.is_terminal:
            self._narrow = console.width < NARROW
            self._bar = Bar(
                TextColumn("{task.description}"),
                *([] if self._narrow else [BarColumn()]),
                MofNCompleteColumn(),
                TextColumn(f"{self.unit}{{task.fields[note]}}"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.total, note="")
        return self

    def __call__(self, done: int, note_text: str = "") -> None:
        """Say that `done` of the total are done."""
        if self._bar is not None:
            note_text = note_text.partition(",")[0] if self._narrow else note_text
            self._bar.update(self._task, completed=done, note=note_text and f", {note_text}")
        elif time.monotonic() - self._last_line >= LINE_EVERY_SECONDS:
            self._last_line = time.monotonic()
            note(f"{self.label}: {done} of {self.total} {self.unit}" + (note_text and f", {note_text}"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
