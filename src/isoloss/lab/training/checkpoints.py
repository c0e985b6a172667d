"""Checkpoints of a run: a Hugging Face folder, plus what training needs to go on from there bit for bit.

config.json, model.safetensors     what transformers loads, and the tokenizer's files where the language has one
trainer.safetensors                the training algorithm's tensors
trainer.json                       step, sums for metrics, config, targets reached, SHA-256 of the other files
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from isoloss import config as configs
from isoloss import files
from isoloss.checkpoints.loading import quiet
from isoloss.checkpoints.places import TRAINER, check_weights
from isoloss.errors import IsolossError
from isoloss.run_config import TrainConfig
from isoloss.runs import Run

WEIGHTS = "model.safetensors"
TRAINER_TENSORS = "trainer.safetensors"


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Where a run stands, apart from its tensors."""

    step: int
    config: Mapping[str, Any]  # what decides the run's result, as `isoloss.config.identity` gives it
    loss_sum_nats: float = 0.0  # of the losses of the steps since the last line of metrics.jsonl
    loss_count: int = 0
    initial_sha256: str | None = None  # of the weights that the run started from; None: random ones
    targets_reached: Sequence[int] = ()  # steps at which a stage ended at its target
    metrics_sha256: str = ""  # of metrics.jsonl up to this step; empty: written before it was recorded


def save(
    path: Path, model: Any, tensors: Mapping[str, torch.Tensor], state: TrainerState, *, tokenizer: Any = None
) -> None:
    """Write the checkpoint `path`, whole or not at all; one that is there is replaced.

    `tensors` is the training algorithm's state. A tokenizer goes along, so that the folder can be used by itself.
    """
    # a finite loss can have an update that is not, and every later start would go on from what is saved here
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise IsolossError(f"after step {state.step} the weights {name} are not finite: lower the learning rate")
    try:
        with files.new_directory(path) as folder, quiet():
            save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, folder / TRAINER_TENSORS)
            save_model(folder, model, tokenizer)
            written = sorted(path for path in folder.rglob("*") if path.is_file())
            hashes = {path.relative_to(folder).as_posix(): files.sha256(path) for path in written}
            files.write_sealed(folder / TRAINER, {**dataclasses.asdict(state), "sha256": hashes})
    except (OSError, SafetensorError) as error:
        raise IsolossError(f"cannot write the checkpoint {path}: {error}") from error


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a model and, where there is one, its tokenizer, all for the same readers."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    # safetensors lets nobody but the owner read what it writes
    for weights in folder.glob("*.safetensors"):
        weights.chmod((folder / "config.json").stat().st_mode)


def load(path: Path, model: torch.nn.Module, *, config: TrainConfig) -> tuple[TrainerState, dict[str, torch.Tensor]]:
    """Put a checkpoint's weights into `model`, and return where the run stood and the training algorithm's tensors."""
    state = read_state(path)
    if differing := configs.differences(config, state.config):
        raise IsolossError(f"{path} is a checkpoint of another config ({'; '.join(differing)}): {_REMEDY}")
    load_weights(path, model)
    return state, _read_tensors(path / TRAINER_TENSORS)


def load_branch(path: Path, config: TrainConfig) -> dict[str, torch.Tensor]:
    """Return the training algorithm's tensors at a checkpoint of another run, for a run that begins there.

    Another optimizer or algorithm, no tensors, and two runs of one seed are refused.
    """
    state = read_state(path)
    parent = configs.from_dict(TrainConfig, state.config)
    stages = parent.stage_configs()
    ends = parent.stage_ends(state.targets_reached)
    stage = stages[min(sum(end <= state.step for end in ends), len(stages) - 1)]
    for what, there, here in (
        ("optimizer", stage.optimizer.name, config.optimizer.name),
        ("algorithm", stage.algorithm.kind, config.algorithm.kind),
    ):
        if there != here:
            raise IsolossError(
                f"init_optimizer is on, and {path} has the state of {there}: choose the same {what} in place of {here}"
            )
    if parent.seed == config.seed:
        raise IsolossError(
            f"seed is {config.seed}, also that of the run of {path}, whose first batches this run would see again: "
            "choose another seed"
        )
    if not (tensors := _read_tensors(path / TRAINER_TENSORS)):
        raise IsolossError(f"{path} has no state of its optimizer, which begins anew there: leave out init_optimizer")
    return tensors


def load_weights(path: Path, model: torch.nn.Module) -> str:
    """Put the weights of the checkpoint folder `path`, made by isoloss or not, into `model`; return their SHA-256."""
    source = path / WEIGHTS
    if not source.is_file():
        raise IsolossError(f"{path} is not a checkpoint folder: it has no {WEIGHTS}")
    check_weights(path)
    tensors = _read_tensors(source)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    stored = {name: tuple(t.shape) for name, t in tensors.items()}
    # both lists, to refuse what the file lacks and what it has besides
    for name in [*expected, *stored]:
        if expected.get(name) != stored.get(name):
            raise IsolossError(
                f"the weights in {path} do not fit the model: {name} has the shape {stored.get(name, 'none')} there "
                f"and {expected.get(name, 'none')} in the model"
            )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[name])
    return files.sha256(source)


def weights_sha256(path: Path) -> str:
    """Return the SHA-256 of a checkpoint's weights, as it was recorded when they were written."""
    recorded: str = _read_trainer(path)["sha256"][WEIGHTS]
    return recorded


def remove_except(run: Run, keep: Iterable[int]) -> None:
    """Delete every checkpoint of `run` whose step is not in `keep`."""
    for step in set(run.steps()) - set(keep):
        # renamed first: a folder that is deleted halfway must not look like a checkpoint
        # (under a name that `files.remove_unfinished` deletes, should this process be killed here)
        doomed = run.checkpoint(step).with_name(f"{files.TEMPORARY}removed-step-{step}")
        shutil.rmtree(doomed, ignore_errors=True)
        run.checkpoint(step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _read_trainer(path: Path) -> dict[str, Any]:
    read = files.read_sealed(path / TRAINER, _REMEDY)
    # checkpoints of earlier versions lack these
    document: dict[str, Any] = {"targets_reached": [], "metrics_sha256": "", **read}
    fields = {field.name for field in dataclasses.fields(TrainerState)} | {"sha256"}
    wrong = {"it lacks": fields - {*document}, "it also has": {*document} - fields}
    if any(wrong.values()):
        which = "; ".join(f"{what} {', '.join(sorted(names))}" for what, names in wrong.items() if names)
        raise IsolossError(f"{path / TRAINER} is damaged or of another version of isoloss ({which}): {_REMEDY}")
    return document


_REMEDY = "delete its folder and those of later steps to go on from an earlier checkpoint"


def read_state(path: Path) -> TrainerState:
    """Return where the run stood at a checkpoint; files that are not those that training wrote are refused."""
    document = _read_trainer(path)
    hashes = document.pop("sha256")
    for name, recorded in hashes.items():
        source = path / name
        if not source.is_file() or files.sha256(source) != recorded:
            raise IsolossError(f"{source} is damaged: {_REMEDY}")
    return TrainerState(**{**document, "targets_reached": tuple(document["targets_reached"])})


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise IsolossError(f"{path} is not a readable safetensors file: {error}") from error
