"""Plans of up to 100,000 jobs without their commands, and the status of studies with thousands of runs.

The simulation uses the real `Loop`, leases, attempts and files. Only the commands are missing: a job writes the files
that its command would leave, and ends after a randomly drawn time on a simulated clock, so that 1,000 workers do not
need 1,000 cores. Each process is one executor with its part of the workers and its own clock; all share one folder.
"""

from __future__ import annotations

import functools
import heapq
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from isoloss import config as configs
from isoloss.runs import Run
from isoloss.studies.folder import StudyFolder
from isoloss.studies.plan import Unit, in_order
from isoloss.studies.run.attempt import Attempt
from isoloss.studies.run.attempt import folder as folder_of
from isoloss.studies.run.lease import Lease, Leases
from isoloss.studies.run.loop import Loop, Options
from isoloss.studies.spec import load_study

WORKERS = 1000
PROCESSES = (1, 4)  # over which the workers are distributed
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # files in memory, so that a disk's speed does not matter
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


# --- the simulation


class CountingLeases(Leases):
    """Leases that count how often another process was faster."""

    missed = 0

    def take(self, unit: str, number: int) -> Lease | None:
        """Take an attempt at a unit."""
        lease = super().take(unit, number)
        self.missed += lease is None
        return lease


def plan(folder: Path, count: int) -> list[Unit]:
    """Return the units of a study with half as many runs as units: each is trained, then measured."""
    units = []
    for i in range(count // 2):
        run = Run(folder / "runs" / f"run-{i}")
        done = functools.partial(_is_measured, run)
        train = ("train", str(run.path))
        units += [
            Unit(name=f"train {i}", arguments=train, outputs=(run.path,), done=lambda run=run: run.complete),
            Unit(name=f"measure {i}", arguments=("measure", str(run.path)), done=done, after=(f"train {i}",)),
        ]
    return units


def _is_measured(run: Run) -> bool:
    return run.evaluation_path("loss", 1).is_file()


def work(folder: Path, count: int, workers: int, seed: int) -> dict[str, Any]:
    """Act as an executor with this many workers until the plan is done; return what was done and the time it took."""
    began, used = time.perf_counter(), time.process_time()
    units = in_order(plan(folder, count))
    planned = time.perf_counter() - began
    options = Options(workers=workers)
    loop = Loop(units, folder, options)
    loop.leases = CountingLeases(loop.leases.folder, options.expiry)
    ready = time.perf_counter() - began
    draw, now, finished = random.Random(seed), 0.0, list[str]()
    running: list[tuple[float, int, Attempt]] = []
    while not loop.finished:
        while len(running) < workers and (job := loop.take()):
            heapq.heappush(running, (now + draw.uniform(1.0, 100.0), len(finished) + len(running), job))
        loop.report_done()
        if not running:
            time.sleep(0.01)  # other processes have the rest
            continue
        now, _, job = heapq.heappop(running)
        _leave_files(job, folder)
        loop.finish(job, 0)
        finished.append(job.unit.name)
    return {
        "finished": finished,
        "plan_seconds": planned,
        "jobs_seconds": ready - planned,
        "processor_seconds": time.process_time() - used,
        "missed": loop.leases.missed,
    }


def _leave_files(job: Attempt, folder: Path) -> None:
    """Write the files that the job's command would, and a line that records that it ran."""
    path = Path(job.arguments[1])
    if job.unit.outputs:
        path.mkdir(parents=True)
        (path / "run.json").write_text("{}")
        (path / "result.json").write_text("{}")
    else:
        target = Run(path).evaluation_path("loss", 1)
        target.parent.mkdir()
        target.write_text("{}")
    with (folder / "commands.txt").open("a") as file:
        file.write(f"{job.unit.name}\n")


def simulate(count: int) -> dict[str, Any]:
    """Carry out a plan of this many jobs with one process and with several; check that each job was taken once."""
    return {"jobs": count, "workers": WORKERS, "by": [_simulate(count, processes) for processes in PROCESSES]}


def _simulate(count: int, processes: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(dir=MEMORY) as temporary,
        multiprocessing.get_context("spawn").Pool(processes) as pool,
    ):
        folder = Path(temporary)
        start = time.perf_counter()
        parts = pool.starmap(work, [(folder, count, WORKERS // processes, seed) for seed in range(processes)])
        seconds = time.perf_counter() - start
        _check_once(folder, count, [name for part in parts for name in part["finished"]])
        start = time.perf_counter()
        attempts_seen = Leases(folder / "leases").attempts()
        listing = time.perf_counter() - start
        assert len(attempts_seen) == count
    row = {
        "processes": processes,
        "plan_seconds": max(part["plan_seconds"] for part in parts),
        "jobs_seconds": max(part["jobs_seconds"] for part in parts),
        "seconds": seconds,
        "seconds_a_job": seconds / count,
        "processor_seconds_a_job": sum(part["processor_seconds"] for part in parts) / count,
        "missed_a_job": sum(part["missed"] for part in parts) / count,
        "listing_seconds": listing,
        "fewest_jobs_of_a_process": min(len(part["finished"]) for part in parts),
    }
    print(f"{count} jobs: {row}", flush=True)
    return row


def _check_once(folder: Path, count: int, finished: list[str]) -> None:
    """Check that every unit has one attempt, which is done, and that one command and one process made it."""
    names = sorted(unit.name for unit in plan(folder, count))
    assert sorted(finished) == names
    assert sorted((folder / "commands.txt").read_text().splitlines()) == names
    files = sorted(unit.file_name + end for unit in plan(folder, count) for end in (".1.done", ".1.json"))
    assert sorted(name for name in os.listdir(folder / "leases") if not name.startswith(".")) == files
    assert not [name for name in os.listdir(folder / "runs") if name.startswith(".")]  # no attempt is left


# --- the status of a study


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
        shutil.rmtree(path / "leases")
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
    Loop(in_order(folder.plan()), folder.path, Options())
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
    leases = Leases(folder.path / "leases")
    for unit in units:
        lease = leases.take(unit.file_name, 1)
        assert lease is not None
        lease.path.with_suffix(".done").write_text(json.dumps({"seconds": 1.0}))
    assert all(unit.done() for unit in units)
    assert not any(folder_of(unit.outputs[0], 1).name.startswith(".") for unit in units if unit.outputs)


def _link_weights(source: str, target: str) -> None:
    if "/checkpoints/" in source:
        os.link(source, target)
    else:
        shutil.copyfile(source, target)
