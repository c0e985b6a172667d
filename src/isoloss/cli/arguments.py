"""Command lines read strictly: what is wrong with one is said in a sentence, with the choices; whole numbers as 1e4."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from isoloss.errors import IsolossError, did_you_mean

# what other programs call our options
ALSO_CALLED = {
    "bs": "batch-size",
    "dtype": "precision",
    "epoch": "epochs",
    "lr": "learning-rate",
    "max-steps": "steps",
    "max-samples": "num-sequences",
    "model-size": "size",
    "num-epochs": "epochs",
    "num-samples": "num-sequences",
    "num-steps": "steps",
    "out": "output",
    "output-dir": "output",
    "vocab": "vocab-size",
    "warmup": "warmup-steps",
    "warmup-ratio": "warmup-proportion",
    "wd": "weight-decay",
}
HELP = ("--help", "-h")
_MOST_DIGITS = 18


@dataclass(frozen=True)
class _Argument:
    """A field of the dataclass: an option `--learning-rate`, or a word `RUN` that its place tells."""

    name: str
    types: tuple[Any, ...]  # of each value; of any number of values, the one that all have
    is_many: bool
    is_required: bool
    is_positional: bool

    def read(self, words: Sequence[str]) -> list[str]:
        """Return the values as tyro reads them."""
        if not self.is_many and len(words) != len(self.types):
            wanted = "no value" if not self.types else f"{len(self.types)} value{'s' if len(self.types) > 1 else ''}"
            found = f"{len(words)}: {' '.join(words)}" if words else "none"
            raise IsolossError(f"{self.name} takes {wanted}, but got {found}")
        kinds = self.types * len(words) if self.is_many else self.types
        return [_value(self.name, word, kind) for word, kind in zip(words, kinds, strict=True)]


def read(cls: type, subcommand: str, arguments: Sequence[str]) -> list[str]:
    """Return the arguments with whole numbers written out, so that all that is left for tyro is to fill in `cls`.

    Raises:
        IsolossError: An option that `cls` does not have, a value that is none of the choices or no number, a missing
            argument or one too many.

    Example:
        >>> @dataclass(frozen=True)
        ... class Args:
        ...     steps: int = 1000
        >>> read(Args, "train", ["--steps", "1e4"])
        ['--steps', '10000']
        >>> read(Args, "doctor", ["--step", "5"])
        Traceback (most recent call last):
        isoloss.errors.IsolossError: there is no option --step; did you mean --steps? isoloss doctor --help lists all
    """
    known = list(_arguments(cls))
    if any(word in HELP for word in arguments):
        return ["--help"]
    options = {argument.name: argument for argument in known if not argument.is_positional}
    places = [argument for argument in known if argument.is_positional]
    free: list[str] = []
    given: dict[str, list[str]] = {}
    words = [part for word in arguments for part in _parts(word)]
    position = 0
    while position < len(words):
        word, position = words[position], position + 1
        if not _is_option(word):
            free.append(word)
            continue
        name = word.replace("_", "-")
        if name not in options:
            raise IsolossError(
                f"there is no option {word}{_meant(name, options)} isoloss {subcommand} --help lists all"
            )
        values = list(itertools.takewhile(lambda word: not _is_option(word), words[position:]))
        values = values if options[name].is_many else values[: len(options[name].types)]
        position += len(values)
        given[name] = options[name].read(values)
    fixed = [value for argument, own in _placed(places, free, subcommand) for value in argument.read(own)]
    missing = [name for name, option in options.items() if option.is_required and name not in given]
    if missing:
        raise IsolossError(f"{missing[0]} is required: see isoloss {subcommand} --help")
    # words by their place first: an option of many values would take them for its own
    return [*fixed, *(word for name, own in given.items() for word in (name, *own))]


def given(cls: type, subcommand: str, arguments: Sequence[str]) -> set[str]:
    """Return the fields of `cls` whose options stand on the command line, at their defaults or not.

    Example:
        >>> @dataclass(frozen=True)
        ... class Args:
        ...     batch_size: int = 128
        >>> given(Args, "train", ["--batch-size", "128"])
        {'batch_size'}
    """
    words = read(cls, subcommand, arguments)
    return {word.removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}


def _arguments(cls: type) -> Iterator[_Argument]:
    import tyro

    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind, *marks = get_args(hint) if get_origin(hint := hints[field.name]) is Annotated else [hint]
        if dataclasses.is_dataclass(kind):
            yield from _arguments(kind)  # type: ignore[arg-type]
            continue
        is_positional = any(mark in getattr(tyro.conf.Positional[int], "__metadata__", ()) for mark in marks)
        takes_value = any(mark in getattr(tyro.conf.FlagConversionOff[bool], "__metadata__", ()) for mark in marks)
        values, is_many = _values(Literal["True", "False"] if takes_value else kind)
        yield _Argument(
            name=field.name.upper() if is_positional else f"--{field.name.replace('_', '-')}",
            types=values,
            is_many=is_many,
            is_required=field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
            is_positional=is_positional,
        )


def _values(kind: Any) -> tuple[tuple[Any, ...], bool]:
    """Return the types of an argument's values, and whether it takes any number of them.

    A value of several types, such as `int | Literal["all"]`, keeps them all in one.
    """
    if get_origin(kind) in (types.UnionType, Union):
        kind = Union.__getitem__(tuple(part for part in get_args(kind) if part is not types.NoneType))
    if kind is bool:
        return (), False
    if get_origin(kind) is not tuple:
        return (kind,), False
    parts = get_args(kind)
    return ((parts[0],), True) if parts[-1] is Ellipsis else (parts, False)


def _parts(word: str) -> tuple[str, ...]:
    name, equals, value = word.partition("=")
    return (name, value) if equals and name.startswith("--") else (word,)


def _is_option(word: str) -> bool:
    """Whether a word names an option: -1 and -1e-3 are numbers, and - is a name of a file."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _meant(name: str, options: dict[str, _Argument]) -> str:
    bare = name.lstrip("-")
    other = f"--{ALSO_CALLED.get(bare, bare)}"
    return f"; did you mean {other}?" if other in options else did_you_mean(name, options) or ":"


def _placed(places: list[_Argument], free: list[str], subcommand: str) -> Iterator[tuple[_Argument, list[str]]]:
    """Yield each argument by its place with its words."""
    left = list(free)
    for argument in places:
        count = len(left) if argument.is_many else 1
        if not left and not argument.is_many:
            if argument.is_required:
                raise IsolossError(f"{argument.name} is required: see isoloss {subcommand} --help")
            continue
        yield argument, left[:count]
        left = left[count:]
    if left:
        raise IsolossError(f"unexpected argument {left[0]}: see isoloss {subcommand} --help")


def _value(name: str, word: str, kind: Any) -> str:
    if get_origin(kind) is Union:  # a number, or one of some words
        (number,) = (part for part in get_args(kind) if get_origin(part) is not Literal)
        words = [str(choice) for part in get_args(kind) if part is not number for choice in get_args(part)]
        try:
            return word if word in words else _value(name, word, number)
        except IsolossError as error:
            raise IsolossError(f"{error}, or {', '.join(words)}{did_you_mean(word, words)}") from error
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        if word not in choices:
            listed = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
            raise IsolossError(f"{name} is {word!r}; it must be {listed}{did_you_mean(word, choices)}")
    elif kind is int:
        return str(_whole(name, word))
    elif kind is float:
        try:
            float(word)
        except ValueError as error:
            raise IsolossError(f"{name} is {word!r}; it must be a number, such as 0.01 or 1e-3") from error
    return word


def _whole(name: str, word: str) -> int:
    """Return a whole number that is written as 10000, 10_000 or 1e4."""
    try:
        number = Decimal(word)
        if number.is_finite() and number.adjusted() < _MOST_DIGITS and number == number.to_integral_value():
            return int(number)
    except InvalidOperation:
        pass
    raise IsolossError(f"{name} is {word!r}; it must be a whole number, such as 1000 or 1e3")
