"""Model-FLOP utilization of pre-training by size: arithmetic of a step by its time and the device's matrix rate.

The matrix rate is that of a square bfloat16 (or float32) product measured in the same run. The arithmetic counted is
that of the model as the paper's formulas have it, all positions through all layers, forward and twice that backward;
what our step does not do counts all the same for `model_flops`, and `executed_flops` is what it does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import machine, versions
from torch.utils.flop_counter import FlopCounterMode

from isoloss.files import write_text
from isoloss.lab.languages.config import PRESETS
from isoloss.lab.models.architectures import BERT
from isoloss.lab.models.make import make_model
from isoloss.lab.training.algorithms.base import TrainingAlgorithm, TrainingContext
from isoloss.lab.training.objectives import prediction_loss, training_batch
from isoloss.run_config import ModelConfig, OptimizerConfig, TrainConfig
from isoloss.text.masking import Batch

RESULTS = Path(__file__).parent / "results"
LANGUAGE = PRESETS["hmm-paper"][0]
LIBRARIES = ("isoloss", "torch", "transformers")


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_rate(device: torch.device, dtype: torch.dtype, n: int) -> float:
    """Return the best of some products of n by n matrices, in floating-point operations a second."""
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        synchronise(device)
        before = time.perf_counter()
        a @ b
        synchronise(device)
        best = min(best, time.perf_counter() - before)
    return 2 * n**3 / best


def whole_flops(model: Any, batch: Batch) -> int:
    """Return the operations of the matrix products of a step of the model's own forward pass with labels."""
    with FlopCounterMode(display=False) as counter:
        model(input_ids=batch["input_ids"], labels=batch["labels"]).loss.backward()
    return counter.get_total_flops()


def measure(size: str, batch_size: int, micro_batch_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the time of a step of one size, and its operations."""
    device, language = torch.device(options.device), LANGUAGE.build()
    config = TrainConfig(
        language=LANGUAGE, model=ModelConfig(size=size), optimizer=OptimizerConfig(), batch_size=batch_size
    )
    model: Any = make_model(config.model, language, seed=0).to(device)
    loss = partial(prediction_loss, model, causal=False, precision=options.precision)
    context = TrainingContext(optimizer=config.optimizer, total_steps=1000, micro_batch_size=micro_batch_size)
    rule = TrainingAlgorithm(model, context)
    batches = [training_batch(language, config, number, device).inputs for number in range(1, 4)]
    few = {name: tensor[:8] for name, tensor in batches[0].items()}
    model_flops = whole_flops(model, few) * batch_size // 8
    with FlopCounterMode(display=False) as counter:
        loss(few).backward()
    times = []
    for number in range(1, options.steps + 1):
        synchronise(device)
        before = time.perf_counter()
        rule.step(number, batches[number % 3], loss)
        synchronise(device)
        times.append(time.perf_counter() - before)
    seconds = statistics.median(times[2:])
    return {
        "size": size,
        "parameters": BERT.num_parameters(BERT.sizes[size], language.model_vocab_size, language.max_length),
        "batch_size": batch_size,
        "micro_batch_size": micro_batch_size,
        "seconds_a_step": seconds,
        "tokens_per_second": batch_size * language.max_length / seconds,
        "model_flops": model_flops,
        "executed_flops": counter.get_total_flops() * batch_size // 8,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def page(record: dict[str, Any]) -> str:
    """Return the table."""
    rate = record["matrix_rate"]
    lines = [
        "# Pre-training: model-FLOP utilization by size",
        "",
        f"{record['date']}, `{record['command']}`. {record['device']}. Versions: "
        + ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        + ".",
        "",
        f"BERT on sentences of {LANGUAGE.length} tokens, {record['precision']}, dropout 0.1, one masked token each. "
        f"The rate of a matrix product measured in the same run is {rate / 1e12:.3g} TFLOP/s. Utilization is the "
        "operations of the whole model (all positions through all layers and the head, backward twice forward) by time "
        "and rate; executed are those that our step does. Median wall-clock time of a step.",
        "",
        "| size | parameters | batch (at once) | ms a step | tokens/s | utilization | executed | peak memory |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in record["results"]:
        seconds = row["seconds_a_step"]
        memory = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f} GiB"
        cells = [
            row["size"],
            f"{row['parameters']:,}",
            f"{row['batch_size']} ({row['micro_batch_size'] or row['batch_size']})",
            f"{1e3 * seconds:.3g}",
            f"{row['tokens_per_second']:,.0f}",
            f"{100 * row['model_flops'] / seconds / rate:.1f} %",
            f"{100 * row['executed_flops'] / seconds / rate:.1f} %",
            memory,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Time and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--sizes", nargs="+", default=["d128", "d256", "d512", "d768", "d1024", "d1536", "d1920"])
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=0, help="sentences at once; 0: the whole batch")
    parser.add_argument("--steps", type=int, default=20, help="the first two are not counted")
    parser.add_argument("--matrix", type=int, default=8192, help="side of the matrices whose product gives the rate")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "utilization.json", help="and the table next to it, .md"
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if options.precision == "bfloat16" else torch.float32
    record: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/utilization.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else machine(),
        "precision": options.precision,
        "versions": versions(LIBRARIES),
        "matrix_rate": matrix_rate(device, dtype, options.matrix),
        "results": [],
    }
    for size in options.sizes:
        try:
            record["results"].append(measure(size, options.batch, options.micro_batch_size, options))
        except torch.OutOfMemoryError:
            print(f"{size} does not fit", flush=True)
            break
        write_text(options.output, json.dumps(record, indent=1) + "\n")
        write_text(options.output.with_suffix(".md"), page(record))
    print(page(record))


if __name__ == "__main__":
    main()
