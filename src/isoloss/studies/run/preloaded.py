"""What training and measuring need, imported by the fork server: each command that it forks has it already.

With one OpenMP thread, these imports start no threads; a fork of a process with threads could hang.
"""

import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"  # read by libraries as they are imported
if os.getsid(0) != os.getpid():
    # Ray's workers have a low priority. Linux shares the processors out among sessions first: in the worker's own
    # session, these imports would wait minutes on a busy machine
    os.setsid()

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
    "isoloss.models.compiled_bert",
    "isoloss.training.train",
    "isoloss.transfer.probe",
    "isoloss.transfer.tasks",
    "transformers.models.bert.modeling_bert",
):
    importlib.import_module(name)
