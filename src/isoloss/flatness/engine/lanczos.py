"""Lanczos' method with full reorthogonalization: a symmetric matrix, known by its products, seen in a small subspace.

Shapes: P order of the matrix, s steps taken.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Product = Callable[[torch.Tensor], torch.Tensor]


class Lanczos:
    """An orthonormal basis q_1, q_2, ... of the Krylov space of A and a start vector, in which A is tridiagonal.

    Where the space is invariant the basis goes on with a random vector orthogonal to it, so that eigenvalues that the
    start vector does not show, repeated ones too, appear in the end. All basis vectors are kept and every one
    is made orthogonal to all before it, twice (Golub and Van Loan, Matrix Computations, section 10.3).
    """

    def __init__(self, product: Product, start: torch.Tensor, generator: torch.Generator) -> None:
        self._product, self._generator = product, generator
        self._basis = [start / start.norm()]
        self._diagonal: list[float] = []
        self._beside: list[float] = []

    @property
    def steps(self) -> int:
        """Products taken."""
        return len(self._diagonal)

    @property
    def complete(self) -> bool:
        """Whether the basis spans everything."""
        return self.steps == len(self._basis[0])

    def step(self) -> None:
        """Take one product and add a vector to the basis."""
        last = self._basis[-1]
        w = self._product(last).to(last.dtype)
        self._diagonal.append(_dot(last, w))
        if self.complete:
            self._beside.append(0.0)
            return
        self._orthogonalize(w)
        norm = float(w.norm())
        size = max(abs(value) for value in self._diagonal + self._beside + [norm])
        if norm <= 100 * torch.finfo(w.dtype).eps * size:
            norm = 0.0
            w = torch.randn(len(w), generator=self._generator, dtype=w.dtype).to(w.device)
            self._orthogonalize(w)
        self._beside.append(norm)
        self._basis.append(w / w.norm())

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything as tensors on the CPU, from which `load_state` goes on."""
        return {
            "basis": torch.stack(self._basis).cpu(),
            "diagonal": torch.tensor(self._diagonal, dtype=torch.float64),
            "beside": torch.tensor(self._beside, dtype=torch.float64),
            "generator": self._generator.get_state(),
        }

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a state."""
        self._basis = list(state["basis"].to(self._basis[0].device))
        self._diagonal, self._beside = state["diagonal"].tolist(), state["beside"].tolist()
        self._generator.set_state(state["generator"])

    def ritz(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return eigenvalues (s,) of A in the subspace, ascending, its eigenvectors (s, s), and residual norms (s,).

        Column i of the second holds the coordinates of eigenvector i; `|A x_i - theta_i x_i|` is the i-th residual norm
        in exact arithmetic. All are float64.
        """
        beside = torch.tensor(self._beside[:-1], dtype=torch.float64)
        small = torch.diag(torch.tensor(self._diagonal, dtype=torch.float64))
        small += torch.diag(beside, 1) + torch.diag(beside, -1)
        values, vectors = torch.linalg.eigh(small)
        return values, vectors, self._beside[-1] * vectors[-1].abs()

    def vector(self, coordinates: torch.Tensor) -> torch.Tensor:
        """Return (P,): the vector with these coordinates (s,)."""
        total = torch.zeros_like(self._basis[0])
        for weight, q in zip(coordinates.tolist(), self._basis[: self.steps], strict=True):
            total.add_(q, alpha=weight)
        return total

    def _orthogonalize(self, w: torch.Tensor) -> None:
        for _ in range(2):
            for q in self._basis:
                w.sub_(q, alpha=_dot(q, w))


def _dot(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() * b.double()).sum())
