"""Named components, loaded on first use and open to other packages: languages, measures, tasks and what else has names.

A component is a class or function, registered as an object or as `"module:attribute"`. Another package adds one by an
entry point, in its `pyproject.toml`:

    [project.entry-points."isoloss.measures"]
    gradient-norm = "my_package.measures:GradientNorm"

Nothing is imported before it is asked for by name, so that a list of names costs no more than reading metadata.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from isoloss import builtin_components
from isoloss.errors import IsolossError, did_you_mean, naming_extras, warn
from isoloss.files import nearest


class Entry(NamedTuple):
    """A registered component."""

    target: Any  # the component, or where it is: "module:attribute"
    summary: str = ""  # one line about it; empty: the first line of its docstring


class Registry:
    """The components of one kind, by name.

    A part of a name in capital letters is a placeholder: `probe-TASK` is found as `probe-root`.
    """

    def __init__(
        self,
        kind: str,
        plural: str,
        builtin: Mapping[str, Mapping[str, str | tuple[str, str]]],
        *,
        base: str = "",
        function: str = "",
        is_config: bool = False,
    ) -> None:
        """Make a registry of components of one form.

        Args:
            kind: What a component is called in messages, e.g. `language`.
            plural: Of the kind; other packages use the group of entry points `isoloss.PLURAL`.
            builtin: By module, the components of isoloss: by name, the attribute, or it and a line about it.
            base: The class, `"module:attribute"`, that a component is an instance of or, of configs, a subclass; where
                the class has a field `kind`, a component is registered under its own. Empty: none.
            function: What else a component may be, in words: a function.
            is_config: Whether a component is a dataclass.
        """
        self.kind, self.group, self.builtin, self._plural = kind, f"isoloss.{plural}", builtin, plural
        self._base, self._function, self._is_config = base, function, is_config
        self._entries: dict[str, Entry] = {}
        for module, components in builtin.items():
            for name, found in components.items():
                attribute, summary = (found, "") if isinstance(found, str) else found
                self._entries[name] = Entry(f"{module}:{attribute}", summary)
        self._checked: dict[str, Any] = {}  # found to be of the form: configs load their defaults thousands of times

    def register(self, name: str, target: Any, *, summary: str = "") -> None:
        """Add a component for this process; for every process, a package does so by an entry point.

        Args:
            name: What configs and the command line call it. A part in capital letters stands for a field of a measure,
                or for an argument of a task's function: `token` of `parity-TOKEN`.
            target: The component, or where it is, `"module:attribute"`; then it is imported when it is used.
            summary: One line for lists; empty: the first line of its docstring.

        Raises:
            IsolossError: Another component has the name, which may be no name, or the component is not of the form.

        Example:
            >>> from isoloss import TASKS, make_task
            >>> from isoloss.lab.languages.base import Labeling
            >>> def starts_with(language, token):
            ...     index = language.vocabulary.index(token)
            ...     return Labeling(classes=("no", "yes"), label=lambda s: (s.tokens[:, 0] == index).long())
            >>> TASKS.register("starts-with-TOKEN", starts_with)
            >>> make_task("brackets-8", "starts-with-<", num_train=10, num_test=10).classes
            ('no', 'yes')
        """
        if not _NAME.fullmatch(name):
            raise IsolossError(f"{name!r} is no name of a {self.kind}: it has letters, digits, -, _ and .")
        # importing a module just to check it would cost seconds: a string is checked when it is loaded
        if not isinstance(target, str):
            self._check(name, target, "")
        known = self._all().get(name)
        # by place, not identity: a notebook that runs a cell again registers a new class of the same name
        if known is not None and _place(known.target) != _place(target):
            raise IsolossError(f"there is a {self.kind} {name!r} already; choose another name")
        self._entries[name] = Entry(target, summary)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def is_builtin(self, name: str) -> bool:
        """Whether a component is isoloss's own."""
        return any(name in components for components in self.builtin.values())

    def summary(self, name: str) -> str:
        """Return one line about a component."""
        entry = self._all()[name]
        if entry.summary:
            return entry.summary
        component = self.load(name)
        # an object has its class's docstring, which is about no component: the module describes it
        if not (inspect.isclass(component) or callable(component)):
            component = (
                importlib.import_module(entry.target.partition(":")[0]) if isinstance(entry.target, str) else None
            )
        return (inspect.getdoc(component) or "").partition("\n")[0]

    def load(self, name: str) -> Any:
        """Return the component called `name`.

        Raises:
            IsolossError: There is none, the package that offers it cannot be imported, or it is not of the form.
        """
        entry = self._all().get(name)
        if entry is None:
            raise self._unknown(name)
        if not isinstance(entry.target, str):
            return entry.target
        try:
            with naming_extras():
                component = _resolved(entry.target)
        except IsolossError:
            raise
        except Exception as error:  # whatever a module of another package does
            told = error if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
            raise IsolossError(f"{self.kind} {name!r} cannot be loaded from {entry.target}: {told}") from error
        self._check(name, component, f" of {entry.target}")
        return component

    def loaded(self, load: Callable[[str], Any] | None = None) -> dict[str, Any]:
        """Return the components by name, or what `load` makes of each; one that fails is left out, with a warning."""
        components = {}
        for name in self:
            try:
                components[name] = (load or self.load)(name)
            except IsolossError as error:
                warn(f"left out: {error}")
        return components

    def match(self, name: str) -> tuple[str, dict[str, str]]:
        """Return the registered name that `name` is one of, and what replaces each placeholder."""
        if name in self:
            return name, {}
        for pattern in self:
            if (values := _values(pattern, name)) is not None:
                return pattern, values
        raise self._unknown(name)

    def code_sha256(self, name: str) -> str:
        """Return the SHA-256 of the code of the package, outside isoloss, that a component is from.

        Lines that are empty or only a comment do not count. Empty: the component is isoloss's own, or registered by
        the process itself, or there is none.
        """
        pattern = name if name in self else next((one for one in self if _values(one, name) is not None), "")
        if not pattern or not isinstance(target := self._all()[pattern].target, str):
            return ""
        package = target.partition(":")[0].partition(".")[0]
        return "" if package == __name__.partition(".")[0] else _code_sha256(package)

    def _check(self, name: str, component: Any, where: str) -> None:
        """Refuse what is no such component; `where` says what it is of, for the message."""
        if name in self._checked and self._checked[name] is component:
            return
        is_class = inspect.isclass(component)
        what = component.__name__ if is_class else f"of the type {type(component).__name__}"
        told = f"{self.kind} {name!r}{where} is {what}"
        base: Any = pkgutil.resolve_name(self._base) if self._base else ()
        fits = bool(self._function) and callable(component) and not (self._is_config and is_class)
        if self._is_config:
            # fields that a class adds are settings only where it is decorated itself
            is_decorated = is_class and (
                "__dataclass_fields__" in vars(component) or not inspect.get_annotations(component)
            )
            fits = fits or (is_decorated and issubclass(component, base))
        else:
            fits = fits or isinstance(component, base)
        if not fits:
            an = "a dataclass that is a subclass of" if self._is_config else "an"
            classes = f"{an} {self._base.replace(':', '.')}" if self._base else ""
            raise IsolossError(f"{told}; it must be {' or '.join(filter(None, [classes, self._function]))}")
        has_kind = "kind" in getattr(base, "__dataclass_fields__", ())
        kinds: tuple[Any, ...] = ()
        if has_kind and (default := getattr(component, "kind", None)) is not None:
            hint = get_type_hints(component).get("kind")
            kinds = get_args(hint) if get_origin(hint) is Literal else (default,)
        if has_kind and name not in kinds:
            found = f"is {' or '.join(map(repr, kinds))}" if kinds else "has no default"
            raise IsolossError(f"{told}, whose kind {found}; it must be {name!r}, the name that it is registered under")
        self._checked[name] = component

    def _unknown(self, name: str) -> IsolossError:
        return IsolossError(
            f"no {self.kind} {name!r}{did_you_mean(name, self) or ';'} the {self._plural} are {', '.join(self)}"
        )

    def _all(self) -> dict[str, Entry]:
        """Return all entries; other packages' come last, and none of them replaces one that was there."""
        entries = dict(self._entries)
        for point in _entry_points(self.group):
            if point.name not in entries:
                entries[point.name] = Entry(point.value)
            # a package may offer one component both ways, by an entry point and by calling `register`
            elif entries[point.name].target not in (point.value, _loaded(point)):
                package = point.dist.name if point.dist is not None else point.value
                warn(f"{package} has a {self.kind} {point.name!r}, which is not used: the name is taken")
        return entries


_NAME = re.compile(r"\w[\w.-]*")


def _resolved(target: str) -> Any:
    """Return what `module:attribute` names; what is imported already takes no import system: it is asked for often."""
    module, _, attribute = target.partition(":")
    try:
        return getattr(sys.modules[module], attribute)
    except (KeyError, AttributeError):
        return pkgutil.resolve_name(target)


@functools.cache
def _code_sha256(package: str) -> str:
    if (spec := importlib.util.find_spec(package)) is None:
        return ""
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    # a module of one file, which may be compiled
    paths = paths or [Path(spec.origin)] if spec.has_location and spec.origin else paths
    lines = [line.rstrip() for path in paths for line in path.read_bytes().splitlines()]
    return hashlib.sha256(b"\n".join(line for line in lines if line and not line.lstrip().startswith(b"#"))).hexdigest()


def _place(target: Any) -> Any:
    """Return where a component is, or the component itself where it is an object without a name."""
    return f"{target.__module__}:{target.__qualname__}" if hasattr(target, "__qualname__") else target


def _values(pattern: str, name: str) -> dict[str, str] | None:
    """Return what replaces each placeholder of `pattern` in `name`, or None where it is no such name."""
    words = pattern.split("-")
    first = next((place for place, word in enumerate(words) if word.isupper()), None)
    if first is None or not name.startswith(prefix := "".join(f"{word}-" for word in words[:first])):
        return None
    # from the right: only the first value may hold dashes, such as prefix-4 in few-shot-prefix-4-100
    parts = name.removeprefix(prefix).rsplit("-", len(words) - first - 1)
    if len(parts) < len(words) - first or not all(parts):
        return None
    return dict(zip(words[first:], parts, strict=True))


@functools.cache
def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def _loaded(point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception:  # it is not used, whatever it is
        return None


def run_python(path: Path, prefix: str) -> ModuleType:
    """Run a user's Python file and return it as a module called `PREFIX_STEM`."""
    if not path.is_file():
        raise IsolossError(f"{path} does not exist{nearest(path)}")
    # with a prefix: a file called json.py must not take the place of the module json
    spec = importlib.util.spec_from_file_location(f"{prefix}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise IsolossError(f"{path} is not a Python file: its name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    # `dataclass` looks up the module of a class here, to read its annotations
    sys.modules[spec.name] = module
    try:
        # not by the loader: its bytecode is that of an earlier text where two of one size are written in one second
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)  # noqa: S102 - the user names the file
    except IsolossError:
        raise
    except Exception as error:
        raise IsolossError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return module


LANGUAGES = Registry(
    "language", "languages", builtin_components.LANGUAGES, base="isoloss.config:LanguageConfig", is_config=True
)
ALGORITHMS = Registry(
    "training algorithm",
    "algorithms",
    builtin_components.ALGORITHMS,
    base="isoloss.config:AlgorithmConfig",
    is_config=True,
)
OPTIMIZERS = Registry(
    "optimizer",
    "optimizers",
    builtin_components.OPTIMIZERS,
    function="a function like those of `isoloss.lab.training.optimizers`, of groups of parameters and a config",
)
MODELS = Registry("model", "models", builtin_components.MODELS, base="isoloss.lab.models.architectures:Architecture")
MEASURES = Registry(
    "measure",
    "measures",
    builtin_components.MEASURES,
    base="isoloss.lab.evaluation.measures.base:Measure",
    function="a function of a model and batches",
    is_config=True,
)
TASKS = Registry(
    "task",
    "tasks",
    builtin_components.TASKS,
    base="isoloss.transfer.text_sources:TextTask",
    function="a function of a language that returns an isoloss.lab.languages.base.Labeling",
)
EXECUTORS = Registry(
    "executor", "executors", builtin_components.EXECUTORS, function="a function like isoloss.studies.run.local.run"
)
STUDIES = Registry(
    "study",
    "studies",
    builtin_components.STUDIES,
    base="isoloss.studies:Study",
    function="a function that returns one",
)
# by `config.model_type`, a function that declares the signals of such a model
RESCALINGS = Registry(
    "family of rescalings",
    "rescalings",
    builtin_components.RESCALINGS,
    function="a function like those of `isoloss.flatness._rescaling.families`, by the `model_type` of a config",
)
