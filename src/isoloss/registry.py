"""Named components, loaded on first use and open to other packages: languages, measures, tasks and what else has names.

A component is a class or function, registered as an object or as `"module:attribute"`. Another package adds one by an
entry point, in its `pyproject.toml`:

    [project.entry-points."isoloss.measures"]
    gradient-norm = "my_package.measures:GradientNorm"

Nothing is imported before it is asked for by name, so that a list of names costs no more than reading metadata.
"""

from __future__ import annotations

import functools
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
    """A registered component.

    Attributes:
        target: The component, or where it is: `"module:attribute"`.
        summary: One line about it; empty: the first line of its docstring.
    """

    target: Any
    summary: str = ""


class Form(NamedTuple):
    """What a component of one kind is.

    Attributes:
        base: The class that it is an instance of, or, of configs, a subclass: `"module:attribute"`; empty: none.
        function: What it may be otherwise, in words: a function.
        is_config: Whether it is a dataclass.
        has_kind: Whether its field `kind` is the name under which it is registered.
    """

    base: str = ""
    function: str = ""
    is_config: bool = False
    has_kind: bool = False

    def __str__(self) -> str:
        base = f"{'a dataclass that is a subclass of' if self.is_config else 'an'} {self.base.replace(':', '.')}"
        return " or ".join(filter(None, [base if self.base else "", self.function]))

    def problem(self, name: str, component: Any) -> str:
        """Return why a component cannot be used under a name, as the end of a sentence; empty if it can."""
        is_class = inspect.isclass(component)
        told = component.__name__ if is_class else f"of the type {type(component).__name__}"
        if not self._fits(component):
            return f"is {told}; it must be {self}"
        if self.has_kind and name not in (kinds := _kinds(component)):
            found = f"is {' or '.join(map(repr, kinds))}" if kinds else "has no default"
            return f"is {told}, whose kind {found}; it must be {name!r}, the name that it is registered under"
        return ""

    def _fits(self, component: Any) -> bool:
        if self.function and callable(component):
            return True
        if not self.base:
            return False
        base = pkgutil.resolve_name(self.base)
        if not self.is_config:
            return isinstance(component, base)
        # fields that a class adds are settings only where it is decorated itself
        return (
            inspect.isclass(component)
            and issubclass(component, base)
            and ("__dataclass_fields__" in vars(component) or not inspect.get_annotations(component))
        )


def _kinds(config: Any) -> tuple[Any, ...]:
    """Return the kinds that a config may have; none if it has no default for it."""
    default = getattr(config, "kind", None)
    hint = get_type_hints(config).get("kind")
    return () if default is None else get_args(hint) if get_origin(hint) is Literal else (default,)


class Registry:
    """The components of one kind, by name.

    A part of a name in capital letters is a placeholder: `probe-TASK` is found as `probe-root`.

    Attributes:
        kind: What a component is called in messages, e.g. `language`.
        group: The group of entry points that other packages use, `isoloss.` and the plural of the kind.
    """

    def __init__(self, kind: str, plural: str, builtin: Mapping[str, Entry], form: Form | None = None) -> None:
        self.kind, self.group, self.form = kind, f"isoloss.{plural}", form
        self._entries = dict(builtin)
        self._checked: dict[str, Any] = {}  # found to be of the form: configs load their defaults thousands of times
        self._plural = plural

    def register(self, name: str, target: Any, *, summary: str = "") -> None:
        """Add a component for this process.

        Raises:
            IsolossError: Another component has the name, which may be no name, or the component is not of the form.
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
        """Return the registered name that `name` is one of, and what replaces each placeholder.

        Raises:
            IsolossError: There is none.

        Example:
            >>> Registry("measure", "measures", {"probe-TASK": Entry(int)}).match("probe-prefix-4")
            ('probe-TASK', {'TASK': 'prefix-4'})
        """
        if name in self:
            return name, {}
        for pattern in self:
            if (values := _values(pattern, name)) is not None:
                return pattern, values
        raise self._unknown(name)

    def _check(self, name: str, component: Any, where: str) -> None:
        if self.form is None or (name in self._checked and self._checked[name] is component):
            return
        if problem := self.form.problem(name, component):
            raise IsolossError(f"{self.kind} {name!r}{where} {problem}")
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


def _entries(module: str, components: Mapping[str, tuple[str, str]]) -> dict[str, Entry]:
    """Return the entries of components of a module: by name, the attribute and the summary."""
    return {name: Entry(f"{module}:{attribute}", summary) for name, (attribute, summary) in components.items()}


def run_python(path: Path, prefix: str) -> ModuleType:
    """Run a user's Python file and return it as a module called `PREFIX_STEM`.

    Raises:
        IsolossError: There is no such file, or it fails.
    """
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
        spec.loader.exec_module(module)
    except IsolossError:
        raise
    except Exception as error:
        raise IsolossError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return module


LANGUAGES = Registry(
    "language",
    "languages",
    _entries("isoloss.lab.languages.config", builtin_components.LANGUAGE_CONFIGS)
    | _entries("isoloss.lab.languages.serialization", {"file": ("FileConfig", "a stored language")}),
    Form("isoloss.config:LanguageConfig", is_config=True, has_kind=True),
)
ALGORITHMS = Registry(
    "training algorithm",
    "algorithms",
    _entries("isoloss.lab.training.algorithms.config", builtin_components.ALGORITHM_CONFIGS),
    Form("isoloss.config:AlgorithmConfig", is_config=True, has_kind=True),
)
OPTIMIZERS = Registry(
    "optimizer",
    "optimizers",
    {
        name: Entry(f"isoloss.lab.training.{place}", summary)
        for name, (place, summary) in builtin_components.OPTIMIZERS.items()
    },
    Form(function="a function like those of `isoloss.lab.training.optimizers`, of groups of parameters and a config"),
)
MODELS = Registry(
    "model",
    "models",
    _entries("isoloss.lab.models.architectures", builtin_components.ARCHITECTURES),
    Form("isoloss.lab.models.architectures:Architecture"),
)
MEASURES = Registry(
    "measure",
    "measures",
    {
        name: Entry(f"isoloss.lab.evaluation.measures.{module}:{attribute}")
        for module, classes in builtin_components.MEASURES.items()
        for name, attribute in classes.items()
    },
    Form("isoloss.lab.evaluation.measures.base:Measure", is_config=True),
)
TASKS = Registry(
    "task",
    "tasks",
    _entries("isoloss.transfer.text_sources", builtin_components.TEXT_TASKS)
    | _entries("isoloss.paper.dose_response_tasks", builtin_components.TWIN_TASKS),
    Form(
        "isoloss.transfer.text_sources:TextTask",
        "a function of a language that returns an isoloss.lab.languages.base.Labeling",
    ),
)
EXECUTORS = Registry(
    "executor",
    "executors",
    _entries("isoloss.studies.run.local", {"local": ("run", "worker processes on this machine")})
    | _entries("isoloss.studies.run.ray", {"ray": ("run", "tasks on a Ray cluster")})
    | _entries("isoloss.studies.run.slurm", {"slurm": ("run", "Slurm jobs that share the study's folder")}),
    Form(function="a function like isoloss.studies.run.local.run"),
)
STUDIES = Registry(
    "study",
    "studies",
    _entries("isoloss.paper.same_loss", {"same-loss": ("STUDY", builtin_components.SAME_LOSS)})
    | _entries("isoloss.paper.same_loss_pilot", {"same-loss-pilot": ("STUDY", builtin_components.PILOT)})
    | _entries("isoloss.paper.brackets", {"brackets": ("STUDY", builtin_components.BRACKETS)})
    | _entries("isoloss.paper.dose_response", {"dose-response": ("STUDY", builtin_components.DOSE_RESPONSE)})
    | _entries("isoloss.paper.optimizers", {"optimizers": ("STUDY", builtin_components.BY_OPTIMIZER)})
    | _entries("isoloss.paper.reproduction.study", {"paper": ("STUDY", builtin_components.REPRODUCED)}),
    Form("isoloss.studies.spec:Study", "a function that returns one"),
)

# by `config.model_type`, a function that declares the signals of such a model
RESCALINGS = Registry(
    "family of rescalings",
    "rescalings",
    _entries("isoloss.flatness._rescaling.families", builtin_components.RESCALING_FAMILIES),
    Form(
        "",
        "a function like those of `isoloss.flatness._rescaling.families`, by the `model_type` of a config",
    ),
)


def _register_function(registry: Registry, note: str = "", example: str = "") -> Callable[..., None]:
    """Return the public function `register_KIND` of a registry, with a docstring of its own."""
    assert registry.form is not None

    def register(name: str, target: Any, *, summary: str = "") -> None:
        registry.register(name, target, summary=summary)

    word = registry.kind.rpartition(" ")[2]
    register.__name__ = register.__qualname__ = f"register_{word}"
    register.__doc__ = f"""Add a {registry.kind} for this process.

    A package adds one for every process by an entry point of the group `{registry.group}`.

    Args:
        name: What configs and the command line call it.{note}
        target: The component, or where it is, `"module:attribute"`: {registry.form}.
        summary: One line for lists; empty: the first line of its docstring.

    Raises:
        IsolossError: Another {registry.kind} has the name, or the component is something else.
    {example or _EXAMPLE.format(word=word)}"""
    return register


_EXAMPLE = """
    Example:
        >>> from isoloss import register_{word}
        >>> register_{word}("mine", "my_package.my_module:MINE", summary="imported when it is used")
    """


_KIND = " It is also the default of the config's field `kind`."
register_language = _register_function(
    LANGUAGES,
    _KIND,
    """
    Example:
        >>> from dataclasses import dataclass
        >>> from isoloss import load_language, register_language
        >>> from isoloss.lab.languages.config import DyckConfig
        >>> @dataclass(frozen=True, kw_only=True)
        ... class ThreeKinds(DyckConfig):
        ...     kind: str = "three-kinds"
        ...     kinds: int = 3
        >>> register_language("three-kinds", ThreeKinds, summary="nested brackets of three kinds")
        >>> load_language("three-kinds")
        PCFG(18 symbols, 6 tokens, at most 16 tokens per sentence, torch.float64 on cpu)
    """,
)
register_model = _register_function(MODELS)
register_measure = _register_function(
    MEASURES,
    " A part in capital letters stands for a field: a measure called `probe-TASK` has a field `task`.",
    """
    Example:
        >>> from dataclasses import dataclass
        >>> from isoloss import Estimate, register_measure
        >>> from isoloss.lab.evaluation.measures.base import Measure
        >>> @dataclass(frozen=True, kw_only=True)
        ... class NumTensors(Measure):
        ...     def run(self, model, context):
        ...         count = len(list(model.parameters()))
        ...         exact = {"stderr": 0, "samples": 0, "num_predictions": 0}
        ...         return {"num-tensors": Estimate(value=count, unit="tensors", method="count", **exact)}
        >>> register_measure("num-tensors", NumTensors, summary="number of weight tensors")
    """,
)
register_task = _register_function(
    TASKS,
    " A part in capital letters is a keyword argument of the function: `token` of `parity-TOKEN`.",
    """
    Example:
        >>> from isoloss import make_task, register_task
        >>> from isoloss.lab.languages.base import Labeling
        >>> def starts_with(language, token):
        ...     index = language.vocabulary.index(token)
        ...     return Labeling(classes=("no", "yes"), label=lambda s: (s.tokens[:, 0] == index).long())
        >>> register_task("starts-with-TOKEN", starts_with)
        >>> make_task("brackets-8", "starts-with-<", num_train=10, num_test=10).classes
        ('no', 'yes')
    """,
)
register_algorithm = _register_function(ALGORITHMS, _KIND)
register_optimizer = _register_function(
    OPTIMIZERS,
    example="""
    Example:
        >>> import torch
        >>> from isoloss import register_optimizer
        >>> def adagrad(groups, config):
        ...     return torch.optim.Adagrad(groups, lr=config.learning_rate)
        >>> register_optimizer("adagrad", adagrad, summary="AdaGrad")
    """,
)
register_executor = _register_function(EXECUTORS)
register_study = _register_function(STUDIES)
register_rescalings = _register_function(RESCALINGS)
