"""The study's page: its tables and figures, what they show, and how it was made."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from isoloss.paper.algorithms.claims import judge_all
from isoloss.paper.algorithms.design import ALGORITHMS, BASELINE, NAME, config_of, run_name, scale_of
from isoloss.paper.algorithms.results import Results, read, tables
from isoloss.report import charts, figures
from isoloss.report.data import KL, TRACE, Style, accuracy
from isoloss.report.html import Figure, Finding
from isoloss.studies import pages
from isoloss.studies.design import run_of
from isoloss.training.algorithms.config import AdversarialConfig, FisherPenaltyConfig, SAMConfig

LEAD = (
    "What a language model transfers depends on how it was trained, not only on its pre-training loss. This study "
    "trains one small masked language model on sentences of a random grammar, whose true conditionals are known "
    "exactly, with several algorithms and several seeds of each.",
    "Models are compared at the same loss: for each seed, the checkpoint of an algorithm and that of plain AdamW whose "
    "KL to the truth is nearest. Errors are standard errors over seeds, so they hold the chance of initial weights, "
    "data, measurement and probes together. What does not show is reported as well.",
)

CAPTIONS = {
    "last": "All after the same number of steps, whatever their loss. Accuracies are in percent.",
    "matched": "For each seed the run whose last KL is higher is taken at its last checkpoint, the other at the "
    "checkpoint whose KL is nearest; only where that makes the loss the same do the other columns compare like with "
    "like. Accuracies are in percentage points. Two standard errors over three seeds are no "
    "95 % interval: Student's t asks for 4.3.",
}


def write(folder: Path, scale_name: str) -> Path:
    """Write report/index.html of the finished study in `folder`, and its figures as PDF and PNG; return the page."""
    results = read(folder, scale_of(scale_name))
    return pages.write(
        folder,
        NAME,
        scale_name,
        title=f"What the algorithms do: {NAME} at {scale_name} scale",
        lead=LEAD,
        findings=_findings(results),
        claims=judge_all(results),
        tables={_heading(found.title): pages.table(found, CAPTIONS[found.name]) for found in tables(results)},
        draw=partial(_figures, results),
        checkpoints=results.table(),
        settings=_settings(results, scale_name),
    )


def _heading(title: str) -> str:
    return title[0].upper() + title[1:]


def _findings(results: Results) -> tuple[Finding, ...]:
    task = results.scale.tasks[0]
    moved = {key: pages.signed(change) for key, change in results.differences("adversarial").items()}
    control, own = (results.means(name) for name in (BASELINE, "adversarial"))
    others = [name for name in ALGORITHMS if name not in (BASELINE, "adversarial")]

    def each(key: str) -> str:
        return "; ".join(f"{ALGORITHMS[name]} {pages.signed(results.differences(name)[key])}" for name in others)

    return (
        Finding(
            headline=f"The adversary moves the probe of its task by {moved[task]}",
            detail=f"{task} at the nearest KL; the KL differs by {moved['kl']}, the trace by {moved['trace']}. After "
            f"the last step: {own[task]} against {control[task]} at a KL of {own['kl']} against {control['kl']}.",
        ),
        Finding(headline="The trace at the nearest KL, minus AdamW's", detail=f"{each('trace')}."),
        Finding(headline=f"The probe of {task} at the nearest KL, minus AdamW's", detail=f"{each(task)}."),
    )


def _figures(results: Results, folder: Path) -> tuple[Figure, ...]:
    table = results.table()
    style = Style.of(table)
    made = []
    for task in results.scale.tasks:
        axes = ((KL, TRACE), (TRACE, accuracy(task)), (KL, accuracy(task)))
        made.append(
            pages.figure(
                folder,
                f"trace-{task}",
                f"Flatness, loss and transfer: {task}",
                charts.scatter(table, axes, style=style),
                figures.scatter(table, axes, style=style),
                "Every checkpoint of every seed: the trace of its Fisher against its KL to the truth, and the accuracy "
                f"of a linear probe on the task {task} against each of the two.",
            )
        )
    return tuple(made)


def _settings(results: Results, scale_name: str) -> dict[str, str]:
    scale = results.scale
    run = run_of(results.folder, run_name(BASELINE, scale.seeds[0]))
    trace = results.last(BASELINE)[0]["trace"].estimate
    adversary, sam, penalty = (config_of(scale, name, 1).algorithm for name in ("adversarial", "sam", "fisher-penalty"))
    assert isinstance(adversary, AdversarialConfig)
    assert isinstance(sam, SAMConfig)
    assert isinstance(penalty, FisherPenaltyConfig)
    return {
        "Scale": f"{scale_name} ({scale.text})",
        "Language": pages.language(scale.language),
        "Model": f"BERT {scale.size}, {scale.steps:,} steps of {scale.batch_size} sentences, one masked token each",
        "AdamW": f"learning rate {scale.learning_rate:g} after {scale.warmup_steps:,} steps of warm-up, no weight "
        "decay, no dropout; the others but SGD too, except for what their entries name",
        "Dropout and weight decay": "0.1 and 0.01, the paper's",
        "SAM": f"rho {sam.rho:g}; half the batch finds the ascent point, the other half gives the gradient",
        "Adversary": f"weight {adversary.weight:g}, ridge {adversary.ridge:g}, {adversary.head_examples} + "
        f"{adversary.loss_examples} examples a step of {adversary.task_examples:,}, task {adversary.task}",
        "Exact labels": "the true conditionals of the masked tokens instead of the tokens",
        "Fisher penalty": f"{penalty.coefficient:g} times the trace, estimated on {penalty.sentences} sentences a step",
        "SGD": f"learning rate {scale.sgd_learning_rate:g} after {round(0.12 * scale.steps):,} steps of warm-up, no "
        "momentum, no weight decay",
        **pages.measuring(scale.evaluation, trace),
        "Seeds": f"{len(scale.seeds)} of each algorithm, with the same initial weights, sentences and masks; grammar "
        f"{scale.language.seed}; each seed is measured on sentences of its own",
        **pages.making(run, trace),
    }
