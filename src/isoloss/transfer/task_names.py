"""The names of the tasks of text. Nothing here needs torch."""

from __future__ import annotations

# the columns of text and second text in nyu-mll/glue
GLUE = {
    "cola": ("sentence", None),
    "mnli": ("premise", "hypothesis"),
    "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"),
    "qqp": ("question1", "question2"),
    "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence", None),
    "wnli": ("sentence1", "sentence2"),
}
REGRESSION = "stsb"  # the task of GLUE that has no classes
