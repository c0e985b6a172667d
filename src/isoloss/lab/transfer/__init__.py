"""Transfer: how accurate a pre-trained model is on a downstream task, by a linear probe or by fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isoloss import lazy

if TYPE_CHECKING:
    from isoloss.lab.transfer.compare import compare_accuracy
    from isoloss.lab.transfer.config import FinetuneConfig, LinearProbeConfig
    from isoloss.lab.transfer.finetuning import finetune
    from isoloss.lab.transfer.probe import linear_probe, lookup_probe
    from isoloss.lab.transfer.results import TransferResult
    from isoloss.lab.transfer.similarity import effective_dimension, effective_rank, gram_matrix, linear_cka
    from isoloss.lab.transfer.tasks import TaskData, make_task
    from isoloss.lab.transfer.text_tasks import make_text_task

__all__ = [
    "FinetuneConfig",
    "LinearProbeConfig",
    "TaskData",
    "TransferResult",
    "compare_accuracy",
    "effective_dimension",
    "effective_rank",
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
        **dict.fromkeys(("FinetuneConfig", "LinearProbeConfig"), "isoloss.lab.transfer.config"),
        **dict.fromkeys(("TaskData", "make_task"), "isoloss.lab.transfer.tasks"),
        **dict.fromkeys(("linear_probe", "lookup_probe"), "isoloss.lab.transfer.probe"),
        **dict.fromkeys(
            ("effective_dimension", "effective_rank", "gram_matrix", "linear_cka"), "isoloss.lab.transfer.similarity"
        ),
        "TransferResult": "isoloss.lab.transfer.results",
        "compare_accuracy": "isoloss.lab.transfer.compare",
        "finetune": "isoloss.lab.transfer.finetuning",
        "make_text_task": "isoloss.lab.transfer.text_tasks",
    },
)
