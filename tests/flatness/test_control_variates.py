"""Cotangents of the logits: their covariance by enumeration of all signs, and controls whose mean is what they say."""

import itertools

import pytest
import torch
from plain_gradients import packed
from torch.nn import functional as F

from isoloss.flatness._ghost import controls
from isoloss.flatness._ghost.capture import Decoder


def softmax(m, vocab, seed=0):
    logits = torch.randn(m, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits, logits.softmax(dim=-1)


def cotangents_of_all_signs(monkeypatch, root_p, counts):
    """Every cotangent that `exact_labels_` can give, (2^(m V), m, V)."""
    m, vocab = root_p.shape
    found = []
    for choice in itertools.product((-1, 1), repeat=m * vocab):
        left = torch.tensor(choice)

        def signs(streams, *_, left=left):
            return packed(left.split([count for count, _ in streams]))

        monkeypatch.setattr(controls, "packed_probes", signs)
        found.append(controls.exact_labels_(root_p.clone(), counts, range(len(counts)), seed=0, probe=0))
    return torch.stack(found)


def test_roots_of_probabilities(monkeypatch):
    monkeypatch.setattr(controls, "_CHUNK", {"cpu": 8})  # several parts
    logits, p = softmax(5, 4)
    torch.testing.assert_close(controls.root_probabilities(logits), p.sqrt())
    assert controls.root_probabilities(logits.bfloat16()).dtype == torch.float32
    unchanged = logits.clone()
    controls.root_probabilities(logits)
    assert torch.equal(logits, unchanged)


def test_the_covariance_is_the_fishers(monkeypatch):
    """E[u_r u_s^T] is diag(p) - p p^T at one position and 0 between two."""
    monkeypatch.setattr(controls, "_CHUNK", {"cpu": 4})
    _, p = softmax(3, 3)
    u = cotangents_of_all_signs(monkeypatch, p.sqrt(), torch.tensor([1, 2])).flatten(1)
    expected = torch.block_diag(*(row.diag() - torch.outer(row, row) for row in p))
    torch.testing.assert_close(u.T @ u / len(u), expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(u.mean(dim=0), torch.zeros(9, dtype=torch.float64), rtol=0, atol=1e-14)


def test_observed_cotangents_are_signed_residuals(monkeypatch):
    _, p = softmax(3, 4)
    targets = torch.tensor([2, 0, 3])
    monkeypatch.setattr(controls, "packed_probes", lambda *_: packed(torch.tensor([1, 1, -1]).split([1, 2])))
    found = controls.given_labels_(p.sqrt(), targets, torch.tensor([1, 2]), range(2), seed=0)
    residual = p - F.one_hot(targets, 4)
    torch.testing.assert_close(found, residual * torch.tensor([[1], [1], [-1]]))


def test_signs_are_a_function_of_the_sequence_and_the_probe():
    cpu = torch.device("cpu")
    first = controls.rademacher((50, 40), cpu, 3, "probes", 7, 0)
    assert torch.equal(first, controls.rademacher((50, 40), cpu, 3, "probes", 7, 0))
    assert set(first.unique().tolist()) == {-1, 1}
    assert abs(float(first.double().mean())) < 4 / 2000**0.5
    for other in ((4, "probes", 7, 0), (3, "probes", 8, 0), (3, "probes", 7, 1), (3, "tail", 7, 0)):
        assert not torch.equal(first, controls.rademacher((50, 40), cpu, *other))


@pytest.mark.parametrize("counts", [[3, 0, 2], [8, 8]])
def test_signs_of_several_streams_are_each_streams_own_end_to_end(counts):
    cpu = torch.device("cpu")
    streams = [(count, ("s", number)) for number, count in enumerate(counts)]
    found = controls.unpacked_probes(controls.packed_probes(streams, cpu, 5)[0], counts)
    own = [controls.rademacher((count,), cpu, 5, "s", number) for number, count in enumerate(counts)]
    assert torch.equal(found, torch.cat(own))
    several = controls.packed_probes(streams, cpu, 5, copies=3)
    assert len({tuple(row.tolist()) for row in several}) == len(several) == 3


@pytest.mark.parametrize("chunk", [8, 60, 1 << 18])
def test_cotangents_do_not_depend_on_how_many_are_made_at_a_time(chunk, monkeypatch):
    _, p = softmax(31, 5)
    counts = torch.tensor([2, 0, 1, 28])
    expected = controls.exact_labels_(p.sqrt(), counts, range(3, 7), seed=2, probe=1)
    monkeypatch.setattr(controls, "_CHUNK", {"cpu": chunk})
    assert torch.equal(controls.exact_labels_(p.sqrt(), counts, range(3, 7), seed=2, probe=1), expected)
    alone = controls.exact_labels_(p.sqrt()[3:], torch.tensor([28]), range(6, 7), seed=2, probe=1)
    torch.testing.assert_close(alone, expected[3:])


@pytest.mark.parametrize(("chunk", "rows"), [(1 << 18, 256), (14, 7), (8, 4), (10, 3), (1, 1)])
def test_means_over_labels_do_not_depend_on_the_blocks(chunk, rows, monkeypatch):
    """The blocks divide the 7 positions and 12 ids, or do not."""
    _, p = softmax(7, 12)
    weight = torch.randn(12, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    monkeypatch.setattr(controls, "_CHUNK", {"cpu": chunk})
    monkeypatch.setattr(controls, "_ROWS", rows)
    above, below = controls.label_means(p.sqrt(), weight)
    for position, of_labels in enumerate(p):
        residuals = [of_labels - F.one_hot(torch.tensor(label), 12) for label in range(12)]
        own = sum(q * residual.square().sum() for q, residual in zip(of_labels, residuals, strict=True))
        passed = sum(q * (residual @ weight).square().sum() for q, residual in zip(of_labels, residuals, strict=True))
        torch.testing.assert_close(above[position], own, rtol=1e-12, atol=0)
        torch.testing.assert_close(below[position], passed, rtol=1e-12, atol=0)
    half = weight.bfloat16()
    narrow = controls.label_means(p.sqrt(), half)
    torch.testing.assert_close(narrow, controls.label_means(p.sqrt(), half.double()), rtol=1e-12, atol=0)


def test_controls_have_mean_zero_over_all_signs_and_are_what_they_say(monkeypatch):
    _, p = softmax(3, 3, seed=1)
    draws = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 5, generator=draws, dtype=torch.float64) for n in (3, 3))
    tails = torch.randn(
        2, 3, 3, 6, generator=draws, dtype=torch.float64
    )  # of two intermediates, other at each position
    decoder = Decoder(weight, weight[:, 0])
    rows = torch.tensor([0, 0, 2])  # the second sequence predicts nothing
    variates = controls.Controls(p.sqrt(), hidden, decoder, rows, 3)
    u = cotangents_of_all_signs(monkeypatch, p.sqrt(), torch.tensor([2, 0, 1]))
    intermediates = torch.einsum("arv,srvw->asrw", u, tails)

    def centered(place, *others):
        further = [(intermediates[o, 0], variates.squares(u[o], u[o] @ weight)) for o in others]
        return variates.centered(u[place], u[place] @ weight, list(intermediates[place]), further)

    # the square of the first intermediate has a mean over draws of both its own and other signs
    found = torch.stack([centered(place, len(u) - 1 - place, place ^ 123) for place in range(len(u))])
    torch.testing.assert_close(found.mean(dim=0), torch.zeros(3, 12, dtype=torch.float64), rtol=0, atol=1e-12)
    assert float(found[:, 0, [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]].std(dim=0).min()) > 0.1
    assert not found[:, :, 6].any()  # there is no third intermediate
    assert not found[:, 2, 2:7].any()  # one position has no pair
    assert not found[:, 1].any()
    # differences between two draws need no mean: squared norms of the weight's and bias' gradients and of what is below

    def plain(place):
        one = u[place]
        of_weight = torch.einsum("rv,rd->rvd", one, hidden).square().sum(dim=(1, 2))
        of_bias = one.square().sum(dim=1)
        passed = (one @ weight).square().sum(dim=1)
        first, second, _ = one @ weight
        shared = weight.mean(dim=0)
        pairs = [first @ second, (first @ shared) * (second @ shared), *(b[0] @ b[1] for b in intermediates[place])]
        pairs = 2 * torch.stack(pairs)
        squares = (torch.stack([x[:2].sum(), x[2:].sum()]) for x in (of_weight, passed, of_bias))
        above, below, bias = (x[:, None] for x in squares)
        return torch.cat([above, below, torch.stack([pairs, torch.zeros_like(pairs)]), bias], dim=1)

    both = [0, 2]
    difference = centered(123)[both] - centered(301)[both]
    torch.testing.assert_close(difference[:, [0, 1, 2, 3, 4, 5, 10]], plain(123) - plain(301))
    assert not difference[:, [6, 7, 8, 9, 11]].any()  # without further probes there is nothing for these
    norms = intermediates[:, 0].square().sum(dim=2)  # of the first intermediate, by draw and position
    by_sequence = torch.stack([norms[:, :2].sum(dim=1), norms[:, 2]], dim=1)
    torch.testing.assert_close(centered(9, 40, 77)[both, 7], by_sequence[9] - by_sequence[[40, 77]].mean(dim=0))
    plainly, further = [0, 1, 10], [8, 9, 11]
    torch.testing.assert_close(centered(9, 40, 77)[:, further], (centered(40) + centered(77))[:, plainly] / 2)
