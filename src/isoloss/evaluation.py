"""Measuring the checkpoints of a run: which measures there are, which are still to be made, and making them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from isoloss.config import EvalConfig
from isoloss.errors import IsolossError
from isoloss.runs import Evaluation, Run

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from isoloss.estimate import Estimate
    from isoloss.languages.base import Language
    from isoloss.languages.masking import Batch
    from isoloss.measures.loss import Truth
    from isoloss.transfer.tasks import TaskData

MEASURES = {
    "loss": "pre-training loss: conditional entropy + KL to the truth; for a corpus, held-out cross-entropy",
    "trace": "trace of the Fisher of that loss, which at saturation is the trace of its Hessian",
    "probe-TASK": "accuracy of a linear probe on the concatenated token embeddings, e.g. probe-root, probe-prefix-4",
    "lookup-TASK": "the same probe on the true conditionals: the look-up table, a model without parameters",
}


def settings_of(measure: str, settings: EvalConfig) -> dict[str, Any]:
    """Return the settings that decide `measure`: they are kept with its result.

    Raises:
        IsolossError: There is no such measure.
    """
    names: tuple[str, ...]
    if measure == "loss":
        names = ("loss_sentences",)
    elif measure == "trace":
        names = ("trace_sentences",)
    elif measure.startswith(("probe-", "lookup-")) and not measure.endswith("-"):
        names = ("probe_train", "probe_test", "probe_seeds", "probe_epochs")
    else:
        raise IsolossError(f"no measure {measure!r}; the measures are {', '.join(MEASURES)}")
    return {name: getattr(settings, name) for name in (*names, "seed")}


def pending(run: Run, measures: Sequence[str], steps: Sequence[int], settings: EvalConfig) -> list[tuple[int, str]]:
    """Return the (step, measure) pairs that have no evaluation of these weights under these settings."""
    todo = []
    for step in steps:
        weights = run.weights(step)
        for measure in measures:
            done = run.evaluation(measure, step)
            if done is None or done.weights != weights or done.settings != settings_of(measure, settings):
                todo.append((step, measure))
    return todo


class Evaluator:
    """Makes evaluations of one run; what the checkpoints share (the truth, the tasks, the inputs) is made once.

    Args:
        run: The run.
        settings: How much to measure on.
        device: Where models run.
    """

    def __init__(self, run: Run, settings: EvalConfig, *, device: str = "cpu") -> None:
        from isoloss import languages
        from isoloss.loading import resolve_device

        self.run, self.settings, self.config = run, settings, run.config
        self.device: torch.device = resolve_device(device)
        self.language: Language = languages.make(self.config.language)
        self._loaded: tuple[int, PreTrainedModel] | None = None

    def evaluate(self, measure: str, step: int, *, progress: Callable[[int], None] | None = None) -> Evaluation:
        """Measure as `measure` does, save the result to its file and return it."""
        start = time.perf_counter()
        evaluation = self.measure(measure, step, progress=progress)
        self.run.save(evaluation)
        checkpoint = self.run.checkpoint(step).relative_to(self.run.path).as_posix()
        self.run.log("evaluated", measure=measure, checkpoint=checkpoint, seconds=round(time.perf_counter() - start, 3))
        return evaluation

    def measure(self, measure: str, step: int, *, progress: Callable[[int], None] | None = None) -> Evaluation:
        """Return the evaluation of the checkpoint at `step`.

        Args:
            measure: One of `MEASURES`.
            step: A step that has a checkpoint.
            progress: Called with the number of sentences done, where the measure reports it.

        Raises:
            IsolossError: No such measure or checkpoint, or a measure that does not fit the language.
        """
        asked = settings_of(measure, self.settings)
        weights = self.run.weights(step)
        if measure == "loss":
            estimates = self._loss(step)
        elif measure == "trace":
            estimates = {"trace": self._trace(step, progress)}
        else:
            how, task = measure.split("-", 1)
            estimates = {"accuracy": self._accuracy(how, task, step)}
        return Evaluation(measure=measure, step=step, weights=weights, settings=asked, estimates=estimates)

    def _loss(self, step: int) -> dict[str, Estimate]:
        from isoloss.languages.corpus import Corpus
        from isoloss.measures import loss

        if isinstance(self.language, Corpus):
            return loss.held_out_loss(
                self._model(step),
                self.language,
                num_sequences=self.settings.loss_sentences,
                objective=self.config.objective,
                seed=self.settings.seed,
            )
        return loss.pretraining_loss(self._model(step), self._truth)

    def _trace(self, step: int, progress: Callable[[int], None] | None) -> Estimate:
        from isoloss.measures.flatness import fisher_trace

        return fisher_trace(
            self._model(step),
            self._trace_batches,
            seed=self.settings.seed,
            causal=self._is_causal,
            progress=progress,
        )

    def _accuracy(self, how: str, task: str, step: int) -> Estimate:
        from isoloss.transfer.lookup import lookup_task
        from isoloss.transfer.probe import probe_task
        from isoloss.transfer.tasks import read_from_start

        data = self._task(task)
        settings = self.settings
        chosen: dict[str, Any] = {"seeds": settings.probe_seeds, "epochs": settings.probe_epochs, "seed": settings.seed}
        language: Any = self.language  # one that has tasks
        if how == "lookup":
            return lookup_task(language, data, **chosen).accuracy
        read = read_from_start(data, language) if self._is_causal else data
        return probe_task(self._model(step), read, **chosen).accuracy

    @property
    def _is_causal(self) -> bool:
        return self.config.objective.kind == "causal"

    def _model(self, step: int) -> PreTrainedModel:
        from isoloss.loading import load

        if self._loaded is None or self._loaded[0] != step:
            self._loaded = (step, load(self.run.checkpoint(step), device=self.device).model)
        return self._loaded[1]

    @functools.cached_property
    def _truth(self) -> Truth:
        from isoloss.measures import loss

        return loss.truth(
            self.language,
            num_sentences=self.settings.loss_sentences,
            objective=self.config.objective,
            seed=self.settings.seed,
        )

    @functools.cached_property
    def _trace_batches(self) -> list[Batch]:
        from isoloss.measures.inputs import language_inputs

        settings = self.settings
        return language_inputs(self.config, num_inputs=settings.trace_sentences, seed=settings.seed).batches

    @functools.cache  # noqa: B019  an evaluator lives as long as its process's one command
    def _task(self, name: str) -> TaskData:
        from isoloss.transfer.tasks import make_task

        language: Any = self.language  # make_task refuses one that has no tasks
        return make_task(
            language,
            name,
            num_train=self.settings.probe_train,
            num_test=self.settings.probe_test,
            seed=self.settings.seed,
        )
