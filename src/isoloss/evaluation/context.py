"""What measures are made on: inputs, the truth and tasks, made once for all models and measures that share them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from isoloss.run_config import ObjectiveConfig

if TYPE_CHECKING:
    from isoloss.evaluation.truth import Truth
    from isoloss.text.inputs import Inputs
    from isoloss.transfer.tasks import TaskData

T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class MeasureContext:
    """What a measure is made on, and when it may stop before the end."""

    # returns the inputs to measure on, given how many sequences and a seed; `inputs` keeps what it returned
    read: Callable[[int, int], Inputs]
    objective: ObjectiveConfig  # which tokens are predicted, and from what
    language: Any = None  # the language of the inputs, where it is known; None: text or token ids
    # whether the auxiliary sample of inputs from a file can be read by the models' input embeddings
    has_embeddings: bool = True
    # stop when the standard error is at most this fraction of the value; None: at the end of the inputs
    rtol: float | None = None
    seconds: float | None = None  # stop after this time; None: at the end of the inputs
    num_sequences: int | None = None  # stop after as many sequences; None: at the end of the inputs
    resume: Path | None = None  # A file to resume from, and to write to; None: none
    progress: Callable[[int], None] | None = None  # called with the number of sequences done; None: never
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def is_causal(self) -> bool:
        """Whether each token is predicted from those before it."""
        return self.objective.kind == "causal"

    def inputs(self, num_sequences: int, seed: int) -> Inputs:
        """Return the inputs to measure on: at most `num_sequences`, `seed` decides which and their masks.

        Where they come from a file, `auxiliary_sample` of them is all that it holds.
        """
        return self._once(("inputs", num_sequences, seed), lambda: self.read(num_sequences, seed))

    def truth(self, num_sentences: int, seed: int) -> Truth:
        """Return masked sentences of the language and their exact conditionals (`isoloss.evaluation.truth.truth`)."""
        from isoloss.evaluation.truth import truth

        return self._once(
            ("truth", num_sentences, seed),
            lambda: truth(self.language, num_sentences=num_sentences, objective=self.objective, seed=seed),
        )

    def task(self, name: str, *, num_train: int, num_test: int, seed: int) -> TaskData:
        """Return labelled sentences of a downstream task (`isoloss.transfer.tasks.make_task`)."""
        from isoloss.transfer.tasks import make_task

        return self._once(
            ("task", name, num_train, num_test, seed),
            lambda: make_task(self.language, name, num_train=num_train, num_test=num_test, seed=seed),
        )

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made
