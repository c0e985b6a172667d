"""The status of studies with thousands of runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from isoloss import config as configs
from isoloss.runs import Run
from isoloss.studies import load_study
from isoloss.studies.folder import StudyFolder
from isoloss.studies.run.attempt import Attempts
from isoloss.studies.run.attempt import folder as folder_of
from isoloss.studies.run.loop import Loop, Options

REPEATS = 3  # of each command that is timed
STUDY = """
from isoloss.lab.languages.config import PCFGConfig
from isoloss.run_config import ModelConfig, TrainConfig
from isoloss.studies import Experiment, Measurement, Scale, Study
def run(seed):
    language = PCFGConfig(levels=2, symbols_per_level=3, rules_per_symbol=3, vocab_size=8)
    config = TrainConfig(language=language, model=ModelConfig(size="d16"), steps=2, batch_size=8, seed=seed)
    part = Measurement(measures=("loss",), settings={{"loss_sentences": 16}})
    return Experiment(config=config, measurements=(part,), group="one setting")
scale = Scale(description="", experiments={{f"seed-{{seed:05d}}": run(seed) for seed in range({count})}})
STUDY = Study(name="many", scales={{"only": scale}})
"""


def status(count: int) -> dict[str, Any]:
    """Time the commands on a study of this many runs, each with one measurement, before and after all are done."""
    with tempfile.TemporaryDirectory() as temporary:
        file, path = Path(temporary) / "many.py", Path(temporary) / "out"
        file.write_text(STUDY.format(count=count))
        row: dict[str, Any] = {"runs": count, "plan_new_seconds": _seconds("plan", file, path)}
        folder = StudyFolder(load_study(file), path)
        start = time.perf_counter()
        folder.prepare()
        row["prepare_seconds"] = time.perf_counter() - start
        row["schedule_new_seconds"] = _schedule(folder)
        _fill(folder)
        row["status_seconds"] = _seconds("status", file, path)
        row["plan_done_seconds"] = _seconds("plan", file, path)
        shutil.rmtree(path / "units")
        row["status_without_leases_seconds"] = _seconds("status", file, path, repeats=1)
        row["schedule_done_seconds"] = _schedule(folder)
    print(row, flush=True)
    return row


def _seconds(action: str, file: Path, folder: Path, repeats: int = REPEATS) -> list[float]:
    """Return the times of `isoloss study ACTION`, from starting Python to the end of the output."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        words = [sys.executable, "-m", "isoloss", "study", action, str(file), "--folder", str(folder)]
        text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        found.append(time.perf_counter() - start)
        assert len(text.splitlines()) > len(folder.name)
    return found


def _schedule(folder: StudyFolder) -> float:
    """Return the seconds until an executor could take the first job, including the time to read all existing files."""
    start = time.perf_counter()
    Loop(folder.plan(), folder.path, Options())
    return time.perf_counter() - start


def _fill(folder: StudyFolder) -> None:
    """Carry out the first run and its measurement; give all others its files, and all units their leases.

    The weights are links to the same file; the other files are copies, and each run.json has its own config.
    """
    units = folder.plan()
    first = Run(folder.path / "runs" / next(iter(folder.scale.experiments)))
    for unit in units[:2]:
        words = [sys.executable, "-m", "isoloss", *unit.arguments]
        subprocess.run(words, check=True, capture_output=True)
    for name, experiment in folder.scale.experiments.items():
        if (path := first.path.with_name(name)) == first.path:
            continue
        shutil.copytree(first.path, path, copy_function=_link_weights)
        record = first.record
        config = configs.to_dict(experiment.config)
        record |= {"config": config, "fingerprint": configs.fingerprint(experiment.config), "seed": config["seed"]}
        (path / "run.json").write_text(json.dumps(record, indent=1))
    attempts = Attempts(folder.path)
    for unit in units:
        attempt = attempts.take(unit, 1)
        assert attempt is not None
        attempt.end("done", seconds=1.0)
    assert all(unit.done() for unit in units)
    assert not any(folder_of(unit.outputs[0], 1).name.startswith(".") for unit in units if unit.outputs)


def _link_weights(source: str, target: str) -> None:
    if "/checkpoints/" in source:
        os.link(source, target)
    else:
        shutil.copyfile(source, target)
