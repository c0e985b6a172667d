"""All measures of flatness that are functions of a model and batches, and streams of batches for them."""

from functools import partial

import torch
from dense_curvature import batch_of

from isoloss.flatness import (
    empirical_fisher_trace,
    fisher_rao_norm,
    fisher_trace,
    hessian_trace,
    largest_eigenvalues,
    noise_sharpness,
    relative_flatness,
    sam_sharpness,
    spectral_density,
    weighted_fisher_trace,
)


def first_eigenvalue(*args, **options):
    return largest_eigenvalues(*args, **{"num_eigenvalues": 1, "rtol": 1e-8} | options)[0]


def first_moment(*args, **options):
    return spectral_density(*args, **{"num_steps": 3} | options).moment(1)


STREAMS = {
    "fisher": fisher_trace,
    "paper": partial(fisher_trace, method="paper", num_probes=2),
    "empirical": empirical_fisher_trace,
    "hessian": partial(hessian_trace, group_size=1),
    "published-code": partial(hessian_trace, method="published-code"),
    "weighted": weighted_fisher_trace,
    "fisher-rao": fisher_rao_norm,
    "sam": sam_sharpness,
}
BY_BATCH = ("published-code", "sam")  # whose samples are batches; of other streams they are clusters of sequences
PROBES = {"noise": noise_sharpness, "density": first_moment}  # whose samples are probes that each see all batches
# one of windows has no linear map at the end, and of whole batches there is one eigenvalue
MEASURES = {**STREAMS, **PROBES, "relative": relative_flatness, "eigenvalue": first_eigenvalue}
# one of each way through a model: rules, plain gradients, second derivatives, losses, and logits alone
WAYS = ("fisher", "paper", "hessian", "eigenvalue", "noise", "relative")


def stream(number, size, seed=0):
    """Batches whose sequences are a document each."""
    batches = [batch_of(size, seed=100 * seed + i) for i in range(number)]
    return [{**batch, "documents": torch.arange(size) + i * size} for i, batch in enumerate(batches)]


def unlabeled(sequences=3, seed=7):
    batch = batch_of(sequences, seed=seed)
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}
