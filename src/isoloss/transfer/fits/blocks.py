"""The features of a convex probe as blocks of centered rows, and the spectrum of their second moments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.transfer.stored_features import StoredFeatures

Features = torch.Tensor | np.ndarray[Any, Any] | StoredFeatures

_EXACT_WIDTH = 2048  # features up to which the second moments are decomposed exactly
_RANK = 512  # of their approximation above that
_PANEL = 256  # columns of the second moments that are computed together


class FeatureBlocks:
    """Labeled features, read in blocks, centered at their mean over all rows.

    Rows of a tensor are sorted by the splits that they belong to, so that few blocks have rows that a split lacks.

    Attributes:
        labels: (n,) int64, in the order of the blocks.
        members: (n, F) bool, which splits have a row, in that order.
        sizes: Rows of each split.
        center: (D,) float64, the mean of the features.
        passes: How often the features have been read.
    """

    def __init__(
        self,
        features: Features,
        labels: torch.Tensor,
        members: torch.Tensor,
        *,
        block_rows: int,
        device: torch.device,
    ) -> None:
        self.device, self.width, self.passes = device, features.shape[1], 0
        self._features = features
        self._order: torch.Tensor | None = None
        self._ready: torch.Tensor | None = None
        cuts = set(range(0, len(labels), block_rows)) | {len(labels)}
        order = torch.arange(len(labels))
        if isinstance(features, torch.Tensor):
            _, pattern, counts = np.unique(members.numpy(), axis=0, return_inverse=True, return_counts=True)
            order = torch.from_numpy(pattern.reshape(-1)).argsort(stable=True)
            self._order = order.to(features.device)
            if len(counts) * block_rows <= len(labels):
                cuts |= set(counts.cumsum().tolist())
        self._cuts = sorted(cuts)
        self.sizes = members.sum(dim=0).tolist()
        self.labels = labels.cpu()[order].to(device)
        self.members = members[order].to(device)
        self.center = self._mean()
        if isinstance(features, torch.Tensor):
            self._ready = torch.cat([x.float() for x, _, _ in self.blocks(torch.float64)])

    def blocks(self, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield centered features (B, D) in `dtype`, labels (B,) and members (B, F); counts as one pass."""
        self.passes += 1
        for first, last in zip(self._cuts[:-1], self._cuts[1:], strict=True):
            if dtype == torch.float32 and self._ready is not None:
                x = self._ready[first:last]
            elif dtype == torch.float32:
                x = self._block(first, last).float() - self.center.float()
            else:
                x = self._block(first, last).double() - self.center
            yield x, self.labels[first:last], self.members[first:last]

    def _block(self, first: int, last: int) -> torch.Tensor:
        if isinstance(self._features, torch.Tensor):
            assert self._order is not None
            return self._features[self._order[first:last]].to(self.device)
        if isinstance(self._features, StoredFeatures):
            return self._features[first:last].to(self.device)
        return torch.from_numpy(np.array(self._features[first:last])).to(self.device)

    def _mean(self) -> torch.Tensor:
        self.passes += 1
        total = torch.zeros(self.width, dtype=torch.float64, device=self.device)
        for first, last in zip(self._cuts[:-1], self._cuts[1:], strict=True):
            block = self._block(first, last).double()
            total += (part := block.sum(dim=0))
            if not bool(part.isfinite().all()):
                bad = int((~block.isfinite()).any(dim=1).sum())
                raise IsolossError(f"{bad} of {last - first} examples read together have NaN or infinite features")
        return total / len(self.labels)


@dataclass(frozen=True)
class Spectrum:
    """Second moments of centered features, `K ~ U diag(v) U^T + rest (1 - U U^T)`."""

    vectors: torch.Tensor  # (D, r), orthonormal columns U
    values: torch.Tensor  # (r,)
    rest: float  # the mean eigenvalue of what the vectors leave out; infinite where that is nothing but rounding

    def to(self, dtype: torch.dtype) -> Spectrum:
        """Return the same in `dtype`."""
        return Spectrum(self.vectors.to(dtype), self.values.to(dtype), self.rest)

    def solve(self, gradient: torch.Tensor, curvature: torch.Tensor, strength: float) -> torch.Tensor:
        """Return `(K x A + strength)^-1` of a gradient (D, C) in the basis in which A is diag(curvature), (C,)."""
        outside = 1 / (self.rest * curvature + strength)
        inside = 1 / (self.values[:, None] * curvature + strength)
        return gradient * outside + self.vectors @ ((self.vectors.T @ gradient) * (inside - outside))


def second_moments(rows: FeatureBlocks) -> Spectrum:
    """Return the spectrum of the mean of `x x^T`: exact for few features, else a Nystrom approximation.

    The approximation is that of Frangella, Tropp and Udell (2023), algorithm 2.1, from one pass over the features.
    """
    count, width = len(rows.labels), rows.width
    if width <= _EXACT_WIDTH:
        moments = torch.zeros(width, width, device=rows.device)
        for x, _, _ in rows.blocks(torch.float32):
            for first in range(0, width, _PANEL):  # the lower triangle is all that is read
                columns = slice(first, first + _PANEL)
                moments[first:, columns].addmm_(x[:, first:].T, x[:, columns], alpha=1 / count)
        try:
            values, vectors = torch.linalg.eigh(moments, UPLO="L")
        except RuntimeError:  # it did not converge, as of one-hot features, many of which are constant, in float32
            values, vectors = (part.float() for part in torch.linalg.eigh(moments.double(), UPLO="L"))
        return Spectrum(vectors, values.clamp(min=0), math.inf)
    drawn = torch.randn(width, _RANK, generator=seeds.generator(0, "convex probe", "sketch")).to(rows.device)
    test = torch.linalg.qr(drawn).Q
    product, trace = torch.zeros_like(test), 0.0
    for x, _, _ in rows.blocks(torch.float32):
        product.addmm_(x.T, x @ test, alpha=1 / count)
        trace += float(x.square().sum(dtype=torch.float64)) / count
    wide = product.double()
    shift = 1e-6 * float(wide.norm())
    wide += shift * test
    small = test.double().T @ wide
    factor = torch.linalg.cholesky((small + small.T) / 2)
    root = torch.linalg.solve_triangular(factor, wide.T, upper=False).T  # K + shift ~ root root^T
    squares, turn = torch.linalg.eigh(root.T @ root)
    kept = squares > 2 * shift
    vectors = root @ (turn[:, kept] * squares[kept].rsqrt())
    values = squares[kept] - shift
    rest = max(trace - float(values.sum()), 0.0) / (width - len(values))
    return Spectrum(vectors.float(), values.float(), rest)
