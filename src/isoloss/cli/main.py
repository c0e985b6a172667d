"""`isoloss SUBCOMMAND ...`: runs the subcommand, and turns what goes wrong into one line and an exit status."""

from __future__ import annotations

import codecs
import errno
import importlib
import io
import os
import re
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from isoloss import interrupts
from isoloss.errors import IsolossError, IsolossWarning, did_you_mean, naming_extras, printable

SUBCOMMANDS = {
    "ls": "list the names of measures, languages, models, sizes, tasks, algorithms, studies, runs",
    "sample": "draw sentences from a language, with their exact probabilities",
    "text": "write a small sample text, Python's language reference, to files",
    "tokenizer": "learn a tokenizer from text",
    "train": "pre-train a model; the same command resumes",
    "measure": "measure checkpoints, of runs or any other: loss, flatness, downstream accuracy",
    "compare": "two checkpoints or more: the same loss? which is flatter, more robust, better at a task?",
    "average": "average the weights of several checkpoints: LAWA, soups",
    "expand": "a small transformer inside a larger one: the same function, and its flatness there",
    "transfer": "accuracy of models on a downstream task, by a probe or fine-tuning, and how they compare",
    "show": "what is in a run directory",
    "study": "new, show, plan, run, work, status, report, verify, export or compare: a whole study",
    "suite": "many checkpoints: which measure predicts which outcome at the same loss?",
    "theory": "statements of Liu et al. (2023), each with a verdict: bartlett, sgd-flow, brackets",
    "doctor": "what this machine has: versions, devices, threads",
}

GOES_ON = {  # what is said of an interruption, before the command that was interrupted
    "train": "; what was saved is kept. To go on:",
    "measure": "; what was measured of runs is kept. To go on:",
    "study": "; what was done is kept. The same command goes on:",
    "suite": "; what was measured is kept. The same command goes on:",
}

RENAMED = {"eval": "isoloss measure", "flatness": "isoloss measure for one model, isoloss compare for several"}

TEMPORARY_FAILURE = 75  # EX_TEMPFAIL
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}

HELP = """\
isoloss: compare language models that have the same pre-training loss.

examples:
  isoloss compare A B --data text.txt                which of two checkpoints is flatter, and more robust?
  isoloss measure CHECKPOINT --data text.txt         loss and flatness of a checkpoint
  isoloss sample pcfg-laptop                         sentences from a language whose truth is known
  isoloss train runs/first --language pcfg-laptop    pre-train; Ctrl-C and the same command resume
  isoloss study run same-loss --scale laptop         the whole study, ending with a report

usage: isoloss SUBCOMMAND [...]        isoloss SUBCOMMAND --help tells more

subcommands:
{subcommands}

options:
  --help, -h    this text
  --version     the version"""


def main(arguments: list[str]) -> int:
    """Run one command and return its exit status.

    0 done, 1 a check failed, 2 bad input or files that cannot be read or written, 75 the same because a disk is full or
    does not answer, so that the same command may succeed later, 130 interrupted by Ctrl-C, 143 by SIGTERM.
    """
    interrupts.clear()
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(HELP.format(subcommands="\n".join(f"  {name:<10} {text}" for name, text in SUBCOMMANDS.items())))
        return 0
    subcommand, *rest = arguments
    if subcommand == "--version":
        from isoloss import __version__

        print(f"isoloss {__version__}")
        return 0
    if subcommand in RENAMED:
        _tell(f"isoloss: {subcommand} is now {RENAMED[subcommand]}, with the same options")
        return 2
    if subcommand not in SUBCOMMANDS:
        _tell(
            f"isoloss: no subcommand {subcommand!r}{did_you_mean(subcommand, SUBCOMMANDS) or ';'} "
            f"the subcommands are {', '.join(SUBCOMMANDS)}"
        )
        return 2
    try:
        with _warnings_as_lines(subcommand), naming_extras():
            # only this subcommand's module: importing all of them would take seconds
            return int(importlib.import_module(f"isoloss.cli.{subcommand}").main(rest))
    except SystemExit as end:  # after the help
        return int(end.code or 0)
    except IsolossError as error:
        _tell(f"isoloss {subcommand}: {error}")
        return TEMPORARY_FAILURE if _is_temporary(error) else 2
    except KeyboardInterrupt:
        _tell(f"isoloss {subcommand}: interrupted{GOES_ON.get(subcommand, '')}")
        if subcommand in GOES_ON:
            _tell(f"  {shlex.join(['isoloss', *arguments])}")
        return interrupts.status()
    except BrokenPipeError:
        # `entry` deals with a reader that has gone; a BrokenPipeError is an OSError too, hence this clause before it
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _tell(f"isoloss {subcommand}: {where}{error.strerror or error}")
        return TEMPORARY_FAILURE if _is_temporary(error) else 2


def _tell(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def _is_temporary(error: BaseException | None) -> bool:
    """Whether an error is of a disk that may be in order later, or was caused by one."""
    while error is not None:
        number = error.errno if isinstance(error, OSError) else None
        if isinstance(error, Exception) and (match := re.search(r"\(os error (\d+)\)", str(error))):
            # libraries written in Rust, such as safetensors, give the number of the error only in its text
            number = int(match[1])
        if number in DISK_ERRORS:
            return True
        error = error.__cause__
    return False


@contextmanager
def _warnings_as_lines(subcommand: str) -> Iterator[None]:
    """Print an `IsolossWarning` as one line, without the place in the code, and each only once."""
    said: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
        if not issubclass(category, IsolossWarning):
            as_before(message, category, *place, **options)
        elif str(message) not in said:
            said.add(str(message))
            _tell(f"isoloss {subcommand}: warning: {message}")

    with warnings.catch_warnings():
        as_before = warnings.showwarning
        # `catch_warnings` puts the old one back
        warnings.showwarning = show
        warnings.simplefilter("always", IsolossWarning)
        yield


def entry() -> NoReturn:
    """The console script."""
    start = time.monotonic()
    if os.environ.get("ISOLOSS_EXIT_WITH_STDIN"):
        _exit_with_stdin()
    # a terminal without ± must not end a command of an hour with a traceback
    codecs.register_error("isoloss", _spell)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="isoloss")
    interrupts.raise_on_sigterm()
    status = 0
    try:
        status = main(sys.argv[1:])
        # now, while a failure can still be told: Python itself would flush at exit
        sys.stdout.flush()
    # the output could not be written. Python would try again at exit, and fail with a traceback: /dev/null takes it
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # a reader that has gone, such as `head`, is no failure
        if not isinstance(error, BrokenPipeError):
            _tell(f"isoloss: cannot write the output: {error.strerror or error}")
            status = TEMPORARY_FAILURE if _is_temporary(error) else 2
    if os.environ.get("ISOLOSS_USAGE"):
        from isoloss.studies.run import usage

        usage.report(time.monotonic() - start)
    # after a KeyboardInterrupt within exec(), which makes dataclasses, `python -m` would die of SIGINT, whatever the
    # status, until another exec() is over
    exec("")  # noqa: S102
    sys.exit(status)


def _spell(error: UnicodeError) -> tuple[str, int]:
    """Write a character that the terminal's encoding lacks: `+-` for a plus-minus sign, `?` for another."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join("+-" if character == "±" else "?" for character in lacking), error.end


def _exit_with_stdin() -> None:
    """End this process as soon as the executor that started it is gone, however it went: its end of the pipe closes."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        # sys.exit would end this thread alone
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
