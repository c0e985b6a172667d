"""The results of benchmarks/pretraining.py as a page in Markdown."""

from __future__ import annotations

from typing import Any

from timing import heading, short


def page(record: dict[str, Any]) -> str:
    """Return all tables."""
    is_bert = record.get("architecture", "bert") == "bert"
    what = "BERT, one masked token a sentence" if is_bert else "Llama, causal"
    about = (
        f"{what}, dropout 0.1, AdamW, float32 unless said. Processor time of a step, without that of other processes: "
        "the median of a turn's steps; over the rounds, in which all take turns, the median and the range. The last "
        "column is the median over rounds of a contender's time over that of the first row in the same round, and the "
        "quartiles. `isoloss train` is the whole run, which draws its sentences; without a word on the command line, a "
        "BERT is compiled up to a width of 64. The Trainer has its batches collated in memory, its own fused AdamW, "
        "and neither clipping, logging nor saving. Each of these has a process of its own, so that none has the "
        "other's settings. The peers' loss at equal weights without dropout is checked against ours before anything is "
        "timed."
    )
    if is_bert:
        about += (
            " A bare loop makes the same step as the first row with one choice undone; all of them share a process, "
            "but the one whose memory goes back. The hand-written loop (`plain_loop.py`) is plain torch with a small "
            "BERT of its own: one product for queries, keys and values, the last layer's queries and all that follows "
            "at the masked positions alone, no attention mask, torch's fused AdamW; its batches are in memory, and it "
            "neither clips, schedules, logs nor saves. Its gradient is checked, too."
        )
    lines = [*heading("Pre-training: tokens per second of one thread", record), about]
    for workload in record["workloads"]:
        lines += [
            "",
            f"## {workload['size']}, {workload['batch_size']} sentences of {workload['length']} tokens",
            "",
            "| contender | tokens/s | ms a step | range | time over the first row |",
            "|---|---:|---:|---:|---:|",
        ]
        for row in workload["results"]:
            low, high = row["over_first_quartiles"]
            cells = [
                row["name"],
                short(row["tokens_per_second"]),
                f"{1e3 * row['seconds_a_step']:.3g}",
                f"{1e3 * row['fastest']:.3g}-{1e3 * row['slowest']:.3g}",
                f"{row['over_first']:.2f} ({low:.2f}-{high:.2f})",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
