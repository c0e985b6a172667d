"""The batches of a run's steps, one after the other; if wanted, the next is made while a step is at work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

T = TypeVar("T")


class Batches(Generic[T]):
    """What `make` gives for the steps up to `last`; a context, which ends with the background thread gone.

    A batch is a function of its step, so that nothing but time depends on where it is made. With `ahead`, the next
    step's is made in a background thread: at most one, and `make` never runs twice at once.

    Example:
        >>> with Batches(lambda step: step * step, last=3, ahead=True) as batches:
        ...     [batches.of(step) for step in (1, 2, 3)]
        [1, 4, 9]
    """

    def __init__(self, make: Callable[[int], T], *, last: int, ahead: bool) -> None:
        self._make, self._last = make, last
        self._next: tuple[int, Future[T]] | None = None
        self._pool = ThreadPoolExecutor(1, "batches") if ahead else None

    def __enter__(self) -> Batches[T]:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the batch that is being made, and let go of the thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._next = None
        del self._make  # it may hold who holds this: training, and so its model, would not be freed at its end

    def of(self, step: int) -> T:
        """Return the batch of `step`, and begin the next one; what `make` raised is raised here, at its own step."""
        if self._pool is None:
            return self._make(step)
        prefetched, self._next = self._next, None
        ready = prefetched[1] if prefetched and prefetched[0] == step else self._pool.submit(self._make, step)
        batch = ready.result()
        if step < self._last:
            self._next = step + 1, self._pool.submit(self._make, step + 1)
        return batch

    def wait(self) -> None:
        """Wait until nothing is being made: for what must not use the language at the same time."""
        if self._next is not None:
            wait([self._next[1]])
