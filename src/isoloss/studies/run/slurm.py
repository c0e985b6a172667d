"""The Slurm executor: workers, submitted through submitit, that take units from the study's folder.

Each worker is a Slurm job that runs `isoloss study work` on the folder, which all machines share. So Slurm need not
know which units depend on which. Before its time limit, a worker lets its units save, and submitit requeues it.
"""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoloss.errors import IsolossError
from isoloss.studies.run.loop import Loop, Options

if TYPE_CHECKING:
    import submitit

POLL_SECONDS = 2.0
PROGRESS_SECONDS = 60.0  # between two progress messages
GRACE_SECONDS = 60.0  # for a worker to save after an interrupt
CLUSTERS = ("slurm", "local", "debug")


@dataclass(frozen=True)
class Worker:
    """What a Slurm job runs: an `isoloss` command that carries out units of the plan until none is left."""

    arguments: tuple[str, ...]

    def __call__(self) -> int:
        """Run the command; when the job is interrupted, the command saves first."""
        # a process of its own: at the time limit, submitit's handler requeues the job and raises SystemExit in this
        # one, which leaves the command time to save
        process = subprocess.Popen([sys.executable, "-m", "isoloss", *self.arguments])
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(GRACE_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Return what submitit requeues before the time limit: this same worker, as all state is in the folder."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def run(loop: Loop, options: Options) -> None:
    """Submit workers, and watch the folder until all units are done; this process takes no attempt.

    `workers` is the number of Slurm jobs, each with enough cores and GPUs for the largest unit. `submit_parameters` go
    to submitit's `AutoExecutor.update_parameters`, but for `cluster`: `slurm`, or `local` to try it on this machine.
    Workers that all end without finishing a unit are an error.
    """
    if not (todo := loop.todo):
        return
    executor, cores = _executor(loop, options, loop.folder)
    work = (*options.worker_arguments, "--workers", str(cores))
    loop.say(
        f"{len(todo)} of {len(loop.units)} units to do by {options.workers} jobs; "
        f"their output is in {loop.attempts.folder}"
    )
    running: list[Any] = []
    last_message = time.monotonic()
    # below 0, so that workers are submitted at least once
    done_before = -1
    try:
        while True:
            have_ended = all(job.done() for job in running)
            # after the look at the jobs, so that it sees what the last worker wrote
            loop.look()
            if not loop.todo:
                return
            if have_ended:
                # workers that finish no unit would otherwise be submitted forever
                if loop.num_done == done_before:
                    raise IsolossError(_without_progress(running))
                done_before = loop.num_done
                count = min(options.workers, len(loop.units) - loop.num_done)
                running = executor.submit_array([Worker(work)] * count)
                loop.say(f"submitted {count} jobs: {', '.join(job.job_id for job in running)}")
            time.sleep(POLL_SECONDS)
            if time.monotonic() - last_message > PROGRESS_SECONDS:
                last_message = time.monotonic()
                loop.say(f"{loop.num_done} of {len(loop.units)} units done")
    except BaseException:
        for job in running:
            job.cancel()
        raise


def _executor(loop: Loop, options: Options, folder: Path) -> tuple[Any, int]:
    """Return submitit's executor and the number of cores of each worker."""
    import submitit

    submitted = dict(options.submit_parameters)
    cluster = submitted.pop("cluster", "slurm")
    if cluster not in CLUSTERS:
        raise IsolossError(f"cluster is {cluster!r}; it must be one of {', '.join(CLUSTERS)}")
    if cluster == "slurm" and shutil.which("sbatch") is None:
        raise IsolossError(
            "this machine has no sbatch to submit Slurm jobs; to try the executor here, give --submit cluster=local"
        )
    needs = [unit.needs for unit in loop.units]
    parameters: dict[str, Any] = {
        "name": "isoloss",
        "timeout_min": 60,
        "nodes": 1,
        "tasks_per_node": 1,
        "cpus_per_task": max(each.all_cores for each in needs),
        "gpus_per_node": math.ceil(max(each.all_gpus for each in needs)),
        **submitted,
    }
    if memory := max(each.memory for each in needs):
        parameters.setdefault("mem_gb", memory)
    # a unit may take longer than any number of time limits
    executor = submitit.AutoExecutor(folder=folder / "slurm", cluster=cluster, slurm_max_num_timeout=100_000)
    try:
        executor.update_parameters(**parameters)
    except (NameError, TypeError, ValueError) as error:
        raise IsolossError(f"--submit: {error}") from error
    return executor, parameters["cpus_per_task"]


def _without_progress(workers: list[Any]) -> str:
    """Return the error message for workers that ended without finishing a unit, with what one of them printed."""
    texts = [text.strip() for worker in workers for text in (worker.stderr(), worker.stdout()) if text]
    end = "\n".join(texts[0].splitlines()[-15:]) if texts else "(nothing)"
    return f"the workers ended, but no unit was done; the end of what one printed:\n{end}"
