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
    "isoloss.lab.evaluation.evaluator",
    "isoloss.lab.evaluation.loss",
    "isoloss.lab.evaluation.measures.flatness",
    "isoloss.lab.evaluation.measures.loss",
    "isoloss.lab.evaluation.measures.transfer",
    "isoloss.lab.evaluation.pretraining",
    "isoloss.lab.evaluation.context",
    "isoloss.flatness._rescaling.families",
    "isoloss.flatness.minimal_trace",
    "isoloss.lab.languages.hmm",
    "isoloss.lab.languages.pcfg",
    "isoloss.lab.languages._pcfg.kernels",
    "isoloss.lab.models.architectures",
    "isoloss.lab.models.bert",
    "isoloss.lab.models.expansion",
    "isoloss.lab.models.compiled_bert",
    "isoloss.lab.training.train",
    "isoloss.transfer.probe",
    "isoloss.transfer.tasks",
    "isoloss.lab.tasks",
    "isoloss.lab.presets",
    "isoloss.schema",
    "isoloss.studies.run.usage",
    "rich.console",
    "rich.progress",
    "rich.table",
    "transformers.models.bert.modeling_bert",
):
    importlib.import_module(name)

import numba  # noqa: E402 - it reads the environment as it is imported

# numba readies its compiler at the first call, which takes as long as many a command
numba.njit(lambda: 0)()
