"""Seeds of one setting, trained together by one process or each by its own: milliseconds a step and seed.

Whole runs of `isoloss train`, from an empty directory to the last step. Each contender has a process of its own with
one thread, they take turns, and the clock is the process's own processor time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

for _name in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{_name}_NUM_THREADS"] = "1"  # before the libraries are loaded

import torch  # noqa: E402
from pretraining import Timed  # noqa: E402
from processes import processes  # noqa: E402
from timing import heading, machine, short, versions  # noqa: E402

from isoloss.files import write_text  # noqa: E402
from isoloss.languages.config import PRESETS, PCFGConfig  # noqa: E402
from isoloss.run_config import ModelConfig, ObjectiveConfig, TrainConfig  # noqa: E402
from isoloss.runs import Run  # noqa: E402
from isoloss.training.stack import Member, train_together  # noqa: E402
from isoloss.training.trainer import train  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("isoloss", "torch", "transformers", "numpy", "numba", "scipy")
WARM_UP = 20  # steps at the start of each turn that are not counted
PLAIN = "one process a seed"
STACKS = (1, 2, 4, 8)
STUDY = PCFGConfig(levels=2, symbols_per_level=8, rules_per_symbol=8, vocab_size=16, seed=300)


@dataclass(frozen=True)
class Setting:
    """What all seeds have in common."""

    title: str
    config: TrainConfig


def settings() -> list[Setting]:
    """Return the study's base at two widths, and the language of benchmarks/pretraining.py at the same."""
    made = []
    for size in ("d32", "d64"):
        study = TrainConfig(
            language=STUDY,
            model=ModelConfig(size=size, layers=2, heads=int(size[1:]) // 8, dropout=0.0),
            objective=ObjectiveConfig(labels="exact"),
            batch_size=64,
        )
        made.append(Setting(f"{size}, 2 layers, 64 sentences of 4 tokens, exact labels, no dropout", study))
    for size in ("d32", "d64"):
        hmm = TrainConfig(language=PRESETS["hmm-paper"][0], model=ModelConfig(size=size))
        made.append(Setting(f"{size}, 1 layer, 128 sentences of 16 tokens, sampled labels, dropout 0.1", hmm))
    return made


def seconds_a_step(setting: Setting, language: Any, seeds: int, steps: int) -> float:
    """Train runs and return the processor seconds a step and seed; 0 seeds: one run without a stack."""
    first = Timed(language)
    config = replace(
        setting.config, steps=WARM_UP + steps, device="cpu", threads=1, save_every_seconds=1e9, stacked=seeds > 0
    )
    with tempfile.TemporaryDirectory() as folder:
        runs = [Run(Path(folder) / f"seed-{seed}") for seed in range(max(seeds, 1))]
        if seeds == 0:
            train(runs[0], config, first)
        else:
            train_together(
                [Member(run, replace(config, seed=s), language if s else first) for s, run in enumerate(runs)]
            )
    return (first.times[-1] - first.times[WARM_UP]) / (len(first.times) - 1 - WARM_UP) / max(seeds, 1)


def name_of(seeds: int) -> str:
    """Return what a stack is called."""
    return "a stack of 1" if seeds == 1 else f"a stack of {seeds}"


def contenders(number: int) -> dict[str, Callable[[int], float]]:
    """Return the contenders of a setting, in a process of their own."""
    torch.set_num_threads(1)
    setting = settings()[number]
    language = setting.config.language.build()
    return {
        PLAIN: partial(seconds_a_step, setting, language, 0),
        **{name_of(seeds): partial(seconds_a_step, setting, language, seeds) for seeds in STACKS},
    }


def compare(number: int, rounds: int, steps: int) -> dict[str, Any]:
    """Let the contenders of a setting take turns."""
    names, title = [PLAIN, *map(name_of, STACKS)], settings()[number].title
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with processes({name: name for name in names}, contenders, number) as run:
        for turn in range(rounds + 1):
            for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
                taken = run(name, steps if turn else 5)
                if turn:  # the first round loads and compiles
                    seconds[name].append(taken)
            print(f"{title}: round {turn} of {rounds}", flush=True)
    rows = []
    for name, values in seconds.items():
        ratios = [theirs / own for theirs, own in zip(seconds[PLAIN], values, strict=True)]
        rows.append(
            {
                "name": name,
                "seconds_a_step_and_seed": statistics.median(values),
                "fastest": min(values),
                "slowest": max(values),
                "throughput_over_one_process_a_seed": statistics.median(ratios),
                "range": [min(ratios), max(ratios)],
            }
        )
    return {"setting": title, "rounds": rounds, "steps": steps, "results": rows}


def page(record: dict[str, Any]) -> str:
    """Return all tables in Markdown."""
    lines = [
        *heading("Seeds trained together: time of a step and seed, on one thread", record),
        "BERT, one masked token a sentence, AdamW, float32. Whole runs, which draw their sentences, write their "
        f"metrics and save; the first {WARM_UP} steps are not counted. Processor time: the median over the rounds, in "
        "which all take turns, and the range. Throughput: the median over rounds of the plain run's time over this "
        "one's in the same round, and the range.",
    ]
    for workload in record["workloads"]:
        lines += [
            *("", f"## {workload['setting']}", ""),
            "| trained by | ms a step and seed | range | throughput over one process a seed |",
            "|---|---:|---:|---:|",
        ]
        for row in workload["results"]:
            low, high = row["range"]
            cells = [
                row["name"],
                f"{1e3 * row['seconds_a_step_and_seed']:.3g}",
                f"{1e3 * row['fastest']:.3g}-{1e3 * row['slowest']:.3g}",
                f"{short(row['throughput_over_one_process_a_seed'])} ({short(low)}-{short(high)})",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Time and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=200, help="steps of a turn that are counted")
    parser.add_argument("--output", type=Path, default=RESULTS / "seeds.json", help="and the table next to it, .md")
    options = parser.parse_args()
    record = {
        "command": " ".join(["python", "benchmarks/seeds.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "load": ", ".join(f"{value:.1f}" for value in os.getloadavg()),
        "versions": versions(LIBRARIES),
        "workloads": [compare(number, options.rounds, options.steps) for number in range(len(settings()))],
    }
    write_text(options.output, json.dumps(record, indent=1) + "\n")
    write_text(options.output.with_suffix(".md"), page(record))
    print(page(record))


if __name__ == "__main__":
    main()
