"""The downstream task of Theorem 5.1: the head of least norm on n strings, and its loss over all 2^T of them.

Shapes: N = 2^T strings, m neurons, n strings of a training set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from isoloss import seeds
from isoloss.paper.theory.bracket_language.attention import BracketAttention, Inputs
from isoloss.paper.theory.bracket_language.trace import attend

ZERO = 1e-6  # population loss that counts as 0: a descent leaves some 1e-8, and a head that fails has 0.01 or more
CUTOFF = 1e-9  # fraction of the largest eigenvalue of the strings' products below which an eigenvalue counts as 0
_BLOCK = 1 << 23  # numbers of a (training sets, strings, n) table that are held together


@dataclass(frozen=True, kw_only=True)
class HeadRow:
    """Heads on many training sets of one size."""

    solution: str  # name of the solution whose neurons the heads read
    length: int  # T
    samples: int  # n
    trials: int  # training sets
    failures: float  # fraction of them after which the population loss is not 0
    loss: float  # mean population loss, squared answers; an answer of 0 for every string has loss T
    loss_stderr: float  # its standard error over the training sets
    excess: float  # mean of the loss minus that of the heads on two neurons after the same training sets
    excess_stderr: float  # its standard error over the training sets, which are paired
    # largest population loss after a training set with answers of both signs; None: there was none
    worst_covered: float | None
    expected: float  # probability that the set lacks a sign

    @property
    def failures_stderr(self) -> float:
        """Standard error of `failures`."""
        return binomial_stderr(self.failures, self.trials)

    @property
    def claimed(self) -> float:
        """The theorem's bound on the probability of failure, 2^-n."""
        return 2.0**-self.samples


def binomial_stderr(frequency: float, trials: int) -> float:
    """Return the standard error of a frequency."""
    return math.sqrt(frequency * (1 - frequency) / trials)


def sign_missing(length: int, samples: int) -> float:
    """Return the probability that n strings have no positive g*, or no negative one: 2 ((1 + p) / 2)^n - p^n.

    p = C(T, T/2) / 2^T is the probability of g* = 0. The theorem's 2^-n holds for one of the signs, where g* is never
    0.

    Example:
        >>> sign_missing(6, 1), round(sign_missing(6, 8), 4)
        (1.0, 0.0687)
    """
    zero = math.comb(length, length // 2) / 2**length
    return float(2 * ((1 + zero) / 2) ** samples - zero**samples)


@torch.no_grad()
def kernel(model: BracketAttention, inputs: Inputs) -> torch.Tensor:
    """Return (N, N): products of the neurons' outputs, divided by m^2; a head of least norm depends on nothing else."""
    _, attended = attend(model, inputs.z)
    features = (attended @ model.value.T).relu() / len(model.output)
    return features @ features.T


def population_losses(products: torch.Tensor, answers: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return (k,): the loss over all strings of the head of least norm that fits a training set.

    Among the heads of least training loss it is that of least norm, so it exists where no head fits.
    """
    size = max(1, _BLOCK // (len(answers) * chosen.shape[1]))
    losses = []
    for block in torch.split(chosen, size):
        own = products[block[:, :, None], block[:, None, :]]
        values, vectors = torch.linalg.eigh(own)
        kept = values > CUTOFF * products.diagonal().max()
        parts = (vectors.transpose(1, 2) @ answers[block][:, :, None])[:, :, 0]
        parts = torch.where(kept, parts / values.where(kept, 1.0), 0.0)
        weights = (vectors @ parts[:, :, None])[:, :, 0]
        predicted = torch.einsum("knN,kn->kN", products[block], weights)
        losses.append((predicted - answers).square().mean(dim=1))
    return torch.cat(losses)


def try_heads(
    models: Mapping[str, BracketAttention], inputs: Inputs, *, samples: int, trials: int, seed: int
) -> list[HeadRow]:
    """Return how heads on `trials` training sets of `samples` strings, drawn with replacement, do on all strings.

    All models have the same training sets. The first of them is that of two neurons.
    """
    length = inputs.length
    generator = seeds.generator(seed, "brackets", "heads", length, samples)
    chosen = torch.randint(len(inputs.y), (trials, samples), generator=generator)
    signs = inputs.y[chosen].sign()
    covered = (signs > 0).any(dim=1) & (signs < 0).any(dim=1)
    rows: list[HeadRow] = []
    first: torch.Tensor | None = None
    for name, model in models.items():
        losses = population_losses(kernel(model, inputs), inputs.y, chosen)
        first = losses if first is None else first
        excess = losses - first
        rows.append(
            HeadRow(
                solution=name,
                length=length,
                samples=samples,
                trials=trials,
                failures=float((losses > ZERO).double().mean()),
                loss=float(losses.mean()),
                loss_stderr=float(losses.std() / math.sqrt(trials)),
                excess=float(excess.mean()),
                excess_stderr=float(excess.std() / math.sqrt(trials)),
                worst_covered=float(losses[covered].max()) if covered.any() else None,
                expected=sign_missing(length, samples),
            )
        )
    return rows
