"""The local executor: worker processes on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass

from isoloss.studies.capacity import Capacity
from isoloss.studies.executors import warm
from isoloss.studies.executors.warm import WarmCommand, WarmProcess
from isoloss.studies.job import Job, Options, last_line
from isoloss.studies.jobs import Jobs

POLL_SECONDS = 0.05
PROGRESS_SECONDS = 30.0  # between two progress messages
GRACE_SECONDS = 60.0  # for commands to save after an interrupt


@dataclass
class _Worker:
    job: Job
    process: subprocess.Popen[bytes] | WarmCommand
    gpus: tuple[str, ...]


def run(jobs: Jobs, options: Options) -> None:
    """Run each job in its own process, as many at a time as cores, GPUs and memory allow.

    A job gets the GPUs, or the fraction of one, that it needs through `CUDA_VISIBLE_DEVICES`. On Linux, jobs that
    train or measure with one thread are forked from a process that has already imported everything
    (`isoloss.studies.executors.warm`). If this process ends for any reason, so do the jobs; when run again, their
    commands resume from their files.

    Args:
        jobs: The jobs.
        options: `workers` is the number of cores.

    Raises:
        IsolossError: A job needs more than the machine has, or a file cannot be written.
        KeyboardInterrupt: Passed on after the commands have saved.
    """
    capacity = Capacity.of_machine(options.workers)
    todo = [unit for unit in jobs.units if not jobs.is_done(unit)]
    capacity.check(todo)
    if not todo:
        return
    where = f"{options.workers} at a time" + (f" on {len(capacity.gpus)} GPUs" if capacity.gpus else "")
    jobs.say(f"{len(todo)} of {len(jobs.units)} units to do, {where}; their output is in {jobs.logs}")
    running: list[_Worker] = []
    parent: WarmProcess | None = None
    last_message = time.monotonic()
    try:
        while not jobs.finished:
            while capacity.cores > 0 and (job := jobs.take(capacity.fits)):
                gpus = capacity.take(job.unit.needs) or ()
                if parent is None and warm.can_fork(job.unit.arguments, job.unit.needs):
                    parent = WarmProcess()
                running.append(_Worker(job, _start(job, gpus, parent), gpus))
            jobs.report_done()
            time.sleep(POLL_SECONDS)
            for worker in list(running):
                if worker.job in jobs.taken_over:
                    worker.process.kill()
                if (status := worker.process.poll()) is not None:
                    running.remove(worker)
                    _close(worker)
                    capacity.give_back(worker.job.unit.needs, worker.gpus)
                    jobs.finish(worker.job, status)
            if time.monotonic() - last_message > PROGRESS_SECONDS:
                last_message = time.monotonic()
                for worker in running:
                    name, seconds = worker.job.unit.name, worker.job.seconds
                    jobs.say(f"  {last_line(worker.job.log) or f'{name}: running for {seconds:.0f} s'}")
    except BaseException:
        _stop(jobs, running)
        raise
    finally:
        if parent is not None:
            parent.close()


def _start(job: Job, gpus: tuple[str, ...], parent: WarmProcess | None) -> subprocess.Popen[bytes] | WarmCommand:
    environment = {**job.environment, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    if parent is not None and warm.can_fork(job.unit.arguments, job.unit.needs):
        return parent.start(job.arguments, job.log, environment)
    with job.log.open("wb") as file:
        return subprocess.Popen(
            job.command,
            stdin=subprocess.PIPE,  # never written to: its closing tells the command that the executor is gone
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, **warm.EXIT_WITH_STDIN},
            start_new_session=True,  # so that Ctrl-C reaches only the executor, which passes it on
        )


def _stop(jobs: Jobs, running: list[_Worker]) -> None:
    """Interrupt the commands so that they save and end; kill those that take too long."""
    if running:
        jobs.say("stopping when the running units have saved; Ctrl-C again kills them")
    for worker in running:
        worker.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        for worker in running:
            worker.process.wait(timeout=max(0.1, deadline - time.monotonic()))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        for worker in running:
            worker.process.kill()
    for worker in running:
        worker.process.wait(timeout=GRACE_SECONDS)
        _close(worker)
        status = worker.process.returncode
        jobs.finish(worker.job, -signal.SIGKILL if status is None else status, stopped=True)


def _close(worker: _Worker) -> None:
    if isinstance(worker.process, subprocess.Popen):
        assert worker.process.stdin is not None
        worker.process.stdin.close()
