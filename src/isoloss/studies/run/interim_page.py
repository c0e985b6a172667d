"""The interim page of an unfinished study, updated as blocks are completed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from isoloss import files
from isoloss.errors import IsolossError
from isoloss.studies.folder import StudyFolder
from isoloss.studies.plan import Unit

INTERVAL_SECONDS = 240.0  # at least, from one page to the next


class InterimPage:
    """Writes the page of the complete blocks: what an executor calls after each unit.

    The first page is written when `Study.first_page_blocks` blocks are complete. It is updated when more are and
    `INTERVAL_SECONDS` have passed. If a page cannot be written, one line says so and the study continues. The page of
    the finished study is not written here.

    Args:
        folder: The study.
        units: Its plan.
        say: Called with one line for each page.
    """

    def __init__(self, folder: StudyFolder, units: Sequence[Unit], say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._missing: dict[int, set[str]] = {
            unit.block: set() for unit in units
        }  # names of the units that are not done
        for unit in units:
            if not unit.done():
                self._missing[unit.block].add(unit.name)
        self._complete = {block for block, missing in self._missing.items() if not missing}
        self._shown = len(self._complete) if folder.page.is_file() else 0
        self._written = -math.inf

    def __call__(self, unit: Unit) -> None:
        """Note that a unit is done, and write the page if it is time."""
        self._missing[unit.block].discard(unit.name)
        if not self._missing[unit.block]:
            self._complete.add(unit.block)
        blocks = len(self._missing)
        first = self._folder.study.first_page_blocks or blocks
        is_new = max(first, self._shown + 1) <= len(self._complete) < blocks
        if not is_new or time.monotonic() - self._written < INTERVAL_SECONDS:
            return
        complete = tuple(sorted(self._complete))
        what, start = f"the page of {len(complete)} of {blocks} blocks", time.monotonic()
        try:
            # several executors on one folder may all want to write a page
            with files.lock(self._folder.path, wait=True):
                page = self._folder.report(complete)
            self._say(f"{what}: {page}, written in {time.monotonic() - start:.0f} s")
        except Exception as error:  # whatever fails on part of the results does not stop the study
            kind = "" if isinstance(error, IsolossError) else f"{type(error).__name__}: "
            self._say(f"{what} could not be written: {kind}{' '.join(str(error).split())}")
        # also after a failure, so that it is tried again only when there is more to show; and by the time now, as
        # writing takes seconds
        self._shown, self._written = len(complete), time.monotonic()
