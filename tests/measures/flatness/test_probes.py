"""Cotangents of the logits: their covariance by enumeration of all signs, and controls whose mean is what they say."""

import itertools

import torch
from torch.nn import functional as F

from isoloss.measures.flatness import probes
from isoloss.measures.flatness.capture import Decoder


def softmax(m, vocab, seed=0):
    logits = torch.randn(m, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits, logits.softmax(dim=-1)


def cotangents_of_all_signs(monkeypatch, root_p, counts):
    """Every cotangent that `integrated_` can give, (2^(m V), m, V)."""
    m, vocab = root_p.shape
    found = []
    for choice in itertools.product((-1, 1), repeat=m * vocab):
        left = [torch.tensor(choice).view(m, vocab)]

        def signs(shape, *_, left=left):
            taken, left[0] = left[0][: shape[0]], left[0][shape[0] :]
            return taken

        monkeypatch.setattr(probes, "random_signs", signs)
        found.append(probes.integrated_(root_p.clone(), counts, range(len(counts)), seed=0, probe=0))
    return torch.stack(found)


def test_roots_of_probabilities(monkeypatch):
    monkeypatch.setattr(probes, "_CHUNK", {"cpu": 8})  # several parts
    logits, p = softmax(5, 4)
    torch.testing.assert_close(probes.root_probabilities(logits), p.sqrt())
    assert probes.root_probabilities(logits.bfloat16()).dtype == torch.float32
    unchanged = logits.clone()
    probes.root_probabilities(logits)
    assert torch.equal(logits, unchanged)


def test_the_covariance_is_the_fishers(monkeypatch):
    """E[u_r u_s^T] is diag(p) - p p^T at one position and 0 between two."""
    monkeypatch.setattr(probes, "_CHUNK", {"cpu": 4})
    _, p = softmax(3, 4)
    u = cotangents_of_all_signs(monkeypatch, p.sqrt(), torch.tensor([1, 2])).flatten(1)
    expected = torch.block_diag(*(row.diag() - torch.outer(row, row) for row in p))
    torch.testing.assert_close(u.T @ u / len(u), expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(u.mean(dim=0), torch.zeros(12, dtype=torch.float64), rtol=0, atol=1e-14)


def test_observed_cotangents_are_signed_residuals(monkeypatch):
    _, p = softmax(3, 4)
    targets = torch.tensor([2, 0, 3])
    monkeypatch.setattr(probes, "random_signs", lambda shape, *_: torch.tensor([[1], [-1]])[: shape[0]])
    found = probes.observed_(p.sqrt(), targets, torch.tensor([1, 2]), range(2), seed=0)
    residual = p - F.one_hot(targets, 4)
    torch.testing.assert_close(found, residual * torch.tensor([[1], [1], [-1]]))


def test_signs_are_a_function_of_the_sequence_and_the_probe():
    cpu = torch.device("cpu")
    first = probes.random_signs((50, 40), cpu, 3, "probes", 7, 0)
    assert torch.equal(first, probes.random_signs((50, 40), cpu, 3, "probes", 7, 0))
    assert set(first.unique().tolist()) == {-1, 1}
    assert abs(float(first.double().mean())) < 4 / 2000**0.5
    for other in ((4, "probes", 7, 0), (3, "probes", 8, 0), (3, "probes", 7, 1)):
        assert not torch.equal(first, probes.random_signs((50, 40), cpu, *other))


def test_controls_have_mean_zero_over_all_signs_and_are_what_they_say(monkeypatch):
    _, p = softmax(3, 4, seed=1)
    draws = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 5, generator=draws, dtype=torch.float64) for n in (3, 4))
    decoder = Decoder(weight, None)
    rows = torch.tensor([0, 0, 2])  # the second sequence predicts nothing
    controls = probes.Controls(p.sqrt(), hidden, decoder, rows, 3)
    u = cotangents_of_all_signs(monkeypatch, p.sqrt(), torch.tensor([2, 0, 1]))
    found = torch.stack([controls.centred(one, one @ weight) for one in u])
    torch.testing.assert_close(found.mean(dim=0), torch.zeros(3, 4, dtype=torch.float64), rtol=0, atol=1e-12)
    assert float(found[:, 0].std(dim=0).min()) > 0.1
    assert not found[:, 2, 2:].any()  # one position has no pair
    assert not found[:, 1].any()
    # differences between two draws need no mean: squared norms of the decoder's gradient and of what is below
    with_one = F.pad(hidden, (0, 1), value=1.0)

    def plain(one):
        own = torch.einsum("rv,rd->rvd", one, with_one).square().sum(dim=(1, 2))
        below = (one @ weight).square().sum(dim=1)
        first, second, _ = one @ weight
        shared = weight.mean(dim=0)
        pairs = torch.stack([2 * first @ second, 2 * (first @ shared) * (second @ shared)])
        squares = torch.stack([torch.stack([x[:2].sum(), x[2:].sum()]) for x in (own, below)], dim=1)
        return torch.cat([squares, torch.stack([pairs, torch.zeros_like(pairs)])], dim=1)

    torch.testing.assert_close(found[1234][[0, 2]] - found[3001][[0, 2]], plain(u[1234]) - plain(u[3001]))
