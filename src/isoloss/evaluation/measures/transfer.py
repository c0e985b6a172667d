"""Accuracy on a downstream task of the language, as a measure: of a probe, of fine-tuning, of the look-up table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isoloss.config import setting
from isoloss.errors import IsolossError
from isoloss.evaluation.measures.base import MeasureResult, SeededMeasure, digest

if TYPE_CHECKING:
    from isoloss.evaluation.context import MeasureContext
    from isoloss.transfer.results import TransferResult
    from isoloss.transfer.tasks import TaskData


@dataclass(frozen=True, kw_only=True)
class _TaskMeasure(SeededMeasure):
    """A measure on a task of the language."""

    num_train: int = setting(4096, minimum=1)
    """Training sentences of a probe or of fine-tuning."""
    num_test: int = setting(4096, minimum=1)
    """Test sentences."""
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
        """Return `accuracy`, with the class that each seed's classifier predicts for each test example."""
        data = self._data(context)
        result = self._result(model, context, data)
        inputs = digest(
            data.train.tokens, data.train_labels, data.test.tokens, data.test_labels, more=list(data.classes)
        )
        return MeasureResult(estimates={"accuracy": result.accuracy}, arrays=_predictions(result), inputs=inputs)

    def _data(self, context: MeasureContext) -> TaskData:
        return context.task(self.task, num_train=self.num_train, num_test=self.num_test, seed=self.seed)

    def _read(self, context: MeasureContext) -> TaskData:
        """Return the task as the model reads it."""
        from isoloss.transfer.tasks import read_from_start

        data = self._data(context)
        return read_from_start(data, context.language) if context.is_causal else data

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Probe(_TaskMeasure):
    """Accuracy of a linear probe on the last hidden states of all tokens, concatenated."""

    probe_seeds: int = setting(5, minimum=1)
    """Probes, each with its own initial weights and order."""
    probe_epochs: int = setting(100, minimum=1)
    """Passes of a probe over its training sentences."""

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        from isoloss.transfer.linear_probing import linear_probe

        return linear_probe(model, self._read(context), **self._probe_options())

    def _probe_options(self) -> dict[str, Any]:
        return {"seeds": self.probe_seeds, "epochs": self.probe_epochs, "seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class Lookup(Probe):
    """Accuracy of the same probe on the true conditionals: the look-up table, a model without parameters."""

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        from isoloss.transfer.linear_probing import lookup_probe

        return lookup_probe(context.language, data, **self._probe_options())


@dataclass(frozen=True, kw_only=True)
class Finetune(_TaskMeasure):
    """Accuracy of the fine-tuned model with a linear head."""

    finetune_seeds: int = setting(5, minimum=1)
    """Models, each with its own head, order and dropout."""
    finetune_epochs: int = setting(10, minimum=1)
    """Passes over the training sentences."""
    finetune_warmup_steps: int | None = setting(None, minimum=0)
    """Steps of the warm-up of the learning rate; default: 200, or 6 % of the steps where these are fewer."""

    def _result(self, model: Any, context: MeasureContext, data: TaskData) -> TransferResult:
        from isoloss.transfer.finetuning import finetune

        return finetune(
            model,
            self._read(context),
            epochs=self.finetune_epochs,
            seeds=self.finetune_seeds,
            warmup_steps=self.finetune_warmup_steps,
            seed=self.seed,
        )


def _predictions(result: TransferResult) -> dict[str, Any]:
    """Return what each classifier says of each test example, and the labels, in as few bytes as the classes need."""
    import numpy as np

    small = np.min_scalar_type(len(result.classes) - 1)
    return {
        "accuracy.predictions": result.predictions.numpy().astype(small),
        "accuracy.labels": result.labels.numpy().astype(small),
    }
