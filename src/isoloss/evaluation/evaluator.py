"""Measuring the checkpoints of a run: which measures there are, which are still to be made, and making them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isoloss.errors import IsolossError
from isoloss.evaluation.config import EvalConfig
from isoloss.runs import Evaluation, Run

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

    from isoloss.evaluation.loss import Truth
    from isoloss.languages.api import Language
    from isoloss.statistics.estimate import Estimate
    from isoloss.text.masking import Batch
    from isoloss.transfer.results import TransferResult
    from isoloss.transfer.tasks import TaskData

    Arrays = Mapping[str, "np.ndarray[Any, Any]"]  # of each example, by name

MEASURES = {
    "loss": "pre-training loss: conditional entropy + KL to the truth; for a corpus, held-out cross-entropy",
    "trace": "trace of the Fisher of that loss, which at saturation is the trace of its Hessian",
    "trace-in-SIZE-SCALE": "that trace after expanding the model to a size, e.g. trace-in-d64-paper (isoloss expand "
    "--scale)",
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
    elif measure == "trace" or _expansion(measure):
        names = ("trace_sentences",)
    elif measure.startswith(("probe-", "lookup-")) and not measure.endswith("-"):
        names = ("probe_train", "probe_test", "probe_seeds", "probe_epochs")
    else:
        raise IsolossError(f"no measure {measure!r}; the measures are {', '.join(MEASURES)}")
    return {name: getattr(settings, name) for name in (*names, "seed")}


def _expansion(measure: str) -> tuple[str, str] | None:
    """Return size and scale of a trace-in-SIZE-SCALE, or None for another measure."""
    size, _, scale = measure.removeprefix("trace-in-").rpartition("-")
    return (size, scale) if measure.startswith("trace-in-") and size and scale else None


def pending(run: Run, measures: Sequence[str], steps: Sequence[int], settings: EvalConfig) -> list[tuple[int, str]]:
    """Return the (step, measure) pairs that have no evaluation of these weights under these settings.

    One whose file of examples is missing or is another one counts as not made.
    """
    todo = []
    for step in steps:
        weights = run.weights(step)
        for measure in measures:
            asked = settings_of(measure, settings)
            done = run.evaluation(measure, step)
            if done is None or (done.weights, done.settings) != (weights, asked) or not run.has_examples(done):
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
        evaluation, examples = self.measure(measure, step, progress=progress)
        self.run.save(evaluation, examples)
        checkpoint = self.run.checkpoint(step).relative_to(self.run.path).as_posix()
        self.run.log("evaluated", measure=measure, checkpoint=checkpoint, seconds=round(time.perf_counter() - start, 3))
        return evaluation

    def why_no_loss(self) -> str | None:
        """Return why the loss of this run cannot be measured, or None where it can; takes next to no time."""
        from isoloss.evaluation import loss
        from isoloss.text.corpus import Corpus

        return None if isinstance(self.language, Corpus) else loss.why_no_truth(self.language, **self._truth_settings)

    def measure(
        self, measure: str, step: int, *, progress: Callable[[int], None] | None = None
    ) -> tuple[Evaluation, bytes]:
        """Return the evaluation of the checkpoint at `step`, and the file of its examples (see `Run.examples`).

        Args:
            measure: One of `MEASURES`.
            step: A step that has a checkpoint.
            progress: Called with the number of sentences done, where the measure reports it.

        Raises:
            IsolossError: No such measure or checkpoint, or a measure that does not fit the language.
        """
        from safetensors.numpy import save

        asked = settings_of(measure, self.settings)
        weights = self.run.weights(step)
        if measure == "loss":
            estimates, arrays, inputs = self._loss(step)
        elif measure == "trace":
            estimates, arrays, inputs = self._trace(self._model(step), progress)
        elif expansion := _expansion(measure):
            estimates, arrays, inputs = self._expanded_trace(step, *expansion, progress)
        else:
            how, task = measure.split("-", 1)
            estimates, arrays, inputs = self._accuracy(how, task, step)
        examples = save(dict(arrays))
        evaluation = Evaluation(
            measure=measure,
            step=step,
            weights=weights,
            settings=asked,
            estimates=estimates,
            inputs=inputs,
            examples=hashlib.sha256(examples).hexdigest(),
        )
        return evaluation, examples

    def _loss(self, step: int) -> tuple[dict[str, Estimate], Arrays, str]:
        from isoloss.evaluation import loss
        from isoloss.text.corpus import Corpus

        settings, objective = self.settings, self.config.objective
        if isinstance(self.language, Corpus):
            chosen: dict[str, Any] = {"num_sequences": settings.loss_sentences, "seed": settings.seed}
            values = loss.held_out_values(self._model(step), self.language, objective=objective, **chosen)
            found = loss.held_out_loss(self._model(step), self.language, objective=objective, values=values, **chosen)
            sentences = self.language.held_out(settings.loss_sentences)
            inputs = _digest(sentences.tokens, sentences.lengths, more=dataclasses.asdict(objective))
            return found, _influences({"loss": values[0]}, values[1]), inputs
        truth = self._truth
        kl = loss.kl_values(self._model(step), truth)
        found = loss.pretraining_loss(self._model(step), truth, kl=kl)
        return found, _influences({"kl": kl, "loss": truth.entropy + kl}, truth.counts), _digest(*truth.batch.values())

    def _trace(
        self, model: PreTrainedModel, progress: Callable[[int], None] | None
    ) -> tuple[dict[str, Estimate], Arrays, str]:
        import torch

        from isoloss.flatness.engine.run import Measurement, Stopping
        from isoloss.flatness.fisher import Integrated

        batches = self._trace_batches
        source = Integrated(model, seed=self.settings.seed, causal=self._is_causal, parameters=None)
        measurement = Measurement(model, source)  # what `fisher_trace` runs
        trace = measurement.run(batches, Stopping(), progress=progress)
        arrays = {"trace.influence": measurement.shares().influence.float().numpy()}
        whole = [torch.cat([batch[name] for batch in batches]) for name in sorted(batches[0])]  # however it was cut
        return {"trace": trace}, arrays, _digest(*whole)

    def _expanded_trace(
        self, step: int, size: str, scale: str, progress: Callable[[int], None] | None
    ) -> tuple[dict[str, Estimate], Arrays, str]:
        """The trace of the same function in a larger model; its details say how far the logits differ."""
        from isoloss.models.expansion import embed
        from isoloss.models.sizes import shape

        chosen: Any = scale  # embed refuses one that it does not know
        small = self._model(step)
        large = embed(small, shape(size), scale=chosen).model
        estimates, arrays, inputs = self._trace(large, progress)
        differ = _logits_differ(small, large, self._trace_batches, causal=self._is_causal)
        details = {**estimates["trace"].details, "expanded_into": size, "scale": scale, "logits_differ_by": differ}
        return {"trace": dataclasses.replace(estimates["trace"], details=details)}, arrays, inputs

    def _accuracy(self, how: str, task: str, step: int) -> tuple[dict[str, Estimate], Arrays, str]:
        from isoloss.transfer.linear_probing import linear_probe, lookup_probe
        from isoloss.transfer.tasks import read_from_start

        data = self._task(task)
        settings = self.settings
        chosen: dict[str, Any] = {"seeds": settings.probe_seeds, "epochs": settings.probe_epochs, "seed": settings.seed}
        language: Any = self.language  # one that has tasks
        if how == "lookup":
            result = lookup_probe(language, data, **chosen)
        else:
            read = read_from_start(data, language) if self._is_causal else data
            result = linear_probe(self._model(step), read, **chosen)
        inputs = _digest(
            data.train.tokens, data.train_labels, data.test.tokens, data.test_labels, more=list(data.classes)
        )
        return {"accuracy": result.accuracy}, _predictions(result), inputs

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
        from isoloss.evaluation import loss

        return loss.truth(self.language, **self._truth_settings)

    @property
    def _truth_settings(self) -> dict[str, Any]:
        chosen = self.settings
        return {"num_sentences": chosen.loss_sentences, "objective": self.config.objective, "seed": chosen.seed}

    @functools.cached_property
    def _trace_batches(self) -> list[Batch]:
        from isoloss.text.inputs import language_inputs

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


def _influences(sums: Mapping[str, torch.Tensor], counts: torch.Tensor) -> Arrays:
    """Return what each sentence adds to the error of each ratio of its sum to the predicted tokens."""
    from isoloss.statistics.ratio import influence

    return {f"{name}.influence": influence(each, counts)[1].float().numpy() for name, each in sums.items()}


def _predictions(result: TransferResult) -> Arrays:
    """Return what each probe says of each test example, and the labels, in as few bytes as the classes need."""
    import numpy as np

    small = np.min_scalar_type(len(result.classes) - 1)
    return {
        "accuracy.predictions": result.predictions.numpy().astype(small),
        "accuracy.labels": result.labels.numpy().astype(small),
    }


def _digest(*tensors: torch.Tensor, more: object = None) -> str:
    """Return the SHA-256 of the shapes and values of tensors, and of a JSON document."""
    sha256 = hashlib.sha256(json.dumps(more).encode())
    for tensor in tensors:
        sha256.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
        sha256.update(tensor.cpu().contiguous().numpy().tobytes())
    return sha256.hexdigest()


def _logits_differ(small: PreTrainedModel, large: PreTrainedModel, batches: Sequence[Batch], *, causal: bool) -> float:
    """Return the largest difference of two logits over the largest logit, at the predicted positions."""
    import torch

    from isoloss.models.make import predicted_logits

    gap = largest = 0.0
    with torch.no_grad():
        for batch in batches:
            given = {name: value.to(small.device) for name, value in batch.items()}
            few, many = (predicted_logits(model, given, causal=causal) for model in (small, large))
            gap, largest = max(gap, float((few - many).abs().max())), max(largest, float(few.abs().max()))
    return gap / largest
