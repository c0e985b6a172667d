"""What the page of the study shows: figures, and how it was made."""

from __future__ import annotations

from isoloss.paper.algorithms.study import BASELINE, SGD_RATE, dataset_of
from isoloss.paper.reproduction.spec import Dataset
from isoloss.report import charts
from isoloss.report.data import KL, MINIMAL_TRACE, TRACE, Style, accuracy
from isoloss.report.study_page import Figure
from isoloss.studies.page import PageParts, words
from isoloss.studies.results import Results


def parts(results: Results) -> PageParts:
    """Return what the page shows beside tables and claims."""
    return PageParts(figures=_figures(results), settings=_settings(dataset_of(results)))


def _figures(results: Results) -> list[Figure]:
    table = results.table()
    style = Style.of(table)
    drawings = []
    for task in dataset_of(results).tasks:
        probe = accuracy(task)
        axes = ((KL, TRACE), (KL, MINIMAL_TRACE), (KL, probe), (TRACE, probe), (MINIMAL_TRACE, probe))
        drawings.append(
            Figure(
                name=f"trace-{task}",
                title=f"Flatness, loss and transfer: {task}",
                chart=charts.scatter(table, axes, style=style),
                caption="Every checkpoint of every run: the trace of the Fisher information and the minimal trace "
                f"against its KL to the truth, and the accuracy of a linear probe on the task {task} against each of "
                "the three.",
            )
        )
    return drawings


def _settings(dataset: Dataset) -> dict[str, str]:
    adamw = dataset.common["optimizer"]
    adversary, sam, penalty = (
        dataset.arms[name].changes["algorithm"] for name in ("adversarial", "sam", "fisher-penalty")
    )
    return {
        "Model": f"BERT {dataset.sizes[BASELINE].size}, {dataset.last:,} steps of {dataset.common['batch_size']} "
        "sentences, one masked token each",
        "AdamW": f"learning rate {adamw.learning_rate:g} after {adamw.warmup_steps:,} steps of warm-up, no weight "
        "decay, no dropout; the others but SGD too, except for what their entries name",
        "Dropout and weight decay": "0.1 and 0.01, the paper's",
        "SAM": f"{words(sam)}; half the batch finds the ascent point, the other half gives the gradient",
        "Adversary": words(adversary),
        "Exact labels": "the true conditionals of the masked tokens instead of the tokens",
        "Fisher penalty": words(penalty),
        "SGD": f"learning rate {SGD_RATE:g} after {round(0.12 * dataset.last):,} steps of warm-up, no "
        "momentum, no weight decay",
        "Grammars and seeds": f"{len(dataset.languages)} grammars with {dataset.seeds} seed of each algorithm; "
        "runs of one grammar and seed have the same initial weights, sentences and masks, and are measured on the same "
        "other sentences",
    }
