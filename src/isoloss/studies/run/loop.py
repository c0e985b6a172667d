"""The jobs of a plan: which units can start, who works on them, and how they ended. All executors share this part.

An executor only places commands. It takes a job from `Jobs`, runs its command somewhere, and says how that ended:

    def run(jobs: Jobs, options: Options) -> None:
        for job in jobs:
            jobs.finish(job, job.call())

All state is in the study's folder: leases, logs and results. Any number of executors can work on one folder.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Protocol

from isoloss import files, usage
from isoloss.errors import IsolossError
from isoloss.studies import attempts
from isoloss.studies.job import Job, Options, last_line, tail
from isoloss.studies.leases import HEARTBEATS, Attempt, End, Lease, Leases
from isoloss.studies.plan import Resources, Unit, check

LOOK_SECONDS = 1.0  # between two checks of what other processes have done
LONG_LOOK = 0.05  # seconds; after a check that takes longer, the next one is put off in proportion
WAIT_SECONDS = 0.1  # while an executor has nothing to start
LONGEST_DELAY = 60.0  # before another try, in seconds
BAD_INPUT = 2  # exit status of a command whose input is wrong: it would fail again


class Executor(Protocol):
    """Carries out a plan; registered in `isoloss.registry.EXECUTORS`."""

    def __call__(self, jobs: Jobs, options: Options) -> None:
        """Run the command of every job that `jobs` hands out, until `jobs.finished`.

        Raises:
            KeyboardInterrupt: Passed on, after the running commands have saved and ended.
        """


class Jobs:
    """The jobs of a plan, handed out one by one.

    Args:
        units: The plan, in the order in which to start its units; each comes after those it waits for.
        folder: The study's folder, for `leases` and `logs`.
        options: How the plan is carried out.
        say: Called with one line when a unit starts or ends.
        on_done: Called in this process for each unit that is newly done, whoever did it; it may take seconds.

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
        self.num_run_here = 0  # units that this process has run
        self.taken_over: set[Job] = set()  # handed out here, then taken over by another process: end their commands
        self._on_done, self._unseen = on_done, deque[Unit]()
        self._place = {unit.name: place for place, unit in enumerate(units)}
        self._waits = {unit.name: len(set(unit.after)) for unit in units}
        self._followers: dict[str, list[str]] = {}
        for unit in units:
            for name in set(unit.after):
                self._followers.setdefault(name, []).append(unit.name)
        self._last = self.leases.attempts()  # by file name
        self._at_start = dict(self._last)
        self._without_result: dict[str, float] = {}  # recorded as done, but the result is not there: since when
        self._done: set[str] = set()
        self._held: dict[str, Job] = {}
        self._elsewhere: dict[str, None] = {}  # could start, but another process has it
        self._ready: dict[Resources, list[int]] = {}  # could start: a heap of places for units of the same needs
        self._tries: dict[str, int] = {}  # failed attempts since this process started
        self._not_before: dict[str, float] = {}  # when a unit that failed may be retried
        self._checked: dict[tuple[str, int], float] = {}  # when the leases of others were last looked up
        self._given_up: dict[str, str] = {}  # failed for good, with the error messages
        self._blocked: set[str] = set()  # wait, directly or not, for one that was given up
        self._looked, self._look_seconds = time.monotonic(), LOOK_SECONDS
        self._heartbeat = _Heartbeat(self)
        for unit in units:
            if self._waits[unit.name] == 0:
                self._make_ready(unit.name)
        for unit in units:
            if unit.done():
                self._note_done(unit)
        self._unseen.clear()

    def is_done(self, unit: Unit) -> bool:
        """Whether a unit is known to be done."""
        return unit.name in self._done

    @property
    def num_done(self) -> int:
        """How many units of the plan are done."""
        return len(self._done)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to run, to wait for or to report."""
        if self._held or self._unseen:
            return False
        if self._given_up and not self.options.keep_going:
            return True
        rest = len(self.units) - len(self._done)
        return rest == 0 or (bool(self._given_up) and rest == len(self._given_up.keys() | self._blocked))

    def __iter__(self) -> Iterator[Job]:
        """Hand out one job after another; wait while other processes work on the rest."""
        while not self.finished:
            job = self.take()
            self.report_done()
            if job:
                yield job
            else:
                time.sleep(WAIT_SECONDS)

    def take(self, fits: Callable[[Resources], bool] = lambda _: True) -> Job | None:
        """Return the first job that can start now and whose needs fit, with its lease taken; None: there is none.

        Args:
            fits: Whether the executor has room for a unit of these needs.

        Raises:
            IsolossError: A lease, a log or a folder cannot be written.
        """
        if self._given_up and not self.options.keep_going:
            return None
        if time.monotonic() - self._looked > self._look_seconds:
            self.refresh()
        heaps = [heap for needs, heap in self._ready.items() if heap and fits(needs)]
        delayed, job = list[Unit](), None
        while heaps and job is None:
            heap = min(heaps, key=itemgetter(0))
            unit = self.units[heapq.heappop(heap)]
            if not heap:
                heaps.remove(heap)
            if unit.name in self._done or unit.name in self._given_up or unit.name in self._held:
                continue
            if self._not_before.get(unit.name, 0.0) > time.monotonic():
                delayed.append(unit)
                continue
            job = self._take(unit)
        for unit in delayed:
            self._make_ready(unit.name)
        return job

    def finish(self, job: Job, status: int, *, stopped: bool = False) -> None:
        """Record how a job's command ended, and publish what it made.

        Args:
            job: The job, whose lease is given up.
            status: Exit status of its command, negative for a signal.
            stopped: Whether the executor stopped it, or lost the machine that it ran on: if its unit is not done, this
                does not count as a failure.
        """
        unit, lease = job.unit, job.lease
        self._forget(job)
        if not lease.is_held():
            self.say(f"{unit.name}: another process has taken it over")
            self._elsewhere[unit.name] = None
            return
        if status == 0:
            try:
                attempts.publish(unit, lease.number)
            except IsolossError as error:
                self._fail(unit, lease, f"{unit.name}: {error}", str(error), is_final=True)
                return
            if unit.done():
                used = usage.collect(job.usage, unit.needs.processes, unit.outputs)
                self._end(job, "done", **{"seconds": round(job.seconds, 3), **used})
                attempts.clean(unit, lease.number, self._has_ended(unit))
                self.num_run_here += 1
                self._note_done(unit)
                self.say(f"{unit.name}: done in {job.seconds:.0f} s ({self.num_done} of {len(self.units)} units)")
                return
        if stopped:
            used = usage.collect(job.usage, unit.needs.processes, ())
            self._end(job, "stopped", **{"seconds": round(job.seconds, 3), **used})
            self._make_ready(unit.name)
            return
        reason = "ended without its result" if status == 0 else f"failed with status {status}"
        is_final = status == BAD_INPUT or self._tries.get(unit.name, 0) >= self.options.retries
        text = f"{unit.name} {reason}; the end of {job.log}:\n{tail(job.log)}"
        self._fail(unit, lease, text, reason, is_final, last_line=last_line(job.log))

    def report_done(self) -> None:
        """Call `on_done` for the units that are newly done. Call it while workers are busy: it may take seconds."""
        while self._unseen:
            self._on_done(self._unseen.popleft())

    def raise_failures(self) -> None:
        """Raise an `IsolossError` that names the units that failed, if any did."""
        if not self._given_up:
            return
        texts = list(self._given_up.values())
        waiting = f"\nnot started, as they wait for failed units: {len(self._blocked)} units" if self._blocked else ""
        if len(texts) == 1:
            raise IsolossError(texts[0] + waiting)
        names = ", ".join(self._given_up)
        raise IsolossError(f"{len(texts)} units failed: {names}{waiting}\n\n" + "\n\n".join(texts))

    # --- what this process does

    def _take(self, unit: Unit) -> Job | None:
        """Take a unit's lease and make its folders; None: it is done or failed, or another process has it."""
        last = self._last.get(unit.file_name, Attempt())
        if last.end == "done":
            is_open = self._is_deleted(unit, last)
        else:
            is_open = last.number == 0 or last.end is not None or self._is_lost(unit, last.number)
        lease = self.leases.take(unit.file_name, last.number + 1) if is_open else None
        if lease is None:
            self._elsewhere[unit.name] = None
            return None
        self._last[unit.file_name] = Attempt(lease.number)
        if lease.number > 1 and unit.done():  # published by a process that ended before it could record so
            lease.end("done")
            self._note_done(unit)
            return None
        job = Job(unit, lease, self.logs / f"{unit.file_name}.{lease.number}.log")
        self._held[unit.name] = job
        self._heartbeat.start()
        try:
            files.write_bytes(job.log, b"")  # now, as the log may be read at any time from here on
            attempts.prepare(unit, lease.number, self._has_ended(unit))
        except IsolossError as error:
            self._forget(job)
            if not job.log.is_file():  # nothing can be written in this folder
                lease.end("stopped")
                raise
            if not lease.is_held():  # another process has taken it over, with the files to start from
                self._elsewhere[unit.name] = None
            elif unit.done():
                lease.end("done")
                self._note_done(unit)
            else:
                is_final = self._tries.get(unit.name, 0) >= self.options.retries
                self._fail(unit, lease, f"{unit.name}: {error}", str(error), is_final)
            return None
        except BaseException:
            self._forget(job)
            lease.end("stopped")
            raise
        self.say(f"{unit.name}: started")
        return job

    def _is_deleted(self, unit: Unit, attempt: Attempt) -> bool:
        """Whether the result of a unit that was recorded as done was deleted since.

        A network file system may take as long as an expiry to show a file that another machine has written.
        """
        if unit.done():
            self._note_done(unit)
            return False
        since = self._without_result.setdefault(unit.name, time.monotonic())
        was_done_at_start = self._at_start.get(unit.file_name) == attempt
        return was_done_at_start or time.monotonic() - since > self.options.expiry

    def _is_lost(self, unit: Unit, number: int) -> bool:
        """Whether another process has lost its lease; looked up once per heartbeat, as there may be many leases."""
        key, now = (unit.name, number), time.monotonic()
        if now - self._checked.get(key, -math.inf) < self.options.expiry / HEARTBEATS:
            return False
        self._checked[key] = now
        return self.leases.is_lost(unit.file_name, number)

    def _fail(self, unit: Unit, lease: Lease, text: str, reason: str, is_final: bool, *, last_line: str = "") -> None:
        lease.end("failed", reason=reason, final=is_final, last_line=last_line)
        self._last[unit.file_name] = Attempt(lease.number, "failed")
        self._note_failure(unit, is_final, text)

    def _end(self, job: Job, how: End, **details: object) -> None:
        job.lease.end(how, **details)
        self._last[job.unit.file_name] = Attempt(job.lease.number, how)

    def _forget(self, job: Job) -> None:
        self._held.pop(job.unit.name, None)
        self.taken_over.discard(job)

    def _has_ended(self, unit: Unit) -> Callable[[int], bool]:
        """Return a function that tells whether the process of an attempt at a unit can no longer write."""

        def has_ended(number: int) -> bool:
            job = self._held.get(unit.name)
            if job is not None and job.lease.number == number:
                return False
            return number == attempts.BY_HAND or self.leases.has_ended(unit.file_name, number)

        return has_ended

    # --- what becomes of units

    def _make_ready(self, name: str) -> None:
        place = self._place[name]
        heapq.heappush(self._ready.setdefault(self.units[place].needs, []), place)

    def _note_done(self, unit: Unit) -> None:
        if unit.name in self._done:
            return
        self._done.add(unit.name)
        self._unseen.append(unit)
        self._elsewhere.pop(unit.name, None)
        self._blocked.discard(unit.name)
        if self._given_up.pop(unit.name, None) is not None:  # another process tried again
            self._blocked.clear()
            for name in self._given_up:
                self._block_followers(name)
        for name in self._followers.get(unit.name, ()):
            self._waits[name] -= 1
            if self._waits[name] == 0:
                self._make_ready(name)

    def _note_failure(self, unit: Unit, is_final: bool, text: str) -> None:
        """Note that a unit failed, here or elsewhere. Unless it is retried, the units that wait for it never start."""
        self._elsewhere.pop(unit.name, None)
        tries = self._tries[unit.name] = self._tries.get(unit.name, 0) + 1
        if not is_final:
            delay = min(2.0 ** (tries - 1), LONGEST_DELAY)
            self._not_before[unit.name] = time.monotonic() + delay
            self._make_ready(unit.name)
            self.say(f"{text.splitlines()[0]}\n  trying again in {delay:.0f} s")
            return
        self._given_up[unit.name] = text
        self.say(text.splitlines()[0])
        self._block_followers(unit.name)

    def _block_followers(self, failed: str) -> None:
        """Note that units that wait, directly or not, for one that was given up never start."""
        waiting = [failed]
        while waiting:
            for name in self._followers.get(waiting.pop(), ()):
                if name not in self._blocked and name not in self._done:
                    self._blocked.add(name)
                    waiting.append(name)

    def refresh(self) -> None:
        """See what other processes have started and finished."""
        began = time.monotonic()
        now = self.leases.attempts()
        for file_name, attempt in now.items():
            before, self._last[file_name] = self._last.get(file_name), attempt
            unit = self._by_file.get(file_name)
            if unit is None or unit.name in self._held or unit.name in self._done:
                continue
            if attempt.end == "done":
                if unit.done():
                    self._note_done(unit)
                    self.say(f"{unit.name}: done elsewhere ({self.num_done} of {len(self.units)} units)")
            elif attempt.end == "failed" and attempt != before:
                end = self.leases.end_record(file_name, attempt.number, "failed")
                text = f"{unit.name} {end.get('reason', 'failed')} in another process: {end.get('last_line', '')}"
                self._note_failure(unit, bool(end.get("final")), text)
        # units that other processes had are considered again: their attempts may have been stopped or lost
        for name in self._elsewhere:
            self._make_ready(name)
        self._elsewhere.clear()
        self._looked = time.monotonic()
        self._look_seconds = LOOK_SECONDS * max(1.0, (self._looked - began) / LONG_LOOK)

    @functools.cached_property
    def _by_file(self) -> Mapping[str, Unit]:
        return {unit.file_name: unit for unit in self.units}


class _Heartbeat:
    """A thread that renews the leases of the jobs held, and notes which of them were taken over."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it is running."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(self._jobs.options.expiry / HEARTBEATS)
            for job in list(self._jobs._held.values()):
                with contextlib.suppress(OSError):  # the file system does not respond now
                    if job.lease.is_held():
                        job.lease.renew()
                    else:
                        self._jobs.taken_over.add(job)
