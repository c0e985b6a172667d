"""Transfer: tasks of text, features of any model, linear probes, and accuracies compared on the same examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoloss import lazy

if TYPE_CHECKING:
    from isoloss.transfer.compare import compare_accuracy
    from isoloss.transfer.config import LinearProbeConfig
    from isoloss.transfer.probe import linear_probe
    from isoloss.transfer.results import TransferResult
    from isoloss.transfer.similarity import effective_dimension, effective_rank, gram_matrix, linear_cka
    from isoloss.transfer.tasks import TaskData
    from isoloss.transfer.text_tasks import make_text_task

__all__ = [
    "LinearProbeConfig",
    "TaskData",
    "TransferResult",
    "compare_accuracy",
    "effective_dimension",
    "effective_rank",
    "gram_matrix",
    "linear_cka",
    "linear_probe",
    "make_text_task",
]

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        "LinearProbeConfig": "isoloss.transfer.config",
        "TaskData": "isoloss.transfer.tasks",
        "linear_probe": "isoloss.transfer.probe",
        **dict.fromkeys(
            ("effective_dimension", "effective_rank", "gram_matrix", "linear_cka"), "isoloss.transfer.similarity"
        ),
        "TransferResult": "isoloss.transfer.results",
        "compare_accuracy": "isoloss.transfer.compare",
        "make_text_task": "isoloss.transfer.text_tasks",
    },
)
