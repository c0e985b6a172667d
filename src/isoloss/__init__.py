"""isoloss: compare language models that have the same pre-training loss.

The names in `__all__` are the public ones; other modules are internal unless a page of the documentation names them.
Each is loaded on first use, so that `import isoloss` takes no time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isoloss import lazy

if TYPE_CHECKING:
    from isoloss.checkpoints.loading import load_model
    from isoloss.comparison.traces import compare_traces
    from isoloss.flatness.fisher import fisher_trace
    from isoloss.lab.evaluation.compare import compare
    from isoloss.lab.evaluation.evaluator import evaluate
    from isoloss.lab.evaluation.pretraining import pretrain
    from isoloss.lab.finetuning import finetune
    from isoloss.lab.languages.config import load_language
    from isoloss.lab.tasks import make_task
    from isoloss.lab.training.averaging import average_checkpoints
    from isoloss.registry import (
        ALGORITHMS,
        EXECUTORS,
        LANGUAGES,
        MEASURES,
        MODELS,
        OPTIMIZERS,
        RESCALINGS,
        STUDIES,
        TASKS,
    )
    from isoloss.statistics.estimate import Estimate
    from isoloss.studies.reading import read_study
    from isoloss.suites.lm_eval import read_lm_eval
    from isoloss.transfer.compare import compare_accuracy
    from isoloss.transfer.probe import linear_probe

    __version__: str

__all__ = [
    "ALGORITHMS",
    "EXECUTORS",
    "LANGUAGES",
    "MEASURES",
    "MODELS",
    "OPTIMIZERS",
    "RESCALINGS",
    "STUDIES",
    "TASKS",
    "Estimate",
    "__version__",
    "average_checkpoints",
    "compare",
    "compare_accuracy",
    "compare_traces",
    "evaluate",
    "finetune",
    "fisher_trace",
    "linear_probe",
    "load_language",
    "load_model",
    "make_task",
    "pretrain",
    "read_lm_eval",
    "read_study",
]

_load = lazy.exports(
    __name__,
    {
        "Estimate": "isoloss.statistics.estimate",
        "average_checkpoints": "isoloss.lab.training.averaging",
        "compare": "isoloss.lab.evaluation.compare",
        "compare_accuracy": "isoloss.transfer.compare",
        "compare_traces": "isoloss.comparison.traces",
        "evaluate": "isoloss.lab.evaluation.evaluator",
        "finetune": "isoloss.lab.finetuning",
        "fisher_trace": "isoloss.flatness.fisher",
        "linear_probe": "isoloss.transfer.probe",
        "load_language": "isoloss.lab.languages.config",
        "load_model": "isoloss.checkpoints.loading",
        "make_task": "isoloss.lab.tasks",
        "pretrain": "isoloss.lab.evaluation.pretraining",
        "read_lm_eval": "isoloss.suites.lm_eval",
        "read_study": "isoloss.studies.reading",
        **dict.fromkeys((name for name in __all__ if name.isupper()), "isoloss.registry"),
    },
)[0]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # reads the metadata of the installed package
        from importlib.metadata import version

        return version("isoloss")
    return _load(name)


def __dir__() -> list[str]:
    return sorted(__all__)
