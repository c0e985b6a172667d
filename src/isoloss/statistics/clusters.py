"""Sums over independent clusters of a stream of sequences."""

from __future__ import annotations

import torch


class Clusters:
    """Rows of numbers summed over clusters: consecutive sequences of one document, or one sequence.

    Attributes:
        open: (width,) float64, the sums of the document that goes on.
        document: Its id; None: there is none.

    Example:
        >>> clusters = Clusters(1)
        >>> clusters.add(torch.ones(3, 1), torch.tensor([7, 7, 8])), clusters.close()
        (tensor([[2.]], dtype=torch.float64), tensor([[1.]], dtype=torch.float64))
    """

    def __init__(self, width: int) -> None:
        self.open = torch.zeros(width, dtype=torch.float64)
        self.document: int | None = None

    def add(self, rows: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        """Add rows (n, width), and return the sums over each cluster that is complete by now."""
        rows = rows.double()
        if documents is None:
            return torch.cat([self.close(), rows])
        complete = []
        for document, row in zip(documents.tolist(), rows, strict=True):
            if document != self.document:
                complete.append(self.close())
                self.document = document
            self.open += row
        return torch.cat(complete) if complete else rows[:0]

    def close(self) -> torch.Tensor:
        """Return the sums of the document that goes on, as one row or none, and end it."""
        sums = self.open[None] if self.document is not None else self.open[None][:0]
        self.open, self.document = torch.zeros_like(self.open), None
        return sums
