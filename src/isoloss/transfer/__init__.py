"""Transfer: how accurate a pre-trained model is on a downstream task, by a linear probe or by fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoloss import lazy

if TYPE_CHECKING:
    from isoloss.transfer.compare import compare_accuracy
    from isoloss.transfer.config import FinetuneConfig, LinearProbeConfig
    from isoloss.transfer.finetuning import finetune
    from isoloss.transfer.probe import linear_probe, lookup_probe
    from isoloss.transfer.results import TransferResult
    from isoloss.transfer.similarity import effective_dimension, gram_matrix, linear_cka
    from isoloss.transfer.tasks import TaskData, make_task
    from isoloss.transfer.text_tasks import make_text_task

__all__ = [
    "FinetuneConfig",
    "LinearProbeConfig",
    "TaskData",
    "TransferResult",
    "compare_accuracy",
    "effective_dimension",
    "finetune",
    "gram_matrix",
    "linear_cka",
    "linear_probe",
    "lookup_probe",
    "make_task",
    "make_text_task",
]

__getattr__, __dir__ = lazy.exports(
    __name__,
    {
        **dict.fromkeys(("FinetuneConfig", "LinearProbeConfig"), "isoloss.transfer.config"),
        **dict.fromkeys(("TaskData", "make_task"), "isoloss.transfer.tasks"),
        **dict.fromkeys(("linear_probe", "lookup_probe"), "isoloss.transfer.probe"),
        **dict.fromkeys(("effective_dimension", "gram_matrix", "linear_cka"), "isoloss.transfer.similarity"),
        "TransferResult": "isoloss.transfer.results",
        "compare_accuracy": "isoloss.transfer.compare",
        "finetune": "isoloss.transfer.finetuning",
        "make_text_task": "isoloss.transfer.text_tasks",
    },
)
