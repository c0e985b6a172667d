"""Every subcommand and public name where nothing but the base is installed, each as a user would call it.

`python tests/base_alone.py FOLDER` runs all of them, in the empty folder, and prints what was wrong with each as JSON.
"""

import contextlib
import doctest
import importlib
import inspect
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM

from isoloss.cli.main import main
from isoloss.errors import IsolossError
from isoloss.lab.languages import resolve
from isoloss.run_config import TrainConfig
from isoloss.runs import Run

PACKAGES = ("isoloss", "isoloss.flatness", "isoloss.lab.languages", "isoloss.transfer", "isoloss.studies")
IDS = "--data ids.npy --mask-id 1 --num-sequences 16"
FLOW = "sgd-flow --model two-parameters --trajectories 8 --step-sizes 0.2 0.1 --times 0.5"

# command lines and the extra that each must name; "" for those that work
COMMANDS = {
    "ls": "",
    "doctor": "",
    "text python-docs texts": "",
    "tokenizer texts --output tokenizer --vocab-size 300 --max-documents 5": "",
    "tokenizer hf:owner/name --output other": "hub",
    f"measure a {IDS} --measures loss trace": "",
    "measure a --data hf:owner/name": "hub",
    f"measure a {IDS} --measures lm-eval-lastword": "eval",
    "measure a --language pcfg-laptop --measures trace --num-sequences 8": "lab",
    f"compare a b {IDS} --html page.html": "",
    f"compare a b {IDS} --figure ab.svg": "study",
    f"compare a b {IDS} --parquet table.parquet": "study",
    "suite a b --data ids.npy --output suite": "study",
    f"expand a --into d16 {IDS}": "",
    "average a b --output mean": "",
    "transfer c --tokenizer tokenizer --task docstring-kind --num-train 20 --num-test 20": "",
    "transfer c --tokenizer tokenizer --task sst2 --num-train 20": "hub",
    "transfer a --language pcfg-laptop --task root --num-train 20": "lab",
    "sample brackets-8": "",
    "sample pcfg-laptop": "lab",
    "sample hmm-laptop": "lab",
    "train new --language brackets-8 --size d16 --steps 1": "lab",
    "train new --language brackets-8 --print-config": "",
    "show run": "",
    "study new own --checkpoints a b --data ids.npy": "",
    "study plan own.py": "study",
    "study run own.py": "study",
    "study run own.py --executor ray": "ray",
    "study run own.py --executor slurm": "slurm",
    "study export own.py --output out": "study",
    "theory bartlett --length 2 --directions 2": "",
    "theory bartlett --length 2 --directions 1 --figure f.svg": "study",
    f"theory {FLOW}": "",
    f"theory {FLOW} --figure f.svg": "study",
    "theory brackets --lengths 4 --figure f.svg": "study",
}
# public names whose example needs an extra: those of `lab` draw a grammar's sentences or train
NAMES = {
    **dict.fromkeys((f"isoloss.{name}" for name in ("finetune", "linear_probe", "make_task", "pretrain")), "lab"),
    "isoloss.transfer.linear_probe": "lab",
    **dict.fromkeys(("isoloss.read_study", "isoloss.studies.load_study"), "study"),
}


def of_command(line: str) -> str:
    """Run a command and return what it says on stderr, if it fails."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        status = main(line.split())
    return said.getvalue() if status else ""


def of_name(name: str) -> str:
    """Run the example of a public name, if it has one, and return the error that it ends with."""
    package, _, attribute = name.rpartition(".")
    try:
        public = getattr(importlib.import_module(package), attribute)
        example = inspect.getdoc(public) or ""
        names: dict[str, Any] = {}
        with contextlib.redirect_stdout(io.StringIO()):
            for each in doctest.DocTestParser().get_examples(example):
                exec(compile(each.source, name, "single"), names)
    except IsolossError as error:
        return str(error)
    return ""


def result(call: Callable[[str], str], what: str) -> str:
    """Return the message of a call, or a traceback."""
    try:
        return call(what)
    except BaseException:
        return traceback.format_exc()


def bert(vocab_size: int) -> Any:
    """A tiny BERT."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return BertForMaskedLM(BertConfig(vocab_size=vocab_size, **sizes)).eval()


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    torch.manual_seed(0)
    for folder, vocab_size in {"a": 12, "b": 12, "c": 300}.items():
        bert(vocab_size).save_pretrained(folder)
    Run(Path("run")).create(TrainConfig(language=resolve("brackets-8")))
    np.save("ids.npy", np.random.default_rng(0).integers(2, 12, (16, 6)))
    public = [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]
    found = {line: result(of_command, line) for line in COMMANDS} | {name: result(of_name, name) for name in public}
    print(json.dumps(found))
