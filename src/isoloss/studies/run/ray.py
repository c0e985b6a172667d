"""The Ray executor: each attempt is a Ray task, on a cluster or on this machine.

This process, the driver, holds the leases. If a node dies, only its attempts are affected: their units resume from
their files on other nodes. All nodes share the study's folder.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isoloss.errors import IsolossError
from isoloss.studies.plan import Resources
from isoloss.studies.run import fork_server
from isoloss.studies.run.attempt import Attempt
from isoloss.studies.run.local import Capacity
from isoloss.studies.run.loop import Loop, Options

POLL_SECONDS = 0.1
PROGRESS_SECONDS = 60.0  # between two progress messages
GRACE_SECONDS = 60.0  # for commands to save after an interrupt
STOP_SECONDS = 180.0  # for tasks to end after an interrupt: their commands save
CONNECTING_SECONDS = 10.0
FOLDER_NOT_FOUND = 69  # status of a task whose node cannot see the folder: EX_UNAVAILABLE


def run(loop: Loop, options: Options) -> None:
    """Run each attempt as a Ray task with the cores, GPUs and memory that it needs, on `workers` cores at most.

    The cluster at `address`, such as `auto`, may grow and shrink meanwhile. Without an address, a cluster is started on
    this machine and ends with the study.
    """
    if not (todo := loop.todo):
        return
    loop.say(f"connecting to {options.address}" if options.address else "starting Ray on this machine")
    ray = _connect(options)
    try:
        if not options.address:  # no other machine will join
            Capacity.of_machine(os.cpu_count() or 1).check(todo)
        count = sum(node["Alive"] for node in ray.nodes())
        nodes = "1 node" if count == 1 else f"{count} nodes"
        loop.say(
            f"{len(todo)} of {len(loop.units)} units to do on {nodes}, using at most {options.workers} cores at "
            f"a time; their output is in {loop.attempts.folder}"
        )
        _carry_out_all(ray, loop)
    finally:
        ray.shutdown()


def _connect(options: Options) -> Any:
    local: dict[str, Any] = {}
    if not options.address:
        # whoever reaches Ray's ports can run code: the ports of our own cluster are those of the loopback interface,
        # and ask other users of this machine for a token. Ray reads these variables when it is imported
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # on Linux too, 127.0.0.1 stays what it is
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        local = {"_node_ip_address": "127.0.0.1", "include_dashboard": False}
    import ray

    if ray.is_initialized():
        return ray
    host, colon, port = options.address.removeprefix("ray://").rpartition(":")
    try:
        # Ray itself would wait for minutes for a head that is not there
        if colon and port.isdecimal():
            socket.create_connection((host, int(port)), timeout=CONNECTING_SECONDS).close()
        on_sigterm = signal.getsignal(signal.SIGTERM)
        ray.init(address=options.address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
        if on_sigterm is not None and threading.current_thread() is threading.main_thread():
            # ray.init has put its own handler in the place of ours
            signal.signal(signal.SIGTERM, on_sigterm)
    except (OSError, RuntimeError, ValueError) as error:
        raise IsolossError(f"no Ray cluster answers at {options.address}: {error}") from error
    return ray


def _carry_out_all(ray: Any, loop: Loop) -> None:
    running: dict[Any, Attempt] = {}  # by the reference of its Ray task
    last_message = time.monotonic()

    def fits(needs: Resources) -> bool:
        """Whether the workers allow it; Ray finds it a node, or waits for one. A larger unit runs alone."""
        used = sum(attempt.unit.needs.all_cores for attempt in running.values())
        return not used or used + needs.all_cores <= loop.options.workers

    try:
        while not loop.finished:
            while attempt := loop.take(fits):
                running[_submit(attempt)] = attempt
            for reference in ray.wait(list(running), timeout=POLL_SECONDS)[0] if running else ():
                attempt = running.pop(reference)
                status, was_stopped = _status(ray, reference, attempt, loop)
                loop.finish(attempt, status, stopped=was_stopped)
            if not running:
                time.sleep(POLL_SECONDS)
            if time.monotonic() - last_message > PROGRESS_SECONDS:
                last_message = time.monotonic()
                loop.say(
                    f"{loop.num_done} of {len(loop.units)} units done, {len(running)} running or waiting for a node"
                )
    except BaseException:
        if running:
            loop.say("stopping when the running units have saved")
        for reference in running:
            ray.cancel(reference)  # raises KeyboardInterrupt in the task, which lets its command save
        if running:
            late = ray.wait(list(running), num_returns=len(running), timeout=STOP_SECONDS)[1]
            if late:
                loop.say(f"{len(late)} tasks have not ended after {STOP_SECONDS:.0f} s; what they saved last is kept")
        for reference, attempt in running.items():
            loop.finish(attempt, _status(ray, reference, attempt, loop)[0], stopped=True)
        raise


def _submit(attempt: Attempt) -> Any:
    needs = attempt.unit.needs
    wanted: dict[str, Any] = {"num_cpus": needs.all_cores, "num_gpus": needs.all_gpus, "name": attempt.unit.name}
    if needs.memory:
        wanted["memory"] = int(needs.memory * 2**30)
    return _task().options(**wanted).remote(attempt.arguments, needs, attempt.log.absolute(), attempt.environment)


@functools.cache
def _task() -> Any:
    """Return `carry_out` as a Ray task, made only once: the cluster gets a copy of it each time it is made."""
    import ray

    # retries are the loop's: a task that Ray itself repeated would write under a lease that may be lost
    return ray.remote(max_retries=0)(carry_out)


def _note(attempt: Attempt, error: Exception) -> None:
    """Add an error to an attempt's log."""
    with attempt.log.open("a") as file:
        file.write(f"{error}\n")


def _status(ray: Any, reference: Any, attempt: Attempt, loop: Loop) -> tuple[int, bool]:
    """Return the exit status of a task's command, and whether the command was stopped or its node or worker lost."""
    try:
        status: int = ray.get(reference, timeout=0.0)
    # a failure, of which there are only so many: taken for a lost worker, a unit that is too large would be started
    # forever
    except ray.exceptions.OutOfMemoryError as error:
        _note(attempt, error)
        return 1, False
    except ray.exceptions.TaskCancelledError:
        return -signal.SIGTERM, True
    except (ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError) as error:
        # Ray makes the error of a task a subclass of what was raised there: this task was cancelled
        if isinstance(error, KeyboardInterrupt):
            return -signal.SIGTERM, True
        _note(attempt, error)
        return 1, False
    except (ray.exceptions.RayError, KeyboardInterrupt) as error:
        loop.say(f"{attempt.unit.name}: lost, {type(error).__name__}")
        return -signal.SIGTERM, True
    if status == FOLDER_NOT_FOUND:
        raise IsolossError(f"a node of the cluster cannot see {loop.folder}: put the study on shared storage")
    return status, False


def carry_out(arguments: tuple[str, ...], needs: Resources, log: Path, environment: Mapping[str, str]) -> int:
    """Run an `isoloss` command on a node and return its exit status; on an interrupt, the command saves first.

    Its output goes to `log`, in the shared folder.
    """
    if not log.is_file():
        return FOLDER_NOT_FOUND
    more = dict(environment)
    # for a task with GPUs, Ray has set the variable to those that it chose
    if not needs.gpus:
        more["CUDA_VISIBLE_DEVICES"] = ""
    fork_server.preload(arguments, needs)
    process = fork_server.start(arguments, needs, log, more)
    try:
        # in short waits: Python raises Ray's KeyboardInterrupt only between two of them
        while process.exitcode is None:
            process.join(POLL_SECONDS)
        fork_server.is_lost(process)  # a failure, which is retried
    except BaseException:
        # SIGTERM, not SIGINT: Ray's workers start other processes with SIGINT blocked
        process.terminate()
        process.join(GRACE_SECONDS)
        process.kill()
        raise
    return process.exitcode
