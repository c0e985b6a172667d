"""Pre-training against transformers.Trainer and a hand-written loop: tokens per second of one thread.

And what each of our choices gives. The same model, the same sentences with the same masks, the same batch. The
contenders take turns, each Trainer, each hand-written loop and our own run in a process of its own, which nobody else's
settings reach. The Trainer and the hand-written loop get their batches drawn and collated beforehand; ours draws its
own as it goes. Nothing is timed unless the hand-written model has our loss and its gradient, at the same weights.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

for _name in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{_name}_NUM_THREADS"] = "1"  # before the libraries are loaded

import torch  # noqa: E402
from plain_loop import PlainBERT, plain_batch, plain_loop  # noqa: E402
from pretraining_page import page  # noqa: E402
from processes import processes  # noqa: E402
from timing import machine, versions  # noqa: E402
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from isoloss.files import write_text  # noqa: E402
from isoloss.lab.languages.config import PRESETS  # noqa: E402
from isoloss.lab.models import bert  # noqa: E402
from isoloss.lab.models.make import make_model  # noqa: E402
from isoloss.lab.training.objectives import prediction_loss, training_batch  # noqa: E402
from isoloss.lab.training.process import process_settings  # noqa: E402
from isoloss.lab.training.train import train  # noqa: E402
from isoloss.registry import MODELS  # noqa: E402
from isoloss.run_config import ModelConfig, ObjectiveConfig, OptimizerConfig, TrainConfig  # noqa: E402
from isoloss.runs import Run  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("isoloss", "torch", "transformers", "accelerate", "numpy", "numba")
LANGUAGE = PRESETS["hmm-paper"][0]  # sentences of 16 tokens, 200 of them
CPU = torch.device("cpu")
WARM_UP = 3  # steps at the start of each turn that are not counted
OURS = "isoloss train --no-compiled"


@dataclass(frozen=True)
class Choices:
    """What our training step does, each of which can be undone."""

    head: str = "masked"
    dropout: str = "fast"
    optimizer: str = "fused"
    padding: str = "none"
    attention: str = "eager"
    queries: str = "masked"
    memory: str = "kept"
    precision: str = "float32"


UNDONE = {
    "queries, keys and values of the last layer at every position": {"queries": "all"},
    "head at every position, as the model's own forward": {"head": "all"},
    "memory given back to the system": {"memory": "returned"},
    "torch's dropout": {"dropout": "torch"},
    "AdamW by foreach": {"optimizer": "foreach"},
    "AdamW parameter by parameter": {"optimizer": "loop"},
    "an attention mask of ones": {"padding": "mask"},
    "attention by sdpa": {"attention": "sdpa"},
    "bfloat16": {"precision": "bfloat16"},
}


class StepTimes(TrainerCallback):
    """Notes the process's time at the start of every step of the Trainer."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the time."""
        self.times.append(time.process_time())


class Timed:
    """A language that notes the process's time at every batch."""

    def __init__(self, language: Any) -> None:
        self._language, self.times = language, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._language, name)

    def batch(self, step: int, n: int, *, seed: int) -> Any:
        """Note the time and return the batch."""
        self.times.append(time.process_time())
        return self._language.batch(step, n, seed=seed)


class Workload:
    """One size and batch: its contenders, each a function from a number of steps to the seconds of each."""

    def __init__(self, architecture: str, size: str, batch_size: int) -> None:
        self.language = LANGUAGE.build()
        self.architecture = MODELS.load(architecture)
        self.config = TrainConfig(
            language=LANGUAGE,
            model=ModelConfig(architecture=architecture, size=size),
            objective=ObjectiveConfig(kind=self.architecture.objective),
            optimizer=OptimizerConfig(warmup_steps=100),
            batch_size=batch_size,
            device="cpu",
            threads=1,
            save_every_seconds=1e9,
        )

    @property
    def is_causal(self) -> bool:
        """Whether each token is predicted from those before it."""
        return self.architecture.objective == "causal"

    def contenders(self) -> dict[str, Callable[[int], list[float]]]:
        """Return them by name, first the one that the others are compared with."""
        trainer = self.trainer
        trainers = {
            "transformers.Trainer, eager": partial(trainer, attention="eager"),
            "transformers.Trainer, sdpa": partial(trainer, attention="sdpa"),
            "transformers.Trainer, eager, bfloat16": partial(trainer, attention="eager", bf16=True),
            "transformers.Trainer around our model and loss": partial(trainer, attention="eager", loss="ours"),
        }
        if self.is_causal:
            return {OURS: self.ours, **trainers}
        return {
            OURS: self.ours,
            "isoloss train --compiled": partial(self.ours, compiled=True),
            "the same step in a bare loop": self.bare(Choices()),
            **{f"bare loop, but {name}": self.bare(replace(Choices(), **change)) for name, change in UNDONE.items()},
            **trainers,
            "hand-written torch loop, eager": self.plain(sdpa=False),
            "hand-written torch loop, sdpa": self.plain(sdpa=True),
            "hand-written torch loop, sdpa, torch.compile": self.plain(sdpa=True, compiled=True),
        }

    def check_peers(self) -> None:
        """Raise a `SystemExit` unless the peers' models have our loss and its gradient, without dropout."""
        config = replace(self.config.model, dropout=0.0)
        batch, _ = training_batch(self.language, self.config, 1, CPU)
        ours = make_model(config, self.language, seed=0)
        loss = prediction_loss(ours, batch, causal=self.is_causal)
        loss.backward()
        own = self._model(False).eval()(**batch).loss
        if (loss - own).abs() > 1e-4 * loss:
            raise SystemExit("transformers' model does not have our loss: nothing was timed")
        if self.is_causal:
            return
        for sdpa in (False, True):
            plain = PlainBERT(ours, sdpa=sdpa).train()
            other = plain(plain_batch(batch))
            other.backward()
            pairs = [
                (loss, other),
                (ours.get_input_embeddings().weight.grad, plain.tokens.weight.grad),
                (ours.bert.encoder.layer[0].intermediate.dense.weight.grad, plain.blocks[0].inner.weight.grad),
            ]
            for mine, theirs in pairs:
                if (mine - theirs).abs().max() > 1e-4 * mine.abs().max():
                    raise SystemExit("the hand-written model does not compute what ours does: nothing was timed")

    def plain(self, *, sdpa: bool, compiled: bool = False) -> Callable[[int], list[float]]:
        """Return the hand-written loop, whose batches are in memory; its model is made when it first runs."""

        @cache
        def made() -> tuple[Any, torch.optim.Optimizer]:
            model = PlainBERT(self._model(False), sdpa=sdpa).train()
            config = self.config.optimizer
            settings = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "fused": True}
            optimizer = torch.optim.AdamW(model.parameters(), **settings)
            return torch.compile(model) if compiled else model, optimizer

        def run(steps: int) -> list[float]:
            numbers = range(1, steps + 1)
            batches = [
                plain_batch(training_batch(self.language, self.config, number, CPU).inputs) for number in numbers
            ]
            return differences(plain_loop(*made(), batches))

        return run

    def ours(self, steps: int, *, compiled: bool = False) -> list[float]:
        """Train a run, from an empty directory to its last step."""
        language = Timed(self.language)
        with tempfile.TemporaryDirectory() as folder:
            train(Run(Path(folder) / "run"), replace(self.config, steps=steps, compiled=compiled), language)
        return differences(language.times)

    def bare(self, choices: Choices) -> Callable[[int], list[float]]:
        """Return a plain loop of our step with some choices undone; its model is made when it first runs."""

        @cache
        def made() -> tuple[Any, torch.optim.Optimizer]:
            model = self._model(choices.dropout == "fast")
            model.set_attn_implementation(choices.attention)
            kinds = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
            return model, torch.optim.AdamW(model.parameters(), **kinds[choices.optimizer])

        def run(steps: int) -> list[float]:
            with contextlib.ExitStack() as stack:
                if choices.memory == "kept":
                    stack.enter_context(process_settings(1, CPU))
                if choices.queries == "all":
                    stack.enter_context(mock.patch.object(bert, "_attend_from_one", _attend_from_all))
                return loop(steps)

        def loop(steps: int) -> list[float]:
            times = []
            model, optimizer = made()
            for number in range(1, steps + 1):
                times.append(time.process_time())
                batch, _ = training_batch(self.language, self.config, number, CPU)
                if choices.padding == "mask":
                    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
                own = choices.head == "masked"
                if own:
                    loss = prediction_loss(model, batch, causal=self.is_causal, precision=choices.precision)
                else:
                    loss = model(**batch).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss.item()
            return differences(times)

        return run

    def _model(self, is_ours: bool) -> Any:
        """Return the model of `isoloss train`, or the same one as transformers has it."""
        if is_ours:
            return make_model(self.config.model, self.language, seed=0)
        ids = {"vocab_size": self.language.model_vocab_size, "pad_id": self.language.pad_id}
        return self.architecture.new_model(self.config.model, max_length=self.language.max_length, seed=0, **ids)

    def trainer(self, steps: int, *, attention: str, loss: str = "own", bf16: bool = False) -> list[float]:
        """Train with the Trainer, on the batches of the same steps, which are in memory."""
        config, times = self.config, StepTimes()
        batches = [training_batch(self.language, config, number, CPU).inputs for number in range(1, steps + 1)]
        model = self._model(loss == "ours")
        if loss != "ours":
            for batch in batches:  # as collators give it
                batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        model.set_attn_implementation(attention)
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=1,  # an item of the data set is a whole batch
                max_steps=steps,
                optim="adamw_torch_fused",
                max_grad_norm=0.0,
                learning_rate=config.optimizer.learning_rate,
                weight_decay=config.optimizer.weight_decay,
                warmup_steps=config.optimizer.warmup_steps,
                lr_scheduler_type="constant_with_warmup",
                logging_strategy="no",
                save_strategy="no",
                logging_nan_inf_filter=False,
                dataloader_pin_memory=False,
                disable_tqdm=True,
                report_to=[],
                use_cpu=True,
                bf16=bf16,
            )
            kind = partial(OurLoss, causal=self.is_causal) if loss == "ours" else Trainer
            made = kind(model=model, args=arguments, train_dataset=batches, data_collator=_only, callbacks=[times])
            made.remove_callback(PrinterCallback)
            made.train()
        return differences(times.times)


class OurLoss(Trainer):
    """The Trainer's loop around our forward pass."""

    def __init__(self, *, causal: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.causal = causal

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        """Return our loss."""
        return prediction_loss(model, inputs, causal=self.causal)


def _attend_from_all(module: Any, positions: torch.Tensor, *inputs: Any, **settings: Any) -> tuple[Any, None]:
    return type(module).forward(module, *inputs, **settings)[0][positions], None


def _only(items: list[Any]) -> Any:
    return items[0]


def differences(times: list[float]) -> list[float]:
    """Return the seconds of the steps after the first few."""
    return [after - before for before, after in zip(times[WARM_UP:], times[WARM_UP + 1 :], strict=False)]


def process_of(name: str) -> str:
    """Return the process in which a contender runs: the bare loops that have our memory setting share one."""
    return "bare" if "bare loop" in name and "memory" not in name else name


def contenders(architecture: str, size: str, batch_size: int) -> dict[str, Callable[[int], list[float]]]:
    """Return a workload's contenders, in a process of their own."""
    torch.set_num_threads(1)
    return Workload(architecture, size, batch_size).contenders()


def compare(architecture: str, size: str, batch_size: int, rounds: int, steps: int, beside: str) -> dict[str, Any]:
    """Let the contenders take turns, and return each one's processor seconds a step and ratio to the first one's."""
    workload = Workload(architecture, size, batch_size)
    workload.check_peers()
    names = [name for name in workload.contenders() if name.startswith("isoloss") or beside in name]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with processes({name: process_of(name) for name in names}, contenders, architecture, size, batch_size) as run:
        for number in range(rounds + 1):
            first = number % len(seconds)
            for name in [*names[first:], *names[:first]]:
                taken = run(name, steps if number else 2 * WARM_UP)
                if number:  # the first round loads and compiles
                    seconds[name].append(statistics.median(taken))
            print(f"{size}, batch {batch_size}: round {number} of {rounds}", flush=True)
    rows = []
    for name, values in seconds.items():
        ratios = [theirs / first for theirs, first in zip(values, seconds[OURS], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "name": name,
                "seconds_a_step": statistics.median(values),
                "tokens_per_second": batch_size * LANGUAGE.length / statistics.median(values),
                "slowest": max(values),
                "fastest": min(values),
                "over_first": statistics.median(ratios),
                "over_first_quartiles": [low, high],
            }
        )
    return {"size": size, "batch_size": batch_size, "length": LANGUAGE.length, "rounds": rounds, "results": rows}


def main() -> None:
    """Time and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="bert", help="a name of isoloss ls models")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        default=[40, 40, 16],
        help=f"steps of a turn for each size, the first {WARM_UP} not counted",
    )
    parser.add_argument("--beside", default="", help="time isoloss beside contenders with this in their names alone")
    parser.add_argument("--sizes", nargs="+", default=["d32", "d64", "d128"])
    parser.add_argument("--batches", nargs="+", type=int, default=[128])
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "pretraining.json", help="and the table next to it, .md"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    record = {
        "command": " ".join(["python", "benchmarks/pretraining.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "load": load,
        "versions": versions(LIBRARIES),
        "architecture": options.architecture,
        "workloads": [
            compare(options.architecture, size, batch, options.rounds, steps, options.beside)
            for size, steps in zip(options.sizes, options.steps, strict=True)
            for batch in options.batches
        ],
    }
    write_text(options.output, json.dumps(record, indent=1) + "\n")
    write_text(options.output.with_suffix(".md"), page(record))
    print(page(record))


if __name__ == "__main__":
    main()
