"""What a measure is: a function whose annotated keyword arguments are its settings, and how one is made from its name.

For example:

    def gradient_norm(model, batches, *, power: Annotated[int, setting(minimum=1), "The exponent."] = 2, causal=False):
        ...

A function with `batches` is given sequences, and has the settings `num_sequences` and `seed`, which decide them. What
else it names is filled in (`FunctionMeasure`). It returns an estimate, several by name, or a `MeasureResult`. A part of
a measure's name in capital letters, such as `probe-TASK`, is a keyword argument: `probe-root` has `task="root"`.

Measures that share more than settings are subclasses of `Measure`: frozen dataclasses whose fields are the settings.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from isoloss import config as configs
from isoloss.config import setting
from isoloss.errors import IsolossError, did_you_mean
from isoloss.registry import MEASURES, TASKS

if TYPE_CHECKING:
    import torch

    from isoloss.lab.evaluation.context import MeasureContext
    from isoloss.statistics.estimate import Estimate


# in the example of a name
_REPLACED = {"TASK": "root", "SIZE": "d64", "EMBEDDING_SCALE": "paper", "NUMBER": "100", "WIDTH": "16", "LEVEL": "1"}


@dataclass(frozen=True, kw_only=True)
class MeasureResult:
    """What a measure found on one model."""

    estimates: Mapping[str, Estimate]  # the numbers, by name
    # numpy arrays by name that are kept with them besides their influences (see `isoloss.runs.Run.examples`)
    more: Mapping[str, Any] = field(default_factory=dict)
    # SHA-256 of the inputs (`digest`); empty where there are none. Two results on the same inputs are paired
    inputs: str = ""

    @classmethod
    def of(cls, measure: str, result: MeasureResult | Mapping[str, Estimate] | Estimate) -> MeasureResult:
        """Return the result of the measure called so, which may have returned its estimates alone.

        Raises:
            IsolossError: It is none.
        """
        from isoloss.statistics.estimate import Estimate

        named = {measure: result} if isinstance(result, Estimate) else result
        made = named if isinstance(named, cls) else cls(estimates=named)  # type: ignore[arg-type]
        if not isinstance(made.estimates, Mapping) or not all(isinstance(e, Estimate) for e in made.estimates.values()):
            raise IsolossError(f"the measure {measure} returned {made.estimates!r}; it must be estimates by name")
        return made

    def arrays(self) -> dict[str, Any]:
        """Return the influences of the estimates, in float32 as `<name>.influence`, and what there is more."""
        import numpy as np

        influences = {
            f"{name}.influence": estimate.influence.astype(np.float32)
            for name, estimate in self.estimates.items()
            if estimate.influence is not None
        }
        return {**influences, **self.more}


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What is measured of a model; a subclass has its settings as fields with defaults and ranges.

    Measures that share a field inherit it from one class, so that an option of the command line is the same for all.
    """

    @property
    def counted(self) -> str:
        """What the context's `progress` counts."""
        return "done"

    @classmethod
    def unused(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the settings that have no effect beside these; one at its default may be left out of `settings`."""
        return ()

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return why the measure cannot be taken here, as a sentence; None if it can."""
        return None

    def run(self, model: Any, context: MeasureContext) -> MeasureResult | Mapping[str, Estimate]:
        """Return what is found on a model.

        Args:
            model: A Hugging Face language model in evaluation mode.
            context: What it is measured on, and when to stop.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class SeededMeasure(Measure):
    """A measure that draws random numbers."""

    seed: int = setting(0)
    """Decides the sentences, masks, Rademacher signs and probes; checkpoints compare best under the same."""


@dataclass(frozen=True, kw_only=True)
class SequenceMeasure(SeededMeasure):
    """A measure on sequences."""

    num_sequences: int = setting(512, minimum=2)
    """Sequences to measure on, at most."""

    @property
    def counted(self) -> str:
        """What the context's `progress` counts."""
        return f"of at most {self.num_sequences:,} sequences"


F = TypeVar("F", bound=Callable[..., Any])


def requires(check: Callable[[FunctionMeasure, MeasureContext], str | None]) -> Callable[[F], F]:
    """Let a function be a measure only where `check` returns None, and else the reason, as a sentence."""

    def marked(function: F) -> F:
        function.requires = check  # type: ignore[attr-defined]
        return function

    return marked


def counting(what: str) -> Callable[[F], F]:
    """Let a function be a measure whose `progress` counts something else than sequences."""

    def marked(function: F) -> F:
        function.counting = what  # type: ignore[attr-defined]
        return function

    return marked


@dataclass(frozen=True, kw_only=True)
class FunctionMeasure(Measure):
    """A function with values of its settings.

    Its other keyword arguments are filled in by their names: `causal`, `read_text`, `language`, `checkpoint` and what
    else a `MeasureContext` has; `context` itself; `auxiliary_sample` of the inputs. A function with `**options` takes
    those of `isoloss.flatness.MeasureOptions`.
    """

    pattern: ClassVar[str]  # the name that it is registered under
    function: ClassVar[Callable[..., Any]]
    taken: ClassVar[tuple[str, ...]]  # the names of its other keyword arguments
    is_of_flatness: ClassVar[bool]  # whether it takes a model, perhaps sequences, and nothing else

    @property
    def counted(self) -> str:
        """What the context's `progress` counts."""
        what: str = getattr(self.function, "counting", "") or super().counted
        return what

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return which limits are set that the function does not take, or the reason that it gives itself."""
        if unused := [
            f"no {name}" for name in ("rtol", "seconds") if getattr(context, name) and name not in self.taken
        ]:
            return f"it takes {' and '.join(unused)}"
        check = getattr(self.function, "requires", None)
        return None if check is None else check(self, context)

    def __call__(self, model: Any, batches: Any = (), **options: Any) -> MeasureResult:
        """Return what the function finds of a model on batches; `options` are the arguments that are not settings."""
        names = inspect.signature(self.function).parameters
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in names}
        positional = (model, batches) if "batches" in names else (model,)
        return MeasureResult.of(self.pattern, self.function(*positional, **settings, **options))

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Measure on the inputs of the context."""
        if reason := self.why_not_applicable(context):
            raise IsolossError(reason)
        options = {name: getattr(context, name) for name in self.taken if hasattr(context, name)}
        if "causal" in self.taken:
            options["causal"] = context.is_causal
        if "context" in self.taken:
            options["context"] = context
        if not isinstance(self, SequenceMeasure):
            return self(model, **options)
        inputs = context.inputs(self.num_sequences, self.seed)
        if "auxiliary_sample" in self.taken and context.has_embeddings:
            options["auxiliary_sample"] = inputs.auxiliary_sample
        result = self(model, inputs.batches, **options)
        return dataclasses.replace(result, inputs=digest_batches(inputs.batches))


# a function's arguments that are not settings: those of `MeasureOptions`, which `**options` takes, and others
_OPTIONS = ("causal", "rtol", "seconds", "progress")
_FILLED = (*_OPTIONS, "auxiliary_sample", "read_text", "language", "checkpoint", "objective", "context")


def measure_class(pattern: str) -> type[Measure]:
    """Return the class of the measure registered under a name; the class of a function is made of its signature."""
    target: Any = MEASURES.load(pattern)
    made: Any = target if inspect.isclass(target) else _class_of(pattern, target)
    return made  # type: ignore[no-any-return]


@functools.cache
def _class_of(pattern: str, function: Callable[..., Any]) -> type[FunctionMeasure]:
    parameters = inspect.signature(function).parameters
    own = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in (*_FILLED, "seed")
    }
    annotations = {name: parameter.annotation for name, parameter in own.items()}
    holder = type(pattern, (), {"__annotations__": annotations})
    hints = get_type_hints(holder, globalns=getattr(function, "__globals__", {}), include_extras=True)
    fields: list[Any] = []
    for name, parameter in own.items():
        kind, *marks = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        has_default = parameter.default is not parameter.empty
        if not marks and name not in name_fields(pattern):
            if has_default:
                continue
            raise IsolossError(
                f"the measure {pattern} takes {name}, which is neither a setting (Annotated[..., setting(), 'help']) "
                f"nor one of {', '.join(_FILLED)}"
            )
        bounds: Mapping[str, Any] = next((mark.metadata for mark in marks if isinstance(mark, dataclasses.Field)), {})
        metadata = {**bounds, "help": " ".join(mark for mark in marks if isinstance(mark, str))}
        default: dict[str, Any] = {"default": parameter.default} if has_default else {}
        fields.append((name, kind, dataclasses.field(**default, metadata=metadata)))
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    taken = tuple(name for name in _FILLED if name in parameters or (takes_any and name in _OPTIONS))
    seeded = (SequenceMeasure,) if "batches" in parameters else (SeededMeasure,) if "seed" in parameters else ()
    namespace = {
        "__module__": __name__,
        "__doc__": inspect.getdoc(function),
        "pattern": pattern,
        "function": staticmethod(function),
        "taken": taken,
        "is_of_flatness": {"context", "language", "checkpoint", "objective"}.isdisjoint(taken),
    }
    bases = (FunctionMeasure, *seeded)
    return dataclasses.make_dataclass(
        function.__name__, fields, bases=bases, namespace=namespace, frozen=True, kw_only=True
    )


def make_measure(name: str, settings: Mapping[str, Any] | None = None) -> Measure:
    """Return the measure called `name`.

    Args:
        name: E.g. `loss`, `probe-root`.
        settings: Values of fields, by name; those of other measures are not used.

    Example:
        >>> from isoloss.lab.evaluation.measures.base import make_measure
        >>> make_measure("few-shot-root-100", {"probe_draws": 3, "loss_sentences": 100}).probe_draws
        3
    """
    pattern, parts = MEASURES.match(name)
    if not parts and name_fields(pattern):
        raise IsolossError(f"{pattern} is a pattern: replace {' and '.join(_placeholders(pattern))}{_example(pattern)}")
    cls: Any = measure_class(pattern)
    fields = {field.name for field in dataclasses.fields(cls)}
    settings = dict(settings or {})
    # settings of other measures are left out below: a command gives all of its measures the same ones
    if unknown := [key for key in settings if key not in fields]:
        known = _settings_of_all(tuple(MEASURES))
        if wrong := next((key for key in unknown if key not in known), None):
            names = ", ".join(sorted(fields - name_fields(pattern))) or "none"
            hint = did_you_mean(wrong, known) or f"; those of {name} are {names}"
            raise IsolossError(f"no measure has a setting {wrong!r}{hint}")
    values: dict[str, Any] = {key: value for key, value in settings.items() if key in fields}
    hints = configs.hints_of(cls)
    for part, word in parts.items():
        key = part.lower()
        values[key] = int(word) if hints[key] is int and word.isdecimal() else word
    for field_ in dataclasses.fields(cls):
        has_default = {field_.default, field_.default_factory} != {dataclasses.MISSING}
        if not has_default and field_.name not in values:
            raise IsolossError(f"the measure {name} has no default for {field_.name}: give one in its settings")
    measure: Measure = cls(**values)
    configs.check(measure)
    return measure


@functools.cache
def _settings_of_all(registered: tuple[str, ...]) -> set[str]:
    """Return the settings of all measures, which have these names."""
    classes: Any = MEASURES.loaded(measure_class)
    return {field.name for name in registered if name in classes for field in dataclasses.fields(classes[name])}


def settings_of(name: str, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings that decide a measure's result and are kept with it; arguments as for `make_measure`."""
    values: dict[str, Any] = configs.identity(make_measure(name, settings))
    by_name = name_fields(MEASURES.match(name)[0])
    code = MEASURES.code_sha256(name) + TASKS.code_sha256(values.get("task", ""))
    kept = {key: values[key] for key in sorted(values, key=lambda key: key == "seed") if key not in by_name}
    return kept | ({"code_sha256": code} if code else {})


def used_settings(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, of those that are kept with the result of the measure called `name`, that have an effect."""
    unused = measure_class(MEASURES.match(name)[0]).unused(settings)
    return {key: value for key, value in settings.items() if key not in unused}


def name_fields(pattern: str) -> set[str]:
    """Return the fields that the name of a registered measure gives: of trace-in-SIZE, size."""
    return {word.lower() for word in _placeholders(pattern)}


def _placeholders(pattern: str) -> list[str]:
    return [word for word in pattern.split("-") if word.isupper()]


def _example(pattern: str) -> str:
    """Return what a pattern becomes with its placeholders replaced; empty where one of them is not isoloss's own."""
    words = [_REPLACED.get(word, word) if word.isupper() else word for word in pattern.split("-")]
    return "" if any(word.isupper() for word in words) else f", e.g. {'-'.join(words)}"


def digest(*tensors: torch.Tensor, more: object = None) -> str:
    """Return the SHA-256 of the shapes and values of tensors, and of a JSON document."""
    sha256 = hashlib.sha256(json.dumps(more).encode())
    for tensor in tensors:
        sha256.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
        sha256.update(tensor.cpu().contiguous().numpy().tobytes())
    return sha256.hexdigest()


def digest_batches(batches: Sequence[Mapping[str, torch.Tensor]]) -> str:
    """Return the SHA-256 of all sequences of some batches, however they are cut into these, and of no documents."""
    import torch

    names = sorted(batches[0].keys() - {"documents"})
    return digest(*(torch.cat([batch[name] for batch in batches]) for name in names))
