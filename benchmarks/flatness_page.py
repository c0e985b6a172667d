"""The results of benchmarks/flatness.py as a page in Markdown."""

from __future__ import annotations

import math
from typing import Any

from flatness_contenders import BATCHES_OF
from timing import heading

from isoloss.statistics.estimate import rounded

_COLUMNS = (
    "estimator",
    "mean on the check (exact {exact:.4g})",
    "CPU ms a sequence",
    "over forward and backward",
    "spread of a sequence or call, %",
    "CPU s to 1 %",
    "times isoloss",
    "times isoloss with a pool",
    "times isoloss, same sequences",
    "peak memory, MiB",
    "over a training step's",
)


def page(record: dict[str, Any]) -> str:
    """Return all tables."""
    lines = [
        *heading("Flatness: time to a standard error of 1 %, and memory, on one thread", record),
        "Processor time, median of the rounds, each contender in a process of its own. "
        "The spread is the standard deviation of one sequence's value over fresh sequences, in percent of the mean; "
        "for the plain loop and the libraries, which take a batch as one, it is that of one call on a fresh batch, and "
        "the table has the best of three batch sizes. "
        'Time to 1 % is cost times (spread / 1 %)^2, on fresh sequences; "same sequences" counts the '
        "noise of signs or labels alone. With a pool, further sequences are drawn and read for their tokens alone; the "
        "time of both counts, and the mean is compared with that of isoloss without a pool, both over fresh sequences. "
        "± is one standard error over the repetitions. Memory is the peak of a process of its own over that of the "
        "loaded model, on 64 sequences at once; the paper's estimator takes them one by one. A ratio is given only "
        "where the mean on the check's sequences is within 4 standard errors of the exact trace, or the quantity is "
        "another.",
    ]
    for model in record["models"]:
        lines += _table(model)
    return "\n".join(lines) + "\n"


def _table(model: dict[str, Any]) -> list[str]:
    about = model["predictions"]
    columns = [column.format(exact=model["exact_trace_of_check"]) for column in _COLUMNS]
    lines = [
        "",
        f"## {model['model']}",
        "",
        f"Loss {about['loss_nats']:.2f} nats; predictions of mean entropy {about['mean_entropy_nats']:.2f} nats and "
        f"mean largest probability {about['mean_largest_probability']:.2f}.",
        "",
        "| " + " | ".join(columns) + " |",
        "|---|" + "---:|" * (len(columns) - 1),
    ]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in _at_best_size(model["results"])]
    lines += ["", *_other_sizes(model["results"])]
    lines += [f"\n{name} did not run: {why}" for name, why in model["failed"].items()]
    lines += [f"\n{name} is not installed." for name in model["missing"]]
    return lines


def _peer(row: dict[str, Any]) -> str:
    """Return the name without the size of its batches."""
    return str(row["name"]).split(BATCHES_OF)[0]


def _at_best_size(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each peer's row of the batch size with the shortest time to 1 %, and all other rows."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        known = best.setdefault(_peer(row), row)
        if row.get("seconds_to_1_percent", 0) < known.get("seconds_to_1_percent", 0):
            best[_peer(row)] = row
    return list(best.values())


def _other_sizes(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines that say what the peers need at each batch size, in times of isoloss."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if BATCHES_OF in row["name"]:
            ratio = rounded(row["ratio"], row["ratio_stderr"]) + ("" if row["agrees"] else " (not the exact trace)")
            found.setdefault(_peer(row), []).append(f"{row['sequences']}: {ratio}")
    lines = (f"- {peer}: {', '.join(each)}" for peer, each in found.items())
    return ["Times isoloss by the size of the batches:", "", *lines]


def _cells(row: dict[str, Any]) -> list[str]:
    fastest, slowest = 1e3 * row["fastest"], 1e3 * row["slowest"]
    cost = f"{1e3 * row['seconds_a_sequence']:.3g} ({fastest:.3g}-{slowest:.3g}, n={row['rounds']})"
    memory = ["", ""]
    if "peak_bytes" in row:
        memory = [f"{row['peak_bytes'] / 2**20:.0f}", f"{row['peak_over_training']:.2f}"]
    if "quantity" not in row:
        return [row["name"], "", cost, "1", "", "", "", "", "", *memory]
    other = row["quantity"].endswith("another quantity")
    name = row["name"] + (f" ({row['quantity']})" if other else "")
    against = f", against {row['check_against']:.4g}" if "check_against" in row else ""
    checked = f"{rounded(row['check_mean'], row['check_stderr'])}{against}, n={row['check_repeats']}"
    spread = 100 * math.sqrt(row["relative_variance"])
    error = 100 * row["relative_variance_stderr"] / (2 * math.sqrt(row["relative_variance"]))
    cells = [
        name,
        checked,
        cost,
        f"{row['over_floor']:.3g}",
        f"{rounded(spread, error)}, n={row['repeats']}x{row['sequences']}",
    ]
    if not (row["agrees"] or other):
        return [*cells, "the mean is not the exact trace", "", "", "", *memory]
    cells += [
        rounded(row["seconds_to_1_percent"], row["seconds_to_1_percent_stderr"]),
        *("1" if row[key] == 1 else rounded(row[key], row[f"{key}_stderr"]) for key in ("ratio", "ratio_to_pooled")),
        f"{row['same_sequences_ratio']:.3g}" if math.isfinite(row["same_sequences_ratio"]) else "",
    ]
    return [*cells, *memory]
