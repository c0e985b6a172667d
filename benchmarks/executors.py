"""How much time executors add to each job, and how long `study status` takes.

Without an option, it times empty jobs by each executor, and the same commands without an executor. There are two
commands. `--version` is the shortest: it starts Python, prints a line and exits. `eval` is a unit of a study on a
checkpoint that has been evaluated: it loads everything, writes the evaluation again and exits.

`--status` plans and shows a study of 10,000 runs: see `executors_scale.py`. Each part keeps what the other wrote to
results/executors.json.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # as for units with one core

import executors_page
import executors_scale
from timing import record_of

from isoloss.files import write_text
from isoloss.studies.plan import Unit
from isoloss.studies.run import local, ray, slurm
from isoloss.studies.run.loop import Loop, Options

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("isoloss", "ray", "submitit", "torch")
WORKERS = 2
EXECUTORS = {"local": local.run, "ray": ray.run, "slurm-local": slurm.run}
SAMPLES = {"--version": 200, "eval": 16}  # at most so many bare commands are timed in one turn
DISTURBED = 1.3  # a turn is repeated if the bare commands before and after it differ by more than this factor
STUDY = """
import sys
sys.path.insert(0, {here!r})
import executors
from isoloss.lab.languages.config import PCFGConfig
from isoloss.run_config import TrainConfig
from isoloss.studies import Experiment, Measurement, Scale, Study
from isoloss.studies.folder import StudyFolder
run = Experiment(config=TrainConfig(language=PCFGConfig(levels=2)), measurements=(Measurement(measures=("loss",)),))
STUDY = Study(name="empty", scales={{"only": Scale(description="", experiments={{"run": run}})}})
# a study's own units train or measure; the workers that submitit starts get empty ones instead
StudyFolder.plan = lambda folder: executors.empty_jobs(folder.path, {arguments!r}, {count})
"""


@dataclass(frozen=True)
class Turn:
    """Seconds per job that an executor took, and the bare commands before and after it."""

    seconds: float
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """The executor's seconds over those of the bare commands."""
        return self.seconds / statistics.mean((self.before, self.after))

    @property
    def disturbed(self) -> bool:
        """Whether the machine's speed differed before and after the executor's turn."""
        return max(self.before, self.after) / min(self.before, self.after) > DISTURBED


# --- the jobs


def _has_written(log: Path) -> bool:
    return log.is_file() and log.stat().st_size > 0


def empty_jobs(folder: Path, arguments: Sequence[str], count: int) -> list[Unit]:
    """Return units that run the same command, each done when the command has written to its log."""
    names = [f"job-{i}" for i in range(count)]
    logs = [folder / "units" / name / "1.log" for name in names]
    return [
        Unit(name=name, arguments=tuple(arguments), done=functools.partial(_has_written, log))
        for name, log in zip(names, logs, strict=True)
    ]


def bare(arguments: Sequence[str], count: int, folder: Path) -> float:
    """Run the command `count` times by `subprocess.run`, `WORKERS` at a time; return the seconds per job."""
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(functools.partial(_call, arguments, folder), range(count)))
    return (time.perf_counter() - start) / count


def _call(arguments: Sequence[str], folder: Path, i: int) -> None:
    command = [sys.executable, "-m", "isoloss", *arguments]
    with (folder / f"{i}.log").open("wb") as log:
        # in a session of its own, as under an executor: Linux divides processor time among sessions
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True, start_new_session=True)


def bare_ray(address: str, arguments: Sequence[str], few: int, count: int, folder: Path) -> float:
    """Run the command as Ray tasks, `few` instead of `count`, and return the seconds per job.

    These include the part of a job, if there were `count`, of connecting to the cluster and disconnecting.
    """
    import ray as library

    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    library.init(address=address, log_to_driver=False, logging_level="ERROR")
    connected = time.perf_counter()

    def call(i: int) -> None:  # sent with its code, as the cluster's processes cannot import this module
        with open(f"{folder}/{i}.log", "wb") as log:
            subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True, start_new_session=True)

    command = [sys.executable, "-m", "isoloss", *arguments]
    task = library.remote(num_cpus=1, max_retries=0)(call)
    library.get([task.remote(i) for i in range(few)])
    ended = time.perf_counter()
    library.shutdown()
    return (connected - start + time.perf_counter() - ended) / count + (ended - connected) / few


def by_executor(name: str, address: str, arguments: Sequence[str], count: int, folder: Path) -> float:
    """Make a plan of empty jobs and carry it out by an executor; return the seconds per job."""
    worker: tuple[str, ...] = ()
    if name == "slurm-local":
        from isoloss.studies import load_study
        from isoloss.studies.folder import StudyFolder

        folder.mkdir(parents=True)
        file = folder.with_name(f"{folder.name}.py")
        file.write_text(STUDY.format(here=str(Path(__file__).parent), arguments=tuple(arguments), count=count))
        StudyFolder(load_study(file), folder).prepare()
        worker = ("study", "work", str(file), "--folder", str(folder))
    start = time.perf_counter()
    options = Options(
        workers=WORKERS,
        worker_arguments=worker,
        submit_parameters={"cluster": "local"} if worker else {},
        address=address if name == "ray" else "",
    )
    loop = Loop(empty_jobs(folder, arguments, count), folder, options)
    EXECUTORS[name](loop, options)
    loop.raise_failures()
    seconds = time.perf_counter() - start
    assert loop.num_done == count
    return seconds / count


def in_own_process(function: Callable[..., float], *arguments: Any) -> float:
    """Call a function in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


# --- turns


def measure(name: str, command: str, arguments: Sequence[str], count: int, rounds: int, address: str) -> dict[str, Any]:
    """Let an executor and the bare commands take turns; repeat turns in which the machine's speed changed."""
    few = min(count, SAMPLES[command])
    turns: list[Turn] = []
    dropped: list[Turn] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def without_executor(i: int) -> float:
            place = folder / f"bare-{i}"
            if name == "ray":
                return in_own_process(bare_ray, address, arguments, few, count, place)
            return bare(arguments, few, place)

        before = without_executor(0)
        while len(turns) < rounds:
            i = len(turns) + len(dropped) + 1
            seconds = in_own_process(by_executor, name, address, arguments, count, folder / f"study-{i}")
            after = without_executor(i)
            turn = Turn(seconds, before, after)
            before = after
            print(f"{name}, {command}, {count} jobs: {turn}, {turn.ratio:.2f} times", flush=True)
            if turn.disturbed and len(dropped) < rounds:
                dropped.append(turn)
            else:
                turns.append(turn)
    ratios = [turn.ratio for turn in turns]
    return {
        "executor": name,
        "command": command,
        "jobs": count,
        "rounds": rounds,
        "ratios_repeated": [turn.ratio for turn in dropped],
        "seconds_a_job": statistics.median(turn.seconds for turn in turns),
        "bare_seconds_a_job": statistics.median(second for turn in turns for second in (turn.before, turn.after)),
        "bare_jobs": few,
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "largest_change_of_bare": max(max(t.before, t.after) / min(t.before, t.after) for t in turns),
    }


def evaluated_run(folder: Path) -> list[str]:
    """Make a run and its evaluation; return the arguments of the command that measures it."""
    run = str(folder / "run")
    few = ("--language", "pcfg-laptop", "--size", "d16", "--steps", "2", "--batch-size", "8")
    arguments = ["measure", run, "--measures", "trace", "--num-sequences", "16", "--device", "cpu", "--threads", "1"]
    for words in (["train", run, *few, "--device", "cpu", "--threads", "1"], arguments):
        subprocess.run([sys.executable, "-m", "isoloss", *words], check=True, stdout=subprocess.DEVNULL)
    return arguments


def overhead(executors: Sequence[str], commands: Sequence[str], sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measure executors at each size, with fewer rounds for more jobs."""
    record = _record()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        all_arguments = {
            "--version": ["--version"],
            "eval": evaluated_run(Path(temporary)) if "eval" in commands else [],
        }
        for name in executors:
            with _cluster(WORKERS) if name == "ray" else contextlib.nullcontext("") as address:
                for command in commands:
                    for count in sizes:
                        turns = max(1, rounds if count <= 100 else rounds // 2 if count <= 1000 else 1)
                        rows.append(measure(name, command, all_arguments[command], count, turns, address))
    return record | {"workers": WORKERS, "results": rows}


@contextlib.contextmanager
def _cluster(workers: int) -> Iterator[str]:
    """Start a Ray cluster on this machine with a core for each worker, and give its address."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": workers, "include_dashboard": False})
    try:
        yield made.address
    finally:
        made.shutdown()


# --- the record


def _record() -> dict[str, Any]:
    record = record_of("executors.py", LIBRARIES)
    return record | {"machine": record["machine"].replace("of which one is used", "of which all are used")}


def keep(output: Path, part: str, record: dict[str, Any], key: Callable[[dict[str, Any]], object]) -> None:
    """Add a part to the record, replacing rows with the same key, and write the page."""
    document = json.loads(output.read_text()) if output.is_file() else {}
    new = {key(row) for row in record["results"]}
    about = {name: record[name] for name in ("command", "date", "load")}
    rows = [row for row in document.get(part, {}).get("results", []) if key(row) not in new]
    rows += [row | {"run": about} for row in record["results"]]
    document[part] = record | {"results": sorted(rows, key=lambda row: str(row.get("executor", "")))}
    write_text(output, json.dumps(document, indent=1) + "\n")
    write_text(output.with_suffix(".md"), executors_page.page(document))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executors", nargs="+", choices=EXECUTORS, default=list(EXECUTORS))
    parser.add_argument("--commands", nargs="+", choices=SAMPLES, default=list(SAMPLES))
    parser.add_argument("--jobs", nargs="+", type=int, help="numbers of jobs; for --status, of runs")
    parser.add_argument("--rounds", type=int, default=4, help="turns with up to 100 jobs; larger sizes get fewer")
    parser.add_argument("--status", action="store_true", help="time study plan, scheduling and study status")
    parser.add_argument(
        "--output", type=Path, default=RESULTS / "executors.json", help="results; the page is next to it, .md"
    )
    options = parser.parse_args()
    sizes = options.jobs or ([10_000] if options.status else [10, 1000])
    if options.status:
        record = _record()
        record |= {"results": [executors_scale.status(count) for count in sizes]}
        keep(options.output, "status", record, lambda row: row["runs"])
    else:
        record = overhead(options.executors, options.commands, sizes, options.rounds)
        keep(options.output, "overhead", record, lambda row: (row["executor"], row["command"], row["jobs"]))
    print(options.output.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
