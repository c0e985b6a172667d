"""Named components, loaded on first use and open to other packages: languages, measures, tasks and what else has names.

A component is a class or function, registered as an object or as `"module:attribute"`. Another package adds one by an
entry point, in its `pyproject.toml`:

    [project.entry-points."isoloss.measures"]
    gradient-norm = "my_package.measures:GradientNorm"

Nothing is imported before it is asked for by name, so that a list of names costs no more than reading metadata.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from isoloss.errors import IsolossError, did_you_mean, warn


class Entry(NamedTuple):
    """A registered component.

    Attributes:
        target: The component, or where it is: `"module:attribute"`.
        summary: One line about it; empty: the first line of its docstring.
    """

    target: Any
    summary: str = ""


class Registry:
    """The components of one kind, by name.

    A name may have a part in capital letters that stands for whatever is there: `probe-TASK` is found as `probe-root`.

    Attributes:
        kind: What a component is called in messages, e.g. `language`.
        group: The group of entry points that other packages use, `isoloss.` and the plural of the kind.
    """

    def __init__(self, kind: str, plural: str, builtin: Mapping[str, Entry]) -> None:
        self.kind, self.group = kind, f"isoloss.{plural}"
        self._entries = dict(builtin)
        self._plural = plural

    def register(self, name: str, target: Any, *, summary: str = "") -> None:
        """Add a component for this process; another package adds one by an entry point (see above).

        A language or a training algorithm is a subclass of `isoloss.config.LanguageConfig` or `AlgorithmConfig`, a
        model an `isoloss.models.architectures.Architecture`, a measure a subclass of
        `isoloss.evaluation.measures.base.Measure`, a study an `isoloss.studies.spec.Study` or a function that returns
        one, and an executor a function like `isoloss.studies.executors.local.run`. A task is a function of a language
        and of the parts of its name in capital letters, in small letters, that returns an
        `isoloss.languages.api.Labeling`.

        Args:
            name: What configs and the command line call it. Parts in capital letters stand for whatever is there: they
                are fields of a measure (`probe-TASK`) and arguments of a task (`parity-TOKEN`).
            target: The component, or where it is: `"module:attribute"`.
            summary: One line for lists; empty: the first line of its docstring.

        Raises:
            IsolossError: Another component has the name.

        Example:
            >>> from isoloss import make_task, register_language, register_task
            >>> register_language("my-dyck", "isoloss.languages.config:DyckConfig", summary="nested brackets")
            >>> LANGUAGES.load("my-dyck")(kinds=3).build()
            PCFG(18 symbols, 6 tokens, at most 16 tokens a sentence, torch.float64 on cpu)
            >>> def starts_with(language, token):
            ...     from isoloss.languages.api import Labeling
            ...     index = language.vocabulary.index(token)
            ...     return Labeling(classes=("no", "yes"), label=lambda s: (s.tokens[:, 0] == index).long())
            >>> register_task("starts-with-TOKEN", starts_with)
            >>> make_task("brackets-8", "starts-with-<", num_train=10, num_test=10).classes
            ('no', 'yes')
        """
        known = self._all().get(name)
        if known is not None and _place(known.target) != _place(target):  # a notebook runs its cells again
            raise IsolossError(f"there is a {self.kind} {name!r} already; choose another name")
        self._entries[name] = Entry(target, summary)

    def names(self) -> list[str]:
        """Return all names, those of isoloss first."""
        return list(self._all())

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
        if not (inspect.isclass(component) or callable(component)):  # an object, which its module describes
            component = (
                importlib.import_module(entry.target.partition(":")[0]) if isinstance(entry.target, str) else None
            )
        return (inspect.getdoc(component) or "").partition("\n")[0]

    def load(self, name: str) -> Any:
        """Return the component called `name`.

        Raises:
            IsolossError: There is none, or the package that offers it cannot be imported.
        """
        entry = self._all().get(name)
        if entry is None:
            raise self._unknown(name)
        if not isinstance(entry.target, str):
            return entry.target
        try:
            return pkgutil.resolve_name(entry.target)
        except (ImportError, AttributeError) as error:
            raise IsolossError(f"{self.kind} {name!r} cannot be loaded from {entry.target}: {error}") from error

    def match(self, name: str) -> tuple[str, dict[str, str]]:
        """Return the registered name that `name` is one of, and what stands for its parts in capital letters.

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

    def _unknown(self, name: str) -> IsolossError:
        return IsolossError(
            f"no {self.kind} {name!r}{did_you_mean(name, self) or ';'} the {self._plural} are {', '.join(self)}"
        )

    def _all(self) -> dict[str, Entry]:
        """Return the entries, those of other packages after one's own."""
        entries = dict(self._entries)
        for point in _entry_points(self.group):
            if point.name not in entries:
                entries[point.name] = Entry(point.value)
            elif entries[point.name].target not in (point.value, _loaded(point)):
                package = point.dist.name if point.dist is not None else point.value
                warn(f"{package} has a {self.kind} {point.name!r}, which is not used: the name is taken")
        return entries


def _place(target: Any) -> Any:
    """Return where a component is, or the component itself where it is an object without a name."""
    return f"{target.__module__}:{target.__qualname__}" if hasattr(target, "__qualname__") else target


def _values(pattern: str, name: str) -> dict[str, str] | None:
    """Return what stands in `name` for each part of `pattern` in capital letters, or None where it is no such name."""
    words = pattern.split("-")
    first = next((place for place, word in enumerate(words) if word.isupper()), None)
    if first is None or not name.startswith(prefix := "".join(f"{word}-" for word in words[:first])):
        return None
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
    except (ImportError, AttributeError):
        return None


def _entries(module: str, components: Mapping[str, tuple[str, str]]) -> dict[str, Entry]:
    """Return the entries of components of a module: by name, the attribute and the summary."""
    return {name: Entry(f"{module}:{attribute}", summary) for name, (attribute, summary) in components.items()}


# a file is read by the last kind that takes it: other packages' come before the grammars, which take any file
_LANGUAGES = {
    "pcfg": ("PCFGConfig", "a random layered grammar"),
    "grammar": ("GrammarConfig", "a grammar given by its rules"),
    "brackets": ("BracketsConfig", "the paper's bracket language (section 5)"),
    "dyck": ("DyckConfig", "nested brackets of several kinds, as a grammar"),
    "hmm": ("HMMConfig", "a random block-diagonal hidden Markov model"),
    "corpus": ("CorpusConfig", "real text"),
    "teacher": ("TeacherConfig", "a causal language model that writes sentences"),
    "file": ("FileConfig", "a stored language"),
}
_ALGORITHMS = {
    "gradient": ("GradientConfig", "the gradient of the loss alone"),
    "sam": ("SAMConfig", "sharpness-aware minimization"),
    "adversarial": ("AdversarialConfig", "spoil a downstream task at the same loss"),
    "fisher-penalty": ("FisherPenaltyConfig", "penalize the trace of the Fisher"),
}
_MODELS = {
    "bert": ("BERT", "BERT: post-layer-norm blocks, GELU, a transform before the tied decoder"),
    "bert-pre-ln": ("PRE_LAYER_NORM_BERT", "BERT with pre-layer-norm blocks and a layer norm after the last one"),
    "lstm": ("LSTM", "LSTM layers that read both ways, or one; a decoder tied to the token embedding"),
    "opt": ("OPT", "OPT: pre-layer-norm blocks, ReLU, a tied decoder without bias"),
}
_LOSS = "loss per predicted token: entropy of the true conditionals + KL to them; for text, held-out cross-entropy"
_FLATNESS = {
    "trace": ("Trace", "trace of the Fisher of that loss, which at saturation is the trace of its Hessian"),
    "trace-in-SIZE-SCALE": (
        "TraceIn",
        "that trace after expanding the model to a size, e.g. trace-in-d64-paper (isoloss expand --scale)",
    ),
    "empirical-fisher": ("EmpiricalFisher", "mean squared gradient norm at the given labels"),
    "hessian-trace": ("HessianTrace", "trace of the Hessian at the given labels"),
    "weighted-trace": (
        "WeightedTrace",
        "trace of the Fisher weighted by squared parameters: invariant to rescaling",
    ),
    "fisher-rao": ("FisherRao", "squared Fisher-Rao norm: invariant to rescaling"),
    "largest-eigenvalue": ("LargestEigenvalue", "largest eigenvalues of the Gauss-Newton matrix or the Hessian"),
    "spectral-density": ("SpectralDensity", "distribution of these eigenvalues"),
    "sam-sharpness": ("SAMSharpness", "rise of the loss in a batch's worst direction"),
    "noise-sharpness": ("NoiseSharpness", "expected rise of the loss under noise on the weights"),
    "squared-norm": ("SquaredNorm", "sum of the squared parameters, exact"),
}
_TRANSFER = {
    "probe-TASK": (
        "Probe",
        "accuracy of a linear probe on the concatenated token embeddings, e.g. probe-root, probe-prefix-4",
    ),
    "lookup-TASK": (
        "Lookup",
        "the same probe on the true conditionals: the look-up table, a model without parameters",
    ),
    "finetune-TASK": ("Finetune", "accuracy of the fine-tuned model, e.g. finetune-root"),
}
_GLUE = {
    "cola": ("COLA", "GLUE: whether a sentence is acceptable"),
    "mnli": ("MNLI", "GLUE: whether a premise entails a hypothesis, contradicts it, or neither"),
    "mrpc": ("MRPC", "GLUE: whether two sentences say the same"),
    "qnli": ("QNLI", "GLUE: whether a sentence answers a question"),
    "qqp": ("QQP", "GLUE: whether two questions ask the same"),
    "rte": ("RTE", "GLUE: whether one sentence entails another"),
    "sst2": ("SST2", "GLUE: whether a review is positive"),
    "wnli": ("WNLI", "GLUE: whether a sentence with a pronoun entails one with the pronoun replaced"),
}

_SAME_LOSS = "models of the same pre-training loss: longer training, another optimizer, other sizes"
_COMPARED = "the paper's algorithms and others, several seeds of each: loss, flatness and transfer"

LANGUAGES = Registry("language", "languages", _entries("isoloss.languages.config", _LANGUAGES))
ALGORITHMS = Registry("training algorithm", "algorithms", _entries("isoloss.training.algorithms.config", _ALGORITHMS))
MODELS = Registry("model", "models", _entries("isoloss.models.architectures", _MODELS))
MEASURES = Registry(
    "measure",
    "measures",
    _entries("isoloss.evaluation.measures.loss", {"loss": ("Loss", _LOSS)})
    | _entries("isoloss.evaluation.measures.flatness", _FLATNESS)
    | _entries("isoloss.evaluation.measures.transfer", _TRANSFER),
)
# a callable `(language, **parts) -> Labeling`, parts being the capital letters of the name, or a TextTask
TASKS = Registry("task", "tasks", _entries("isoloss.transfer.text_sources", _GLUE))
EXECUTORS = Registry(
    "executor",
    "executors",
    _entries("isoloss.studies.executors.local", {"local": ("run", "worker processes on this machine")}),
)
STUDIES = Registry(
    "study",
    "studies",
    _entries("isoloss.paper.same_loss.study", {"same-loss": ("STUDY", _SAME_LOSS)})
    | _entries("isoloss.paper.algorithms.study", {"algorithms": ("STUDY", _COMPARED)}),
)

register_language, register_model, register_measure = LANGUAGES.register, MODELS.register, MEASURES.register
register_task, register_algorithm = TASKS.register, ALGORITHMS.register
register_executor, register_study = EXECUTORS.register, STUDIES.register
