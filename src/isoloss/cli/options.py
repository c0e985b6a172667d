"""Command lines by tyro: options from configs, whole numbers as 1e4, and help that opens with examples."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import (
    MISSING_NONPROP,
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
    UnsupportedTypeAnnotationError,
)

from isoloss.errors import IsolossError, did_you_mean, most_like
from isoloss.lab.evaluation.input_config import InputConfig
from isoloss.lab.evaluation.measures.base import name_fields

Sources = Mapping[str, tuple[str, Mapping[str, type]]]
HELP = ("--help", "-h")
HELP_ALL = "--help-all"
FOREIGN = {"--bs": "--batch-size", "--lr": "--learning-rate", "--wd": "--weight-decay"}  # of other programs
_FEW = 4  # examples in a short help
_WIDEST = 100  # columns of prose
_MOST_DIGITS = 18


def parse(
    cls: Any,
    command: str,
    arguments: Sequence[str],
    *,
    examples: Sequence[tuple[str, str]],
    common: Collection[str] = (),
) -> Any:
    """Return `cls` filled from the command line; `--help` opens with the examples.

    The docstring of `cls` says what the command does, and its fields' docstrings are the help.

    Args:
        cls: A dataclass or, where there are subcommands, the dataclass of each by its name.
        command: The words before the arguments, without `isoloss`.
        arguments: The command line.
        examples: Commands, and what each is for; the most usual ones first.
        common: The fields that `--help` shows, by their first sentences, where `--help-all` shows all; empty: all.

    Raises:
        IsolossError: There is no such subcommand or option, a value does not fit, or one is missing.
    """
    parent, others = command, dict[str, type]()
    if isinstance(cls, Mapping):
        name, *rest = arguments or HELP
        if name in cls:
            others, cls, command, arguments = dict(cls), cls[name], f"{command} {name}", rest
            examples = [(line, text) for line, text in examples if f"{line} ".startswith(f"isoloss {command} ")]
        elif name in (*HELP, HELP_ALL):
            cls, arguments = subcommands(cls), HELP[:1]
        else:
            guess = did_you_mean(name, cls) or ";"
            raise IsolossError(f"no subcommand {name!r}{guess} the subcommands are {', '.join(cls)}")
    is_help = not {*HELP, HELP_ALL}.isdisjoint(arguments)
    names = {f"isoloss {parent} {name}": _option_names(other) for name, other in others.items()}
    more = f"isoloss {command} {HELP_ALL if common else HELP[0]}"
    if not is_help and (problem := _problem(_option_names(cls), names, arguments)):
        raise IsolossError(f"{problem} {more} lists all")
    is_short = bool(common) and is_help and HELP_ALL not in arguments
    described = inspect.cleandoc(cls.__doc__ or "").split("\n\n") if dataclasses.is_dataclass(cls) else []
    shown = examples[:_FEW] if is_short else examples
    lines = [f"  {line}\n      {text}" for line, text in shown]
    paragraphs = [_wrapped(text) for text in described[: 1 if is_short else None]] + [
        "\n".join(["examples:", *lines])
    ] * bool(lines)
    if common:
        paragraphs.append(f"{more} shows all options and examples.")
    try:
        with contextlib.redirect_stderr(io.StringIO()) as told:
            return _run(
                cls,
                f"isoloss {command}",
                ["--help" if word == HELP_ALL else word for word in arguments],
                "\n\n".join(paragraphs),
                common if is_short else None,
            )
    except SystemExit as end:
        # after the help, it is not an error
        if not end.code:
            raise
        raise IsolossError(f"{_sentence(told.getvalue())}; {more} says more") from None


def subcommands(kinds: Mapping[str, Any]) -> Any:
    """Return what tyro takes for subcommands, given the dataclass of each or, of each that has its own, these."""
    made = {name: subcommands(kind) if isinstance(kind, Mapping) else kind for name, kind in kinds.items()}
    return Union.__getitem__(tuple(_annotated(kind, tyro.conf.subcommand(name)) for name, kind in made.items()))


def complete(kinds: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Let tyro write a shell's completion of all subcommands; `arguments`: `--tyro-print-completion bash`."""
    _run(subcommands(kinds), "isoloss", arguments, "", None)


def _run(cls: Any, prog: str, arguments: Sequence[str], description: str, shown: Collection[str] | None) -> Any:
    return tyro.cli(
        cls,
        prog=prog,
        args=arguments,
        description=description,
        config=(
            tyro.conf.FlagCreatePairsOff,
            # tyro would take comments beside fields for their help
            tyro.conf.HelptextFromCommentsOff,
            tyro.conf.OmitArgPrefixes,
            tyro.conf.PositionalMetavarFromFieldName,
        ),
        registry=_registry(shown),
    )


def _wrapped(text: str) -> str:
    columns = shutil.get_terminal_size(fallback=(_WIDEST, 24)).columns
    # tyro would join lines that are not indented
    return textwrap.fill(text, min(_WIDEST, columns), subsequent_indent="  ")


def _sentence(box: str) -> str:
    """Return what tyro says of a command line in a box, as the end of a sentence."""
    title, *parts = re.split(r"^[│╰ ]*[─-]{3,}[─│╯ -]*$", box, flags=re.MULTILINE)
    # a rule stands below the title where the terminal has no frames; below another stand hints
    _, *message = title.strip().splitlines()
    # two characters are the frame; the help of an argument is indented
    lines = [line[2:].rstrip(" │") for line in message or parts[0].strip("\n").splitlines()]
    lines = [line.strip() for line in lines if not line.startswith(8 * " ")]
    text = " ".join(lines)
    if found := re.fullmatch(r"invalid choice '(.*)' for argument '(.*)'\. Expected one of \((.*)\) ?\.", text):
        value, name, choices = found[1], found[2], re.findall("'(.*?)'", found[3])
        wanted = f"{'one of ' * (len(choices) > 1)}{', '.join(choices)}"
        return f"{name} is {value!r}{did_you_mean(value, choices) or ';'} it must be {wanted}"
    if found := re.fullmatch(r"Missing value for argument '(.*)'\. Expected (\d+) values\.", text):
        return f"{found[1]} needs {found[2]} value{'s' * (found[2] != '1')}"
    if lines[0].startswith("Missing from "):
        return f"{' and '.join(lines[1:])} {'are' if len(lines) > 2 else 'is'} missing"
    return text.replace("Error parsing ", "", 1).replace("Unrecognized options", "there is no argument", 1)


def _problem(known: Collection[str], others: Mapping[str, Collection[str]], words: Iterable[str]) -> str:
    """Return what is wrong with the options in a command line; `others`: the options of other subcommands."""
    for word in words:
        option = word.partition("=")[0]
        name = option.replace("_", "-")
        if name == "--" or not name.startswith("--") or name.startswith("--tyro-") or name in known:
            continue
        if having := [other for other, names in others.items() if name in names]:
            return f"{option} is an option of {', '.join(having)};"
        guess = FOREIGN.get(name, "")
        # without the dashes, which would make all short options alike
        if guess not in known:
            choices = [other.removeprefix("--") for other in (*known, *itertools.chain(*others.values()))]
            guess = f"--{most_like(name.removeprefix('--'), choices) or ''}"
        return f"there is no option {option}{f'; did you mean {guess}?' if guess != '--' else ':'}"
    return ""


def _option_names(cls: Any) -> set[str]:
    """The options of a dataclass, and of the groups in it."""
    if isinstance(cls, type) and issubclass(cls, Options):
        return {option_name(name) for name in cls.sources}
    names: set[str] = set()
    for name, hint in get_type_hints(cls, include_extras=True).items() if dataclasses.is_dataclass(cls) else ():
        if _is_group(hint) or dataclasses.is_dataclass(_bare(hint)):
            names |= _option_names(_bare(hint))
        elif tyro.conf.Positional not in get_args(hint)[1:]:
            names.add(option_name(name))
    return names


def option_name(field: str) -> str:
    """Return how the command line calls a field.

    Example:
        >>> option_name("learning_rate")
        '--learning-rate'
    """
    return f"--{field.replace('_', '-')}"


# --- options from configs --------------------------------------------------------------------------------------------


class Options(dict[str, Any]):
    """The options that were given, by name: what was not given is left to the config, or to a preset.

    A subclass says which options there are, and its docstring stands above them in the help.
    """

    sources: ClassVar[Sources] = {}
    names_configs: ClassVar[bool] = False  # whether the help says which configs an option is of


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


class LanguageOptions(Options):
    """How a language that is text, a file or a causal model is read."""

    sources = sources_of({"language": _TextConfig})


class _Inputs(Options):
    """How text or token ids become inputs."""

    sources = sources_of({"inputs": InputConfig})


def with_measures(cls: type, measures: Mapping[str, type]) -> type:
    """Return a command's arguments with a group `inputs` of `InputConfig`, and a group `measure` of measures' settings.

    A setting that the name of a measure gives is no option.
    """
    named = {field for measure in measures for field in name_fields(measure)}
    about = {"sources": sources_of(measures, exclude=named), "__doc__": "Settings of the measures that have them."}
    groups: dict[str, type] = {"inputs": _Inputs, "measure": type("_Measure", (Options,), about)}
    made = dataclasses.make_dataclass(
        cls.__name__,
        [(name, group, dataclasses.field(default_factory=group)) for name, group in groups.items()],
        bases=(cls,),
        frozen=True,
        kw_only=True,
    )
    made.__doc__ = cls.__doc__
    return made


@functools.cache
def _texts(config: type) -> Mapping[str, str]:
    """The docstring of each field of a config, inherited ones too: read for help alone, as it takes a second."""
    import docstring_parser

    texts: dict[str, str] = {}
    # a subclass may describe a field anew, so it comes after its bases
    for cls in reversed(config.__mro__[:-1]):
        for param in docstring_parser.parse_from_object(cls).params:
            texts[param.arg_name] = " ".join((param.description or "").split())
    # of a setting that is the argument of a function
    return texts | {one.name: one.metadata["help"] for one in dataclasses.fields(config) if "help" in one.metadata}


def settings(config: type, *, exclude: Collection[str], prefix: str = "") -> list[dict[str, Any]]:
    """Return the name, default and description of each field of a config."""
    return [
        {
            "setting": f"{prefix}{field.name}",
            "default": _shown(_default(field)),
            "description": _texts(config)[field.name],
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


def _option(options: type[Options], name: str) -> StructFieldSpec:
    """Return an option that is None unless given; a flag, which can only turn on, stands at False."""
    field, configs = options.sources[name]
    fields = {word: next(one for one in dataclasses.fields(cfg) if one.name == field) for word, cfg in configs.items()}
    defaults = {word: _default(one) for word, one in fields.items()}
    hints = [get_type_hints(config, include_extras=True)[field] for config in configs.values()]
    hint, is_flag = hints[0], hints[0] is bool and not any(defaults.values())
    # configs that share an option may list other choices: all are taken here, and each config checks its own
    if get_origin(hint) is Literal:
        hint = Literal.__getitem__(tuple(dict.fromkeys(choice for one in hints for choice in get_args(one))))
    shown = {word: told for word, value in defaults.items() if (told := _shown(value)) is not None}
    mark = tyro.conf.arg(help_behavior_hint=f"(default: {_by_word(shown, ', ')})" if shown else "")
    everybody = {word for _, others in options.sources.values() for word in others}
    is_told = options.names_configs and configs.keys() != everybody

    # a function, as only --help needs the text, and reading docstrings takes a second
    def text() -> str:
        return _by_word({word: _texts(cfg).get(field, "") for word, cfg in configs.items()}, " ", always=is_told)

    return StructFieldSpec(
        name=name,
        type=_annotated(hint if is_flag else hint | None, mark),
        default=False if is_flag else None,
        helptext=text,
    )


def _argument(field: dataclasses.Field[Any], hint: Any, cls: Any, default: Any) -> StructFieldSpec:
    """Return an argument of a command: no `(default: None)` or `(default: False)`, as the text says what these are."""
    # tyro would show a tuple as optional, though without a default it is required
    if default is MISSING_NONPROP and get_origin(_bare(hint)) is tuple:
        mark = tyro.conf.arg(metavar=f"{field.name.upper()} ...", help_behavior_hint="(required)")
    else:
        mark = tyro.conf.arg(help_behavior_hint="" if default in (None, (), "") or default is False else None)
    return StructFieldSpec(
        name=field.name,
        type=_annotated(hint, mark),
        default=default,
        helptext=lambda: _bare(hint).__doc__ if _is_group(hint) else _texts(cls).get(field.name),
    )


def _annotated(hint: Any, mark: object) -> Any:
    return Annotated[hint, mark]


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _is_group(hint: Any) -> bool:
    return isinstance(_bare(hint), type) and issubclass(_bare(hint), Options)


# --- what tyro is told of types --------------------------------------------------------------------------------------


def _registry(shown: Collection[str] | None) -> ConstructorRegistry:
    """Return the rules by which tyro reads our types; `shown`: the only fields that are in the help."""
    registry = ConstructorRegistry()
    registry.primitive_rule(_whole_number)
    registry.primitive_rule(_number_or_word)
    registry.primitive_rule(_optional)
    registry.primitive_rule(_list)
    registry.struct_rule(functools.partial(_struct, shown))
    return registry


def _struct(shown: Collection[str] | None, info: StructTypeInfo) -> StructConstructorSpec | None:
    cls: Any = info.type
    make: Callable[..., Any] = cls
    if isinstance(cls, type) and issubclass(cls, Options):
        specs = [_option(cls, name) for name in cls.sources]
        unset = {spec.name: spec.default for spec in specs}

        def make(**values: Any) -> Any:
            return cls({name: value for name, value in values.items() if value != unset[name]})

    elif dataclasses.is_dataclass(cls) and cls.__module__.partition(".")[0] != "tyro":  # which wraps unions in its own
        hints, specs = get_type_hints(cls, include_extras=True), []
        for field in dataclasses.fields(cls):
            default = _default(field)
            is_missing = default is dataclasses.MISSING or _is_group(hints[field.name])
            specs.append(_argument(field, hints[field.name], cls, MISSING_NONPROP if is_missing else default))
    else:
        return None
    if shown is not None:
        for place, spec in enumerate(specs):
            if spec.name in shown:
                specs[place] = dataclasses.replace(spec, helptext=functools.partial(_first_sentence, spec.helptext))
            elif _is_group(spec.type) or dataclasses.is_dataclass(_bare(spec.type)):
                specs[place] = dataclasses.replace(spec, helptext="")
            else:
                specs[place] = dataclasses.replace(spec, type=_annotated(spec.type, tyro.conf.Suppress))
    return StructConstructorSpec(instantiate=make, fields=tuple(specs))


def _first_sentence(text: str | Callable[[], str | None] | None) -> str:
    return re.split(r"(?<=\.) (?=[A-Z])", (text() if callable(text) else text) or "")[0]


def _whole_number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    """Whole numbers may be written as 10000, 10_000 or 1e4."""
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda words: _read_whole(words[0]),
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def _read_whole(word: str) -> int:
    try:
        number = Decimal(word)
        # the exponent is looked at first: as an int, 1e999999999 would fill the memory
        if number.is_finite() and number.adjusted() < _MOST_DIGITS and number == number.to_integral_value():
            return int(number)
    except InvalidOperation:
        pass
    raise ValueError(f"{word!r} is not a whole number, such as 1000 or 1e3")


def _number_or_word(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int | str] | None:
    """A whole number or one of some words, such as `all`: tyro's own message about neither fills ten lines."""
    kinds = get_args(info.type) if get_origin(info.type) in (Union, UnionType) else ()
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if int not in kinds or not words or len(kinds) > 2:
        return None

    def read(found: list[str]) -> int | str:
        try:
            return found[0] if found[0] in words else _read_whole(found[0])
        except ValueError as error:
            raise ValueError(f"{error}, and not {' or '.join(words)}") from error

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="|".join(["INT", *words]),
        instance_from_str=read,
        is_instance=lambda value: isinstance(value, int) or value in words,
        str_from_instance=lambda value: [str(value)],
    )


def _list(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[tuple[Any, ...]] | None:
    """Any number of values of one type: tyro's own message about a wrong one does not say what is wrong."""
    kinds = get_args(info.type) if get_origin(info.type) is tuple else ()
    if kinds[1:] != (...,):
        return None
    one = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], set(info.markers)))
    if isinstance(one, UnsupportedTypeAnnotationError) or one.nargs != 1:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar=f"[{one.metavar} [{one.metavar} ...]]",
        instance_from_str=lambda words: tuple(one.instance_from_str([word]) for word in words),
        is_instance=lambda values: isinstance(values, tuple) and all(map(one.is_instance, values)),
        str_from_instance=lambda values: [word for value in values for word in one.str_from_instance(value)],
        choices=one.choices,
    )


def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | UnsupportedTypeAnnotationError | None:
    """An option that may be left out is read as its type without None, so that help and messages list no None."""
    kinds = get_args(info.type) if get_origin(info.type) in (Union, UnionType) else ()
    if NoneType not in kinds:
        return None
    inner: Any = Union.__getitem__(tuple(kind for kind in kinds if kind is not NoneType))
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(inner, set(info.markers)))
    if isinstance(spec, UnsupportedTypeAnnotationError):
        return spec
    return dataclasses.replace(
        spec,
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: [] if value is None else spec.str_from_instance(value),
    )
