"""The look-up table on a task: the linear probe on the true conditionals (paper, section 2.3 and appendix A.5)."""

from __future__ import annotations

from typing import Any

from isoloss.errors import IsolossError
from isoloss.languages.api import Language
from isoloss.transfer.features import lookup_features
from isoloss.transfer.linear_probe import probe_features
from isoloss.transfer.results import TransferResult
from isoloss.transfer.tasks import TaskData, labeling


def lookup_task(language: Language, task: TaskData, **settings: Any) -> TransferResult:
    r"""Return the accuracy of a linear probe on the true conditionals: `lookup_features`, then `linear_probe`.

    A model of the best pre-training loss has these probabilities as its outputs, whatever its token states are.

    Args:
        language: Whose conditionals; it produces the task's sentences.
        task: Labelled sentences, from `make_task`.
        settings: As for `linear_probe`.

    Raises:
        IsolossError: As `linear_probe`; or a sentence is not one of the language.

    Example:
        >>> from isoloss.languages.pcfg.language import PCFG
        >>> from isoloss.transfer.tasks import make_task
        >>> language = PCFG.from_text("S A 1\nS B 1\nA C D 1\nB D C 1\nC c 1\nD d 1")
        >>> task = make_task(language, "root", num_train=100, num_test=50, seed=0)
        >>> print(lookup_task(language, task, solver="convex").accuracy)
        100 %
    """
    if labeling(language, task.name).draw is not None:
        raise IsolossError(
            f"the strings of task {task.name} need not be sentences, so that their true conditionals are not known"
        )
    train, test = lookup_features(language, task.train), lookup_features(language, task.test)
    return probe_features(task, train, test, **settings)
