"""The loss per predicted token, as a measure."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from isoloss.config import setting
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.measures.base import MeasureResult, SequenceMeasure, digest, digest_batches

if TYPE_CHECKING:
    from isoloss.lab.evaluation.context import MeasureContext


@dataclass(frozen=True, kw_only=True)
class Loss(SequenceMeasure):
    """Loss per predicted token: entropy of the true conditionals + KL of the model from them; else cross-entropy."""

    num_sequences: int = setting(SequenceMeasure.num_sequences, minimum=2, exclude_from_fingerprint=True)
    """Sequences to measure on, at most."""
    loss_sentences: int | Literal["all"] | None = setting(None, minimum=1)
    """For the loss, in place of --num-sequences: a number, or all: the exact sum over all masked sentences of a
    language with at most 65,536 strings of tokens."""

    def __post_init__(self) -> None:
        # what decides the loss is one number, whichever of the two gave it
        if self.loss_sentences is None:
            object.__setattr__(self, "loss_sentences", self.num_sequences)

    @property
    def counted(self) -> str:
        """What the context's `progress` counts."""
        return "sequences" if self.loss_sentences == "all" else f"of at most {self.loss_sentences:,} sequences"

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return why the loss cannot be known: an exact language gives no conditionals under this objective."""
        from isoloss.lab.evaluation.loss import why_no_exact_targets

        assert self.loss_sentences is not None  # it was filled in
        if not self._has_exact_targets(context):
            if self.loss_sentences != "all":
                return None
            what = "text" if context.language is None else type(context.language).__name__
            return f"{what} has no exact probabilities to sum over: give a number of sentences"
        return why_no_exact_targets(
            context.language, num_sentences=self.loss_sentences, objective=context.objective, seed=self.seed
        )

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return `entropy`, `kl` and `loss` of an exact language, `loss` of another and of text."""
        from isoloss.lab.evaluation import loss

        objective, num, seed = context.objective, self.loss_sentences, self.seed
        assert num is not None  # it was filled in
        if self._has_exact_targets(context):
            drawn = {"num_sentences": num, "objective": objective, "seed": seed}
            targets = context.once(loss.exact_targets, context.language, **drawn)
            estimates = loss.pretraining_loss(model, targets, progress=context.progress)
            # with the weights: all sentences and a sample of them are never the same inputs
            weights = () if targets.weights is None else (targets.weights,)
            inputs = digest(*targets.batch.values(), *weights)
            return MeasureResult(estimates=estimates, inputs=inputs)
        if num == "all":
            raise IsolossError(self.why_not_applicable(context))
        if context.language is not None and context.language.num_held_out:
            sentences = context.language.held_out(num)
            inputs = digest(sentences.tokens, sentences.lengths, more=dataclasses.asdict(objective))
            batch = loss.held_out_batch(context.language, num_sequences=num, objective=objective, seed=seed)
            batches, method = [batch], "held-out text"
        else:
            batches = context.inputs(num, seed).batches
            inputs = digest_batches(batches)
            method = "given text" if context.language is None else "fresh sentences"
        estimates = loss.text_loss(
            model, batches, objective=objective, seed=seed, method=method, progress=context.progress
        )
        return MeasureResult(estimates=estimates, inputs=inputs)

    def _has_exact_targets(self, context: MeasureContext) -> bool:
        """Whether the loss is against true conditionals, not a cross-entropy."""
        language = context.language
        return language is not None and not language.num_held_out and language.is_exact


@dataclass(frozen=True, kw_only=True)
class GeneralizationGap(Loss):
    r"""Loss on unseen sentences minus the loss on the training set of the run (paper, section 4), per predicted token.

    The unseen sentences are those of `loss`. The training sentences are as many of the set, once each, with new masks.
    """

    def why_not_applicable(self, context: MeasureContext) -> str | None:
        """Return why there is no gap: without a training set, no sentence is seen more often than another."""
        if reason := super().why_not_applicable(context):
            return reason
        if self._training_sentences(context) is not None:
            return None
        return "there is no training set: the run draws new sentences at every step, or the checkpoint is of no run"

    def run(self, model: Any, context: MeasureContext) -> MeasureResult:
        """Return `training-loss` and `generalization-gap`."""
        from isoloss.lab.evaluation import loss
        from isoloss.seeds import generator
        from isoloss.statistics.comparison import independent_difference
        from isoloss.text.masking import objective_batch

        sentences = self._training_sentences(context)
        if sentences is None:
            raise IsolossError(self.why_not_applicable(context))
        unseen = super().run(model, context)
        masks = generator(self.seed, "evaluation masks")
        batch = objective_batch(sentences, context.language, context.objective, generator=masks)
        training = loss.text_loss(
            model,
            [batch],
            objective=context.objective,
            seed=self.seed,
            method="training sentences",
            progress=context.progress,
        )["loss"]
        other = unseen.estimates["loss"]
        gap = dataclasses.replace(
            independent_difference(other, training), method=f"{other.method} minus {training.method}"
        )
        return MeasureResult(
            estimates={"training-loss": training, "generalization-gap": gap},
            inputs=digest(*batch.values(), more=unseen.inputs),
        )

    def _training_sentences(self, context: MeasureContext) -> Any:
        """Return sentences of the training set of the run that is measured; None: it has none, or there is no run."""
        if context.checkpoint is None:
            return None
        from isoloss.lab.training import training_set

        number = sys.maxsize if self.loss_sentences == "all" else self.loss_sentences
        # runs that share the other inputs have training sets of their own
        return context.once(training_set.sentences, context.language, context.checkpoint[0].config, number)
