"""The plan of the study: which models are pre-trained, what is measured on which checkpoint, at each scale."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoloss import config as configs
from isoloss import files
from isoloss.config import LAPTOP_PCFG, EvalConfig, ModelConfig, OptimizerConfig, PCFGConfig, TrainConfig
from isoloss.errors import IsolossError
from isoloss.evaluation import pending
from isoloss.runs import Run
from isoloss.studies.engine.plan import Unit

NAME = "same-loss"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the study is.

    Attributes:
        text: What it is for and how long it takes.
        language: The grammar.
        sizes: Model sizes, ascending; the last is the main one, which is watched over time and continued with SGD.
        adamw: AdamW's optimizer settings, the paper's but for the warm-up (appendix A.5).
        steps: AdamW steps.
        watched: Steps at which the main run is measured, besides the last.
        batch_size: Sentences in an AdamW step.
        sgd: SGD's settings; its warm-up is 12 % of its steps (appendix B.2).
        sgd_steps: SGD steps, from the last AdamW checkpoint.
        sgd_watched: Steps at which they are measured, besides the last.
        sgd_batch_size: Sentences in an SGD step.
        tasks: Downstream tasks.
        evaluation: How much a checkpoint is measured on.
    """

    text: str
    language: PCFGConfig
    sizes: tuple[str, ...]
    adamw: OptimizerConfig
    steps: int
    watched: tuple[int, ...]
    batch_size: int
    sgd: OptimizerConfig
    sgd_steps: int
    sgd_watched: tuple[int, ...]
    sgd_batch_size: int
    tasks: tuple[str, ...]
    evaluation: EvalConfig


def _sgd(steps: int, learning_rate: float) -> OptimizerConfig:
    return OptimizerConfig(name="sgd", learning_rate=learning_rate, warmup_steps=round(0.12 * steps), weight_decay=0.0)


SCALES = {
    "laptop": Scale(
        text="about five minutes on two cores",
        language=LAPTOP_PCFG,
        sizes=("d16", "d32", "d64"),
        adamw=OptimizerConfig(warmup_steps=400),
        steps=16_000,
        watched=(500, 1_000, 2_000, 4_000, 8_000),
        batch_size=128,
        sgd=_sgd(8_000, 0.4),
        sgd_steps=8_000,
        sgd_watched=(1_000, 2_000, 4_000),
        sgd_batch_size=128,
        tasks=("root", "prefix-4"),
        evaluation=EvalConfig(),
    ),
    "smoke": Scale(
        text="a minute on two cores: every part runs, no result means anything",
        language=PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8),
        sizes=("d16", "d32"),
        adamw=OptimizerConfig(warmup_steps=20),
        steps=300,
        watched=(100,),
        batch_size=32,
        sgd=_sgd(300, 0.2),
        sgd_steps=300,
        sgd_watched=(100,),
        sgd_batch_size=16,
        tasks=("root", "prefix-2"),
        evaluation=EvalConfig(loss_sentences=256, trace_sentences=64, probe_train=256, probe_test=256, probe_epochs=10),
    ),
}


def scale_of(name: str) -> Scale:
    """Return the scale called `name`; an unknown name is an error that lists them."""
    if name not in SCALES:
        raise IsolossError(f"the study {NAME} has no scale {name!r}; its scales are {', '.join(SCALES)}")
    return SCALES[name]


def main_run(scale: Scale) -> str:
    """The name of the AdamW run that is watched over time."""
    return f"adamw-{scale.sizes[-1]}"


def sgd_run(scale: Scale) -> str:
    """The name of its continuation with SGD."""
    return f"sgd-{scale.sizes[-1]}"


def experiments(scale: Scale) -> dict[str, TrainConfig]:
    """Return the config of each run by its name."""
    runs = {}
    for size in scale.sizes:
        runs[f"adamw-{size}"] = TrainConfig(
            language=scale.language,
            model=ModelConfig(size=size, dropout=0.0),
            optimizer=scale.adamw,
            steps=scale.steps,
            batch_size=scale.batch_size,
            checkpoints=scale.watched,
            device="cpu",
            threads=1,
        )
    runs[sgd_run(scale)] = TrainConfig(
        language=scale.language,
        model=ModelConfig(size=scale.sizes[-1], dropout=0.0),
        optimizer=scale.sgd,
        steps=scale.sgd_steps,
        batch_size=scale.sgd_batch_size,
        checkpoints=scale.sgd_watched,
        initial=f"../{main_run(scale)}/checkpoints/step-{scale.steps}",
        seed=1,
        device="cpu",
        threads=1,
    )
    return runs


def steps_of(config: TrainConfig) -> list[int]:
    """Return the steps of a run that are measured."""
    return sorted({*config.checkpoints, config.steps})


def measures_of(scale: Scale) -> tuple[str, ...]:
    """Return what is measured on every checkpoint."""
    return ("loss", "trace", *(f"probe-{task}" for task in scale.tasks))


def lookups_of(scale: Scale) -> tuple[str, ...]:
    """Return what is measured once: the look-up table is a function of the language alone."""
    return tuple(f"lookup-{task}" for task in scale.tasks)


def run_of(folder: Path, name: str) -> Run:
    """Return the run called `name` of the study in `folder`."""
    return Run(folder / "runs" / name)


def document(scale_name: str) -> dict[str, Any]:
    """Return what study.json says: enough to see whether a folder was made by this plan."""
    scale = scale_of(scale_name)
    return {
        "study": NAME,
        "scale": scale_name,
        "runs": {name: configs.fingerprint(config) for name, config in experiments(scale).items()},
        "measures": [*measures_of(scale), *lookups_of(scale)],
        "evaluation": configs.to_dict(scale.evaluation),
    }


def prepare(folder: Path, scale_name: str) -> None:
    """Write the plan's files into `folder`, or check that it was made by the same plan.

    Raises:
        IsolossError: The folder holds another study, another scale, or another version of this plan.
    """
    path = folder / "study.json"
    planned = document(scale_name)
    if path.is_file():
        found = files.read_json(path)
        if found != planned:
            keys = [key for key in planned if found.get(key) != planned[key]]
            raise IsolossError(
                f"{folder} was made by another plan (they differ in {', '.join(keys)}); choose another --folder"
            )
        return
    for name, config in experiments(scale_of(scale_name)).items():
        files.write_text(config_path(folder, name), configs.to_toml(config))
    files.write_json(path, planned)


def config_path(folder: Path, name: str) -> Path:
    """The TOML file that a run is made from."""
    return folder / "configs" / f"{name}.toml"


def plan(folder: Path, scale_name: str) -> list[Unit]:
    """Return the study's units: for each run its training, and the measuring of its checkpoints."""
    scale = scale_of(scale_name)
    runs = experiments(scale)
    units = []
    for name, config in runs.items():
        run = run_of(folder, name)
        units.append(
            Unit(
                name=f"train {name}",
                arguments=("train", str(run.path), "--config", str(config_path(folder, name)), *_PLACE),
                done=functools.partial(_trained, run, config),
                after=(f"train {main_run(scale)}",) if name == sgd_run(scale) else (),
                cost=config.steps * config.batch_size**0.5 / 1000,
            )
        )
        parts = [(measures_of(scale), steps_of(config), "measure")]
        if name == main_run(scale):
            parts.append((lookups_of(scale), [config.steps], "look-up table for"))
        for measures, steps, verb in parts:
            units.append(
                Unit(
                    name=f"{verb} {name}",
                    arguments=_eval_arguments(run, measures, steps, scale.evaluation),
                    done=functools.partial(_measured, run, config, measures, steps, scale.evaluation),
                    after=(f"train {name}",),
                    cost=10.0 * len(steps),
                )
            )
    return units


_PLACE = ("--device", "cpu", "--threads", "1")


def _eval_arguments(run: Run, measures: Sequence[str], steps: Sequence[int], settings: EvalConfig) -> tuple[str, ...]:
    options = [
        word
        for name, value in configs.to_dict(settings).items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return ("eval", str(run.path), "--measures", *measures, "--steps", *map(str, steps), *options, *_PLACE)


def _trained(run: Run, config: TrainConfig) -> bool:
    return run.complete and run.record["fingerprint"] == configs.fingerprint(config)


def _measured(
    run: Run, config: TrainConfig, measures: Sequence[str], steps: Sequence[int], settings: EvalConfig
) -> bool:
    return _trained(run, config) and not pending(run, measures, steps, settings)
