"""Bad input gets one sentence, exit status 2, and leaves nothing behind: command lines and what message each gets."""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from speaking import refusal
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

import small_checkpoints as small
from isoloss.checkpoints.loading import quiet
from isoloss.cli.main import main
from isoloss.paper.same_loss import STUDY
from isoloss.studies.folder import StudyFolder
from isoloss.text.tokenizers import load_tokenizer

# refused before torch is imported, which takes seconds
EARLY = {
    "measure": {
        "": "no model is named",
        "checkpoint": "to measure any other checkpoint add --data or --language",
        "chekpoint": "chekpoint is neither a run directory (it has no run.json) nor a checkpoint in one",
        "chekpoint --data text.txt": "does not answer; did you mean checkpoint?",
        "./no --data text.txt": "there is no checkpoint ./no: it is not a folder",
        "./chekpoint": "there is no checkpoint ./chekpoint: it is not a folder; did you mean checkpoint?",
        "text.txt --data text.txt": "text.txt is a file, and a checkpoint is a folder: if it is what models",
        "other weights/w.pt": "put --data before it; if it has the weights of a module of your own, add --module",
        "runs/frist --data text.txt": "did you mean runs/first?",
        "'check*[x]'": "no folder matches 'check*[x]'",
        "owner/model@step*": "does not answer, and no revision of owner/model is on this machine",
        "precious": "precious is neither a run directory (it has no run.json) nor a checkpoint in one",
        "other --data text.txt": "other is not a checkpoint: it has no config.json",
        "bare --data text.txt": "bare has no weights",
        "checkpoint --dta text.txt": "there is no option --dta; did you mean --data?",
        "checkpoint --data": "--data needs 1 value",
        "checkpoint --data tex.txt": "there is no data tex.txt; did you mean text.txt? give a .npy",
        "checkpoint --language pcfg-laptp": "no language 'pcfg-laptp'; did you mean pcfg-laptop?",
        "x --dtype fp16": "it must be one of float32, bfloat16, float64; isoloss measure --help-all says more",
        "x --attention fastest": "--attention is 'fastest'; it must be one of auto, sdpa, eager",
        "x --loss-sentences al": "--loss-sentences is 'al'; it must be a whole number, such as 1000 or 1e3, or all",
    },
    "measure checkpoint --data text.txt": {
        "--dtype float8": "--dtype is 'float8'; did you mean float64? it must be",
        "--num-sequences 5o": "--num-sequences is '5o'; it must be a whole number",
        "--measures trce": "no measure 'trce'; did you mean trace?",
        "--measures": "no measure is named",
        "--rtol 2": "rtol is 2.0; it must be above 0 and below 1",
        "--rtol 0.1 --measures loss": "--rtol has no effect on loss, which is not a measure of flatness",
        "--seconds 0": "seconds is 0.0; it must be above 0",
        "--num-probes 0": "num_probes is 0; it must be at least 1",
        "--batch-size 0": "batch_size is 0; it must be at least 1",
        "--device gpu": "the device is 'gpu'; it must be auto, cpu",
        "--length 0": "length is 0; it must be at least 1",
        "--tokenizer ./no": "there is no tokenizer './no'",
        "--threads 100000": "--threads is 100000; it must be at least 0",
        "--threads -1": "--threads is -1; it must be at least 0",
    },
    "compare": {
        "./no checkpoint": "there is no checkpoint ./no: it is not a folder",
        "chekpoint checkpoint": "does not answer; did you mean checkpoint?",
        "checkpoint": "checkpoint alone has nothing to be compared with: name another, or see isoloss measure",
        "checkpoint checkpoint": "named twice",
    },
    "transfer": {
        "./no --task root --language pcfg-laptop": "there is no checkpoint ./no: it is not a folder",
        "runs/frist --task root": "did you mean runs/first?",
        "--task root": "no model is named",
        "checkpoint": "--task is missing",
        "checkpoint --task root --language pcfg-laptp": "no language 'pcfg-laptp'",
        "checkpoint --task sst2 --data glue": "there is no file or folder glue",
        "checkpoint --task root --language pcfg-laptop --num-train 0": "num_train is 0; it must be at least 1",
        "checkpoint --task root --language pcfg-laptop --device gpu": "the device is 'gpu'",
        "checkpoint --task root --method lookup --pooling mean": "--pooling: no effect with --method lookup",
        "checkpoint --task root --method finetune --layer 0": "--layer: no effect with --method finetune",
        "checkpoint --task root --method finetune --pooling concatenate": "it must be one of auto, first, last, mean",
        "checkpoint --task root --solver convex --epochs 2": "epochs has no effect with the solver convex",
        "checkpoint --task root --regularization 0.1": "regularization has no effect with the solver adamw",
    },
    "expand": {
        "chekpoint --into d32": "does not answer; did you mean checkpoint?",
        "runs/frist/checkpoints/step-100 --into d32": "did you mean runs/first/checkpoints/step-100?",
        "checkpoint": "--into is missing",
        "checkpoint --into d33": "there is no model size 'd33'",
        "checkpoint --into d32 --data tex.txt": "there is no data tex.txt; did you mean text.txt?",
        "checkpoint --into d32 --device gpu": "the device is 'gpu'",
        "checkpoint --into d128 --num-sequences 1": "num_sequences is 1; it must be at least 2 (an error bar needs",
        "checkpoint --into d128 --output precious": "precious exists and is not an empty folder: choose another name",
        "checkpoint --into d128 --output text.txt": "text.txt exists and is not an empty folder: choose another name",
        "checkpoint --into d32 --output text.txt/below/x": "cannot write in text.txt/below: Not a directory",
    },
    "text": {
        "pyton-docs out": "is 'pyton-docs'; did you mean python-docs?",
        "novels out": "it must be python-docs",
    },
    "tokenizer": {
        "tex.txt --output out": "did you mean text.txt?",
        "text.txt": "--output is missing",
        "text.txt --output out --kind bpe --cased": "--cased is for wordpiece",
    },
    "ls": {
        "lanuages": "is 'lanuages'; did you mean languages?",
        "measures trce": "no measure 'trce'; did you mean trace?",
        "sizes d33": "there is no 'd33' among the sizes; did you mean d32?",
        "all trace": "give the kind of 'trace'",
    },
    "show": {
        "chekpoint": "chekpoint is not a run directory: it has no run.json; did you mean checkpoint?",
        "precious": "precious is not a run directory: it has no run.json",
    },
    "study": {
        "stauts same-loss": "no subcommand 'stauts'; did you mean status? the subcommands are new, show, plan,",
        "--scale laptop": "no subcommand '--scale'; the subcommands are",
        "run same-los": "no study 'same-los'; did you mean same-loss?",
        "run": "NAME is missing",
        "new own --checkpoints checkpoint --data tex.txt": "there is no data tex.txt; did you mean text.txt?",
        "status x --workers 3": "--workers is an option of isoloss study plan, isoloss study run, isoloss study",
        "status x --wrkers 3": "no option --wrkers; did you mean --workers? isoloss study status --help lists",
        "run x --lr 3": "there is no option --lr: isoloss study run --help lists all",
    },
    "theory": {
        "bartlet": "no subcommand 'bartlet'; did you mean bartlett? the subcommands are bartlett, sgd-flow, brackets",
        "bartlett --lenth 3": "did you mean --length? isoloss theory bartlett --help lists all",
    },
    "sample": {
        "pcfg-laptp": "no language 'pcfg-laptp'; did you mean pcfg-laptop?",
        "tex.txt --tokenizer x": "did you mean text.txt?",
        "text.txt --tokenizer ./no": "there is no tokenizer './no'",
        "pcfg-laptop --length 4": "the language pcfg-laptop is complete as it is: leave out --length",
        "pcfg-laptop --tokenizer vocab.txt": "leave out --tokenizer",
        "pcfg-laptop --save language.bin": "the file of a language is called NAME.safetensors, not language.bin",
        "dyck-2 --conditionals -1": "conditionals is -1; it must be at least 0 (0: none)",
        "pcfg-laptop --entropy-sentences 1": "--entropy-sentences is 1; an estimate with an error needs at least 2",
        "pcfg-laptop --entropy-sentences -5": "entropy_sentences is -5; it must be at least 0 (0: none)",
        "dyck-2 --overwrite": "--overwrite needs --save: nothing else is written",
        "dyck-2 --num-sentences 0": "num_sentences is 0; it must be at least 1",
        "dyck-2 --num-sentences 99999999999": "it needs at least 27,940 GiB of memory, and this machine has",
        "wrong.toml": "no setting 'level'; did you mean levels?",
        "untyped.toml": "levels is '3'; it must be a whole number",
    },
    "train": {
        "": "RUN is missing",
        "new": "new holds no run yet: name a --language or a --config to start one",
        "new --config absent.toml": "absent.toml does not exist",
        "new --config absent.toml --steps 5": "absent.toml holds the whole config; leave out --steps",
        "new --config tex.txt": "did you mean text.txt?",
        "new --config stages.toml": "stages[0]: no setting 'step'; did you mean steps?",
        "new --language texts": "needs --tokenizer",
        "new --language text.txt --tokenizer ./no": "there is no tokenizer './no'",
        "new --language tex.txt --tokenizer vocab.txt": "no language 'tex.txt'; did you mean text.txt?",
        "new --language pcfg-laptp": "no language 'pcfg-laptp'; did you mean pcfg-laptop?",
        "new --lerning-rate 1e-3": "; did you mean --learning-rate? isoloss train --help-all lists all",
        "new --learning_rat 1": "--learning_rat; did you mean --learning-rate?",
        "new --zzz": "there is no option --zzz: isoloss train --help-all lists all",
    },
    "train new --language pcfg-laptop": {
        "--size d65": "bert has no model size 'd65'; its sizes are d16, d32, d64,",
        "--steps 0": "steps is 0; it must be at least 1",
        "--checkpoints 5 2000": "checkpoints is 5, 2000; it must be steps from 0 to 1000",
        "--device gpu": "the device is 'gpu'; it must be auto, cpu",
        "--learning-rate -1": "learning_rate is -1.0; it must be above 0",
        "--threads 100000": "--threads is 100000; it must be at least 0",
        "--init-from no": "init_from is no, relative to the run's folder, and there is no new/no",
        "--architecture brt": "no model 'brt'; did you mean bert?",
        "--architecture lstm --ffn 8": "an LSTM has no attention heads and no feed-forward blocks",
        "--architecture opt --masking fraction": "masks no tokens: leave out masking",
        "--architecture opt --objective masked": "the architecture opt learns 'causal'",
        "--objective causal": "the architecture bert learns 'masked'",
        "--heads 3": "3 heads cannot divide the width 64 evenly; the number of heads (--heads) can be 1, 2, 4",
        "--directions 1": "directions is 1, but bert is not an LSTM: leave it out",
        "--layers 0": "layers is 0; it must be at least 1",
        "--algorithm lion": "no training algorithm 'lion'",
        "--sam-rho 0.1": "--sam-rho needs --algorithm sam",
        "--algorithm sam --adversarial-ridge 0.1": "--adversarial-ridge needs --algorithm adversarial",
        "--algorithm adversarial --fisher-penalty-weight 0.1": "--fisher-penalty-weight needs --algorithm fisher-pen",
        "--algorithm adversarial --adversarial-weight 0": "the adversary's weight is 0.0; it must be finite, above 0",
        "--algorithm fisher-penalty --parallel fsdp": "derivatives, which sharded parameters do not have: use ddp",
        "--momentum 0.9": "momentum is 0.9, but the optimizer is adamw: it needs sgd",
        "--fraction 0.3": "choose the masking 'fraction'",
        "--warmup-steps 10 --warmup-proportion 0.1": "say the same: leave one out",
        "--measure-every 7": "measure_every is 7; it must be a multiple of log_every, 50",
        "--target-kl 1 --target-loss 1": "isoloss train: --target-kl and --target-loss are given",
        "--target-kl -1": "isoloss train: --target-kl is -1.0; it must be above 0",
        "--target-kl 1 --validate-every 7": "train: --validate-every is 7; it must be a multiple of --log-every, 50",
        "--target-kl 1 --algorithm adversarial --adversarial-weight 0": "isoloss train: the adversary's weight is 0.0;",
        "--compiled --no-compiled": "--compiled and --no-compiled contradict each other",
        "--compiled --masking fraction": "compiled is on and masking is 'fraction'; it must be 'one'",
        "--compiled --architecture lstm": "compiled is on and the architecture is lstm; it must be bert",
    },
}
# refused in this process, after models or languages were opened
LATE = {
    "sample": {
        "pcfg-huge": "it is neither a preset (pcfg-laptop, pcfg-varied,",
        "book.txt": "add --tokenizer",
        "run": "name one of its checkpoints, such as run/checkpoints/step-30",
        "brackets-8 --tree": "--tree is for a grammar",
        "hmm-laptop --tree": "--tree is for a grammar",
        "dyck-2 --states": "--states is for a hidden Markov model",
        "dyck-2 --entropy-sentences 50": "has a closed form: leave out --entropy-sentences",
        "words.jsonl --tokenizer vocab.txt --length 4 --conditionals 2": "for it is text: leave out --conditionals",
        "words.jsonl --tokenizer vocab.txt --length 4 --save a.safetensors": "keep its text",
    },
    "train": {
        "precious --language pcfg-laptop": "precious is not empty and holds no run: choose another directory",
        "study --language pcfg-laptop --steps 1": "study holds a study and cannot hold a run: choose another directory",
        "run --language pcfg-laptop --size d32 --steps 30": "model.size is 'd32' here and 'd16' there",
        "run --language pcfg-laptop --size d16 --heads 2 --steps 30": "model.heads is 2 here and not set there",
        "run --language pcfg-laptop --precision bfloat16": "was begun with the compiled step, and precision is bfloat",
        "run --steps 40": "run goes on with the config it was made with; leave out --steps",
        "run --target-kl 1": "run goes on with the config it was made with; leave out --target-kl",
        "new --language run": "name one of its checkpoints, such as run/checkpoints/step-30",
        "new --language pcfg-laptop --size d32 --init-from ../run/checkpoints/step-30": "do not fit",
        "new --language pcfg-laptop --algorithm adversarial --adversarial-task prefix-99": "no task 'prefix-99'",
    },
    "show": {
        "run/checkpoints/step-30": "is a checkpoint of a run: name the run, ",
        "study": "study holds a study, not a run: isoloss study status same-loss --scale smoke --folder study says how",
    },
    "measure": {
        "study": "study holds a study, not a run: isoloss study status same-loss --scale smoke --folder study says how",
        "run --data python:docs": "name a checkpoint in it, such as run/checkpoints/step-30",
        "run/checkpoints/step-20": "there is no checkpoint run/checkpoints/step-20: it is not a folder",
        "run/checkpoints/step-10 --steps 10": "is one checkpoint: leave out steps, or name the run, ",
        "run/checkpoints/step-30 --length 4 --masking one": "leave out --length, --masking",
        "run --rtol 0.9": "is a run",
        "bert": "--data",
        "bert --data text.txt": ".npy",
        "bert --data absent/model": "there is no data absent/model",
        "classifier --data ids.npy": "language-modeling head",
        "a masked --data ids.npy": "predicts masked tokens",
        "a more --data ids.npy": "a has a vocabulary of 317 tokens",
        "a other-tokens --data ids.npy": "different tokenizers",
        "a a --data ids.npy": "a is named twice",
        "a --data ids.npy --rtol 1e-6 --measures squared-norm": "it takes no rtol",
        "a --data ids.npy --mask-id 3": "leave out --mask-id",
        "a --data ids.npy --column body": "ids.npy holds token ids, which have no column and no split",
        "a --data python:dos": "there is no dataset python:dos; did you mean docs?",
    },
    "measure run": {
        "--steps 7": "run has no checkpoint at step 7; it has 10, 30",
        "--measures los": "no measure 'los'",
        "--measures probe-nothing": "no task 'nothing': choose root",
        "--measures probe-root --probe-regularization 1": "no effect with the solver adamw",
        "--measures loss --loss-sentences 0": "loss_sentences is 0; it must be at least 1, or all",
        "--measures loss --loss-sentences -3": "loss_sentences is -3; it must be at least 1, or all",
        "--measures loss --loss-sentences all": "PCFG has about 10^12 strings of tokens, more than the 65,536 that can",
        "--measures loss --masking fraction": "leave out --masking",
        "--measures loss --batch-size 4 --length 3": "leave out --length, --batch-size",
        "--measures loss --tokenizer none --mask-id 3": "leave out --tokenizer, --mask-id",
        "--measures loss --dtype float64": "dtype float64 is for data or a language",
        "--measures probe-sst2 --task-data sst2=mails.csv": "the language has no tokenizer, so its models cannot read",
        "--measures probe-root --num-train all": "num_train is all, but sentences of a language are drawn: give num_",
    },
    "measure reading --task-data sst2=sst2 --measures": {
        "lookup-sst2": "the true conditionals of the text of sst2 are not known: it has no look-up table",
        "few-shot-sst2-30": "task sst2 has 70 training examples, too few for 5 disjoint draws of 30",
        "probe-sst2 --num-train all --probe-solver convex --probe-draws 2": "too few for 2 disjoint draws of all",
        "probe-stsb": "(it is a regression)",
    },
    "measure reading --measures probe-sst2 --task-data": {
        "sst3=here": "--task-data (in Python, task_data) has 'sst3=here'; an entry is NAME=PATH with a task",
        "here": "--task-data (in Python, task_data) has 'here'; an entry is NAME=PATH with a task of text (c",
        "sst2=a sst2=b": "the examples of sst2 twice: sst2=a and sst2=b",
        "sst2=nowhere.tsv": "there is no file or folder nowhere.tsv",
    },
    "measure w.safetensors --data ids.bin --length 8 --module": {
        "mine.py": "it must be FILE.py:NAME, a file and a function in it",
        "absent.py:build": "absent.py does not exist",
        "mine.py:nothing": "mine.py has no function nothing",
        "mine.py:number": "mine.py:number returns an object of type int; it must return an nn.Module",
        "mine.py:broken": "mine.py:broken fails: ValueError: no config",
        "mine.py:Both": "is a Both: it sees the tokens that it would predict",
        "mine.py:Loss": "Loss gives no logits of shape",
        "mine.py:Next --control --output out": "cannot be measured: no rescalings are known for the module Next",
    },
    "measure --module mine.py:Both --data ids.bin": {
        "weights": "with --module, a checkpoint is a file of weights; its files are weights/w.pt",
        "mine.py": "its name must end in .safetensors, .pt",
    },
    "compare": {
        "a other-tokens": "a and other-tokens have different tokenizers (",
        "a more": "a has a vocabulary of 317 tokens and more of 320, so a token is not the same",
        "a masked": "a predicts next tokens and masked predicts masked tokens, so they have no inputs in common",
        "a adapter": "adapter is an adapter of ",
    },
    "compare a b": {
        "--data empty.txt": "there is no text in empty.txt",
        "--data short.txt --length 12": "the text in short.txt is shorter than one sequence",
        "--measures loss": "loss is not a measure of flatness: choose",
        "--figure x.gif": "its name must end in .png, .svg, .pdf",
        "--figure text.txt/below/a.svg": "/text.txt/below: Not a directory",
        "--task =mine.csv": "there is no task '=mine.csv': give the name of a task, or",
        "--task sst3": "sst3 is no task of text; did you mean sst2?",
        "--pooling max": "--pooling is 'max'; it must be one of auto, last",
        "--csv bert": "bert is a folder; name a file to write",
        "--output bert": "bert exists and is not an empty folder: choose another name",
        "--output text.txt/below": "cannot write in text.txt/below: Not a directory",
        "--csv a/model.safetensors": "--csv is a/model.safetensors, which is read as an input: name another file",
        "--data text.jsonl --html text.jsonl": "--html is text.jsonl, which is read as an input",
        "--task sst2=labels --csv labels/dev.csv": "--csv is labels/dev.csv, which is read as an inp",
        "--html z --csv ./z": "--html and --csv are the same file, z: give each its own",
        "--same-loss-nats 0": "--same-loss-nats is now called --loss-margin;",
        "--loss-margin 0": "--loss-margin is 0.0; it must be finite and above 0",
    },
    "transfer run": {
        "--task prefix-9": "no task 'prefix-9': choose root or prefix-L with L from 1 to 8",
        "--task A": "no task 'A' (prefix-32)",
        "--task state-2": "no task 'state-2'",
        "--task root --text body": "leave out --text",
        "--task root --language hmm-laptop": "no task 'root'",
        "--task root --output text.txt/below": "cannot write in text.txt/below: Not a directory",
        "--task sst2 --data texts": "has no usable tokenizer",
        "--task sst2 --method lookup": "it has no look-up table",
        "--task sst2 --language pcfg-laptop": "leave out --language",
        "--task stsb": "(it is a regression)",
    },
    "transfer": {
        "reading --task root": "is unknown for text; for a task of text give isoloss transfer --task sst2 --data FOLD",
        "run run --task root": "run is named twice",
        "run hmm --task root": "models of different languages",
        "reader --task root": "its language is not known: add --language",
        "reader --task root --language pcfg-laptop": "reader has 66 token ids, but a model of the language of task "
        "root has 34: reader is a model of another language",
        "run --task spam --data mails.csv --text body --label kind --tokenizer reader": "knows 34 ids: the tokenizer "
        "belongs to another model",
        "reader --task spam --data mails.csv": "mails.csv has no column 'text'; it has body, kind",
        "reader --task spam --data mails.csv --text body --label kind --pair head": "has no column 'head'",
        "hmm --task state-2 --method finetune --num-train 3 --num-test 9 --warmup-steps 200": "lower it",
    },
    "expand": {
        "run --into d8": "there is no model size 'd8'",
        "run --into d24": "there is no model size 'd24'",
        "wide --into d32 --data ids.npy": "a GPT2LMHeadModel cannot be expanded; the architectures are BertFor",
        "reader --into d128": "is not a checkpoint of a run, so there is no language to measure it on: add --data",
        "begun --into d128": "begun has no checkpoint yet",
    },
    "text": {"python-docs precious": "precious exists and is not an empty folder"},
    "tokenizer": {
        "texts --output out": "texts holds no .txt or .jsonl file",
        "blank.txt --output out": "there is no text in blank.txt",
        "book.txt --output out --vocab-size 5": "at least 6",
        "book.txt --output out --kind bpe --vocab-size 260": "at least 261",
    },
    "theory": {
        "sgd-flow --figure text.txt/below/a.svg": "/text.txt/below: Not a directory",
        "bartlett --figure a.gif": "--figure is a.gif; its name must end in",
        "sgd-flow --figure a.gif": "--figure is a.gif; its name must end in",
        "brackets --figure a.gif": "--figure is a.gif; its name must end in",
        "bartlett --length 5": "length is 5",
        "bartlett --directions -1": "directions is -1",
        "sgd-flow --trajectories 1": "trajectories is 1",
        "sgd-flow --start 10": "the step size 0.1 is too large",
        "sgd-flow --model masked-lm --start 3": "of the model two-parameters, not",
        "brackets --lengths 5": "the lengths are 5; choose from 4, 6, 8, 10",
    },
    "study": {
        "status other-loss": "same-loss",
        "status same-loss --scale galaxy": "laptop",
        "status run": "run is a run, not a study: isoloss show run says what it holds",
        "verify run": "run is a run, not a study: isoloss show run says what it holds",
        "verify same-loss --folder precious": "precious is not empty and holds no study: choose another --folder",
        "verify same-loss --folder absent": "absent holds no study: isoloss study run same-loss --scale",
        "run same-loss --scale smoke --folder run": "run is a run and cannot hold a study",
        "run same-loss --scale smoke --folder run/study": "run/study is inside the run ",
        "run same-loss --scale smoke --folder precious": "precious is not empty and holds no study",
        "report same-loss --scale smoke --folder run": "run is a run and cannot hold a study",
        "report same-loss --scale smoke --folder absent": "isoloss study run same-loss --scale smoke",
        "status same-loss --scale smoke --folder absent": "absent holds no study: isoloss study run same-loss --scale "
        "smoke --folder absent starts",
    },
}
WRITTEN = """
from neighbor import VALUE
from torch import nn

def number():
    return VALUE

def broken():
    raise ValueError("no config")

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)

    def forward(self, ids):
        return self.head(self.tokens(ids).flip(1))

class Next(Both):
    def forward(self, ids):
        return self.head(self.tokens(ids))

class Loss(Both):
    def forward(self, ids):
        return self.head(self.tokens(ids)).mean()
"""
FILES = {
    "text.txt": "some text\n",
    "book.txt": "It was the best of times.\n",
    "blank.txt": " \n",
    "short.txt": "the house",
    "empty.txt": "",
    "text.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in small.documents()),
    "wrong.toml": 'kind = "pcfg"\nlevel = 3\n',
    "untyped.toml": 'kind = "pcfg"\nlevels = "3"\n',
    "stages.toml": '[language]\nkind = "brackets"\n[[stages]]\nstep = 5\n',
    "mine.py": WRITTEN,
    "neighbor.py": "VALUE = 3\n",
    "mails.csv": "body,kind\n" + "bv jz,spam\ncw jz,ham\n" * 9,
    "sst2/train.tsv": "sentence\tlabel\n" + "".join(f"bv {i}\t{i % 2}\n" for i in range(70)),
    "sst2/dev.tsv": "sentence\tlabel\n" + "".join(f"cw {i}\t{i % 2}\n" for i in range(40)),
    "precious/data": "data",
    "labels/dev.csv": "",
    "weights/w.pt": "",
    "checkpoint/config.json": "{}",
    "checkpoint/model.safetensors": "",
    "bare/config.json": "{}",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, trained, words):
    """The folder in which the commands run."""
    folder = tmp_path_factory.mktemp("refused")
    for name in ("other", "texts", "runs/first/checkpoints/step-100"):
        (folder / name).mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, "##u"]) + "\n")
    shutil.copytree(trained, folder / "run")
    (folder / "begun").mkdir()
    shutil.copy(trained / "run.json", folder / "begun")
    few = ("--size", "d16", "--steps", "2", "--batch-size", "8", "--threads", "1")
    texts = [" ".join(words[i:] + words[:i]) for i in range(20)]
    (folder / "words.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    text = (str(folder / "words.jsonl"), "--tokenizer", str(folder / "vocab.txt"), "--length", "12")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOLOSS_CACHE", str(tmp_path_factory.mktemp("cache")))
        for name, language in (("hmm", ["hmm-laptop"]), ("reading", text)):
            assert main(["train", str(folder / name), "--language", *language, *few]) == 0
    StudyFolder(STUDY, folder / "study", "smoke").prepare()
    with quiet():
        _save_models(folder)
    ids = np.random.default_rng(0).integers(0, 5, (12, 8))
    np.save(folder / "ids.npy", ids)
    ids.astype(np.uint16).tofile(folder / "ids.bin")
    weights = {"tokens.weight": torch.randn(5, 3), "head.weight": torch.randn(5, 3)}
    save_file(weights, folder / "w.safetensors")
    return folder


def _save_models(folder):
    """GPT-2s a and b with one tokenizer, others that do not go with them, and BERTs of three kinds."""
    tokenizer, other = small.byte_level(), small.byte_level(special=small.SPECIAL[::-1])
    reader, size = load_tokenizer(str(folder / "vocab.txt")), len(tokenizer)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    made = {
        "a": (small.gpt2(size), tokenizer),
        "b": (small.gpt2(size, 1), tokenizer),
        "wide": (small.gpt2(size, width=12), tokenizer),
        "more": (small.gpt2(size + 3), tokenizer),
        "other": (small.gpt2(size), other),
        "masked": (small.bert(size), tokenizer),
        "bert": (BertForMaskedLM(BertConfig(vocab_size=20, **shape)), None),
        "classifier": (BertForSequenceClassification(BertConfig(vocab_size=20, **shape)), None),
        "reader": (BertForMaskedLM(BertConfig(vocab_size=len(reader), **shape)), reader),
    }
    for name, (model, its_tokenizer) in made.items():
        where = folder / ("other-tokens" if name == "other" else name)
        model.save_pretrained(where)
        if its_tokenizer is not None:
            its_tokenizer.save_pretrained(where)
    (folder / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(folder / "a")}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep the tokens of texts away from the folder."""
    monkeypatch.setenv("ISOLOSS_CACHE", str(tmp_path))


def commands(table):
    return {f"{start} {rest}".strip(): message for start, rows in table.items() for rest, message in rows.items()}


def contents(folder):
    """The files and when they were written, without locks and what Python compiles."""
    files = (path for path in folder.rglob("*") if path.name[0] != "." and path.suffix != ".pyc")
    return {path: path.stat().st_mtime_ns for path in files if path.is_file()}


PROBE = """
import contextlib, io, json, sys, time

class NoTorch:
    def find_spec(name, path, target=None):
        if name == "torch":
            raise ImportError("torch is imported")

sys.meta_path.insert(0, NoTorch)
from isoloss.cli.main import main
message = []
for words in json.load(sys.stdin):
    start = time.process_time()
    with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.redirect_stdout(io.StringIO()) as stdout:
        try:
            status = main(words)
        except ImportError:
            status = "imported torch"
    assert "torch" not in sys.modules
    message.append([status, stderr.getvalue(), stdout.getvalue(), time.process_time() - start])
print(json.dumps(message))
"""


@pytest.fixture(scope="module")
def early_messages(place):
    asked = json.dumps([shlex.split(command) for command in commands(EARLY)])
    # nobody answers there
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(place / "hub")}
    before, command = contents(place), [sys.executable, "-c", PROBE]
    done = subprocess.run(command, input=asked, cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert contents(place) == before
    return dict(zip(commands(EARLY), json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("command", commands(EARLY))
def test_a_mistake_is_refused_before_torch_is_imported(early_messages, command):
    status, message, output, seconds = early_messages[command]
    assert status == 2, message
    assert commands(EARLY)[command] in message
    assert message.count("\n") == 1
    assert output == ""
    # the first one imports what all need
    assert seconds < 2


@pytest.mark.parametrize("command", commands(LATE))
def test_bad_input_gets_one_sentence_and_leaves_nothing(place, capsys, command):
    before = contents(place)
    with contextlib.chdir(place):
        assert commands(LATE)[command] in refusal(capsys, *shlex.split(command))
    assert contents(place) == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("measur checkpoint", "no subcommand 'measur'; did you mean measure? the subcommands are ls, sample,"),
        ("eval runs/first", "eval is now isoloss measure, with the same options"),
        ("flatness a", "flatness is now isoloss measure for one model, isoloss compare for several, with the same"),
    ],
)
def test_unknown_and_renamed_subcommands_name_the_right_one(capsys, command, message):
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"isoloss: {message}")
