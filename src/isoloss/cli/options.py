"""Options from configs: command-line dataclasses that are made, at run time, from the configs of what is registered.

tyro turns a dataclass into options; here such dataclasses come from the configs themselves, so that a default, a choice
or a line of help stands in one place. A nested dataclass that is marked `tyro.conf.OmitArgPrefixes` is a group of
`--help` with flat names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import docstring_parser
import tyro

from isoloss.errors import IsolossError
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

    Raises:
        IsolossError: Two configs give a field another default.

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
            if field.name in fields and _default(fields[field.name][2]) != _default(field):
                raise IsolossError(f"{config.__name__}.{field.name} has another default than the same option elsewhere")
            text = help_texts(config).get(field.name, "")
            told = tyro.conf.arg(help=text, help_behavior_hint="" if _default(field) in (None, (), "") else None)
            hint = Annotated.__class_getitem__((hints[field.name], told))  # type: ignore[attr-defined]
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
    mark = tyro.conf.arg(help=_by_component(texts, " "), help_behavior_hint=hint)
    return Annotated.__class_getitem__((hints[0] | None, mark))  # type: ignore[attr-defined]


def _by_component(texts: Mapping[str, str], separator: str) -> str:
    """Return the one text, or each with the components that it is of."""
    kinds: dict[str, list[str]] = {}
    for kind, text in texts.items():
        kinds.setdefault(text, []).append(kind)
    if len(kinds) == 1:
        return next(iter(kinds))
    return separator.join(f"{' and '.join(own)}: {text}" for text, own in kinds.items())


def group(name: str, members: Mapping[str, Any], title: str) -> tuple[str, Any, Any]:
    """Return a field that is a group of options, each None unless given: their annotations by name, and its title."""
    made: Any = dataclasses.make_dataclass(
        name, [(*member, None) for member in members.items()], frozen=True, kw_only=True
    )
    made.__doc__ = title
    return name, tyro.conf.OmitArgPrefixes[made], dataclasses.field(default_factory=made)  # type: ignore[misc]


def component_options(name: str, configs: Mapping[str, type]) -> type:
    """Return a dataclass with an optional field `KIND_FIELD` for each field of the components' configs but their kind.

    Its groups are the kinds, in the order of `configs`. `chosen` makes the config of one component of it; an option
    that was not given is None.
    """
    groups = []
    for kind, config in configs.items():
        fields = [field.name for field in dataclasses.fields(config) if field.name != "kind"]
        members = {f"{_identifier(kind)}_{field}": unset(field, {kind: config}) for field in fields}
        if members:
            groups.append(group(_identifier(kind), members, (config.__doc__ or "").partition("\n")[0]))
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


def without_none(cls: type[T]) -> type[T]:
    """Return `cls` with no `(default: None)` in its help, where the text says what None stands for."""
    hints = get_type_hints(cls, include_extras=True)
    annotations: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        hint = hints[field.name]
        if field.default is None or field.default == ():
            annotations[field.name] = Annotated[hint, tyro.conf.arg(help_behavior_hint="")]
    if not annotations:
        return cls
    subclass = type(cls.__name__, (cls,), {"__annotations__": annotations, "__doc__": cls.__doc__})
    return dataclasses.dataclass(frozen=True, kw_only=True)(subclass)


def with_options(cls: type[T], *, exclude: Iterable[str] = (), **groups: Iterable[type]) -> type[T]:
    """Return `cls` with further fields, each a group of options.

    Args:
        cls: The dataclass of a subcommand's arguments.
        exclude: Fields of the configs that are no options.
        groups: By the field's name, the configs whose fields are its options.
    """
    fields: list[Any] = []
    excluded = {*exclude, *(field for each in MEASURES for field in name_fields(each))}
    for name, configs in groups.items():
        options = options_of(name, *configs, exclude=excluded)
        options.__doc__ = ""
        marked = tyro.conf.OmitArgPrefixes[options]  # type: ignore[valid-type]
        fields.append((name, marked, dataclasses.field(default_factory=options)))
    made: Any = dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), frozen=True, kw_only=True)
    made.__doc__ = cls.__doc__
    return made  # type: ignore[no-any-return]


def measure_configs() -> list[type]:
    """Return the classes of all registered measures."""
    return [MEASURES.load(name) for name in MEASURES]


def _identifier(kind: str) -> str:
    return kind.replace("-", "_")


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _told(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
