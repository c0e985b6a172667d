"""Estimates of known values, and the files of a finished study that holds them."""

from isoloss.estimate import Estimate
from isoloss.runs import Evaluation
from isoloss.studies.design import run_of


def estimate(value, stderr=0.001, unit="nats per predicted token"):
    details = {"device": "cpu", "dtype": "float32", "attention": "sdpa"}
    return Estimate(value=value, stderr=stderr, samples=100, unit=unit, num_inputs=100, method="known", details=details)


def found(tasks, kl=0.04, trace=40.0, accuracies=()):
    """What was found at a checkpoint: every task at 50 % unless `accuracies` are given."""
    accuracies = accuracies or (0.5,) * len(tasks)
    return {
        "entropy": estimate(2.0),
        "kl": estimate(kl, 0.0005),
        "loss": estimate(2.0 + kl),
        "trace": estimate(trace, 1.0),
        **{task: estimate(share, 0.005, "accuracy") for task, share in zip(tasks, accuracies, strict=True)},
    }


def evaluation(measure, step, estimates):
    return Evaluation(measure=measure, step=step, weights="0", settings={}, estimates=estimates)


def save(folder, experiments, estimates, tasks):
    """Write the runs of a study and what was found at each (run, step)."""
    for name, experiment in experiments.items():
        run = run_of(folder, name)
        run.create(experiment.config)
        for step in experiment.measurements[0].steps:
            at = estimates[name, step]
            run.save(evaluation("loss", step, {key: at[key] for key in ("entropy", "kl", "loss")}))
            run.save(evaluation("trace", step, {"trace": at["trace"]}))
            for task in tasks:
                run.save(evaluation(f"probe-{task}", step, {"accuracy": at[task]}))
