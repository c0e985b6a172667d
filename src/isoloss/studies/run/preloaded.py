"""What training and measuring need, imported by the fork server: each command that it forks has it already.

With one OpenMP thread, these imports start no threads; a fork of a process with threads could hang.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read by libraries as they are imported

from isoloss.evaluation.measures.base import Measure

for name in (
    "isoloss.cli.train",
    "isoloss.cli.eval",
    "isoloss.evaluation.evaluator",
    "isoloss.evaluation.loss",
    "isoloss.evaluation.measures.flatness",
    "isoloss.evaluation.measures.loss",
    "isoloss.evaluation.measures.transfer",
    "isoloss.evaluation.pretraining",
    "isoloss.evaluation.context",
    "isoloss.flatness._rescaling.families",
    "isoloss.flatness.minimal_trace",
    "isoloss.languages.hmm.language",
    "isoloss.languages.pcfg.language",
    "isoloss.languages.pcfg.numba_kernels",
    "isoloss.models.architectures",
    "isoloss.models.bert",
    "isoloss.models.expansion",
    "isoloss.models.fused",
    "isoloss.models.stacked_kernels",
    "isoloss.training.stack",
    "isoloss.training.trainer",
    "isoloss.transfer.probe",
    "isoloss.transfer.tasks",
    "transformers.models.bert.modeling_bert",
):
    importlib.import_module(name)


def _read_help_texts(config: type, read: Callable[[type[Any]], object]) -> None:
    """Read the help texts of this type's settings now, as that would take each `isoloss eval` a second."""
    subclasses: list[type[Any]] = config.__subclasses__()
    for subclass in subclasses:
        read(subclass)
        _read_help_texts(subclass, read)


_read_help_texts(Measure, importlib.import_module("isoloss.cli.options").help_texts)
