"""Reading a study back: whether every file is what it should be, and whether measuring again gives the same digits."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import scipy.linalg  # noqa: F401  (the threads of a library that is not loaded are not limited)
import torch
from threadpoolctl import threadpool_limits

from isoloss import config as configs
from isoloss.errors import IsolossError
from isoloss.lab.evaluation.evaluator import Evaluator, pending
from isoloss.lab.evaluation.external import ExternalRun
from isoloss.runs import Run
from isoloss.studies.folder import StudyFolder
from isoloss.studies.plan import Experiment
from isoloss.studies.results import run_of

Check = tuple[str, str | None]  # what was checked, and what is wrong with it, if anything


def verify(folder: StudyFolder) -> Iterator[Check]:
    """Check every run of a study; see `verify_run`."""
    said = set()
    for name, experiment in folder.scale.experiments.items():
        for part in experiment.measurements:
            run = run_of(folder.path, name, experiment)
            steps = list(experiment.steps(part, run))
            # as the unit that measured: with other threads or another device, sums differ in their last digits
            with _threads(part.needs.cores):
                for check in verify_run(run, experiment, part.measures, steps, part.settings, part.needs.device):
                    # several measurements of one run look at the same files
                    if check not in said:
                        said.add(check)
                        yield check


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    """Compute with this many threads, whatever OMP_NUM_THREADS was when torch, numpy and scipy were loaded."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        with threadpool_limits(number):
            yield
    finally:
        torch.set_num_threads(before)


def verify_run(
    run: Run,
    experiment: Experiment,
    measures: Sequence[str],
    steps: Sequence[int],
    settings: Mapping[str, Any],
    device: str = "cpu",
) -> Iterator[Check]:
    """Check a run's files against its config, its checkpoints and each other, and measure its last checkpoint again.

    Measuring again gives the same digits only on the kind of `device` that they were measured on. A file that cannot be
    read ends the checks of its run alone.
    """
    try:
        if not run.exists:
            yield f"{run.name}: run.json", "it has not been made yet"
        elif isinstance(run, ExternalRun):
            yield from _verify_external(run, measures, settings, device)
        else:
            yield from _verify_trained(run, experiment, measures, steps, settings, device)
    except (IsolossError, OSError, KeyError, TypeError) as error:
        yield f"{run.name}: files", str(error) if isinstance(error, IsolossError) else repr(error)


def _verify_trained(
    run: Run,
    experiment: Experiment,
    measures: Sequence[str],
    steps: Sequence[int],
    settings: Mapping[str, Any],
    device: str,
) -> Iterator[Check]:
    try:
        differing = configs.differences(run.config, experiment.config)
        fingerprint = run.record.get("fingerprint")
    except IsolossError as error:
        yield f"{run.name}: run.json", str(error)
        return
    if fingerprint != configs.fingerprint(run.config):
        differing.append(
            f"the fingerprint in the file is {fingerprint!r}, of its config {configs.fingerprint(run.config)!r}"
        )
    yield f"{run.name}: config", "; ".join(differing) or None
    if not run.complete:
        yield f"{run.name}: training", "not complete"
        return
    yield f"{run.name}: files", "; ".join(run.damage(tensors=True)) or None
    try:
        recorded = run.result()["checkpoints"]
    except IsolossError:  # result.json is damaged, as said above
        return
    missing = [step for step in steps if step not in run.steps()]
    yield f"{run.name}: checkpoints", f"none at steps {missing}" if missing else None
    present = [step for step in steps if step not in missing]
    for step in present:
        same = recorded.get(str(step)) == run.weights(step)
        yield f"{run.name}: weights at step {step}", None if same else "not those that training saved"
    yield from _verify_evaluations(run, measures, present, settings, device, again=not missing)


def _verify_external(
    run: ExternalRun, measures: Sequence[str], settings: Mapping[str, Any], device: str
) -> Iterator[Check]:
    if run.is_missing:
        yield f"{run.name}: checkpoint", f"{run.external.checkpoint} is not there"
    elif not run.complete:
        yield f"{run.name}: checkpoint", "not measured yet"
    else:
        changed = "" if run.result()["weights"] == run.weights(0) else "its weights are not those that were measured"
        yield f"{run.name}: checkpoint", changed or None
        yield f"{run.name}: files", "; ".join(run.damage(tensors=True)) or None
        yield from _verify_evaluations(run, measures, run.steps(), settings, device, again=not changed)


def _verify_evaluations(
    run: Run, measures: Sequence[str], steps: Sequence[int], settings: Mapping[str, Any], device: str, *, again: bool
) -> Iterator[Check]:
    """Check that all evaluations are there and, if so and asked for, make those of the last step again."""
    todo = [f"{measure} at step {step}" for step, measure in pending(run, measures, steps, settings)]
    wrong = (
        "missing, damaged, made with other weights, config, tokenizer or settings, or without the file of examples "
        "they were saved with"
    )
    yield f"{run.name}: evaluations", f"{wrong}: {', '.join(todo)}" if todo else None
    if todo or not again:
        return
    step, evaluator = steps[-1], Evaluator(run, settings, device=device)
    for measure in measures:
        kept, (made, _) = run.evaluation(measure, step), evaluator.measure(measure, step)
        if kept is not None and not kept.model_files:  # measured before they were recorded
            made = dataclasses.replace(made, model_files="")
        before = {} if kept is None else kept.to_dict()
        # as JSON gives it back: tuples are lists there, and keys are text
        differing = configs.differences(before, json.loads(json.dumps(made.to_dict())))
        yield f"{run.name}: {measure} at step {step}, measured again", "; ".join(differing[:1]) or None
