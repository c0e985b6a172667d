"""Estimates of known values, and the files of a finished study that holds them."""

import dataclasses
import hashlib
import itertools

import numpy as np
from safetensors.numpy import save as saved

from isoloss import files
from isoloss.runs import Evaluation
from isoloss.statistics.estimate import Estimate
from isoloss.studies.results import CheckpointEstimate, run_of

CLUSTERS, EXAMPLES, PROBES = 1024, 4000, 2
SETTINGS = {"seed": 0}
ON = {"inputs": "the same", "settings": SETTINGS}
_numbers = itertools.count(1)


def leave_one_out_error(sums, counts):
    """The jackknife error of sum(sums) / sum(counts), by the ratio without each cluster in turn."""
    sums, counts = np.asarray(sums, dtype=float), np.asarray(counts, dtype=float)
    n, each = len(sums), np.eye(len(sums), dtype=bool)
    without = np.array([sums[~one].sum() / counts[~one].sum() for one in each])
    return np.sqrt((n - 1) / n * ((without - sums.sum() / counts.sum()) ** 2).sum())


def estimate(value, stderr=0.001, unit="nats per predicted token"):
    details = {"device": "cpu", "dtype": "float32", "attention": "sdpa"}
    return Estimate(
        value=value, stderr=stderr, samples=100, unit=unit, num_predictions=100, method="known", details=details
    )


def measured(value, stderr=0.001, *, influence=None):
    """An estimate whose error is independent of that of every other: influences are waves of unlike frequencies."""
    if influence is None:
        wave = np.cos(2 * np.pi * (next(_numbers) % (CLUSTERS // 2 - 1) + 1) * np.arange(CLUSTERS) / CLUSTERS)
        influence = wave * stderr * np.sqrt(2 * (CLUSTERS - 1))
    found = dataclasses.replace(estimate(value, stderr), samples=len(influence))
    return CheckpointEstimate.of(found, **ON, examples={"influence": np.asarray(influence, np.float32)})


def accuracy(share, *, stderr=0.005):
    """Probes that are right on this share of the examples, chosen at random and the same for all probes."""
    correct = np.arange(EXAMPLES) < round(share * EXAMPLES)
    np.random.default_rng(next(_numbers)).shuffle(correct)
    labels = np.arange(EXAMPLES) % 2
    predictions = np.tile(np.where(correct, labels, 1 - labels), (PROBES, 1))
    examples = {"predictions": predictions.astype(np.uint8), "labels": labels.astype(np.uint8)}
    return CheckpointEstimate.of(estimate(share, stderr, "accuracy"), **ON, examples=examples)


def checkpoint(tasks, kl=0.04, trace=40.0, accuracies=(), minimum=10.0):
    """The estimates of a checkpoint: every task at 50 % unless `accuracies` are given."""
    accuracies = accuracies or (0.5,) * len(tasks)
    return {
        "entropy": CheckpointEstimate.of(estimate(2.0), **ON, examples={}),
        "kl": measured(kl, 0.0005),
        "loss": measured(2.0 + kl),
        "trace": measured(trace, 1.0),
        "minimal-trace": measured(minimum, 0.25),
        **{f"probe-{task}": accuracy(share) for task, share in zip(tasks, accuracies, strict=True)},
    }


def control(checkpoint, factor=2.0):
    """The estimates of a checkpoint's control: the trace by a factor, the minimal trace as it was."""
    rescaled = {
        "trace": measured(factor * checkpoint["trace"].value),
        "minimal-trace": checkpoint["minimal-trace"],
    }
    return {f"{key}-rescaled-at-random": one for key, one in rescaled.items()}


def save_evaluation(run, measure, step, given):
    """Write the evaluation of a measure at a step, given its estimates by name."""
    arrays = {f"{name}.{key}": each for name, one in given.items() for key, each in one.examples.items()}
    examples = saved(arrays)
    run.save(
        Evaluation(
            measure=measure,
            step=step,
            weights="",  # not known
            settings=next(iter(given.values())).settings,
            estimates=given,
            inputs="the same",
            examples=hashlib.sha256(examples).hexdigest(),
        ),
        examples,
    )


def save(folder, experiments, estimates, tasks):
    """Write the runs of a study and the estimates at each (run, step)."""
    for name, experiment in experiments.items():
        run = run_of(folder, name, experiment)
        run.create(experiment.config)
        files.write_json(run.path / "result.json", {"num_parameters": 1000 * int(experiment.config.model.size[1:])})
        for step in experiment.steps(experiment.measurements[0]):
            at = estimates[name, step]
            save_evaluation(run, "loss", step, {key: at[key] for key in ("entropy", "kl", "loss")})
            for trace in ("trace", "minimal-trace"):
                save_evaluation(run, trace, step, {trace: at[trace]})
            for task in tasks:
                save_evaluation(run, f"probe-{task}", step, {"accuracy": at[f"probe-{task}"]})
            rescaled = {key: one for key, one in at.items() if key.endswith("-rescaled-at-random")}
            if rescaled:
                save_evaluation(run, "rescaling-control", step, rescaled)
