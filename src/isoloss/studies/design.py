"""What a study is to the engine: runs and what is measured of each, the files they leave, and the units of work."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from isoloss import config as configs
from isoloss import files
from isoloss.errors import IsolossError
from isoloss.evaluation.config import EvalConfig
from isoloss.evaluation.evaluator import pending
from isoloss.run_config import TrainConfig
from isoloss.runs import Run, versions
from isoloss.studies.plan import Unit

T = TypeVar("T")

_CONFIGS = "configs"  # the folder of the runs' configs, written before study.json
_PLACE = ("--device", "cpu", "--threads", "1")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one unit measures of a run: each of these measures on the checkpoint of each of these steps.

    Attributes:
        measures: As `isoloss.evaluation.evaluator` calls them.
        steps: Steps that have a checkpoint.
        settings: How much is measured on.
        verb: The unit is called by it and the run.
    """

    measures: tuple[str, ...]
    steps: tuple[int, ...]
    settings: EvalConfig
    verb: str = "measure"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A pre-training run and what is measured of it.

    Attributes:
        config: What is trained.
        measurements: What is measured, a unit each.
        after: The runs of the study that must be trained before it.
    """

    config: TrainConfig
    measurements: tuple[Measurement, ...]
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Design:
    """All that a study trains and measures at one scale.

    Attributes:
        study: The study's name.
        scale: The scale's name.
        experiments: By the name of the run.
    """

    study: str
    scale: str
    experiments: Mapping[str, Experiment]


def choose(scales: Mapping[str, T], name: str, *, study: str) -> T:
    """Return the scale called `name`; an unknown name is an error that lists them."""
    if name not in scales:
        raise IsolossError(f"the study {study} has no scale {name!r}; its scales are {', '.join(scales)}")
    return scales[name]


def steps_of(config: TrainConfig) -> tuple[int, ...]:
    """Return the steps whose checkpoint a run keeps, in order."""
    return tuple(sorted({*config.checkpoints, config.steps}))


def run_of(folder: Path, name: str) -> Run:
    """Return the run called `name` of the study in `folder`."""
    return Run(folder / "runs" / name)


def config_path(folder: Path, name: str) -> Path:
    """The TOML file that a run is made from."""
    return folder / _CONFIGS / f"{name}.toml"


def document(design: Design) -> dict[str, Any]:
    """Return what study.json says: enough to see whether a folder was made by this plan."""
    return {
        "study": design.study,
        "scale": design.scale,
        "runs": {name: configs.fingerprint(experiment.config) for name, experiment in design.experiments.items()},
        "measured": {
            name: [configs.to_dict(measurement) for measurement in experiment.measurements]
            for name, experiment in design.experiments.items()
        },
    }


def holds(folder: Path, design: Design) -> bool:
    """Return whether `folder` holds this study; if not, it is new or empty. Reads files only.

    Raises:
        IsolossError: It holds something else: another study, another scale or another version of this plan; a run, or
            other files.
    """
    path = folder / "study.json"
    planned = document(design)
    if path.is_file():
        found = files.read_json(path)
        if found != planned:
            keys = [key for key in planned if found.get(key) != planned[key]]
            raise IsolossError(
                f"{folder} was made by another plan (they differ in {', '.join(keys)}); choose another --folder"
            )
        return True
    around = next((place for place in (folder, *folder.absolute().parents) if Run(place).exists), None)
    if around is not None:
        what = "is a run" if around == folder else f"is inside the run {around}"
        raise IsolossError(f"{folder} {what} and cannot hold a study: choose another --folder")
    if folder.exists() and not folder.is_dir():
        raise IsolossError(f"{folder} is a file: choose another --folder")
    if folder.is_dir() and any(not p.name.startswith(".") and p.name != _CONFIGS for p in folder.iterdir()):
        raise IsolossError(f"{folder} is not empty and holds no study: choose another --folder")
    return False


def prepare(folder: Path, design: Design) -> None:
    """Write the plan's files into `folder`, or check that it was made by the same plan.

    Raises:
        IsolossError: As for `holds`.
    """
    if holds(folder, design):
        return
    for name, experiment in design.experiments.items():
        files.write_text(config_path(folder, name), configs.to_toml(experiment.config))
    files.write_json(folder / "study.json", document(design))


def plan(folder: Path, design: Design) -> list[Unit]:
    """Return the study's units: for each run its training, and the measuring of its checkpoints."""
    units = []
    for name, experiment in design.experiments.items():
        run, config = run_of(folder, name), experiment.config
        units.append(
            Unit(
                name=f"train {name}",
                arguments=("train", str(run.path), "--config", str(config_path(folder, name)), *_PLACE),
                done=functools.partial(_trained, run, config),
                after=tuple(f"train {other}" for other in experiment.after),
                cost=config.steps * config.batch_size**0.5 / 1000,
            )
        )
        units += [
            Unit(
                name=f"{measurement.verb} {name}",
                arguments=_eval_arguments(run, measurement),
                done=functools.partial(_measured, run, config, measurement),
                after=(f"train {name}",),
                cost=10.0 * len(measurement.steps),
            )
            for measurement in experiment.measurements
        ]
    return units


def _eval_arguments(run: Run, measurement: Measurement) -> tuple[str, ...]:
    options = [
        word
        for name, value in configs.to_dict(measurement.settings).items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    steps = map(str, measurement.steps)
    return ("eval", str(run.path), "--measures", *measurement.measures, "--steps", *steps, *options, *_PLACE)


def _trained(run: Run, config: TrainConfig) -> bool:
    return run.complete and run.record["fingerprint"] == configs.fingerprint(config)


def _measured(run: Run, config: TrainConfig, measurement: Measurement) -> bool:
    return _trained(run, config) and not pending(
        run, measurement.measures, measurement.steps, asdict(measurement.settings)
    )


def verify(folder: Path, design: Design) -> Iterator[tuple[str, str | None]]:
    """Check every run of the study in `folder`; see `isoloss.studies.verify.verify_run`.

    Raises:
        IsolossError: The folder holds no study.
    """
    if not (folder / "study.json").is_file():
        raise IsolossError(f"{folder} holds no study: it has no study.json")
    import torch

    from isoloss.studies.verify import verify_run

    torch.set_num_threads(1)  # as the study's workers have
    said = set()
    for name, experiment in design.experiments.items():
        for part in experiment.measurements:
            run, steps = run_of(folder, name), list(part.steps)
            for check in verify_run(run, experiment.config, part.measures, steps, part.settings):
                if check not in said:  # several measurements of one run look at the same files
                    said.add(check)
                    yield check


def digest(folder: Path, design: Design) -> str:
    """Return a SHA-256 over all that a report is made from: the evaluations, and the code that reads them."""
    sha256 = hashlib.sha256(repr(sorted(versions().items())).encode())
    code = sorted(p for d in ("report", "studies") for p in (Path(__file__).parents[1] / d).rglob("*.*"))
    made = sorted(p for name in design.experiments for p in run_of(folder, name).path.rglob("*.json"))
    for path in [*(p for p in code if p.suffix in (".py", ".toml", ".j2")), *made]:
        sha256.update(path.name.encode() + path.read_bytes())
    return sha256.hexdigest()
