"""Command lines by argparse: options from dataclasses and configs, whole numbers as 1e4, examples first in the help."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from isoloss.errors import IsolossError, did_you_mean, most_like
from isoloss.lab.evaluation.input_config import InputConfig
from isoloss.lab.evaluation.measures.base import name_fields
from isoloss.schema import descriptions

T = TypeVar("T")
_BY_PLACE = object()
Positional = Annotated[T, _BY_PLACE]  # an argument that is named by its place; a string in `Annotated` is its help

Sources = Mapping[str, tuple[str, Mapping[str, type]]]
HELP = ("--help", "-h")
HELP_ALL = "--help-all"
ALIASES = {  # of other programs, and of earlier versions
    "--bs": "--batch-size",
    "--lr": "--learning-rate",
    "--wd": "--weight-decay",
}
RENAMED = {"--same-loss-nats": "--loss-margin"}
_FEW = 4  # examples in a short help
_WIDEST = 100  # columns of help
_MOST_DIGITS = 18


def parse(
    cls: Any,
    command: str,
    arguments: Sequence[str],
    *,
    examples: Sequence[tuple[str, str]],
    common: str = "",
) -> Any:
    """Return `cls` filled from the command line; `--help` opens with the examples.

    The docstring of `cls` says what the command does, and its fields' docstrings are the help.

    Args:
        cls: A dataclass or, where there are subcommands, the dataclass of each by its name.
        command: The words before the arguments, without `isoloss`.
        arguments: The command line.
        examples: Commands, and what each is for; the most usual ones first.
        common: The names of the fields that `--help` shows, by their first sentences; empty: all, as `--help-all` does.

    Raises:
        IsolossError: There is no such subcommand or option, a value does not fit, or one is missing.
    """
    others: Mapping[str, Any] = {}
    parent = command
    if isinstance(cls, Mapping):
        name, *rest = arguments or HELP
        if name in (*HELP, HELP_ALL):
            lines = [f"  {name:<10} {_first_sentence(inspect.cleandoc(kind.__doc__))}" for name, kind in cls.items()]
            listed = "\n".join(["subcommands:", *lines])
            print(f"usage: isoloss {command} SUBCOMMAND [...]\n\n{_listed(examples)}\n\n{listed}")
            raise SystemExit(0)
        if name not in cls:
            guess = did_you_mean(name, cls) or ";"
            raise IsolossError(f"no subcommand {name!r}{guess} the subcommands are {', '.join(cls)}")
        others, cls, command, arguments = cls, cls[name], f"{command} {name}", rest
        examples = [(line, text) for line, text in examples if f"{line} ".startswith(f"isoloss {command} ")]
    more = f"isoloss {command} {HELP_ALL if common else HELP[0]}"
    parser = Parser(f"isoloss {command}", more)
    if not {*HELP, HELP_ALL}.isdisjoint(arguments):
        shown = common.split() if common and HELP_ALL not in arguments else None
        parser.print_described(cls, examples, shown, more if common else "")
        raise SystemExit(0)
    add_options(parser, cls)
    words = [parser.known_as(word) for word in arguments]
    for word, given in zip(words, arguments, strict=True):
        if word.startswith("--") and word != "--" and word.partition("=")[0] not in parser.options:
            raise IsolossError(f"{_unknown(given.partition('=')[0], parser, parent, others)} {more} lists all")
    found, rest = parser.parse_known_intermixed_args(words)
    if rest:
        parser.error(f"there is no argument: {', '.join(rest)}")
    return _made(cls, vars(found))


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are one sentence."""

    def __init__(self, prog: str, more: str = "", **others: Any) -> None:
        super().__init__(
            prog,
            usage="",
            add_help=False,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=functools.partial(
                argparse.RawDescriptionHelpFormatter, max_help_position=26, width=_columns()
            ),
            **others,
        )
        self.more = more
        # argparse takes -1e-3 for an option
        self._negative_number_matcher = re.compile(r"-\.?\d")

    @property
    def options(self) -> Collection[str]:
        """The options that were added."""
        return self._option_string_actions.keys()

    def known_as(self, word: str) -> str:
        """Return a word of the command line with the option in it by the name that it has here."""
        if not word.startswith("--"):
            return word
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        alias = ALIASES.get(name, name)
        return f"{alias if alias in self.options else name}{equals}{value}"

    def error(self, message: str) -> NoReturn:
        """Raise what argparse says of a command line."""
        if found := re.fullmatch(r"argument (\S+): expected (one|at least one|\d+) arguments?", message):
            number = found[2] if found[2].isdecimal() else "1"
            message = f"{found[1]} needs {number} value{'s' * (number != '1')}"
        elif found := re.fullmatch(r"the following arguments are required: (.*)", message):
            names = found[1].split(", ")
            message = f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} missing"
        elif found := re.fullmatch(r"argument (\S+): (.*)", message):
            # what is named by its place has a word in capitals in the help
            name = found[1] if found[1].startswith("-") else found[1].strip("[]").lower()
            message = f"{name}{'' if found[2].startswith('is ') else ':'} {found[2]}"
        raise IsolossError(f"{message}; {self.more} says more")

    def print_described(
        self, cls: Any, examples: Sequence[tuple[str, str]], shown: Collection[str] | None, more: str
    ) -> None:
        """Print the help; `shown`: the only fields that are in it."""
        self.add_argument(*HELP[::-1], action="help", help="this text")
        add_options(self, cls, shown=shown, describes=True)
        described = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
        text = [textwrap.fill(paragraph, _columns()) for paragraph in described[: 1 if shown else None]]
        text += [_listed(examples[: _FEW if shown else None])] * bool(examples)
        text += [f"{more} shows all options and examples."] * bool(more)
        places = [str(action.metavar) for action in self._get_positional_actions()]
        self.usage = " ".join([f"{self.prog} [OPTIONS]", *places])
        self.description = "\n\n".join(text)
        self.print_help()


def _columns() -> int:
    return min(_WIDEST, shutil.get_terminal_size(fallback=(_WIDEST, 24)).columns)


def _listed(examples: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["examples:", *(f"  {line}\n      {text}" for line, text in examples)])


def _unknown(option: str, parser: Parser, parent: str, others: Mapping[str, Any]) -> str:
    """Return what is wrong with an option that there is not; `others`: the subcommands beside this one."""
    if (renamed := RENAMED.get(option.replace("_", "-"))) in parser.options:
        return f"{option} is now called {renamed};"
    names: dict[str, Collection[str]] = {}
    for name, cls in others.items():
        add_options(other := Parser(name), cls)
        names[f"isoloss {parent} {name}"] = other.options
    if having := [other for other, options in names.items() if option.replace("_", "-") in options]:
        return f"{option} is an option of {', '.join(having)};"
    # without the dashes, which would make all short options alike
    choices = [known.removeprefix("--") for options in (parser.options, *names.values()) for known in options]
    guess = most_like(option.removeprefix("--"), choices)
    return f"there is no option {option}{f'; did you mean --{guess}?' if guess else ':'}"


def add_options(parser: Any, cls: Any, *, shown: Collection[str] | None = None, describes: bool = False) -> None:
    """Add the options of a dataclass, and of the groups in it, to a parser.

    With `describes`, there is a help: docstrings are read, and the help has the fields in `shown` (None: all).
    """
    for field, hint in _hinted(cls):
        kind = _bare(hint)
        if _is_group(kind):
            fields = (
                kind.sources if issubclass(kind, GivenOptions) else [inner.name for inner in dataclasses.fields(kind)]
            )
            is_shown = describes and (shown is None or not set(shown).isdisjoint(fields))
            about = inspect.cleandoc(kind.__doc__ or "") if shown is None else None
            title = f"{field.name.replace('_', ' ')} options"
            group = parser.add_argument_group(title, about) if is_shown else parser
            if issubclass(kind, GivenOptions):
                for name in kind.sources:
                    kind.add(group, name, shown=shown, describes=describes)
            else:
                add_options(group, kind, shown=shown, describes=describes)
            continue
        help_of = functools.partial(_help_of, cls, field, hint)
        _add(parser, field.name, hint, _default(field), help_of if describes else None, shown)


def _add(
    parser: Any,
    name: str,
    hint: Any,
    default: Any,
    help_of: Callable[[], str] | None,
    shown: Collection[str] | None,
) -> None:
    """Add one option or, by its place, one argument."""
    about = "" if help_of is None or (shown is not None and name not in shown) else help_of()
    if shown is not None:
        about = _first_sentence(about) if name in shown else argparse.SUPPRESS
    kind, is_by_place = _bare(hint), _BY_PLACE in get_args(hint)[1:]
    of = [inner for inner in get_args(kind) if inner is not NoneType]
    if NoneType in get_args(kind) and len(of) == 1:
        kind = of[0]
    told: dict[str, Any] = {"help": about if about == argparse.SUPPRESS else about.replace("%", "%%")}
    if kind is bool and default is False:
        parser.add_argument(option_name(name), action="store_true", **told)
        return
    items = get_args(kind) if get_origin(kind) is tuple else ()
    told["type"], told["metavar"] = _reader(items[0] if items else kind)
    if items:
        told["nargs"] = "*" if items[1:] == (...,) else len(items)
    if not is_by_place:
        parser.add_argument(option_name(name), required=default is dataclasses.MISSING, dest=name, **told)
        return
    told["metavar"] = f"{name.upper()}{' ...' * bool(items)}"
    if items:
        told["default"] = None
    elif default is not dataclasses.MISSING:
        # argparse would give a default that is a word, as SUPPRESS is, to the reader
        told |= {"nargs": "?", "default": None, "metavar": f"[{told['metavar']}]"}
    parser.add_argument(name, **told)


def _made(cls: Any, values: Mapping[str, Any]) -> Any:
    """Return a dataclass with the values that were given."""
    made: dict[str, Any] = {}
    for field, hint in _hinted(cls):
        kind = _bare(hint)
        if _is_group(kind):
            made[field.name] = kind.of(values) if issubclass(kind, GivenOptions) else _made(kind, values)
        elif values.get(field.name) is not None:
            value = values[field.name]
            made[field.name] = tuple(value) if isinstance(value, list) else value
        elif _default(field) is dataclasses.MISSING:
            made[field.name] = ()  # what may be any number of values is not required by argparse
    return cls(**made)


# --- types -----------------------------------------------------------------------------------------------------------


def _reader(kind: Any) -> tuple[Callable[[str], Any], str]:
    """Return how a word becomes a value of a type, and what stands for it in the help."""
    kinds = [inner for inner in get_args(kind) if inner is not NoneType] if _is_union(kind) else [kind]
    words = {str(word): word for inner in kinds if get_origin(inner) is Literal for word in get_args(inner)}
    if bool in kinds:
        words |= {"True": True, "False": False}
    plain = [inner for inner in kinds if get_origin(inner) is not Literal and inner is not bool]
    if unknown := [inner for inner in plain if inner not in _READERS]:
        raise TypeError(f"the command line reads no {unknown[0]}")

    def read(word: str) -> Any:
        if word in words:
            return words[word]
        if not plain:
            one = f"{'one of ' * (len(words) > 1)}{', '.join(words)}"
            raise argparse.ArgumentTypeError(f"is {word!r}{did_you_mean(word, words) or ';'} it must be {one}")
        for inner in plain:
            with contextlib.suppress(ValueError):
                return _READERS[inner](word)
        wanted = ", or ".join([" or ".join(_WANTED[inner] for inner in plain), *[" or ".join(words)] * bool(words)])
        raise argparse.ArgumentTypeError(f"is {word!r}; it must be {wanted}")

    names = [inner.__name__.upper() for inner in plain]
    return read, "|".join([*names, *words]) if names else f"{{{','.join(words)}}}"


def _read_whole(word: str) -> int:
    """Whole numbers may be written as 10000, 10_000 or 1e4."""
    try:
        number = Decimal(word)
        # the exponent is looked at first: as an int, 1e999999999 would fill the memory
        if number.is_finite() and number.adjusted() < _MOST_DIGITS and number == number.to_integral_value():
            return int(number)
    except InvalidOperation:
        pass
    raise ValueError(word)


_READERS: dict[Any, Callable[[str], Any]] = {int: _read_whole, float: float, str: str, Path: Path}
_WANTED = {int: "a whole number, such as 1000 or 1e3", float: "a number"}


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, GivenOptions) or dataclasses.is_dataclass(kind))


def _hinted(cls: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(cls, include_extras=True)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


def option_name(field: str) -> str:
    """Return how the command line calls a field: learning_rate is --learning-rate, and import_ is --import."""
    return f"--{field.rstrip('_').replace('_', '-')}"


# --- help ------------------------------------------------------------------------------------------------------------


def _help_of(cls: Any, field: dataclasses.Field[Any], hint: Any) -> str:
    """Return the help of an argument; no default of None or False, as the text says what these are."""
    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()  # a Literal's arguments are its choices
    own = next((note for note in notes if isinstance(note, str)), None)
    text = own or descriptions(cls).get(field.name, "")
    default = _default(field)
    if default is dataclasses.MISSING:
        return f"{text} (required)"
    return text if (told := _shown(default)) is None or default is False else f"{text} (default: {told})"


def _first_sentence(text: str) -> str:
    sentence = re.split(r"(?<=\.) (?=[A-Z])", " ".join(text.split()))[0]
    default = re.search(r" \(default: [^)]*\)$", text)
    return sentence + (default[0] if default and default[0] not in sentence else "")


def settings(config: type, *, exclude: Collection[str], prefix: str = "") -> list[dict[str, Any]]:
    """Return the name, default and description of each field of a config."""
    return [
        {
            "setting": f"{prefix}{field.name}",
            "default": _shown(_default(field)),
            "description": descriptions(config)[field.name],
        }
        for field in dataclasses.fields(config)
        if field.name not in exclude
    ]


def _shown(default: Any) -> str | None:
    """Return a default as the help has it; None where it says nothing, or where the text says what it stands for."""
    if default in (None, (), "", dataclasses.MISSING):
        return None
    return " ".join(map(str, default if isinstance(default, tuple) else (default,)))


def _by_word(values: Mapping[str, str], separator: str, *, always: bool = False) -> str:
    """Return the one value, or each with the words for the configs that it is of."""
    words: dict[str, list[str]] = {}
    for word, value in values.items():
        words.setdefault(value, []).append(word)
    if len(words) == 1 and not always:
        return next(iter(words))
    return separator.join(f"{' and '.join(own)}: {value}" for value, own in words.items())


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


# --- options from configs --------------------------------------------------------------------------------------------


class GivenOptions(dict[str, Any]):
    """The options that were given, by name: what was not given is left to the config, or to a preset.

    A subclass says which options there are, and its docstring stands above them in the help.
    """

    sources: ClassVar[Sources] = {}
    names_configs: ClassVar[bool] = False  # whether the help says which configs an option is of

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return those of the values that are options of this kind."""
        return cls({name: values[name] for name in cls.sources if name in values})

    @classmethod
    def add(cls, parser: Any, name: str, *, shown: Collection[str] | None, describes: bool) -> None:
        """Add an option to a parser or a group of it."""
        field, configs = cls.sources[name]
        every: Any = configs
        defaults = {word: _default(config.__dataclass_fields__[field]) for word, config in every.items()}
        hints = [get_type_hints(config, include_extras=True)[field] for config in configs.values()]
        # configs that share an option may list other choices: all are taken here, and each config checks its own
        if get_origin(hint := hints[0]) is Literal:
            hint = Literal.__getitem__(tuple(dict.fromkeys(choice for one in hints for choice in get_args(one))))

        def help_of() -> str:
            everybody = {word for _, others in cls.sources.values() for word in others}
            texts = {word: descriptions(config).get(field, "") for word, config in configs.items()}
            text = _by_word(texts, " ", always=cls.names_configs and configs.keys() != everybody)
            told = {word: value for word, default in defaults.items() if (value := _shown(default)) is not None}
            own = _by_word(told, ", ", always=told.keys() != configs.keys())  # the others' texts say theirs
            return f"{text} (default: {own})" if told and not is_flag else text

        is_flag = hint is bool and not any(defaults.values())
        _add(parser, name, hint, False if is_flag else None, help_of if describes else None, shown)


def sources_of(
    configs: Mapping[str, type], *, exclude: Collection[str] = (), prefixed: bool = False
) -> dict[str, tuple[str, dict[str, type]]]:
    """Return an option for each field of configs, once each: by its name, the field and the configs that have it.

    Args:
        configs: Dataclasses whose fields have defaults, by the word for each in the help.
        exclude: Fields that are no options.
        prefixed: Whether each option begins with the word for its config.
    """
    sources: dict[str, tuple[str, dict[str, type]]] = {}
    for word, config in configs.items():
        for field in dataclasses.fields(config):
            if field.name not in exclude:
                name = f"{word.replace('-', '_')}_{field.name}" if prefixed else field.name
                sources.setdefault(name, (field.name, {}))[1][word] = config
    return sources


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How checkpoints are loaded."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint. Only for checkpoints that you trust."""
    ignore_unexpected_weights: bool = False
    """Leave out weights that the checkpoint has and the model of its config.json does not, such as biases."""


@dataclass(frozen=True, kw_only=True)
class ModuleLoading(Loading):
    """How checkpoints, or modules of one's own, are loaded."""

    module: str | None = None
    """FILE.py:NAME: the file is run, and its function NAME returns an nn.Module that predicts next tokens. The
    checkpoints are then files of its weights: .safetensors, or a state dict (.pt, .pth, .bin, .ckpt)."""


@dataclass(frozen=True, kw_only=True)
class _TextConfig:
    tokenizer: str | None = None
    """For text: a Hugging Face folder or name, or a vocab.txt."""
    length: int | None = None
    """For text: tokens in a packed sequence. For a grammar file: the longest sentence. For a causal model: tokens."""
    column: str | None = None
    """For JSON lines and datasets: the field or column with the text; default: text."""
    split: str | None = None
    """For datasets; default: train."""
    max_documents: int | None = None
    """For text: how many documents are taken; default: all."""


class LanguageOptions(GivenOptions):
    """How a language that is text, a file or a causal model is read."""

    sources = sources_of({"language": _TextConfig})


class _Inputs(GivenOptions):
    """How text or token ids become inputs."""

    sources = sources_of({"inputs": InputConfig})


def with_measures(cls: type, measures: Mapping[str, type]) -> type:
    """Return a command's arguments with a group `inputs` of `InputConfig`, and a group `measure` of measures' settings.

    A setting that the name of a measure gives is no option.
    """
    named = {field for measure in measures for field in name_fields(measure)}
    about = {"sources": sources_of(measures, exclude=named), "__doc__": "Settings of the measures that have them."}
    groups: dict[str, type] = {"inputs": _Inputs, "measure": type("_Measure", (GivenOptions,), about)}
    made = dataclasses.make_dataclass(
        cls.__name__,
        [(name, group, dataclasses.field(default_factory=group)) for name, group in groups.items()],
        bases=(cls,),
        frozen=True,
        kw_only=True,
    )
    made.__doc__ = cls.__doc__
    return made
