"""An executor: one job after another, on this machine."""

from typing import Any


def run(jobs: Any, options: Any) -> None:
    """Run the command of every job; its output is in the job's log."""
    for job in jobs:  # waits while other processes have the rest
        jobs.say(f"{job.unit.name}: isoloss {' '.join(job.arguments)}")
        jobs.finish(job, job.call())
