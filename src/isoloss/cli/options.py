"""Options from configs: command-line dataclasses that are made, at run time, from the configs of what is registered.

tyro turns a dataclass into options; here such dataclasses come from the configs themselves, so that a default, a choice
or a line of help stands in one place. A nested dataclass that is marked `tyro.conf.OmitArgPrefixes` is a group of
`--help` with flat names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import docstring_parser
import tyro

from isoloss.errors import IsolossError, warn
from isoloss.evaluation.measures.base import name_fields
from isoloss.registry import MEASURES

T = TypeVar("T")


def option_name(field: str) -> str:
    """Return how the command line calls a field.

    Example:
        >>> option_name("learning_rate")
        '--learning-rate'
    """
    return f"--{field.replace('_', '-')}"


@functools.cache
def help_texts(config: type) -> Mapping[str, str]:
    """Return the docstring of each field of a config, those that it inherits too."""
    texts: dict[str, str] = {}
    for cls in reversed(config.__mro__[:-1]):
        parsed = docstring_parser.parse_from_object(cls).params
        texts |= {param.arg_name: " ".join((param.description or "").split()) for param in parsed}
    return texts


def options_of(name: str, *configs: type, exclude: Iterable[str] = ()) -> type:
    """Return a dataclass with the fields of configs, once each, with their defaults and help, but for those excluded.

    All fields have defaults, and a field that several configs have is the same in all. The help of a field whose
    default is None or empty says itself what that stands for.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Probe:
        ...     epochs: int = 100
        >>> options_of("Options", Probe)().epochs
        100
    """
    fields: dict[str, tuple[str, Any, dataclasses.Field[Any]]] = {}
    for config in configs:
        hints = get_type_hints(config, include_extras=True)
        for field in dataclasses.fields(config):
            if field.name in exclude:
                continue
            text = help_texts(config).get(field.name, "")
            told = tyro.conf.arg(
                help=text,
                help_behavior_hint="" if _default(field) in (None, (), "") else None,
                metavar=_metavar(hints[field.name]),
            )
            marks = (told, *_switch(_default(field)))
            hint = Annotated.__class_getitem__((hints[field.name], *marks))  # type: ignore[attr-defined]
            fields[field.name] = field.name, hint, dataclasses.field(default=_default(field), metadata=field.metadata)
    return dataclasses.make_dataclass(name, list(fields.values()), frozen=True, kw_only=True)


def unset(name: str, configs: Mapping[str, type]) -> Any:
    """Return the annotation of an option that is None unless given: what any of the components takes in this field.

    Its help has the text and the default of each component, by `configs`, once where they are the same.
    """
    hints = [get_type_hints(config, include_extras=True)[name] for config in configs.values()]
    if get_origin(hints[0]) is Literal:
        choices = dict.fromkeys(choice for hint in hints for choice in get_args(hint))
        hints[0] = Literal.__getitem__(tuple(choices))
    defaults = {
        kind: _default(field)
        for kind, config in configs.items()
        for field in dataclasses.fields(config)
        if field.name == name
    }
    told = {kind: "" if value is None else _told(value) for kind, value in defaults.items()}
    texts = {kind: " ".join(help_texts(config).get(name, "").split()) for kind, config in configs.items()}
    hint = f"(default: {_by_component(told, ', ')})" if any(told.values()) else ""
    mark = tyro.conf.arg(help=_by_component(texts, " "), help_behavior_hint=hint, metavar=_metavar(hints[0]))
    switch = _switch(next(iter(defaults.values())))
    return Annotated.__class_getitem__((hints[0] | None, mark, *switch))  # type: ignore[attr-defined]


def _switch(default: Any) -> tuple[Any, ...]:
    """Return the mark of an option `--name False`: a flag could only turn on what is on by default."""
    return getattr(tyro.conf.FlagConversionOff[bool], "__metadata__", ()) if default is True else ()


def _by_component(texts: Mapping[str, str], separator: str) -> str:
    """Return the one text, or each with the components that it is of."""
    kinds: dict[str, list[str]] = {}
    for kind, text in texts.items():
        kinds.setdefault(text, []).append(kind)
    if len(kinds) == 1:
        return next(iter(kinds))
    return separator.join(f"{' and '.join(own)}: {text}" for text, own in kinds.items())


def titled(options: type, title: str) -> Any:
    """Return the annotation of a group of options that `--help` has under `TITLE options`."""
    return Annotated.__class_getitem__((options, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=title)))  # type: ignore[attr-defined]


def group(name: str, members: Mapping[str, Any], title: str, text: str = "") -> tuple[str, Any, Any]:
    """Return a field that is a group of options, each None unless given.

    Args:
        name: The field's name.
        members: The options' annotations, by name.
        title: What `--help` has it under.
        text: What stands there above the options.
    """
    made: Any = dataclasses.make_dataclass(
        name, [(*member, None) for member in members.items()], frozen=True, kw_only=True
    )
    made.__doc__ = text
    return name, titled(made, title), dataclasses.field(default_factory=made)


def component_options(name: str, configs: Mapping[str, type], *, option: str) -> type:
    """Return a dataclass with an optional field `KIND_FIELD` for each field of the components' configs but their kind.

    Its groups are the kinds, in the order of `configs`; `option` chooses one: `--algorithm`. `chosen` makes the config
    of one component of it; an option that was not given is None.
    """
    groups = []
    for kind, config in configs.items():
        fields = [field.name for field in dataclasses.fields(config) if field.name != "kind"]
        members = {f"{_identifier(kind)}_{field}": unset(field, {kind: config}) for field in fields}
        if members:
            text = (config.__doc__ or "").partition("\n")[0]
            groups.append(group(_identifier(kind), members, f"{option} {kind}", text))
    return dataclasses.make_dataclass(name, groups, frozen=True, kw_only=True)


def chosen(options: Any, kind: str, config: type[T], *, option: str) -> T:
    """Return the config of the component `kind` with what the command line gave of it.

    `options` are of the class that `component_options` returned, and `option` chooses a component: `--algorithm`.

    Raises:
        IsolossError: An option of another component was given.
    """
    values: dict[str, Any] = {}
    for part in dataclasses.fields(options):
        own = part.name == _identifier(kind)
        for name, value in vars(getattr(options, part.name)).items():
            if value is not None and not own:
                raise IsolossError(f"{option_name(name)} needs {option} {part.name.replace('_', '-')}")
            if value is not None:
                values[name.removeprefix(f"{part.name}_")] = value
    return config(**values)


def select(options: Any, config: type[T]) -> T:
    """Return a config with the values that `options` has for its fields."""
    return config(**{field.name: getattr(options, field.name) for field in dataclasses.fields(config)})  # type: ignore[arg-type]


def as_told(cls: type[T]) -> type[T]:
    """Return `cls` with its help as it is to be read: whole paragraphs, shapes without brackets in brackets.

    There is no `(default: None)`, where the text says what None stands for. Of a required tuple, whose default tyro
    shows as empty, it says that it is required.
    """
    hints = get_type_hints(cls, include_extras=True)
    texts = help_texts(cls)  # type: ignore[arg-type]
    annotations: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        hint = hints[field.name]
        if dataclasses.is_dataclass(get_args(hint)[0] if get_origin(hint) is Annotated else hint):
            continue
        marks: dict[str, Any] = {"metavar": _metavar(hint)}
        if text := texts.get(field.name):
            marks["help"] = text
        if field.default is None or field.default == ():
            marks["help_behavior_hint"] = ""
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            marks["help_behavior_hint"] = "(required)"
            if _is_positional(hint) and marks["metavar"]:
                marks["metavar"] = f"{field.name.upper()} ..."
        given = {name: value for name, value in marks.items() if value is not None}
        if given:
            annotations[field.name] = Annotated.__class_getitem__((hint, tyro.conf.arg(**given)))  # type: ignore[attr-defined]
    ranged = {
        field.name: dataclasses.field(
            default=field.default, default_factory=field.default_factory, metadata=field.metadata
        )
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.metadata and field.name in annotations
    }
    subclass = type(cls.__name__, (cls,), {"__annotations__": annotations, "__doc__": cls.__doc__, **ranged})
    return dataclasses.dataclass(frozen=True, kw_only=True)(subclass)


def _is_positional(hint: Any) -> bool:
    marks = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return any(mark in getattr(tyro.conf.Positional[int], "__metadata__", ()) for mark in marks)


def _metavar(hint: Any) -> str | None:
    """Return how the help shows an option of any number of values, optional or not; None: of others."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is not tuple or get_args(kind)[-1] is not Ellipsis:
        return None
    item = get_args(kind)[0]
    word = f"{{{','.join(map(str, get_args(item)))}}}" if get_origin(item) is Literal else item.__name__.upper()
    return f"{word} [{word} ...]"


def with_options(cls: type[T], **groups: Iterable[type]) -> type[T]:
    """Return `cls` with further fields, each a group of options.

    Args:
        cls: The dataclass of a subcommand's arguments.
        groups: By the field's name, the configs whose fields are its options.
    """
    fields: list[Any] = []
    excluded = {field for each in MEASURES for field in name_fields(each)}
    for name, configs in groups.items():
        options = options_of(name, *configs, exclude=excluded)
        options.__doc__ = ""
        title = {"settings": "measure"}.get(name, name)
        fields.append((name, titled(options, title), dataclasses.field(default_factory=options)))
    made: Any = dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), frozen=True, kw_only=True)
    made.__doc__ = cls.__doc__
    return made  # type: ignore[no-any-return]


def measure_configs() -> list[type]:
    """Return the classes of all registered measures; one that cannot have its options is left out, with a warning."""
    problems = _problems()
    for text in problems.values():
        warn(f"left out: {text}")
    return [config for name, config in MEASURES.loaded().items() if name not in problems]


def refuse_left_out(measures: Iterable[str]) -> None:
    """Refuse a measure that `measure_configs` left out."""
    problems = _problems()
    for name in measures:
        if text := problems.get(MEASURES.match(name)[0]):
            raise IsolossError(text)


def _problems() -> dict[str, str]:
    """Return, by the name of each measure that cannot have its options, why: an option has one default."""
    problems: dict[str, str] = {}
    known: dict[str, tuple[str, Any]] = {}
    for name, config in MEASURES.loaded().items():
        own = {f.name: _default(f) for f in dataclasses.fields(config) if f.name not in name_fields(name)}
        for field, value in own.items():
            if value is dataclasses.MISSING:
                problems[name] = f"the measure {name} has no default for {field}, which is an option"
            elif field in known and known[field][1] != value:
                other, default = known[field]
                problems[name] = (
                    f"{field} is {value!r} by default in the measure {name} and {default!r} in {other}, and is one "
                    "option: rename one of the two"
                )
        if name not in problems:
            known = {field: (name, value) for field, value in own.items()} | known
    return problems


def _identifier(kind: str) -> str:
    return kind.replace("-", "_")


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _told(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
