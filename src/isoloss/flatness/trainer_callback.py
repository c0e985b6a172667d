"""The trace while a model trains: a callback for transformers' Trainer, and evaluation mode for any other loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from isoloss.errors import IsolossError
from isoloss.flatness._measurement import StopCriteria
from isoloss.flatness._rescaling.symmetries import Granularity
from isoloss.flatness.fisher import fisher_trace
from isoloss.flatness.minimal_trace import Rescaling
from isoloss.model_checks import device_of
from isoloss.statistics.estimate import Estimate


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Put a model in evaluation mode, and at the end back as it was, each of its parts; torch's random state as well.

    Example:
        >>> from torch import nn
        >>> from isoloss.flatness import evaluating
        >>> model = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.1).eval())
        >>> with evaluating(model):
        ...     print([part.training for part in model])
        [False, False]
        >>> [part.training for part in model]
        [True, False]
    """
    modes = {module: module.training for module in model.modules()}
    device = device_of(model) if next(model.parameters(), None) is not None else torch.device("cpu")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.eval()
        try:
            yield model
        finally:
            for module, training in modes.items():
                # not `train()`, which sets all parts below as well
                module.training = training


class FlatnessCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types for mypy to follow
    """Measures the trace of the Fisher every so many steps of a transformers Trainer, and logs it with its error.

    The entries `fisher_trace` and `fisher_trace_stderr`, or `minimal_trace` and `minimal_trace_stderr`, go to
    `trainer.state.log_history`. To have them in TensorBoard or Weights & Biases too, set `callback.log = trainer.log`
    after the trainer is made; that method then writes both.

    The model is measured in evaluation mode with the probes of one seed, so that the points of a curve differ by the
    model and not by the draw. Training is the same, bit for bit, with the callback and without. Where several processes
    train, the first one measures; it must have the whole model.

    Args:
        batches: What is measured on, as for `isoloss.flatness.fisher_trace`; kept and used each time.
        every: Steps between two measurements.
        rtol: Stop each as soon as the standard error is at most this fraction of the value.
        seed: Decides the probes.
        rescaling: As for `fisher_trace`: `"minimal"` takes the minimal trace.
        granularity: As for `fisher_trace`.
        log: What to call with the two numbers, such as `trainer.log`; None: they go to the trainer's history alone.

    Attributes:
        traces: The estimates by step.

    Raises:
        IsolossError: `every` is below 1, or `rtol` is out of range.

    Example:
        >>> from isoloss import fisher_trace
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import FlatnessCallback, evaluating
        >>> model, batches = tiny_bert()
        >>> callback = FlatnessCallback(batches, every=100)  # for Trainer(..., callbacks=[callback])
        >>> with evaluating(model.train()):  # and in any other loop; in training mode it has dropout
        ...     trace = fisher_trace(model, batches)
        >>> trace.samples, model.training
        (64, True)
    """

    def __init__(
        self,
        batches: Iterable[Mapping[str, Any]],
        *,
        every: int,
        rtol: float | None = None,
        seed: int = 0,
        rescaling: Rescaling | None = None,
        granularity: Granularity = "tensor",
        log: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        if every < 1:
            raise IsolossError(f"every is {every}; it is a number of steps, at least 1")
        if isinstance(batches, Mapping):
            raise IsolossError("batches is a single batch; pass an iterable of batches, e.g. [batch]")
        StopCriteria(rtol=rtol)  # refuses a value out of range here, and not after the first steps
        if rescaling not in (None, "minimal"):
            raise IsolossError(f"rescaling is {rescaling!r}; it is 'minimal' or None")
        self.every, self.rtol, self.seed, self.log = every, rtol, seed, log
        self.rescaling, self.granularity = rescaling, granularity
        self.traces: dict[int, Estimate] = {}
        self._batches = list(batches)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure where it is time."""
        if state.global_step % self.every or not state.is_world_process_zero:
            return
        model: nn.Module = kwargs["model"]
        with evaluating(model):
            trace = fisher_trace(
                model,
                self._batches,
                seed=self.seed,
                rtol=self.rtol,
                rescaling=self.rescaling,
                granularity=self.granularity,
            )
        self.traces[state.global_step] = trace
        name = "fisher_trace" if self.rescaling is None else "minimal_trace"
        numbers = {name: trace.value, f"{name}_stderr": trace.stderr}
        if self.log is not None:
            asked = control.should_log
            self.log(numbers)
            control.should_log = asked  # the Trainer takes any log for its own of this step, and would leave that out
        else:
            epoch = {} if state.epoch is None else {"epoch": state.epoch}
            state.log_history.append({**numbers, **epoch, "step": state.global_step})
