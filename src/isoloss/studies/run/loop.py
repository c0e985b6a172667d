"""The loop over a plan: which units can start, who works on them, and how they ended. All executors share this part.

An executor only places commands. It takes an attempt from the loop, runs its command somewhere, and says how that
ended:

    def run(loop: Loop, options: Options) -> None:
        for attempt in loop:
            loop.finish(attempt, attempt.call())

All state is in the study's folder: leases, logs and results. Any number of executors can work on one folder.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from operator import itemgetter
from pathlib import Path
from typing import Protocol

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.studies.plan import Resources, Unit, check
from isoloss.studies.run import usage
from isoloss.studies.run.attempt import Attempt, last_line, tail
from isoloss.studies.run.lease import EXPIRY_SECONDS, HEARTBEATS, Last, Leases

LOOK_SECONDS = 1.0  # between two looks at what other processes have done
LONG_LOOK = 0.05  # seconds; after a look that takes longer, the next one is put off in proportion
WAIT_SECONDS = 0.1  # while an executor has nothing to start
LONGEST_DELAY = 60.0  # before another try, in seconds
BAD_INPUT = 2  # exit status of a command whose input is wrong: it would fail again


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a plan is carried out.

    Attributes:
        workers: Number of cores that the units may use at a time; for the executor slurm, number of workers.
        retries: How many times a unit that fails is tried again, after 1, 2, 4, ... seconds. One whose input is
            wrong (exit status 2) is not retried.
        keep_going: Whether other units start after one has failed.
        expiry: Seconds without a heartbeat after which another process may take over a unit.
        worker_arguments: Arguments of the `isoloss` command with which a process on another machine helps with the
            same plan.
        submit_parameters: Parameters of the cluster, by name.
        address: Address of a cluster; empty: one is started on this machine.

    Raises:
        IsolossError: A number is out of range.
    """

    workers: int = 2
    retries: int = 2
    keep_going: bool = True
    expiry: float = EXPIRY_SECONDS
    worker_arguments: tuple[str, ...] = ()
    submit_parameters: Mapping[str, str | int | float] = field(default_factory=dict)
    address: str = ""

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
    """The units of a plan, handed out one by one.

    Args:
        units: The plan, in the order in which to start its units.
        folder: The study's folder, for `leases` and `logs`.
        options: How the plan is carried out.
        say: Called with one line when a unit starts or ends.
        on_done: Called in this process for each unit that is newly done, whoever did it; it may take seconds.

    Attributes:
        num_run_here: How many units this process has run.

    Raises:
        IsolossError: The plan is inconsistent, as for `isoloss.studies.plan.check`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        folder: Path,
        options: Options,
        *,
        say: Callable[[str], None] = lambda _: None,
        on_done: Callable[[Unit], None] = lambda _: None,
    ) -> None:
        check(units)
        self.units, self.logs, self.options, self.say = units, folder / "logs", options, say
        self.leases = Leases(folder / "leases", options.expiry)
        self.num_run_here = 0
        self._on_done, self._unseen = on_done, deque[Unit]()
        self._place = {unit.name: place for place, unit in enumerate(units)}
        self._by_file = {unit.file_name: unit for unit in units}
        self._order = TopologicalSorter({unit.name: unit.after for unit in units})
        self._order.prepare()
        # before the look at the results: a unit that ends between the two looks is then done, and does not seem to have
        # been deleted
        self._last = self.leases.attempts()  # by file name
        # by the contents of all files, once; from now on, a listing of the leases says what has changed
        self._done = {unit.name for unit in units if unit.done()}
        # recorded as done, but no longer there. Of those recorded from now on, a network file system may show the
        # result later than the record
        self._deleted = {unit.name for unit in units if unit.name not in self._done and self._state(unit).end == "done"}
        self._released: set[str] = set()  # what they wait for is done
        self._open: set[str] = set()  # of these, those that are neither done nor given up
        # plans have thousands of units and few kinds of needs: an executor is asked once a kind whether there is room
        self._ready: dict[Resources, list[int]] = {}  # a heap of places of open units for each kind of needs
        self._held: dict[str, Attempt] = {}
        self._elsewhere: set[str] = set()  # open, but another process has them
        self._tries: dict[str, int] = {}  # failed attempts since this process started
        self._not_before: dict[str, float] = {}  # when a unit that failed may be retried
        self._given_up: dict[str, str] = {}  # failed for good, with the error messages
        self._looked = self._looked_for_lost = time.monotonic()
        self._look_seconds = LOOK_SECONDS
        self._heart: threading.Thread | None = None
        self._open_next()

    @property
    def todo(self) -> list[Unit]:
        """The units that are not done."""
        return [unit for unit in self.units if unit.name not in self._done]

    @property
    def num_done(self) -> int:
        """How many units of the plan are done."""
        return len(self._done)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to run, to wait for or to report."""
        if self._held or self._unseen:
            return False
        return not self._open or self._has_to_stop

    @property
    def _has_to_stop(self) -> bool:
        return bool(self._given_up) and not self.options.keep_going

    def __iter__(self) -> Iterator[Attempt]:
        """Hand out one attempt after another; wait while other processes work on the rest."""
        while not self.finished:
            attempt = self.take()
            self.report_done()
            if attempt:
                yield attempt
            else:
                time.sleep(WAIT_SECONDS)

    def take(self, fits: Callable[[Resources], bool] = lambda _: True) -> Attempt | None:
        """Return the first attempt that can start now and whose needs fit, with its lease taken; None: there is none.

        Args:
            fits: Whether the executor has room for a unit of these needs.

        Raises:
            IsolossError: A lease, a log or a folder cannot be written.
        """
        if self._has_to_stop:
            return None
        if time.monotonic() - self._looked > self._look_seconds:
            self.refresh()
        heaps = [heap for needs, heap in self._ready.items() if heap and fits(needs)]
        delayed, attempt = list[str](), None
        while heaps and attempt is None:
            # the earliest place in the plan, over all kinds of needs that fit
            heap = min(heaps, key=itemgetter(0))
            unit = self.units[heapq.heappop(heap)]
            if not heap:
                heaps.remove(heap)
            # a heap may have a unit twice, or one that is done by now: entries are not taken out when that happens
            if unit.name not in self._open or unit.name in self._held:
                continue
            if self._not_before.get(unit.name, 0.0) > time.monotonic():
                delayed.append(unit.name)
                continue
            attempt = self._take(unit)
        for name in delayed:
            self._make_ready(name)
        return attempt

    def finish(self, attempt: Attempt, status: int, *, stopped: bool = False) -> None:
        """Record how the command of an attempt ended, and publish what it made.

        Args:
            attempt: The attempt, whose lease is given up.
            status: Exit status of its command, negative for a signal.
            stopped: Whether the executor stopped it, or lost the machine that it ran on: if its unit is not done, this
                does not count as a failure.
        """
        unit, lease = attempt.unit, attempt.lease
        del self._held[unit.name]
        # nothing is recorded or published: what the later attempt says is the state of the unit now
        if not lease.is_held():
            os.close(lease.descriptor)
            self.say(f"{unit.name}: another process has taken it over")
            self._elsewhere.add(unit.name)
            return
        if status == 0:
            try:
                attempt.publish()
            except IsolossError as error:
                # final, as what is in the way of the rename will still be there
                self._fail(attempt, f"{unit.name}: {error}", reason=str(error), is_final=True)
                return
        is_done = status == 0 and unit.done()  # the files decide, not the status alone
        used = usage.collect(attempt.usage, unit.needs.processes, unit.outputs if is_done else ())
        used = {"seconds": round(attempt.seconds, 3), **used}
        if is_done:
            lease.end("done", **used)
            attempt.clean()
            self.num_run_here += 1
            self._note_done(unit)
            self.say(f"{unit.name}: done in {attempt.seconds:.0f} s ({self.num_done} of {len(self.units)} units)")
        elif stopped:
            lease.end("stopped", **used)
            self._last[unit.file_name] = Last(lease.number, "stopped")
            self._make_ready(unit.name)
        else:
            reason = "ended without its result" if status == 0 else f"failed with status {status}"
            text = f"{unit.name} {reason}; the end of {attempt.log}:\n{tail(attempt.log)}"
            self._fail(attempt, text, reason=reason, is_final=status == BAD_INPUT)

    def report_done(self) -> None:
        """Call `on_done` for the units that are newly done. Call it while workers are busy: it may take seconds."""
        while self._unseen:
            self._on_done(self._unseen.popleft())

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

    def refresh(self) -> None:
        """See what other processes have started and finished."""
        began = time.monotonic()
        before, self._last = self._last, self.leases.attempts()
        for file_name, last in self._last.items():
            unit = self._by_file.get(file_name)
            if unit is None or unit.name in self._held or unit.name in self._done:
                continue
            if last.end == "done" and unit.done():
                self._note_done(unit)
                self.say(f"{unit.name}: done elsewhere ({self.num_done} of {len(self.units)} units)")
            # only once: a failure that was there at the last look has been noted
            elif last.end == "failed" and last != before.get(file_name):
                end = self.leases.end_record(file_name, last.number, "failed")
                text = f"{unit.name} {end.get('reason', 'failed')} in another process: {end.get('last_line', '')}"
                self._note_failure(unit, text, is_final=bool(end.get("final")))
        # units that other processes had are considered again if their attempts have ended or may be lost, which is
        # looked up once per heartbeat, as there may be many leases
        looks_for_lost = began - self._looked_for_lost >= self.options.expiry / HEARTBEATS
        if looks_for_lost:
            self._looked_for_lost = began
        for name in list(self._elsewhere):
            if looks_for_lost or self._state(self.units[self._place[name]]).end:
                self._elsewhere.discard(name)
                self._make_ready(name)
        self._looked = time.monotonic()
        # a slow file system is looked at less often, so that looking does not take most of the time
        self._look_seconds = LOOK_SECONDS * max(1.0, (self._looked - began) / LONG_LOOK)

    # --- what this process does

    def _take(self, unit: Unit) -> Attempt | None:
        """Take a unit's lease and make its folders; None: it is done or failed, or another process has it."""
        last = self._state(unit)
        if last.end == "done" and unit.done():
            self._note_done(unit)
            return None
        lease = self.leases.take(unit.file_name, last.number + 1) if self._is_free(unit, last) else None
        if lease is None:
            self._elsewhere.add(unit.name)
            return None
        self._last[unit.file_name] = Last(lease.number)
        # published by a process that was killed before it could record so. The files tell, and the new lease is given
        # up at once
        if lease.number > 1 and unit.done():
            lease.end("done")
            self._note_done(unit)
            return None
        attempt = Attempt(unit, lease, self.logs / f"{unit.file_name}.{lease.number}.log")
        try:
            # now, as `last_line` may read the log at any time from here on
            files.write_bytes(attempt.log, b"")
        except BaseException:  # nothing can be written in this folder
            lease.end("stopped")
            raise
        self._held[unit.name] = attempt
        # one thread for all leases, from the first one on: a process that only watches needs none
        if self._heart is None:
            self._heart = threading.Thread(target=self._beat, daemon=True)
            self._heart.start()
        try:
            attempt.prepare()
        except BaseException as error:
            del self._held[unit.name]
            if not isinstance(error, IsolossError):
                lease.end("stopped")
                raise
            self._fail(attempt, f"{unit.name}: {error}", reason=str(error), is_final=False)
            return None
        self.say(f"{unit.name}: started")
        return attempt

    def _is_free(self, unit: Unit, last: Last) -> bool:
        """Whether the next attempt at a unit may be made."""
        # done before, but without its result: deleted, or not yet shown by a network file system, which gets an expiry
        if last.end == "done":
            seconds = self.leases.seconds_since(unit.file_name, last.number, "done")
            return unit.name in self._deleted or seconds > self.options.expiry
        return last.number == 0 or last.end is not None or self.leases.is_lost(unit.file_name, last.number)

    def _fail(self, attempt: Attempt, text: str, *, reason: str, is_final: bool) -> None:
        unit = attempt.unit
        is_final = is_final or self._tries.get(unit.name, 0) >= self.options.retries
        attempt.lease.end("failed", reason=reason, final=is_final, last_line=last_line(attempt.log))
        self._last[unit.file_name] = Last(attempt.lease.number, "failed")
        self._note_failure(unit, text, is_final=is_final)

    def _beat(self) -> None:
        """Renew the leases that are held, forever."""
        while True:
            time.sleep(self.options.expiry / HEARTBEATS)
            # a copy, as the main thread takes and finishes attempts meanwhile
            for attempt in list(self._held.values()):
                if attempt.lease.is_held():
                    attempt.lease.renew()

    # --- what becomes of units

    def _state(self, unit: Unit) -> Last:
        return self._last.get(unit.file_name, Last())

    def _open_next(self) -> None:
        """Open the units that have nothing to wait for any more."""
        # again, as marking what is done already may free more
        while names := self._order.get_ready():
            self._released.update(names)
            for name in names:
                if name in self._done:
                    self._order.done(name)
                elif name not in self._given_up:
                    self._open.add(name)
                    self._make_ready(name)

    def _make_ready(self, name: str) -> None:
        place = self._place[name]
        heapq.heappush(self._ready.setdefault(self.units[place].needs, []), place)

    def _note_done(self, unit: Unit) -> None:
        self._done.add(unit.name)
        self._unseen.append(unit)
        self._elsewhere.discard(unit.name)
        self._open.discard(unit.name)
        # another process may have tried again what was given up here
        self._given_up.pop(unit.name, None)
        # the sorter takes only what it has handed out; what was done before that is marked in `_open_next`
        if unit.name in self._released:
            self._order.done(unit.name)
            self._open_next()

    def _note_failure(self, unit: Unit, text: str, *, is_final: bool) -> None:
        """Note that a unit failed, here or elsewhere. Unless it is retried, the units that wait for it never start."""
        self._elsewhere.discard(unit.name)
        tries = self._tries[unit.name] = self._tries.get(unit.name, 0) + 1
        if is_final:
            self._open.discard(unit.name)
            self._given_up[unit.name] = text
            self.say(text.splitlines()[0])
            return
        # what fails at once, such as a full disk, may need a while to pass
        delay = min(2.0 ** (tries - 1), LONGEST_DELAY)
        self._not_before[unit.name] = time.monotonic() + delay
        if unit.name in self._open:
            self._make_ready(unit.name)
        self.say(f"{text.splitlines()[0]}\n  trying again in {delay:.0f} s")
