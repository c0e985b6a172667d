"""How much the gradients of one text's documents differ, and how far the gradients of two texts agree.

Shapes: N clusters of a text, P parameters counted one by one, k vectors.
The examples measure the model and the batches of the example of `isoloss.flatness.fisher_trace`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from isoloss import seeds
from isoloss.errors import IsolossError
from isoloss.flatness._curvature import MeanLoss, inner
from isoloss.model_checks import device_of
from isoloss.statistics.comparison import independent_difference, times
from isoloss.statistics.estimate import Estimate
from isoloss.statistics.ratio import from_influence
from isoloss.text.clusters import behind_masks, sequence_hashes

_SKETCH = 4096  # numbers that stand for a gradient where all pairs are multiplied


def gradient_noise_scale(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    *,
    causal: bool | None = None,
) -> Estimate:
    """Estimate `tr(S) / |g|^2`, the number of clusters at which a gradient is as much noise as signal.

    g is the gradient of the mean loss per predicted token, and S / n the covariance of its estimate from n clusters
    (McCandlish et al. 2018, arXiv:1812.06162, "simple noise scale"). A cluster is a document if the batches have
    `documents`, else a sequence, as for the error. The gradient of a much smaller batch is mostly noise, and a much
    larger batch improves it little.

    Both parts are unbiased if all clusters have the same number of predicted tokens: `|g|^2` is the mean of <g_i, g_j>
    over different clusters, and tr(S) the mean of `|g_i|^2` minus that, which is the two-batch form of appendix A.1
    with batches of 1 and N. In general, with m_i the tokens of cluster i, G_i its summed gradient and m the mean of
    m_i, `tr(S) = E|G_i - m_i g|^2 / m^2`, each inner product again over different clusters.

    Each cluster takes two forward and backward passes, and three vectors of the size of the model are in memory. The
    error is a jackknife over clusters.

    Args:
        model: As for `fisher_trace`, with any attention.
        batches: As for `fisher_trace`, but the labels' values count. All batches are kept in memory.
        causal: Whether position t predicts token t + 1; None: by the model's class, then its config.

    Returns:
        The noise scale in clusters. The details have the scale in predicted `tokens` and the unbiased `squared_norm`
        of g.

    Raises:
        IsolossError: A batch does not fit, a gradient is not finite, or the clusters are too few to tell the norm of g
            from 0.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import gradient_noise_scale
        >>> model, batches = tiny_bert()
        >>> noise = gradient_noise_scale(model, batches)
        >>> noise.unit, noise.samples, noise.value > 0
        ('sequences', 64, True)
    """
    loss = MeanLoss(model, batches, causal=causal)
    m = loss.positions()
    vectors, q = _sums(loss, torch.stack([torch.ones_like(m), m]))
    (t, u), _ = _products(loss, vectors)
    n, sizes, squares, sizes2 = (_without(each) for each in (torch.ones_like(m), m, q, m.square()))
    norm = _squared_norm(m, q, t)
    # sum_(i != j) m_i <G_i, G_j>; without cluster i, <U, T> loses <U, G_i> + m_i <T, G_i> - m_i <G_i, G_i>
    weighted = _without(u, u + m * t - m * q) - _without(m * q)
    spread = (squares / n - 2 * weighted / ((n - 1) * sizes) + sizes2 / n * norm) * (n / sizes).square()
    values = spread / norm
    unit = loss.clusters_name
    method = "gradient noise scale, unbiased parts"
    found = from_influence(float(values[0]), _influence(values), m, unit=unit, method=method)
    more = {"tokens": found.value * float(m.mean()), "squared_norm": float(norm[0])}
    return replace(found, details={**_about(loss), **more})


def gradient_agreement(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    others: Iterable[Mapping[str, Any]],
    *,
    causal: bool | None = None,
) -> Estimate:
    """Estimate the cosine of the angle between the gradients of two texts, without the bias of their noise.

    The agreement is `<g_a, g_b> / (|g_a| |g_b|)`, with g_a and g_b the gradients of the mean losses per predicted
    token: 1 if a small step for one text is as good for the other, below 0 if it makes the other worse. The cosine of
    two estimated gradients is too small, because the noise of each adds to its norm but not to the inner product. The
    squared norms are therefore means over pairs of different clusters, as in `gradient_noise_scale`; the result may be
    above 1 by chance. Chen et al. (2026, arXiv:2604.09258) train for a high agreement of data sources.

    Costs and clusters are as for `gradient_noise_scale`. The error is a jackknife over the clusters of both texts,
    which must have none in common. The jackknife's estimate of the bias is subtracted: noise along the gradient itself
    makes the norms too small for the inner product. Near 1, the maximum of the cosine, the leading term of the error is
    quadratic in the noise. The variance of this term comes from the inner products of all pairs of clusters and counts
    once; the jackknife alone would count it twice. The squared error is at least this variance.

    Args:
        model: As for `fisher_trace`, with any attention.
        batches: Of one text, as for `fisher_trace`, but the labels' values count. All are kept in memory.
        others: The batches of the other text.
        causal: Whether position t predicts token t + 1; None: by the model's class, then its config.

    Returns:
        The agreement, with the influences of `batches`' clusters, then those of `others`'.

    Raises:
        IsolossError: As for `gradient_noise_scale`, or a document, or sequence, is in both texts under whatever id.

    Example:
        >>> from isoloss.examples import tiny_bert
        >>> from isoloss.flatness import gradient_agreement
        >>> model, batches = tiny_bert()
        >>> agreement = gradient_agreement(model, batches[:2], batches[2:])
        >>> agreement.unit, round(agreement.value, 1)
        ('cosine', 1.0)
    """
    texts = [list(each) for each in (batches, others)]
    losses = [MeanLoss(model, each, causal=causal) for each in texts]
    if common := len(set.intersection(*map(_contents, losses, texts))):
        kind = "documents" if "documents" in texts[0][0] else "sequences"
        raise IsolossError(f"two texts must have no {kind} in common, and these have {common:,}: leave them out of one")
    sizes = [loss.positions() for loss in losses]
    sums = [_sums(loss, torch.ones(1, len(m))) for loss, m in zip(losses, sizes, strict=True)]
    vectors = torch.cat([vectors for vectors, _ in sums])
    signs = torch.randint(2, (losses[0].num_parameters,), generator=seeds.generator(0, "gradient agreement"))
    signs = (2 * signs - 1).to(vectors)
    products, sketches = zip(*(_products(loss, vectors, signs) for loss in losses), strict=True)
    norms = [_squared_norm(sizes[k], sums[k][1], products[k][k]) for k in (0, 1)]
    parts = []
    for k, other in ((0, 1), (1, 0)):  # the clusters of one text are left out, and the other stays whole
        shared = _without(products[k][other]) / _without(sizes[k]) / sizes[other].sum()
        values = shared / (norms[k] * norms[other][0]).sqrt()
        influence = _influence(values)
        bias = float(influence.mean())  # its negative: the jackknife's
        parts.append(from_influence(bias, influence - bias, sizes[k], unit="cosine", method=""))
    found, value = independent_difference(parts[0], times(parts[1], -1)), float(values[0])
    of_pairs = _variance_of_pairs(sketches, sizes, [float(norm[0]) for norm in norms], value)
    stderr = math.sqrt(max(found.stderr**2 - of_pairs, of_pairs))
    scaled = None if found.influence is None else found.influence * (stderr / found.stderr)
    return replace(
        found,
        value=value + found.value,
        stderr=stderr,
        influence=scaled,
        method="agreement of the gradients of two texts, unbiased norms",
        details={**_about(losses[0]), "sequences": sum(loss.num_sequences for loss in losses)},
    )


def _variance_of_pairs(
    sketches: Sequence[torch.Tensor], sizes: Sequence[torch.Tensor], norms: Sequence[float], value: float
) -> float:
    """Return the variance of the agreement's part that is quadratic in the noise, which a jackknife counts twice.

    It is `sum_ij <r_i, s_j>^2`, and within each text `c^2 sum_(i < j) <r_i, r_j>^2`, with c the agreement and r and s
    the clusters' deviations from the mean gradients across these, over the lengths of the gradients.
    """
    across = []
    for sketch, m, norm in zip(sketches, sizes, norms, strict=True):
        mean = sketch.sum(dim=0) / m.sum()
        off = sketch - m[:, None] * mean
        across.append((off - torch.outer(off @ mean, mean) / mean.square().sum()) / (m.sum() * math.sqrt(norm)))
    within = sum(float((off @ off.T).square().triu(1).sum()) for off in across)
    return float((across[0] @ across[1].T).square().sum()) + value**2 * within


def _contents(loss: MeanLoss, batches: Sequence[Mapping[str, Any]]) -> set[frozenset[int]]:
    """Return each document, or sequence, as the hashes of its sequences; nothing where there are no token ids."""
    hashes: list[int] = []
    for batch in batches:
        if not isinstance(batch.get("input_ids"), torch.Tensor):
            return set()
        labels, mask = batch["labels"], batch.get("attention_mask")
        ids, present = behind_masks(batch["input_ids"], None if loss.causal else labels, mask)
        if loss.causal:  # nothing is masked, and labels may be others than the tokens
            ids, present = torch.cat([ids, labels.cpu()], dim=1), torch.cat([present, present], dim=1)
        hashes += sequence_hashes(ids, present).tolist()
    found: dict[int, set[int]] = {}
    for cluster, key in zip(loss.parts.tolist(), hashes, strict=True):
        found.setdefault(cluster, set()).add(key)
    return {frozenset(each) for each in found.values()}


def _about(loss: MeanLoss) -> dict[str, Any]:
    return {**loss.details(0), "clusters": loss.clusters_name, "error_covers": "inputs and labels"}


def _sums(loss: MeanLoss, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (k, P): the sums of the clusters' gradients with weights (k, N); and (N,): their squared norms."""
    vectors = torch.zeros(len(weights), loss.num_parameters, dtype=loss.dtype, device=device_of(loss.model))
    squares = torch.zeros(weights.shape[1], dtype=torch.float64)
    for number, gradient in enumerate(loss.gradients_by_cluster()):
        squares[number] = inner(gradient, gradient)
        for vector, weight in zip(vectors, weights[:, number].tolist(), strict=True):
            vector.add_(gradient, alpha=weight)
    return vectors, squares


def _products(
    loss: MeanLoss, vectors: torch.Tensor, signs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (k, N): the inner products of vectors (k, P) and the clusters' gradients; with signs (P,), sketches too.

    The inner products of sketches (N, K) are those of the gradients in expectation over signs (Charikar et al. 2002).
    """
    rows, sketches = [], []
    for gradient in loss.gradients_by_cluster():
        rows.append([inner(vector, gradient) for vector in vectors])
        if signs is not None:
            folded = F.pad(gradient * signs, (0, -len(signs) % _SKETCH)).view(-1, _SKETCH)
            sketches.append(folded.sum(dim=0, dtype=torch.float64).cpu())
    return torch.tensor(rows, dtype=torch.float64).T, torch.stack(sketches) if sketches else vectors[:0]


def _without(parts: torch.Tensor, removed: torch.Tensor | None = None) -> torch.Tensor:
    """Return (1 + N,): the sum of parts (N,), then the sum without each cluster, with which `removed` goes."""
    total = parts.sum()
    return torch.cat([total[None], total - (parts if removed is None else removed)])


def _influence(values: torch.Tensor) -> torch.Tensor:
    """Return (N,): the influences of a value (1 + N,) by what it is without each cluster."""
    return (len(values) - 2) * (values[0] - values[1:])


def _squared_norm(m: torch.Tensor, q: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Return (1 + N,): the squared norm of the mean gradient, of all clusters and without each.

    It is the sum of <G_i, G_j> over the sum of m_i m_j, both over different clusters, given `|G_i|^2` and the products
    of G_i with the sum of all.
    """
    norm = (_without(t, 2 * t - q) - _without(q)) / (_without(m).square() - _without(m.square()))
    if len(m) < 3 or not bool((norm > 0).all()):
        raise IsolossError(
            f"the gradients of {len(m)} independent inputs are too few to tell the mean gradient from 0: take more "
            "sequences"
        )
    return norm
