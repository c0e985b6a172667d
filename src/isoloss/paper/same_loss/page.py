"""The study's page: its figures, what they show, and how it was made."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from isoloss.paper.same_loss.claims import judge_all
from isoloss.paper.same_loss.design import EXPANSIONS, NAME, adamw_run, expanded_trace, main_run, scale_of, sgd_run
from isoloss.paper.same_loss.results import Results, read, size_table
from isoloss.report import charts, figures
from isoloss.report.data import KL, TRACE, Measure, Style, accuracy
from isoloss.report.html import Figure, Finding
from isoloss.statistics.estimate import rounded
from isoloss.studies import pages
from isoloss.studies.comparison import difference, ratio
from isoloss.studies.design import run_of

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
        tables={"Sizes in one architecture": pages.table(size_table(results), _expansion(results))},
        draw=partial(_figures, results),
        checkpoints=results.table(),
        settings=_settings(results, scale_name),
    )


def _findings(results: Results) -> tuple[Finding, ...]:
    scale = results.scale
    before, after = results.at(main_run(scale)), results.at(sgd_run(scale))
    moved = difference(after["kl"], before["kl"])
    times = ratio(after["trace"], before["trace"])
    gains = {task: difference(after[task], before[task]) for task in scale.tasks}
    transfer = "; ".join(f"{task} {pages.signed(gain)}" for task, gain in gains.items())
    table = results.lookups
    lookups = "; ".join(
        f"{task} {pages.signed(difference(before[task], table[task]))} ({before[task].estimate} against "
        f"{table[task].estimate})"
        for task in scale.tasks
    )
    return (
        Finding(
            headline=f"SGD multiplies the trace by {rounded(times.value, times.stderr)} and moves the KL by "
            f"{pages.signed(moved)}",
            detail=f"{scale.sgd_steps:,} steps of SGD after {scale.steps:,} of AdamW: the trace goes from "
            f"{before['trace'].estimate} to {after['trace'].estimate}, the KL from {before['kl'].estimate} to "
            f"{after['kl'].estimate}.",
        ),
        Finding(
            headline="What that does to the probes",
            detail=f"Accuracy at SGD's last checkpoint minus that at AdamW's last: {transfer}.",
        ),
        Finding(
            headline="The look-up table",
            detail=f"The probe on AdamW's last checkpoint minus that on the true conditionals: {lookups}.",
        ),
    )


def _expansion(results: Results) -> str:
    """How the sizes' traces were brought into one architecture."""
    scale = results.scale
    largest = scale.sizes[-1]
    differ = max(
        results.at(adamw_run(size))[expanded_trace(scale, way)].estimate.details.get("logits_differ_by", 0.0)
        for size in scale.sizes
        for way in EXPANSIONS
    )
    sentences = scale.evaluation.trace_sentences
    return (
        "A trace is a sum over parameters. Models of different widths, each in its own architecture, have sums over "
        "different things: those traces are not comparable. To compare the sizes, each smaller model is expanded into "
        f"the architecture of {largest}, with its function unchanged: r copies of every unit side by side, r the ratio "
        "of the widths, and matrices divided by r (section 4 and appendix B.4 of the paper; isoloss expand --scale). "
        f"Its trace is measured there, on the same {sentences:,} sentences with the same random signs. The logits "
        f"differ by at most {differ:.0e} of the largest. The function does not say what the copies of the embeddings "
        "are divided by, and the trace depends on it. Scale paper divides them by r, as the paper prints, and "
        "multiplies their part of the trace by r; balanced divides by the root of r and keeps it; exact divides by 1, "
        "and divides that part by r. All three are shown, and the claim is tested with each."
    )


def _figures(results: Results, folder: Path) -> tuple[Figure, ...]:
    scale, table = results.scale, results.table()
    style = Style.of(table)
    tasks = [accuracy(task) for task in scale.tasks]
    over_time, by_size = results.over_time(), results.by_size()
    largest = scale.sizes[-1]
    traces = [Measure("trace_own", "Raw trace, not comparable", "nats/token", log=True)]
    traces += [Measure(f"trace_{way}", f"Trace in {largest}, {way}", "nats/token", log=True) for way in EXPANSIONS]
    scatters = [
        pages.figure(
            folder,
            f"loss-and-trace-{task}",
            f"Loss and flatness against transfer: {task}",
            charts.scatter_pair(table, measure, style=style),
            figures.scatter_pair(table, measure, style=style),
            "Every checkpoint: on the left its KL to the truth, on the right the trace of its Fisher, against the "
            f"accuracy of a linear probe on the task {task}. Compare traces within a size: those of different widths "
            "are not comparable. The paper's figure 1.",
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
    sizes_figures = [
        pages.figure(
            folder,
            name,
            f"Sizes after {scale.steps:,} steps of AdamW: {what}",
            charts.sizes(by_size, shown),
            figures.sizes(by_size, shown),
            caption,
        )
        for name, what, shown, caption in (
            (
                "sizes",
                "loss and transfer",
                (KL, *tasks),
                "Loss and probes by the number of parameters. Compare only models of the same loss: see the KL. The "
                "paper's figures 3 and 5.",
            ),
            (
                "sizes-trace",
                "flatness",
                traces,
                "The trace by the number of parameters of the trained model. The first panel has the raw traces, each "
                "in its own architecture: these are not comparable across widths. The others show each model expanded "
                f"into the architecture of {largest}, with the embeddings scaled in three ways, which are explained "
                "with the table of sizes. The paper's figure 5.",
            ),
        )
    ]
    return (*scatters, over_time_figure, *sizes_figures)


def _settings(results: Results, scale_name: str) -> dict[str, str]:
    scale = results.scale
    run = run_of(results.folder, main_run(scale))
    trace = results.at(run.name)["trace"].estimate
    return {
        "Scale": f"{scale_name} ({scale.text})",
        "Language": pages.language(scale.language),
        "Entropy of the truth": str(results.at(run.name)["entropy"].estimate),
        "AdamW": f"{scale.steps:,} steps of {scale.batch_size} sentences, one masked token each; learning rate "
        f"{scale.adamw.learning_rate:g} after {scale.adamw.warmup_steps:,} steps of warm-up, weight decay "
        f"{scale.adamw.weight_decay:g}, no dropout",
        "SGD": f"{scale.sgd_steps:,} steps of {scale.sgd_batch_size} sentences; learning rate "
        f"{scale.sgd.learning_rate:g} after {scale.sgd.warmup_steps:,} steps of warm-up, no momentum, no weight decay",
        **pages.measuring(scale.evaluation, trace),
        "Seeds": f"one pre-training run each; grammar {scale.language.seed}, evaluation {scale.evaluation.seed}. "
        "Errors of differences are paired over the sentences, which are the same for all checkpoints; they cover the "
        "measurement, not the variation between pre-training seeds",
        **pages.making(run, trace),
    }
