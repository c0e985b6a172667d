"""An executor: one attempt after another, on this machine."""

from typing import Any


def run(loop: Any, options: Any) -> None:
    """Run the command of every attempt; its output is in the attempt's log."""
    for attempt in loop:  # waits while other processes have the rest
        loop.say(f"{attempt.unit.name}: isoloss {' '.join(attempt.arguments)}")
        loop.finish(attempt, attempt.call())
