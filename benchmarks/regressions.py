"""Whether this tree is as fast as another build of isoloss, and its numbers are the same.

    python benchmarks/regressions.py dist/isoloss-0.1.0-py3-none-any.whl
    python benchmarks/regressions.py HEAD~1

Each build has a process of its own, with the same libraries. They take turns, and the clock is the process's own
processor time. The fastest turns are compared, which other work on the machine has slowed down least. The check fails
where this tree takes more than 1.1 times the other's time, or where a number differs by more than 1e-9 of it.

The tasks use public names only, so that older builds run them too, and all but the training are in float64:
tests/test_known_values.py has their numbers, which hold for every supported version of the libraries.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

for _name in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{_name}_NUM_THREADS"] = "1"  # before the libraries are loaded

import torch  # noqa: E402
from torch import nn  # noqa: E402
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel  # noqa: E402

import isoloss  # noqa: E402
from isoloss.flatness import Rounding, loss_rises  # noqa: E402
from isoloss.run_config import ModelConfig, TrainConfig  # noqa: E402

ROOT = Path(__file__).parents[1]
SLOWER, TOLERANCE, ROUNDS = 1.10, 1e-9, 9
VOCABULARY, LENGTH, WIDTH, LAYERS, SEQUENCES, BATCH = 512, 64, 64, 2, 64, 16
Numbers = dict[str, float]


def generator(seed: int) -> torch.Generator:
    """Return a generator that does not depend on the build."""
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def model_of(kind: str) -> nn.Module:
    """Return a model in float64 with weights of our own: those of transformers differ between its versions."""
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "attn_implementation": "eager"}
    if kind == "GPT-2":
        sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2, "n_positions": LENGTH}
        model: nn.Module = GPT2LMHeadModel(GPT2Config(**common, **sizes, bos_token_id=None, eos_token_id=None))
    else:
        sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
        sizes |= {"intermediate_size": 4 * WIDTH, "max_position_embeddings": LENGTH}
        model = BertForMaskedLM(BertConfig(**common, **sizes))
    draws = generator(0)
    for _, weight in sorted(model.double().named_parameters()):
        middle = 0.0 if weight.ndim == 2 else 1.0  # biases of 1 are as good as those of 0
        weight.copy_(middle + 0.1 * torch.randn(weight.shape, generator=draws, dtype=torch.float64))
    return model.eval()


def batches(kind: str) -> list[dict[str, torch.Tensor]]:
    """Return random sequences: of a masked model, each seventh token is predicted."""
    ids = torch.randint(1, VOCABULARY, (SEQUENCES, LENGTH), generator=generator(1))
    labels = ids.clone()
    if kind == "BERT":
        predicted = torch.arange(LENGTH) % 7 == 0
        labels[:, ~predicted] = -100
        ids = ids.masked_fill(predicted, 0)
    return [{"input_ids": i, "labels": each} for i, each in zip(ids.split(BATCH), labels.split(BATCH), strict=True)]


def trace(kind: str, **options: Any) -> Callable[[], Numbers]:
    """Return what measures a trace."""
    model, data = model_of(kind), batches(kind)

    def run() -> Numbers:
        found = isoloss.fisher_trace(model, data, **options)
        return {"trace": found.value, "stderr": found.stderr}

    return run


def rises() -> Callable[[], Numbers]:
    """Return what measures how far a loss rises."""
    model, data = model_of("GPT-2"), batches("GPT-2")
    changes = {"int4": Rounding(bits=4)}

    def run() -> Numbers:
        found = loss_rises(model, data, changes)
        return {f"{name} {part}": getattr(found[name], part) for name in found for part in ("value", "stderr")}

    return run


def conditionals(name: str) -> Callable[[], Numbers]:
    """Return what computes exact conditionals of a language: of the masked and of the next token."""
    language = isoloss.load_language(name).to(dtype=torch.float64)
    tokens, lengths, _ = language.sample(2000, generator=generator(2))
    inside = torch.arange(tokens.shape[1]) < lengths[:, None]
    weights = torch.rand(language.vocab_size, generator=generator(3), dtype=torch.float64)

    def run() -> Numbers:
        masked = language.log_conditionals(tokens, lengths)
        following = language.log_next(tokens, lengths)
        # with a weight for each token, so that a probability at the wrong token is seen
        both = {"masked": masked, "next": following}
        return {name: (logs[inside].exp() @ weights).mean().item() for name, logs in both.items()}

    return run


def training() -> Callable[[], Numbers]:
    """Return what trains a small BERT."""
    language = isoloss.load_language("pcfg-laptop")
    config = TrainConfig(
        language=language.config, model=ModelConfig(size="d32"), steps=100, batch_size=64, device="cpu", threads=1
    )

    def run() -> Numbers:
        with tempfile.TemporaryDirectory() as folder:
            isoloss.pretrain(f"{folder}/run", config, language=language)
            last = Path(folder, "run", "metrics.jsonl").read_text().splitlines()[-1]
        return {"loss": json.loads(last)["loss_nats"]}

    return run


TASKS: dict[str, Callable[[], Callable[[], Numbers]]] = {
    "trace of a GPT-2": lambda: trace("GPT-2"),
    "trace of a BERT": lambda: trace("BERT"),
    "minimal trace of a GPT-2": lambda: trace("GPT-2", rescaling="minimal"),
    "loss and rise of a GPT-2": rises,
    "conditionals of a grammar": lambda: conditionals("pcfg-paper"),
    "conditionals of an HMM": lambda: conditionals("hmm-paper"),
    "training a BERT": training,
}


def work() -> None:
    """Carry out the tasks whose names come in, one a line, and answer each with its seconds and numbers."""
    print(json.dumps(str(Path(isoloss.__file__).parents[1])), flush=True)
    ready = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in ready:
            ready[name] = TASKS[name]()
            ready[name]()  # compiles
        before = time.process_time()
        numbers = ready[name]()
        print(json.dumps({"seconds": time.process_time() - before, "numbers": numbers}), flush=True)


class Build:
    """A process in which a build of isoloss carries out tasks."""

    def __init__(self, packages: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(packages)}
        command = [sys.executable, __file__, "--work"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if (found := self._answer()) != str(packages):
            raise SystemExit(f"isoloss was imported from {found} in place of {packages}")

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of {Path(__file__).name} ended; its error is above")
        return json.loads(line)

    def run(self, task: str) -> dict[str, Any]:
        """Return the seconds and the numbers of a task."""
        assert self._process.stdin is not None
        print(task, file=self._process.stdin, flush=True)
        answer: dict[str, Any] = self._answer()
        return answer


def unpack(build: str, folder: Path) -> Path:
    """Return the folder of packages of a wheel, or of a commit of this repository."""
    if build.endswith(".whl"):
        if not Path(build).is_file():
            raise SystemExit(f"there is no wheel {build}")
        with zipfile.ZipFile(build) as files:
            files.extractall(folder)
        return folder
    done = subprocess.run(["git", "archive", build, "src"], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{build} is neither a wheel (.whl) nor a commit: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder / "src"


def compare(new: Build, old: Build, task: str) -> list[str]:
    """Print how long a task takes, and return what is wrong."""
    seconds: dict[Build, list[float]] = {new: [], old: []}
    ratio = math.inf
    # what seems slower gets more turns: on a busy machine, none of a few may have been fast
    while (number := len(seconds[new])) < ROUNDS or (ratio > SLOWER and number < 3 * ROUNDS):
        turns = [new, old] if number % 2 else [old, new]
        answers = {build: build.run(task) for build in turns}
        for build, answer in answers.items():
            seconds[build].append(answer["seconds"])
        ratio = min(seconds[new]) / min(seconds[old])
    ranges = [f"{min(taken):.2f} to {max(taken):.2f} s" for taken in seconds.values()]
    print(f"{task:26}{ratio:5.2f}   {ranges[0]} against {ranges[1]}", flush=True)
    wrong = [f"{task}: {ratio:.2f} times the other build's time"] if ratio > SLOWER else []
    numbers = {build: answer["numbers"] for build, answer in answers.items()}
    if numbers[new].keys() != numbers[old].keys():
        names = [", ".join(numbers[build]) for build in (new, old)]
        return [*wrong, f"{task}: the numbers are {names[0]}, the other build's {names[1]}"]
    for name, value in numbers[new].items():
        if not math.isclose(value, other := numbers[old][name], rel_tol=TOLERANCE):
            wrong.append(f"{task}: {name} is {value!r}, the other build's {other!r}")
    return wrong


def main() -> int:
    """Compare, and return 1 if something is slower or different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", help="a wheel, or a commit of this repository")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.work:
        work()
        return 0
    if not options.build:
        parser.error("name the wheel of the last release, or a commit, to compare this tree with")
    with tempfile.TemporaryDirectory() as folder:
        packages = unpack(options.build, Path(folder))
        new, old = Build(ROOT / "src"), Build(packages)
        name = Path(options.build).name
        print(f"{len(TASKS)} tasks, {ROUNDS} turns or more each: minutes, more on a busy machine")
        print(f"Processor time of this tree over that of {name}: the fastest turns, and their range")
        wrong = [line for task in TASKS for line in compare(new, old, task)]
    print("\n".join(wrong) or f"No task takes {SLOWER} times as long, and all numbers agree to {TOLERANCE:.0e}.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
