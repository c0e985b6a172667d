"""What subcommands share: one JSON document or readable text on stdout, and progress on stderr."""

from __future__ import annotations

import codecs
import json
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from isoloss import files
from isoloss.errors import IsolossError, printable, require_package
from isoloss.machine import check_threads
from isoloss.text import hub_datasets

if TYPE_CHECKING:
    from isoloss.paper.theory.statements import Statement
    from isoloss.report.charts import Spec
    from isoloss.runs import Run

WIDEST = 100  # columns of a line of prose; a narrower terminal decides
ROOMY = 100  # columns of a terminal below which progress has no bar
NARROW = 80  # and below which it leaves out what follows a comma
FIGURES = (".png", ".svg", ".pdf")
LEAST_TEXT = 24  # columns in which the text of a table may fold, so that its columns stay side by side
GAP = 2  # blanks between two columns of a table
LINE_EVERY_SECONDS = 30.0  # how often progress writes a line where there is no terminal


def use_threads(threads: int) -> None:
    """Give torch this many threads; 0: all cores."""
    check_threads(threads)
    if threads > 0:
        import torch

        torch.set_num_threads(threads)


def check_figure(file: Path | None) -> None:
    """Refuse a `--figure` that could not be drawn once it is made."""
    if file is None:
        return
    if file.suffix.lower() not in FIGURES:
        raise IsolossError(f"--figure is {file}; its name must end in {', '.join(FIGURES)}")
    require_package("vl_convert")


def check_outputs(args: Any, models: Iterable[str], *names: str) -> None:
    """Refuse the outputs of a command on models, its options `names`, as `files.check_outputs` does."""
    given = [args.data, args.inputs.get("tokenizer"), (args.loading.module or "").rpartition(":")[0]]
    datasets = [task.partition("=")[2] for task in getattr(args, "task", ()) if "=" in task]
    if str(args.data).startswith(hub_datasets.PREFIX):
        datasets.append(str(args.data))
    # each file of a data set by itself, because it may end in .csv
    folders = (Path(name.removeprefix(hub_datasets.PREFIX)) for name in datasets)
    examples = [file for folder in folders for file in (folder, *folder.rglob("*")) if file.is_file()]
    outputs = {f"--{name}": getattr(args, name) for name in names}
    files.check_outputs(outputs, [*models, *filter(None, given), *examples])


def save_figure(file: Path, figure: Spec) -> None:
    """Write a figure to its file, and say so."""
    from isoloss.report.save import save

    save(figure, file)
    note(f"figure: {file}")


def emit_json(document: Any) -> None:
    """Print the one JSON document of a subcommand on stdout; characters are escaped where stdout is not UTF-8."""
    is_utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=not is_utf8)
    # JSON itself spells out the control characters below 0x20
    print(re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text))


def say(text: str) -> None:
    """Print a line of readable output on stdout."""
    print(printable(text))


def say_wrapped(text: str, *, indent: int = 0) -> None:
    """Print prose in lines of at most the terminal's width, further ones indented."""
    width = min(WIDEST, shutil.get_terminal_size(fallback=(WIDEST, 24)).columns)
    wrapper = textwrap.TextWrapper(
        max(20, width),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + 2),
        # a path or a name that is torn could not be copied from the terminal
        break_long_words=False,
        break_on_hyphens=False,
    )
    say(wrapper.fill(text))


def say_statements(statements: Iterable[Statement]) -> None:
    """Print each statement with its verdict and the figures behind it."""
    for statement in statements:
        say("")
        say_wrapped(f"{statement.verdict}: {statement.text}")
        say_wrapped(statement.evidence, indent=4)


def say_stages(run: Run) -> None:
    """Print where and why each stage of a run that has ended did so."""
    total = len(run.config.stages)
    for stage in run.stages():
        validation = [
            f" (validation {name} {stage[f'validation_{key}_nats']:.4f} ± {stage[f'validation_{key}_stderr']:.4f} nats)"
            for key, name in (("kl", "KL"), ("loss", "loss"))
            if f"validation_{key}_nats" in stage
        ]
        say(f"stage {stage['stage']} of {total}: ended at step {stage['step']}, {stage['ended']}{''.join(validation)}")
    for number, fraction in run.unfinished_decays().items():
        say_wrapped(
            f"stage {number} met its target before the decay of the learning rate had ended, at {100 * fraction:.0f} % "
            "of the highest rate"
        )
    for missed in run.missed_targets():
        say_wrapped(f"missed: {missed}")


def note(text: str) -> None:
    """Print a line about what is going on, on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> None:
    """Print a table; the first `left` columns are text, the others numbers.

    Where a terminal is too narrow, headings and text fold between words; where that is not enough, every row becomes a
    list. Piped output is not cut to a width.
    """
    title, columns = printable(title), list(map(printable, columns))
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    console: Console = _Output()
    heading, *lines = _lines(columns, cells, left)
    if not console.is_terminal:
        say("\n".join(line.rstrip() for line in (title, heading, *lines)))
        return
    console.print(Text(title, style="bold"))  # a table's own title would fold at the table's width
    folded = [_folded(heading, [row[place] for row in cells]) for place, heading in enumerate(columns)]
    if cell_len(heading) <= console.width:
        console.print(Text(heading, style="bold"))
        say("\n".join(lines))
    elif widths := _widths(folded, cells, left, console.width):
        console.print(_table(folded, cells, left, widths))
    else:
        for row in cells:
            _print_list(columns, row)


def _lines(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return a table's lines, none folded: by hand, as Rich takes seconds for thousands of rows."""
    table = [[" ".join(cell.splitlines()) for cell in row] for row in (columns, *rows)]
    # in columns of the terminal, of which some characters take two
    sizes = [[cell_len(cell) for cell in row] for row in table]
    widths = [max(column) for column in zip(*sizes, strict=True)]

    def line(row: Sequence[str], lengths: Sequence[int]) -> str:
        padded = []
        for place, (cell, length, width) in enumerate(zip(row, lengths, widths, strict=True)):
            room = " " * (width - length)
            padded.append(cell + room if place < left else room + cell)
        return (" " * GAP).join(padded)

    return [line(row, lengths) for row, lengths in zip(table, sizes, strict=True)]


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, width: int) -> list[int]:
    """Return the width of each column, numbers whole and text as equal as may be; none if a word would be torn."""
    sizes = [_measure(_table([heading], [[row[i]] for row in rows], 1)) for i, heading in enumerate(columns)]
    widths = [
        min(size.maximum, max(size.minimum, LEAST_TEXT)) if i < left else size.maximum for i, size in enumerate(sizes)
    ]
    room = width - sum(widths) - GAP * (len(widths) - 1)
    # the spare columns go one by one to the narrowest text that still folds
    for _ in range(room):
        folding = [i for i, size in enumerate(sizes) if widths[i] < size.maximum]
        if folding:
            widths[min(folding, key=widths.__getitem__)] += 1
    return widths if room >= 0 else []


def _print_list(columns: Sequence[str], row: Sequence[str]) -> None:
    """Print a row as its first cell and, below it, a line a column; what is empty is left out."""
    say_wrapped(row[0])
    for heading, cell in zip(columns[1:], row[1:], strict=True):
        if cell:
            say_wrapped(f"{heading}: {cell}" if heading else cell, indent=2)


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], left: int, widths: Sequence[int] | None = None
) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False)
    for place, column in enumerate(columns):
        width = None if widths is None else widths[place]
        table.add_column(column, justify="left" if place < left else "right", overflow="fold", width=width)
    for row in rows:
        # as Text: in a string, Rich would take brackets in names for markup
        table.add_row(*map(Text, row))
    return table


def _measure(table: Table) -> Measurement:
    """The columns of a terminal in which no word of the table is torn (minimum), and in which nothing of it folds."""
    return Console(width=10_000).measure(table)


def _folded(heading: str, cells: Sequence[str]) -> str:
    """Return a heading in lines that are not wider than the cells below it, words left whole."""
    width = max([1, *map(len, (*cells, *heading.split()))])
    return "\n".join(textwrap.wrap(heading, width))


def command(*words: object) -> str:
    """Return a command line that a shell reads back as `words`."""
    return shlex.join(["isoloss", *map(str, words)])


def without_option(arguments: Sequence[str], option: str) -> list[str]:
    """Return arguments without an option that takes one value."""
    words = list(arguments)
    for place, word in enumerate(words):
        if word.partition("=")[0].replace("_", "-") == option:
            del words[place : place + (1 if "=" in word else 2)]
            break
    return words


def command_with(subcommand: str, arguments: Sequence[str], option: str, value: object) -> str:
    """Return the command line of a subcommand with another value of one option."""
    return command(subcommand, *without_option(arguments, option), option, value)


def say_next(commands: Sequence[str]) -> None:
    """Print the commands to run next, one a line, ready to paste."""
    if commands:
        say("\nCommands to try next:")
    for line in commands:
        say(f"  {line}")


class _Output(Console):
    """A console on stdout that leaves a reader who has gone to the one place that deals with it, `main.entry`."""

    def on_broken_pipe(self) -> None:
        raise


class Progress:
    """A bar on a terminal, a line every 30 seconds elsewhere; always on stderr."""

    def __init__(self, label: str, total: int | None, unit: str = "") -> None:
        """Name the work, how much there is (None: not known yet), and in what it is counted."""
        self.label, self.total, self.unit = label, total, unit
        self._bar: Bar | None = None
        self._begun = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        console = Console(stderr=True)
        if console.is_terminal:
            self._narrow = console.width < NARROW
            bar = [BarColumn()] if console.width >= ROOMY else []
            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                *bar,
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}", markup=False),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(printable(self.label), total=self.total, note=self.unit)
        return self

    def begin(self, label: str, total: int, unit: str) -> None:
        """Start again with other work, in the place of what was under way."""
        self.label, self.total, self.unit, self._begun = label, total, unit, time.monotonic()
        if self._bar is not None:
            self._bar.reset(self._task, description=printable(label), total=total, note=unit)

    def __call__(self, done: float, note_text: str = "") -> None:
        """Say that `done` of the total are done."""
        if self._bar is not None:
            note_text = note_text.partition(",")[0] if self._narrow else note_text
            self._bar.update(self._task, completed=done, note=self.unit + printable(note_text and f", {note_text}"))
        elif time.monotonic() - self._last_line >= LINE_EVERY_SECONDS:
            self._last_line = time.monotonic()
            rate = done / (self._last_line - self._begun)
            left = f", {timedelta(seconds=round((self.total - done) / rate))} left" if self.total and done else ""
            note(f"{self.label}: {int(done)} of {self.total} {self.unit}{note_text and f', {note_text}'}{left}")

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
