"""Measures of what a model has learned for other tasks: accuracies of probes and of fine-tuning, and its features.

Some have no model: probes on the true conditionals, and on the tokens themselves.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from isoloss.config import setting
from isoloss.errors import IsolossError, did_you_mean
from isoloss.lab.evaluation.measures.base import MeasureResult, SeededMeasure, digest, make_measure
from isoloss.registry import TASKS
from isoloss.transfer.config import ClassifierConfig
from isoloss.transfer.text_sources import TextTask, own_text_task, registered_name, registered_text_task

if TYPE_CHECKING:
    import torch

    from isoloss.lab.evaluation.context import MeasureContext, ModelInfo
    from isoloss.lab.languages.base import Sentences
    from isoloss.lab.tasks import WholeTask
    from isoloss.statistics.estimate import Estimate
    from isoloss.transfer.probe import Fitted
    from isoloss.transfer.results import TransferResult
    from isoloss.transfer.tasks import TaskData
    from isoloss.transfer.text_tasks import TextExamples

_TASK_DATA = "--task-data (in Python, task_data)"

# --- any task --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trained(SeededMeasure):
    """A measure that takes a number of training sentences."""

    num_train: int | Literal["all"] = setting(4096, minimum=1)
    """Training sentences of a probe or of fine-tuning. Of a task of text: examples, fewer where there are fewer, or all
    of them."""


@dataclass(frozen=True, kw_only=True)
class TaskMeasure(SeededMeasure):
    """A measure on a task of the language, or on one of text."""

    num_test: int | Literal["all"] = setting(4096, minimum=1)
    """Test sentences; all: every labeled sentence of the language, weighted by its probability, for an exact accuracy
    (for languages with at most 65,536 strings of tokens). Of a task of text: examples, as for num_train."""
    task_data: tuple[str, ...] = setting((), omit_default=True)
    """Where the examples of tasks of text are, as NAME=PATH, e.g. sst2=glue/SST-2: a .tsv, .csv, .jsonl or .json file,
    a folder with one for each split, or a dataset hf:NAME. Default: those of GLUE from the Hugging Face hub."""
    task_length: int | None = setting(None, minimum=1, omit_default=True)
    """Of a task of text: the most tokens of an example. Default: 128, or as many as the model reads."""
    task: str

    def __post_init__(self) -> None:
        """Keep what is about this task of `task_data` and `task_length`: the settings of others decide nothing here."""
        given: Any = self.task_data
        entries = (given,) if isinstance(given, str) else given
        own = tuple(entry for entry in entries if _task_of(entry, self.task) == registered_name(self.task))
        if len(own) > 1:
            raise IsolossError(f"{_TASK_DATA} has the examples of {self.task} twice: {' and '.join(own)}")
        object.__setattr__(self, "task_data", own)
        if self._source is None:
            object.__setattr__(self, "task_length", None)

    @property
    def _source(self) -> TextTask | None:
        """Where the examples of a task of text are; None for a task of the language."""
        data = next((own.partition("=")[2] for own in self.task_data), None)
        return registered_text_task(self.task, data) or (None if data is None else own_text_task(self.task, data))

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return why there is no such task."""
        source = self._source
        if source is None and context.language is None:
            text = f"{self.task} is no task of text{did_you_mean(self.task, TASKS)}"
            return f"{text}, and no language is given whose task it could be (isoloss ls tasks)"
        try:
            if source is None:
                self._sentences(context)
            else:
                self._examples(source, context)
        except IsolossError as error:
            return str(error)
        return None

    def check_model(self, model: ModelInfo, context: MeasureContext) -> None:
        """Refuse a model that cannot read the task, before anything is measured.

        Raises:
            IsolossError: No states of it can be read, its tokens do not fit, or there are too few examples.
        """
        if model.no_features is not None:
            raise IsolossError(model.no_features)
        if (source := self._source) is not None:
            examples, reads = self._examples(source, context), (model.config, model.max_length)
            if (number := len(examples.test)) < 2:
                where = source.test or source.train
                raise IsolossError(f"{where} gives {number} test example; an accuracy with an error needs at least two")
            context.text_task(examples, *reads, max_length=self.task_length, model=model.name)

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return `accuracy`, with the class that each seed's classifier predicts for each test example.

        Tested on all sentences, it comes instead with the influence of each draw, projection or seed. The inputs of a
        task of text are its examples: models may read them in different tokens.
        """
        from isoloss.lab.evaluation.context import config_of
        from isoloss.lab.tasks import WholeTask
        from isoloss.model_checks import max_length

        more: Mapping[str, Any] = {}
        if (source := self._source) is not None:
            examples = self._examples(source, context)
            read = context.text_task(examples, config_of(model), max_length(model), max_length=self.task_length)
            accuracy, more = _sampled(self._result(model, context, read))
            assert read.coverage is not None  # as of every task of text
            details = {**accuracy.details, "text": dataclasses.asdict(read.coverage)}
            accuracy = dataclasses.replace(accuracy, details=details)
            texts = dataclasses.asdict(examples)
            for split in ("train", "test"):
                del texts[split]["num_unlabeled"], texts[split]["num_incomplete"]  # the examples alone are the inputs
            return MeasureResult(estimates={"accuracy": accuracy}, more=more, inputs=digest(more=texts))
        data = self._sentences(context)
        if isinstance(data, WholeTask):
            task, accuracy = data.task, self._exact(model, context, data)
        else:
            task, (accuracy, more) = data, _sampled(self._result(model, context, data))
        tensors = (task.train.tokens, task.train_labels, task.test.tokens, task.test_labels)
        return MeasureResult(
            estimates={"accuracy": accuracy}, more=more, inputs=digest(*tensors, more=list(task.classes))
        )

    def drawn(self) -> tuple[int | Literal["all"], int | None]:
        """Return how many training examples a draw has, and how many draws there are; None: one, and it may be less."""
        raise NotImplementedError

    def _sentences(self, context: MeasureContext) -> TaskData | WholeTask:
        from isoloss.lab.tasks import make_task, whole_task

        number, draws = self.drawn()
        if isinstance(number, str):
            raise IsolossError("num_train is all, but sentences of a language are drawn: give num_train as a number")
        drawn = {"num_train": number * (draws or 1), "seed": self.seed}
        if isinstance(self.num_test, str):
            return context.once(whole_task, context.language, self.task, context.all_sentences(), **drawn)
        return context.once(make_task, context.language, self.task, **drawn, num_test=self.num_test)

    def _examples(self, source: TextTask, context: MeasureContext) -> TextExamples:
        from isoloss.transfer.text_tasks import read_examples

        context.tokenizer()  # none is an error that is told before any text is read
        number, draws = self.drawn()
        num_train, num_test = (None if isinstance(n, str) else n for n in (number, self.num_test))
        drawn = {"num_train": num_train, "num_test": num_test, "draws": draws, "seed": self.seed}
        return context.once(read_examples, source, **drawn)

    def _takes_start(self, context: MeasureContext) -> bool:
        """Whether the model reads a start that the sentences lack; what stands before a text, its tokenizer has put."""
        return context.is_causal and self._source is None

    def _read(self, data: TaskData, context: MeasureContext) -> TaskData:
        """Return the task as the model reads it."""
        from isoloss.lab.tasks import read_from_start

        return read_from_start(data, context.language) if self._takes_start(context) else data

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        """Return the result on sampled test sentences."""
        raise NotImplementedError

    def _exact(self, model: Any, context: MeasureContext, data: WholeTask) -> Estimate:
        """Return the accuracy over all sentences."""
        raise NotImplementedError


def _task_of(entry: Any, task: str) -> str:
    """Return the task that an entry of `task_data` is about: one of text, or this `task`, which may be your own."""
    name, has_path, path = str(entry).partition("=")
    if not (has_path and path) or (name != task and registered_text_task(name) is None):
        tasks = ", ".join(other for other, task in TASKS.loaded().items() if isinstance(task, TextTask))
        raise IsolossError(
            f"{_TASK_DATA} has {entry!r}; an entry is NAME=PATH with a task of text ({tasks}) as its name"
        )
    return registered_name(name)


def _sampled(result: TransferResult) -> tuple[Estimate, dict[str, Any]]:
    """Return the accuracy, and the predicted classes and labels in the smallest integer type that holds them."""
    import numpy as np

    small = np.min_scalar_type(len(result.classes) - 1)
    return result.accuracy, {
        "accuracy.predictions": result.predictions.numpy().astype(small),
        "accuracy.labels": result.labels.numpy().astype(small),
    }


# --- probes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _ProbeMeasure(TaskMeasure):
    """A measure that fits linear probes to hidden states: the last ones of all tokens, side by side, unless told."""

    probe_regularization: tuple[float, ...] = setting((1e-3,), above=0, below=math.inf, omit_default=True)
    """Regularization strength of the convex probe; of several, the best on held-out training examples is used."""
    probe_draws: int | None = setting(None, minimum=1, omit_default=True)
    """Number of convex probes to average, each with its own training sentences, or its own projection. Default: 1; 5
    for few-shot probes, 3 for projected ones."""

    probe_standardize: bool = setting(True, omit_default=True)
    """Whether a probe reads features centered and divided by one number, the root mean square of what remains; False:
    as they are, as in the paper."""
    probe_pooling: Literal["concatenate", "mean", "first", "last"] = setting("concatenate", omit_default=True)
    """Which token states a probe reads: all side by side (`concatenate`), their `mean`, or those of the `first` or the
    `last` token, which alone has read the whole sentence in a causal model."""
    probe_layer: int = setting(-1, omit_default=True)
    """Which hidden states a probe reads: 0 is the embeddings, -1 the model's last."""

    default_draws: ClassVar[int] = 1
    over: ClassVar[str] = "draws"

    def check_fields(self) -> None:
        """Refuse an empty list of strengths."""
        if not self.probe_regularization:
            raise IsolossError("probe_regularization is empty; a convex probe needs at least one strength")

    @property
    def _draws(self) -> int:
        return self.probe_draws or self.default_draws

    def _classifier(self) -> ClassifierConfig:
        return ClassifierConfig(
            solver="convex",
            regularization=self.probe_regularization,
            standardize=self.probe_standardize,
            seeds=1,
            seed=self.seed,
        )

    def _features(
        self, model: Any, context: MeasureContext, sentences: Sentences, types: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return (n, D), one row per sentence."""
        from isoloss.text.masking import with_start
        from isoloss.transfer.features import extract

        read = with_start(sentences, context.language) if self._takes_start(context) else sentences
        features: Any = extract(model, read, types=types, pooling=self.probe_pooling, layer=self.probe_layer)
        return features  # type: ignore[no-any-return]

    def _fitted(self, model: Any, context: MeasureContext, data: TaskData | WholeTask) -> Fitted:
        """Return the predictions of each probe, and how they were fitted."""
        from isoloss.lab.tasks import WholeTask

        if isinstance(data, WholeTask):
            task, test = data.task, self._all_features(model, context, data.task.test)
            train = test[data.train_rows.to(test.device)]
        else:
            task, test = data, self._features(model, context, data.test, data.test_types)
            train = self._features(model, context, data.train, data.train_types)
        return self._fit(train, task.train_labels, test, len(task.classes))

    def _all_features(self, model: Any, context: MeasureContext, sentences: Sentences) -> torch.Tensor:
        states = (self.probe_pooling, self.probe_layer)
        return context.features(model, self._features, model, context, sentences, states=states)

    def _fit(self, train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor, classes: int) -> Fitted:
        from isoloss.transfer.probe import fit_each

        draws = zip(train_x.chunk(self._draws), train_y.chunk(self._draws), itertools.repeat(test_x), strict=False)
        return fit_each(draws, self._classifier(), classes=classes)

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        from isoloss.transfer.probe import probe_method
        from isoloss.transfer.results import score

        began = time.perf_counter()
        predictions, details = self._fitted(model, context, data)
        result = score(
            predictions,
            data.test_labels,
            data.classes,
            method=probe_method(self._classifier()),
            settings={**details, "overlap": data.overlap},
            bayes=data.bayes,
            seconds=time.perf_counter() - began,
        )
        known = dict(result.accuracy.details)
        known |= {f"{self.over[:-1]}_std": known.pop("seed_std"), self.over: known.pop("seeds")}
        return dataclasses.replace(result, accuracy=dataclasses.replace(result.accuracy, details=known))

    def _exact(self, model: Any, context: MeasureContext, data: WholeTask) -> Estimate:
        from isoloss.lab.tasks import weighted_overlap
        from isoloss.transfer.probe import probe_method

        began = time.perf_counter()
        config = self._classifier()
        predictions, details = self._fitted(model, context, data)
        over = self.over if config.solver == "convex" else "seeds"
        rows = data.train_rows.chunk(self._draws if over == "draws" else 1)
        shared = sum(weighted_overlap(data.probabilities, part) for part in rows) / len(rows)
        return data.estimate(
            predictions,
            method=probe_method(config),
            over=over,
            details={**details, "overlap": shared},
            seconds=time.perf_counter() - began,
        )


@dataclass(frozen=True, kw_only=True)
class Probe(_ProbeMeasure, Trained):
    """Accuracy of a linear probe on the last hidden states of all tokens, concatenated, e.g. probe-root, probe-sst2."""

    probe_seeds: int = setting(5, minimum=1)
    """AdamW's probes, each with its own initial weights and order."""
    probe_epochs: int = setting(100, minimum=1)
    """Passes of AdamW over the training sentences of a probe."""
    probe_solver: Literal["adamw", "convex"] = setting("adamw", omit_default=True)
    """How a probe is fitted: `adamw`, the paper's training, or `convex`, the minimum of the regularized loss."""

    @classmethod
    def unused(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the settings of the other solver."""
        is_convex = settings.get("probe_solver") == "convex"
        return ("probe_seeds", "probe_epochs") if is_convex else ("probe_regularization", "probe_draws")

    def check_fields(self) -> None:
        """Refuse a setting that the solver does not use."""
        super().check_fields()
        for name in self.unused(vars(self)):
            if getattr(self, name) != getattr(Probe, name):
                raise IsolossError(f"{name} has no effect with the solver {self.probe_solver}: leave it out")

    def drawn(self) -> tuple[int | Literal["all"], int | None]:
        """Return the training examples of a draw, and the draws."""
        return self.num_train, self._draws if self._draws > 1 else None

    def _classifier(self) -> ClassifierConfig:
        if self.probe_solver == "convex":
            return super()._classifier()
        return ClassifierConfig(
            seeds=self.probe_seeds, epochs=self.probe_epochs, standardize=self.probe_standardize, seed=self.seed
        )

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        return super()._result(model, context, data) if self._draws > 1 else self._of_one(model, context, data)

    def _of_one(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        """Return the result of one draw, whose features may be larger than memory."""
        from isoloss.transfer.probe import linear_probe

        reading: dict[str, Any] = {"pooling": self.probe_pooling, "layer": self.probe_layer}
        return linear_probe(model, self._read(data, context), **dataclasses.asdict(self._classifier()), **reading)


def task_probes(tasks: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Probe]:
    """Return the probe of each task by name; a task may be NAME=PATH, with the path of its examples.

    Raises:
        IsolossError: A task has no name or is named twice, or a setting is wrong.
    """
    if wrong := next((task for task in tasks if not all(task.partition("=")[::2] if "=" in task else [task])), None):
        raise IsolossError(f"there is no task {wrong!r}: give the name of a task, or NAME=PATH for your own")
    names = [task.partition("=")[0] for task in tasks]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise IsolossError(f"the task {twice} is named twice")
    return {
        name: cast("Probe", make_measure(f"probe-{name}", {**settings, "task_data": (task,) if "=" in task else ()}))
        for name, task in zip(names, tasks, strict=True)
    }


@dataclass(frozen=True, kw_only=True)
class FewShot(_ProbeMeasure):
    """Mean accuracy of convex probes fitted to few sentences each, over draws of these, e.g. few-shot-prefix-4-100."""

    number: int = setting(minimum=1)

    default_draws: ClassVar[int] = 5

    def drawn(self) -> tuple[int | Literal["all"], int | None]:
        """Return the training examples of a draw, and the draws."""
        return self.number, self._draws


@dataclass(frozen=True, kw_only=True)
class InvariantFewShot(FewShot):
    """The same probes on features scaled to the same variance, which no exact rescaling of the model can change."""

    def _fit(self, train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor, classes: int) -> Fitted:
        # of all sentences alike: with few examples their own deviations would add noise
        scale = test_x.std(dim=0)
        scale[scale == 0] = 1.0
        return super()._fit(train_x / scale, train_y, test_x / scale, classes)


@dataclass(frozen=True, kw_only=True)
class Projected(_ProbeMeasure, Trained):
    """Accuracy of convex probes on random projections to one width, to compare models of several: projected-root-64."""

    width: int = setting(minimum=1)

    default_draws: ClassVar[int] = 3
    over: ClassVar[str] = "projections"

    def drawn(self) -> tuple[int | Literal["all"], int | None]:
        """Return the training examples of a draw, and the draws."""
        return self.num_train, None

    def _fit(self, train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor, classes: int) -> Fitted:
        from isoloss.transfer.features import projection_matrix
        from isoloss.transfer.probe import fit_each

        wide = train_x.shape[1]
        if self.width > wide:
            raise IsolossError(
                f"the width is {self.width}, but the model has {wide} features: choose at most that many"
            )
        # the same for all models of one width
        matrices = (projection_matrix(wide, self.width, self.seed, draw).to(train_x) for draw in range(self._draws))
        parts = ((train_x @ matrix, train_y, test_x @ matrix) for matrix in matrices)
        predictions, details = fit_each(parts, self._classifier(), classes=classes)
        absent: list[int] = details["absent_classes"]  # the training sentences of all projections are the same
        return predictions, {**details, "absent_classes": absent[:1], "width_before_projection": wide}


@dataclass(frozen=True, kw_only=True)
class Lookup(Probe):
    """Accuracy of the same probe on the true conditionals: the look-up table, a model without parameters."""

    features: ClassVar[str] = "lookup_features"  # of isoloss.lab.lookup

    def __post_init__(self) -> None:
        """Leave out the settings of probes of a model's states: they decide nothing here."""
        super().__post_init__()
        for name in ("probe_pooling", "probe_layer"):
            object.__setattr__(self, name, getattr(Probe, name))

    def _examples(self, source: TextTask, context: MeasureContext) -> TextExamples:
        raise IsolossError(f"the true conditionals of the text of {self.task} are not known: it has no look-up table")

    def _table(self, context: MeasureContext) -> Callable[[Any, Sentences, bool], torch.Tensor]:
        """Return the function that makes the features (n, D) of sentences of a language; the last argument: causal."""
        from isoloss.lab import lookup

        made: Callable[[Any, Sentences, bool], torch.Tensor] = getattr(lookup, self.features)
        return made

    def _features(
        self, model: Any, context: MeasureContext, sentences: Sentences, types: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._table(context)(context.language, sentences, context.is_causal)

    def _all_features(self, model: Any, context: MeasureContext, sentences: Sentences) -> torch.Tensor:
        return context.features(None, self._table(context), context.language, sentences, context.is_causal)

    def _of_one(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        from isoloss.lab.lookup import lookup_probe

        def features(language: Any, sentences: Sentences) -> torch.Tensor:
            return self._table(context)(language, sentences, context.is_causal)

        return lookup_probe(context.language, data, self._classifier(), features=features)


@dataclass(frozen=True, kw_only=True)
class RawLookup(Lookup):
    """Accuracy of a probe on the true conditionals as they are, whatever the setting `probe_standardize`."""

    standardized: ClassVar[bool] = False

    def _classifier(self) -> ClassifierConfig:
        return dataclasses.replace(super()._classifier(), standardize=self.standardized)


@dataclass(frozen=True, kw_only=True)
class StandardizedLookup(RawLookup):
    """Accuracy of a probe on the standardized true conditionals, whatever the setting `probe_standardize`."""

    standardized: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class LogLookup(Lookup):
    """Accuracy of the same probe on the logarithms of the true conditionals, clipped at log 1e-4 from below."""

    features: ClassVar[str] = "log_lookup_features"


@dataclass(frozen=True, kw_only=True)
class OneHot(Lookup):
    """Accuracy of the same probe on the tokens themselves, one-hot: what a model must beat.

    Token by token, or with the pooling `mean` on their mean, the share of each token in the text.
    """

    features: ClassVar[str] = "one_hot_features"

    def __post_init__(self) -> None:
        """Keep the one pooling that tokens have, too: the first or the last alone would be no baseline."""
        pooling = self.probe_pooling
        super().__post_init__()
        if pooling == "mean":
            object.__setattr__(self, "probe_pooling", pooling)

    def _examples(self, source: TextTask, context: MeasureContext) -> TextExamples:
        return Probe._examples(self, source, context)

    def _table(self, context: MeasureContext) -> Callable[[Any, Sentences, bool], torch.Tensor]:
        from isoloss.lab import lookup
        from isoloss.transfer import features

        is_mean = self.probe_pooling == "mean"
        if self._source is None:
            return lookup.token_share_features if is_mean else lookup.one_hot_features
        from isoloss.text.tokenizers import vocabulary

        width, make = len(vocabulary(context.tokenizer())), features.token_shares if is_mean else features.one_hot
        return lambda _, sentences, causal: make(sentences, width)


@dataclass(frozen=True, kw_only=True)
class Finetune(TaskMeasure, Trained):
    """Accuracy of the fine-tuned model with a linear head, e.g. finetune-root, finetune-rte."""

    finetune_seeds: int = setting(5, minimum=1)
    """Models, each with its own head, order and dropout."""
    finetune_epochs: int = setting(10, minimum=1)
    """Passes over the training sentences."""
    finetune_learning_rate: float = setting(1e-4, above=0, below=math.inf, omit_default=True)
    """AdamW's highest learning rate."""
    finetune_warmup_steps: int | None = setting(None, minimum=0)
    """Steps of the warm-up of the learning rate; default: 200, or 6 % of the steps where these are fewer."""

    def drawn(self) -> tuple[int | Literal["all"], int | None]:
        """Return the training examples of a draw, and the draws."""
        return self.num_train, None

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        from isoloss.lab.finetuning import finetune

        return finetune(
            model,
            self._read(data, context),
            epochs=self.finetune_epochs,
            learning_rate=self.finetune_learning_rate,
            seeds=self.finetune_seeds,
            warmup_steps=self.finetune_warmup_steps,
            seed=self.seed,
        )

    def _exact(self, model: Any, context: MeasureContext, data: WholeTask) -> Estimate:
        result = self._result(model, context, data.task)
        kept: Mapping[str, Any] = {k: v for k, v in result.accuracy.details.items() if k not in _OF_SAMPLED}
        return data.estimate(
            result.predictions,
            method=result.accuracy.method,
            over="seeds",
            details={**kept, "overlap": data.task.overlap},
            seconds=result.accuracy.seconds,
        )


# details of an accuracy on sampled test sentences, which those of one over all sentences replace
_OF_SAMPLED = (
    *("accuracies", "seed_std", "binomial_stderr", "majority_rate", "above_majority", "above_majority_stderr"),
    *("bayes_accuracy", "bayes_stderr", "num_test", "seeds"),
)


# --- features --------------------------------------------------------------------------------------------------------


def effective_rank(model: Any, batches: Any, *, causal: bool | None = None) -> dict[str, Estimate]:
    """Effective rank and participation ratio of the last hidden states where tokens are predicted, over documents."""
    import torch

    from isoloss.flatness._curvature import MeanLoss
    from isoloss.transfer.features import last_states
    from isoloss.transfer.similarity import state_ranks

    loss = MeanLoss(model, batches, causal=causal)
    states, clusters = [], []
    numbers = torch.split(loss.clusters, [len(batch.clusters) for batch in loss.batches])
    for batch, own in zip((each.checked for each in loss.batches), numbers, strict=True):
        states.append(last_states(model, batch.inputs)[batch.predicted].cpu())
        clusters.append(own[batch.predicted.nonzero()[:, 0].cpu()])
    found = state_ranks(torch.cat(states), torch.cat(clusters))
    about = {**loss.details(0), "clusters": loss.clusters_name, "error_covers": "inputs"}
    return {name: dataclasses.replace(estimate, details=about) for name, estimate in found.items()}


def unembedding_rank(model: Any) -> Estimate:
    """Effective rank of the unembedding matrix, of its singular values as they are: exact."""
    from isoloss.transfer.similarity import matrix_rank

    if (head := model.get_output_embeddings()) is None:
        raise IsolossError(f"{type(model).__name__} has no unembedding: get_output_embeddings() returns None")
    return matrix_rank(head.weight)


@dataclass(frozen=True, kw_only=True)
class Features(SeededMeasure):
    """Effective rank and participation ratio of the last hidden states, CKA with the truth; keeps their Gram matrix."""

    feature_sentences: int | Literal["all"] = setting(256, minimum=5)
    """Sentences whose features are compared; for text, held-out sequences at most; all: every sentence of the language,
    by its probability, for exact numbers (for languages with at most 65,536 strings of tokens)."""

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return why there are no features of all sentences."""
        if self.feature_sentences == "all" and (context.language is None or context.all_sentences() is None):
            return "feature_sentences is all, and the sentences cannot be enumerated: give a number"
        return None

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return `effective-dimension`, `effective-rank` and, of a model of an exact language, `cka-truth`.

        The truth is the look-up table. With a sample of sentences, the upper triangle of the features' Gram matrix
        comes with them, as `gram` of `effective-dimension`. The inputs are the sentences without a start, so that
        causal and masked models of a language have the same.
        """
        from isoloss.lab.lookup import lookup_features
        from isoloss.text.masking import with_start
        from isoloss.transfer import similarity
        from isoloss.transfer.features import extract

        language, takes_start = context.language, context.is_causal and context.language is not None

        def features_of(sentences: Sentences) -> Any:
            return extract(model, with_start(sentences, language) if takes_start else sentences)

        if self.feature_sentences == "all":
            every = context.all_sentences()
            if every is None:
                raise IsolossError(self.why_not_applicable(context))
            sentences, probabilities = every
            features = context.features(model, features_of, sentences)
            truth = context.features(None, lookup_features, language, sentences, context.is_causal)
            estimates = similarity.exact_features(features, probabilities, truth)
            return MeasureResult(estimates=estimates, inputs=digest(sentences.tokens, sentences.lengths, probabilities))
        sentences = context.sentences(self.feature_sentences, self.seed)
        exact = similarity.gram_matrix(features_of(sentences))
        # as it is kept, so that the numbers are those of what is kept
        gram = similarity.upper_triangle(exact)
        kept = similarity.from_upper_triangle(gram)
        estimates = {
            "effective-dimension": similarity.effective_dimension(kept),
            "effective-rank": similarity.effective_rank(exact),
        }
        # a model's truth is known, and costs no other model's forward passes
        if language is not None and language.is_exact and not (language.num_held_out or language.costs_forward_passes):
            truth = lookup_features(language, sentences, context.is_causal)
            estimates["cka-truth"] = similarity.linear_cka(kept, similarity.gram_matrix(truth))
        return MeasureResult(
            estimates=estimates,
            more={"effective-dimension.gram": gram},
            inputs=digest(sentences.tokens, sentences.lengths),
        )
