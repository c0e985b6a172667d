"""What the page of the study shows: findings, figures, and how it was made."""

from __future__ import annotations

import polars as pl

from isoloss.paper.same_loss.study import Scale, adamw_run, lookups, sizes_expanded
from isoloss.report import charts
from isoloss.report.data import KL, MINIMAL_TRACE, TRACE, Column, Style, accuracy
from isoloss.report.html import Figure, Finding
from isoloss.statistics.estimate import rounded
from isoloss.studies.comparison import difference, ratio
from isoloss.studies.page import PageParts, signed
from isoloss.studies.results import Results


def parts(results: Results) -> PageParts:
    """Return what the page shows beside tables and claims."""
    return PageParts(figures=_figures(results), findings=_findings(results), settings=_settings(results))


def _findings(results: Results) -> tuple[Finding, ...]:
    scale: Scale = results.scale
    before, after = results.at(scale.main_run), results.at(scale.sgd_run)
    times = {key: ratio(after[key], before[key]) for key in ("trace", "minimal-trace")}
    by = {key: rounded(factor.value, factor.stderr) for key, factor in times.items()}
    table = lookups(results)
    transfer = "; ".join(
        f"{task} {signed(difference(after[f'probe-{task}'], before[f'probe-{task}']))}" for task in scale.tasks
    )
    against_table = "; ".join(
        f"{key.removeprefix('probe-')} {signed(difference(before[key], one))} ({before[key].estimate} against "
        f"{one.estimate})"
        for key, one in table.items()
    )
    return (
        Finding(
            headline=f"SGD multiplies the trace by {by['trace']}, the minimal trace by {by['minimal-trace']}, and "
            f"moves the KL by {signed(difference(after['kl'], before['kl']))}",
            detail=f"{scale.sgd_steps:,} steps of SGD after {scale.steps:,} of AdamW: the trace goes from "
            f"{before['trace'].estimate} to {after['trace'].estimate}, the minimal trace from "
            f"{before['minimal-trace'].estimate} to {after['minimal-trace'].estimate}, the KL from "
            f"{before['kl'].estimate} to {after['kl'].estimate}.",
        ),
        Finding(
            headline="What that does to the probes",
            detail=f"Accuracy at SGD's last checkpoint minus that at AdamW's last: {transfer}.",
        ),
        Finding(
            headline="The look-up table",
            detail=f"The probe on AdamW's last checkpoint minus that on the true conditionals: {against_table}.",
        ),
    )


def _figures(results: Results) -> list[Figure]:
    scale: Scale = results.scale
    table, tasks = results.table(), [accuracy(task) for task in scale.tasks]
    style = Style.of(table)
    by_size, over_time = _by_size(results), _over_time(results)
    traces = [Column("trace-own", "Raw trace, not comparable", "nats/token", log=True)]
    for name, key in scale.expanded_traces.items():
        traces.append(Column(key, f"Trace in {scale.sizes[-1]}, {name}", "nats/token", log=True))
    traces.append(Column(scale.expanded_minimum, f"Minimal trace in {scale.sizes[-1]}", "nats/token", log=True))
    scatters = [
        Figure(
            name=f"loss-and-trace-{task}",
            title=f"Loss and flatness against transfer: {task}",
            chart=charts.scatter(table, ((KL, column), (TRACE, column), (MINIMAL_TRACE, column)), style=style),
            caption="Every checkpoint: its KL to the truth, the trace of its Fisher and the minimal trace against the "
            f"accuracy of a linear probe on the task {task}. Compare traces within a size: those of different widths "
            "are not comparable. The paper's figure 1.",
        )
        for task, column in reversed(list(zip(scale.tasks, tasks, strict=True)))
    ]
    return [
        *scatters,
        Figure(
            name="over-time",
            title=f"Over time: {scale.sizes[-1]}",
            chart=charts.curves(over_time, (KL, TRACE, MINIMAL_TRACE, *tasks), style=style),
            caption=f"AdamW from random weights, then SGD from its last checkpoint (step {scale.steps:,}). The "
            "paper's figures 2, 4 and 10.",
        ),
        Figure(
            name="sizes",
            title=f"Sizes after {scale.steps:,} steps of AdamW: loss and transfer",
            chart=charts.sizes(by_size, (KL, *tasks)),
            caption="Loss and probes by the number of parameters. Compare only models of the same loss: see the KL. "
            "The paper's figures 3 and 5.",
        ),
        Figure(
            name="sizes-trace",
            title=f"Sizes after {scale.steps:,} steps of AdamW: flatness",
            chart=charts.sizes(by_size, traces),
            caption="The trace by the number of parameters of the trained model. The first panel has the raw traces, "
            "each in its own architecture: these are not comparable across widths. The others show each model expanded "
            f"into the architecture of {scale.sizes[-1]}: the trace with the embeddings scaled in three ways, which "
            "are explained with the table of sizes, and the minimal trace, the same for all three. The paper's "
            "figure 5.",
        ),
    ]


def _by_size(results: Results) -> pl.DataFrame:
    """Return the rows of AdamW's last checkpoints, with their traces in the largest size's architecture."""
    scale: Scale = results.scale
    expanded = [*scale.expanded_traces.values(), scale.expanded_minimum]
    keys = [key for key in results.keys if key != "trace"] + ["trace-own", *expanded]
    rows = []
    for size, one in sizes_expanded(results).items():
        rows.append(results.row(adamw_run(size), scale.steps, {**one, "trace-own": one["trace"]}, keys))
    return pl.DataFrame(rows)


def _over_time(results: Results) -> pl.DataFrame:
    """Return the rows of the main run and of SGD on from it, whose steps count on from the main run's last.

    SGD's first row is the checkpoint that it started from.
    """
    scale: Scale = results.scale
    main, sgd, start = results.of_run(scale.main_run), results.of_run(scale.sgd_run), scale.steps
    rows = [results.row(scale.main_run, step, one, results.keys) for step, one in main.items()]
    for step, one in {0: main[start], **sgd}.items():
        rows.append(results.row(scale.sgd_run, start + step, one, results.keys))
    return pl.DataFrame(rows)


def _settings(results: Results) -> dict[str, str]:
    scale: Scale = results.scale
    return {
        "Entropy of the truth": str(results.at(scale.main_run)["entropy"].estimate),
        "AdamW": f"{scale.steps:,} steps of {scale.batch_size} sentences, one masked token each; learning rate "
        f"{scale.adamw.learning_rate:g} after {scale.adamw.num_warmup_steps(scale.steps):,} steps of warm-up, weight "
        f"decay {scale.adamw.weight_decay:g}, no dropout",
        "SGD": f"{scale.sgd_steps:,} steps of {scale.sgd_batch_size} sentences; learning rate "
        f"{scale.sgd.learning_rate:g} after {scale.sgd.num_warmup_steps(scale.sgd_steps):,} steps of warm-up, no "
        "momentum, no weight decay",
        "Seeds": "one pre-training run each. Errors of differences are paired over the sentences, which are the same "
        "for all checkpoints; they cover the measurement, not the variation between pre-training seeds",
    }
