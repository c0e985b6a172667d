"""Which symbol a node has, given only the sentence up to the node's end: what a causal reader can know at best.

A node that begins at position i has been opened by the nodes above it, whose right children begin there: Earley's
predictions, with probabilities (Stolcke 1995, sections 4.4 and 4.5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from isoloss.lab.languages.pcfg import PCFG


def beginnings(language: PCFG, tokens: torch.Tensor) -> torch.Tensor:
    """Return (n, S): Pr(the sentence begins with the tokens, and a node of each symbol follows), up to a factor.

    Each row is scaled to a largest value of 1. The tokens are (n, i); i may be 0.
    """
    grammar, size = language.grammar, len(language.symbols)
    # by symbol, the probability that a child of each symbol begins where it begins
    corner = np.zeros((size, size))
    np.add.at(corner, (grammar.binary[:, 0], grammar.binary[:, 1]), grammar.binary_probs)
    np.add.at(corner, (grammar.unary[:, 0], grammar.unary[:, 1]), grammar.unary_probs)
    closure = torch.from_numpy(np.linalg.inv(np.eye(size) - corner)).clamp(min=0)
    parent, left, right = torch.from_numpy(grammar.binary.copy()).T
    probs = torch.from_numpy(grammar.binary_probs.copy())
    n, end = tokens.shape
    lengths = torch.full((n,), end)
    begun = [closure[:1].expand(n, size)]  # at each position, scaled
    logs = [torch.zeros(n, dtype=torch.float64)]  # of what they were divided by
    for position in range(1, end + 1):
        inside = [language.inside(tokens, lengths, start=first, stop=position) for first in range(position)]
        scores = torch.stack([log[:, None] + scores for log, scores in zip(logs, inside, strict=True)])
        largest = scores.amax(dim=(0, 2))
        opened = torch.zeros(n, size, dtype=torch.float64)
        for first in range(position):
            whole = (scores[first] - largest[:, None]).exp()
            opened.index_add_(1, right, probs * begun[first][:, parent] * whole[:, left])
        values = opened @ closure
        most = values.amax(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
        begun.append(values / most[:, None])
        logs.append(largest + most.log())
    return begun[end]
