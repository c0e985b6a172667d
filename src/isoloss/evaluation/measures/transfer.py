"""Measures of accuracy on a downstream task: probes, fine-tuning, and baselines without a model."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isoloss.config import setting
from isoloss.errors import IsolossError
from isoloss.evaluation.measures.tasks import TaskMeasure, Trained
from isoloss.transfer.config import ClassifierConfig

if TYPE_CHECKING:
    import torch

    from isoloss.evaluation.context import MeasureContext
    from isoloss.languages.api import Sentences
    from isoloss.statistics.estimate import Estimate
    from isoloss.transfer.probe import Fitted
    from isoloss.transfer.results import TransferResult
    from isoloss.transfer.tasks import TaskData, WholeTask
    from isoloss.transfer.text_sources import TextTask
    from isoloss.transfer.text_tasks import TextExamples


@dataclass(frozen=True, kw_only=True)
class _ProbeMeasure(TaskMeasure):
    """A measure that fits linear probes to the last hidden states of all tokens, concatenated."""

    probe_regularization: tuple[float, ...] = setting((1e-3,), above=0, below=math.inf, omit_default=True)
    """Regularization strength of the convex probe; of several, the best on held-out training examples is used."""
    probe_draws: int | None = setting(None, minimum=1, omit_default=True)
    """Number of convex probes to average, each with its own training sentences, or its own projection. Default: 1; 5
    for few-shot probes, 3 for projected ones."""

    probe_standardize: bool = setting(True, omit_default=True)
    """Whether a probe reads features centered and divided by one number, the root mean square of what remains; False:
    as they are, as in the paper."""

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
        features: Any = extract(model, read, types=types)
        return features  # type: ignore[no-any-return]

    def _fitted(self, model: Any, context: MeasureContext, data: TaskData | WholeTask) -> Fitted:
        """Return the predictions of each probe, and how they were fitted."""
        from isoloss.transfer.tasks import WholeTask

        if isinstance(data, WholeTask):
            test = self._all_features(model, context, data.task.test)
            train = test[data.train_rows.to(test.device)]
            return self._fit(train, data.task.train_labels, test, len(data.task.classes))
        train = self._features(model, context, data.train, data.train_types)
        test = self._features(model, context, data.test, data.test_types)
        return self._fit(train, data.train_labels, test, len(data.classes))

    def _all_features(self, model: Any, context: MeasureContext, sentences: Sentences) -> torch.Tensor:
        return context.features(model, self._features, model, context, sentences)

    def _fit(self, train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor, classes: int) -> Fitted:
        from isoloss.transfer.probe import over_draws

        return over_draws(train_x, train_y, test_x, self._classifier(), classes=classes, draws=self._draws)

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
        told = dict(result.accuracy.details)
        told |= {f"{self.over[:-1]}_std": told.pop("seed_std"), self.over: told.pop("seeds")}
        return dataclasses.replace(result, accuracy=dataclasses.replace(result.accuracy, details=told))

    def _exact(self, model: Any, context: MeasureContext, data: WholeTask) -> Estimate:
        from isoloss.transfer.probe import probe_method
        from isoloss.transfer.tasks import weighted_overlap

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
class Probe(_ProbeMeasure, Trained):
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

    def _drawn(self) -> tuple[int | Literal["all"], int | None]:
        return self.num_train, self._draws if self._draws > 1 else None

    def _classifier(self) -> ClassifierConfig:
        if self.probe_solver == "convex":
            return super()._classifier()
        return ClassifierConfig(
            seeds=self.probe_seeds, epochs=self.probe_epochs, standardize=self.probe_standardize, seed=self.seed
        )

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        if self._draws > 1:
            return super()._result(model, context, data)
        return self._one(model, context, data)

    def _one(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        """Return the result of one draw, whose features may be larger than memory."""
        from isoloss.transfer.probe import linear_probe

        return linear_probe(model, self._read(data, context), **dataclasses.asdict(self._classifier()))


@dataclass(frozen=True, kw_only=True)
class FewShot(_ProbeMeasure):
    """Mean accuracy of convex probes with few training sentences each, over several draws."""

    number: int = setting(minimum=1)

    default_draws: ClassVar[int] = 5

    def _drawn(self) -> tuple[int | Literal["all"], int | None]:
        return self.number, self._draws


@dataclass(frozen=True, kw_only=True)
class Projected(_ProbeMeasure, Trained):
    """Mean accuracy of convex probes on random projections of the features, for models of different widths."""

    width: int = setting(minimum=1)

    default_draws: ClassVar[int] = 3
    over: ClassVar[str] = "projections"

    def _drawn(self) -> tuple[int | Literal["all"], int | None]:
        return self.num_train, None

    def _fit(self, train_x: torch.Tensor, train_y: torch.Tensor, test_x: torch.Tensor, classes: int) -> Fitted:
        from isoloss.transfer.probe import over_projections

        sizes = {"classes": classes, "width": self.width, "projections": self._draws, "seed": self.seed}
        return over_projections(train_x, train_y, test_x, self._classifier(), **sizes)


@dataclass(frozen=True, kw_only=True)
class Lookup(Probe):
    """Accuracy of the same probe on the true conditionals: the look-up table, a model without parameters."""

    features: ClassVar[str] = "lookup_features"  # of isoloss.transfer.features

    def _examples(self, source: TextTask, context: MeasureContext) -> TextExamples:
        raise IsolossError(f"the true conditionals of the text of {self.task} are not known: it has no look-up table")

    def _table(self, context: MeasureContext) -> Callable[[Any, Sentences], torch.Tensor]:
        """Return what makes the features (n, D) of sentences of a language."""
        from isoloss.transfer import features

        made: Callable[[Any, Sentences], torch.Tensor] = getattr(features, self.features)
        return made

    def _features(
        self, model: Any, context: MeasureContext, sentences: Sentences, types: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._table(context)(context.language, sentences)

    def _all_features(self, model: Any, context: MeasureContext, sentences: Sentences) -> torch.Tensor:
        return context.features(None, self._table(context), context.language, sentences)

    def _one(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        from isoloss.transfer.probe import language_probe

        return language_probe(self._table(context), context.language, data, self._classifier())


@dataclass(frozen=True, kw_only=True)
class LogLookup(Lookup):
    """Accuracy of the same probe on the logarithms of the true conditionals, clipped at 1e-4 from below."""

    features: ClassVar[str] = "log_lookup_features"


@dataclass(frozen=True, kw_only=True)
class OneHot(Lookup):
    """Accuracy of the same probe on the tokens themselves, one-hot."""

    features: ClassVar[str] = "one_hot_features"

    def _examples(self, source: TextTask, context: MeasureContext) -> TextExamples:
        return Probe._examples(self, source, context)

    def _table(self, context: MeasureContext) -> Callable[[Any, Sentences], torch.Tensor]:
        if self._source is None:
            return super()._table(context)
        from isoloss.text.tokenizers import vocabulary
        from isoloss.transfer.features import one_hot

        width = len(vocabulary(context.tokenizer()))
        return lambda _, sentences: one_hot(sentences, width)


@dataclass(frozen=True, kw_only=True)
class Finetune(TaskMeasure, Trained):
    """Accuracy of the fine-tuned model with a linear head."""

    finetune_seeds: int = setting(5, minimum=1)
    """Models, each with its own head, order and dropout."""
    finetune_epochs: int = setting(10, minimum=1)
    """Passes over the training sentences."""
    finetune_learning_rate: float = setting(1e-4, above=0, below=math.inf, omit_default=True)
    """AdamW's highest learning rate."""
    finetune_warmup_steps: int | None = setting(None, minimum=0)
    """Steps of the warm-up of the learning rate; default: 200, or 6 % of the steps where these are fewer."""

    def _drawn(self) -> tuple[int | Literal["all"], int | None]:
        return self.num_train, None

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        from isoloss.transfer.finetuning import finetune

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
    *("accuracies", "seed_std", "binomial_stderr", "majority_rate", "above_majority", "above_majority_stderr"),
    *("bayes_accuracy", "bayes_stderr", "num_test", "seeds"),
)
