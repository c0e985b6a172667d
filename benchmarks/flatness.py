"""Time to 1 % relative standard error and peak memory of estimators of a loss's flatness, on one thread.

Every estimator of the Fisher's trace is first compared with the exact trace, by enumeration of labels. Then its cost
and its spread over fresh sequences are measured: both together give the time that a standard error of 1 % takes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

for _name in ("OMP", "MKL", "OPENBLAS"):
    os.environ[f"{_name}_NUM_THREADS"] = "1"  # before the libraries are loaded

import torch  # noqa: E402
from flatness_contenders import (  # noqa: E402
    FISHER,
    OURS,
    PEERS,
    POOLED,
    Contender,
    contenders,
    exact_trace,
    ours,
    training_pass,
)
from flatness_page import page  # noqa: E402
from processes import processes  # noqa: E402
from timing import machine, versions  # noqa: E402
from workloads import Batch, Workload, workloads  # noqa: E402

from isoloss.files import write_text  # noqa: E402
from isoloss.seeds import generator  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("isoloss", "torch", "transformers", "numpy", *PEERS.values())
BATCH = 64  # sequences of a batch of ours and of the floor, and of all when memory is measured
CHECKED = 32  # sequences whose exact trace is enumerated
SIGMAS = 4.0
FLOOR = "one forward and backward pass, all parameters"
ONE_BATCH = f"{OURS}, one batch"


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def check(workload: Workload, contender: Contender, batch: Batch, exact: float, repeats: int) -> dict[str, Any]:
    """Compare the mean over seeds on fixed sequences with their exact trace."""
    values = [contender.run(workload, [batch], 1000 + seed).value for seed in range(repeats)]
    mean, error = mean_and_error(values)
    return {
        "check_mean": mean,
        "check_stderr": error,
        "check_repeats": repeats,
        "agrees": contender.quantity == FISHER and abs(mean - exact) <= SIGMAS * error,
    }


def spread(workload: Workload, contender: Contender, repeats: int) -> dict[str, Any]:
    """Return the relative variance of one sequence, or of one call for estimators that take a batch as one.

    Estimators that go by sequence run twice on the same sequences: half the mean square of the differences is the
    variance of their signs or labels alone. Their variance in all is that of their own standard errors, over fresh
    sequences.
    """
    n, values, variances, alone = contender.sequences, [], [], []
    for repeat in range(repeats):
        batches = workload.batches(n, min(n, BATCH), "spread", repeat)
        call = contender.run(workload, batches, 2 * repeat)
        values.append(call.value)
        if contender.by_sequence:
            again = contender.run(workload, batches, 2 * repeat + 1)
            assert call.stderr is not None
            assert again.stderr is not None
            values[-1] = (call.value + again.value) / 2
            variances.append(n * (call.stderr**2 + again.stderr**2) / 2)
            alone.append(n * (call.value - again.value) ** 2 / 2)
    mean, mean_error = mean_and_error(values)
    if contender.by_sequence:
        variance, error = mean_and_error(variances)
        same, same_error = mean_and_error(alone)
    else:
        squares = [(value - mean) ** 2 for value in values]
        variance, error = statistics.variance(values), mean_and_error(squares)[1]
        same, same_error = math.nan, math.nan
    return {
        "mean": mean,
        "mean_stderr": mean_error,
        "sequences": n,
        "repeats": repeats,
        "relative_variance": variance / mean**2,
        "relative_variance_stderr": error / mean**2,
        "probe_variance": same / mean**2,
        "probe_variance_stderr": same_error / mean**2,
    }


def timed(key: str, weights: Path) -> dict[str, Callable[[], float]]:
    """Return the contenders of a model, in a process of their own: each returns processor seconds a sequence."""
    torch.set_num_threads(1)
    workload = workloads()[key]
    workload.model.load_state_dict(torch.load(weights))
    large = 256 if workload.causal else 512
    jobs = [(FLOOR, training_pass, large), (OURS, ours, large), (ONE_BATCH, ours, BATCH)]
    known = contenders(causal=workload.causal)[0]
    jobs += [(contender.name, contender.run, contender.sequences) for contender in known if contender.name != OURS]

    def seconds(run: Any, n: int) -> float:
        data = workload.batches(n, min(n, BATCH), "timing", n)
        before = time.process_time()
        run(workload, data, 0)
        return (time.process_time() - before) / n

    return {name: partial(seconds, run, n) for name, run, n in jobs}


def turns(key: str, weights: Path, found: list[Contender], rounds: int) -> dict[str, list[float]]:
    """Return processor seconds a sequence of each contender, round by round; all take turns, each in its process."""
    names = [FLOOR, OURS, ONE_BATCH, *(contender.name for contender in found if contender.name != OURS)]
    places = {name: OURS if name == ONE_BATCH else name for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with processes(places, timed, key, weights) as run:
        for number in range(rounds + 1):
            first = number % len(names)
            for name in [*names[first:], *names[:first]]:
                taken = run(name)
                if number:  # the first round loads what is loaded at first use
                    seconds[name].append(taken)
    return seconds


def compare(key: str, workload: Workload, weights: Path, rounds: int, scale: float) -> dict[str, Any]:
    """Check, measure and time all contenders of a model."""
    found, missing = contenders(causal=workload.causal)
    # the positions of a causal model see what is before them only, so that short sequences will do
    batch = workload.batch(CHECKED, generator(0, "check"), length=5 if workload.causal else workload.length)
    print(f"{workload.name}: enumerating labels", flush=True)
    exact = exact_trace(workload, batch)
    rows: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for contender in list(found):
        print(f"{workload.name}: {contender.name}", flush=True)
        repeats = max(4, round(scale * 24 * contender.share))
        try:
            checked = check(workload, contender, batch, exact, repeats)
            measured = spread(workload, contender, repeats)
        except Exception as error:
            failed[contender.name] = f"{type(error).__name__}: {error}".splitlines()[0]
            found.remove(contender)
            continue
        rows[contender.name] = {"quantity": contender.quantity, **checked, **measured}
    if OURS in rows and POOLED in rows:
        check_pooled(rows[POOLED], rows[OURS])
    print(f"{workload.name}: timing", flush=True)
    seconds = turns(key, weights, found, rounds)
    return {
        "model": workload.name,
        "predictions": workload.describe(),
        "exact_trace_of_check": exact,
        "failed": failed,
        "missing": missing,
        "results": finish(rows, seconds, [c.name for c in found if not c.by_sequence]),
    }


def check_pooled(row: dict[str, Any], alone: dict[str, Any]) -> None:
    """Compare the mean over fresh sequences with that with no auxiliary sample on the same ones."""
    error = math.hypot(row["mean_stderr"], alone["mean_stderr"])
    row |= {"check_mean": row["mean"], "check_stderr": row["mean_stderr"], "check_against": alone["mean"]}
    row["agrees"] = abs(row["mean"] - alone["mean"]) <= SIGMAS * error


def finish(
    rows: dict[str, dict[str, Any]], seconds: dict[str, list[float]], whole_calls: list[str]
) -> list[dict[str, Any]]:
    """Add the costs, the times to 1 % and their ratios to ours."""
    for name, row in rows.items():
        taken = seconds[name]
        cost = statistics.median(taken)
        row |= {"seconds_a_sequence": cost, "slowest": max(taken), "fastest": min(taken), "rounds": len(taken)}
        row["over_floor"] = statistics.median(a / b for a, b in zip(taken, seconds[FLOOR], strict=True))
        needed = row["sequences"] if name in whole_calls else 1
        row["seconds_to_1_percent"] = cost * needed * row["relative_variance"] / 1e-4
        row["seconds_to_1_percent_stderr"] = cost * needed * row["relative_variance_stderr"] / 1e-4
        row["same_sequences_seconds"] = cost * row["probe_variance"] / 1e-4
    mine = rows[OURS]
    mine["one_batch_over_floor"] = statistics.median(
        a / b for a, b in zip(seconds[ONE_BATCH], seconds[FLOOR], strict=True)
    )
    for row in rows.values():
        for key, one in (("ratio", mine), ("ratio_to_pooled", rows[POOLED])):
            row[key] = row["seconds_to_1_percent"] / one["seconds_to_1_percent"]
            parts = [r["seconds_to_1_percent_stderr"] / r["seconds_to_1_percent"] for r in (row, one)]
            row[f"{key}_stderr"] = row[key] * math.hypot(*parts)
        row["same_sequences_ratio"] = row["same_sequences_seconds"] / mine["same_sequences_seconds"]
    taken = seconds[FLOOR]
    floor_row = {"name": FLOOR, "seconds_a_sequence": statistics.median(taken), "rounds": len(taken)}
    floor_row |= {"slowest": max(taken), "fastest": min(taken), "over_floor": 1.0}
    return [floor_row, *({"name": name, **row} for name, row in rows.items())]


# --- memory ----------------------------------------------------------------------------------------------------------


def status_bytes(field: str) -> int:
    """Return a number of this process's memory: VmHWM, its peak, or VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def own_memory(workload: Workload, name: str) -> int:
    """Return by how many bytes this process grows at its peak over the loaded model, on one batch."""
    known = {contender.name: contender for contender in contenders(causal=workload.causal)[0]}
    run = training_pass if name == FLOOR else known[name].run
    number = known[name].sequences if name in known and known[name].one_by_one else BATCH
    run(workload, workload.batches(2, 2, "warm-up"), 0)  # loads what is loaded at first use
    batches = workload.batches(number, BATCH, "memory")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status_bytes("VmRSS")
    run(workload, batches, 0)
    return status_bytes("VmHWM") - before


def memory(key: str, weights: Path, names: list[str]) -> dict[str, int]:
    """Return each contender's growth, each in a process of its own."""
    found = {}
    for name in names:
        command = [sys.executable, __file__, "--memory", name, "--models", key, "--weights", str(weights)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found[name] = int(done.stdout.split()[-1])
        else:
            print(f"memory of {name}: {done.stderr.strip().splitlines()[-1]}", flush=True)
    return found


def add_memory(result: dict[str, Any], key: str, weights: Path) -> None:
    """Add the peak memory to the rows of a model; Linux only."""
    if not Path("/proc/self/clear_refs").exists():
        return
    found = memory(key, weights, [row["name"] for row in result["results"]])
    for row in result["results"]:
        if row["name"] in found:
            row["peak_bytes"] = found[row["name"]]
            row["peak_over_training"] = found[row["name"]] / found[FLOOR]


def main() -> None:
    """Train, check, time and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of repetitions")
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--models", nargs="+", choices=list(workloads()), default=list(workloads()))
    parser.add_argument("--output", type=Path, default=RESULTS / "flatness.json", help="and the table next to it, .md")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {key: workload for key, workload in workloads().items() if key in options.models}
    if options.memory:
        (workload,) = chosen.values()
        workload.model.load_state_dict(torch.load(options.weights))
        print(own_memory(workload, options.memory))
        return
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    results = []
    for key, workload in chosen.items():
        print(f"{workload.name}: training", flush=True)
        workload.train(options.steps)
        with tempfile.TemporaryDirectory() as folder:
            weights = Path(folder) / "weights.pt"
            torch.save(workload.model.state_dict(), weights)
            results.append(compare(key, workload, weights, options.rounds, options.scale))
            add_memory(results[-1], key, weights)
    record = {
        "command": " ".join(["python", "benchmarks/flatness.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "load": load,
        "versions": versions(LIBRARIES),
        "models": results,
    }
    write_text(options.output, json.dumps(record, indent=1) + "\n")
    write_text(options.output.with_suffix(".md"), page(record))
    print(page(record))


if __name__ == "__main__":
    main()
