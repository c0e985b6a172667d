"""The loop over a plan: which units can start, and how they ended. All executors share this part.

An executor only places commands. It takes an attempt from the loop, runs its command somewhere, and says how that
ended:

    def run(loop: Loop, options: Options) -> None:
        for attempt in loop:
            loop.finish(attempt, attempt.call())

All state is in the study's folder: leases, logs and results. Any number of executors can work on one folder.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from isoloss.errors import IsolossError
from isoloss.studies.plan import Resources, Unit, check
from isoloss.studies.run import usage
from isoloss.studies.run.attempt import EXPIRY_SECONDS, Attempt, Attempts, last_lines

LOOK_SECONDS = 1.0  # between two looks at a unit that another process has
WAIT_SECONDS = 0.1  # while an executor has nothing to start
RETRY_SECONDS = 1.0  # before a unit that failed is tried again
HEARTBEATS = 6  # in the time of one expiry
BAD_INPUT = 2  # exit status of a command whose input is wrong: it would fail again


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a plan is carried out."""

    workers: int = 2  # number of cores that units may use at a time; for the executor slurm, number of workers
    retries: int = 1  # of a unit that fails; one whose input is wrong (exit status 2) is not tried again
    keep_going: bool = True  # whether other units start after one has failed
    expiry: float = EXPIRY_SECONDS  # seconds without a heartbeat after which another process may take over a unit
    worker_arguments: tuple[str, ...] = ()  # of the `isoloss` command by which another machine helps with the plan
    submit_parameters: Mapping[str, str | int | float] = field(default_factory=dict)  # of the cluster, by name
    address: str = ""  # of a cluster; empty: one is started on this machine

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise IsolossError(f"workers is {self.workers}; it must be at least 1")
        if self.retries < 0:
            raise IsolossError(f"retries is {self.retries}; it must be at least 0")


class Executor(Protocol):
    """Carries out a plan; registered in `isoloss.registry.EXECUTORS`."""

    def __call__(self, loop: Loop, options: Options) -> None:
        """Run the command of every attempt that the loop hands out, until `loop.finished`.

        Raises:
            KeyboardInterrupt: Passed on, after the running commands have saved and ended.
        """


class Loop:
    """The units of a plan, handed out one by one: block by block, each after those that it waits for.

    `say` is called with one line when a unit starts or ends; `num_run_here` counts the units that this process ran.
    """

    def __init__(
        self, units: Sequence[Unit], folder: Path, options: Options, *, say: Callable[[str], None] = lambda _: None
    ) -> None:
        check(units)
        self.units = sorted(units, key=lambda unit: unit.block)
        self.folder, self.options, self.say = folder, options, say
        self.attempts = Attempts(folder, options.expiry)
        self.num_run_here = 0
        # by the contents of all files, once; from now on, leases say which units to look at
        self._done = {unit.name for unit in units if unit.done()}
        self._held: dict[str, Attempt] = {}
        self._elsewhere: set[str] = set()  # another process was seen at work on them
        self._tries: dict[str, int] = {}  # failed attempts since this process started
        self._not_before: dict[str, float] = {}  # when a unit is to be looked at again
        self._given_up: dict[str, str] = {}  # failed for good, with the error messages
        self._heart: threading.Thread | None = None

    @property
    def todo(self) -> list[Unit]:
        """The units that are not done, in their order."""
        return [unit for unit in self.units if unit.name not in self._done]

    @property
    def num_done(self) -> int:
        """How many units of the plan are done."""
        return len(self._done)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to run or to wait for."""
        return not self._held and (self._has_to_stop or not any(self._open()))

    @property
    def _has_to_stop(self) -> bool:
        return bool(self._given_up) and not self.options.keep_going

    def _open(self) -> Iterator[Unit]:
        """Return the units that may start: neither done, held nor given up, and all that they wait for is done."""
        settled = self._done | self._held.keys() | self._given_up.keys()
        return (unit for unit in self.units if unit.name not in settled and self._done.issuperset(unit.after))

    def __iter__(self) -> Iterator[Attempt]:
        """Hand out one attempt after another; wait while other processes work on the rest."""
        while not self.finished:
            if attempt := self.take():
                yield attempt
            else:
                time.sleep(WAIT_SECONDS)

    def take(self, fits: Callable[[Resources], bool] = lambda _: True) -> Attempt | None:
        """Return an attempt at the first unit that can start now; None: there is none.

        `fits` says whether the executor has room for a unit with these needs.
        """
        for unit in () if self._has_to_stop else self._open():
            is_due = self._not_before.get(unit.name, 0.0) <= time.monotonic()
            if is_due and fits(unit.needs) and (attempt := self._take(unit)):
                return attempt
        return None

    def _take(self, unit: Unit) -> Attempt | None:
        number, lease = self.attempts.last(unit)
        # another process may have done it, or published it and been killed before it could record so
        if number and unit.done():
            self._note_done(unit, "done elsewhere")
            return None
        if unit.name in self._elsewhere and lease.get("final"):
            text = f"{unit.name} {lease['reason']} in another process: {lease['last_line']}"
            self._note_failure(unit, text, is_final=True)
            return None
        is_free = self.attempts.is_free(unit, number, lease)
        attempt = self.attempts.take(unit, number + 1) if is_free else None
        if attempt is None:
            self._elsewhere.add(unit.name)
            self._not_before[unit.name] = time.monotonic() + LOOK_SECONDS
            return None
        self._elsewhere.discard(unit.name)
        self._held[unit.name] = attempt
        if self._heart is None:
            self._heart = threading.Thread(target=self._beat, daemon=True)
            self._heart.start()
        try:
            attempt.prepare()
        except BaseException as error:
            del self._held[unit.name]
            if not isinstance(error, IsolossError):
                attempt.end("stopped")
                raise
            self._fail(attempt, f"{unit.name}: {error}", str(error), is_final=False)
            return None
        self.say(f"{unit.name}: started")
        return attempt

    def finish(self, attempt: Attempt, status: int, *, stopped: bool = False) -> None:
        """Record how the command of an attempt ended, and publish what it made.

        `status` is the command's exit status, negative for a signal. If the executor `stopped` the command, or lost its
        machine, a unit that is not done has not failed.
        """
        unit = attempt.unit
        del self._held[unit.name]
        # nothing is recorded or published: what the later attempt says is the state of the unit now
        if not attempt.is_held():
            os.close(attempt.descriptor)
            self.say(f"{unit.name}: another process has taken it over")
            return
        if status == 0:
            try:
                attempt.publish()
            except IsolossError as error:
                # final, as what is in the way of the rename will still be there
                self._fail(attempt, f"{unit.name}: {error}", str(error), is_final=True)
                return
        is_done = status == 0 and unit.done()  # the files decide, not the status alone
        used = usage.collect(attempt.usage, unit.needs.processes, unit.outputs if is_done else ())
        used = {"seconds": round(attempt.seconds, 3), **used}
        if is_done:
            attempt.end("done", **used)
            attempt.clean()
            self.num_run_here += 1
            self._note_done(unit, f"done in {attempt.seconds:.0f} s")
        elif stopped:
            attempt.end("stopped", **used)
        else:
            reason = "ended without its result" if status == 0 else f"failed with status {status}"
            text = f"{unit.name} {reason}; the end of {attempt.log}:\n{last_lines(attempt.log, 15)}"
            self._fail(attempt, text, reason, is_final=status == BAD_INPUT)

    def look(self) -> None:
        """See which units other processes have done, for a process that runs none."""
        for unit in self.todo:
            if self.attempts.last(unit)[1].get("end") == "done" and unit.done():
                self._note_done(unit, "done")

    def raise_failures(self) -> None:
        """Raise an `IsolossError` that names the units that failed, if any did."""
        if not self._given_up:
            return
        texts = list(self._given_up.values())
        waiting = len(self.units) - len(self._done) - len(texts)
        why = "as they wait for failed units" if self.options.keep_going else "as one has failed"
        end = f"\nnot started, {why}: {waiting} units" if waiting else ""
        if len(texts) == 1:
            raise IsolossError(texts[0] + end)
        names = ", ".join(self._given_up)
        raise IsolossError(f"{len(texts)} units failed: {names}{end}\n\n" + "\n\n".join(texts))

    def _fail(self, attempt: Attempt, text: str, reason: str, *, is_final: bool) -> None:
        is_final = is_final or self._tries.get(attempt.unit.name, 0) >= self.options.retries
        attempt.end("failed", reason=reason, final=is_final, last_line=last_lines(attempt.log))
        self._note_failure(attempt.unit, text, is_final=is_final)

    def _note_failure(self, unit: Unit, text: str, *, is_final: bool) -> None:
        """Note that a unit failed, here or elsewhere. Unless it is retried, the units that wait for it never start."""
        self._tries[unit.name] = self._tries.get(unit.name, 0) + 1
        if is_final:
            self._given_up[unit.name] = text
            self.say(text.splitlines()[0])
        else:
            self._not_before[unit.name] = time.monotonic() + RETRY_SECONDS
            self.say(f"{text.splitlines()[0]}\n  trying again in {RETRY_SECONDS:.0f} s")

    def _note_done(self, unit: Unit, how: str) -> None:
        self._done.add(unit.name)
        self.say(f"{unit.name}: {how} ({self.num_done} of {len(self.units)} units)")

    def _beat(self) -> None:
        """Renew the leases that are held, forever."""
        while True:
            time.sleep(self.options.expiry / HEARTBEATS)
            # a copy, as the main thread takes and finishes attempts meanwhile
            for attempt in list(self._held.values()):
                if attempt.is_held():
                    attempt.renew()
