"""`isoloss suite`: processor seconds and peak memory, beside lm-evaluation-harness and devinterp on the same model.

Suites of 10, 60 and 200 checkpoints of a GPT-2 of 11,200 parameters are measured with the default measures, on 24
sequences of 32 tokens, by two workers. By turns, lm-evaluation-harness runs a task of 200 items on one of these
checkpoints, and isoloss and devinterp estimate its local learning coefficient at the same step, draws and batch, on 256
sequences of 16 tokens. Each is a process of its own, imports included. isoloss samples a second time at half the step,
with twice the draws; where it refuses the chains as not converged, they have taken as long.

lm-evaluation-harness and devinterp are taken from environments of their own:

    LM_EVAL_PYTHON=.venv-lm-eval/bin/python DEVINTERP_PYTHON=.venv-devinterp/bin/python python benchmarks/suite.py
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from learning_coefficient import BATCH, CHAINS, LENGTH, LOCALIZATION, SEQUENCES, STEP_SIZES
from timing import heading, record_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from isoloss.files import write_text

RESULTS = Path(__file__).parent / "results"
SUITES = {10: (5, 2), 60: (5, 12), 200: (10, 20)}  # seeds and steps
DRAWS = 50  # of each chain, and as many steps before these
ITEMS, ROUNDS, LAST = 200, 2, "200/seed0-step0"
_SUBREAPER = 36  # of prctl: processes that outlive a command become children of this one, which waits for them
TASK = """task: items
dataset_path: json
dataset_kwargs: {data_files: {test: items.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_target: gold
doc_to_choice: choices
metric_list: [{metric: acc}]
"""
THEIRS = """
import learning_coefficient, numpy, torch, transformers
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained({model!r}, dtype=torch.float32)
ids = torch.from_numpy(numpy.load("ids.npy")).long()
learning_coefficient.DRAWS = learning_coefficient.BURN_IN = {draws}
print(*learning_coefficient.theirs(model.eval(), ids, {step!r}))
"""


class Cost(NamedTuple):
    """What a command took with all processes that it started."""

    seconds: float  # of all processors
    main: float  # MiB, the largest resident set of the command's own process
    largest: float  # and of any other


def cost(folder: Path, *words: object) -> Cost:
    """Run a command in a folder, on one thread a process."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    places = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environment = {
        **os.environ,
        "PYTHONPATH": places,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
    }
    with open(folder / "log.txt", "w") as log:
        command = subprocess.Popen([*map(str, words)], cwd=folder, env=environment, stdout=log, stderr=log)
        seconds, peaks = 0.0, {True: 0.0, False: 0.0}
        while True:
            try:
                number, status, usage = os.wait4(-1, 0)
            except ChildProcessError:
                break
            is_main = number == command.pid
            said = (folder / "log.txt").read_text()
            if is_main and status and "have not converged" not in said:
                raise RuntimeError(said[-2000:])
            seconds += usage.ru_utime + usage.ru_stime
            peaks[is_main] = max(peaks[is_main], usage.ru_maxrss / 1024)
    return Cost(seconds, peaks[True], peaks[False])


def write_inputs(folder: Path) -> None:
    """Write the checkpoints, token ids, and a task of two choices."""
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="Ċ", pad_token="Ċ")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = GPT2Config(vocab_size=len(alphabet()), bos_token_id=None, eos_token_id=0, **sizes)
    for number, (seeds, steps) in SUITES.items():
        for seed in range(seeds):
            for step in range(steps):
                torch.manual_seed(1000 * seed + step)
                place = folder / str(number) / f"seed{seed}-step{step}"
                GPT2LMHeadModel(config).save_pretrained(place)
                tokenizer.save_pretrained(place)
    draws = random.Random(0)
    words = ["river", "table", "letter", "engine", "garden", "winter", "story", "window"]
    items = [{"query": " ".join(draws.choices(words, k=5)), "choices": draws.sample(words, 2)} for _ in range(ITEMS)]
    lines = [json.dumps({**item, "gold": draws.randrange(2)}) for item in items]
    (folder / "text.txt").write_text("\n\n".join(" ".join(draws.choices(words, k=40)) for _ in range(300)))
    (folder / "items.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "items.yaml").write_text(TASK)
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(0, len(alphabet()), (SEQUENCES, LENGTH)))


def alphabet() -> list[str]:
    """Return the 256 characters that stand for bytes."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def suites(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what a suite of each size takes."""
    for number in SUITES:
        words = ("suite", f"{number}/seed{{seed}}-step{{step}}", "--data", "text.txt", "--length", 32)
        found = cost(
            folder, sys.executable, "-m", "isoloss", *words, "--num-sequences", 24, "--output", f"suite-{number}"
        )
        page = (folder / f"suite-{number}" / "index.html").stat().st_size
        yield {"checkpoints": number, **found._asdict(), "a_checkpoint": found.seconds / number, "page": page}


def contenders() -> dict[str, tuple[object, ...]]:
    """Return the commands that take turns, by what they do; others than isoloss's where they are installed."""
    llc = ("--llc-localization", LOCALIZATION, "--llc-step-size", STEP_SIZES[0], "--llc-chains", CHAINS)
    llc += ("--llc-draws", DRAWS, "--llc-burn-in", DRAWS, "--llc-batch-size", BATCH, "--num-sequences", SEQUENCES)
    measure = (sys.executable, "-m", "isoloss", "measure", LAST, "--threads", 1, "--data")
    found: dict[str, tuple[object, ...]] = {}
    if python := os.environ.get("LM_EVAL_PYTHON"):
        model = ("--model", "hf", "--model_args", f"pretrained={LAST},dtype=float32", "--device", "cpu")
        task = ("--tasks", "items", "--include_path", ".", "--batch_size", 16, "--output_path", "lm", "--log_samples")
        found["lm-evaluation-harness: a task of 200 items"] = (python, "-m", "lm_eval", "run", *model, *task)
    ours = "isoloss: local learning coefficient, at the step and at half of it"
    found[ours] = (*measure, "ids.npy", "--measures", "llc", *llc)
    if python := os.environ.get("DEVINTERP_PYTHON"):
        code = THEIRS.format(model=LAST, step=STEP_SIZES[0], draws=DRAWS)
        found["devinterp: local learning coefficient, at the step"] = (python, "-c", code)
    return found


def page(record: dict[str, Any]) -> str:
    """Return the tables of a record."""
    lines = heading("`isoloss suite`: processor time and memory", record)
    lines += [" ".join((__doc__ or "").split("\n\n")[1].split()), ""]
    lines += ["Seconds are processor time of all processes together; other work on the machine does not count.", ""]
    lines += ["| checkpoints | CPU s | CPU s a checkpoint | main process, MiB | largest worker, MiB | page, MB |"]
    lines += ["|---:|---:|---:|---:|---:|---:|"]
    for row in record["suites"]:
        cells = [f"{row['checkpoints']}", f"{row['seconds']:.0f}", f"{row['a_checkpoint']:.2f}"]
        cells += [f"{row['main']:.0f}", f"{row['largest']:.0f}", f"{row['page'] / 1e6:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "A worker's memory includes what it shares with the others: the libraries, loaded once.", ""]
    lines += [f"One checkpoint, by turns, {ROUNDS} rounds (median and range):", ""]
    lines += ["| who and what | CPU s | largest process, MiB |", "|---|---:|---:|"]
    for row in record["beside"]:
        taken = row["seconds"]
        seconds = f"{statistics.median(taken):.1f} ({min(taken):.1f} to {max(taken):.1f})"
        lines.append(f"| {row['what']} | {seconds} | {row['memory']:.0f} |")
    return "\n".join(lines) + "\n"


def version_of(python: str | None, name: str) -> str:
    """Return the version of a library in another environment."""
    code = f"import importlib.metadata as metadata; print(metadata.version({name!r}))"
    return subprocess.check_output([python, "-c", code], text=True).strip() if python else "not installed"


def main() -> None:
    """Measure, and write the result."""
    record = record_of("suite.py", ("isoloss", "torch", "transformers"))
    for name, variable in (("lm_eval", "LM_EVAL_PYTHON"), ("devinterp", "DEVINTERP_PYTHON")):
        record["versions"][name] = version_of(os.environ.get(variable), name)
    system = f"{platform.system()}, Python {platform.python_version()}"
    record["machine"] = f"A machine with {os.cpu_count()} {platform.machine()} cores, busy with other work; {system}"
    record |= {"suites": [], "beside": []}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        write_inputs(folder)
        taken: dict[str, list[Cost]] = {name: [] for name in contenders()}
        for _ in range(ROUNDS):
            for name, words in contenders().items():
                taken[name].append(cost(folder, *words))
                print(name, taken[name][-1], flush=True)
        for name, costs in taken.items():
            memory = max(max(each.main, each.largest) for each in costs)
            record["beside"].append({"what": name, "seconds": [each.seconds for each in costs], "memory": memory})
        for row in suites(folder):
            record["suites"].append(row)
            write_text(RESULTS / "suite.json", json.dumps(record, indent=1) + "\n")
            write_text(RESULTS / "suite.md", page(record))
    print(page(record))


if __name__ == "__main__":
    main()
