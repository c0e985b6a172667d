"""A teacher's conditionals over the likeliest tokens only, and a bound on what that leaves out.

Shapes: r rows, K tokens, C of them kept, k positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from isoloss.languages.teacher.scores import Prefix, Scorer, check_possible


class Truncated(NamedTuple):
    """Conditionals over the tokens that are likely by what stands before them; k positions, C tokens at most.

    Attributes:
        tokens: (n, k, C) int64, the kept tokens, likeliest first by `Pr(c | x_<t)`; `pad_id` where fewer are kept.
        log_conditionals: (n, k, C): `log Pr(x_t = c | x_-t, x_t is kept)`, in nats; where there is no token, the log of
            the dtype's smallest normal number.
        left_out_prior: (n, k): `Pr(x_t is not kept | x_<t)`.
        left_out_bound: (n, k): no less than `Pr(x_t is not kept | x_-t)`.
    """

    tokens: torch.Tensor
    log_conditionals: torch.Tensor
    left_out_prior: torch.Tensor
    left_out_bound: torch.Tensor


def choose(logs: torch.Tensor, *, mass: float, candidates: int | None) -> torch.Tensor:
    """Return (r, K) bool: which ranks, likeliest first, are kept of (r, K) log-probabilities.

    Args:
        logs: The distributions.
        mass: The least sum that is kept, by the fewest tokens.
        candidates: So many instead.
    """
    if candidates is not None:
        return torch.arange(logs.shape[1], device=logs.device).expand_as(logs) < candidates
    q = logs.sort(dim=1, descending=True, stable=True).values.exp()
    return q.cumsum(dim=1) - q < mass  # the first is always kept


def truncate(scorer: Scorer, prefix: Prefix, rows: torch.Tensor, position: int, kept: torch.Tensor) -> Truncated:
    """Return the truncated conditionals of (r,) sentences at one position, each field without the dimension k.

    Args:
        scorer: The model.
        prefix: The sentences.
        rows: Which of them.
        position: The position.
        kept: (r, K) bool, the ranks that `choose` keeps; the first ones of each row.
    """
    tiny = math.log(torch.finfo(prefix.logs.dtype).tiny)
    logs, order = prefix.logs[rows, position].sort(dim=1, descending=True, stable=True)
    weights = torch.full_like(logs, -math.inf)
    members, ranks = kept.nonzero(as_tuple=True)
    for part in scorer.parts(len(members), prefix.tokens.shape[1]):
        member, rank = members[part], ranks[part]
        ends = prefix.tokens[rows[member], position:]
        ends[:, 0] = order[member, rank]
        weights[member, rank] = scorer.ending(prefix, rows[member], ends)
    total = weights.logsumexp(dim=1)
    check_possible(total)
    left_out = logs.exp().masked_fill(kept, 0.0).flip(1).sum(dim=1)
    width = int(kept.sum(dim=1).max())
    return Truncated(
        order.masked_fill(~kept, scorer.ids.shape[0])[:, :width],
        (weights - total[:, None]).clamp(min=tiny)[:, :width],
        left_out,
        torch.sigmoid(left_out.log() - total),
    )


def join_parts(
    parts: Iterable[tuple[torch.Tensor, torch.Tensor, Truncated]],
    shape: torch.Size,
    pad_id: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Truncated:
    """Return one `Truncated` of (n, k) positions, out of parts with their rows and columns."""
    parts = list(parts)
    widest = max((part.tokens.shape[1] for *_, part in parts), default=1)
    tokens = torch.full((*shape, widest), pad_id, device=device)
    logs = torch.full((*shape, widest), math.log(torch.finfo(dtype).tiny), dtype=dtype, device=device)
    prior, bound = torch.zeros(2, *shape, dtype=dtype, device=device)
    for rows, columns, part in parts:
        width = part.tokens.shape[1]
        tokens[rows, columns, :width], logs[rows, columns, :width] = part.tokens, part.log_conditionals
        prior[rows, columns], bound[rows, columns] = part.left_out_prior, part.left_out_bound
    return Truncated(tokens, logs, prior, bound)
