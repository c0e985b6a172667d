"""Padded batches of sentences on their way into an exact language, its numbers on their way out, numba or torch."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch

from isoloss.errors import IsolossError

Rows = slice | torch.Tensor
Backend = Literal["numba", "torch"]  # of exact inference: compiled loops, or torch


def checked(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    vocab_size: int,
    max_length: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n, T) and (n,) int64 on `device`, the id `vocab_size` where a token is unknown or absent."""
    if tokens.dim() != 2 or lengths.shape != tokens.shape[:1]:
        raise IsolossError(
            f"tokens must be (n, T) and lengths (n,), not {tuple(tokens.shape)} and {tuple(lengths.shape)}"
        )
    for name, tensor in (("tokens", tokens), ("lengths", lengths)):
        _check_integers(name, tensor)
    if mask is not None and (mask.shape != tokens.shape or mask.dtype != torch.bool):
        raise IsolossError(
            f"the mask must be {tuple(tokens.shape)} bool like the tokens, not {tuple(mask.shape)} {mask.dtype}"
        )
    tokens, lengths = tokens.to(device, torch.int64), lengths.to(device, torch.int64)
    longest = min(max_length, tokens.shape[1])
    if (row := first((lengths < 1) | (lengths > longest))) is not None:
        raise IsolossError(f"sentence {row} has length {int(lengths[row])}; a length here is from 1 to {longest}")
    seen = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
    if mask is not None:
        seen &= ~mask.to(device)
    wrong = seen & ((tokens < 0) | (tokens >= vocab_size))
    if (row := first(wrong.any(dim=1))) is not None:
        token = int(tokens[row][wrong[row]][0])
        raise IsolossError(f"sentence {row} holds the token id {token}; ids are from 0 to {vocab_size - 1}")
    # From here on the id under a mask is gone: no engine can let it leak into a conditional.
    return tokens.masked_fill(~seen, vocab_size), lengths


def at_positions(
    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor],
    ids: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor | None,
    trailing: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the results of `compute` at `positions`: `(*positions.shape, *trailing)`.

    With `positions` None they are at all tokens, `(n, T, *trailing)`, with 0 at padding.

    `compute(ids, lengths, positions)` takes ids no wider than the longest sentence, and (n, k) positions or None.
    """
    narrow = cropped(ids, lengths)
    if positions is None:
        out = compute(narrow, lengths, None)
        # a padding of no column would be a copy
        behind = ids.shape[1] - narrow.shape[1]
        return torch.nn.functional.pad(out, (0, 0) * len(trailing) + (0, behind)) if behind else out
    wide = _checked_positions(positions, lengths)
    if not wide.numel():
        return torch.zeros(*positions.shape, *trailing, dtype=dtype, device=ids.device)
    return compute(narrow, lengths, wide).reshape(*positions.shape, *trailing)


def cropped(ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return (n, T) ids without the columns behind the longest sentence."""
    return ids[:, : int(lengths.max())] if len(lengths) else ids


def or_all(positions: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    """Return (n, k) positions or, for None, those of all (n, T) ids."""
    return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape) if positions is None else positions


def _checked_positions(positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return positions (n,) or (n, k), each within its sentence, as (n, k) int64 on the device of `lengths`."""
    n = len(lengths)
    if positions.dim() not in (1, 2) or len(positions) != n:
        raise IsolossError(f"positions must be ({n},) or ({n}, k), not {tuple(positions.shape)}")
    _check_integers("positions", positions)
    wide = positions.to(lengths.device, torch.int64)
    wide = wide.unsqueeze(1) if wide.dim() == 1 else wide
    wrong = (wide < 0) | (wide >= lengths[:, None])
    if (row := first(wrong.any(dim=1))) is not None:
        position, last = int(wide[row][wrong[row]][0]), int(lengths[row]) - 1
        raise IsolossError(f"sentence {row} has no position {position}; its positions are from 0 to {last}")
    return wide


def check_span(lengths: torch.Tensor, start: int, stop: int | None) -> None:
    """Raise an `IsolossError` unless the tokens `start` to `stop` - 1, or to the end, are in every sentence."""
    if start < 0 or (stop is not None and stop <= start):
        raise IsolossError(f"a span from {start} to {stop} holds no tokens; it needs 0 <= start < stop")
    least = start + 1 if stop is None else stop
    if (row := first(lengths < least)) is not None:
        raise IsolossError(
            f"sentence {row} has {int(lengths[row])} tokens; the span from {start} to "
            f"{'its end' if stop is None else stop} needs at least {least}"
        )


def first(wrong: torch.Tensor) -> int | None:
    """Return the index of the first true value, or None."""
    # argmax takes no booleans; of equal values it gives the first.
    return int(wrong.int().argmax()) if bool(wrong.any()) else None


def large_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on the CPU numpy's, which ask for huge pages: touching small ones costs more than filling them."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, dtype=str(dtype).removeprefix("torch.")))


def clamped_log_(probs: torch.Tensor) -> torch.Tensor:
    """Take logs in place, of no less than the smallest normal number; on the CPU by numpy, which is the faster."""
    # Then 0 log 0 is 0, not NaN. An exact 0 would also leave the fast path of the vectorized log, for 10 times the time
    # in float64 (NumPy) and 20 to 40 times (torch).
    probs.clamp_(min=torch.finfo(probs.dtype).tiny)
    if probs.device.type != "cpu":
        return probs.log_()
    np.log(probs.numpy(), out=probs.numpy())
    return probs


def entropies(probs: torch.Tensor) -> torch.Tensor:
    """Return the entropies of distributions along the last axis, in nats."""
    # A probability that is rounded to above 1 has a positive log: the entropy is clamped. abs turns -0.0 into 0.0.
    return clamped_log_(probs.clone()).mul_(probs).sum(dim=-1).neg_().clamp_(min=0).abs_()


def zero_padding_(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Set the (n, T, ...) values behind each sentence to 0."""
    behind = torch.arange(values.shape[1], device=values.device) >= lengths[:, None]
    if behind.any():
        values[behind] = 0
    return values


def put(out: torch.Tensor, rows: Rows, part: torch.Tensor) -> None:
    """Set some rows of `out`, or the first positions of these; on the CPU by numpy, which moves rows whole."""
    if part.dim() == 1:
        out[rows] = part
    elif out.device.type == "cpu" and not isinstance(rows, slice):
        out.numpy()[rows.numpy(), : part.shape[1]] = part.numpy()
    else:
        out[rows, : part.shape[1]] = part


def run_in_threads(work: Callable[..., None], pieces: Iterable[tuple[Any, ...]], device: torch.device) -> None:
    """Call `work(*piece)` for every piece: on a CPU with `torch.get_num_threads()` threads, elsewhere one by one.

    Until all are done, torch takes one thread for each operation, in the whole process. The pieces must not depend on
    each other. Where several fail, the error of the first one is raised.
    """
    threads = torch.get_num_threads()
    todo = list(pieces)
    if device.type != "cpu" or threads == 1 or not todo:
        for piece in todo:
            work(*piece)
        return
    inference = torch.is_inference_mode_enabled()

    def one_thread(piece: tuple[Any, ...]) -> None:
        # Inference mode is a setting of each thread, and new threads begin without it.
        with torch.inference_mode(inference):
            work(*piece)

    # Each piece has a thread. Were its operations split among torch's threads as well, there would be threads squared.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(threads, len(todo))) as pool:
            calls = [pool.submit(one_thread, piece) for piece in todo]
            try:
                for call in calls:
                    call.result()
            except BaseException:
                # Leaving the pool would otherwise wait for all the pieces that have not begun.
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(threads)


def choose_backend(device: torch.device) -> Backend:
    """Return what computes on `device`: numba on the CPU where it can be imported, torch elsewhere."""
    if device.type != "cpu":
        return "torch"
    try:
        import numba  # noqa: F401
    except ImportError:
        return "torch"
    return "numba"


def describe_backend(device: torch.device) -> str:
    """Return what computes on `device`, with its version, in words."""
    name = choose_backend(device)
    return f"{name} {importlib.metadata.version(name)}, scaled inside-outside in linear space"


def _check_integers(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise IsolossError(f"{name} must be integers, not {tensor.dtype}")
