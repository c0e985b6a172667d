"""Configs: frozen dataclasses whose fields carry their ranges, read strictly from TOML and JSON, with a fingerprint.

A config is checked in one place, `check`: types, choices and ranges field by field, then the rules between fields, in
its method `check_fields`. A component (a language, an algorithm) is a config with a `kind`, its name in
`isoloss.registry`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import numbers
import pkgutil
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from isoloss import files
from isoloss.errors import IsolossError, did_you_mean, require, warn
from isoloss.registry import ALGORITHMS, LANGUAGES

T = TypeVar("T")
hints_of = functools.cache(get_type_hints)  # a study checks the same few classes thousands of times


# --- fields ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Range:
    """The finite values that a number may have; None: no bound.

    In words, `Range(above=0, maximum=1)` is `above 0 and at most 1`.
    """

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    note: str = ""
    """Appended in parentheses where the range is told, e.g. what 0 stands for."""

    def __contains__(self, value: Any) -> bool:
        return (
            _is_a(value, float)
            and math.isfinite(value)
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = {"at least": self.minimum, "above": self.above, "at most": self.maximum, "below": self.below}
        told = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
        return f"{told} ({self.note})" if self.note else told


def setting(
    default: Any = dataclasses.MISSING,
    *,
    factory: Any = dataclasses.MISSING,
    exclude_from_fingerprint: bool = False,
    omit_default: bool = False,
    **bounds: Any,
) -> Any:
    """Return a dataclass field with a range.

    Args:
        default: The field's default; none: it must be given.
        factory: Makes the default, where that is no constant.
        exclude_from_fingerprint: The field says how a result is computed, not which result.
        omit_default: The field decides a result and, at its default, stays out of the fingerprint.
        bounds: Fields of `Range`; of a tuple, the range of each of its items.
    """
    metadata = {
        "range": Range(**bounds) if bounds.keys() - {"note"} else None,
        "exclude_from_fingerprint": exclude_from_fingerprint,
        "omit_default": omit_default,
    }
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Form(NamedTuple):
    """What an annotation allows; several of these, where it is a union."""

    choices: tuple[Any, ...] = ()  # listed values, and None
    kinds: tuple[type, ...] = ()  # of bool, int, float and str, in this order
    config: Any = None  # a dataclass
    items: Any = None  # the annotation of a tuple's items
    length: int | None = None  # how many; None: any number


@functools.cache
def form_of(hint: Any) -> Form:
    """Return what an annotation allows; an empty form, which nothing is held against, of any other than these.

    Example:
        >>> from typing import Literal
        >>> from isoloss.config import form_of
        >>> form_of(int | Literal["all"] | None)
        Form(choices=('all', None), kinds=(<class 'int'>,), config=None, items=None, length=None)
    """
    if get_origin(hint) in (Union, UnionType):
        forms = [form_of(part) for part in get_args(hint)]
        if Form() in forms:  # a path, for example
            return Form()
        choices = tuple(choice for form in forms for choice in form.choices)
        kinds = tuple(kind for kind in _WORDS if any(kind in form.kinds for form in forms))
        other = next((form for form in forms if form.config or form.items), Form())
        return other._replace(choices=choices, kinds=kinds)
    if get_origin(hint) is Literal:
        return Form(choices=get_args(hint))
    if get_origin(hint) is tuple:
        first, *rest = get_args(hint)
        return Form(items=first, length=None if rest == [...] else 1 + len(rest))
    if hint in (None, NoneType):
        return Form(choices=(None,))
    return Form(kinds=(hint,)) if hint in _WORDS else Form(config=hint if dataclasses.is_dataclass(hint) else None)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def check(config: Any, path: str = "") -> None:
    """Check every field of a config dataclass, then the rules between them; `path` precedes the names in messages.

    Raises:
        IsolossError: A value of another type, that is none of the choices or out of its range; it is named.

    Example:
        >>> from dataclasses import dataclass
        >>> from isoloss.config import check, setting
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Small:
        ...     steps: int = setting(10, minimum=1)
        >>> check(Small(steps=0))
        Traceback (most recent call last):
            ...
        isoloss.errors.IsolossError: steps is 0; it must be at least 1
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        # no kind fits `()`, so this always refuses
        require(path or "the config", config, (), "a config, such as isoloss.run_config.TrainConfig(...)")
    hints = hints_of(config.__class__)
    for field in dataclasses.fields(config):
        name = f"{path}.{field.name}" if path else field.name
        _check_value(name, getattr(config, field.name), form_of(hints[field.name]), field.metadata.get("range"))
    # last, as the rules rely on every field being one that the config can have
    if rules := getattr(config, "check_fields", None):
        rules()


def _check_value(name: str, value: Any, form: Form, bounds: Range | None) -> None:
    # by type too: True equals 1, and an array has no one truth value
    if any(type(value) is type(choice) and value == choice for choice in form.choices):
        return
    if form.config is not None:
        require(name, value, form.config, f"an isoloss config, {form.config.__name__}")
        check(value, name)
    elif form.items is not None and isinstance(value, tuple | list) and form.length in (None, len(value)):
        for number, item in enumerate(value):
            _check_value(f"{name}[{number}]", item, form_of(form.items), bounds)
    elif any(_is_a(value, kind) for kind in form.kinds):
        if bounds is not None and value not in bounds:
            finite = "" if math.isfinite(value) else "finite, "
            raise IsolossError(f"{name} is {value!r}; it must be {finite}{bounds}{_or(form)}")
    elif form != Form():
        # no kind fits `()`
        require(name, value, (), _words(form, bounds))


def _is_a(value: object, kind: type) -> bool:
    """Whether a value can stand for one of a primitive type: a number of numpy does, and a bool is no number."""
    if kind in (int, float) and not isinstance(value, bool):
        return isinstance(value, numbers.Integral if kind is int else numbers.Real)
    return isinstance(value, kind)


def _words(form: Form, bounds: Range | None) -> str:
    """Return what a value must be."""
    if form.items is not None:
        inner = form_of(form.items)
        each = f"an isoloss config, {inner.config.__name__}" if inner.config else _words(inner, bounds)
        return f"{'a list' if form.length is None else f'{form.length} values'}, each {each}"
    if not form.kinds:
        return f"one of {', '.join(str(choice) for choice in form.choices if choice is not None)}"
    return f"{_WORDS[form.kinds[0]]}{f', {bounds}' if bounds else ''}{_or(form)}"


def _or(form: Form) -> str:
    """Return what is told of values that may stand for a number, e.g. `, or all`."""
    return "".join(f", or {choice}" for choice in form.choices if choice is not None)


def replaced(config: T, settings: Mapping[str, Any]) -> T:
    """Return a config with other values of some fields, checked; an error if it has no field of a name."""
    check(config)
    known = [field.name for field in dataclasses.fields(config)]  # type: ignore[arg-type]
    if unknown := [name for name in settings if name not in known]:
        raise IsolossError(
            f"there is no setting {unknown[0]!r}{did_you_mean(unknown[0], known) or ';'} they are {', '.join(known)}"
        )
    config = dataclasses.replace(config, **settings)  # type: ignore[type-var]
    check(config)
    return config


# --- components ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """What a language is made from; a subclass has its settings, and is registered under its `kind`.

    Attributes:
        kind: Its name in `isoloss.registry.LANGUAGES`.
        is_self_contained: Whether the settings alone determine the language, without files; only then does a stored
            language keep them.
        is_finite: Whether there are only so many sentences to train on, as of text.
        reports_progress: Whether `build` takes long and calls `progress`.
        task_patterns: Patterns of the names of its languages' downstream tasks, each with one line about it.
    """

    is_self_contained: ClassVar[bool] = False
    is_finite: ClassVar[bool] = False
    reports_progress: ClassVar[bool] = False
    task_patterns: ClassVar[Mapping[str, str]] = {}
    kind: str

    def build(self, progress: Callable[[int, int], None] | None = None) -> Any:
        """Return the language (`isoloss.lab.languages.base.Language`).

        Args:
            progress: Called with (done, total) while a slow language is built.

        Raises:
            IsolossError: A setting is out of range, or a file is missing or of another content than it was.
        """
        raise NotImplementedError

    def resolved(self) -> LanguageConfig:
        """Return the config with what is only known once files are opened, such as their content, filled in."""
        return self

    def within(self, folder: Path) -> LanguageConfig:
        """Return the config as a run in this folder reads it: with paths that are relative to it made absolute."""
        return self

    def teacher_sha256(self, folder: Path) -> str:
        """Return the SHA-256 of the weights at such a path; empty: it names none, or they are not there."""
        return ""

    @classmethod
    def required_fields(cls) -> list[str]:
        """Return the settings without a default, which a `.toml` file must give."""
        required = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
        return [name for name in required if name != "kind"]

    @classmethod
    def read(cls, spec: str, options: Mapping[str, Any]) -> LanguageConfig | None:
        """Return the config of the language in a file, folder or dataset, or None where it is not of this kind.

        Args:
            spec: Where it is, as the command line has it.
            options: Those of `isoloss.lab.languages.resolve` that were given; one of no use is an error.
        """
        return None

    @classmethod
    def from_tables(cls, stored: Any, path: Path) -> Any:
        """Return the language that `isoloss.lab.languages.save` stored under this kind.

        Args:
            stored: The content of the file (`isoloss.lab.languages.base.Stored`).
            path: The file, for messages.
        """
        raise IsolossError(f"{path} holds a language of the kind {cls.__name__}, which is not read from tables")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """What a training algorithm is made from; a subclass has its settings, and is registered under its `kind`.

    Attributes:
        kind: Its name in `isoloss.registry.ALGORITHMS`.
        algorithm: The class that `build` constructs, `"module:attribute"`.
    """

    algorithm: ClassVar[str]
    kind: str

    def build(self, model: Any, context: Any) -> Any:
        """Return the algorithm (`isoloss.lab.training.algorithms.base.TrainingAlgorithm`).

        Args:
            model: The model to train, on its device.
            context: `isoloss.lab.training.algorithms.base.TrainingContext`.
        """
        return pkgutil.resolve_name(self.algorithm)(model, context, self)

    def check_run(self, config: Any, *, num_processes: int = 1) -> None:
        """Raise an `IsolossError` if the algorithm cannot train a run of this `isoloss.run_config.TrainConfig`."""


# --- TOML, JSON, fingerprint -----------------------------------------------------------------------------------------

REGISTRIES = {LanguageConfig: LANGUAGES, AlgorithmConfig: ALGORITHMS}  # of configs that their kind names


def from_dict(cls: type[T], document: Mapping[str, Any]) -> T:
    """Return the `cls` that `document` describes; unknown keys and wrong types are errors that name the place.

    Raises:
        IsolossError: A key that `cls` does not have, a missing one, a value of the wrong type, or one that `check`
            refuses.

    Example:
        >>> from isoloss.config import from_dict
        >>> from isoloss.run_config import ModelConfig
        >>> from_dict(ModelConfig, {"size": "d32", "dropot": 0.0})
        Traceback (most recent call last):
            ...
        isoloss.errors.IsolossError: no setting 'dropot'; did you mean dropout?
    """
    config: T = _read(cls, document, "")
    check(config)
    return config


def _read(cls: Any, document: Any, path: str) -> Any:
    """Return the config in a table of a document, with every value checked, but not the rules between them."""
    where = f"{path}: " if path else ""
    if not isinstance(document, Mapping):
        require(path or "the config", document, (), "a table of settings")
    if (registry := REGISTRIES.get(cls)) is not None:
        kind = document.get("kind")
        if not isinstance(kind, str) or kind not in registry:
            other = "; another may be in a package that is not installed" if isinstance(kind, str) else ""
            raise IsolossError(
                f"{where}the kind of a {registry.kind} is one of {', '.join(registry)}, not {kind!r}{other}"
            )
        cls = registry.load(kind)
    removed, hints, values = getattr(cls, "removed", {}), hints_of(cls), {}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key, value in document.items():
        if key in fields:
            name = f"{path}.{key}" if path else key
            values[key] = _converted(value, form_of(hints[key]), name)
            # before the class is made, whose `__post_init__` may rely on it
            _check_value(name, values[key], form_of(hints[key]), fields[key].metadata.get("range"))
        elif key not in removed:
            raise IsolossError(
                f"{where}no setting {key!r}" + (did_you_mean(key, fields) or f"; they are {', '.join(fields)}")
            )
        elif removed[key] is None:
            if value:
                warn(f"{where}{key} is {value!r}: isoloss no longer has this setting and goes on without it")
        elif value != removed[key]:
            raise IsolossError(f"{where}{key} is {value!r}, and isoloss no longer has this setting: leave it out")
    for key, field in fields.items():
        if key not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise IsolossError(f"{where}{key} is missing")
    return cls(**values)


def _converted(value: Any, form: Form, name: str) -> Any:
    """Return a value as a config has it: a table as its dataclass, a list as a tuple, and 1 as 1.0 for a number."""
    if form.config is not None and value is not None:
        return _read(form.config, value, name)
    if form.items is not None and isinstance(value, list):
        return tuple(_converted(item, form_of(form.items), f"{name}[{n}]") for n, item in enumerate(value))
    return float(value) if form.kinds == (float,) and type(value) is int else value


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config dataclass as JSON types (tuples become lists)."""
    document: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return document


def read_toml(cls: type[T], path: Path) -> T:
    """Return the `cls` in the TOML file `path`; errors as for `from_dict`, and for a file that is not TOML."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise IsolossError(f"{path} does not exist{files.nearest(path)}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise IsolossError(f"{path} is not a readable TOML file: {error}") from error
    try:
        return from_dict(cls, document)
    except IsolossError as error:
        raise IsolossError(f"{path}: {error}") from error


def to_toml(config: Any) -> str:
    """Return a config dataclass, or what `to_dict` made of one, as TOML that `read_toml` reads back.

    None is left out, as TOML has no word for it.

    Example:
        >>> from isoloss.config import to_toml
        >>> from isoloss.run_config import StageConfig
        >>> print(to_toml(StageConfig(steps=500, target_kl=0.1)))
        steps = 500
        target_kl = 0.1
        validate_every = 50
        <BLANKLINE>
    """
    import tomlkit

    def without_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_none(item) for key, item in value.items() if item is not None}
        return [without_none(item) for item in value] if isinstance(value, list) else value

    return tomlkit.dumps(without_none(config if isinstance(config, dict) else to_dict(config)))


def fingerprint(config: Any) -> str:
    """Return 16 hexadecimal digits over the fields that decide a result, not how it is computed (device, threads)."""
    # sorted: moving a field within its class must not change the fingerprint
    document = json.dumps(identity(config), sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:16]


def differences(ours: Any, theirs: Any, prefix: str = "") -> list[str]:
    """Return a line for each field that decides a result and in which two configs differ, ours here and theirs there.

    Either may be what `identity` returned.
    """
    lines = []

    def compare(a: Any, b: Any, path: str) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in dict.fromkeys([*a, *b]):
                compare(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        elif a != b:
            told = ("not set" if value is None else repr(value) for value in (a, b))
            lines.append(f"{path} is {' here and '.join(told)} there")

    compare(identity(ours), identity(theirs), prefix)
    return lines


@functools.cache
def _deciding(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a config that may decide a result."""
    return tuple(f for f in dataclasses.fields(cls) if not f.metadata.get("exclude_from_fingerprint"))


def identity(config: Any) -> Any:
    """Return the fields of a config that decide a result, as JSON types; what is no dataclass is returned as it is."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {
            f.name: identity(getattr(config, f.name))
            for f in _deciding(type(config))
            # runs made before such a field existed keep their fingerprint
            if not (f.metadata.get("omit_default") and getattr(config, f.name) == f.default)
        }
    return [identity(item) for item in config] if isinstance(config, tuple | list) else config
