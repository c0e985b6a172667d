"""What the minimal trace costs over the plain one, on one thread: the passes, and what does not grow with the data.

All contenders of a model take turns in one process, and the clock is the process's own processor time, so that other
work on the machine takes no part of it. What a call spends once is timed inside of the same calls.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

for _name in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{_name}_NUM_THREADS"] = "1"  # before the libraries are loaded

import torch  # noqa: E402
from timing import heading, record_of  # noqa: E402
from torch import nn  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from workloads import Batch, Workload, workloads  # noqa: E402

from isoloss.files import write_text  # noqa: E402
from isoloss.flatness import fisher_trace, minimal_trace, rescalings_of  # noqa: E402
from isoloss.seeds import derive  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("isoloss", "torch", "transformers", "numpy", "scipy")
PLAIN = "plain"
GRANULARITIES = ("tensor", "head", "neuron", "channel")
BATCH = 64
LARGE, EVERY = 20_000, 4  # a granularity of more parts takes part in each fourth round only
# what is timed by itself, by its column; none of them calls another
ONCE = {
    "rules": (minimal_trace.MinimalTraceEstimator, "__init__"),
    "program": (minimal_trace.MinimalTraceEstimator, "finish"),
    "check": (minimal_trace, "check_rescaling"),
    "loss change": (minimal_trace.MinimalTraceEstimator, "_loss"),
}


class Llama(Workload):
    """A Llama of the size of the others: untied, keys and values shared by two heads, a gated feed-forward block."""

    def _build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(0, "weights"))
            config = LlamaConfig(
                vocab_size=self.vocab_size,
                hidden_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=344,
                max_position_embeddings=self.length,
                pad_token_id=None,
                bos_token_id=None,
                eos_token_id=None,
                attn_implementation="eager",
            )
            return LlamaForCausalLM(config).eval()


def models() -> dict[str, Workload]:
    """Return the models, untrained, by name."""
    return {**workloads(), "llama": Llama("Llama, 4 layers, d 128, V 1000, 64 tokens", True, 1000, 64)}


@contextlib.contextmanager
def timers() -> Iterator[dict[str, float]]:
    """Yield the processor seconds in each of the functions of `ONCE`, for as long as this is open."""
    seconds = dict.fromkeys(ONCE, 0.0)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            before = time.process_time()
            try:
                return function(*args, **options)
            finally:
                seconds[name] += time.process_time() - before

        return run

    with contextlib.ExitStack() as stack:
        for name, (owner, attribute) in ONCE.items():
            stack.enter_context(mock.patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
        yield seconds


def call(model: nn.Module, batches: list[Batch], contender: str) -> dict[str, float]:
    """Return the processor seconds of one call, and of its parts."""
    options: Any = {} if contender == PLAIN else {"rescaling": "minimal", "granularity": contender}
    with timers() as seconds:
        before = time.process_time()
        fisher_trace(model, batches, **options)
        whole = time.process_time() - before
    return {"whole": whole, "passes": whole - sum(seconds.values()), **seconds}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def compare(workload: Workload, rounds: int, granularities: Sequence[str]) -> dict[str, Any]:
    """Time all contenders on the same sequences, round by round."""
    sequences = 512 if workload.causal else 2048  # all positions of the former are predicted, one of the latter
    batches, names = workload.batches(sequences, BATCH, "timing"), (PLAIN, *granularities)
    shapes = {name: rescalings_of(workload.model, granularity=name).exponents.shape for name in granularities}
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in names}  # by round
    for number in range(rounds + 1):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            if number % EVERY and shapes.get(name, (0,))[0] > LARGE:
                continue
            seconds = call(workload.model, batches, name)
            if number:  # the first round loads what is loaded at first use
                found[name][number] = seconds
    rows = []
    for name, calls in found.items():
        row: dict[str, Any] = {"contender": name, "rounds": len(calls), "seconds": {}, "over_plain": {}}
        for part in ("whole", "passes", *ONCE):
            row["seconds"][part] = mean_and_error([each[part] for each in calls.values()])
        for part in ("whole", "passes"):
            ratios = [each[part] / found[PLAIN][number]["whole"] for number, each in calls.items()]
            row["over_plain"][part] = mean_and_error(ratios)
        if name != PLAIN:
            row["parts"], row["generators"] = shapes[name]
        rows.append(row)
    return {"model": workload.name, "sequences": sequences, "rounds": rounds, "results": rows}


def page(record: Mapping[str, Any]) -> str:
    """Return the results as a page in Markdown."""
    lines = [
        *heading("The minimal trace: its cost over the plain one, on one thread", dict(record)),
        "Processor time of one process, in which all contenders take turns on the same sequences: the mean of the "
        "rounds ± its standard error. The machine is shared; the time of other processes does not count. Ratios are "
        "means of each round's ratio. A whole call has its fixed costs in it, which the columns after it give in "
        "milliseconds: the family's rules and exponents (rules); the convex program, cross-fitted (program); the "
        "comparison of the predictions of two sequences in float64 (check); and the change of the loss of 8 sequences "
        "(loss change). The passes are the rest, which grows with the sequences.",
        "",
    ]
    for model in record["models"]:
        lines += [
            f"## {model['model']}",
            "",
            f"{model['sequences']:,} sequences.",
            "",
            "| trace | parts | rescalings | rounds | whole call, s | over plain | passes, over plain | "
            f"{', ms | '.join(ONCE)}, ms |",
            "|---|---:|---:|---:|---:|---:|---:|" + "---:|" * len(ONCE),
        ]
        for row in model["results"]:
            cells = [row["contender"], str(row.get("parts", "")), str(row.get("generators", ""))]
            cells.append(str(row["rounds"]))
            cells.append("{:.3f} ± {:.3f}".format(*row["seconds"]["whole"]))
            if row["contender"] == PLAIN:
                cells += ["1", "1", *[""] * len(ONCE)]
            else:
                cells += ["{:.3f} ± {:.3f}".format(*row["over_plain"][part]) for part in ("whole", "passes")]
                cells += [f"{1e3 * row['seconds'][part][0]:.1f}" for part in ONCE]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Train, time and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--granularities", nargs="+", choices=GRANULARITIES, default=GRANULARITIES)
    parser.add_argument("--models", nargs="+", choices=list(models()), default=list(models()))
    parser.add_argument("--output", type=Path, default=RESULTS / "minimal_trace.json", help="and the table, .md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record, results = record_of("minimal_trace.py", LIBRARIES), []
    for name, workload in models().items():
        if name in options.models:
            print(f"{workload.name}: training and timing", flush=True)
            workload.train(options.steps)
            results.append(compare(workload, options.rounds, options.granularities))
    record["models"] = results
    write_text(options.output, json.dumps(record, indent=1) + "\n")
    write_text(options.output.with_suffix(".md"), page(record))
    print(page(record))


if __name__ == "__main__":
    main()
