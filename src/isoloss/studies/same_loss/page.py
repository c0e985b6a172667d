"""The study's page: its figures, what they show, and how it was made."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import polars as pl

from isoloss.report import charts, figures
from isoloss.report.data import KL, TRACE, Style, accuracy
from isoloss.report.html import Figure, Finding
from isoloss.studies import pages
from isoloss.studies.comparison import difference
from isoloss.studies.design import run_of
from isoloss.studies.same_loss.claims import judge_all
from isoloss.studies.same_loss.design import NAME, main_run, scale_of, sgd_run
from isoloss.studies.same_loss.results import Results, read

LEAD = (
    "Language models are compared by their pre-training loss, yet models of the same loss differ in what they "
    "transfer. This study trains small masked language models on sentences of a random grammar. Its true conditionals "
    "are known exactly, so the loss is measured as the KL divergence from the truth, and “the same loss” is a fact "
    "rather than an impression.",
    "One model is trained with AdamW and watched over time; plain SGD goes on from its last checkpoint; smaller models "
    "are trained alike. Each checkpoint gets its KL, the trace of the Fisher of its loss (its flatness: smaller is "
    "flatter), and linear probes for symbols of the grammar.",
)


def write(folder: Path, scale_name: str) -> Path:
    """Write report/index.html of the finished study in `folder`, and its figures as PDF and PNG; return the page."""
    results = read(folder, scale_of(scale_name))
    return pages.write(
        folder,
        NAME,
        scale_name,
        title=f"Same loss, different models: {NAME} at {scale_name} scale",
        lead=LEAD,
        findings=_findings(results),
        claims=judge_all(results),
        draw=partial(_figures, results),
        checkpoints=results.table(),
        settings=_settings(results, scale_name),
    )


def _findings(results: Results) -> tuple[Finding, ...]:
    scale = results.scale
    before, after = results.at(main_run(scale)), results.at(sgd_run(scale))
    moved = difference(after["kl"], before["kl"])
    ratio = after["trace"].value / before["trace"].value
    gains = {task: difference(after[task], before[task]) for task in scale.tasks}
    transfer = "; ".join(f"{task} {'+' if gain.value > 0 else ''}{gain}" for task, gain in gains.items())
    lookups = "; ".join(f"{task} {results.lookups[task]} against {before[task]}" for task in scale.tasks)
    return (
        Finding(
            headline=f"SGD multiplies the trace by {ratio:.2f} and moves the KL by {moved.value:+.4f} nats",
            detail=f"{scale.sgd_steps:,} steps of SGD after {scale.steps:,} of AdamW: the trace goes from "
            f"{before['trace']} to {after['trace']}, the KL from {before['kl']} to {after['kl']}; "
            f"the KL moves by {moved}.",
        ),
        Finding(
            headline="What that does to the probes",
            detail=f"Accuracy at SGD's last checkpoint minus that at AdamW's last: {transfer}.",
        ),
        Finding(
            headline="The look-up table",
            detail=f"The probe on the true conditionals against that on AdamW's last checkpoint: {lookups}.",
        ),
    )


def _figures(results: Results, folder: Path) -> tuple[Figure, ...]:
    scale, table = results.scale, results.table()
    style = Style.of(table)
    tasks = [accuracy(task) for task in scale.tasks]
    over_time = results.over_time()
    same_step = table.filter((pl.col("group") == table["group"][0]) & (pl.col("step") == scale.steps))
    scatters = [
        pages.figure(
            folder,
            f"loss-and-trace-{task}",
            f"Loss and flatness against transfer: {task}",
            charts.scatter_pair(table, measure, style=style),
            figures.scatter_pair(table, measure, style=style),
            "Every checkpoint: on the left its KL to the truth, on the right the trace of its Fisher, against the "
            f"accuracy of a linear probe on the task {task}. The paper's figure 1.",
        )
        for task, measure in reversed(list(zip(scale.tasks, tasks, strict=True)))
    ]
    over_time_figure = pages.figure(
        folder,
        "over-time",
        f"Over time: {scale.sizes[-1]}",
        charts.curves(over_time, (KL, TRACE, *tasks), style=style),
        figures.curves(over_time, (KL, TRACE, *tasks), style=style),
        f"AdamW from random weights, and from its last checkpoint (step {scale.steps:,}) on SGD. The paper's figures "
        "2, 4 and 10.",
    )
    sizes_figure = pages.figure(
        folder,
        "sizes",
        f"Sizes after {scale.steps:,} steps of AdamW",
        charts.sizes(same_step, (KL, TRACE, *tasks), style=style),
        figures.sizes(same_step, (KL, TRACE, *tasks), style=style),
        "Loss, trace and probes by the number of parameters. Only models of the same loss compare: see the KL. The "
        "paper's figures 3 and 5.",
    )
    return (*scatters, over_time_figure, sizes_figure)


def _settings(results: Results, scale_name: str) -> dict[str, str]:
    scale = results.scale
    run = run_of(results.folder, main_run(scale))
    trace = results.at(run.name)["trace"]
    return {
        "Scale": f"{scale_name} ({scale.text})",
        "Language": pages.language(scale.language),
        "Entropy of the truth": str(results.at(run.name)["entropy"]),
        "AdamW": f"{scale.steps:,} steps of {scale.batch_size} sentences, one masked token each; learning rate "
        f"{scale.adamw.learning_rate:g} after {scale.adamw.warmup_steps:,} steps of warm-up, weight decay "
        f"{scale.adamw.weight_decay:g}, no dropout",
        "SGD": f"{scale.sgd_steps:,} steps of {scale.sgd_batch_size} sentences; learning rate "
        f"{scale.sgd.learning_rate:g} after {scale.sgd.warmup_steps:,} steps of warm-up, no momentum, no weight decay",
        **pages.measuring(scale.evaluation, trace),
        "Seeds": f"one pre-training run each; grammar {scale.language.seed}, evaluation {scale.evaluation.seed}. "
        "Errors cover the measurement, not another pre-training seed",
        **pages.making(run, trace),
    }
