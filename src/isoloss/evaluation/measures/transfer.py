"""Measures of accuracy on a downstream task of the language: probes, fine-tuning, and baselines without a model."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isoloss.config import setting
from isoloss.errors import IsolossError
from isoloss.evaluation.measures.base import MeasureResult, SeededMeasure, digest, influences
from isoloss.transfer.config import ClassifierConfig

if TYPE_CHECKING:
    import torch

    from isoloss.evaluation.context import MeasureContext
    from isoloss.languages.api import Sentences
    from isoloss.statistics.estimate import Estimate
    from isoloss.transfer.draws import Fitted
    from isoloss.transfer.results import TransferResult
    from isoloss.transfer.tasks import TaskData
    from isoloss.transfer.whole_language import WholeTask


@dataclass(frozen=True, kw_only=True)
class _Trained(SeededMeasure):
    """A measure that takes a number of training sentences."""

    num_train: int = setting(4096, minimum=1)
    """Training sentences of a probe or of fine-tuning."""


@dataclass(frozen=True, kw_only=True)
class _TaskMeasure(SeededMeasure):
    """A measure on a task of the language."""

    num_test: int | Literal["all"] = setting(4096, minimum=1)
    """Test sentences; all: every labeled sentence of the language, weighted by its probability, for an exact accuracy
    (for languages with at most 65,536 strings of tokens)."""
    task: str

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return why there is no such task."""
        if context.language is None:
            return "tasks are those of a language, and none is given"
        try:
            self._data(context)
        except IsolossError as error:
            return str(error)
        return None

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return `accuracy`, with the class that each seed's classifier predicts for each test example.

        Tested on all sentences, it comes instead with the influence of each draw, projection or seed.
        """
        from isoloss.transfer.whole_language import WholeTask

        data = self._data(context)
        if isinstance(data, WholeTask):
            whole = data.task
            accuracy = self._exact(model, context, data)
            arrays = influences({"accuracy": accuracy})
        else:
            whole, result = data, self._result(model, context, data)
            accuracy, arrays = result.accuracy, _predictions(result)
        inputs = digest(
            whole.train.tokens, whole.train_labels, whole.test.tokens, whole.test_labels, more=list(whole.classes)
        )
        return MeasureResult(estimates={"accuracy": accuracy}, arrays=arrays, inputs=inputs)

    def _num_train(self) -> int:
        """Return how many training sentences are drawn in all."""
        raise NotImplementedError

    def _data(self, context: MeasureContext) -> TaskData | WholeTask:
        drawn = {"num_train": self._num_train(), "seed": self.seed}
        if isinstance(self.num_test, str):
            return context.whole_task(self.task, **drawn)
        return context.task(self.task, **drawn, num_test=self.num_test)

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        """Return the result on sampled test sentences."""
        raise NotImplementedError

    def _exact(self, model: Any, context: MeasureContext, data: WholeTask) -> Estimate:
        """Return the accuracy over all sentences."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _ProbeMeasure(_TaskMeasure):
    """A measure that fits linear probes to the last hidden states of all tokens, concatenated."""

    probe_regularization: tuple[float, ...] = setting((1e-3,), above=0, below=math.inf, omit_default=True)
    """Regularization strength of the convex probe; of several, the best on held-out training examples is used."""
    probe_draws: int | None = setting(None, minimum=1, omit_default=True)
    """Number of convex probes to average, each with its own training sentences, or its own projection. Default: 1; 5
    for few-shot probes, 3 for projected ones."""

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
        return ClassifierConfig(solver="convex", regularization=self.probe_regularization, seeds=1, seed=self.seed)

    def _features(self, model: Any, context: MeasureContext, sentences: Sentences) -> torch.Tensor:
        """Return (n, D), one row per sentence."""
        from isoloss.text.masking import with_start
        from isoloss.transfer.features import extract

        read = with_start(sentences, context.language) if context.is_causal else sentences
        features: Any = extract(model, read)
        return features  # type: ignore[no-any-return]

    def _fitted(self, model: Any, context: MeasureContext, data: TaskData | WholeTask) -> Fitted:
        """Return the predictions of each probe, and how they were fitted."""
        from isoloss.transfer.whole_language import WholeTask

        if isinstance(data, WholeTask):
            test = self._all_features(model, context, data.task.test)
            train = test[data.train_rows.to(test.device)]
            return self._fit(train, data.task.train_labels, test, len(data.task.classes))
        train, test = (self._features(model, context, sentences) for sentences in (data.train, data.test))
        return self._fit(train, data.train_labels, test, len(data.classes))

    def _all_features(self, model: Any, context: MeasureContext, sentences: Sentences) -> torch.Tensor:
        return context.features(model, self._features, model, context, sentences)

    def _fit(self, train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor, classes: int) -> Fitted:
        from isoloss.transfer.draws import over_draws

        return over_draws(train_x, train_y, test_x, self._classifier(), classes=classes, draws=self._draws)

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        from isoloss.transfer.linear_probing import probe_method
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
        told = dict(result.accuracy.details)
        told |= {f"{self.over[:-1]}_std": told.pop("seed_std"), self.over: told.pop("seeds")}
        return dataclasses.replace(result, accuracy=dataclasses.replace(result.accuracy, details=told))

    def _exact(self, model: Any, context: MeasureContext, data: WholeTask) -> Estimate:
        from isoloss.transfer.linear_probing import probe_method
        from isoloss.transfer.whole_language import overlap

        began = time.perf_counter()
        config = self._classifier()
        predictions, details = self._fitted(model, context, data)
        over = self.over if config.solver == "convex" else "seeds"
        rows = data.train_rows.chunk(self._draws if over == "draws" else 1)
        shared = sum(overlap(data.probabilities, part) for part in rows) / len(rows)
        return data.estimate(
            predictions,
            method=probe_method(config),
            over=over,
            given=self._given(over, len(predictions)),
            details={**details, "overlap": shared},
            seconds=time.perf_counter() - began,
        )

    def _given(self, over: str, count: int) -> str:
        """Return what an accuracy over all sentences is conditional on."""
        if over == "draws":
            return "the training sentences" if count == 1 else ""
        return "the training sentences" + (f" and the {over[:-1]}" if count == 1 else "")


@dataclass(frozen=True, kw_only=True)
class Probe(_ProbeMeasure, _Trained):
    """Accuracy of a linear probe on the last hidden states of all tokens, concatenated."""

    probe_seeds: int = setting(5, minimum=1)
    """AdamW's probes, each with its own initial weights and order."""
    probe_epochs: int = setting(100, minimum=1)
    """Passes of AdamW over the training sentences of a probe."""
    probe_solver: Literal["adamw", "convex"] = setting("adamw", omit_default=True)
    """How a probe is fitted: `adamw`, the paper's training, or `convex`, the minimum of the regularized loss."""

    def check_fields(self) -> None:
        """Refuse a setting that the solver does not use."""
        super().check_fields()
        is_convex = self.probe_solver == "convex"
        for name in ("probe_seeds", "probe_epochs") if is_convex else ("probe_regularization", "probe_draws"):
            if getattr(self, name) != getattr(Probe, name):
                raise IsolossError(f"{name} has no effect with the solver {self.probe_solver}: leave it out")

    def _num_train(self) -> int:
        return self.num_train * self._draws

    def _classifier(self) -> ClassifierConfig:
        if self.probe_solver == "convex":
            return super()._classifier()
        return ClassifierConfig(seeds=self.probe_seeds, epochs=self.probe_epochs, seed=self.seed)

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        if self._draws > 1:
            return super()._result(model, context, data)
        return self._one(model, context, data)

    def _one(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        """Return the result of one draw, whose features may be larger than memory."""
        from isoloss.transfer.linear_probing import linear_probe

        return linear_probe(model, _read(data, context), **dataclasses.asdict(self._classifier()))


@dataclass(frozen=True, kw_only=True)
class FewShot(_ProbeMeasure):
    """Mean accuracy of convex probes with few training sentences each, over several draws."""

    number: int = setting(minimum=1)

    default_draws: ClassVar[int] = 5

    def _num_train(self) -> int:
        return self.number * self._draws


@dataclass(frozen=True, kw_only=True)
class Projected(_ProbeMeasure, _Trained):
    """Mean accuracy of convex probes on random projections of the features, for models of different widths."""

    width: int = setting(minimum=1)

    default_draws: ClassVar[int] = 3
    over: ClassVar[str] = "projections"

    def _num_train(self) -> int:
        return self.num_train

    def _fit(self, train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor, classes: int) -> Fitted:
        from isoloss.transfer.draws import over_projections

        sizes = {"classes": classes, "width": self.width, "projections": self._draws, "seed": self.seed}
        return over_projections(train_x, train_y, test_x, self._classifier(), **sizes)


@dataclass(frozen=True, kw_only=True)
class Lookup(Probe):
    """Accuracy of the same probe on the true conditionals: the look-up table, a model without parameters."""

    table: ClassVar[str] = "lookup_features"  # of isoloss.transfer.features

    def _features(self, model: Any, context: MeasureContext, sentences: Sentences) -> torch.Tensor:
        from isoloss.transfer import features

        made: torch.Tensor = getattr(features, self.table)(context.language, sentences)
        return made

    def _all_features(self, model: Any, context: MeasureContext, sentences: Sentences) -> torch.Tensor:
        from isoloss.transfer import features

        return context.features(None, getattr(features, self.table), context.language, sentences)

    def _one(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        from isoloss.transfer import features
        from isoloss.transfer.linear_probing import language_probe

        return language_probe(getattr(features, self.table), context.language, data, self._classifier())


@dataclass(frozen=True, kw_only=True)
class LogLookup(Lookup):
    """Accuracy of the same probe on the logarithms of the true conditionals, clipped at 1e-4 from below."""

    table: ClassVar[str] = "log_lookup_features"


@dataclass(frozen=True, kw_only=True)
class OneHot(Lookup):
    """Accuracy of the same probe on the tokens themselves, one-hot."""

    table: ClassVar[str] = "one_hot_features"


@dataclass(frozen=True, kw_only=True)
class Finetune(_TaskMeasure, _Trained):
    """Accuracy of the fine-tuned model with a linear head."""

    finetune_seeds: int = setting(5, minimum=1)
    """Models, each with its own head, order and dropout."""
    finetune_epochs: int = setting(10, minimum=1)
    """Passes over the training sentences."""
    finetune_warmup_steps: int | None = setting(None, minimum=0)
    """Steps of the warm-up of the learning rate; default: 200, or 6 % of the steps where these are fewer."""

    def _num_train(self) -> int:
        return self.num_train

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        from isoloss.transfer.finetuning import finetune

        return finetune(
            model,
            _read(data, context),
            epochs=self.finetune_epochs,
            seeds=self.finetune_seeds,
            warmup_steps=self.finetune_warmup_steps,
            seed=self.seed,
        )

    def _exact(self, model: Any, context: MeasureContext, data: WholeTask) -> Estimate:
        result = self._result(model, context, data.task)
        kept: Mapping[str, Any] = {k: v for k, v in result.accuracy.details.items() if k not in _OF_SAMPLED}
        given = "the training sentences" + (" and the seed" if len(result.predictions) == 1 else "")
        return data.estimate(
            result.predictions,
            method=result.accuracy.method,
            over="seeds",
            given=given,
            details={**kept, "overlap": data.task.overlap},
            seconds=result.accuracy.seconds,
        )


# details of an accuracy on sampled test sentences, which those of one over all sentences replace
_OF_SAMPLED = (
    *("accuracies", "seed_std", "binomial_stderr", "majority_rate", "bayes_accuracy", "bayes_stderr"),
    *("num_test", "seeds"),
)


def _read(data: TaskData, context: MeasureContext) -> TaskData:
    """Return the task as the model reads it."""
    from isoloss.transfer.tasks import read_from_start

    return read_from_start(data, context.language) if context.is_causal else data


def _predictions(result: TransferResult) -> dict[str, Any]:
    """Return what each classifier says of each test example, and the labels, in as few bytes as the classes need."""
    import numpy as np

    small = np.min_scalar_type(len(result.classes) - 1)
    return {
        "accuracy.predictions": result.predictions.numpy().astype(small),
        "accuracy.labels": result.labels.numpy().astype(small),
    }
