"""What users are meant to read: an error, and a warning, of one sentence that names the value and the choices."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import re
import warnings
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

NOTHING_PREDICTED = "nothing is predicted: every label that the model could be scored on is -100"

EXTRAS = {  # pyproject.toml's, by the modules that are imported from their packages
    **dict.fromkeys(("numba", "llvmlite", "threadpoolctl"), "lab"),
    **dict.fromkeys(("polars", "jinja2", "markupsafe", "vl_convert"), "study"),
    **dict.fromkeys(("datasets", "pandas"), "hub"),
    **dict.fromkeys(("pytorch_optimizer", "schedulefree"), "optimizers"),
    "h5py": "hdf5",
    "lm_eval": "eval",
    "ray": "ray",
    "submitit": "slurm",
    "tensorboard": "tensorboard",
}

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class IsolossError(Exception):
    """An input, a file or a state that isoloss cannot work with.

    The message is one clear sentence: what was given, why it does not do, and what would. The command line prints it
    without a traceback and exits with status 2.
    """


class IsolossWarning(UserWarning):
    """Something that isoloss does with an input that whoever gave it should know.

    The message is one clear sentence. The command line prints it once, as a line on stderr, and goes on.
    """


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    spec = importlib.util.find_spec(package)
    # a folder of that name, such as the one that W&B makes, is found as a package without an origin
    return spec is not None and spec.origin is not None


def require_package(package: str) -> None:
    """Refuse what needs a package of an extra that is not installed, before anything is computed or written."""
    if not is_installed(package):
        raise _not_installed(package)


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """Turn the lack of a package that only an extra installs into an error that names the extra; also a decorator.

    Example:
        >>> from isoloss.errors import naming_extras
        >>> with naming_extras():
        ...     raise ModuleNotFoundError("No module named 'numba'", name="numba")
        Traceback (most recent call last):
        isoloss.errors.IsolossError: this needs numba, which is not installed: pip install 'isoloss[lab]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (package := (error.name or "").partition(".")[0]) in EXTRAS:
            raise _not_installed(package) from error
        raise


def _not_installed(package: str) -> IsolossError:
    return IsolossError(f"this needs {package}, which is not installed: pip install 'isoloss[{EXTRAS[package]}]'")


def printable(text: str) -> str:
    r"""Return text that commands no terminal: control characters but tabs and line ends are spelled out.

    Names of files and tokens may hold any, also the escape that begins a terminal's commands.

    Example:
        >>> from isoloss.errors import printable
        >>> printable("runs/\x1b[2Jfirst")
        'runs/\\x1b[2Jfirst'
    """
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


_SUBJECT = ContextVar("subject", default="")


@contextlib.contextmanager
def naming(subject: str) -> Iterator[None]:
    """Put a name before the errors and warnings of a block, such as the name of the model that is being measured."""
    token = _SUBJECT.set(f"{subject}: ")
    try:
        yield
    except IsolossError as error:
        raise IsolossError(f"{subject}: {error}") from error
    finally:
        _SUBJECT.reset(token)


def warn(message: str) -> None:
    """Issue an `IsolossWarning`."""
    # not the function that warns but whoever called it is named as the place
    warnings.warn(_SUBJECT.get() + message, IsolossWarning, stacklevel=3)


def require(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Refuse an argument of another type than it must have: `spec is 3; it must be a name or a path`."""
    if not isinstance(value, kind):
        is_short = value is None or isinstance(value, str | bytes | bool | int | float | Path)
        told = repr(value) if is_short else f"of the type {type(value).__name__}"
        raise IsolossError(f"{name} is {told}; it must be {wanted}")


def most_like(word: str, choices: Iterable[str], *, least: float = 0.6) -> str | None:
    """Return the choice that is most like `word`, or None where none is: `least` is how like, 1 for the same."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=least)
    return found[0] if found else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return the end of a message about a word that is none of the choices: the one that it may have been meant as.

    Example:
        >>> from isoloss.errors import did_you_mean
        >>> did_you_mean("trian", ["train", "eval"]), did_you_mean("cook", ["train", "eval"])
        ('; did you mean train?', '')
    """
    found = most_like(word, choices)
    return "" if found is None else f"; did you mean {found}?"
