"""Work in pieces, one thread each: operations on small tensors are many times slower where threads share each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


def run_in_threads(work: Callable[..., None], pieces: Iterable[tuple[Any, ...]], device: torch.device) -> None:
    """Call `work(*piece)` for every piece: on a CPU with `torch.get_num_threads()` threads, elsewhere one by one.

    Until all are done, torch takes one thread for each operation, in the whole process. The pieces must not depend on
    each other. Where several fail, the error is that of the first of them.

    Args:
        work: What to do with a piece.
        pieces: The arguments of the calls.
        device: Where `work` computes.

    Example:
        >>> squares = torch.zeros(3)
        >>> run_in_threads(lambda index: squares[index].fill_(index**2), [(0,), (1,), (2,)], squares.device)
        >>> squares
        tensor([0., 1., 4.])
    """
    threads = torch.get_num_threads()
    todo = list(pieces)
    if device.type != "cpu" or threads == 1 or not todo:
        for piece in todo:
            work(*piece)
        return
    inference = torch.is_inference_mode_enabled()

    def one_thread(piece: tuple[Any, ...]) -> None:
        with torch.inference_mode(inference):  # a setting of each thread
            work(*piece)

    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(threads, len(todo))) as pool:
            calls = [pool.submit(one_thread, piece) for piece in todo]
            try:
                for call in calls:
                    call.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(threads)
