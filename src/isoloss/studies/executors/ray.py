"""The Ray executor: each job is a Ray task, on a cluster or on this machine.

This process holds the leases. If a node dies, only the jobs on it are affected: they resume from their files on another
node. All nodes share the study's folder.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.studies.capacity import Capacity
from isoloss.studies.executors import warm
from isoloss.studies.job import Job, Options, command
from isoloss.studies.jobs import Jobs
from isoloss.studies.plan import Resources

POLL_SECONDS = 0.1
SAY_SECONDS = 60.0
GRACE_SECONDS = 60.0  # for commands to save after an interrupt
CONNECTING_SECONDS = 10.0
UNSEEN = 69  # status of a task whose node does not see the folder: EX_UNAVAILABLE


def run(jobs: Jobs, options: Options) -> None:
    """Run each job as a Ray task with the cores, GPUs and memory that it needs.

    Args:
        jobs: The jobs.
        options: How they are carried out: at most `workers` cores are used at a time; `address` is that of a cluster,
            such as `auto`; without it, one is started on this machine and ends with the study.

    Raises:
        IsolossError: Ray is missing, or there is no cluster at that address; a node does not see the folder.
        KeyboardInterrupt: Passed on after the commands have saved.
    """
    todo = [unit for unit in jobs.units if not jobs.is_done(unit)]
    if not todo:
        return
    ray = _connect(options)
    try:
        resources = ray.cluster_resources()
        cores = int(resources.get("CPU", 0))
        if not options.address:  # no other machine will join
            gpus = {str(i): 1.0 for i in range(int(resources.get("GPU", 0)))}
            Capacity(cores, gpus, resources.get("memory", 0.0) / 2**30).check(todo)
        workers = min(options.workers, cores) if cores else options.workers
        task = ray.remote(max_retries=0)(carry_out)
        nodes = sum(node["Alive"] for node in ray.nodes())
        jobs.say(
            f"{len(todo)} of {len(jobs.units)} units to do on {nodes} nodes, {workers} cores at a time; "
            f"their output is in {jobs.logs}"
        )
        _carry_out_all(ray, task, jobs, workers)
    finally:
        ray.shutdown()


def _connect(options: Options) -> Any:
    try:
        import ray
    except ImportError:
        raise IsolossError("the executor ray needs Ray: pip install 'isoloss[ray]'") from None
    if ray.is_initialized():
        return ray
    host, colon, port = options.address.removeprefix("ray://").rpartition(":")
    try:
        if colon and port.isdecimal():  # Ray itself would wait for minutes
            socket.create_connection((host, int(port)), timeout=CONNECTING_SECONDS).close()
        ray.init(address=options.address or "local", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise IsolossError(f"no Ray cluster answers at {options.address}: {error}") from error
    return ray


def _carry_out_all(ray: Any, task: Any, jobs: Jobs, workers: int) -> None:
    running: dict[Any, Job] = {}
    free = workers
    told = time.monotonic()
    try:
        while not jobs.finished:
            while free > 0 and (job := jobs.next(functools.partial(_fits, free, workers))):
                running[_submit(task, job)] = job
                free -= job.unit.needs.all_cores
            jobs.tell()
            if not running:
                time.sleep(POLL_SECONDS)
                continue
            for reference in ray.wait(list(running), timeout=POLL_SECONDS)[0]:
                job = running.pop(reference)
                free += job.unit.needs.all_cores
                status, was_stopped = _status(ray, reference, job, jobs)
                jobs.ended(job, status, stopped=was_stopped)
            for reference, job in running.items():
                if job in jobs.lost:
                    ray.cancel(reference, force=True)
            if time.monotonic() - told > SAY_SECONDS:
                told = time.monotonic()
                jobs.say(
                    f"{jobs.num_done} of {len(jobs.units)} units done, {len(running)} running or waiting for a node"
                )
    except BaseException:
        for reference in running:
            ray.cancel(reference)  # raises KeyboardInterrupt in the task, which lets its command save
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=GRACE_SECONDS)
        for reference, job in running.items():
            jobs.ended(job, _status(ray, reference, job, jobs)[0], stopped=True)
        raise


def _fits(free: int, workers: int, needs: Resources) -> bool:
    """Whether a unit's cores are free; one that needs more than `workers` starts when nothing else runs."""
    return needs.all_cores <= free or free == workers


def _submit(task: Any, job: Job) -> Any:
    needs = job.unit.needs
    wanted: dict[str, Any] = {"num_cpus": needs.all_cores, "num_gpus": needs.all_gpus, "name": job.unit.name}
    if needs.memory:
        wanted["memory"] = int(needs.memory * 2**30)
    return task.options(**wanted).remote(job.arguments, needs, str(job.log.absolute()), job.environment)


def _status(ray: Any, reference: Any, job: Job, jobs: Jobs) -> tuple[int, bool]:
    """Return the exit status of a task's command; that of a stopped command if its node or worker was lost."""
    try:
        status: int = ray.get(reference, timeout=0)
    except ray.exceptions.OutOfMemoryError as error:
        with job.log.open("a") as file:
            file.write(f"{error}\n")
        return 1, False
    except ray.exceptions.TaskCancelledError:
        return -signal.SIGTERM, True
    except (ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError) as error:
        if isinstance(error, KeyboardInterrupt):  # of a task that was cancelled
            return -signal.SIGTERM, True
        with job.log.open("a") as file:
            file.write(f"{error}\n")
        return 1, False
    except (ray.exceptions.RayError, KeyboardInterrupt) as error:
        jobs.say(f"{job.unit.name}: lost, {type(error).__name__}")
        return -signal.SIGTERM, True
    if status == UNSEEN:
        raise IsolossError(f"a node of the cluster does not see {jobs.logs.parent}: put the study on shared storage")
    return status, False


def carry_out(arguments: tuple[str, ...], needs: Resources, log: str, environment: Mapping[str, str]) -> int:
    """Run an `isoloss` command on a node and return its exit status; an interrupt lets it save first.

    Args:
        arguments: Arguments of the command.
        needs: What the command needs; Ray has placed it accordingly.
        log: File for its output, in the shared folder.
        environment: Further environment variables.
    """
    if not Path(environment[files.LEASE]).is_file():
        return UNSEEN
    more = dict(environment)
    if not needs.gpus:
        more["CUDA_VISIBLE_DEVICES"] = ""
    if warm.can_fork(needs):
        process: Any = _parent().start(arguments, Path(log), more)
    else:
        with Path(log).open("wb") as file:
            process = subprocess.Popen(
                command(arguments, needs),
                stdin=subprocess.PIPE,  # never written to: its closing tells the command that the task is gone
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **more, **warm.EXIT_WITH_STDIN},
                start_new_session=True,
            )
    try:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
    except BaseException:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_SECONDS)
        if process.poll() is None:
            process.kill()
        raise
    return int(process.returncode)


@functools.cache
def _parent() -> warm.WarmProcess:
    """The process from which this Ray worker forks its commands."""
    return warm.WarmProcess()
