"""The matrices of a hidden Markov model: checking given ones, and drawing random block-diagonal ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isoloss import seeds
from isoloss.config import check
from isoloss.errors import IsolossError
from isoloss.languages.config import HMMConfig

TABLES = ("initial", "transition", "emission")
_TOLERANCE = 1e-6  # of a row's sum, so that matrices kept in float32 pass
_ROUNDING = 1e-12  # of a row's sum; a row that is nearer to 1 stays as it is

Matrix = npt.ArrayLike | torch.Tensor
Float = npt.NDArray[np.float64]


def checked_tables(initial: Matrix, transition: Matrix, emission: Matrix, source: str) -> tuple[Float, Float, Float]:
    """Return the tables as read-only float64 arrays whose rows add up to 1, or say what is wrong."""
    tables = []
    for name, given in zip(TABLES, (initial, transition, emission), strict=True):
        try:
            raw: Any = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
            tables.append(np.array(raw, dtype=np.float64))
        except (ValueError, TypeError) as error:
            raise IsolossError(f"{source}: {name} must be numbers: {error}") from error
    size = len(tables[0]) if tables[0].ndim == 1 else 0
    wanted = [("(states,)", tables[0].ndim == 1 and size > 0), (f"({size}, {size})", tables[1].shape == (size, size))]
    wanted.append((f"({size}, tokens)", tables[2].ndim == 2 and len(tables[2]) == size and tables[2].shape[1] > 0))
    for name, table, (shape, fits) in zip(TABLES, tables, wanted, strict=True):
        if not fits:
            raise IsolossError(f"{source}: {name} must be of shape {shape}, not {table.shape}")
        for row, entries in enumerate(np.atleast_2d(table)):
            where = f"{source}: {name}" if table.ndim == 1 else f"{source}: row {row} of {name}"
            if (bad := ~(np.isfinite(entries) & (entries >= 0))).any():
                raise IsolossError(f"{where} holds {entries[bad][0]}; a probability is from 0 to 1")
            if abs(total := math.fsum(entries) - 1) > _TOLERANCE:
                raise IsolossError(f"{where} adds up to {total + 1:.9g}; it must add up to 1")
            if abs(total) > _ROUNDING:
                entries /= entries.sum()
        table += 0.0  # no -0.0
        table.flags.writeable = False
    return tables[0], tables[1], tables[2]


def random_tables(config: HMMConfig) -> tuple[Float, Float, Float]:
    """Return initial, transition and emission of the model that `config` describes."""
    check(config)
    rng = np.random.default_rng(seeds.derive(config.seed, "hmm"))
    blocks = np.array_split(np.arange(config.states), config.blocks)
    tables = []
    for width in (config.states, config.vocab_size):
        table = np.zeros((config.states, width))
        for own, columns in zip(blocks, np.array_split(np.arange(width), config.blocks), strict=True):
            drawn = rng.dirichlet(np.ones(len(columns)), size=len(own))
            table[np.ix_(own, columns)] = (1 - config.mixing_weight) * drawn
        if config.mixing_weight:
            table += config.mixing_weight * rng.dirichlet(np.ones(width), size=config.states)
        tables.append(table)
    return np.full(config.states, 1 / config.states), tables[0], tables[1]
