"""Options from configs: command-line dataclasses that are made, at run time, from the configs of what is registered.

tyro turns a dataclass into options; here such dataclasses come from the configs themselves, so that a default, a choice
or a line of help stands in one place. A nested dataclass that is marked `tyro.conf.OmitArgPrefixes` is a group of
`--help` with flat names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

import docstring_parser
import tyro

from isoloss.errors import IsolossError

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
        texts |= {param.arg_name: param.description or "" for param in docstring_parser.parse_from_object(cls).params}
    return texts


def options_of(name: str, *configs: type, exclude: Iterable[str] = ()) -> type:
    """Return a dataclass with the fields of configs, once each, with their defaults and help.

    Args:
        name: Of the dataclass.
        configs: Dataclasses all of whose fields have defaults; a field that several have is the same in all.
        exclude: Fields that are no options.

    The help of a field whose default is None or empty says itself what that stands for.

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


def component_options(name: str, configs: Mapping[str, type]) -> type:
    """Return a dataclass with an optional field `KIND_FIELD` for each field of the components' configs but their kind.

    Its groups are the kinds. `chosen` makes the config of one component of it; an option that was not given is None.

    Args:
        name: Of the dataclass.
        configs: The configs by kind, in the order of the groups.
    """
    groups = []
    for kind, config in configs.items():
        hints = get_type_hints(config, include_extras=True)
        fields: list[Any] = []
        for field in dataclasses.fields(config):
            if field.name == "kind":
                continue
            default = tyro.conf.arg(
                help=help_texts(config).get(field.name, ""), help_behavior_hint=f"(default: {_told(_default(field))})"
            )
            fields.append((f"{_identifier(kind)}_{field.name}", Annotated[hints[field.name] | None, default], None))
        if fields:
            group = dataclasses.make_dataclass(kind, fields, frozen=True, kw_only=True)
            group.__doc__ = (config.__doc__ or "").partition("\n")[0]
            marked = tyro.conf.OmitArgPrefixes[group]  # type: ignore[valid-type]
            groups.append((_identifier(kind), marked, dataclasses.field(default_factory=group)))
    return dataclasses.make_dataclass(name, groups, frozen=True, kw_only=True)


def chosen(options: Any, kind: str, config: type[T], *, option: str) -> T:
    """Return the config of the component `kind` with what the command line gave of it.

    Args:
        options: Of the class that `component_options` returned.
        kind: Which component.
        config: Its config's class.
        option: How the command line chooses a component, e.g. `--algorithm`.

    Raises:
        IsolossError: An option of another component was given.
    """
    values: dict[str, Any] = {}
    for group in dataclasses.fields(options):
        own = group.name == _identifier(kind)
        for name, value in vars(getattr(options, group.name)).items():
            if value is not None and not own:
                raise IsolossError(f"{option_name(name)} needs {option} {group.name.replace('_', '-')}")
            if value is not None:
                values[name.removeprefix(f"{group.name}_")] = value
    return config(**values)


def select(options: Any, config: type[T]) -> T:
    """Return a config with the values that `options` has for its fields."""
    return config(**{field.name: getattr(options, field.name) for field in dataclasses.fields(config)})  # type: ignore[arg-type]


def without_none(cls: type) -> type:
    """Return `cls` with no `(default: None)` in its help, where the text says what None stands for."""
    hints = get_type_hints(cls, include_extras=True)
    annotations: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if field.default is None or field.default == ():
            annotations[field.name] = Annotated[hint, tyro.conf.arg(help_behavior_hint="")]
    if not annotations:
        return cls
    subclass = type(cls.__name__, (cls,), {"__annotations__": annotations, "__doc__": cls.__doc__})
    return dataclasses.dataclass(frozen=True, kw_only=True)(subclass)


def _identifier(kind: str) -> str:
    return kind.replace("-", "_")


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _told(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
