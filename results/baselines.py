"""What probes of the study optimizers find without training: the majority class, one-hot tokens, an untrained model.

    python results/baselines.py

The grammars, sentences, draws and seeds are those of the kept studies. It writes `baselines.parquet` beside their
values; about two minutes of one core (OMP_NUM_THREADS=1).
"""

import dataclasses
from pathlib import Path

import polars as pl

from isoloss.lab.evaluation.context import MeasureContext
from isoloss.lab.evaluation.measures.transfer import FewShot, OneHot
from isoloss.lab.models.make import make_model
from isoloss.paper.optimizers import ADAMW, STUDY
from isoloss.studies import Experiment

RESULTS = Path(__file__).parent


def baselines(experiment: Experiment, task: str, shots: int) -> dict[str, float]:
    """Return accuracies on a task, by what is probed, with the settings of the study's own few-shot probe."""
    config, (measured,) = experiment.config, experiment.measurements
    names = {field.name for field in dataclasses.fields(FewShot)}
    settings = {name: value for name, value in measured.settings.items() if name in names}
    language = config.language.build()
    context = MeasureContext(read=None, objective=config.objective, language=language)
    untrained = make_model(config.model, language, seed=config.seed).eval()
    one_hot = OneHot(task=task, probe_solver="convex", num_train=shots, **settings).run(None, context)
    few_shot = FewShot(task=task, number=shots, **settings).run(untrained, context)
    assert one_hot.inputs == few_shot.inputs  # the same sentences
    accuracy = one_hot.estimates["accuracy"]
    return {
        "majority class": accuracy.details["majority_rate"],
        "one-hot tokens": accuracy.value,
        "untrained model": few_shot.estimates["accuracy"].value,
    }


def main() -> None:
    """Write the tables of both draws."""
    for offset, name in enumerate(("optimizers", "optimizers-repeated")):
        scale = STUDY.scale("laptop", seed_offset=offset)
        rows = [
            {"grammar": unit.grammar, "estimate": key, "probed": probed, "value": value}
            for unit in scale.units
            for task, key in zip(scale.tasks, scale.probes.values(), strict=True)
            for probed, value in baselines(scale.experiments[unit.run(ADAMW)], task, scale.shots).items()
        ]
        pl.DataFrame(rows).write_parquet(RESULTS / name / "baselines.parquet")


if __name__ == "__main__":
    main()
